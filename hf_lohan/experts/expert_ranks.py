"""Decides which process computes an expert's rows in a call of a layer: this process, if it computes all rows, the rank
that owns the expert, or another rank of the owner's node.

The rows that one rank has for one expert are a *group*. Each group is computed by its own matrix products. So a group's
result, and its gradients of the expert's weights, do not depend on other ranks' rows, nor on the rank that computes
them. An owner adds the gradients of all groups in the order of the ranks that have the rows. So the results are bitwise
equal to those of one process that computes the ranks' batches one after another.

If the ranks of a node balance their rows, each call begins with an exchange of all numbers of rows. From these numbers
all ranks compute which groups move (`shared_segments`), and the owners lend their experts (`lent_experts`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from hf_lohan.costs import shared_segments
from hf_lohan.device import Device
from hf_lohan.experts.expert_schedule import Call
from hf_lohan.experts.lent_experts import Lending, LentExpert
from hf_lohan.experts.routing import Routing
from hf_lohan.ranks import IS_OF_TOKEN, CallOfRank, ChosenRows, ExpertCall, Links, Ranks, RowExchange

_CALLS = (Call.FORWARD, Call.AGAIN, Call.BACKWARD)
"""The calls in the order of `CALL_KINDS`."""


@dataclass(eq=False)
class RowGroup:
    """One rank's rows for one expert."""

    given: tuple[Tensor, ...]
    """Tensors [n, ...] that the rank gave: its rows, and in backward also their routing weights and the gradients of
    the weighted outputs."""
    needs: tuple[bool, ...]
    """Whether the rank needs each result."""
    made: tuple[Tensor | None, ...] = ()
    """The results, [n, ...] each. A result is None if it is not needed."""


RowGroups: TypeAlias = dict[int, list[RowGroup]]
"""The groups that this process computes, by expert in ascending order. Groups of an expert are in rank order."""
ComputeGroups: TypeAlias = Callable[[Call, int, RowGroups, Sequence[LentExpert]], None]
"""Makes the results of groups. It takes the kind of the call, the number of the forward, the groups, and the experts
that this process lends or borrows in the call."""


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
    """Numbers of rows of experts in forwards so far. Lists are indexed by rank."""

    owned: list[int]
    """Rows of the experts that each rank owns."""
    computed: list[int]
    """Rows that each rank computed."""
    most_owned: int = 0
    """The maximum rows that a rank owns in a layer's forward, summed over all forwards. All ranks would wait for it."""
    most_computed: int = 0

    def add_forward(
        self, counts: Sequence[Sequence[int]], owners: Sequence[int], shared: Mapping[tuple[int, int], int]
    ) -> None:
        """Add a forward of a layer. ``shared`` is a result of `shared_segments`."""
        owned, computed = [0] * len(counts), [0] * len(counts)
        for source, of_source in enumerate(counts):
            for expert, number in enumerate(of_source):
                owned[owners[expert]] += number
                computed[shared.get((expert, source), owners[expert])] += number
        self.owned = [sum(both) for both in zip(self.owned, owned, strict=True)]
        self.computed = [sum(both) for both in zip(self.computed, computed, strict=True)]
        self.most_owned += max(owned)
        self.most_computed += max(computed)


class ExpertPlaces(ABC):
    """Knows which process computes which expert."""

    is_one = False
    """Whether this process computes all experts."""
    lending: Lending | None = None
    """Lends experts to other ranks of the node, and borrows theirs. None if each rank computes its own experts."""

    @abstractmethod
    def own(self, layer: int, num_experts: int) -> Sequence[int]:
        """Return the indices of the experts that this process computes, in ascending order."""

    @abstractmethod
    def run(self, rows: CallRows, work: ComputeGroups) -> list[Tensor | None]:
        """Run one call. Returns the results, each [n, ...] in the order of the rows. A result is None if it is not
        needed, or if there are no rows."""

    @abstractmethod
    def add_gradient(self, total: Tensor | None, gradient: Tensor) -> Tensor:
        """Add a group's gradient of a weight to ``total``, the sum of the earlier groups. May change ``total``."""

    def rows_by_rank(self) -> BalancedRows | None:
        """Return the rows of all forwards so far. None if each rank computes its own experts, because it does not know
        the rows of other ranks."""
        return None

    def close(self) -> None:  # noqa: B027
        """Leave all later calls."""


