"""The experts of one module, computed as they come.

Rows are sorted by expert with the call that transformers makes, on the ids as they are, so that rows of one expert
stand in the same order as there. A group of a grouped product is one product on the CPU, so each expert can be computed
apart, in any order.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

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
"""(module of experts, rows [n, hidden] of one expert, its weights by their names in the module, each [1, ...]) to what
the expert makes of the rows, [n, hidden], before routing weights."""


class ForwardUnderWay(Protocol):
    """The forward that runs, or whose backward does."""

    @property
    def number(self) -> int:
        """Which of several forwards that share the model runs."""

    def enter_backward(self) -> None:
        """A backward begins, or goes on."""

    def take_part(self, number: int, part: ParamSlice, gradient: Tensor | None) -> None:
        """What the backward of the forward of that number has for one expert's part of a parameter is complete. None:
        zeros."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertParts:
    """What all modules of experts have in common."""

    ring: SlotRing
    loader: ExpertLoader
    compute: ComputeExpert
    forward_pass: Callable[[], ForwardUnderWay]
    next_router: NextRouter
    host_numbers: HostNumbers


class StreamedExperts:
    """A module's experts, each of which comes to a slot when rows are there for it."""

    def __init__(self, layer: int, module: nn.Module, blocks: Sequence[Block], parts: ExpertParts) -> None:
        """``layer``: its number among those with experts; ``blocks``: of each expert, by its number."""
        self._layer = layer
        self._module = weakref.ref(module)
        self._blocks = list(blocks)
        self._number = {block: expert for expert, block in enumerate(blocks)}
        self._parts = parts
        self.anchor = torch.empty(0, requires_grad=any(block.state_numel for block in blocks))
        """Has autograd record the operation also where neither rows nor routing need a gradient."""
        self._known_counts = KnownCounts()
        self.handle = next(_handles)
        """By which an operation, which takes numbers and tensors, names it."""
        _known[self.handle] = self

    @property
    def forward_number(self) -> int:
        """Of the forward that runs."""
        return self._parts.forward_pass().number

    def forward(self, rows: Tensor, top_k_weights: Tensor, top_k_index: Tensor) -> Tensor:
        """See `run_experts`."""
        loader, call = self._parts.loader, Call.AGAIN if is_in_backward() else Call.FORWARD
        is_few = call is Call.FORWARD and top_k_index.numel() < ALL_ROWS * len(self._blocks)
        expected = self._parts.next_router.expect(self._layer, rows, top_k_index.shape[-1]) if is_few else None
        routed = self._route(top_k_index, expected)
        sorted_rows = rows[routed.token]
        routed.arrive()
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
        """Each of ``experts``, to which the call was routed, in its slot while the caller computes with it: first those
        that are here, then in the order given, as far as that is the order in which they come."""
        for _ in experts:
            block, slot = self._parts.loader.acquire_any()
            try:
                yield self._number[block], slot
            finally:
                self._parts.ring.unpin(block)

    def _compute(self, rows: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        module = self._module()
        assert module is not None, "the model holds its modules"
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
        """Gradients of ``rows`` and of ``top_k_weights``, as far as they are needed; those of the weights go to the
        forward pass, of one expert after the other as they come, first those that the forward left in their slots.

        An expert without rows has a gradient of zeros, as part of a tensor that has one: it takes that step.
        """
        self._parts.forward_pass().enter_backward()
        routed, k = self._route(top_k_index), top_k_index.shape[-1]
        weights = top_k_weights.reshape(-1)
        dtype = torch.promote_types(self._blocks[0].master.working_dtype, weights.dtype)
        # Of `sum`, then of the indexing by `place`.
        spread = gradient.to(dtype).unsqueeze(1).expand(-1, k, -1).reshape(-1, gradient.shape[-1])
        spread = torch.zeros_like(spread).index_put_((routed.place,), spread, accumulate=True)
        in_order = rows[routed.token], weights[routed.order], spread
        routed.arrive()
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
                self._parts.forward_pass().take_part(forward_number, part, None)
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
        """``given``: the expert's rows, their routing weights, and the gradient of what they become."""
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
            self._parts.forward_pass().take_part(forward_number, part, of_part)
        return found.get(id(leaves[0])), found.get(id(leaves[1]))


def _gathered(like: Tensor, index: Tensor, parts: Sequence[Tensor | None]) -> Tensor:
    """The gradient of a tensor from those of its rows at ``index``, given expert by expert: as that of an indexing."""
    gradient = torch.zeros_like(like)
    found = [part for part in parts if part is not None]
    return gradient.index_put_((index,), torch.cat(found), accumulate=True) if found else gradient


def _weights_in(slot: Slot, block: Block) -> dict[str, Tensor]:
    """One expert's weights by their names in the module: views into its slot, of the form [1, ...]."""
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
    """Whose `StreamedExperts.handle` it is. Raises RuntimeError if they are gone."""
    found = _known.get(handle)
    if found is None:
        raise RuntimeError("the model is gone whose experts these are; keep it until its backward has run")
    return found
