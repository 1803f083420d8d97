"""Where the rows of a call of a layer's experts are computed: all in this process, or each by the rank that owns its
expert, or by another rank of the owner's node.

The rows that one rank has for one expert are a *group*, which is a product of its own. So a group's result, and its
gradients of the expert's weights, do not depend on other ranks' rows, nor on the rank that computes them. An owner adds
the gradients of all groups in the order of the ranks that have the rows. Both together equal one process that computes
the ranks' batches one after the other, to the bit.

If the ranks of a node balance their rows, each call begins with an exchange of all numbers of rows. From these all
ranks compute which groups move (`shared_segments`), and the owners lend their experts (`lent_experts`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from hf_lohan.device import Device
from hf_lohan.experts.expert_schedule import Call
from hf_lohan.experts.lent_experts import Lending, LentExpert
from hf_lohan.experts.routing import Routing
from hf_lohan.planner import shared_segments
from hf_lohan.ranks import CallOfRank, ExpertCall, Links, Ranks, RanksDisagreeError, RowExchange

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
"""The groups that this process computes by expert, ascending, and then in rank order."""
ComputeGroups: TypeAlias = Callable[[Call, int, RowGroups, Sequence[LentExpert]], None]
"""Called with a call, the number of its forward, groups, whose results it makes, and the experts that this process
lends or borrows in the call."""


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


@dataclass
class BalancedRows:
    """The rows of experts in forwards so far, by rank. An index is the number of a rank."""

    owned: list[int]
    """The rows by the rank that owns their expert."""
    computed: list[int]
    """The rows by the rank that computed them."""
    most_owned: int = 0
    """The rows of the rank with the most in each forward of a layer, for which the others would wait."""
    most_computed: int = 0

    def add_forward(
        self, counts: Sequence[Sequence[int]], owners: Sequence[int], shared: Mapping[tuple[int, int], int]
    ) -> None:
        """Add a forward of a layer (`shared_segments`)."""
        owned, computed = [0] * len(counts), [0] * len(counts)
        for source, of_source in enumerate(counts):
            for expert, number in enumerate(of_source):
                owned[owners[expert]] += number
                computed[shared.get((expert, source), owners[expert])] += number
        self.owned = [sum(both) for both in zip(self.owned, owned, strict=True)]
        self.computed = [sum(both) for both in zip(self.computed, computed, strict=True)]
        self.most_owned += max(owned)
        self.most_computed += max(computed)


class ExpertPlaces(Protocol):
    """Knows which process computes which expert."""

    def own(self, layer: int, num_experts: int) -> Sequence[int]:
        """Return the numbers of the experts that this process computes, ascending."""

    def run(self, rows: CallRows, work: ComputeGroups) -> list[Tensor | None]:
        """Run one call. Returns the results, each [n, ...] in the order of the rows. None if it is not needed, or if
        there are no rows."""

    def add_gradient(self, total: Tensor | None, gradient: Tensor) -> Tensor:
        """Add a group's gradient of a weight to those of the earlier groups. May change ``total``."""

    @property
    def is_one(self) -> bool:
        """Whether this process computes all experts."""

    @property
    def lending(self) -> Lending | None:
        """What lends experts to other ranks of the node, and borrows theirs. None if each rank computes its own."""

    def rows_by_rank(self) -> BalancedRows | None:
        """Return the rows of all forwards so far. None if each rank computes the rows of its own experts, because it
        does not know those of the others."""

    def close(self) -> None:
        """Take no more rows of others."""


class AllHere:
    """The `ExpertPlaces` of a single process."""

    is_one = True
    lending = None

    def own(self, layer: int, num_experts: int) -> Sequence[int]:
        return range(num_experts)

    def run(self, rows: CallRows, work: ComputeGroups) -> list[Tensor | None]:
        groups = _groups_of(rows, range(len(rows.routed.counts)))
        work(rows.kind, rows.forward, groups, ())
        return [_joined(groups, index) for index in range(len(rows.needs))]

    def add_gradient(self, total: Tensor | None, gradient: Tensor) -> Tensor:
        assert total is None, "one process has one group for each expert"
        return gradient

    def rows_by_rank(self) -> None:
        return None

    def close(self) -> None:
        """Do nothing."""


