"""Where the rows of a call of a layer's experts are computed: all in this process, or each by the rank that owns its
expert.

The rows that one rank has for one expert are a *group*, which is a product of its own. So a group's result, and its
gradients of the expert's weights, do not depend on other ranks' rows. An owner adds the gradients of all ranks in rank
order. Both together equal one process that computes the ranks' batches one after the other, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from hf_lohan.device import Device
from hf_lohan.experts.expert_schedule import Call
from hf_lohan.experts.routing import Routing
from hf_lohan.planner import owned_experts
from hf_lohan.ranks import CallOfRank, ExpertCall, Links, RowExchange

_IS_OF_TOKEN = (True, False, True)
"""Which of `CallRows.given` are equal for all choices of a token."""
_HAS_NODE_ROWS = 1 << 7
"""The flag of a call whose sender has rows for the receiver's node, which follow."""
_CALLS = (Call.FORWARD, Call.AGAIN, Call.BACKWARD)
"""The calls in the order of `CALL_KINDS`."""


@dataclass(eq=False)
class RowGroup:
    """One rank's rows for one expert."""

    given: tuple[Tensor, ...]
    """Tensors [n, ...] that the rank gave: its rows, and in backward also their routing weights and the gradients of
    the weighted outputs."""
    needs: tuple[bool, ...]
    """Which results the rank needs."""
    made: tuple[Tensor | None, ...] = ()
    """The results, [n, ...] each. None if it is not needed."""


RowGroups: TypeAlias = dict[int, list[RowGroup]]
"""The groups of this process's experts by expert, ascending, and then in rank order."""
ComputeGroups: TypeAlias = Callable[[Call, int, RowGroups], None]
"""Called with a call, the number of its forward, and groups, whose results it makes."""


@dataclass(frozen=True, kw_only=True)
class CallRows:
    """One call of a layer's experts, with this process's rows."""

    kind: Call
    forward: int
    layer: int
    name: str
    """Name of the layer's experts, for errors."""
    routed: Routing
    given: tuple[Tensor, ...]
    """Tensors [n, ...] for the choices, sorted by expert: the rows, and in backward also their routing weights and the
    gradients of the weighted outputs. All choices of a token have the same row and the same gradient."""
    needs: tuple[bool, ...]


class ExpertPlaces(Protocol):
    """Knows which process computes which expert."""

    def own(self, layer: int, num_experts: int) -> range:
        """Return the numbers of the experts that this process computes."""

    def run(self, rows: CallRows, work: ComputeGroups) -> list[Tensor | None]:
        """Run one call. Returns the results, each [n, ...] in the order of the rows. None if it is not needed, or if
        there are no rows."""

    def add_gradient(self, total: Tensor | None, gradient: Tensor) -> Tensor:
        """Add a group's gradient of a weight to those of the earlier groups. May change ``total``."""

    @property
    def is_one(self) -> bool:
        """Whether this process computes all experts."""

    def close(self) -> None:
        """Take no more rows of others."""


class AllHere:
    """The `ExpertPlaces` of a single process."""

    is_one = True

    def own(self, layer: int, num_experts: int) -> range:
        return range(num_experts)

    def run(self, rows: CallRows, work: ComputeGroups) -> list[Tensor | None]:
        groups = _groups_of(rows, range(len(rows.routed.counts)))
        work(rows.kind, rows.forward, groups)
        return [_joined(groups, index) for index in range(len(rows.needs))]

    def add_gradient(self, total: Tensor | None, gradient: Tensor) -> Tensor:
        assert total is None, "one process has one group for each expert"
        return gradient

    def close(self) -> None:
        """Do nothing."""


@dataclass(eq=False)
class _Served:
    """Another rank's part of a call."""

    rank: int
    num_rows: tuple[int, ...]
    groups: RowGroups = field(default_factory=dict)


