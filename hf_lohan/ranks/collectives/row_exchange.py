"""Sends rows of tokens to the ranks that compute their experts, and brings back the experts' results.

All ranks call the experts of the layers in the same order. In each call all ranks first tell all others their numbers
of rows, so that both ends of later exchanges know the sizes. Then they exchange the rows, with the index of each
choice's token: a token with several choices at a rank is sent there once. Results come back for each choice.

With several nodes of several ranks, the rows for another node go to its rank with the sender's local number, once for
each token with choices in that node. That rank passes them on within its node.

Only computing threads use these lanes, and between two exchanges of a call they wait for no other rank, except in the
turns of `lent_experts`, which also have one order on all ranks. So no wait is circular.

A recomputation may be needed by some ranks only, because a rank may have kept its output. Ranks that are already in the
backward of the layer take part in the recomputation first, without rows, and then continue with their own call.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from hf_lohan.ranks.transport.failures import RanksDisagreeError
from hf_lohan.ranks.transport.lanes import RankLane, bytes_of
from hf_lohan.ranks.transport.links import Links

CALL_KINDS = ("forward", "recomputation", "backward")
IS_OF_TOKEN = (True, False, True)
"""Whether each of a call's tensors is equal for all choices of a token."""


@dataclass(frozen=True)
class ExpertCall:
    """One call of a layer's experts, equal on all ranks."""

    layer: int
    """Index among the layers with experts."""
    kind: int
    """Index in `CALL_KINDS`."""
    forward: int
    """The index of the forward among the forwards of a joint pass."""

    @property
    def is_repeat(self) -> bool:
        """Whether this is a recomputation, which only some ranks may need."""
        return CALL_KINDS[self.kind] == "recomputation"

    def __str__(self) -> str:
        return f"the {CALL_KINDS[self.kind]} of the experts of layer {self.layer} (forward {self.forward})"


@dataclass(frozen=True)
class CallOfRank:
    """A rank's part of a call."""

    call: ExpertCall
    flags: int
    """Bits for the caller's use."""
    num_rows: tuple[int, ...]
    """Number of the rank's choices of each expert."""


class ChosenRows(NamedTuple):
    """The rows of choices of experts, in the order of the choices."""

    place: Tensor
    """int64 [n]: the row of each choice in the tensors of tokens."""
    given: Sequence[Tensor]
    """Tensors with a row for each token, or for each choice [n, ...] (`IS_OF_TOKEN`)."""


