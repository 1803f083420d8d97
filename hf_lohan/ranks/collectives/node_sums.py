"""Adds the sums of a chunk's gradient of several nodes, at the rank that owns the chunk.

On each node one rank, the chunk's collector, has the node's sum. The collectors exchange it piece by piece. When the
owner has a piece of all nodes, it adds them in the order of nodes. Pieces of chunks with different owners are sent in
one exchange, so links are busy in both directions. Two exchanges are in transit at once. A piece may be quantized. If
only rows of a table were used, only the rows of its gradient that are not zero are sent, and `pack_rows` marks them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    part_of_gradient,
    sum_gradients_,
)
from hf_lohan.ranks.transport.lanes import bytes_of
from hf_lohan.ranks.transport.links import Links


@dataclass(frozen=True, slots=True)
class TableRows:
    """The rows of a table in a chunk of its gradient."""

    width: int
    before: int
    """Elements of the chunk's first row that are in an earlier chunk."""

    def cut(self, start: int, numel: int) -> tuple[int, int, int]:
        """Return three numbers for the chunk's ``numel`` elements from ``start`` on: the number of rows that contain
        them, of the first row's elements before them, and of the last row's elements after them."""
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
"""For each size of a value, the integer dtype in which its bits are compared to 0, because -0.0 must be sent."""
_NUM_UNDER_WAY = 2
"""Number of exchanges in transit at once."""
_ALIGNMENT = 8
_WHAT = "the sums of other nodes"


@dataclass(frozen=True)
class PartsOfNode:
    """The gradients that one node's ranks have of a chunk."""

    num_parts: int
    dtype: torch.dtype
    """The type of each part, float32 if it is coded."""

    @property
    def sent_dtype(self) -> torch.dtype:
        """The type of the node's sum. The gradient of a single rank is sent unchanged, because it may have fewer bytes
        than its product with 1 / number of ranks."""
        return self.dtype if self.num_parts == 1 else torch.float32


@dataclass(frozen=True, eq=False)
class ChunkOfNodes:
    """A chunk with gradients from several nodes, or from one node that is not the owner's."""

    key: int
    owner: int
    numel: int
    nodes: Mapping[int, PartsOfNode]
    """The nodes that have gradients, in their order."""
    values: Sequence[Gradient | NodeSum]
    """The gradients of this node, or its sum. At the owner they may share memory with ``out`` as `sum_gradients_`
    allows."""
    out: Tensor | None
    """At the owner, memory for the sum over all nodes, float32 [numel]."""
    is_added: bool
    """Whether ``out`` has the sum of this node already."""


class _Piece(NamedTuple):
    """Elements [start, stop) of a chunk."""

    chunk: ChunkOfNodes
    start: int
    stop: int
    slot: int
    """Index of the exchange among the exchanges in transit."""


