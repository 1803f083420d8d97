"""Sends rows of tokens to the ranks that own their experts, and brings back what the experts made of them.

All ranks call the experts of the layers in the same order. In each call every rank sends a head to every other rank,
with the number of its choices of each of the receiver's experts, and then the rows of the tokens that made them. A
token with several choices there is sent once. An owner returns a result for each choice. If the ranks of a node
balance their rows, heads have the numbers of all experts, and rows follow when all ranks know them.

With several nodes of several ranks, the rows for another node go to its rank with the sender's local number, once for
each token with choices in that node. That rank passes them on to the owners, over memory or sockets of its node.

No rank is more than one call ahead, because it waits for the heads of all others, so a rank holds the rows of at most
one call of each rank in addition to its own.

A recomputation may be needed by some ranks only, because a rank may have kept its output. Ranks that are already in
the backward of the layer serve the recomputation first, and have no rows in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hf_lohan.ranks.transport.failures import RanksDisagreeError
from hf_lohan.ranks.transport.links import Links
from hf_lohan.ranks.transport.messages import Channel, Kind, PayloadReader

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32)
"""Types of rows and of indices. A message has the index of one."""
CALL_KINDS = ("forward", "recomputation", "backward")
_KINDS = (Kind.EXPERT_CALL, Kind.EXPERT_ROWS, Kind.EXPERT_RESULTS, Kind.EXPERT_NODE_ROWS)


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
    """Number of the rank's choices of each expert of the receiver, or of each expert of the layer if the ranks of a
    node balance their rows."""


class RowExchange:
    """One rank's side of the exchange. The computing thread calls all methods except `close`."""

    def __init__(self, links: Links) -> None:
        """All ranks make this before any of them calls an expert."""
        self._links = links
        self._calls: dict[int, deque[CallOfRank]] = {rank: deque() for rank in links.ranks.others}
        """The calls of each other rank that this rank has not served. The links' lock guards these four."""
        self._rows: dict[int, deque[Tensor]] = {rank: deque() for rank in links.ranks.others}
        self._results: dict[int, deque[Tensor]] = {rank: deque() for rank in links.ranks.others}
        self._node_rows: dict[int, deque[Tensor]] = {rank: deque() for rank in links.ranks.counterparts}
        links.set_handler(Kind.EXPERT_CALL, self._on_call)
        links.set_handler(Kind.EXPERT_ROWS, partial(self._on_rows, self._rows))
        links.set_handler(Kind.EXPERT_RESULTS, partial(self._on_rows, self._results))
        links.set_handler(Kind.EXPERT_NODE_ROWS, partial(self._on_rows, self._node_rows))

    def close(self) -> None:
        """Ignore later messages."""
        for kind in _KINDS:
            self._links.set_handler(kind, lambda _peer, _numbers, _payload: None)

    # Sending.

    def send_call(self, rank: int, call: CallOfRank) -> None:
        """Tell another rank of this rank's part of a call. Rows may follow."""
        name = call.call
        numbers = (name.layer, name.kind, name.forward, call.flags)
        counts = torch.tensor(call.num_rows, dtype=torch.int64).numpy().tobytes()
        self._links.send(rank, Kind.EXPERT_CALL, *numbers, payload=counts, channel=Channel.TOKENS)

    def send_rows(self, rank: int, rows: Sequence[Tensor]) -> None:
        """Send this rank's rows of a call. Each tensor [n, ...] is contiguous and on the host. There are none without
        choices, and if the rows go through another rank of the receiver's node."""
        self._send(rank, Kind.EXPERT_ROWS, rows, self._links.ranks.rank)

    def send_results(self, rank: int, results: Sequence[Tensor]) -> None:
        """Send the results of a rank's rows, in the order of its rows. For tensors see `send_rows`."""
        self._send(rank, Kind.EXPERT_RESULTS, results, self._links.ranks.rank)

    def send_to_node(self, rank: int, rows: Sequence[Tensor]) -> None:
        """Send rows for all owners of another node to its rank ``rank``. For tensors see `send_rows`."""
        self._send(rank, Kind.EXPERT_NODE_ROWS, rows, self._links.ranks.rank)

    def pass_on(self, source: int, rank: int, rows: Sequence[Tensor]) -> None:
        """Give rows of another node's rank ``source`` to their owner, a rank of this node or this rank itself."""
        if rank != self._links.ranks.rank:
            self._send(rank, Kind.EXPERT_ROWS, rows, source)
            return
        with self._links.lock:
            self._rows[source].extend(rows)
            self._links.notify()

    def _send(self, rank: int, kind: Kind, tensors: Sequence[Tensor], source: int) -> None:
        for tensor in tensors:
            numbers = (source, _DTYPES.index(tensor.dtype), *tensor.shape[1:])
            self._links.send(rank, kind, *numbers, payload=tensor, channel=Channel.TOKENS)

    # Receiving.

    def next_call(self, own: ExpertCall, what: str) -> tuple[ExpertCall, list[int]]:
        """Wait until every other rank is in a call. Return the call that runs now, and the other ranks that take part
        in it with rows. It is ``own``, or a recomputation of others that this rank serves first. ``what`` names the
        rows for errors. Raises RanksDisagreeError if a rank is in another call."""
        self._links.wait_for(
            lambda: all(self._calls.values()),
            what,
            peers=lambda: [rank for rank, calls in self._calls.items() if not calls],
        )
        with self._links.lock:
            heads = {rank: calls[0].call for rank, calls in self._calls.items()}
        repeats = [call for call in (own, *heads.values()) if call.is_repeat]
        now = min(repeats, key=lambda call: call.forward) if repeats else own
        for rank, call in heads.items():
            is_in_backward = call.layer == now.layer and CALL_KINDS[call.kind] != "forward"
            if call != now and not (repeats and is_in_backward):
                raise RanksDisagreeError(
                    f"rank {self._links.ranks.rank} is in {own}, and rank {rank} is in {call}; all ranks must run the "
                    "same passes in the same order; look for a forward, a callback or a save that only some of them run"
                )
        return now, [rank for rank, call in heads.items() if call == now]

    def call_of(self, rank: int) -> CallOfRank:
        """Return what `take_call` will return."""
        with self._links.lock:
            return self._calls[rank][0]

    def take_call(self, rank: int) -> CallOfRank:
        """Return the rank's part of the call that runs now, after `next_call`."""
        with self._links.lock:
            return self._calls[rank].popleft()

    def take_rows(self, rank: int, num_rows: int | None, what: str) -> Tensor:
        """Return the next tensor [num_rows, ...] of the rank's rows, on the host. Waits for it. None is any number."""
        return self._take(self._rows, rank, num_rows, what, self._giver(rank))

    def take_node_rows(self, rank: int, num_rows: int | None, what: str) -> Tensor:
        """Return the next tensor that another node's rank gave this rank for the owners of this node. See
        `take_rows`."""
        return self._take(self._node_rows, rank, num_rows, what, rank)

    def take_results(self, rank: int, num_rows: int, what: str) -> Tensor:
        """Return the next tensor [num_rows, ...] of results of this rank's rows, on the host. Waits for it."""
        return self._take(self._results, rank, num_rows, what, rank)

    def _giver(self, source: int) -> int:
        """Return the rank from which the rows of ``source`` come."""
        ranks = self._links.ranks
        if source in ranks.on_this_node:
            return source
        passing = ranks.rank_at(ranks.node, source % ranks.num_local)
        return source if passing == ranks.rank else passing

    def _take(
        self, tensors: dict[int, deque[Tensor]], rank: int, num_rows: int | None, what: str, giver: int
    ) -> Tensor:
        self._links.wait_for(lambda: tensors[rank], what, peers=[giver])
        with self._links.lock:
            taken = tensors[rank].popleft()
        if num_rows is not None and len(taken) != num_rows:
            raise RanksDisagreeError(
                f"rank {rank} sent {len(taken)} rows where rank {self._links.ranks.rank} expects {num_rows} ({what}); "
                "load the same model on all ranks"
            )
        return taken

    # Called by receiving threads.

    def _on_call(self, peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        layer, kind, forward, flags = numbers
        counts = torch.frombuffer(bytearray(payload.bytes()), dtype=torch.int64).tolist() if payload is not None else []
        call = CallOfRank(ExpertCall(layer, kind, forward), flags, tuple(counts))
        with self._links.lock:
            self._calls[peer].append(call)
            self._links.notify()

    def _on_rows(
        self,
        tensors: dict[int, deque[Tensor]],
        peer: int,
        numbers: tuple[int, ...],
        payload: PayloadReader | None,
    ) -> None:
        assert payload is not None
        source, dtype, shape = numbers[0], _DTYPES[numbers[1]], numbers[2:]
        landing = torch.empty(payload.num_bytes, dtype=torch.uint8)
        payload.read_into(landing)
        with self._links.lock:
            tensors[source].append(landing.view(dtype).view(-1, *shape))
            self._links.notify()
