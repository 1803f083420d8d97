"""From box to box: the sum that one box has of a chunk's gradient, to the rank of another box that owns the chunk.

The owner asks all boxes at once, and adds what they send in the order of boxes, piece by piece: a piece waits, in its
connection, until those of the boxes before it have been added. So the order is fixed for each element, and the memory
for it is a piece for each box. A piece may be coded on its way: its head says how. A box sends what several owners ask
for in the order in which they asked. The first box's pieces never wait for another's, the second's only for the
first's, and so on: there is no circle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from hf_lohan.ranks.collectives.block_codec import GRADIENTS_INT4, GRADIENTS_INT8
from hf_lohan.ranks.collectives.coded_lane import MeasuredCodec
from hf_lohan.ranks.collectives.rank_order_sum import overlap, sum_in_rank_order_
from hf_lohan.ranks.transport.links import Links
from hf_lohan.ranks.transport.messages import Channel, Kind, PayloadReader
from hf_lohan.threads import FirstFailure, WorkThread

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types of gradients. A message has the index of one."""
SUM_PIECE_NUMEL = 256 * 1024
_CODECS = (GRADIENTS_INT8, GRADIENTS_INT4)
"""How pieces may be: values of a type, or coded. A head has the place in both."""
_Name = tuple[int, int]


