"""What the computing thread says of its passes, and how it waits for a block that another thread brings."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Protocol

from hf_lohan.device import Event, Lane
from hf_lohan.model import Block
from hf_lohan.threads import Owner, raised_anew, start_thread
from hf_lohan.timeline import COMPUTE_WAITS
from hf_lohan.weights.slot_ring import Slot, SlotRing


class PassSchedule(Protocol):
    """Is told of passes and uses, and knows what comes. See `LoadSchedule`."""

    def begin(self, *, is_training: bool) -> None: ...

    def foresee(self, *, is_training: bool) -> None: ...

    def end(self) -> None: ...

    def cancel(self) -> None: ...

    def use(self, block: Block) -> None: ...

    def use_for_operation(self, block: Block) -> None: ...


class Loads(Protocol):
    """What the computing thread says of its passes and asks for, whoever brings it. See `BlockLoader`."""

    def begin_pass(self, *, is_training: bool) -> None: ...

    def foresee(self, *, is_training: bool) -> None: ...

    def end_pass(self) -> None: ...

    def cancel_pass(self) -> None: ...

    def acquire(self, block: Block, *, for_operation: bool = False) -> Slot: ...

    def close(self) -> None: ...


class BlockLoader(ABC):
    """One thread brings blocks into slots, as far as it can ahead of their use. What that means is said by those who
    derive from this."""

    def __init__(self, ring: SlotRing, schedule: PassSchedule, *, thread_name: str = "lohan-prefetch") -> None:
        self._ring = ring
        self._schedule = schedule
        self._thread_name = thread_name
        self._failure: BaseException | None = None
        self._thread_ended_by: BaseException | None = None
        self._is_closed = False
        self._owner = Owner()
        self.num_urgent = 0
        self._thread: threading.Thread | None = None

    def _start(self) -> None:
        """To be called when all is built that the thread uses."""
        self._thread = start_thread(self._run, self._thread_name, beside_kernels=self._ring.device.shares_cores)

    # The compute thread's side.

    def begin_pass(self, *, is_training: bool) -> None:
        """A forward starts, with its backward if training."""
        with self._ring.lock:
            self._schedule.begin(is_training=is_training)
            self._forgive()
            self._order_loads()

    def foresee(self, *, is_training: bool) -> None:
        """Start loading what the next such pass will need first."""
        with self._ring.lock:
            self._schedule.foresee(is_training=is_training)
            self._order_loads()

    def end_pass(self) -> None:
        """The pass is complete: its order is what the next one will follow."""
        with self._ring.lock:
            self._schedule.end()
            self._order_loads()  # a pass may go on that it came in between

    def cancel_pass(self) -> None:
        """The pass broke off."""
        with self._ring.lock:
            self._schedule.cancel()
            self._forgive()

    def acquire(self, block: Block, *, for_operation: bool = False) -> Slot:
        """Pin `block`, waiting for its load to be enqueued; compute enqueued from now on may use the slot.
        ``for_operation``: one that reads a weight of it, not a module that owns it."""
        if not self._owner.is_here:
            raise RuntimeError("backward runs in a forked child, where no thread brings weights; run it in its parent")
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
        self._order_loads()
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
                "the thread that loads weights ended with an error of its own, which is a bug of hf_lohan; nothing "
                "that was committed is lost, and a new process resumes from it"
            ) from self._thread_ended_by
        if self._failure is not None:
            raise raised_anew(self._failure)

    def close(self) -> None:
        assert self._thread is not None, "it was never started"
        with self._ring.lock:
            self._is_closed = True
            self._ring.changed.notify_all()
        self._thread.join()

    # What the computing thread asks for. It holds the slots' lock.

    @abstractmethod
    def _order_loads(self) -> None:
        """Something is needed, or a slot is free, that was not before."""

    @abstractmethod
    def _order_urgent(self, block: Block) -> None:
        """Return when the block has a slot, though nobody foresaw its use. Raises what made that impossible."""

    def _forgive(self) -> None:
        """What has failed may work in another pass."""
        self._failure = None

    # The thread's side.

    def _run(self) -> None:
        try:
            self._load_until_closed()
        except BaseException as error:  # else compute would wait for ever
            with self._ring.lock:
                self._thread_ended_by = error
                self._ring.changed.notify_all()

    @abstractmethod
    def _load_until_closed(self) -> None:
        """Bring blocks."""