class OneOwnerEach:
    """The `ExpertPlaces` of one of several ranks. Rows go to the ranks that own their experts. All ranks call the
    layers' experts in the same order."""

    is_one = False

    def __init__(self, links: Links, exchange: RowExchange, device: Device) -> None:
        self._ranks = links.ranks
        self._exchange = exchange
        self._device = device
        self._scale = 1.0 / links.ranks.num_ranks

    def own(self, layer: int, num_experts: int) -> range:
        return owned_experts(num_experts, layer, self._ranks.num_ranks)[self._ranks.rank]

    def add_gradient(self, total: Tensor | None, gradient: Tensor) -> Tensor:
        # Multiply and add in two operations, as `sum_in_rank_order_` does.
        scaled = gradient.to(torch.float32) * self._scale
        return scaled if total is None else total.add_(scaled)

    def close(self) -> None:
        self._exchange.close()

    def run(self, rows: CallRows, work: ComputeGroups) -> list[Tensor | None]:
        call = ExpertCall(rows.layer, _CALLS.index(rows.kind), rows.forward)
        owned = owned_experts(len(rows.routed.counts), rows.layer, self._ranks.num_ranks)
        self._send(call, rows, owned)
        own = owned[self._ranks.rank]
        what = f"the rows of {rows.name}"
        while True:
            now, ranks = self._exchange.next_call(call, what)
            is_own = now == call
            num_tensors = len(rows.given) if is_own else 1
            for rank in ranks:
                if self._exchange.call_of(rank).flags & _HAS_NODE_ROWS:
                    self._pass_on(rank, num_tensors, what)
            served = [self._take(rank, own, num_tensors, what) for rank in ranks]
            parts = {part.rank: part.groups for part in served}
            if is_own:
                parts[self._ranks.rank] = _groups_of(rows, own)
            work(_CALLS[now.kind], now.forward, _in_rank_order(parts))
            for part in served:
                self._return(part)
            if is_own:
                return self._results(rows, owned, parts[self._ranks.rank])

    def _send(self, call: ExpertCall, rows: CallRows, owned: Sequence[range]) -> None:
        """Send this rank's part of a call to all others."""
        ranks, routed = self._ranks, rows.routed
        choices = [torch.arange(routed.ends[of.start], routed.ends[of.stop]) for of in owned]
        to_nodes = {
            rank: [choices[owner] for owner in ranks.of_rank(rank).on_this_node]
            for rank in (ranks.counterparts if ranks.num_local > 1 else ())
        }
        for rank in ranks.others:
            counts = tuple(routed.counts[owned[rank].start : owned[rank].stop])
            goes_directly = ranks.num_local == 1 or rank in ranks.on_this_node
            sent = self._packed(rows, choices[rank]) if goes_directly and len(choices[rank]) else []
            has_node_rows = any(map(len, to_nodes.get(rank, ())))
            flags = _bits(rows.needs) | has_node_rows * _HAS_NODE_ROWS
            self._exchange.send_call(rank, CallOfRank(call, flags, counts), sent)
        for rank, of_owners in to_nodes.items():
            if any(map(len, of_owners)):
                numbers = torch.tensor([len(of_owner) for of_owner in of_owners], dtype=torch.int32)
                self._exchange.send_to_node(rank, [numbers, *self._packed(rows, torch.cat(of_owners))])

    def _packed(self, rows: CallRows, choices: Tensor) -> list[Tensor]:
        """Return what is sent for some of the sorted choices: the index of each choice's token among the sent tokens,
        and then `CallRows.given`, once for each token where all its choices have the same."""
        choices = choices.to(rows.routed.token.device)
        tokens, of_choice = torch.unique(rows.routed.token[choices], return_inverse=True)
        one_choice = torch.empty_like(tokens).scatter_(0, of_choice, choices)  # any choice of each token
        packed = [
            tensor[one_choice] if is_of_token else tensor[choices]
            for tensor, is_of_token in zip(rows.given, _IS_OF_TOKEN, strict=False)
        ]
        return [self._to_host(tensor) for tensor in (of_choice.to(torch.int32), *packed)]

    def _pass_on(self, source: int, num_tensors: int, what: str) -> None:
        """Give the rows that a rank of another node sent for this node to their owners."""
        take, owners = self._exchange.take_node_rows, self._ranks.on_this_node
        numbers = take(source, len(owners), what).tolist()
        of_choice = take(source, sum(numbers), what)
        given = [
            take(source, None if is_of_token else sum(numbers), what) for is_of_token in _IS_OF_TOKEN[:num_tensors]
        ]
        ends = list(accumulate(numbers, initial=0))
        for owner, (first, last) in zip(owners, pairwise(ends), strict=True):
            if first < last:
                tokens, of_own_choice = torch.unique(of_choice[first:last].long(), return_inverse=True)
                parts = [
                    tensor[tokens] if is_of_token else tensor[first:last].contiguous()
                    for tensor, is_of_token in zip(given, _IS_OF_TOKEN, strict=False)
                ]
                self._exchange.pass_on(source, owner, [of_own_choice.to(torch.int32), *parts])

    def _take(self, rank: int, own: range, num_tensors: int, what: str) -> _Served:
        """Take another rank's part of the call that runs now."""
        call = self._exchange.take_call(rank)
        served = _Served(rank, call.num_rows)
        num_rows = sum(call.num_rows)
        if num_rows:
            of_choice = self._to_device(self._exchange.take_rows(rank, num_rows, what)).long()
            given = []
            for is_of_token in _IS_OF_TOKEN[:num_tensors]:
                sent = self._exchange.take_rows(rank, None if is_of_token else num_rows, what)
                given.append(self._to_device(sent)[of_choice] if is_of_token else self._to_device(sent))
            of_each = zip(*(tensor.split(call.num_rows) for tensor in given), strict=True)
            needs = tuple(bool(call.flags >> bit & 1) for bit in range(max(1, num_tensors - 1)))
            served.groups.update(
                {
                    expert: [RowGroup(parts, needs)]
                    for expert, number, parts in zip(own, call.num_rows, of_each, strict=True)
                    if number
                }
            )
        return served

    def _return(self, served: _Served) -> None:
        if served.groups:
            needs = next(iter(served.groups.values()))[0].needs
            made = [_joined(served.groups, index) for index in range(len(needs))]
            self._exchange.send_results(served.rank, [self._to_host(result) for result in made if result is not None])

    def _results(self, rows: CallRows, owned: Sequence[range], mine: RowGroups) -> list[Tensor | None]:
        """Return the results of this rank's rows, in their order."""
        ends = rows.routed.ends
        found: list[list[Tensor]] = [[] for _ in rows.needs]
        for rank in sorted(range(self._ranks.num_ranks), key=lambda rank: owned[rank].start):
            num_rows = ends[owned[rank].stop] - ends[owned[rank].start]
            for index, is_needed in enumerate(rows.needs):
                if num_rows and is_needed and rank == self._ranks.rank:
                    part = _joined(mine, index)
                    assert part is not None
                    found[index].append(part)
                elif num_rows and is_needed:
                    taken = self._exchange.take_results(rank, num_rows, f"the results of {rows.name}")
                    found[index].append(self._to_device(taken))
        return [torch.cat(parts) if parts else None for parts in found]

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device.torch_device)

    @staticmethod
    def _to_host(tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous().cpu()


def _groups_of(rows: CallRows, own: range) -> RowGroups:
    """Return this process's rows for the experts ``own``."""
    ends = rows.routed.ends
    return {
        expert: [RowGroup(tuple(tensor[ends[expert] : ends[expert + 1]] for tensor in rows.given), rows.needs)]
        for expert in own
        if ends[expert] < ends[expert + 1]
    }


def _in_rank_order(parts: Mapping[int, RowGroups]) -> RowGroups:
    joined: RowGroups = {}
    for expert in sorted({expert for groups in parts.values() for expert in groups}):
        joined[expert] = [group for rank in sorted(parts) for group in parts[rank].get(expert, ())]
    return joined


def _joined(groups: RowGroups, index: int) -> Tensor | None:
    """Return one rank's result ``index``, by expert; None if it is not needed."""
    found = [group.made[index] for of_expert in groups.values() for group in of_expert]
    made = [part for part in found if part is not None]
    return torch.cat(made) if made else None


def _bits(needs: Sequence[bool]) -> int:
    return sum(1 << bit for bit, is_needed in enumerate(needs) if is_needed)
