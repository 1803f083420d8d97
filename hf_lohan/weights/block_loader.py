"""Loads blocks into slots ahead of their use, on the loader's thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from hf_lohan.costs import SizeClass
from hf_lohan.device import Event, Lane
from hf_lohan.model import Block
from hf_lohan.ranks import CodedTraffic
from hf_lohan.threads import Owner, raised_anew, start_thread
from hf_lohan.timeline import COMPUTE_WAITS
from hf_lohan.updates import OnDelivered
from hf_lohan.weights.load_order import NextLayer, NextLoad, SlotLoad
from hf_lohan.weights.peer_weights import PeerWeightCache
from hf_lohan.weights.schedule import LoadSchedule, PassSchedule
from hf_lohan.weights.shared_source import SharedWeights, StaleError
from hf_lohan.weights.slot_ring import Slot, SlotRing

_MORE_AHEAD = 2
"""With several ranks, blocks are loaded at most the number of layer slots plus this number of uses ahead."""
_TAKES_BACK_AFTER_S = 0.2


class WeightSource(Protocol):
    """Loads weights into slots. Only the source knows where the weights are, and in how many parts."""

    def begin_load(self, block: Block, slot: Slot, on_delivered: OnDelivered) -> None:
        """Request the reads of a block. ``on_delivered`` is called when all copies are enqueued on the H2D lane, or
        with an error. It may be called within `begin_load`, within a later call, or on the updating thread. One thread
        calls `begin_load`, in the order of loads. Raises the error if the load cannot begin."""

    def finish_loads(self) -> None:
        """Wait until all reads have ended and their copies are enqueued."""


class BlockLoader:
    """Loads blocks into slots on one thread. A `PassSchedule` decides which blocks, and how far ahead of their use. The
    thread chooses a load only when the load begins (`NextLoad`), so an urgent load is always next. A block is loaded
    ahead only into a slot whose current block is needed later than the new block, or not at all."""

    def __init__(
        self,
        ring: SlotRing,
        source: WeightSource,
        schedule: PassSchedule[Any],
        next_load: NextLoad,
        *,
        overlaps_loads: bool = False,
        thread_name: str = "lohan-prefetch",
    ) -> None:
        """``overlaps_loads``: the reads of a load begin before the reads of the previous load have ended. Copies then
        wait for slots that compute still reads. `LayerLoader` does not overlap loads, because the copies of the block
        that is needed first would be delayed."""
        self._ring = ring
        self._source = source
        self._schedule = schedule
        self._next_load = next_load
        self._overlaps_loads = overlaps_loads
        self._thread_name = thread_name
        self._failure: BaseException | None = None
        self._thread_ended_by: BaseException | None = None
        self._is_closed = False
        self._owner = Owner()
        self.beside: BlockLoader | None = None
        """Loads and hands out other blocks in the same passes, such as experts."""
        self.num_urgent = 0
        self._thread: threading.Thread | None = None

    def _start(self) -> None:
        """Start the thread. Call this after all that the thread uses exists."""
        self._thread = start_thread(self._run, self._thread_name, beside_kernels=self._ring.device.shares_cores)

    # Called by the computing thread.

    def begin_pass(self, *, is_training: bool) -> None:
        """Begin a pass, which is a forward, and in training its backward too."""
        with self._ring.lock:
            self._schedule.begin_pass(is_training=is_training)
            self._reset_failure()
            self._ring.changed.notify_all()
        if self.beside is not None:
            self.beside.begin_pass(is_training=is_training)

    def foresee_pass(self, *, is_training: bool) -> None:
        """Begin to load the blocks that the next pass of this kind needs first."""
        with self._ring.lock:
            self._schedule.foresee_pass(is_training=is_training)
            self._ring.changed.notify_all()
        if self.beside is not None:
            self.beside.foresee_pass(is_training=is_training)

    def end_pass(self) -> None:
        """End a complete pass. The next pass of its kind follows its order."""
        with self._ring.lock:
            self._schedule.end_pass()
            self._ring.changed.notify_all()  # a pass that this one interrupted may continue
        if self.beside is not None:
            self.beside.end_pass()

    def cancel_pass(self) -> None:
        """End a pass early."""
        with self._ring.lock:
            self._schedule.cancel_pass()
            self._reset_failure()
        if self.beside is not None:
            self.beside.cancel_pass()

    def acquire(self, block: Block, *, for_operation: bool = False) -> Slot:
        """Pin a block, wait until its load is enqueued, and return its slot. Compute that is enqueued afterwards may
        use the slot. ``for_operation``: a single operation, not a module that owns the block, reads a weight."""
        if not self._owner.is_here:
            raise RuntimeError(
                "backward runs in a forked process, in which no thread loads weights; run it in the parent process"
            )
        device = self._ring.device
        with device.timeline.task(COMPUTE_WAITS, "weights", block=block.name), self._ring.lock:
            (self._schedule.use_for_operation if for_operation else self._schedule.use)(block)
            slot, ready = self._pin(block)
        device.wait(Lane.COMPUTE, ready)
        return slot

    def _pin(self, block: Block) -> tuple[Slot, Event]:
        """Caller holds the lock."""
        slot = self._ring.pin(block)
        if slot is None:
            self.num_urgent += 1
            self._order_urgent(block)
            slot = self._ring.pin(block)
            assert slot is not None
        self._ring.changed.notify_all()
        self._ring.changed.wait_for(lambda: slot.ready is not None or self._is_broken)
        self._raise_failure()
        assert slot.ready is not None
        return slot, slot.ready

    @property
    def _is_broken(self) -> bool:
        return self._failure is not None or self._thread_ended_by is not None

    def _raise_failure(self) -> None:
        if self._thread_ended_by is not None:
            raise RuntimeError(
                "the thread that loads weights ended with an internal error, which is a bug of hf_lohan; no committed "
                "step is lost, and a new process can resume from the last one"
            ) from self._thread_ended_by
        if self._failure is not None:
            raise raised_anew(self._failure)

    def close(self) -> None:
        assert self._thread is not None, "the thread was never started"
        with self._ring.lock:
            self._is_closed = True
            self._ring.changed.notify_all()
        self._thread.join()
        if self.beside is not None:
            self.beside.close()

    def _order_urgent(self, block: Block) -> None:
        """Wait until an unforeseen block has a slot. Raises the error that prevents it. The caller holds the lock."""
        self._next_load.urgent.append(block)
        try:
            self._ring.changed.notify_all()
            self._ring.changed.wait_for(lambda: self._ring.is_here(block) or self._is_broken)
            self._raise_failure()
        finally:
            self._next_load.urgent.remove(block)

    def _reset_failure(self) -> None:
        """Forget the failure, because a load that failed may succeed in the next pass."""
        self._failure = None

    # Called by the loading thread.

    def _run(self) -> None:
        try:
            self._load_until_closed()
        except BaseException as error:  # the computing thread must not wait forever
            with self._ring.lock:
                self._thread_ended_by = error
                self._ring.changed.notify_all()

    def _load_until_closed(self) -> None:
        while not self._is_closed:
            load = self._claim_load(waits=not self._overlaps_loads)
            if load is None:
                self._source.finish_loads()
                load = self._claim_load(waits=True)
            if load is not None:
                end = partial(self._end_load, load)
                try:
                    self._source.begin_load(load.block, load.slot, end)
                    if not self._overlaps_loads:
                        self._source.finish_loads()
                except BaseException as error:
                    end(error)
        self._source.finish_loads()

    def _claim_load(self, *, waits: bool) -> SlotLoad | None:
        """Return the next load, with its slot claimed; None if the loader is closed, or if nothing can be loaded now
        and ``waits`` is False."""
        with self._ring.lock:
            while not self._is_closed:
                load = self.find_load()
                if load is not None:
                    self._next_load.claim_slot(load)
                    return load
                if not waits:
                    break
                self._wait_for_slot()
        return None

    def _wait_for_slot(self) -> None:
        self._ring.changed.wait()

    def find_load(self) -> SlotLoad | None:
        """Return the next load. The caller holds the lock."""
        return self._next_load.find_load() if self._failure is None else None

    def _end_load(self, load: SlotLoad, error: BaseException | None) -> None:
        """Publish or abandon a load. The next load may begin earlier, because its own block may be needed first."""
        slot = load.slot
        ready = self._ring.device.record(Lane.H2D)
        with self._ring.lock:
            if error is None:
                self._ring.publish(slot, ready)
                if slot.block is load.block:
                    self._note_arrival(load.block)
            else:
                if slot.block is load.block:  # if the block was forgotten, nobody waits for the load
                    self._failure = error
                self._ring.abandon(slot)
            self._next_load.end_load(load)

    def _note_arrival(self, block: Block) -> None:
        """Record that the block's load is enqueued. The caller holds the lock."""


