"""Each chunk's gradient, from all ranks to the one that owns the chunk.

A rank publishes a chunk's gradient when it is complete there; in which order does not matter. The ranks of a box give
theirs, by saying where it lies in the memory that they share, to the one among them that has the owner's local rank.
That is the owner, or it sums for the owner's sake: what its box has is one sum (`node_sums`), sent when the owner wants
it, so that nowhere is memory needed for what comes early. When the backward ends, each rank says what it had none of.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_lohan.ranks.collectives.coded_lane import MeasuredCodec
from hf_lohan.ranks.collectives.node_sums import DTYPES, NodeSums
from hf_lohan.ranks.collectives.rank_order_sum import sum_in_rank_order_
from hf_lohan.ranks.transport.failures import RankFailedError, RanksDisagreeError
from hf_lohan.ranks.transport.links import Links
from hf_lohan.ranks.transport.messages import Kind, PayloadReader
from hf_lohan.ranks.transport.shared_region import SharedRegion

logger = logging.getLogger(__name__)

_Name = tuple[int, int]
"""Of a chunk: step and key."""


_SMALL_BITS = 62
"""So many bits go into a message's number."""


@dataclass(frozen=True)
class GradientPart:
    """What one rank has of a chunk's gradient."""

    rank: int
    values: Tensor | None
    """[numel], in memory that this rank reads; None if it has none."""
    slice_bits: int
    """Which parameters it has a gradient of. Elsewhere `values` are zero."""


@dataclass(eq=False)
class _ChunkParts:
    """What has come of one."""

    parts: dict[int, GradientPart] = field(default_factory=dict)
    """Of the ranks of this box."""
    boxes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """At the owner, by box: elements, or 0 where it has none, and slice bits."""
    is_told: bool = False
    """At the owner: `completed` was called. Elsewhere: the owner knows that this box is complete."""

    def in_rank_order(self) -> list[GradientPart]:
        return [self.parts[rank] for rank in sorted(self.parts)]


class CompleteGradient:
    """A chunk's gradient that has come from all ranks. To be released, whether it was summed or not."""

    def __init__(
        self,
        exchange: GradientExchange,
        step: int,
        key: int,
        parts: list[GradientPart],
        boxes: dict[int, tuple[int, int]],
    ) -> None:
        self._exchange = exchange
        self._boxes = [node for node, (numel, _) in sorted(boxes.items()) if numel]
        self.step = step
        self.key = key
        self.parts = parts
        """Of the ranks of this box, in rank order."""
        self.numel = max(numel for numel, _ in boxes.values())
        """0 if no rank has a gradient of it."""
        self.slice_bits = 0
        """Parameters of which any rank has a gradient."""
        for _, bits in boxes.values():
            self.slice_bits |= bits

    def sum_into(self, out: Tensor) -> Tensor:
        """The mean over all ranks, as float32 [numel]: each part times float32(1 / number of ranks), summed in rank
        order in each box, and these sums in the order of boxes. `out` may be one of the parts where
        `sum_in_rank_order_` says so; from the third box on that one is copied first. Waits for other boxes, so it is
        not for a thread that receives."""
        exchange = self._exchange
        values = [part.values for part in self.parts if part.values is not None]
        if self._boxes == [exchange.ranks.node]:
            return sum_in_rank_order_(out, values, exchange.ranks.num_ranks)
        exchange.sums.sum_nodes((self.step, self.key), out, values, self._boxes)
        self._boxes = []  # those released what they had when they had sent it
        return out

    def release(self) -> None:
        """The ranks may use their memory again."""
        self._exchange._release(self.step, self.key, self.parts, self._boxes)