class RowExchange:
    """One rank's side of the exchange, for its computing thread."""

    def __init__(self, links: Links) -> None:
        """All ranks make this together."""
        self._ranks = links.ranks
        self._all = links.open("tokens", carries="tokens", stops_compute=True)
        self._here = self._across = None
        if links.ranks.num_local > 1 and links.ranks.num_nodes > 1:
            self._here = links.open_here("tokens here", carries="tokens", stops_compute=True)
            self._across = links.open_across("tokens across", carries="tokens", stops_compute=True)

    def close(self) -> None:
        """Leave all later calls."""
        for lane in filter(None, (self._all, self._here, self._across)):
            lane.close()

    def next_call(self, own: CallOfRank, what: str) -> tuple[ExpertCall, dict[int, CallOfRank]]:
        """Synchronize with all other ranks. Returns the call that runs now, and the parts of the ranks that have rows
        in it. The call is ``own.call``, or an earlier recomputation of others. ``what`` names the rows for errors.
        Raises RanksDisagreeError if a rank is in another call."""
        numbers = (own.call.layer, own.call.kind, own.call.forward, own.flags, *own.num_rows)
        told = self._all.agree(what, struct.pack(f"<{len(numbers)}i", *numbers))
        parts = []
        for rank, packed in enumerate(told):
            layer, kind, forward, flags, *num_rows = struct.unpack(f"<{len(packed) // 4}i", packed)
            if len(num_rows) != len(own.num_rows):
                raise RanksDisagreeError(
                    f"rank {rank} sent {len(num_rows)} numbers of rows where rank {self._ranks.rank} expects "
                    f"{len(own.num_rows)} ({what}); load the same model on all ranks"
                )
            parts.append(CallOfRank(ExpertCall(layer, kind, forward), flags, tuple(num_rows)))
        repeats = [part.call for part in parts if part.call.is_repeat]
        now = min(repeats, key=lambda call: call.forward) if repeats else own.call
        here = {rank: part for rank, part in enumerate(parts) if part.call == now}
        for rank, part in enumerate(parts):
            is_in_backward = part.call.layer == now.layer and CALL_KINDS[part.call.kind] != "forward"
            if rank not in here and not (repeats and is_in_backward):
                raise RanksDisagreeError(
                    f"rank {min(here)} is in {now}, and rank {rank} is in {part.call}; all ranks must run the same "
                    "passes in the same order; look for a forward, a callback or a save that only some of them run"
                )
        return now, here

    def spread(
        self, rows: ChosenRows, choices: Sequence[Tensor], num: Sequence[Sequence[int]], what: str
    ) -> list[tuple[Sequence[int], ChosenRows]]:
        """Send ``choices`` of ``rows`` to each rank. ``num[i][j]``: number of choices that rank i sends to rank j, 0 if
        i = j. Returns (ranks, choices) pairs of received choices, which are on the host, one rank after the other."""
        own, near = self._ranks.rank, self._ranks.on_this_node
        if self._here is None or self._across is None:
            return [(self._all.members, _move(self._all, rows, choices, [of[own] for of in num], what))]
        of_near = _move(self._here, rows, [choices[rank] for rank in near], [num[rank][own] for rank in near], what)
        # The choices of this rank's counterparts for all ranks of this node.
        others = self._ranks.counterparts
        nodes = [self._ranks.of_rank(rank).on_this_node for rank in self._across.members]
        of_node = [torch.cat([choices[rank] for rank in node]) if node != near else torch.arange(0) for node in nodes]
        far = [sum(num[rank][to] for to in near) * (rank != own) for rank in self._across.members]
        passed = _move(self._across, rows, of_node, far, what)
        parts = torch.arange(len(passed.place)).split([num[rank][to] for rank in others for to in near])
        to_near = [torch.cat(parts[place :: len(near)]) for place in range(len(near))]
        sources = [[self._ranks.of_rank(other).on_this_node[place] for other in others] for place in range(len(near))]
        from_near = [sum(num[source][own] for source in of) for of in sources]
        of_far = _move(self._here, passed, to_near, from_near, what)
        return [(near, of_near), ([source for of in sources for source in of], of_far)]

    def return_results(self, results: Tensor, sizes: Sequence[int], own_sizes: Sequence[int], what: str) -> Tensor:
        """Send ``results`` [sum(sizes), ...] to the ranks, in their order. Returns the results of this rank's choices,
        [sum(own_sizes), ...], on the host, in the order of the ranks that sent them."""
        return _exchange(self._all, results, sizes, own_sizes, what)


def _move(lane: RankLane, rows: ChosenRows, choices: Sequence[Tensor], num: Sequence[int], what: str) -> ChosenRows:
    """Send choices of ``rows`` to the members of a lane, and return ``num`` choices from each member, on the host."""
    choices = [of.to(rows.place.device) for of in choices]
    tokens, of_choice = zip(*(torch.unique(rows.place[of], return_inverse=True) for of in choices), strict=True)
    index = _exchange(lane, torch.cat(of_choice).to(torch.int32), list(map(len, choices)), num, what).long()
    num_tokens = [int(of.max()) + 1 if len(of) else 0 for of in index.split(list(num))]
    first_tokens = torch.tensor(list(accumulate(num_tokens, initial=0))[:-1])
    given = []
    for tensor, is_of_token in zip(rows.given, IS_OF_TOKEN, strict=False):
        sent, sizes = (tokens, num_tokens) if is_of_token else (choices, num)
        given.append(_exchange(lane, tensor[torch.cat(tuple(sent))], list(map(len, sent)), sizes, what))
    return ChosenRows(index + first_tokens.repeat_interleave(torch.tensor(num)), given)


def _exchange(lane: RankLane, rows: Tensor, num: Sequence[int], num_of_members: Sequence[int], what: str) -> Tensor:
    """Send ``num`` of ``rows`` [n, ...] to each member of a lane. Returns the rows from each member, on the host."""
    sent = rows.detach().contiguous().cpu()
    received = sent.new_empty(sum(num_of_members), *sent.shape[1:])
    row_bytes = sent.shape[1:].numel() * sent.itemsize
    sizes, sizes_of_members = ([number * row_bytes for number in numbers] for numbers in (num, num_of_members))
    lane.exchange(bytes_of(sent), sizes, bytes_of(received), sizes_of_members, what)
    return received