class NodeSums:
    """Adds the sums of nodes, for the chunks that this rank collects. One thread uses it."""

    def __init__(
        self, links: Links, coded: MeasuredCodec | None = None, rows: Mapping[int, TableRows] | None = None
    ) -> None:
        """All ranks make it together. ``coded``: the codec of sums. ``rows``: the rows, by key, of chunks that are sent
        as rows only, without a codec."""
        assert coded is None or coded.codec in (GRADIENTS_INT8, GRADIENTS_INT4)
        self._ranks = links.ranks
        self._coded = coded
        self._rows = rows or {}
        self._lane = links.open_across("sums", carries="gradients")
        self._memory: dict[tuple[str, int], Tensor] = {}

    def close(self) -> None:
        """See `RankLane.close`."""
        self._lane.close()

    def add(self, chunks: Sequence[ChunkOfNodes]) -> None:
        """Set each ``out`` to the sum over all nodes. No two chunks have the same owner. The chunks' collectors on all
        nodes call this, for the same chunks in the same order. Raises the errors of `RankLane.run`."""
        under_way: deque[Callable[[], None]] = deque()
        in_order = sorted(chunks, key=lambda chunk: chunk.owner)
        for number, start in enumerate(range(0, max(chunk.numel for chunk in chunks), SUM_PIECE_NUMEL)):
            if len(under_way) == _NUM_UNDER_WAY:
                under_way.popleft()()
            slot, stop = number % _NUM_UNDER_WAY, start + SUM_PIECE_NUMEL
            under_way.append(
                self._begin([_Piece(of, start, min(stop, of.numel), slot) for of in in_order if start < of.numel])
            )
        while under_way:
            under_way.popleft()()

    def _begin(self, pieces: Sequence[_Piece]) -> Callable[[], None]:
        """Begin to send pieces to their owners, and to receive the piece of this rank's own chunk from all nodes.
        Returns a function that waits for the end and adds the received pieces."""
        send_sizes, sizes = [0] * self._ranks.num_nodes, [0] * self._ranks.num_nodes
        payloads, own = [], None
        for piece in pieces:
            node, payload = self._ranks.of_rank(piece.chunk.owner).node, torch.empty(0, dtype=torch.uint8)
            if piece.chunk.values and node != self._ranks.node:
                payload = bytes_of(self._payload_of(piece))
            of_nodes = self._sizes(piece, payload.numel())
            if node == self._ranks.node:
                own, sizes = piece, of_nodes
                sizes[node] = 0
            else:
                payloads.append(payload)
                send_sizes[node] = payload.numel()
        received = self._take_memory("received", pieces[0].slot, sum(sizes))
        sent = payloads[0] if len(payloads) == 1 else torch.cat([received[:0], *payloads])
        begun = self._lane.begin_exchange(sent, send_sizes, received, sizes, _WHAT)

        def finish() -> None:
            self._lane.finish(begun)
            if own is not None:
                self._add_piece(own, received.split(sizes))

        return finish

    def _add_piece(self, piece: _Piece, of_nodes: Sequence[Tensor]) -> None:
        """Set a piece of this rank's own chunk to the sum over all nodes."""
        assert piece.chunk.out is not None
        own = [part_of_gradient(value, piece.start, piece.stop) for value in piece.chunk.values]
        goal = piece.chunk.out[piece.start : piece.stop]
        self._add_in_order(piece.chunk, goal, own, lambda node: self._decoded(of_nodes[node], piece, node))

    def _add_in_order(
        self, chunk: ChunkOfNodes, goal: Tensor, own: Sequence[Gradient], decoded: Callable[[int], Tensor]
    ) -> None:
        """Set ``goal`` to the sum of all nodes' pieces in their order."""
        nodes, here = list(chunk.nodes), self._ranks.node
        own_sum = goal
        if here in nodes[2:]:
            own_sum = self._take_memory("own", 0, goal.nbytes).view(torch.float32)
            if chunk.is_added:
                own_sum.copy_(goal)
        if own and not chunk.is_added:
            sum_gradients_(own_sum, own, self._ranks.num_ranks)
        if here in nodes[:2]:  # a sum of two has the same bits in either order
            nodes.remove(here)
        else:
            goal.copy_(decoded(nodes.pop(0)))
        for node in nodes:
            goal.add_(own_sum if node == here else decoded(node))

    def _decoded(self, message: Tensor, piece: _Piece, node: int) -> Tensor:
        chunk, start, stop, _ = piece
        parts = chunk.nodes[node]
        if message.storage_offset() % _ALIGNMENT:  # messages of earlier nodes may have any size
            message = message.clone()
        if (rows := self._rows.get(chunk.key)) is not None:
            values = rows.unpack_rows(message, start, stop - start, parts.sent_dtype)
        elif self._coded is not None:
            values = torch.empty(stop - start)
            self._coded.codec.decode(message, values)
        else:
            values = message.view(parts.sent_dtype)
        values = values.to(torch.float32)
        return values.mul_(1.0 / self._ranks.num_ranks) if parts.num_parts == 1 else values

    def _payload_of(self, piece: _Piece) -> Tensor:
        chunk, start, stop, _ = piece
        parts = [part_of_gradient(value, start, stop) for value in chunk.values]
        rows, coded = self._rows.get(chunk.key), self._coded
        if rows is not None or coded is None:
            values = self._sum_of(piece, parts)
            return values if rows is None else rows.pack_rows(values, start)
        message = self._take_memory(f"coded for {chunk.owner}", piece.slot, coded.codec.message_bytes(stop - start))
        payload, of_ranks = None, [part for part in parts if isinstance(part, CodedValues)]
        if len(of_ranks) == len(parts) > 1:
            payload = coded.encode_sum(of_ranks, self._ranks.num_ranks, message)
        if payload is None:
            payload = coded.encode(self._sum_of(piece, parts), message)
        coded.count((stop - start) * chunk.nodes[self._ranks.node].sent_dtype.itemsize, payload.nbytes)
        return payload

    def _sum_of(self, piece: _Piece, parts: Sequence[Gradient]) -> Tensor:
        if len(parts) > 1:
            total = self._take_memory(f"sum for {piece.chunk.owner}", piece.slot, 4 * numel_of(parts[0]))
            return sum_gradients_(total.view(torch.float32), parts, self._ranks.num_ranks)
        return parts[0] if isinstance(parts[0], Tensor) else parts[0].decoded()

    def _sizes(self, piece: _Piece, own: int) -> list[int]:
        """Return the bytes of a piece, by node. Nodes exchange only sizes of rows. ``own``: the size on this node."""
        chunk, start, stop, _ = piece
        if chunk.key in self._rows:
            return [int.from_bytes(told, "little") for told in self._lane.agree(_WHAT, own.to_bytes(8, "little"))]
        sizes = [0] * self._ranks.num_nodes
        for node, parts in chunk.nodes.items():
            of_values = (stop - start) * parts.sent_dtype.itemsize
            sizes[node] = of_values if self._coded is None else self._coded.codec.message_bytes(stop - start)
        return sizes

    def _take_memory(self, name: str, slot: int, num_bytes: int) -> Tensor:
        """Return memory, uint8, which later pieces use again."""
        memory = self._memory.get((name, slot))
        if memory is None or memory.numel() < num_bytes:
            memory = self._memory[name, slot] = torch.empty(num_bytes, dtype=torch.uint8)
        return memory[:num_bytes]
