"""The experts of one module, which are computed in the order in which they are loaded.

Rows are sorted by expert with the same call as in transformers, so the rows of one expert have the same order. On the
CPU, a grouped product is one product for each group, so that experts can be computed separately and in any order.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from hf_lohan.compat.torch_private import is_in_backward
from hf_lohan.experts.expert_loader import ExpertLoader
from hf_lohan.experts.expert_ranks import CallRows, ExpertPlaces, RowGroup, RowGroups
from hf_lohan.experts.expert_schedule import ALL_ROWS, Call
from hf_lohan.experts.lent_experts import LentExpert, in_turns
from hf_lohan.experts.next_router import NextRouter, most_chosen
from hf_lohan.experts.routing import HostNumbers, KnownCounts, Routing
from hf_lohan.model import Block, ParamSlice
from hf_lohan.weights import Slot, SlotRing

ComputeExpert: TypeAlias = Callable[[nn.Module, Tensor, Mapping[str, Tensor]], Tensor]
"""Takes a module of experts, one expert's rows [n, hidden], and its weights [1, ...] by their names in the module.
Returns the expert's output [n, hidden] before the multiplication by routing weights."""


class CurrentForward(Protocol):
    """The forward that runs, or whose backward runs."""

    @property
    def number(self) -> int:
        """The index of the running forward among the forwards of a joint pass."""

    def enter_backward(self) -> None:
        """Called when a backward begins or continues."""

    def take_expert_gradient(self, number: int, part: ParamSlice, gradient: Tensor | None) -> None:
        """Take one expert's part of a parameter's gradient in the backward of forward ``number``. None is zeros."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertParts:
    """Objects that all modules of experts share."""

    ring: SlotRing
    loader: ExpertLoader
    compute: ComputeExpert
    forward_pass: Callable[[], CurrentForward]
    next_router: NextRouter
    host_numbers: HostNumbers
    places: ExpertPlaces


class StreamedExperts:
    """A module's experts. An expert is loaded to a slot if rows are routed to it."""

    def __init__(self, layer: int, module: nn.Module, blocks: Sequence[Block], parts: ExpertParts) -> None:
        """``layer`` is the index among the layers with experts. ``blocks`` are the experts' blocks in their order."""
        self._layer = layer
        self._module = weakref.ref(module)
        self._blocks = list(blocks)
        self._number = {block: expert for expert, block in enumerate(blocks)}
        self._parts = parts
        own = parts.places.own(layer, len(self._blocks))
        self._number_at_loader = {expert: number for number, expert in enumerate(own)}
        """Maps an expert to its index among the experts that this process computes, as the loader needs it."""
        self._name = blocks[0].name.rpartition(".")[0]
        self.anchor = torch.empty(0, requires_grad=any(block.state_numel for block in blocks))
        """An input that makes autograd record the operation even if rows and routing weights need no gradient."""
        self._known_counts = KnownCounts()
        self._hints: list[int] | None = None
        """The experts that the next layer will probably use, until the loader knows them."""
        self.handle = next(_handles)
        """Number of this object, because an operation takes only numbers and tensors."""
        _known[self.handle] = self

    @property
    def forward_number(self) -> int:
        """The number of the running forward."""
        return self._parts.forward_pass().number

    def forward(self, rows: Tensor, top_k_weights: Tensor, top_k_index: Tensor) -> Tensor:
        """Run the forward of `run_experts`."""
        loader, call = self._parts.loader, Call.AGAIN if is_in_backward() else Call.FORWARD
        is_few = call is Call.FORWARD and top_k_index.numel() < ALL_ROWS * len(self._blocks)
        may_hint = is_few and self._parts.places.is_one  # a rank does not know the rows of other ranks
        expected = self._parts.next_router.expect(self._layer, rows, top_k_index.shape[-1]) if may_hint else None
        routed = self._route(top_k_index, expected)
        sorted_rows = rows[routed.token]
        routed.wait_for_counts()
        if call is Call.FORWARD:
            loader.note_tokens(self._layer, routed.experts, routed.num_rows)
        self._hints = None if expected is None else most_chosen(routed.expected)
        (in_order,) = self._run(call, self.forward_number, routed, (sorted_rows,), (True,))
        if in_order is None:
            return torch.zeros_like(rows)
        weighted = in_order * top_k_weights.reshape(-1)[routed.order].unsqueeze(-1)
        in_place = weighted[routed.place]
        return in_place.view(*top_k_index.shape, rows.shape[-1]).sum(dim=1).to(rows.dtype)

    def _route(self, top_k_index: Tensor, expected_ends: Tensor | None = None) -> Routing:
        return Routing(top_k_index, len(self._blocks), self._parts.host_numbers, self._known_counts, expected_ends)

    def _run(
        self, call: Call, forward: int, routed: Routing, given: tuple[Tensor, ...], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """Run a call with inputs ``given`` [n, ...], sorted by expert. Returns the results, [n, ...] each, or None."""
        rows = CallRows(
            kind=call,
            forward=forward,
            layer=self._layer,
            name=self._name,
            routed=routed,
            given=given,
            needs=tuple(needs),
        )
        return self._parts.places.run(rows, self._work)

    def _work(self, call: Call, forward: int, groups: RowGroups, lent: Sequence[LentExpert]) -> None:
        """Compute the results of all groups. Lent experts are computed in their turns, and in backward in reverse
        order. Other experts are computed while this rank would wait for other ranks. Of these, experts in slots are
        first, and then loaded experts in the order of their arrival."""
        loader, lending, is_back = self._parts.loader, self._parts.places.lending, call is Call.BACKWARD
        lent = in_turns(lent[::-1] if is_back else lent, gives_gradients=is_back and any(map(_trained, self._blocks)))
        is_shared, own_lent = {item.expert for item in lent}, [item.expert for item in lent if item.is_own]
        alone = [expert for expert in groups if expert not in is_shared][:: -1 if is_back else 1]
        num_rows = sum(len(group.given[0]) for expert in alone for group in groups[expert])
        num_rows += sum(item.num_rows for item in lent if item.is_own)
        numbers = [self._number_at_loader[expert] for expert in (*own_lent, *alone)]
        loader.route(self._layer, numbers, num_rows=num_rows, call=call)
        if self._hints is not None:
            loader.hint(self._layer + 1, self._hints)
            self._hints = None
        compute = partial(self._run_backward, forward) if is_back else self._run_forward
        num_left, but = len(alone), {self._blocks[expert] for expert in own_lent}

        def compute_one(block: Block, slot: Slot) -> None:
            try:
                deque(compute(self._number[block], slot.weights, groups[self._number[block]]), 0)
            finally:
                self._parts.ring.unpin(block)

        for _ in self._take_turns(lent, groups, compute):
            assert lending is not None, "an expert is lent"
            while num_left and not lending.is_over:
                if (found := loader.acquire_arrived(but=but)) is None:
                    lending.wait_a_moment()
                else:
                    num_left -= 1
                    compute_one(*found)
            lending.wait()
        for _ in range(num_left):
            compute_one(*loader.acquire_any())
        if is_back:
            for expert in sorted(set(range(len(self._blocks))) - {*alone, *own_lent}, reverse=True):
                for part in _trained(self._blocks[expert]):
                    self._parts.forward_pass().take_expert_gradient(forward, part, None)

    def _take_turns(
        self, lent: Sequence[LentExpert], groups: RowGroups, compute: Callable[..., Iterator[int]]
    ) -> Iterator[None]:
        """Lend and borrow experts, turn by turn. Yields before each step that needs all ranks to have ended a half."""
        lending = self._parts.places.lending
        own: Iterator[int] = iter(())
        needs: int | None = None
        with ExitStack() as pinned:
            for turn in range(1 + max((item.turns[-1] for item in lent), default=-1)):
                assert lending is not None, "an expert is lent"
                for item in (item for item in lent if item.is_own and item.first_turn == turn):
                    yield
                    block = self._blocks[item.expert]
                    slot = self._parts.loader.acquire(block)
                    pinned.callback(self._parts.ring.unpin, block)
                    lending.lend(slot.weights[: block.numel])
                    own = compute(item.expert, slot.weights, groups.get(item.expert, ()), item)
                lending.end_half(f"the lent experts of {self._name}")
                if needs is None:
                    needs = next(own, None)
                borrowed = [item for item in lent if turn in item.own_turns]
                if borrowed:
                    yield
                for item in borrowed:
                    weights = lending.borrow(item, self._blocks[item.expert])
                    pairs = zip(groups[item.expert], item.own_turns, strict=True)
                    deque(compute(item.expert, weights, [group for group, of in pairs if of == turn], item), 0)
                lending.end_half(f"the borrowed experts of {self._name}")
                if needs == turn:
                    yield
                    needs = next((other for other in own if other != turn), None)
                if needs is None:
                    pinned.close()

    def _run_forward(
        self, expert: int, weights: Tensor, groups: Sequence[RowGroup], _lent: LentExpert | None = None
    ) -> Iterator[int]:
        """Compute groups of an expert. Yields nothing."""
        own = _weights_in(weights, self._blocks[expert])
        with torch.no_grad():
            for group in groups:
                group.made = (self._compute(group.given[0], own),)
        yield from ()

    def _compute(self, rows: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        module = self._module()
        assert module is not None, "the model keeps its modules alive"
        return self._parts.compute(module, rows, weights)

    def backward(
        self,
        forward_number: int,
        gradient: Tensor,
        rows: Tensor,
        top_k_weights: Tensor,
        top_k_index: Tensor,
        *,
        needs: Sequence[bool],
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of ``rows`` and of ``top_k_weights`` if they are needed. Gradients of experts' weights
        are passed to the forward pass, expert by expert.

        An expert without rows has a gradient of zeros, because other parts of its tensor have a gradient.
        """
        self._parts.forward_pass().enter_backward()
        routed, k = self._route(top_k_index), top_k_index.shape[-1]
        weights = top_k_weights.reshape(-1)
        dtype = torch.promote_types(self._blocks[0].master.working_dtype, weights.dtype)
        # The backward of `sum`, then of the indexing by `place`.
        spread = gradient.to(dtype).unsqueeze(1).expand(-1, k, -1).reshape(-1, gradient.shape[-1])
        spread = torch.zeros_like(spread).index_put_((routed.place,), spread, accumulate=True)
        in_order = rows[routed.token], weights[routed.order], spread
        routed.wait_for_counts()
        of_rows, of_weights = self._run(Call.BACKWARD, forward_number, routed, in_order, needs)
        return (
            _gathered(rows, routed.token, of_rows) if needs[0] else None,
            _gathered(weights, routed.order, of_weights).view_as(top_k_weights) if needs[1] else None,
        )

    def _run_backward(
        self, forward: int, expert: int, weights: Tensor, groups: Sequence[RowGroup], lent: LentExpert | None = None
    ) -> Iterator[int]:
        """Run the backward of an expert's groups. Gradients of a borrowed expert go to its owner. Gradients of any
        other expert are summed over all groups, in the order of the ranks that have the rows, and passed on. If a
        borrower computes the next group, yields the turn that must be over first."""
        block, lending, parts = self._blocks[expert], self._parts.places.lending, _trained(self._blocks[expert])
        own = (self._backward_of(block, weights, group) for group in groups)
        if lending is not None and lent is not None and not lent.is_own:
            for gradients in own:
                lending.give_gradient(block, gradients)
            return
        totals: dict[ParamSlice, Tensor] = {}
        ready: deque[dict[ParamSlice, Tensor]] = deque()
        for borrowed in lent.borrowed if lent is not None else [None] * len(groups):
            if borrowed is None:
                gradients = ready.pop() if ready else next(own)
            elif parts:
                ready.extend(islice(own, 1 - len(ready)))  # computed while the borrower computes
                yield borrowed[1]
                assert lending is not None
                gradients = lending.take_gradient(borrowed[0], block, parts)
            for part in parts:
                totals[part] = self._parts.places.add_gradient(totals.get(part), gradients[part])
        for part in parts:
            self._parts.forward_pass().take_expert_gradient(forward, part, totals.pop(part))

    def _backward_of(self, block: Block, in_slot: Tensor, group: RowGroup) -> dict[ParamSlice, Tensor]:
        """Run the backward of one expert for a group, which has rows, their routing weights, and the gradients of the
        weighted outputs. Returns the gradients of the expert's weights."""
        (rows, weights, gradient), group.given = group.given, ()
        with torch.enable_grad():
            leaves = [
                leaf.detach().requires_grad_(is_needed)
                for leaf, is_needed in zip((rows, weights), group.needs, strict=True)
            ]
            own = {name: weight.detach() for name, weight in _weights_in(in_slot, block).items()}
            for part in _trained(block):
                own[_name_in_module(part)].requires_grad_()
            made = self._compute(leaves[0], own) * leaves[1].unsqueeze(-1)
            wanted = [leaf for leaf in (*leaves, *own.values()) if leaf.requires_grad]
            found = dict(zip(map(id, wanted), torch.autograd.grad(made, wanted, gradient), strict=True))
        group.made = found.get(id(leaves[0])), found.get(id(leaves[1]))
        return {part: found[id(own[_name_in_module(part)])] for part in _trained(block)}


def _gathered(like: Tensor, index: Tensor, found: Tensor | None) -> Tensor:
    """Return the gradient of ``like`` from the gradients of its rows at ``index``, in the same way as the backward of
    indexing. None if there are no rows."""
    gradient = torch.zeros_like(like)
    return gradient if found is None else gradient.index_put_((index,), found, accumulate=True)


def _weights_in(flat: Tensor, block: Block) -> dict[str, Tensor]:
    """Return views of one expert's flat weights, [1, ...], by their names in the module."""
    return {_name_in_module(part): flat[part.start : part.stop].view(1, *part.shape[1:]) for part in block.slices}


def _name_in_module(part: ParamSlice) -> str:
    return part.name.rpartition(".")[2]


def _trained(block: Block) -> list[ParamSlice]:
    return [part for part in block.trainable_slices if part.parameter.requires_grad]


_handles = itertools.count()
_known: weakref.WeakValueDictionary[int, StreamedExperts] = weakref.WeakValueDictionary()


def experts_of(handle: int) -> StreamedExperts:
    """Return the experts with this `StreamedExperts.handle`. Raises RuntimeError if they were garbage collected."""
    found = _known.get(handle)
    if found is None:
        raise RuntimeError(
            "the model of these experts was deleted; keep a reference to the model until its backward has run"
        )
    return found


# `lohan::experts` is one operation for all experts of a layer, opaque to autograd. If the weights were leaves of the
# layer's graph, checkpointing would load each expert three times, and the order of gradients would depend on the order
# of loads. The operation's backward needs only its inputs.


@torch.library.custom_op("lohan::experts", mutates_args=())
def _experts(rows: Tensor, top_k_weights: Tensor, top_k_index: Tensor, anchor: Tensor, handle: int) -> Tensor:
    return experts_of(handle).forward(rows, top_k_weights, top_k_index)


@_experts.register_fake
def _fake(rows: Tensor, top_k_weights: Tensor, top_k_index: Tensor, anchor: Tensor, handle: int) -> Tensor:
    return torch.empty_like(rows)


def _set_up(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor, int], output: Tensor) -> None:
    rows, top_k_weights, top_k_index, _, ctx.handle = inputs
    ctx.save_for_backward(rows, top_k_weights, top_k_index)
    # The number of the first forward, because with checkpointing backward uses the graph of that forward.
    ctx.of_forward = experts_of(ctx.handle).forward_number


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
    rows, top_k_weights, top_k_index = ctx.saved_tensors
    of_rows, of_weights = experts_of(ctx.handle).backward(
        ctx.of_forward, gradient, rows, top_k_weights, top_k_index, needs=ctx.needs_input_grad[:2]
    )
    return of_rows, of_weights, None, None, None


_experts.register_autograd(_backward, setup_context=_set_up)


def run_experts(experts: StreamedExperts, rows: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run ``rows`` [tokens, hidden] through the experts ``top_k_index`` [tokens, k] of each row, and sum the outputs
    weighted by ``top_k_weights`` [tokens, k]. Outputs and gradients are bitwise equal to those of transformers'
    `grouped_mm`."""
    output: Tensor = _experts(rows, top_k_weights, top_k_index, experts.anchor, experts.handle)
    return output