class AllHere(ExpertPlaces):
    """The `ExpertPlaces` of a single process."""

    is_one = True

    def own(self, layer: int, num_experts: int) -> Sequence[int]:
        return range(num_experts)

    def run(self, rows: CallRows, work: ComputeGroups) -> list[Tensor | None]:
        groups = _groups_of(rows, range(len(rows.routed.counts)))
        work(rows.kind, rows.forward, groups, ())
        return [_joined(groups, index) for index in range(len(rows.needs))]

    def add_gradient(self, total: Tensor | None, gradient: Tensor) -> Tensor:
        assert total is None, "one process has one group for each expert"
        return gradient


class _Division:
    """The division of a call's groups among ranks."""

    def __init__(
        self,
        heads: Mapping[int, CallOfRank],
        num_ranks: int,
        owners: Sequence[int],
        share: Callable[[Sequence[Sequence[int]], Sequence[int]], Mapping[tuple[int, int], int]],
    ) -> None:
        """``heads``: the calls of the ranks that have rows. ``owners``: the rank of each expert. ``share`` takes the
        numbers of rows and the owners, and returns the result of `shared_segments`."""
        self.heads = heads
        self.counts = [heads[rank].num_rows if rank in heads else (0,) * len(owners) for rank in range(num_ranks)]
        """[ranks][experts]: the number of rows of each group."""
        self._owners = owners
        self._shared = share(self.counts, owners)
        self._by = [
            [self._shared.get((expert, source), owner) for expert, owner in enumerate(owners)]
            for source in range(num_ranks)
        ]
        """[ranks][experts]: the rank that computes each group."""
        self.num_sent = [[0] * num_ranks for _ in range(num_ranks)]
        """[ranks][ranks]: the number of choices that each rank sends to each other rank."""
        for source, (by, of_source) in enumerate(zip(self._by, self.counts, strict=True)):
            for rank, number in zip(by, of_source, strict=True):
                self.num_sent[source][rank] += number * (rank != source)

    def experts(self, source: int, rank: int) -> list[int]:
        """Return the experts for which ``rank`` computes rows of ``source``, ascending."""
        of_source = zip(self._by[source], self.counts[source], strict=True)
        return [expert for expert, (by, number) in enumerate(of_source) if by == rank and number]

    def lent(self, ranks: Ranks) -> list[LentExpert]:
        """Return the experts that ranks of this node lend each other, ascending."""
        lent = []
        for expert in sorted({expert for expert, _ in self._shared}):
            if (owner := self._owners[expert]) in ranks.on_this_node:
                rows = [(by[expert], of[expert]) for by, of in zip(self._by, self.counts, strict=True) if of[expert]]
                computed_by, numbers = zip(*rows, strict=True)
                lent.append(LentExpert(expert, owner, ranks.rank, computed_by, sum(numbers)))
        return lent


