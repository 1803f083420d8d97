"""Loads weights with several ranks. Each rank reads its shard of a block into host memory that the ranks of its node
share, and copies the whole block from there to its device.

Each node therefore reads each shard only once, and messages between ranks of one node contain no weights. Between
nodes, each rank sends its shard to the rank with the same local rank on every other node.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from hf_lohan.device import Device, Event, Lane
from hf_lohan.files import CorruptionError, StorageError
from hf_lohan.model import Block, ranges
from hf_lohan.planner.record_traffic import PARAM
from hf_lohan.ranks import Channel, CodedTraffic, Kind, Links, PayloadReader, RanksDisagreeError, RankTimeoutError
from hf_lohan.store import RecordRead
from hf_lohan.threads import TaskThreads
from hf_lohan.timeline import LOADS_WAIT
from hf_lohan.updates import Delivery, DeliveryListener, UpdatesDroppedError
from hf_lohan.weights.node_shards import NodeShards
from hf_lohan.weights.peer_weights import PeerWeightCache
from hf_lohan.weights.source import Decoder, RecordReader

_PAGE_BYTES = 4096


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
        if any(first < start + num_bytes and start < last for first, last in self._regions.values()):
            return None
        return start

    def take_region(self, number: int, start: int, num_bytes: int) -> None:
        """Assign this region to load ``number``."""
        self._next_start = -(-(start + num_bytes) // _PAGE_BYTES) * _PAGE_BYTES
        self._regions[number] = start, start + num_bytes

    def free_region(self, number: int) -> None:
        """Free the region after all ranks have copied the block."""
        del self._regions[number]


@dataclass(eq=False)
class _SharedLoad:
    """A load that has begun, and whose block is not yet copied to the device."""

    number: int
    block: Block
    version: int
    entry: Tensor
    """Tensor [block.fetched_numel] in shared host memory: what a pass reads of the block, with packed weights as they
    are."""
    missing: set[int]
    """Ranks of other nodes whose shards this rank has not yet received."""
    is_wanted: Callable[[], bool]
    sends: bool
    """Whether this rank's shard is sent to other nodes."""
    coded: Tensor | None = None
    """The payload of the block for devices, in shared host memory, if a codec rounds it on its way there."""
    has_ended: bool = False
    """Whether the delivery from updates has ended."""
    error: BaseException | None = None
    """The error of a read or a delivery of this rank's shard."""
    has_retried: bool = False
    is_in_doubt: bool = False
    """Whether this rank's shard has a wrong checksum, so that the ranks of the node were asked which block they
    load."""
    reads: deque[RecordRead] = field(default_factory=deque)
    has_own: bool = False
    has_sent_filled: bool = False

    @property
    def cause(self) -> str:
        """The reason for the wait for this rank's shard, as the timeline shows it."""
        return "for the SSD" if self.reads else "for updates to be written"