class NodeSums:
    """Of one rank: sends the sums of its box, and adds up those of others."""

    def __init__(self, links: Links, sent: Callable[[_Name], object], coded: MeasuredCodec | None = None) -> None:
        """`sent` is called when a sum has been sent, on a thread that does nothing else but send. With `coded`, sums
        go through its codec."""
        assert coded is None or coded.codec in _CODECS
        self._links = links
        self._coded = coded
        self._sent = sent
        self._under_way: dict[_Name, _Sum] = {}
        self._thread: WorkThread | None = None
        if links.ranks.num_nodes > 1:
            self._thread = WorkThread("lohan-box-sums", FirstFailure(links.fail), beside_kernels=True)
            self._thread.start()
            links.set_handler(Kind.PIECE, self._add_piece)

    def send(self, name: _Name, values: list[Tensor], owner: int) -> None:
        """Send the sum of what the ranks of this box have. Does not wait."""
        assert self._thread is not None
        self._thread.submit(partial(self._send, name, values, owner))

    def sum_nodes(self, name: _Name, out: Tensor, values: list[Tensor], boxes: list[int]) -> Tensor:
        """Set `out` to the sum over `boxes`, of which this one has `values`."""
        links, ranks = self._links, self._links.ranks
        under_way = _Sum(out, boxes, ranks.node)
        is_own_first = under_way.num_before_own < 2
        if not is_own_first:  # when its turn comes, others' sums are in `out`
            values = [value.clone() if overlap(out, value) else value for value in values]
        with links.lock:
            self._under_way[name] = under_way
        peers = [ranks.rank_at(node, ranks.local_rank) for node in boxes if node != ranks.node]
        for peer in peers:
            links.send(peer, Kind.PULL, *name)
        if values and is_own_first:
            sum_in_rank_order_(out, values, ranks.num_ranks)
        with links.lock:
            under_way.takes_pieces = True
            links.notify()
        if not is_own_first:
            self._add_own(under_way, name, values)
        links.wait_for(under_way.is_complete, _what(name), peers=lambda: self._ranks_of(under_way.boxes_missing()))
        with links.lock:
            del self._under_way[name]
        return out

    def _add_own(self, under_way: _Sum, name: _Name, values: list[Tensor]) -> None:
        """At its turn, piece by piece."""
        numel = values[0].numel()
        scratch = torch.empty(min(SUM_PIECE_NUMEL, numel))
        for start in range(0, numel, SUM_PIECE_NUMEL):
            parts = [value[start : start + SUM_PIECE_NUMEL] for value in values]
            piece = sum_in_rank_order_(scratch[: parts[0].numel()], parts, self._links.ranks.num_ranks)
            self._add_at_turn(under_way, name, self._links.ranks.node, start, piece)

    def _add_at_turn(self, under_way: _Sum, name: _Name, node: int, start: int, piece: Tensor) -> None:
        before = under_way.boxes_before(node)[-1:]
        stop = start + piece.numel()
        is_turn = partial(under_way.is_turn_of, node, stop)
        self._links.wait_for(is_turn, _what(name), peers=self._ranks_of(before))
        under_way.add(node, start, piece)
        self._links.notify()

    def _ranks_of(self, boxes: Iterable[int]) -> list[int]:
        """Those there that send to this one."""
        return [self._links.ranks.rank_at(node, self._links.ranks.local_rank) for node in boxes]

    def close(self) -> None:
        if self._thread is not None:
            self._links.remove_handler(Kind.PIECE)
            self._thread.close()

    def _send(self, name: _Name, values: list[Tensor], owner: int) -> None:
        """A single rank's part is not scaled here: it may have fewer bytes than the sum, and becomes the same there."""
        scratch = torch.empty(0) if len(values) == 1 else torch.empty(min(SUM_PIECE_NUMEL, values[0].numel()))
        message_bytes = 0 if self._coded is None else self._coded.codec.message_bytes(SUM_PIECE_NUMEL)
        message = torch.empty(message_bytes, dtype=torch.uint8)
        for start in range(0, values[0].numel(), SUM_PIECE_NUMEL):
            parts = [value[start : start + SUM_PIECE_NUMEL] for value in values]
            piece = parts[0]
            if len(parts) > 1:
                piece = sum_in_rank_order_(scratch[: piece.numel()], parts, self._links.ranks.num_ranks)
            numbers = (*name, start, piece.numel(), self._form_of(piece), len(parts))
            if self._coded is not None:
                exact, piece = piece, self._coded.encode(piece, message)
                self._coded.count(exact.nbytes, piece.nbytes)
            self._links.send(owner, Kind.PIECE, *numbers, payload=piece, channel=Channel.GRADIENTS)
        self._sent(name)

    def _form_of(self, piece: Tensor) -> int:
        if self._coded is None:
            return DTYPES.index(piece.dtype)
        return len(DTYPES) + _CODECS.index(self._coded.codec)

    def _add_piece(self, peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        """On the thread that receives from one box."""
        step, key, start, numel, form, num_parts = numbers
        assert payload is not None
        dtype = DTYPES[form] if form < len(DTYPES) else torch.uint8
        piece = torch.empty(payload.num_bytes // dtype.itemsize, dtype=dtype)
        payload.read_into(piece)
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
    """A chunk's gradient, on the way from all boxes into `out`."""

    def __init__(self, out: Tensor, boxes: list[int], own: int) -> None:
        self.takes_pieces = False
        """Whether what `out` is to have before others' pieces is there."""
        self._out = out
        self._boxes = boxes
        self._own = own
        self.num_before_own = sum(node < own for node in boxes) if own in boxes else 0
        """If there are fewer than two, this box's sum is in `out` first, where one of its gradients may lie: a sum of
        two has the same bits either way round."""
        self._num_added = dict.fromkeys(boxes, 0)
        """Elements, by box."""
        if own in boxes and self.num_before_own < 2:
            self._num_added[own] = out.numel()

    def boxes_before(self, node: int) -> list[int]:
        """Those whose sums are to be in `out` before that of `node`."""
        before = self._boxes[: self._boxes.index(node)]
        if self.num_before_own == 1 and node not in (self._own, self._boxes[0]):
            before.remove(self._own)  # it is there
        return before

    def boxes_missing(self) -> list[int]:
        return [node for node, num_added in self._num_added.items() if num_added < self._out.numel()]

    def is_turn_of(self, node: int, stop: int) -> bool:
        """Whether all that comes before these elements of a box has been added."""
        return self.takes_pieces and all(self._num_added[before] >= stop for before in self.boxes_before(node)[-1:])

    def add(self, node: int, start: int, piece: Tensor) -> None:
        """At its turn."""
        goal = self._out[start : start + piece.numel()]
        is_first = node == self._boxes[0] and self.num_before_own != 1
        if is_first:
            goal.copy_(piece)
        else:
            goal.add_(piece)
        self._num_added[node] = start + piece.numel()

    def is_complete(self) -> bool:
        return self.takes_pieces and not self.boxes_missing()


def _what(name: _Name) -> str:
    return f"the sums of other boxes of chunk {name[1]} in backward {name[0]}"
