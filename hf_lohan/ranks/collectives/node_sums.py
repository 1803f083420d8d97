"""Sends one node's sum of a chunk's gradient to the rank of another node that owns the chunk.

The owner asks all nodes at once, and adds their sums in the order of nodes, piece by piece. A piece waits in its
connection until the pieces of earlier nodes are added. This fixes the order for each element, and needs memory for one
piece of each node. A piece may be quantized, and its head then names the codec. Of the gradient of a table of which
only rows were used, the rows that are not zero are sent, which `pack_rows` marks. A node answers owners in the order of
their requests. No deadlock is possible, because the first node's pieces wait for no other node, the second node's
pieces wait only for the first node's, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hf_lohan.ranks.collectives.block_codec import GRADIENTS_INT4, GRADIENTS_INT8
from hf_lohan.ranks.collectives.coded_lane import MeasuredCodec
from hf_lohan.ranks.collectives.rank_order_sum import (
    SUM_PIECE_NUMEL,
    CodedValues,
    Gradient,
    NodeSum,
    numel_of,
    overlap,
    part_of_gradient,
    sum_gradients_,
)
from hf_lohan.ranks.transport.links import Links
from hf_lohan.ranks.transport.messages import Channel, Kind, PayloadReader
from hf_lohan.threads import FirstFailure, WorkThread

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types of gradients. A message has the index of one."""
_CODECS = (GRADIENTS_INT8, GRADIENTS_INT4)
"""A piece has one of `DTYPES`, or is encoded by one of these codecs. Its head has the index in the two lists joined."""
ChunkName = tuple[int, int]
"""(step, key) of a chunk."""