class SharedWeights:
    """A `JointSource` with shared memory. Reads, and weights that updates have in RAM, go straight to the shared
    memory."""

    def __init__(
        self,
        device: Device,
        store: RecordReader,
        deliver: Callable[[Block, Tensor, Event | None], Delivery],
        links: Links,
        memory: Tensor,
        blocks: Sequence[Block],
        *,
        read_bytes: int,
        parts: NodeShards | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        """``store`` has this rank's shard of each block. ``deliver``: see `LocalWeights`; it writes to host memory.
        ``memory``: page-aligned uint8 tensor that the node's ranks share. It must have room for the largest block. With
        room for two blocks, loads overlap. ``blocks``: all blocks, in the same order on all ranks. ``read_bytes``:
        bytes of one read. ``parts``: the shards of other nodes, by default sent unrounded. ``decoder``: for blocks with
        packed weights, which each rank decodes on the way from the shared memory to its device."""
        self._parts = parts or NodeShards(links.ranks, blocks)
        largest = max(blocks, key=self._region_bytes)
        if memory.numel() < self._region_bytes(largest):
            raise ValueError(
                f"the memory that ranks share has {memory.numel()} bytes, and block {largest.name} needs "
                f"{self._region_bytes(largest)} bytes; share at least that much"
            )
        self._device = device
        self._store = store
        self._deliver = deliver
        self._links = links
        self._ranks = links.ranks
        self._memory = memory
        self._blocks = blocks
        self._number_of = {block: number for number, block in enumerate(blocks)}
        self._read_bytes = read_bytes
        self._decoder = decoder
        self._coded_on_device: Tensor | None = None
        """Device memory for the payload of one block. Work of the H2D lane alone uses it."""
        if self._parts.within is not None and not device.memory_is_host:
            self._coded_on_device = device.empty(max(map(self._parts.coded_bytes, blocks)))
        self._regions = SharedRegions(memory.numel())
        self._loads: dict[int, _SharedLoad] = {}
        """The loads in their order. The links' lock guards this dict and the progress of the loads."""
        self._announced: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """By load, the ranks of this node that have announced which block it is, with the block's number."""
        self._filled: defaultdict[int, set[int]] = defaultdict(set)
        """By load, the ranks of this node that have announced their shard."""
        self._not_taken: dict[int, set[int]] = {}
        """By load, the ranks of this node that have not yet copied it."""
        self._num_uses: dict[int, int] = {}
        """By load, the number of uses of the region: this rank's copy to its device, and one use for each node to which
        its shard is sent."""
        self._has_news = False
        self._wants_room = False
        self._is_closed = False
        self._listen()
        self._copier = TaskThreads(1, "lohan-weights-copied")
        self._sender = TaskThreads(1, "lohan-weights-sender")

    def _listen(self) -> None:
        """Replace the handlers of messages between two barriers, while no rank sends. This source then gets no message
        for an earlier source, and loses none of its own."""
        handlers = {
            Kind.FILLED: self._on_filled,
            Kind.LOAD_IN_DOUBT: self._on_block_announced,
            Kind.TAKEN: self._on_taken,
            Kind.WEIGHTS_PART: self._on_part,
        }
        self._links.barrier("the end of the transfers of weights", sequence="weights")
        for kind in handlers:
            self._links.remove_handler(kind)
        self._links.barrier("the start of the transfers of weights", sequence="weights")
        for kind, handler in handlers.items():
            self._links.set_handler(kind, handler)

    # Called by the loading thread.

    def begin_load(self, number: int, block: Block, version: int, is_wanted: Callable[[], bool]) -> bool:
        self._free_taken()
        start = self._regions.find_start(self._region_bytes(block))
        is_coming = any(load.block is block and not self._is_over(load) for load in self._loads.values())
        self._wants_room = start is None
        if start is None or is_coming:  # updates deliver a block to only one place at a time
            return False
        self._regions.take_region(number, start, self._region_bytes(block))
        values, coded = self._memory[start:][: self._region_bytes(block)].tensor_split([block.fetched_bytes])
        entry = values.view(block.master.working_dtype)
        is_kept = self._parts.is_kept(block, version, number)
        missing = set() if is_kept else self._parts.senders(block)
        load = _SharedLoad(number, block, version, entry, missing, is_wanted, sends=not is_kept)
        load.coded = coded if coded.numel() else None
        with self._links.lock:
            self._loads[number] = load
            self._not_taken[number] = set(self._ranks.on_this_node)
            self._num_uses[number] = 1 + (len(self._parts.recipients(block)) if load.sends else 0)
            self._refuse_other_blocks(load)
            self._links.notify()  # shards from other nodes may wait for the region
        self._begin_own_shard(load)
        return True

    def _region_bytes(self, block: Block) -> int:
        """Return the bytes of shared memory of a load of the block."""
        return block.fetched_bytes + self._parts.coded_bytes(block)

    def _is_over(self, load: _SharedLoad) -> bool:
        """Return whether another load of the block may begin."""
        return load.has_ended and (load.has_sent_filled or not self._parts.keeps)

    def advance_loads(self) -> bool:
        has_done = False
        for load in list(self._loads.values()):
            while load.reads and load.reads[0].done():
                self._end_read(load, load.reads.popleft())
                has_done = True
            if not load.reads and load.has_ended and not load.has_own and not self._is_undecided(load):
                self._end_own_shard(load)
                has_done = True
            if load.has_own and not load.missing and not load.has_sent_filled:
                load.has_sent_filled = has_done = True
                self._announce_filled(load)
        return has_done

    def is_whole(self, number: int) -> bool:
        return len(self._filled.get(number, ())) == self._ranks.num_local

    def finish_load(self, number: int, weights: Tensor, free: Event | None) -> Event:
        if free is not None:
            self._device.wait(Lane.H2D, free)
        load = self._loads[number]
        if load.block.packed_slices:
            assert self._decoder is not None, f"{load.block} has packed weights"
            self._decoder.load(load.block, weights, load.entry)
        elif load.coded is not None:
            self._copy_coded(load.coded, weights)
        else:
            self._device.copy(Lane.H2D, weights, load.entry)
        ready = self._device.record(Lane.H2D)
        with self._links.lock:
            del self._loads[number], self._filled[number], self._announced[number]
        self._copier.submit(lambda: self._wait_for_copy(number, ready))
        return ready

    def _copy_coded(self, coded: Tensor, weights: Tensor) -> None:
        """Copy the payload of a block to the device, and decode it there to ``weights``."""
        within, payload = self._parts.within, self._coded_on_device
        assert within is not None
        if payload is None:
            payload = coded
        else:
            payload = payload[: coded.numel()]
            self._device.copy(Lane.H2D, payload, coded)
        work = partial(within.codec.decode, payload, weights)
        self._device.run(Lane.H2D, work, fills=weights, reads=(payload,))
        within.count(weights.nbytes, coded.numel())

    def wait(self) -> None:
        first = next(iter(self._loads.values()), None)
        if first is not None:
            cause = first.cause if not first.has_own else "for other ranks"
            with self._device.timeline.task(LOADS_WAIT, cause, block=first.block.name):
                what = f"its shard of {first.block.name} (load {first.number})"
                try:
                    self._links.wait_for(self._take_news, what, peers=lambda: self._awaited(first))
                except RankTimeoutError as timeout:
                    for load in self._loads.values():
                        if load.is_in_doubt and load.error is not None:
                            raise load.error from timeout
                    raise
        elif self._wants_room:
            with self._device.timeline.task(LOADS_WAIT, "for other ranks"):
                self._links.wait_for(self._take_news, "it to copy a block from shared memory", peers=self._slow_to_copy)
        else:
            self._links.wait_for(self._take_news, "loads to carry out", peers=[])

    def notify(self) -> None:
        with self._links.lock:
            self._has_news = True
            self._links.notify()

    def keep_weights(self, first_load: int, kept: PeerWeightCache, changes: CodedTraffic | None) -> None:
        self._parts.keep_weights(first_load, kept, changes)

    def fail(self, error: BaseException) -> None:
        self._links.fail(error)

    def close(self) -> None:
        """Stop listening. Later messages of other ranks are ignored."""
        with self._links.lock:
            self._is_closed = True
            self._links.notify()
        for kind in (Kind.FILLED, Kind.LOAD_IN_DOUBT, Kind.TAKEN, Kind.WEIGHTS_PART):
            self._links.set_handler(kind, lambda _peer, _numbers, _payload: None)
        self._copier.close()
        self._sender.close()

    # This rank's shard.

    def _begin_own_shard(self, load: _SharedLoad) -> None:
        load.has_ended, load.error, load.is_in_doubt = False, None, False
        first, last = load.block.rank_ranges[self._ranks.rank]
        with self._device.timeline.task(LOADS_WAIT, "for updates to be written", block=load.block.name):
            delivery = self._deliver(load.block, load.entry[: load.block.stored_numel], None)
        for part in load.block.fetched_parts(first, last):
            content, wanted = load.entry[part.first : part.last], list(delivery.ranges_to_read())
            if part.kind != PARAM:
                content, wanted = content.view(torch.uint8), [(part.start, part.stop)]
            for start, stop in _within(wanted, part.start, part.stop):
                for low, high in ranges(stop - start, self._read_numel(load.block, part.kind)):
                    view = content[start + low - part.start : start + high - part.start]
                    load.reads.append(self._store.read(load.block.name, part.kind, start + low, view, is_urgent=True))
        if not load.sends and self._parts.keeps:
            load.reads.extend(self._parts.begin_read(load.block, load.entry, self._read_numel(load.block)))
        for read in load.reads:
            read.add_done_callback(self.notify)
        delivery.set_listener(_OwnShardEnd(self, load))

    def _read_numel(self, block: Block, kind: str = PARAM) -> int:
        """Return the elements of one read, or bytes of packed weights, which are whole granules."""
        numel, granule_numel = self._read_bytes, block.packed_granule_bytes
        if kind == PARAM:
            numel, granule_numel = numel // block.master.working_dtype.itemsize, block.granule_numel
        return max(1, numel // granule_numel) * granule_numel

    def _end_delivery(self, load: _SharedLoad, error: BaseException | None) -> None:
        with self._links.lock:
            load.error = load.error or error
            load.has_ended = True
        self.notify()

    def _end_read(self, load: _SharedLoad, read: RecordRead) -> None:
        try:
            read.wait()
        except StorageError as error:
            with self._links.lock:
                load.error = load.error or error

    def _end_own_shard(self, load: _SharedLoad) -> None:
        """Handle the end of this rank's reads and deliveries. If the block was forgotten after the load began, the data
        may be stale. The shard is sent anyway, because every receiver drops that load."""
        error = load.error
        if error is None or not (load.is_wanted() or self._parts.matters(load.block, load.version)):
            keeps = self._parts.keeps_load(load.number)
            form, payload = self._parts.make_own(load.block, load.entry, sends=load.sends, keeps=keeps)
            self._parts.code_part(load.block, self._ranks.rank, load.entry, load.coded)
            for rank in self._parts.senders(load.block) if not load.sends and self._parts.keeps else ():
                self._parts.code_part(load.block, rank, load.entry, load.coded)
            load.has_own = True
            if load.sends:
                self._send_part(load, form, payload)
        elif isinstance(error, UpdatesDroppedError) or (isinstance(error, StorageError) and self._may_retry(load)):
            self._begin_own_shard(load)
        elif isinstance(error, CorruptionError) and not load.is_in_doubt:
            # Ranks that load different blocks overwrite each other's shards in the shared memory. So the drive is at
            # fault only if all ranks of the node load the same block.
            load.is_in_doubt = True
            self._announce(Kind.LOAD_IN_DOUBT, load)
        else:
            raise error

    def _is_undecided(self, load: _SharedLoad) -> bool:
        """Return whether another rank may still turn out to be the cause of a wrong checksum."""
        if not load.is_in_doubt or not (load.is_wanted() or self._parts.matters(load.block, load.version)):
            return False
        with self._links.lock:
            return bool(self._not_announced(load))

    @staticmethod
    def _may_retry(load: _SharedLoad) -> bool:
        """Return whether to repeat a failed load. An update that makes the load unwanted may have overwritten the data
        during the read, so one repetition is allowed."""
        may_retry, load.has_retried = not load.has_retried, True
        return may_retry

    def _announce_filled(self, load: _SharedLoad) -> None:
        self._announce(Kind.FILLED, load)
        with self._links.lock:
            self._filled[load.number].add(self._ranks.rank)

    def _announce(self, kind: Kind, load: _SharedLoad) -> None:
        for rank in self._ranks.on_this_node:
            if rank != self._ranks.rank:
                self._links.send(rank, kind, load.number, self._number_of[load.block])

    # Other ranks of this node.

    def _on_filled(self, rank: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        with self._links.lock:
            self._on_block_announced(rank, numbers, payload)
            self._filled[numbers[0]].add(rank)

    def _on_block_announced(self, rank: int, numbers: tuple[int, ...], _payload: PayloadReader | None) -> None:
        number, block_number = numbers
        with self._links.lock:
            load = self._loads.get(number)
            if load is not None:
                self._refuse_other_block(load, rank, block_number)
            self._announced[number][rank] = block_number
        self.notify()

    def _refuse_other_blocks(self, load: _SharedLoad) -> None:
        for rank, block_number in self._announced[load.number].items():
            self._refuse_other_block(load, rank, block_number)

    def _refuse_other_block(self, load: _SharedLoad, rank: int, block_number: int) -> None:
        other = self._blocks[block_number]
        if other is not load.block:
            raise RanksDisagreeError(
                f"load {load.number} is {load.block.name} on rank {self._ranks.rank} and {other.name} on rank {rank}, "
                "but all ranks must run the same forwards and backwards in the same order; look for code that only "
                "some ranks run, such as a callback that evaluates, or layers that are skipped at random"
            )

    def _wait_for_copy(self, number: int, copied: Event) -> None:
        copied.synchronize()
        self._end_one_use(number)

    def _end_one_use(self, number: int) -> None:
        """Count one use less after this rank has copied the block, or has sent its shard to another node."""
        with self._links.lock:
            self._num_uses[number] -= 1
            if self._num_uses[number]:
                return
            del self._num_uses[number]
            self._not_taken[number].discard(self._ranks.rank)
        try:
            for rank in self._ranks.on_this_node:
                if rank != self._ranks.rank:
                    self._links.send(rank, Kind.TAKEN, number)
        except Exception as error:  # another rank must not wait forever
            self._links.fail(error)
            return
        self.notify()

    def _on_taken(self, rank: int, numbers: tuple[int, ...], _payload: PayloadReader | None) -> None:
        (number,) = numbers
        with self._links.lock:
            self._not_taken[number].discard(rank)
        self.notify()

    def _free_taken(self) -> None:
        with self._links.lock:
            taken = [number for number, ranks in self._not_taken.items() if not ranks]
            for number in taken:
                del self._not_taken[number]
                self._regions.free_region(number)

    def _slow_to_copy(self) -> list[int]:
        """Return the ranks that have not yet copied an earlier block whose region the next block needs. The caller
        holds the links' lock."""
        return sorted({rank for ranks in self._not_taken.values() for rank in ranks})

    def _awaited(self, load: _SharedLoad) -> list[int]:
        """Return the ranks whose shards are missing, if this rank's shard is complete. If its checksum is in doubt,
        return the ranks whose block is unknown. The caller holds the links' lock."""
        if load.is_in_doubt:
            return self._not_announced(load)
        if not load.has_own:
            return []
        if load.missing:
            return sorted(load.missing)
        return [rank for rank in self._ranks.on_this_node if rank not in self._filled[load.number]]

    def _not_announced(self, load: _SharedLoad) -> list[int]:
        """Return the ranks of this node that have not announced the block of this load or of an earlier one. The caller
        holds the links' lock."""
        numbers = [number for number in self._loads if number <= load.number]
        others = (rank for rank in self._ranks.on_this_node if rank != self._ranks.rank)
        return [rank for rank in others if any(rank not in self._announced[number] for number in numbers)]

    def _take_news(self) -> bool:
        """Caller holds the links' lock."""
        had_news, self._has_news = self._has_news, False
        return had_news

    # Other nodes.

    def _send_part(self, load: _SharedLoad, form: int, payload: Tensor) -> None:
        """Send on a separate thread, so that a node without room delays nothing else."""
        for rank in self._parts.recipients(load.block):
            self._sender.submit(partial(self._send_part_to, rank, load, form, payload))

    def _send_part_to(self, rank: int, load: _SharedLoad, form: int, payload: Tensor) -> None:
        numbers = (load.number, self._number_of[load.block], form)
        try:
            self._links.send(rank, Kind.WEIGHTS_PART, *numbers, payload=payload, channel=Channel.WEIGHTS)
        except Exception as error:  # another rank must not wait forever
            self._links.fail(error)
            return
        self._parts.count(load.block, payload)
        self._end_one_use(load.number)

    def _on_part(self, rank: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        """Receive a shard. Waits for room in the shared memory, and the sending rank waits meanwhile."""
        number, block_number, form = numbers
        assert payload is not None
        self._links.wait_for(lambda: self._is_closed or number in self._loads, "room for weights", peers=[])
        with self._links.lock:
            load = self._loads.get(number)
            if load is None:
                return
            self._refuse_other_block(load, rank, block_number)
        keeps = self._parts.keeps_load(load.number)
        self._parts.receive(load.block, rank, form, payload, load.entry, keeps=keeps)
        self._parts.code_part(load.block, rank, load.entry, load.coded)
        with self._links.lock:
            load.missing.discard(rank)
        self.notify()


@dataclass(frozen=True, eq=False)
class _OwnShardEnd(DeliveryListener):
    source: SharedWeights
    load: _SharedLoad

    def on_delivered(self, error: BaseException | None) -> None:
        self.source._end_delivery(self.load, error)


def _within(parts: Iterable[tuple[int, int]], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges, cut to [first, last)."""
    for start, stop in parts:
        if max(start, first) < min(stop, last):
            yield max(start, first), min(stop, last)
