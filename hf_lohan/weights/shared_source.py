"""Loads weights with several ranks. Each rank reads its shard of a block into host memory that the ranks of its node
share, and copies the whole block from there to its device.

Each node therefore reads each shard only once, and the ranks of one node send each other no weights. Between nodes,
each rank broadcasts its shard to the ranks with the same local number (`node_shards`).

*Rounds* (`ranks.transport.rounds`) decide which blocks all ranks load together, because each rank has a shard of every
block. A rank's head (its message in a round) has the block that it loads next. When each rank requests a block or waits
for others, all ranks begin to load each requested block. The rank with the fewest loads is first. A rank keeps the
blocks that it requested itself, so ranks whose passes differ for a while (a batch without images, layers skipped at
random, an evaluation of one rank) converge again by themselves. Heads also have the number of loads that are whole on a
rank, and the number that it has copied. So all ranks choose the same place in shared memory for the next load.

*Periods.* `SlotRing.num_changes` counts the changes of weights. A period lies between two changes. Only the requests of
the earliest period are served, so a rank that has stepped waits for the others. If a rank changes a block that another
rank still reads, it tells the others, and the reader gets `StaleError`.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_lohan.costs.record_traffic import PARAM
from hf_lohan.device import Device, Event, Lane
from hf_lohan.files import StorageError
from hf_lohan.model import Block, ranges
from hf_lohan.ranks import CodedTraffic, DeviceLane, LaneClosedError, Links, RanksDisagreeError, Rounds
from hf_lohan.store import RecordRead
from hf_lohan.threads import TaskThreads
from hf_lohan.timeline import LOADS_WAIT
from hf_lohan.updates import Delivery, OnDelivered, UpdatesDroppedError, WeightChange
from hf_lohan.weights.node_shards import DeviceCopies, NodeShards, SharedRegions
from hf_lohan.weights.peer_weights import PeerWeightCache
from hf_lohan.weights.slot_ring import Slot, SlotRing
from hf_lohan.weights.source import Decoder, RecordReader

_HEAD = struct.Struct("<qqqqqqBBBb")
_STALE = struct.Struct("<qq")
_NUM_COPIED = struct.Struct("<q")
_NOTHING = -1
_UNKNOWN = -1


class StaleError(RanksDisagreeError):
    """A rank has changed a block whose earlier weights another rank has requested."""


@dataclass(frozen=True)
class _Head:
    """The message of a rank in a round."""

    num_copied: int
    """Number of loads that the rank has copied, or does not keep. This is the beginning of a packed head."""
    period: int
    progress: int
    """Number of loads that the rank has kept in the period."""
    wanted: int
    """Index of the block that the rank loads next, or `_NOTHING`."""
    version: int
    """`num_changes` after the last change of this block."""
    num_filled: int
    """Number of loads whose shards of this rank and its counterparts are in the memory of the node."""
    is_closed: int
    keeps_weights: int
    serves: int
    """Whether the rank takes part in loads although it requests no block."""
    change: int
    """The change of weights before the period."""
    stale: tuple[tuple[int, int], ...] = ()
    """(load, rank) pairs of loads in progress. The rank has no weights of the load's period any more."""

    def pack(self) -> bytes:
        numbers = self.num_copied, self.period, self.progress, self.wanted, self.version, self.num_filled
        fixed = _HEAD.pack(*numbers, self.is_closed, self.keeps_weights, self.serves, self.change)
        return fixed + b"".join(_STALE.pack(number, rank) for number, rank in self.stale)

    @classmethod
    def unpack(cls, packed: bytes) -> _Head:
        fields: list[Any] = [*_HEAD.unpack_from(packed), tuple(_STALE.iter_unpack(packed[_HEAD.size :]))]
        return cls(*fields)


@dataclass(eq=False)
class _Wanted:
    """A load that this rank's loader has ordered."""

    block: Block
    slot: Slot
    on_delivered: OnDelivered
    period: int
    version: int