class OneOwnerEach(ExpertPlaces):
    """The `ExpertPlaces` of one of several ranks. Rows go to the ranks that own their experts, or to ranks that borrow
    them. All ranks call the layers' experts in the same order."""

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
        """``owned`` [layers][ranks]: the indices of the experts of each rank, ascending. With ``lending``, the ranks of
        a node balance their rows. They move only groups of at least ``least_rows`` rows."""
        self._ranks = links.ranks
        self._exchange = exchange
        self._device = device
        self._owned = owned
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

    def run(self, rows: CallRows, work: ComputeGroups) -> list[Tensor | None]:
        call, own_rank = ExpertCall(rows.layer, _CALLS.index(rows.kind), rows.forward), self._ranks.rank
        flags = sum(1 << bit for bit, is_needed in enumerate(rows.needs) if is_needed)
        while True:
            own_part = CallOfRank(call, flags, tuple(rows.routed.counts))
            now, heads = self._exchange.next_call(own_part, f"the rows of {rows.name}")
            owners = sorted((expert, rank) for rank, own in enumerate(self._owned[rows.layer]) for expert in own)
            division = _Division(heads, self._ranks.num_ranks, [rank for _, rank in owners], partial(self._share, now))
            # In a recomputation of other ranks this rank has no rows.
            given = rows.given if now == call else rows.given[:1]
            groups = self._spread(rows, given, division)
            own_groups = _groups_of(rows, division.experts(own_rank, own_rank))
            groups |= {(expert, own_rank): group for expert, (group,) in own_groups.items()}
            by_expert: RowGroups = {}
            for expert, source in sorted(groups):
                by_expert.setdefault(expert, []).append(groups[expert, source])
            work(_CALLS[now.kind], now.forward, by_expert, division.lent(self._ranks))
            num_results = max(1, len(given) - 1)
            results = [self._returned(index, given[index], rows, groups, division) for index in range(num_results)]
            if now == call:
                return results

    def _share(
        self, now: ExpertCall, counts: Sequence[Sequence[int]], owners: Sequence[int]
    ) -> Mapping[tuple[int, int], int]:
        if self.lending is None:
            return {}
        shared = shared_segments(counts, owners, self._ranks.num_local, self._least_rows)
        if _CALLS[now.kind] is Call.FORWARD:
            self._rows.add_forward(counts, owners, shared)
        return shared

    def _spread(self, rows: CallRows, given: Sequence[Tensor], division: _Division) -> dict[tuple[int, int], RowGroup]:
        """Exchange the rows of a call. Returns the groups of other ranks that this rank computes, by expert and
        rank."""
        own, token = self._ranks.rank, rows.routed.token
        choices = [
            _choices_of(rows.routed, division.experts(own, rank) if rank != own else ())
            for rank in range(self._ranks.num_ranks)
        ]
        any_choice = torch.empty_like(token).scatter_(0, token, torch.arange(len(token), device=token.device))
        sent, groups = ChosenRows(any_choice[token], given), {}
        for sources, come in self._exchange.spread(sent, choices, division.num_sent, f"the rows of {rows.name}"):
            place, on_device = self._to_device(come.place), map(self._to_device, come.given)
            tensors = [t[place] if is_of_token else t for t, is_of_token in zip(on_device, IS_OF_TOKEN, strict=False)]
            keys = [(expert, rank) for rank in sources if rank != own for expert in division.experts(rank, own)]
            of_keys = (tensor.split([division.counts[rank][expert] for expert, rank in keys]) for tensor in tensors)
            for (expert, rank), *parts in zip(keys, *of_keys, strict=True):
                needs = tuple(bool(division.heads[rank].flags >> bit & 1) for bit in range(max(1, len(given) - 1)))
                groups[expert, rank] = RowGroup(tuple(parts), needs)
        return groups

    def _returned(
        self, index: int, like: Tensor, rows: CallRows, groups: Mapping[tuple[int, int], RowGroup], division: _Division
    ) -> Tensor | None:
        """Exchange result ``index`` of all groups. Returns the result of this rank's rows, in the shape of ``like``;
        None if it is not needed, or if there are no rows."""
        own, num = self._ranks.rank, division.num_sent
        needing = [rank for rank, head in division.heads.items() if head.flags >> index & 1]
        if not needing:
            return None
        made = {rank: [groups[expert, rank].made[index] for expert in division.experts(rank, own)] for rank in needing}
        come = self._exchange.return_results(
            torch.cat(
                [like[:0], *(part for rank in needing if rank != own for part in made[rank] if part is not None)]
            ),
            [num[rank][own] if rank in needing else 0 for rank in range(self._ranks.num_ranks)],
            num[own] if own in needing else [0] * self._ranks.num_ranks,
            f"the results of {rows.name}",
        )
        if own not in needing or not len(like):
            return None
        order = [*self._ranks.others, own]
        places = torch.cat([_choices_of(rows.routed, division.experts(own, rank)) for rank in order])
        parts = [self._to_device(come), *(part for part in made[own] if part is not None)]
        return torch.empty_like(like).index_copy_(0, places.to(like.device), torch.cat(parts))

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device.torch_device)


def _choices_of(routed: Routing, experts: Sequence[int]) -> Tensor:
    """Return the indices of the sorted choices of ``experts``, which are ascending."""
    ends = routed.ends
    return torch.cat([torch.arange(0), *(torch.arange(ends[expert], ends[expert + 1]) for expert in experts)])


def _groups_of(rows: CallRows, experts: Sequence[int]) -> RowGroups:
    ends = rows.routed.ends
    return {
        expert: [RowGroup(tuple(tensor[ends[expert] : ends[expert + 1]] for tensor in rows.given), rows.needs)]
        for expert in experts
        if ends[expert] < ends[expert + 1]
    }


def _joined(groups: RowGroups, index: int) -> Tensor | None:
    """Concatenate result ``index`` of one rank's groups, by expert. None if it is not needed."""
    made = [part for of in groups.values() for group in of if (part := group.made[index]) is not None]
    return torch.cat(made) if made else None
