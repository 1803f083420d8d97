"""Sends a rank's shards to other nodes, and keeps shards of other nodes on this node.

A shard is sent unchanged, or rounded by a codec. With a codec all ranks compute with the rounded weights, even on the
sending node, and only the store has the exact weights. Within a node a codec may round whole blocks in transit to
devices. A shard that was coded for other nodes is not coded again. Packed weights are never rounded again. One rank of
each node receives a shard and may keep it. A kept shard is not sent again until an update changes the block. After
that, only the changes of the step may be sent.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from hf_lohan.config import Collectives
from hf_lohan.device import Device, Event, Lane
from hf_lohan.model import Block, ranges
from hf_lohan.planning import carried_ranks, coded_numel, group_counterparts, kept_ranks, part_bytes
from hf_lohan.ranks import (
    BlockCodec,
    CodedTraffic,
    DeviceLane,
    Links,
    MeasuredCodec,
    RankLane,
    Ranks,
    RanksDisagreeError,
    StepDelta,
    bytes_of,
)
from hf_lohan.store import RecordRead
from hf_lohan.weights.peer_weights import PeerWeightCache
from hf_lohan.weights.source import Decoder

_PAGE_BYTES = 4096
_PART_MULTIPLE = 256
"""Ranks of a node copy parts of a block to their devices. Each part begins at a multiple of this number of elements."""
_CODED_PIECE_NUMEL = 256 * 1024
"""Number of elements that are coded at once. This is a multiple of the codec's block."""
_FORM = struct.Struct("<q?q")
_RAW, _CODED, _CHANGES, _GROUPED = range(4)
"""Forms of a shard's payload."""
_DELTA = StepDelta()
_DELTA_DTYPES = (torch.bfloat16, torch.float16)