class GradientExchange:
    """Of one rank. `publish`, `end_backward` and `abandon` are called by one thread, in turn."""

    def __init__(
        self,
        links: Links,
        owners: Mapping[int, int],
        region: SharedRegion | None,
        *,
        completed: Callable[[CompleteGradient], object],
        release: Callable[[object], object],
        abandoned: Callable[[int, int], object] = lambda step, rank: None,
        coded: MeasuredCodec | None = None,
    ) -> None:
        """`owners`: of all chunks, by a key, the same on all ranks. `region`: where this box's gradients lie that are
        not the publishing rank's own to sum. `completed` is called with what this rank owns, once it has come from all;
        `release` with the buffer of what was published, once it may be used again; `abandoned` with the step and the
        rank, where another one broke off. All on any thread, and they must not wait. `coded`: what boxes send is."""
        self.ranks = links.ranks
        self._links = links
        self._owners = dict(owners)
        ranks = links.ranks
        self._collectors = {key: ranks.rank_at(ranks.node, owner % ranks.num_local) for key, owner in owners.items()}
        self._own = {key for key, owner in owners.items() if owner == ranks.rank}
        self._region = region
        self._completed = completed
        self._release_buffer = release
        self._abandoned = abandoned
        self._step = 0
        self._given: set[int] = set()
        """Keys of this step of which the others were told."""
        self._buffers: dict[_Name, object] = {}
        """Published, and not released."""
        self._chunks: dict[_Name, _ChunkParts] = defaultdict(_ChunkParts)
        self._abandoned_steps: set[int] = set()
        self._complete: dict[int, set[int]] = defaultdict(set)
        """Keys by step, of what this rank owns."""
        self.sums = NodeSums(links, self._box_was_sent, coded)
        links.set_handler(Kind.CHUNK, self._take_chunk)
        links.set_handler(Kind.NO_GRADIENT, self._take_none)
        links.set_handler(Kind.BACKWARD_ABANDONED, lambda peer, numbers, payload: self._drop(numbers[0], peer))
        links.set_handler(Kind.RELEASE, self._take_release)
        links.set_handler(Kind.NODE_READY, self._take_box)
        links.set_handler(Kind.PULL, self._take_pull)

    @property
    def step(self) -> int:
        """Counts the backwards that have ended or were abandoned. Equal on all ranks at the same place."""
        return self._step

    def publish(self, key: int, gradient: Tensor, slice_bits: int, buffer: object) -> None:
        """Give a chunk's gradient, complete on this rank, to who sums it. Contiguous, on the host, with zeros where
        `slice_bits` says that it has none; it must not change until `release` was called with `buffer`."""
        flat = gradient.view(-1)
        with self._links.lock:
            step = self._step
            assert key not in self._given, f"chunk {key} was published in this step already"
            self._given.add(key)
            is_dropped = step in self._abandoned_steps
            if not is_dropped:
                self._buffers[step, key] = buffer
        if is_dropped:
            self._release_buffer(buffer)
            return
        collector = self._collectors[key]
        if collector == self.ranks.rank:
            self._take(step, key, GradientPart(collector, flat, slice_bits))
            return
        offset = self._region.offset_of(flat) if self._region is not None else None
        if offset is None:
            raise ValueError(
                f"the gradient of chunk {key} does not lie in the memory that the ranks of this box share, where rank "
                f"{collector} could read it; take its buffer from there"
            )
        small, large = _pack_bits(slice_bits)
        numbers = (step, key, offset, flat.numel(), DTYPES.index(flat.dtype), *small)
        self._links.send(collector, Kind.CHUNK, *numbers, payload=large)

    def end_backward(self) -> int:
        """Tell who sums that of the chunks that were not published there is no gradient here. Does not wait, so others
        have their buffers back soon. Returns the step, for `wait_until_complete`; what is published from here on is the
        next step's."""
        with self._links.lock:
            without = self._owners.keys() - self._given
        step = self._next_step()
        for collector in {self._collectors[key] for key in without}:
            its = sorted(key for key in without if self._collectors[key] == collector)
            if collector != self.ranks.rank:
                payload = torch.tensor(its, dtype=torch.int64).numpy().tobytes()
                self._links.send(collector, Kind.NO_GRADIENT, step, payload=payload)
                continue
            for key in its:
                self._take(step, key, GradientPart(collector, None, 0))
        return step

    def wait_until_complete(self, step: int, *, before: str = "") -> bool:
        """Wait until `completed` has been called for all of a step that this rank owns; `before`: see
        `Links.wait_for`, and what it raises. False if the step was abandoned."""

        def is_over() -> bool:
            return step in self._abandoned_steps or self._complete[step] == self._own

        def missing() -> set[int]:
            return self._missing(step)

        self._links.wait_for(is_over, f"the gradients of backward {step}", peers=missing, before=before)
        with self._links.lock:
            for ended in [ended for ended in self._complete if ended <= step]:
                del self._complete[ended]
            return step not in self._abandoned_steps

    def _missing(self, step: int) -> set[int]:
        """Ranks without which a step does not go on here. Of other boxes, those that sum there."""
        ranks, found = self.ranks, set[int]()
        for key in self._own - self._complete[step]:
            chunk = self._chunks.get((step, key), _ChunkParts())
            found.update(rank for rank in ranks.on_this_node if rank not in chunk.parts)
            found.update(
                ranks.rank_at(node, ranks.local_rank) for node in range(ranks.num_nodes) if node not in chunk.boxes
            )
        return found - {ranks.rank}

    def abandon(self) -> None:
        """The backward broke off: what has not come from all ranks is dropped, on all of them, and their buffers come
        back by `release`; at once where a rank has failed, for then nobody goes on. What is published from here on is
        the next step's."""
        step = self._next_step()
        with suppress(RankFailedError):
            self._links.send_all(Kind.BACKWARD_ABANDONED, step)
            self._drop(step, self.ranks.rank)
            return
        with self._links.lock:
            buffers, self._buffers = list(self._buffers.values()), {}
            self._chunks.clear()
        for buffer in buffers:
            self._release_buffer(buffer)

    def close(self) -> None:
        for kind in (Kind.CHUNK, Kind.NO_GRADIENT, Kind.BACKWARD_ABANDONED, Kind.RELEASE, Kind.NODE_READY, Kind.PULL):
            self._links.remove_handler(kind)
        self.sums.close()

    # What comes from the ranks of this box

    def _take_chunk(self, peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        step, key, offset, numel, dtype_index, *bits = numbers
        dtype = DTYPES[dtype_index]
        assert self._region is not None
        values = self._region.bytes[offset : offset + numel * dtype.itemsize].view(dtype)
        self._take(step, key, GradientPart(peer, values, _unpack_bits(bits, payload)))

    def _take_none(self, peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        assert payload is not None
        for key in torch.frombuffer(bytearray(payload.bytes()), dtype=torch.int64).tolist():
            self._take(numbers[0], key, GradientPart(peer, None, 0))

    def _take(self, step: int, key: int, part: GradientPart) -> None:
        """Note what one rank of this box has of a chunk."""
        ranks = self.ranks
        with self._links.lock:
            is_dropped = step in self._abandoned_steps
            if not is_dropped:
                chunk = self._chunks[step, key]
                chunk.parts[part.rank] = part
                self._refuse_unequal(key, chunk)
                if len(chunk.parts) < ranks.num_local:
                    return
                numel = max(0 if of_rank.values is None else of_rank.values.numel() for of_rank in chunk.parts.values())
                bits = 0
                for of_rank in chunk.parts.values():
                    bits |= of_rank.slice_bits
                chunk.is_told = self._owners[key] != ranks.rank
                if chunk.is_told and numel == 0:
                    del self._chunks[step, key]
        if is_dropped:
            self._give_back(step, key, [part])
        elif self._owners[key] == ranks.rank:
            self._take_sum_of_box(step, key, ranks.node, numel, bits)
        else:
            small, large = _pack_bits(bits)
            self._links.send(self._owners[key], Kind.NODE_READY, step, key, numel, *small, payload=large)

    def _refuse_unequal(self, key: int, chunk: _ChunkParts) -> None:
        with_values = [part for part in chunk.parts.values() if part.values is not None]
        for part in with_values[1:]:
            ours, theirs = with_values[0].values, part.values
            assert ours is not None
            assert theirs is not None
            if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
                raise RanksDisagreeError(
                    f"of chunk {key} rank {with_values[0].rank} has {ours.numel()} elements of {ours.dtype}, and rank "
                    f"{part.rank} {theirs.numel()} of {theirs.dtype}; do they train the same model?"
                )

    # What comes from other boxes

    def _take_box(self, peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        step, key, numel, *bits = numbers
        self._take_sum_of_box(step, key, self.ranks.of_rank(peer).node, numel, _unpack_bits(bits, payload))

    def _take_sum_of_box(self, step: int, key: int, node: int, numel: int, bits: int) -> None:
        """Note, at the owner, that a box is complete."""
        with self._links.lock:
            is_dropped = step in self._abandoned_steps
            if not is_dropped:
                chunk = self._chunks[step, key]
                chunk.boxes[node] = (numel, bits)
                if len(chunk.boxes) < self.ranks.num_nodes:
                    return
                chunk.is_told = True
        if is_dropped:
            self._release(step, key, [], [node] if numel else [])
            return
        self._completed(CompleteGradient(self, step, key, chunk.in_rank_order(), chunk.boxes))
        with self._links.lock:
            self._complete[step].add(key)
            self._links.notify()

    def _take_pull(self, peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        """The owner wants the sum of this box."""
        step, key = numbers
        values = [part.values for part in self._chunks[step, key].in_rank_order() if part.values is not None]
        self.sums.send((step, key), values, peer)

    def _box_was_sent(self, name: tuple[int, int]) -> None:
        with self._links.lock:
            chunk = self._chunks.pop(name)
        self._give_back(*name, chunk.in_rank_order())

    # Memory that comes back

    def _release(self, step: int, key: int, parts: list[GradientPart], boxes: list[int]) -> None:
        """At the owner: it is done with a chunk. `boxes` are those that still have their parts of it."""
        with self._links.lock:
            self._chunks.pop((step, key), None)
        self._give_back(step, key, parts)
        for node in boxes:
            if node != self.ranks.node:
                self._links.send(self.ranks.rank_at(node, self.ranks.local_rank), Kind.RELEASE, step, key)

    def _give_back(self, step: int, key: int, parts: list[GradientPart]) -> None:
        for part in parts:
            if part.values is None:
                continue
            if part.rank == self.ranks.rank:
                self._give_back_own(step, key)
            else:
                with suppress(RankFailedError):  # then nobody goes on
                    self._links.send(part.rank, Kind.RELEASE, step, key)

    def _give_back_own(self, step: int, key: int) -> None:
        with self._links.lock:
            if (step, key) not in self._buffers:  # all were released after a failure
                return
            buffer = self._buffers.pop((step, key))
        self._release_buffer(buffer)

    def _take_release(self, peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        step, key = numbers
        if peer in self.ranks.on_this_node:
            self._give_back_own(step, key)
        else:  # the owner has no use for what this box has
            self._box_was_sent((step, key))

    # Ends

    def _next_step(self) -> int:
        """The step that ends here."""
        with self._links.lock:
            self._step, self._given = self._step + 1, set()
            return self._step - 1

    def _drop(self, step: int, rank: int) -> None:
        with self._links.lock:
            if step in self._abandoned_steps:
                return
            self._abandoned_steps.add(step)
            dropped = {name: chunk for name, chunk in self._chunks.items() if name[0] == step and not chunk.is_told}
            for name in dropped:
                del self._chunks[name]
            self._links.notify()
        for (_, key), chunk in dropped.items():
            self._release(step, key, chunk.in_rank_order(), [node for node, (numel, _) in chunk.boxes.items() if numel])
        if rank != self.ranks.rank:
            logger.info("rank %d broke off backward %d", rank, step)
            self._abandoned(step, rank)


def _pack_bits(bits: int) -> tuple[tuple[int, ...], bytes]:
    """As a number of a message if they are few, else as its payload."""
    if bits < 1 << _SMALL_BITS:
        return (bits,), b""
    return (), bits.to_bytes(-(-bits.bit_length() // 8), "little")


def _unpack_bits(numbers: list[int], payload: PayloadReader | None) -> int:
    """What `_pack_bits` made of them."""
    return int.from_bytes(payload.bytes(), "little") if payload is not None else numbers[0]