@dataclass(eq=False)
class _Served:
    """Another rank's part of a call."""

    rank: int
    groups: RowGroups = field(default_factory=dict)


class _Division:
    """Which rank computes which groups of a call."""

    def __init__(self, owned: Sequence[Sequence[int]], shared: Mapping[tuple[int, int], int] | None = None) -> None:
        """``owned``: the experts of each rank. ``shared``: the groups that other ranks compute, by expert and rank."""
        self.owned = owned
        self._shared = shared or {}

    def experts(self, source: int, rank: int) -> Sequence[int]:
        """Return the experts, ascending, of which ``rank`` computes the rows of ``source``."""
        own = self.owned[rank]
        if not self._shared:
            return own
        come = [expert for (expert, of), by in self._shared.items() if of == source and by == rank]
        return sorted([*(expert for expert in own if (expert, source) not in self._shared), *come])

    def lent(self, ranks: Ranks, counts: Sequence[Sequence[int]]) -> list[LentExpert]:
        """Return the experts that this rank lends or borrows, ascending. ``counts`` [ranks][experts]."""
        owner_of = {expert: rank for rank, own in enumerate(self.owned) for expert in own}
        lent = []
        for expert in sorted({expert for expert, _ in self._shared}):
            owner = owner_of[expert]
            computed_by = tuple(
                self._shared.get((expert, source), owner) for source, of in enumerate(counts) if of[expert]
            )
            if ranks.rank == owner or ranks.rank in computed_by:
                num_rows = sum(of[expert] for of in counts)
                lent.append(LentExpert(expert, owner, ranks.rank, computed_by, num_rows))
        return lent