class SharedRegions:
    """Divides the shared memory of a node's ranks among blocks. It follows the order of loads, so all ranks choose the
    same regions."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._next_start = 0
        self._regions: dict[int, tuple[int, int]] = {}

    def find_start(self, num_bytes: int) -> int | None:
        """Return the offset in bytes for the next block; None while other blocks occupy the region."""
        start = self._next_start if self._next_start + num_bytes <= self._num_bytes else 0
        is_taken = any(first < start + num_bytes and start < last for first, last in self._regions.values())
        return None if is_taken else start

    def take_region(self, number: int, start: int, num_bytes: int) -> None:
        """Assign this region to load ``number``."""
        self._next_start = -(-(start + num_bytes) // _PAGE_BYTES) * _PAGE_BYTES
        self._regions[number] = start, start + num_bytes

    def free_region(self, number: int) -> None:
        """Free the region after all ranks have copied the block."""
        del self._regions[number]


def has_part(block: Block, rank: int) -> bool:
    return block.rank_ranges[rank][0] < block.rank_ranges[rank][1]


def part_of(block: Block, rank: int, entry: Tensor) -> Tensor:
    return entry[slice(*block.rank_ranges[rank])]


class DeviceCopies:
    """Copies whole blocks from the shared memory of a node's ranks to this rank's device. One thread calls `copy`."""

    def __init__(
        self,
        device: Device,
        ranks: Ranks,
        parts: NodeShards,
        decoder: Decoder | None,
        blocks: Sequence[Block],
        transport: DeviceLane | None,
    ) -> None:
        """``transport``: sends from device to device. Each device then gets only a part of a block from the shared
        memory, and the rest from the others."""
        self._device = device
        self._ranks = ranks
        self._within = parts.within
        self._decoder = decoder
        self._transport = transport
        self._payload: Tensor | None = None
        """Device memory for the payload of one block. Only work of the H2D lane uses it."""
        if parts.within is not None and (transport is not None or not device.memory_is_host):
            self._payload = device.empty(max(map(parts.coded_bytes, blocks)))

    def copy(self, block: Block, weights: Tensor, entry: Tensor, coded: Tensor | None, *, is_for_all: bool) -> Event:
        """Enqueue the copy of a block to ``weights`` in the slot. ``entry`` and ``coded``: the complete block and its
        payload in shared memory. Returns the event of the copy's end. ``is_for_all``: all ranks of the node call this,
        and with a transport this rank waits for them. Raises RankFailedError or RankTimeoutError."""
        transport = self._transport
        if transport is None or not is_for_all:
            self._fill(block, weights, entry, coded, partial(self._device.copy, Lane.H2D))
            return self._device.record(Lane.H2D)
        ready: list[Event] = []
        is_one = not block.packed_slices  # packed weights go through a small buffer, piece by piece
        if is_one:
            self._copy_part(*((weights, entry) if coded is None else (self._payload_for(coded), coded)))

        def bring(memory: Tensor, shared: Tensor) -> None:
            if not is_one:
                self._copy_part(memory, shared)
            self._gather(transport, memory)

        def fill() -> None:
            self._fill(block, weights, entry, coded, bring)
            # A slot without all parts is never published, because this call waits.
            ready.append(self._device.record(Lane.H2D))
            ready[0].synchronize()

        transport.run(f"its part of {block.name} on its device", fill)
        return ready[0]

    def _fill(
        self,
        block: Block,
        weights: Tensor,
        entry: Tensor,
        coded: Tensor | None,
        bring: Callable[[Tensor, Tensor], object],
    ) -> None:
        """Fill the slot. ``bring(memory, shared)`` fills device memory with the content of shared memory. With a
        transport, all ranks of the node call ``bring`` with the same sizes, in the same order."""
        if block.packed_slices:
            assert self._decoder is not None, f"{block} has packed weights"
            self._decoder.load(block, weights, entry, bring)
        elif coded is not None:
            self._bring_coded(coded, weights, bring)
        else:
            bring(weights, entry)

    def _payload_for(self, coded: Tensor) -> Tensor:
        """Return device memory for a payload, or the payload itself if the device can read shared memory."""
        return coded if self._payload is None else self._payload[: coded.numel()]

    def _copy_part(self, memory: Tensor, shared: Tensor) -> None:
        """Copy this rank's part of ``shared`` to its device."""
        start, stop = _equal_parts(memory.numel(), self._ranks.num_local)[self._ranks.local_rank]
        if start < stop:
            self._device.copy(Lane.H2D, memory[start:stop], shared[start:stop])

    def _gather(self, transport: DeviceLane, memory: Tensor) -> None:
        """Send this rank's part of ``memory`` to the other devices, and receive the other parts."""
        parts = _equal_parts(memory.numel(), self._ranks.num_local)
        start, stop = parts[self._ranks.local_rank]
        work = partial(transport.fill_from_all, memory, parts)
        self._device.run(Lane.H2D, work, fills=memory, reads=(memory[start:stop],), name="gather")

    def _bring_coded(self, coded: Tensor, weights: Tensor, bring: Callable[[Tensor, Tensor], object]) -> None:
        """Bring the payload of a block to the device, and decode it there to ``weights``."""
        within, payload = self._within, self._payload_for(coded)
        assert within is not None
        if payload is not coded:
            bring(payload, coded)
        work = partial(within.codec.decode, payload, weights)
        self._device.run(Lane.H2D, work, fills=weights, reads=(payload,))
        within.count(weights.nbytes, coded.numel())


