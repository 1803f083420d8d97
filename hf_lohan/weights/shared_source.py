"""Loads weights with several ranks. Each rank reads its shard of a block into host memory that the ranks of its node
share, and copies the whole block from there to its device.

Each node therefore reads each shard only once, and messages between ranks of one node contain no weights. Between
nodes, each rank sends its shard to the rank with the same local rank on every other node.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from hf_lohan.device import Device, Event, Lane
from hf_lohan.files import StorageError
from hf_lohan.model import Block, ranges
from hf_lohan.planner.record_traffic import PARAM
from hf_lohan.ranks import Channel, CodedTraffic, DeviceTransport, Handler, Kind, Links, PayloadReader
from hf_lohan.store import RecordRead
from hf_lohan.threads import TaskThreads
from hf_lohan.timeline import LOADS_WAIT
from hf_lohan.updates import Delivery, DeliveryListener, UpdatesDroppedError
from hf_lohan.weights.joint_order import UNKNOWN_PLACE, Changes, JointOrder, LentShards, NewWeights, Standing
from hf_lohan.weights.load_order import first_of_period, period_of
from hf_lohan.weights.node_shards import DeviceCopies, NodeShards, SharedRegions
from hf_lohan.weights.peer_weights import PeerWeightCache
from hf_lohan.weights.source import Decoder, RecordReader

_ARRIVES_WITHIN_S = 5.0
_ASKS_AFTER_S = 0.1
"""Seconds that a rank waits for others in a common load before it tells all of them."""


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
    is_kept: bool = False
    """Whether nodes have kept this version. Then groups of several nodes send each other their parts of it."""
    coded: Tensor | None = None
    """The payload of the block for devices, in shared host memory, if a codec rounds it on its way there."""
    has_ended: bool = False
    """Whether the delivery from updates has ended."""
    error: BaseException | None = None
    """The error of a read or a delivery of this rank's shard."""
    has_retried: bool = False
    num_ended: int = 0
    """Number of passes that this rank had ended when it ordered the load."""
    place: int = 0
    """Offset of `entry` in the shared memory, in bytes."""
    has_own_since_s: float = 0.0
    has_asked: bool = False
    reads: deque[RecordRead] = field(default_factory=deque)
    has_own: bool = False
    unsent: tuple[int, Tensor] | None = None
    """Form and payload of this rank's shard, until it is sent to other nodes."""
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
        new_weights: NewWeights,
        changes: Changes,
        links: Links,
        memory: Tensor,
        blocks: Sequence[Block],
        *,
        read_bytes: int,
        lent_piece_bytes: int | None = None,
        parts: NodeShards | None = None,
        decoder: Decoder | None = None,
        transport: DeviceTransport | None = None,
    ) -> None:
        """``store`` has this rank's shard of each block. ``deliver``: see `LocalWeights`; it writes to host memory.
        ``new_weights`` and ``changes``: for loads that not all ranks have in common, see `LentShards`.
        ``memory``: page-aligned uint8 tensor that the node's ranks share. It must have room for the largest block. With
        room for two blocks, loads overlap. ``blocks``: all blocks, in the same order on all ranks. ``read_bytes``:
        bytes of one read. ``lent_piece_bytes``: bytes of one lent piece, by default the same. ``parts``: the shards of
        other nodes, by default sent unrounded. ``decoder``: for blocks with packed weights, which each rank decodes on
        the way from the shared memory to its device. ``transport``: see `DeviceCopies`."""
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
        self._to_device = DeviceCopies(device, links.ranks, self._parts, decoder, blocks, transport)
        self._regions = SharedRegions(memory.numel())
        self._order = JointOrder(links, changes, self._begin_period, self.notify)
        if transport is not None:
            transport.leave_out(self._order.is_common)
        self._lent = LentShards(
            device,
            store,
            new_weights,
            changes,
            links,
            blocks,
            self._parts,
            decoder,
            piece_bytes=lent_piece_bytes or read_bytes,
            notify=self.notify,
        )
        self._changes = changes
        self._loads: dict[int, _SharedLoad] = {}
        """The loads in their order. The links' lock guards this dict and the progress of the loads."""
        self._given_up: list[_SharedLoad] = []
        """Loads that turned out not to be common, and still write to the shared memory."""
        self._filled: defaultdict[int, set[int]] = defaultdict(set)
        """By load, the ranks of this node that have announced their shard."""
        self._not_taken: dict[int, set[int]] = {}
        """By load, the ranks of this node that have not yet copied it."""
        self._num_uses: dict[int, int] = {}
        """By load, the number of uses of the region: this rank's copy to its device, and one use for each node to which
        its shard is sent."""
        self._has_news = False
        self._wants_room = False
        self._awaited_period: int | None = None
        """The period whose first load waits for other ranks."""
        self._standing = Standing(0, lambda _number: False)
        self._looks_at_s = math.inf
        """When `wait` returns at the latest, by `time.monotonic`."""
        self._is_closed = False
        self._num_receiving = 0
        """Number of shards of other nodes that are arriving."""
        self._listen()
        self._copier = TaskThreads(1, "lohan-weights-copied")
        self._sender = TaskThreads(1, "lohan-weights-sender")

    def _listen(self) -> None:
        """Replace the handlers of messages between two barriers, while no rank sends. This source then gets no message
        for an earlier source, and loses none of its own."""
        handlers: dict[Kind, Handler] = {
            Kind.FILLED: self._on_filled,
            Kind.TAKEN: self._on_taken,
            Kind.WEIGHTS_PART: self._on_part,
            **self._order.handlers,
            **self._lent.handlers,
        }
        self._kinds = list(handlers)
        self._links.barrier("the end of the transfers of weights", sequence="weights")
        for kind in handlers:
            self._links.remove_handler(kind)
        self._links.barrier("the start of the transfers of weights", sequence="weights")
        for kind, handler in handlers.items():
            self._links.set_handler(kind, handler)

    # Called by the loading thread.

    def begin_load(
        self, number: int, block: Block, version: int, is_wanted: Callable[[], bool], num_ended: int = 0
    ) -> bool:
        period = period_of(number)
        if not self._order.may_begin(number, num_ended, self._is_drained):
            self._awaited_period = period
            return False
        self._awaited_period = None
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
        missing, recipients = (of(block, is_kept=is_kept) for of in (self._parts.senders, self._parts.recipients))
        sends = not is_kept or bool(recipients)
        load = _SharedLoad(
            number, block, version, entry, set(missing), is_wanted, sends, is_kept, num_ended=num_ended, place=start
        )
        load.coded = coded if coded.numel() else None
        with self._links.lock:
            self._loads[number] = load
            self._not_taken[number] = set(self._ranks.on_this_node)
            self._num_uses[number] = 1 + len(recipients)
            self._order.begin(number, self._number_of[block], start)
            self._links.notify()  # shards from other nodes may wait for the region
        self._begin_own_shard(load)
        return True

    def _region_bytes(self, block: Block) -> int:
        """Return the bytes of shared memory of a load of the block."""
        return block.fetched_bytes + self._parts.coded_bytes(block)

    def _is_over(self, load: _SharedLoad) -> bool:
        """Return whether another load of the block may begin."""
        return load.has_ended and (load.has_sent_filled or not self._parts.keeps)

    def is_common(self, number: int) -> bool:
        return self._order.is_common(number)

    def give_up_loads(self) -> None:
        with self._links.lock:
            for number in [number for number in self._loads if not self._order.is_common(number)]:
                self._given_up.append(self._loads.pop(number))
                self._filled.pop(number, None)
                self._num_uses.pop(number, None)
                self._not_taken.pop(number, None)
            self._links.notify()

    def begin_lent_load(self, number: int, block: Block, weights: Tensor, free: Event | None) -> None:
        self._lent.begin_load(number, block, weights, free)

    def finish_lent_load(self, *, is_wanted: bool) -> Event | None:
        return self._lent.finish_load(is_wanted=is_wanted)

    def stand_by(self, standing: Standing, looks_again_after_s: float) -> None:
        self._standing = standing
        self._looks_at_s = time.monotonic() + looks_again_after_s
        with self._links.lock:
            number = self._order.find_missing(standing)
            if number is not None:
                self._order.cut(number)

    def _is_drained(self) -> bool:
        """Return whether nothing of this rank's earlier loads uses the shared memory."""
        with self._links.lock:
            return not (self._loads or self._given_up or self._num_uses)

    def _begin_period(self, first: int, had_equal_loads: bool) -> None:
        """Begin with empty shared memory, as all ranks do. The caller holds the links' lock."""
        self._regions = SharedRegions(self._memory.numel())
        self._not_taken.clear()
        for number in [number for number in self._filled if number < first]:
            del self._filled[number]
        if not had_equal_loads:
            self._parts.forget_kept()

    def advance_loads(self) -> bool:
        has_done = self._order.declare_cuts()
        for load in self._given_up[:]:
            while load.reads and load.reads[0].done():
                self._end_read(load, load.reads.popleft())
            if not load.reads and load.has_ended:
                self._given_up.remove(load)
                has_done = True
        may_send = True
        for load in list(self._loads.values()):
            while load.reads and load.reads[0].done():
                self._end_read(load, load.reads.popleft())
                has_done = True
            if not load.reads and load.has_ended and not load.has_own:
                self._end_own_shard(load)
                has_done = True
            # Shards are sent in the order of loads, because a receiver without room for one takes none after it.
            may_send = may_send and (load.has_own or not load.sends)
            if may_send and load.unsent is not None:
                self._send_part(load, *load.unsent)
                load.unsent = None
            if load.has_own and not load.missing and not load.has_sent_filled:
                load.has_sent_filled = has_done = True
                self._announce_filled(load)
            elif self._is_due_to_ask(load):
                load.has_asked = True
                self._ask_others(load)
        return has_done

    @staticmethod
    def _is_due_to_ask(load: _SharedLoad) -> bool:
        return load.has_own and not load.has_asked and time.monotonic() - load.has_own_since_s > _ASKS_AFTER_S

    def _ask_others(self, load: _SharedLoad) -> None:
        """Tell all ranks that this rank waits for them, because some may not know it."""
        numbers = load.number, self._number_of[load.block]
        for rank in self._ranks.others:
            place = load.place if rank in self._ranks.on_this_node else UNKNOWN_PLACE
            self._links.send(rank, Kind.LOAD_WANTED, *numbers, place, load.num_ended)

    def is_whole(self, number: int) -> bool:
        return self._order.is_common(number) and len(self._filled.get(number, ())) == self._ranks.num_local

    def finish_load(self, number: int, weights: Tensor, free: Event | None) -> Event | None:
        if free is not None:
            self._device.wait(Lane.H2D, free)
        load = self._loads[number]
        ready = self._to_device.copy(number, load.block, weights, load.entry, load.coded)
        if ready is None:
            self._order.note_cut(number)
            return None
        with self._links.lock:
            del self._loads[number], self._filled[number]
        self._copier.submit(lambda: self._wait_for_copy(number, ready))
        return ready

    def wait(self) -> None:
        lent, first = self._lent.load, next(iter(self._loads.values()), None)
        period = self._awaited_period
        timeline = self._device.timeline
        if lent is not None:
            with timeline.task(LOADS_WAIT, "for other ranks", block=lent.block.name):
                what = f"its shard of {lent.block.name}, which not all ranks load"
                self._links.wait_for(self._has_work, what, peers=self._lent.missing_ranks)
        elif first is not None:
            cause = first.cause if not first.has_own else "for other ranks"
            with timeline.task(LOADS_WAIT, cause, block=first.block.name):
                what = f"its shard of {first.block.name} (load {_shown(first.number)})"
                self._links.wait_for(self._has_work, what, peers=lambda: self._awaited(first))
        elif period is not None and self._is_drained():
            with timeline.task(LOADS_WAIT, "for other ranks"):
                what = "it to finish its loads of the step before"
                self._links.wait_for(self._has_work, what, peers=lambda: self._order.not_begun(period))
        elif self._wants_room:
            with timeline.task(LOADS_WAIT, "for other ranks"):
                self._links.wait_for(self._has_work, "it to copy a block from shared memory", peers=self._slow_to_copy)
        else:
            self._links.wait_for(self._has_work, "loads to carry out", peers=[])

    def _has_work(self) -> bool:
        """Return whether the loading thread has something to do. The caller holds the links' lock."""
        had_news, self._has_news = self._has_news, False
        return (
            had_news
            or self._order.has_undeclared
            or time.monotonic() > self._looks_at_s
            or any(map(self._is_due_to_ask, self._loads.values()))
            or self._order.find_missing(self._standing) is not None
        )

    def notify(self) -> None:
        with self._links.lock:
            self._has_news = True
            self._links.notify()

    def keep_weights(self, first_load: int, kept: PeerWeightCache, changes: CodedTraffic | None) -> None:
        self._parts.keep_weights(first_load, kept, changes)

    def fail(self, error: BaseException) -> None:
        self._links.fail(error)

    def close(self) -> None:
        """Stop listening. Later messages of other ranks are ignored. The files may be closed afterwards."""
        with self._links.lock:
            self._is_closed = True
            self._links.notify()
            # A shard that has begun to arrive may be written to a file.
            self._links.changed.wait_for(lambda: not self._num_receiving, _ARRIVES_WITHIN_S)
        for read in [read for load in (*self._loads.values(), *self._given_up) for read in load.reads]:
            with suppress(StorageError):
                read.wait()
        self._lent.close()
        for kind in self._kinds:
            self._links.set_handler(kind, lambda _peer, _numbers, _payload: None)
        self._copier.close()
        self._sender.close()

    # This rank's shard.

    def _begin_own_shard(self, load: _SharedLoad) -> None:
        load.has_ended, load.error = False, None
        with self._device.timeline.task(LOADS_WAIT, "for updates to be written", block=load.block.name):
            delivery = self._deliver(load.block, load.entry[: load.block.stored_numel], None)
        for part in load.block.fetched_parts(*load.block.rank_ranges[self._ranks.rank]):
            content, wanted = load.entry[part.first : part.last], list(delivery.ranges_to_read())
            if part.kind != PARAM:
                content, wanted = content.view(torch.uint8), [(part.start, part.stop)]
            for start, stop in _within(wanted, part.start, part.stop):
                for low, high in ranges(stop - start, self._read_numel(load.block, part.kind)):
                    view = content[start + low - part.start : start + high - part.start]
                    load.reads.append(self._store.read(load.block.name, part.kind, start + low, view, is_urgent=True))
        if load.is_kept:
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
            for rank in self._parts.kept(load.block) if load.is_kept else ():
                self._parts.code_part(load.block, rank, load.entry, load.coded)
            if load.is_kept and load.sends:
                form, payload = self._parts.grouped(load.block, load.entry)
            load.has_own, load.has_own_since_s = True, time.monotonic()
            load.unsent = (form, payload) if load.sends else None
        elif isinstance(error, UpdatesDroppedError) or (isinstance(error, StorageError) and self._may_retry(load)):
            self._begin_own_shard(load)
        elif isinstance(error, StorageError):
            # A rank that loads another block may have written to this memory. A lent load uses other memory, so its
            # error is true.
            with self._links.lock:
                self._order.cut(load.number)
        else:
            raise error

    @staticmethod
    def _may_retry(load: _SharedLoad) -> bool:
        """Return whether to repeat a failed load. An update that makes the load unwanted may have overwritten the data
        during the read, so one repetition is allowed."""
        may_retry, load.has_retried = not load.has_retried, True
        return may_retry

    def _announce_filled(self, load: _SharedLoad) -> None:
        numbers = load.number, self._number_of[load.block], load.place, load.num_ended
        for rank in set(self._ranks.on_this_node) - {self._ranks.rank}:
            self._links.send(rank, Kind.FILLED, *numbers)
        with self._links.lock:
            self._filled[load.number].add(self._ranks.rank)

    # Other ranks of this node.

    def _on_filled(self, rank: int, numbers: tuple[int, ...], _payload: PayloadReader | None) -> None:
        with self._links.lock:
            self._filled[numbers[0]].add(rank)
            self._order.note_wanted(rank, *numbers)
        self.notify()

    def _wait_for_copy(self, number: int, copied: Event) -> None:
        copied.synchronize()
        self._end_one_use(number)

    def _end_one_use(self, number: int) -> None:
        """Count one use less after this rank has copied the block, or has sent its shard to another node."""
        with self._links.lock:
            if number not in self._num_uses:
                return  # the load was given up
            self._num_uses[number] -= 1
            if self._num_uses[number]:
                return
            del self._num_uses[number]
            self._not_taken[number].discard(self._ranks.rank)
        try:
            for rank in set(self._ranks.on_this_node) - {self._ranks.rank}:
                self._links.send(rank, Kind.TAKEN, number)
        except Exception as error:  # another rank must not wait forever
            self._links.fail(error)
            return
        self.notify()

    def _on_taken(self, rank: int, numbers: tuple[int, ...], _payload: PayloadReader | None) -> None:
        (number,) = numbers
        with self._links.lock:
            self._not_taken.get(number, set()).discard(rank)
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
        """Return the ranks whose shards are missing, if this rank's shard is complete. The caller holds the links'
        lock."""
        if not load.has_own:
            return []
        if load.missing:
            return sorted(load.missing)
        return [rank for rank in self._ranks.on_this_node if rank not in self._filled[load.number]]

    # Other nodes.

    def _send_part(self, load: _SharedLoad, form: int, payload: Tensor) -> None:
        """Send on a separate thread, so that a node without room delays nothing else."""
        for rank in self._parts.recipients(load.block, is_kept=load.is_kept):
            self._sender.submit(partial(self._send_part_to, rank, load, form, payload))

    def _send_part_to(self, rank: int, load: _SharedLoad, form: int, payload: Tensor) -> None:
        numbers = (load.number, self._number_of[load.block], form, load.num_ended)
        try:
            self._links.send(rank, Kind.WEIGHTS_PART, *numbers, payload=payload, channel=Channel.WEIGHTS)
        except Exception as error:  # another rank must not wait forever
            self._links.fail(error)
            return
        if not load.is_kept:
            self._parts.count(load.block, payload)
        self._end_one_use(load.number)

    def _on_part(self, rank: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        """Receive a shard. Waits for room in the shared memory, and the sending rank waits meanwhile."""
        number, block_number, form, num_ended = numbers
        assert payload is not None
        self._order.note_wanted(rank, number, block_number, UNKNOWN_PLACE, num_ended)

        def is_decided() -> bool:
            has_begun = self._order.has_begun(number) or not self._order.is_common(number)
            return self._is_closed or has_begun

        self._links.wait_for(is_decided, "room for weights", peers=[])
        with self._links.lock:
            load = None if self._is_closed else self._loads.get(number)
            if load is None or not self._order.is_common(number):
                return
            self._num_receiving += 1
        try:
            keeps = self._parts.keeps_load(load.number)
            received = self._parts.receive(load.block, rank, form, payload, load.entry, keeps=keeps)
            for of in received:
                self._parts.code_part(load.block, of, load.entry, load.coded)
            with self._links.lock:
                load.missing.discard(rank)
        finally:
            with self._links.lock:
                self._num_receiving -= 1
                self.notify()


def _shown(number: int) -> str:
    """Return a load's number as errors show it."""
    period = period_of(number)
    return f"{number - first_of_period(period)} of step {period}"


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