class OneOwnerEach:
    """The `ExpertPlaces` of one of several ranks. Rows go to the ranks that own their experts, or to ranks that borrow
    them. All ranks call the layers' experts in the same order."""

    is_one = False

    def __init__(
        self,
        links: Links,
        exchange: RowExchange,
        device: Device,
        owned: Sequence[Sequence[Sequence[int]]],
        lending: Lending | None = None,
        *,
        least_rows: int = 1,
    ) -> None:
        """``owned`` [layers][ranks]: the numbers of the experts of each rank, ascending. With ``lending``, the ranks of
        a node balance their rows, by groups of at least ``least_rows`` rows."""
        self._ranks = links.ranks
        self._exchange = exchange
        self._device = device
        self._owned = owned
        self._are_ranges = all(isinstance(own, range) for of_layer in owned for own in of_layer)
        self._scale = 1.0 / links.ranks.num_ranks
        self.lending = lending
        self._least_rows = least_rows
        self._rows = BalancedRows([0] * links.ranks.num_ranks, [0] * links.ranks.num_ranks)

    def own(self, layer: int, num_experts: int) -> Sequence[int]:
        return self._owned[layer][self._ranks.rank]

    def add_gradient(self, total: Tensor | None, gradient: Tensor) -> Tensor:
        # Multiply and add in two operations, as `sum_in_rank_order_` does.
        scaled = gradient.to(torch.float32) * self._scale
        return scaled if total is None else total.add_(scaled)

    def rows_by_rank(self) -> BalancedRows | None:
        return deepcopy(self._rows) if self.lending is not None else None

    def close(self) -> None:
        self._exchange.close()
        if self.lending is not None:
            self.lending.close()

    def run(self, rows: CallRows, work: ComputeGroups) -> list[Tensor | None]:
        call, own_rank = ExpertCall(rows.layer, _CALLS.index(rows.kind), rows.forward), self._ranks.rank
        division = _Division(self._owned[rows.layer])
        self._announce(call, rows, division)
        if self.lending is None:
            self._send(rows, division)
        what = f"the rows of {rows.name}"
        while True:
            now, ranks = self._exchange.next_call(call, what)
            is_own = now == call
            lent: Sequence[LentExpert] = ()
            if self.lending is not None:
                division, lent = self._divide(division.owned, ranks, rows if is_own else None)
                if is_own:
                    self._send(rows, division)
            num_tensors = len(rows.given) if is_own else 1
            for rank in ranks:
                if self._exchange.call_of(rank).flags & _HAS_NODE_ROWS:
                    self._pass_on(rank, num_tensors, what)
            served = [self._take(rank, division.experts(rank, own_rank), num_tensors, what) for rank in ranks]
            parts = {part.rank: part.groups for part in served}
            if is_own:
                parts[own_rank] = _groups_of(rows, division.experts(own_rank, own_rank))
            work(_CALLS[now.kind], now.forward, _in_rank_order(parts), lent)
            for part in served:
                self._return(part)
            if is_own:
                return self._results(rows, division, parts[own_rank])

    def _divide(
        self, owned: Sequence[Sequence[int]], ranks: Sequence[int], rows: CallRows | None
    ) -> tuple[_Division, list[LentExpert]]:
        """Return which rank computes which groups of the call that runs now, equal on all ranks, and the experts that
        this rank lends or borrows. ``ranks``: the other ranks with rows. ``rows``: those of this rank, if it has
        any."""
        num_experts = sum(map(len, owned))
        counts: list[Sequence[int]] = [(0,) * num_experts] * self._ranks.num_ranks
        for rank in ranks:
            counts[rank] = self._exchange.call_of(rank).num_rows
            if len(counts[rank]) != num_experts:
                raise RanksDisagreeError(
                    f"rank {rank} sent {len(counts[rank])} numbers of rows where rank {self._ranks.rank} expects "
                    f"{num_experts}; load the same model on all ranks"
                )
        if rows is not None:
            counts[self._ranks.rank] = rows.routed.counts
        owners = [rank for _, rank in sorted((expert, rank) for rank, own in enumerate(owned) for expert in own)]
        shared = shared_segments(counts, owners, self._ranks.num_local, self._least_rows)
        if rows is not None and rows.kind is Call.FORWARD:
            self._rows.add_forward(counts, owners, shared)
        division = _Division(owned, shared)
        return division, division.lent(self._ranks, counts)

    def _announce(self, call: ExpertCall, rows: CallRows, division: _Division) -> None:
        """Tell all other ranks of this rank's numbers of rows. Groups move only within nodes, so ``division`` before
        the moves tells which nodes get rows."""
        ranks, routed = self._ranks, rows.routed
        for rank in ranks.others:
            own = division.owned[rank]
            counts = [routed.counts[expert] for expert in own] if self.lending is None else routed.counts
            of_node = [division.owned[other] for other in ranks.of_rank(rank).on_this_node]
            is_chosen = any(routed.counts[expert] for of_rank in of_node for expert in of_rank)
            has_node_rows = rank in self._passing and is_chosen
            flags = _bits(rows.needs) | has_node_rows * _HAS_NODE_ROWS
            self._exchange.send_call(rank, CallOfRank(call, flags, tuple(counts)))

    @property
    def _passing(self) -> Sequence[int]:
        """The ranks of other nodes that pass this rank's rows on."""
        return self._ranks.counterparts if self._ranks.num_local > 1 else ()

    def _send(self, rows: CallRows, division: _Division) -> None:
        """Send this rank's rows to the ranks that compute them."""
        ranks = self._ranks
        choices = [_choices_of(rows.routed, division.experts(ranks.rank, rank)) for rank in range(ranks.num_ranks)]
        for rank in ranks.others:
            if (ranks.num_local == 1 or rank in ranks.on_this_node) and len(choices[rank]):
                self._exchange.send_rows(rank, self._packed(rows, choices[rank]))
        for rank in self._passing:
            of_node = [choices[other] for other in ranks.of_rank(rank).on_this_node]
            if any(map(len, of_node)):
                numbers = torch.tensor([len(of_rank) for of_rank in of_node], dtype=torch.int32)
                self._exchange.send_to_node(rank, [numbers, *self._packed(rows, torch.cat(of_node))])

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

    def _take(self, rank: int, experts: Sequence[int], num_tensors: int, what: str) -> _Served:
        """Take another rank's part of the call that runs now, of which this rank computes the rows for ``experts``."""
        call = self._exchange.take_call(rank)
        served = _Served(rank)
        counts = call.num_rows if self.lending is None else [call.num_rows[expert] for expert in experts]
        num_rows = sum(counts)
        if num_rows:
            of_choice = self._to_device(self._exchange.take_rows(rank, num_rows, what)).long()
            given = []
            for is_of_token in _IS_OF_TOKEN[:num_tensors]:
                sent = self._exchange.take_rows(rank, None if is_of_token else num_rows, what)
                given.append(self._to_device(sent)[of_choice] if is_of_token else self._to_device(sent))
            of_each = zip(*(tensor.split(list(counts)) for tensor in given), strict=True)
            needs = tuple(bool(call.flags >> bit & 1) for bit in range(max(1, num_tensors - 1)))
            served.groups.update(
                {
                    expert: [RowGroup(parts, needs)]
                    for expert, number, parts in zip(experts, counts, of_each, strict=True)
                    if number
                }
            )
        return served

    def _return(self, served: _Served) -> None:
        if served.groups:
            needs = next(iter(served.groups.values()))[0].needs
            made = [_joined(served.groups, index) for index in range(len(needs))]
            self._exchange.send_results(served.rank, [self._to_host(result) for result in made if result is not None])

    def _results(self, rows: CallRows, division: _Division, mine: RowGroups) -> list[Tensor | None]:
        """Return the results of this rank's rows, in their order."""
        found: list[list[Tensor]] = [[] for _ in rows.needs]
        order = []
        for rank in sorted(range(self._ranks.num_ranks), key=lambda rank: [*division.owned[rank][:1]]):
            choices = _choices_of(rows.routed, division.experts(self._ranks.rank, rank))
            order.append(choices)
            for index, is_needed in enumerate(rows.needs):
                if len(choices) and is_needed and rank == self._ranks.rank:
                    part = _joined(mine, index)
                    assert part is not None
                    found[index].append(part)
                elif len(choices) and is_needed:
                    taken = self._exchange.take_results(rank, len(choices), f"the results of {rows.name}")
                    found[index].append(self._to_device(taken))
        joined = [torch.cat(parts) if parts else None for parts in found]
        if self.lending is None and self._are_ranges:
            return joined
        places = self._to_device(torch.cat(order))
        return [part if part is None else torch.empty_like(part).index_copy_(0, places, part) for part in joined]

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device.torch_device)

    @staticmethod
    def _to_host(tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous().cpu()


def _choices_of(routed: Routing, experts: Sequence[int]) -> Tensor:
    """Return the indices of the sorted choices of these experts, which are ascending."""
    ends = routed.ends
    if isinstance(experts, range):
        return torch.arange(ends[experts.start], ends[experts.stop])
    return torch.cat([torch.arange(0), *(torch.arange(ends[expert], ends[expert + 1]) for expert in experts)])


def _groups_of(rows: CallRows, experts: Sequence[int]) -> RowGroups:
    """Return this process's rows for these experts."""
    ends = rows.routed.ends
    return {
        expert: [RowGroup(tuple(tensor[ends[expert] : ends[expert + 1]] for tensor in rows.given), rows.needs)]
        for expert in experts
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
