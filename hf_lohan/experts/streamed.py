"""The experts of one module, which are computed in the order in which they are loaded.

Rows are sorted by expert with the same call as in transformers, so the rows of one expert have the same order. On the
CPU, a grouped product is one product for each group, so that experts can be computed separately and in any order.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from hf_lohan.compat.torch_private import is_in_backward
from hf_lohan.experts.expert_loader import ExpertLoader
from hf_lohan.experts.expert_schedule import ALL_ROWS, Call
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


class StreamedExperts:
    """A module's experts. An expert is loaded to a slot if rows are routed to it."""

    def __init__(self, layer: int, module: nn.Module, blocks: Sequence[Block], parts: ExpertParts) -> None:
        """``layer`` is the index among the layers with experts. ``blocks`` are the experts' blocks in their order."""
        self._layer = layer
        self._module = weakref.ref(module)
        self._blocks = list(blocks)
        self._number = {block: expert for expert, block in enumerate(blocks)}
        self._parts = parts
        self.anchor = torch.empty(0, requires_grad=any(block.state_numel for block in blocks))
        """An input that makes autograd record the operation even if rows and routing weights need no gradient."""
        self._known_counts = KnownCounts()
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
        expected = self._parts.next_router.expect(self._layer, rows, top_k_index.shape[-1]) if is_few else None
        routed = self._route(top_k_index, expected)
        sorted_rows = rows[routed.token]
        routed.wait_for_counts()
        if call is Call.FORWARD:
            loader.note_tokens(self._layer, routed.experts, routed.num_rows)
        loader.route(self._layer, routed.experts, num_rows=top_k_index.numel(), call=call)
        if expected is not None:
            loader.hint(self._layer + 1, most_chosen(routed.expected))
        of_each = dict(zip(routed.experts, routed.split(sorted_rows), strict=True))
        outputs: dict[int, Tensor] = {}
        for expert, slot in self._as_they_come(routed.experts):
            outputs[expert] = self._compute(of_each[expert], _weights_in(slot, self._blocks[expert]))
        if not outputs:
            return torch.zeros_like(rows)
        in_order = torch.cat([outputs[expert] for expert in routed.experts])
        weighted = in_order * top_k_weights.reshape(-1)[routed.order].unsqueeze(-1)
        in_place = weighted[routed.place]
        return in_place.view(*top_k_index.shape, rows.shape[-1]).sum(dim=1).to(rows.dtype)

    def _route(self, top_k_index: Tensor, expected_ends: Tensor | None = None) -> Routing:
        return Routing(top_k_index, len(self._blocks), self._parts.host_numbers, self._known_counts, expected_ends)

    def _as_they_come(self, experts: Sequence[int]) -> Iterator[tuple[int, Slot]]:
        """Yield each of ``experts`` with its slot, which is pinned while the caller computes. Experts in slots come
        first, the others in the order in which they are loaded."""
        for _ in experts:
            block, slot = self._parts.loader.acquire_any()
            try:
                yield self._number[block], slot
            finally:
                self._parts.ring.unpin(block)

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
        of_each = zip(routed.experts, *map(routed.split, in_order), strict=True)
        waiting = {expert: (of_rows, of_weights, of_output) for expert, of_rows, of_weights, of_output in of_each}
        made: dict[int, tuple[Tensor | None, Tensor | None]] = {}
        descending = routed.experts[::-1]
        num_rows = top_k_index.numel()
        self._parts.loader.route(self._layer, descending, num_rows=num_rows, call=Call.BACKWARD)
        for expert, slot in self._as_they_come(descending):
            made[expert] = self._backward_of(expert, slot, forward_number, waiting.pop(expert), needs)
        for expert in sorted(set(range(len(self._blocks))) - set(routed.experts), reverse=True):
            for part in _trained(self._blocks[expert]):
                self._parts.forward_pass().take_expert_gradient(forward_number, part, None)
        sorted_made = [made[expert] for expert in routed.experts]
        of_all_rows = _gathered(rows, routed.token, [of_rows for of_rows, _ in sorted_made]) if needs[0] else None
        of_all_weights = _gathered(weights, routed.order, [of_weights for _, of_weights in sorted_made])
        return of_all_rows, of_all_weights.view_as(top_k_weights) if needs[1] else None

    def _backward_of(
        self,
        expert: int,
        slot: Slot,
        forward_number: int,
        given: tuple[Tensor, Tensor, Tensor],
        needs: Sequence[bool],
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run one expert's backward. ``given`` has its rows, their routing weights, and the gradient of the weighted
        output."""
        rows, weights, gradient = given
        block = self._blocks[expert]
        with torch.enable_grad():
            leaves = [
                rows.detach().requires_grad_(needs[0]),
                weights.detach().requires_grad_(needs[1]),
            ]
            own = {name: weight.detach() for name, weight in _weights_in(slot, block).items()}
            for part in _trained(block):
                own[_name_in_module(part)].requires_grad_()
            made = self._compute(leaves[0], own) * leaves[1].unsqueeze(-1)
            wanted = [leaf for leaf in (*leaves, *own.values()) if leaf.requires_grad]
            found = dict(zip(map(id, wanted), torch.autograd.grad(made, wanted, gradient), strict=True))
        for part in _trained(block):
            of_part = found[id(own[_name_in_module(part)])]
            self._parts.forward_pass().take_expert_gradient(forward_number, part, of_part)
        return found.get(id(leaves[0])), found.get(id(leaves[1]))


def _gathered(like: Tensor, index: Tensor, parts: Sequence[Tensor | None]) -> Tensor:
    """Return the gradient of ``like`` from the experts' gradients ``parts`` of its rows at ``index``, in the same way
    as the backward of indexing."""
    gradient = torch.zeros_like(like)
    found = [part for part in parts if part is not None]
    return gradient.index_put_((index,), torch.cat(found), accumulate=True) if found else gradient


def _weights_in(slot: Slot, block: Block) -> dict[str, Tensor]:
    """Return views of one expert's weights in its slot, [1, ...], by their names in the module."""
    return {
        _name_in_module(part): slot.weights[part.start : part.stop].view(1, *part.shape[1:]) for part in block.slices
    }


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
    # With checkpointing, backward uses the graph of the first forward, whose number this is.
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
    weighted by ``top_k_weights`` [tokens, k]. Outputs and gradients equal those of transformers' `grouped_mm` to the
    bit."""
    output: Tensor = _experts(rows, top_k_weights, top_k_index, experts.anchor, experts.handle)
    return output