class LayerLoader(BlockLoader):
    """Loads all blocks except experts, in the order of a `LoadSchedule`."""

    def __init__(self, ring: SlotRing, source: WeightSource, forward_order: Sequence[Block]) -> None:
        schedule = LoadSchedule(forward_order, ring.num_slots, carries_on=True)
        super().__init__(ring, source, schedule, NextLayer(schedule, ring))
        self._start()


class RankLoader(BlockLoader):
    """Loads all blocks except experts and rows together with other ranks (`SharedWeights`). Later loads begin while the
    first one runs. An error ends the run on all ranks."""

    def __init__(self, ring: SlotRing, source: SharedWeights, forward_order: Sequence[Block]) -> None:
        # A load that waits for its block's update delays all later loads. Updates run in forward order. The head has
        # its own slot and is updated last, so it must not be loaded first.
        max_ahead = len(ring.slots[SizeClass.LAYER]) + _MORE_AHEAD
        schedule = LoadSchedule(forward_order, ring.num_slots, max_ahead=max_ahead)
        super().__init__(ring, source, schedule, NextLayer(schedule, ring), overlaps_loads=True)
        self._shared = source
        self._no_slot_since_s: float | None = None
        ring.add_callback(source.notify)
        source.serve(lambda: schedule.is_between_passes)
        self._start()

    def keep_weights(self, kept: PeerWeightCache, changes: CodedTraffic | None) -> None:
        """See `SharedWeights.keep_weights`."""
        self._shared.keep_weights(kept, changes)

    def close(self) -> None:
        self._shared.close()
        super().close()

    def _reset_failure(self) -> None:
        """Do nothing, because a failure is final with several ranks."""

    def find_load(self) -> SlotLoad | None:
        found = super().find_load()
        return super().find_load() if self._take_back_slots(is_needed=found is None) else found

    def _take_back_slots(self, *, is_needed: bool) -> bool:
        """Take slots back that updates borrow, if a load has waited for a slot for a moment. The updates may wait for
        ranks that wait for this load. These updates then read the store. Returns whether slots were taken back."""
        borrowed = [slot for slots in self._ring.slots.values() for slot in slots if slot.borrowed]
        if not (is_needed and borrowed and self._next_load.is_due):
            self._no_slot_since_s = None
            return False
        now_s = time.monotonic()
        if self._no_slot_since_s is None:
            self._no_slot_since_s = now_s
        elif now_s - self._no_slot_since_s >= _TAKES_BACK_AFTER_S:
            for slot in borrowed:
                self._ring.take_back(slot)
            return True
        return False

    def _wait_for_slot(self) -> None:
        self._ring.changed.wait(None if self._no_slot_since_s is None else _TAKES_BACK_AFTER_S)

    def _end_load(self, load: SlotLoad, error: BaseException | None) -> None:
        """If another rank has changed the block, empty the slot. The block is loaded again after this rank's own
        change. If compute needs it now, the run ends with the error."""
        with self._ring.lock:
            is_needed = load.slot.block is load.block and load.slot.num_pins > 0
            if isinstance(error, StaleError) and not is_needed:
                self._ring.abandon(load.slot)
                self._next_load.end_load(load)
                return
        super()._end_load(load, error)
        if error is not None and is_needed:
            self._shared.fail(error)