def _equal_parts(numel: int, num_parts: int) -> list[tuple[int, int]]:
    """Return the ranges of parts that differ little in size and begin at multiples of `_PART_MULTIPLE`."""
    size = -(-numel // (num_parts * _PART_MULTIPLE)) * _PART_MULTIPLE
    return [(min(part * size, numel), min((part + 1) * size, numel)) for part in range(num_parts)]


class NodeShards:
    """The shards that one rank sends and receives. The thread of the rounds calls `is_kept`, `keep_weights` and
    `forget_kept`. The threads that fill memory call the other methods for their load."""

    def __init__(
        self,
        ranks: Ranks,
        blocks: Sequence[Block],
        *,
        coded: MeasuredCodec | None = None,
        within: MeasuredCodec | None = None,
    ) -> None:
        """``coded``: the codec that rounds shards. ``within``: the codec of blocks in transit to devices, with the
        format of ``coded``."""
        self._ranks = ranks
        self._coded = coded
        self.within = within
        self._changes: CodedTraffic | None = None
        self._versions: dict[Block, int] = {}
        """For each block, the version that is kept or being received."""
        self._kept: PeerWeightCache | None = None
        self.keeps = False
        """Whether an unchanged block is not sent again."""
        self._lane: RankLane | None = None
        self._group_lane: RankLane | None = None
        self._sent: set[Block] = set()
        """Blocks whose shard of this rank is equal here and on the other nodes."""

    def open_lanes(self, links: Links) -> None:
        """Open the lane between nodes. All ranks call this together."""
        self._lane = links.open_across("weights", carries="weights")

    def open_group_lane(self, links: Links, way: Collectives) -> None:
        """Open the lane between the nodes that keep one copy together. All ranks call this together."""
        if others := group_counterparts(self._ranks, way):
            members = sorted([self._ranks.rank, *others])
            name = f"weights in the group of rank {members[0]}"
            self._group_lane = links.open(name, members, carries="weights")

    def close_lanes(self) -> None:
        for lane in (self._lane, self._group_lane):
            if lane is not None:
                lane.close()

    def keep_weights(self, kept: PeerWeightCache, changes: CodedTraffic | None) -> None:
        """Keep the shards of `kept_ranks` in ``kept`` from now on. With ``changes``, which counts the traffic, only the
        changes of blocks that were sent before are sent. All ranks call this before the same load."""
        self._kept, self._changes, self.keeps = kept, changes, True

    def forget_kept(self) -> None:
        """Forget which versions nodes keep, because one version was incomplete. All shards are then sent in full."""
        self._versions.clear()
        self._sent.clear()

    def whole_numel(self, granule_numel: int) -> int:
        """Return the number of elements whose multiples are whole granules and, with a codec, whole coded pieces."""
        is_coded = self._coded is not None or self.within is not None
        return math.lcm(granule_numel, _CODED_PIECE_NUMEL) if is_coded else granule_numel

    def is_sent(self, block: Block, *, is_kept: bool) -> bool:
        """Return whether ranks of several nodes send each other shards of a block. ``is_kept``: whether nodes keep the
        block. Then ranks send both their own shards and the kept shards, within their group."""
        lane = self._group_lane if is_kept else self._lane
        members = lane.members if lane is not None else []
        return len(members) > 1 and any(has_part(block, of) for rank in members for of in self._carried(rank, is_kept))

    def _carried(self, rank: int, is_kept: bool) -> list[int]:
        if not is_kept:
            return [rank]
        assert self._kept is not None
        return carried_ranks(self._ranks.of_rank(rank), self._kept.way)

    def kept(self, block: Block) -> list[int]:
        """Return the ranks of other nodes whose shards of the block this rank keeps."""
        assert self._kept is not None
        ranks = kept_ranks(self._ranks, self._kept.way)
        return [rank for rank in ranks if rank != self._ranks.rank and has_part(block, rank)]

    def takes_memory(self, *, is_kept: bool, keeps: bool) -> bool:
        """Return whether shards in transit need their own memory, which is counted for one load at a time."""
        if is_kept:
            return self._group_lane is not None
        return self._coded is not None or self._sends_changes(_RAW, keeps=keeps)

    def waiting(self, links: Links) -> AbstractContextManager[None]:
        """Return a context for a thread that waits until shards have arrived."""
        assert self._lane is not None
        return links.watch.waiting(self._lane.name, stops_compute=False)

    def is_kept(self, block: Block, version: int) -> bool:
        """Return whether this node keeps the version when the next load begins. The answer is the same on all nodes. If
        it is False, all ranks send their shards, and the nodes then keep them."""
        if not self.keeps:
            return False
        is_kept = self._versions.get(block) == version
        self._versions[block] = version
        return is_kept

    def begin_read(self, block: Block, entry: Tensor, piece_numel: int) -> list[RecordRead]:
        """Begin to copy the kept shards of other nodes into a whole block. Returns the reads."""
        reads: list[RecordRead] = []
        assert self._kept is not None
        for rank in self.kept(block):
            reads += self._kept.begin_read(block, rank, part_of(block, rank, entry), piece_numel)
        return reads

    # Blocks in transit to devices.

    def coded_bytes(self, block: Block) -> int:
        """Return the bytes of a whole block's payload for devices. Return 0 if the block's weights go to devices
        unchanged. Packed weights are not coded again."""
        if self.within is None or block.packed_slices:
            return 0
        return self.within.codec.message_bytes(block.numel)

    def code_part(self, block: Block, rank: int, entry: Tensor, coded: Tensor | None) -> None:
        """Write a rank's part of the payload ``coded`` of a whole block. ``entry`` has the rank's shard, or its payload
        if shards are rounded between nodes."""
        part, within = part_of(block, rank, entry), self.within
        if coded is None or not part.numel():
            return
        assert within is not None
        codec, (first, _) = within.codec, block.rank_ranges[rank]
        codes, scales = coded.split([codec.codes_bytes(block.numel), codec.scales_bytes(block.numel)])
        scratch = torch.empty(codec.message_bytes(min(_CODED_PIECE_NUMEL, part.numel())), dtype=torch.uint8)
        for piece, place in _pieces(part, codec):
            message = part.view(torch.uint8)[place] if self._coded is not None else within.encode(piece, scratch)
            low, num_bytes = codec.codes_bytes(first), codec.codes_bytes(piece.numel())
            codes[low : low + num_bytes].copy_(message[:num_bytes])
            low = codec.scales_bytes(first)
            scales[low : low + message.numel() - num_bytes].copy_(message[num_bytes:])
            first += piece.numel()

    # This rank's shard.

    def make_own(self, block: Block, entry: Tensor, *, is_kept: bool, keeps: bool) -> tuple[int, Tensor]:
        """Round this rank's shard in ``entry`` to the values with which all ranks compute. Returns the form and the
        payload to send. ``keeps``: whether nodes keep the shards that they receive in this load."""
        part = part_of(block, self._ranks.rank, entry)
        form, message = _RAW, part
        if self._coded is not None:
            numel = coded_numel(block, self._ranks.rank)
            form, message = _CODED, self._round(part, numel, self._coded, keeps_payload=bool(self.coded_bytes(block)))
        if is_kept:
            # The payload has the shards that this rank carries, one after the other.
            carried = self._carried(self._ranks.rank, True) if self._group_lane is not None else []
            return _GROUPED, torch.cat([part_of(block, rank, entry) for rank in carried]) if carried else part[:0]
        if not self._sends_changes(form, keeps=keeps):
            return form, message
        assert self._kept is not None
        if block in self._sent and part.dtype in _DELTA_DTYPES:
            old = self._kept.values(block, self._ranks.rank)
            message = torch.empty(_DELTA.max_bytes(part.numel()), dtype=torch.uint8)
            form, message = _CHANGES, message[: _DELTA.encode(old, part, message)]
        self._kept.write(block, self._ranks.rank, part)
        self._sent.add(block)
        return form, message

    def begin_exchange(
        self, block: Block, form: int, payload: Tensor, entry: Tensor, *, is_kept: bool, keeps: bool, is_stale: bool
    ) -> Callable[[], tuple[list[int], list[int]]]:
        """Begin to send the ``payload`` of `make_own` to the ranks of other nodes, and to receive their payloads.
        ``is_stale``: whether the shard may be of a later version. Returns a function that waits for the other shards
        and puts them into ``entry``. It returns the ranks whose shards have arrived, and the ranks whose shards are
        stale. These functions must be called in the order in which the exchanges began."""
        lane = self._group_lane if is_kept else self._lane
        assert lane is not None
        what = f"shards of {block.name}"
        finish = lane.begin_agree(what, _FORM.pack(form, is_stale, payload.nbytes))
        told: list[tuple[int, bool, int]] | None = None
        if self._sends_changes(form, keeps=keeps):  # changes have any size
            told = [_FORM.unpack(head) for head in finish()]
        works = []
        for place, rank in enumerate(lane.members):
            if told is None:  # all shards have this form, so the bytes follow at once
                others_form, num_bytes = form, self._payload_bytes(block, rank, form)
            else:
                others_form, _, num_bytes = told[place]
            if not num_bytes:
                continue
            if rank == self._ranks.rank:
                memory = payload
            elif others_form == _RAW:
                memory = part_of(block, rank, entry)
            else:
                memory = torch.empty(num_bytes, dtype=torch.uint8)
            works.append((rank, others_form, memory, lane.begin_to_all(memory, rank, what)))

        def end() -> tuple[list[int], list[int]]:
            heads = told or [_FORM.unpack(head) for head in finish()]
            for rank, (others_form, _, num_bytes) in zip(lane.members, heads, strict=True):
                if told is None and (others_form, num_bytes) != (form, self._payload_bytes(block, rank, form)):
                    raise RanksDisagreeError(
                        f"rank {rank} sends {num_bytes} bytes in form {others_form} as its shard of {block.name}, and "
                        f"rank {self._ranks.rank} expected form {form}; load the same model on all ranks"
                    )
            arrived = []
            for rank, others_form, memory, begun in works:
                lane.finish(begun)
                if rank != self._ranks.rank:
                    arrived += self._receive(block, rank, others_form, memory, entry, keeps=keeps)
                elif not is_kept:
                    for _ in lane.members[1:]:
                        self._count(block, memory)
            return arrived, [rank for rank, (_, stale, _) in zip(lane.members, heads, strict=True) if stale]

        return end

    def _sends_changes(self, form: int, *, keeps: bool) -> bool:
        return form not in (_CODED, _GROUPED) and keeps and self._changes is not None and self._kept is not None

    def _payload_bytes(self, block: Block, rank: int, form: int) -> int:
        """Return the bytes of a rank's payload of a form other than changes."""
        if form == _GROUPED:
            return sum(part_bytes(block, carried) for carried in self._carried(rank, True))
        if form == _RAW:
            return part_bytes(block, rank)
        assert self._coded is not None
        numel, (first, last) = coded_numel(block, rank), block.rank_ranges[rank]
        return self._coded.codec.message_bytes(numel) + (last - first - numel) * block.master.working_dtype.itemsize

    def _count(self, block: Block, message: Tensor) -> None:
        """Count a shard that was sent to another node as ``message``."""
        for counted in (self._coded, self._changes):
            if counted is not None:
                counted.count(part_bytes(block, self._ranks.rank), message.nbytes)

    @staticmethod
    def _round(part: Tensor, numel: int, coded: MeasuredCodec, *, keeps_payload: bool) -> Tensor:
        """Return the payload of the shard ``part``. The first ``numel`` elements of ``part`` are coded. They are
        replaced by the decoded elements, or by the payload."""
        packed = part[numel:].view(torch.uint8)
        code_bytes = coded.codec.message_bytes(numel)
        message = torch.empty(code_bytes + packed.numel(), dtype=torch.uint8)
        for piece, place in _pieces(part[:numel], coded.codec):
            payload = coded.encode(piece, message[place])
            if not keeps_payload:
                coded.codec.decode(payload, piece)
        message[code_bytes:].copy_(packed)
        if keeps_payload:
            part.view(torch.uint8)[: message.numel()].copy_(message)
        return message

    # Shards of other nodes.

    def _receive(self, block: Block, rank: int, form: int, payload: Tensor, entry: Tensor, *, keeps: bool) -> list[int]:
        """Put the shards from a rank of another node into ``entry``. Returns the ranks whose shards these are."""
        if form == _GROUPED:
            carried = self._carried(rank, True)
            for other in carried:
                part = bytes_of(part_of(block, other, entry))
                part.copy_(payload[: part.numel()])
                payload = payload[part.numel() :]
            return carried
        part = part_of(block, rank, entry)
        if form == _CHANGES:
            assert self._kept is not None
            self._kept.read(block, rank, part)
            _DELTA.apply_(part, payload)
        elif form == _CODED:
            assert self._coded is not None
            if self.coded_bytes(block):
                bytes_of(part)[: payload.numel()].copy_(payload)
            else:
                numel = coded_numel(block, rank)
                for piece, place in _pieces(part[:numel], self._coded.codec):
                    self._coded.codec.decode(payload[place], piece)
                rest = bytes_of(part[numel:])
                rest.copy_(payload[payload.numel() - rest.numel() :])
        if keeps and self._kept is not None and rank in self.kept(block):
            self._kept.write(block, rank, part)
        return [rank]


def _pieces(part: Tensor, codec: BlockCodec) -> Iterator[tuple[Tensor, slice]]:
    """Iterate over the pieces of a shard, each with its slice of the coded payload."""
    end = 0
    for start, stop in ranges(part.numel(), _CODED_PIECE_NUMEL):
        begin, end = end, end + codec.message_bytes(stop - start)
        yield part[start:stop], slice(begin, end)