@dataclass(eq=False)
class _SharedLoad:
    """A load that all ranks have begun."""

    number: int
    block: Block
    period: int
    entry: Tensor
    """Tensor [block.fetched_numel] in shared host memory: the records of the block that a pass reads. Packed weights
    stay packed."""
    coded: Tensor | None
    """The payload of the block for devices, in shared host memory, if a codec rounds the block for them."""
    is_kept: bool
    """Whether nodes have kept this version. Then groups of several nodes send each other their parts of the block."""
    keeps: bool
    """Whether nodes keep the shards that they receive."""
    ordered: _Wanted | None
    """The load that this rank's loader has ordered; None if only other ranks need the block."""
    is_for_all: bool
    """Whether all ranks of this node keep the block."""
    delivery: Delivery | None = None
    """Delivery of this rank's shard from updates; None if the rank has changed the block."""
    reads: deque[RecordRead] = field(default_factory=deque)
    is_whole: bool = False
    """Whether all shards are in the memory of this node."""
    is_copied: bool = False


class SharedWeights(Rounds):
    """A `WeightSource` with shared memory. Reads, and weights that updates have in RAM, go straight to the shared
    memory."""

    def __init__(
        self,
        device: Device,
        store: RecordReader,
        deliver: Callable[[Block, Tensor, Event | None], Delivery],
        changes: SlotRing,
        links: Links,
        memory: Tensor,
        blocks: Sequence[Block],
        *,
        read_bytes: int,
        parts: NodeShards | None = None,
        decoder: Decoder | None = None,
        transport: DeviceLane | None = None,
    ) -> None:
        """``store`` has this rank's shard of each block. ``deliver``: see `LocalWeights`. It writes to host memory.
        ``memory``: page-aligned uint8 tensor that the node's ranks share. It must have room for the largest block. With
        room for two blocks, loads overlap. ``blocks``: all blocks, in the same order on all ranks. ``read_bytes``:
        bytes of one read. ``parts``: the shards of other nodes, by default sent unrounded. ``decoder``: for blocks with
        packed weights, which each rank decodes on the way from the shared memory to its device. ``transport``: see
        `DeviceCopies`."""
        super().__init__(links, links.open("loads", carries="weights"), beside_kernels=device.shares_cores)
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
        self._ranks = links.ranks
        self._memory = memory
        self._blocks = blocks
        self._number_of = {block: number for number, block in enumerate(blocks)}
        self._read_bytes = read_bytes
        self._to_device = DeviceCopies(device, links.ranks, self._parts, decoder, blocks, transport)
        # All nodes load the same blocks, so the node with the least memory decides.
        sizes = links.all_gather("the memory for weights", str(memory.numel()).encode())
        self._regions = SharedRegions(min(map(int, sizes)))
        self._changes = changes
        self._wanted: deque[_Wanted] = deque()
        self._loads: deque[_SharedLoad] = deque()
        """The loads in progress, in their order. `lock` guards this and their progress."""
        self._next_number = self._num_filled = self._num_whole = self._num_copied = 0
        self._period = self._progress = 0
        self._stale: dict[int, int] = {}
        """For each load's number, a rank that has no weights of the load's period any more."""
        self._own_stale: dict[int, int] = {}
        """Entries of `_stale` that this rank sends: its own, and entries of ranks that have sent it shards."""
        self._kept: tuple[PeerWeightCache, CodedTraffic | None] | None = None
        """The arguments of `keep_weights`, until all ranks have called it."""
        self._is_between_passes: Callable[[], bool] = lambda: True
        self._copier = TaskThreads(1, "lohan-weights-copied")
        self._filler = TaskThreads(1, "lohan-weights-filled")
        self._arrivals = TaskThreads(1, "lohan-weights-arrived")
        self._parts.open_lanes(links)

    def serve(self, is_between_passes: Callable[[], bool]) -> None:
        """Begin to take part in loads. ``is_between_passes`` returns whether this rank runs no pass."""
        self._is_between_passes = is_between_passes
        self.start()

    # Called by the loading thread.

    def begin_load(self, block: Block, slot: Slot, on_delivered: OnDelivered) -> None:
        """Order the load of a block. See `WeightSource`."""
        with self.lock:
            self.raise_if_broken()
            period, version = self._changes.state_of(block)
            wanted = _Wanted(block, slot, on_delivered, period, version)
            self.last_request_s = time.monotonic()
            # Another rank may have requested the block a moment ago, and this rank has served it.
            coming = (load for load in self._loads if load.block is block and load.period == period)
            served = next((load for load in coming if load.ordered is None and not load.is_whole), None)
            if served is not None:
                served.ordered = wanted
                self._progress += 1
                return
            self._wanted.append(wanted)
            self._links.watch.beat()
            self.changed.notify_all()

    def finish_loads(self) -> None:
        """Do nothing, because this rank's loads end while the thread waits for a slot."""

    def keep_weights(self, kept: PeerWeightCache, changes: CodedTraffic | None) -> None:
        """Keep the weights of other nodes in ``kept``, from the first load after all ranks have called this. With
        ``changes``, which counts the traffic, only the changes of each step are sent."""
        self._parts.open_group_lane(self._links, kept.way)
        with self.lock:
            self._kept = kept, changes
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        self._links.fail(error)

    def close(self) -> None:
        """Leave all later loads. The files may be closed afterwards."""
        super().close()
        self._parts.close_lanes()
        self._filler.close()
        self._arrivals.close()
        self._copier.close()

    # Rounds. Called by their thread.

    def head(self) -> bytes:
        wanted = self._wanted[0] if self._wanted and not self.is_closed else None
        period = self._changes.num_changes if wanted is None else wanted.period
        if period != self._period:
            self._period, self._progress = period, 0
        change = self._changes.change_before(period)
        return _Head(
            self._num_copied,
            period,
            self._progress,
            _NOTHING if wanted is None else self._number_of[wanted.block],
            0 if wanted is None else wanted.version,
            self._num_filled,
            self.is_closed,
            self._kept is not None,
            self.serves,
            _UNKNOWN if change is None else int(change),
            tuple(sorted(self._own_stale.items())),
        ).pack()

    def urgent_part(self, head: bytes) -> bytes:
        # The number of copies matters only when the next load begins. Then other fields of the head have changed too.
        return head[_NUM_COPIED.size :]

    def is_waiting(self) -> bool:
        # A rank whose own shard has not arrived yet has news later.
        return (bool(self._wanted) and not self.is_closed) or (self._num_filled == self._next_number > self._num_whole)

    def is_between_passes(self) -> bool:
        return self._is_between_passes()

    def shown_wait(self) -> AbstractContextManager[object]:
        first = next((load for load in self._loads if load.ordered is not None), None)
        if first is None or first.number >= self._num_filled:
            return nullcontext()  # the thread that fills the memory shows its waits
        return self._device.timeline.task(LOADS_WAIT, "for other ranks", block=first.block.name)

    def carry_out(self, heads: Sequence[bytes]) -> bool:
        told = [_Head.unpack(head) for head in heads]
        self._refuse_other_changes(told)
        with self.lock:
            for of_rank in told:
                for number, rank in of_rank.stale:
                    self._stale.setdefault(number, rank)
            if any(of_rank.stale for of_rank in told):
                # Some node has kept weights of a later period. All ranks know it now, before the next load begins.
                self._parts.forget_kept()
            if all(of_rank.keeps_weights for of_rank in told) and self._kept is not None:
                self._parts.keep_weights(*self._kept)
                self._kept = None
            num_whole = min(told[rank].num_filled for rank in self._ranks.on_this_node)
            whole = [load for load in self._loads if self._num_whole <= load.number < num_whole]
            self._num_whole = max(self._num_whole, num_whole)
        for load in whole:
            self._end_load(load)
        with self.lock:
            num_copied = min(of_rank.num_copied for of_rank in told)
            while self._loads and self._loads[0].number < num_copied:
                load = self._loads.popleft()
                self._regions.free_region(load.number)
                if load.number in self._stale:  # all ranks know it by now
                    del self._stale[load.number]
                    self._own_stale.pop(load.number, None)
                    self._parts.forget_kept()
            begun = self._begin_wanted(told)
            is_over = all(of_rank.is_closed for of_rank in told) and not self._loads
        for load, is_coming in begun:  # without the lock, because this waits for updates
            if not is_coming:
                self._begin_own_shard(load)
            self._filler.submit(partial(self._fill, load, has_begun=not is_coming))
        return not is_over

    def _refuse_other_changes(self, told: Sequence[_Head]) -> None:
        own = told[self._ranks.rank]
        for rank, of_rank in enumerate(told):
            is_known = _UNKNOWN not in (own.change, of_rank.change)
            if of_rank.period == own.period and of_rank.change != own.change and is_known:
                raise RanksDisagreeError(
                    f"rank {self._ranks.rank} {WeightChange(own.change).words}, and rank {rank} "
                    f"{WeightChange(of_rank.change).words} instead; all ranks must take the same steps; look for code "
                    "that only some of them run"
                )

    def _begin_wanted(self, told: Sequence[_Head]) -> list[tuple[_SharedLoad, bool]]:
        """Begin the loads that some rank has requested. All ranks begin the same loads. Loads of later periods wait.
        Returns pairs of a load and whether an earlier load of its block still waits for shards."""
        begun: list[tuple[_SharedLoad, bool]] = []
        taking_part = [of_rank for of_rank in told if not of_rank.is_closed]
        period = min((of_rank.period for of_rank in taking_part), default=0)
        if any(
            of_rank.wanted == _NOTHING and not of_rank.serves for of_rank in taking_part if of_rank.period == period
        ):
            return begun  # that rank will want the same block, or wait
        turns = sorted(
            (of_rank.progress, rank)
            for rank, of_rank in enumerate(told)
            if of_rank.wanted != _NOTHING and of_rank.period <= period
        )
        for wanted in dict.fromkeys(told[rank].wanted for _, rank in turns):
            block = self._blocks[wanted]
            start = self._regions.find_start(self._region_bytes(block))
            if start is None:
                break
            keepers = [rank for _, rank in turns if told[rank].wanted == wanted]
            version, number = told[keepers[0]].version, self._next_number
            self._next_number += 1
            self._regions.take_region(number, start, self._region_bytes(block))
            values, coded = self._memory[start:][: self._region_bytes(block)].tensor_split([block.fetched_bytes])
            own = next((own for own in self._wanted if own.block is block and own.period == period), None)
            if own is not None:
                self._wanted.remove(own)
                self._progress += 1
            load = _SharedLoad(
                number,
                block,
                told[keepers[0]].period,
                values.view(block.master.working_dtype),
                coded if coded.numel() else None,
                self._parts.is_kept(block, version),
                self._parts.keeps,
                own,
                set(self._ranks.on_this_node) <= set(keepers),
            )
            # Updates deliver a block to one place at a time.
            is_coming = any(other.block is block for other in self._loads if other.number >= self._num_filled)
            self._loads.append(load)
            begun.append((load, is_coming))
        return begun

    def break_off(self, error: BaseException) -> None:
        with self.lock:
            loads, wanted = list(self._loads), list(self._wanted)
            self._wanted.clear()
        for load in loads:
            _deliver(load, error, self.lock)
        for one in wanted:
            one.on_delivered(error)

    def _region_bytes(self, block: Block) -> int:
        return block.fetched_bytes + self._parts.coded_bytes(block)

    # This rank's shard.

    def advance(self) -> None:
        """Forget loads that were ordered before the last change of their block."""
        with self.lock:
            period = self._changes.num_changes
            old = [wanted for wanted in self._wanted if wanted.period < period]
            void = [wanted for wanted in old if wanted.slot.block is not wanted.block]
            for wanted in void:
                self._wanted.remove(wanted)
            for wanted in old:
                wanted.period, wanted.version = self._changes.state_of(wanted.block)
        for wanted in void:
            wanted.on_delivered(stale_error(self._ranks.rank, wanted.block))

    def _begin_own_shard(self, load: _SharedLoad) -> None:
        """Let updates deliver this rank's shard, and request the reads of the parts that they do not deliver."""
        load.delivery = None
        if not self._changes.is_unchanged_since(load.block, load.period):
            return  # `_wait_for_own_shard` notes the change
        with self._device.timeline.task(LOADS_WAIT, "for updates to be written", block=load.block.name):
            load.delivery = self._deliver(load.block, load.entry[: load.block.stored_numel], None)
        for part in load.block.fetched_parts(*load.block.rank_ranges[self._ranks.rank]):
            content, wanted = load.entry[part.first : part.last], list(load.delivery.ranges_to_read())
            if part.kind != PARAM:
                content, wanted = content.view(torch.uint8), [(part.start, part.stop)]
            for start, stop in _within(wanted, part.start, part.stop):
                for low, high in ranges(stop - start, self._read_numel(load.block, part.kind)):
                    view = content[start + low - part.start : start + high - part.start]
                    load.reads.append(self._store.read(load.block.name, part.kind, start + low, view, is_urgent=True))
        if load.is_kept:
            load.reads.extend(self._parts.begin_read(load.block, load.entry, self._read_numel(load.block)))

    def _read_numel(self, block: Block, kind: str = PARAM) -> int:
        """Return the number of elements (of packed weights: bytes) in one read. A read has whole granules."""
        numel, granule_numel = self._read_bytes, block.packed_granule_bytes
        if kind == PARAM:
            numel, granule_numel = numel // block.master.working_dtype.itemsize, block.granule_numel
        return max(1, numel // granule_numel) * granule_numel

    def _fill(self, load: _SharedLoad, *, has_begun: bool) -> None:
        """Put this rank's shard into the memory of the node, and send it to other nodes. One thread does this for one
        load after the other, while the drive reads for later loads, and shards of earlier loads are in transit."""
        try:
            if not has_begun or self._parts.takes_memory(is_kept=load.is_kept, keeps=load.keeps):
                self._wait_for_earlier(load)
            if not has_begun:
                self._begin_own_shard(load)
            self._wait_for_own_shard(load)
            form, payload = self._parts.make_own(load.block, load.entry, is_kept=load.is_kept, keeps=load.keeps)
            end_exchange = None
            if self._parts.is_sent(load.block, is_kept=load.is_kept):
                end_exchange = self._parts.begin_exchange(
                    load.block,
                    form,
                    payload,
                    load.entry,
                    is_kept=load.is_kept,
                    keeps=load.keeps,
                    is_stale=load.number in self._own_stale,
                )
        except LaneClosedError:
            return
        except BaseException as error:
            self._links.fail(error)  # the thread of the rounds then raises the error
            return
        self._arrivals.submit(partial(self._end_fill, load, end_exchange))

    def _wait_for_earlier(self, load: _SharedLoad) -> None:
        """Wait until all shards of earlier loads are in the memory of this node."""
        with self._parts.waiting(self._links), self.lock:
            while self._num_filled < load.number:
                self._lane.raise_if_closed()
                self._links.raise_if_failed(f"waited for {load.block.name}")
                self.changed.wait()  # a failure, or the end of the lane, ends this wait

    def _end_fill(self, load: _SharedLoad, end_exchange: Callable[[], tuple[list[int], list[int]]] | None) -> None:
        """Put the shards of this rank's counterparts into the memory of the node. One thread does this for one load
        after the other."""
        try:
            arrived, stale = ([], []) if end_exchange is None else end_exchange()
            self._note_stale(load, stale)
            kept = self._parts.kept(load.block) if load.is_kept else ()
            for rank in (self._ranks.rank, *kept, *arrived):
                self._parts.code_part(load.block, rank, load.entry, load.coded)
            with self.lock:
                self._num_filled += 1
                if self._ranks.num_local == 1:
                    self._num_whole = self._num_filled
                self.changed.notify_all()
            if self._ranks.num_local == 1:  # no other rank fills this memory
                self._end_load(load)
        except LaneClosedError:
            return
        except BaseException as error:
            self._links.fail(error)

    def _wait_for_own_shard(self, load: _SharedLoad) -> None:
        """Wait for this rank's shard. If the rank has changed the block meanwhile, the shard may be of a later period.
        The rank sends it nevertheless, because the others wait for it."""
        has_retried = False
        while True:
            error: BaseException | None = None
            try:
                with self._device.timeline.task(LOADS_WAIT, "for the SSD", block=load.block.name):
                    while load.reads:
                        load.reads.popleft().wait()
                if load.delivery is not None:
                    with self._device.timeline.task(LOADS_WAIT, "for updates to be written", block=load.block.name):
                        load.delivery.wait()
            except (StorageError, UpdatesDroppedError) as failed:
                error = failed
                _wait_for_all(load)
            is_current = self._changes.is_unchanged_since(load.block, load.period)
            if error is None or not is_current:
                break
            if isinstance(error, StorageError):
                # An update may have overwritten the data during the read, so one repetition is allowed.
                if has_retried:
                    raise error
                has_retried = True
            self._begin_own_shard(load)
        if not is_current:
            self._note_stale(load, [self._ranks.rank])

    def _note_stale(self, load: _SharedLoad, ranks: Sequence[int]) -> None:
        """Record that these ranks have sent shards of a later period. Called before this rank reports filled memory."""
        with self.lock:
            for rank in ranks:
                self._own_stale.setdefault(load.number, rank)
                self._stale.setdefault(load.number, rank)

    # The whole block.

    def _end_load(self, load: _SharedLoad) -> None:
        """Copy a block, whose shards are all in the memory of this node, to this rank's slot."""
        with self.lock:
            own, load.is_whole, stale = load.ordered, True, self._stale.get(load.number)
        if own is None or stale is not None:
            self._note_copied(load)
            if stale is not None:
                _deliver(load, stale_error(stale, load.block), self.lock)
            return
        if own.slot.last_use is not None:
            self._device.wait(Lane.H2D, own.slot.last_use)
        weights = own.slot.weights[: load.block.numel]
        ready = self._to_device.copy(load.block, weights, load.entry, load.coded, is_for_all=load.is_for_all)
        _deliver(load, None, self.lock)
        self._copier.submit(partial(self._wait_for_copy, load, ready))

    def _wait_for_copy(self, load: _SharedLoad, copied: Event) -> None:
        copied.synchronize()
        self._note_copied(load)

    def _note_copied(self, load: _SharedLoad) -> None:
        with self.lock:
            load.is_copied = True
            self._num_copied = next((one.number for one in self._loads if not one.is_copied), self._next_number)
            self.changed.notify_all()


def stale_error(rank: int, block: Block) -> StaleError:
    return StaleError(
        f"rank {rank} ends a step with step() or zero_grad(), which changes {block.name}, while another rank still "
        "reads the earlier weights, between clip_grad_norm_() and step(); read weights before clip_grad_norm_() "
        "or after step(), or let all ranks wait for each other before step() (accelerator.wait_for_everyone())"
    )


def _deliver(load: _SharedLoad, error: BaseException | None, lock: AbstractContextManager[object]) -> None:
    """Tell the loader that its load has ended, unless the loader knows it already."""
    with lock:
        own, load.ordered = load.ordered, None
    if own is not None:
        own.on_delivered(error)


def _wait_for_all(load: _SharedLoad) -> None:
    """Wait until nothing writes to the load's memory any more."""
    while load.reads:
        with suppress(StorageError):
            load.reads.popleft().wait()
    if load.delivery is not None:
        with suppress(Exception):
            load.delivery.wait()


def _within(parts: Iterable[tuple[int, int]], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges, cut to [first, last)."""
    for start, stop in parts:
        if max(start, first) < min(stop, last):
            yield max(start, first), min(stop, last)