@dataclass(frozen=True, slots=True)
class TableRows:
    """The rows of a table in a chunk of its gradient."""

    width: int
    before: int
    """Elements of the chunk's first row that are in an earlier chunk."""

    def cut(self, start: int, numel: int) -> tuple[int, int, int]:
        """Return, for the elements of the chunk from ``start`` on, the number of rows that have some of them, the
        elements of the first of these rows that come earlier, and those of the last that come later."""
        lead = (self.before + start) % self.width
        num_rows = -(-(lead + numel) // self.width)
        return num_rows, lead, num_rows * self.width - lead - numel

    def message_bytes(self, start: int, numel: int, num_values: int, itemsize: int) -> int:
        """Return the bytes of `pack_rows`: ``num_values`` elements, and a bit for each row."""
        return num_values * itemsize + -(-self.cut(start, numel)[0] // 8)

    def pack_rows(self, values: Tensor, start: int) -> Tensor:
        """Return a message, uint8, with those rows of ``values`` [numel] whose bits are not all zero."""
        num_rows, lead, rest = self.cut(start, values.numel())
        table = values.new_zeros(num_rows, self.width)
        table.view(-1)[lead : lead + values.numel()] = values
        is_sent = table.view(_BITS[table.itemsize]).ne(0).any(1)
        rows = table[is_sent].view(-1)
        rows = rows[lead * bool(is_sent[0]) : rows.numel() - rest * bool(is_sent[-1])]
        marks = torch.from_numpy(np.packbits(is_sent.numpy()))
        return torch.cat([rows.view(torch.uint8), marks])

    def unpack_rows(self, message: Tensor, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the values [numel] of a message."""
        num_rows, lead, rest = self.cut(start, numel)
        num_marks = -(-num_rows // 8)
        values, marks = message[: message.numel() - num_marks], message[message.numel() - num_marks :]
        is_sent = torch.from_numpy(np.unpackbits(marks.numpy(), count=num_rows)).bool()
        rows = torch.zeros(int(is_sent.sum()), self.width, dtype=dtype)
        flat = rows.view(-1)
        flat[lead * bool(is_sent[0]) : flat.numel() - rest * bool(is_sent[-1])] = values.view(dtype)
        table = torch.zeros(num_rows, self.width, dtype=dtype)
        table[is_sent] = rows
        return table.view(-1)[lead : lead + numel]


_BITS = {4: torch.int32, 2: torch.int16}
"""By size, the type of integers in which values are compared, because -0.0 must be sent."""


class NodeSums:
    """Sends the sums of this node, and adds the sums of other nodes."""

    def __init__(
        self,
        links: Links,
        sent: Callable[[ChunkName], object],
        coded: MeasuredCodec | None = None,
        rows: Mapping[int, TableRows] | None = None,
    ) -> None:
        """`sent` is called on the sending thread after a sum is sent. `coded`: the codec of sums. ``rows``: by its key,
        the rows of each chunk of which only rows are sent, without a codec."""
        assert coded is None or coded.codec in _CODECS
        self._links = links
        self._coded = coded
        self._rows = rows or {}
        self._sent = sent
        self._under_way: dict[ChunkName, _Sum] = {}
        self._thread: WorkThread | None = None
        if links.ranks.num_nodes > 1:
            self._thread = WorkThread("lohan-node-sums", FirstFailure(links.fail), beside_kernels=True)
            self._thread.start()
            links.set_handler(Kind.PIECE, self._add_piece)

    def send(
        self, name: ChunkName, values: Callable[[], Sequence[Gradient | NodeSum]], owner: int, num_parts: int
    ) -> None:
        """Send the sum of the gradients of this node's ranks, which are ``num_parts``. Does not wait. ``values`` is
        called on the sending thread, one chunk after the other, and may wait for devices of this node."""
        assert self._thread is not None
        self._thread.submit(partial(self._send, name, values, owner, num_parts))

    def sum_nodes(self, name: ChunkName, out: Tensor, values: list[Gradient] | None, nodes: list[int]) -> Tensor:
        """Set `out` to the sum over `nodes`. ``values``: the gradients of this node; None if their sum is in ``out``
        already."""
        links, ranks = self._links, self._links.ranks
        under_way = _Sum(out, nodes, ranks.node)
        is_own_first = under_way.num_before_own < 2
        if not is_own_first:  # when its turn comes, `out` has sums of other nodes
            num_averaged = 1 if values is None else ranks.num_ranks
            values = [value.clone() if _overlaps(out, value) else value for value in values or [out]]
        with links.lock:
            self._under_way[name] = under_way
        peers = [ranks.rank_at(node, ranks.local_rank) for node in nodes if node != ranks.node]
        for peer in peers:
            links.send(peer, Kind.PULL, *name)
        if values and is_own_first:
            sum_gradients_(out, values, ranks.num_ranks)
        with links.lock:
            under_way.takes_pieces = True
            links.notify()
        if not is_own_first:
            self._add_own(under_way, name, values or [], num_averaged)
        links.wait_for(under_way.is_complete, _what(name), peers=lambda: self._ranks_of(under_way.missing_nodes()))
        with links.lock:
            del self._under_way[name]
        return out

    def _add_own(self, under_way: _Sum, name: ChunkName, values: list[Gradient], num_averaged: int) -> None:
        """Add this node's sum when its turn comes, piece by piece. ``num_averaged``: see `sum_gradients_`."""
        numel = numel_of(values[0])
        scratch = torch.empty(min(SUM_PIECE_NUMEL, numel))
        for start in range(0, numel, SUM_PIECE_NUMEL):
            parts = [part_of_gradient(value, start, start + SUM_PIECE_NUMEL) for value in values]
            piece = sum_gradients_(scratch[: numel_of(parts[0])], parts, num_averaged)
            self._add_at_turn(under_way, name, self._links.ranks.node, start, piece)

    def _add_at_turn(self, under_way: _Sum, name: ChunkName, node: int, start: int, piece: Tensor) -> None:
        before = under_way.nodes_before(node)[-1:]
        stop = start + piece.numel()
        is_turn = partial(under_way.is_turn_of, node, stop)
        self._links.wait_for(is_turn, _what(name), peers=self._ranks_of(before))
        under_way.add(node, start, piece)
        self._links.notify()

    def _ranks_of(self, nodes: Iterable[int]) -> list[int]:
        """Return the ranks on these nodes that send to this rank."""
        return [self._links.ranks.rank_at(node, self._links.ranks.local_rank) for node in nodes]

    def close(self) -> None:
        if self._thread is not None:
            self._links.remove_handler(Kind.PIECE)
            self._thread.close()

    def _send(
        self, name: ChunkName, make_values: Callable[[], Sequence[Gradient | NodeSum]], owner: int, num_parts: int
    ) -> None:
        """Send a sum. The receiver scales the gradient of a single rank, because it may have fewer bytes than the
        scaled gradient."""
        values = make_values()
        numel, rows = numel_of(values[0]), self._rows.get(name[1])
        coded = None if rows is not None else self._coded
        scratch = torch.empty(0) if len(values) == 1 else torch.empty(min(SUM_PIECE_NUMEL, numel))
        message_bytes = 0 if coded is None else coded.codec.message_bytes(SUM_PIECE_NUMEL)
        message = torch.empty(message_bytes, dtype=torch.uint8)
        for start in range(0, numel, SUM_PIECE_NUMEL):
            parts = [part_of_gradient(value, start, start + SUM_PIECE_NUMEL) for value in values]
            size = numel_of(parts[0])
            payload, exact_bytes = self._payload_of(parts, scratch[:size], message, coded)
            form = len(DTYPES) + _CODECS.index(coded.codec) if coded else DTYPES.index(payload.dtype)
            if coded is not None:
                coded.count(exact_bytes, payload.nbytes)
            if rows is not None:
                payload = rows.pack_rows(payload, start)
            numbers = (*name, start, size, form, num_parts)
            self._links.send(owner, Kind.PIECE, *numbers, payload=payload, channel=Channel.GRADIENTS)
        self._sent(name)

    def _payload_of(
        self, parts: list[Gradient], scratch: Tensor, message: Tensor, codec: MeasuredCodec | None
    ) -> tuple[Tensor, int]:
        """Return the payload of the sum of the parts, and its bytes without a codec. ``scratch`` is for the sum of
        several parts, and ``message`` for a coded payload."""
        num_ranks, piece = self._links.ranks.num_ranks, parts[0]
        if len(parts) > 1:
            coded = [part for part in parts if isinstance(part, CodedValues)]
            if codec is not None and len(coded) == len(parts):
                payload = codec.encode_sum(coded, num_ranks, message)
                if payload is not None:
                    return payload, scratch.nbytes
            piece = sum_gradients_(scratch, parts, num_ranks)
        elif isinstance(piece, CodedValues):
            piece = piece.decoded()
        return piece if codec is None else codec.encode(piece, message), piece.nbytes

    def _add_piece(self, peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        """Add a received piece. This runs on the thread that receives from the piece's node."""
        step, key, start, numel, form, num_parts = numbers
        assert payload is not None
        rows = self._rows.get(key)
        dtype = DTYPES[form] if form < len(DTYPES) and rows is None else torch.uint8
        piece = torch.empty(payload.num_bytes // dtype.itemsize, dtype=dtype)
        payload.read_into(piece)
        if rows is not None:
            piece = rows.unpack_rows(piece, start, numel, DTYPES[form])
        if form < len(DTYPES):
            widened = piece.to(torch.float32)
        else:
            widened = torch.empty(numel, dtype=torch.float32)
            _CODECS[form - len(DTYPES)].decode(piece, widened)
        if num_parts == 1:
            widened.mul_(1.0 / self._links.ranks.num_ranks)
        node = self._links.ranks.of_rank(peer).node
        self._add_at_turn(self._under_way[step, key], (step, key), node, start, widened)


class _Sum:
    """A sum in progress, of a chunk's gradient over all nodes, in `out`."""

    def __init__(self, out: Tensor, nodes: list[int], own: int) -> None:
        self.takes_pieces = False
        """Whether `out` is ready for the pieces of other nodes."""
        self._out = out
        self._nodes = nodes
        self._own = own
        self.num_before_own = sum(node < own for node in nodes) if own in nodes else 0
        """Number of nodes before this one. If it is below two, this node's sum is written to `out` first, because `out`
        may share memory with one of its gradients. A sum of two has the same bits in either order."""
        self._num_added = dict.fromkeys(nodes, 0)
        """Number of added elements, by node."""
        if own in nodes and self.num_before_own < 2:
            self._num_added[own] = out.numel()

    def nodes_before(self, node: int) -> list[int]:
        """Return the nodes whose sums must be in `out` before the sum of `node`."""
        before = self._nodes[: self._nodes.index(node)]
        if self.num_before_own == 1 and node not in (self._own, self._nodes[0]):
            before.remove(self._own)  # its sum is already in `out`
        return before

    def missing_nodes(self) -> list[int]:
        return [node for node, num_added in self._num_added.items() if num_added < self._out.numel()]

    def is_turn_of(self, node: int, stop: int) -> bool:
        """Return whether a node's elements up to `stop` may be added."""
        return self.takes_pieces and all(self._num_added[before] >= stop for before in self.nodes_before(node)[-1:])

    def add(self, node: int, start: int, piece: Tensor) -> None:
        """Add a piece of a node whose turn has come."""
        goal = self._out[start : start + piece.numel()]
        is_first = node == self._nodes[0] and self.num_before_own != 1
        if is_first:
            goal.copy_(piece)
        else:
            goal.add_(piece)
        self._num_added[node] = start + piece.numel()

    def is_complete(self) -> bool:
        return self.takes_pieces and not self.missing_nodes()


def _overlaps(out: Tensor, gradient: Gradient) -> bool:
    return overlap(out, gradient.codes if isinstance(gradient, CodedValues) else gradient)


def _what(name: ChunkName) -> str:
    return f"the sums of other nodes of chunk {name[1]} in backward {name[0]}"
