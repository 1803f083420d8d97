"""A device whose copies run later, on other threads, ordered only by the events for which the engine waits.

It finds missing waits without a GPU. Copies are queued and run after random delays. Until a copy has run, its
destination contains NaN. Compute runs immediately, as on the CPU, and its possible lateness is only recorded. Every
event that is recorded on COMPUTE has a time, and the tensors that it covers are busy until that time. Each copy lane
knows the times for which it has waited, or with which the host had synchronised when it enqueued the copy. A copy to a
busy tensor, or of a tensor that compute wrote, would race on a GPU if the lane does not know its time. Here such a copy
writes NaN.
"""

from __future__ import annotations

import queue
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_lohan.device import COPY_LANES, CpuDevice, Event, Lane
from hf_lohan.timeline import Timeline


@dataclass(frozen=True)
class WaitSite:
    """A place in the engine that waits for an event."""

    file: str
    function: str
    line: int


class _ComputeEvent(Event):
    def __init__(self, device: AsyncDevice, compute_time: int) -> None:
        self.device = device
        self.compute_time = compute_time

    def synchronize(self) -> None:
        if self.device.heeds_wait():
            self.device.host_knows = max(self.device.host_knows, self.compute_time)

    def is_reached(self) -> bool:
        return self.device.host_knows >= self.compute_time


class _FetchEvent(_ComputeEvent):
    """The event of a fetch. The fetched data is present only after a wait."""

    def __init__(self, device: AsyncDevice, compute_time: int, dst: Tensor, src: Tensor) -> None:
        super().__init__(device, compute_time)
        self._dst, self._fetched = dst, src.clone()
        _poison(dst)

    def synchronize(self) -> None:
        if self.device.heeds_wait():
            self.device.host_knows = max(self.device.host_knows, self.compute_time)
            self._dst.copy_(self._fetched)


class _CopyEvent(Event):
    def __init__(self, device: AsyncDevice) -> None:
        self.device = device
        self.reached = threading.Event()

    def block(self) -> None:
        self.reached.wait()

    def synchronize(self) -> None:
        if self.device.heeds_wait():
            self.reached.wait()

    def is_reached(self) -> bool:
        return self.reached.is_set()


class _CopyLane:
    """One thread that runs its queue in order."""

    def __init__(self, name: str) -> None:
        self.knows = 0
        self.queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while True:
            self.queue.get()()


class AsyncDevice(CpuDevice):
    """See the module's description. `ignored` waits are dropped, to prove that each wait is needed."""

    def __init__(
        self,
        seed: int = 0,
        *,
        max_delay_s: float = 2e-3,
        ignored: frozenset[WaitSite] = frozenset(),
        timeline: Timeline | None = None,
    ) -> None:
        super().__init__(timeline)
        self.memory_is_host = False
        self._random = random.Random(seed)
        self._max_delay_s = max_delay_s
        self._ignored = ignored
        self._lanes = {lane: _CopyLane(f"async-{lane.value}") for lane in COPY_LANES}
        self._compute_time = 0
        self._busy_until: dict[int, int] = {}
        self._written_until: dict[int, int] = {}
        self._read_in_lane: set[int] = set()
        """Memory that work in a lane reads, so that a later copy in that lane may be enqueued before it is read."""
        self._in_block: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        """By address of a span, its memory and its offset there."""
        self.host_knows = 0
        self.wait_sites: set[WaitSite] = set()
        self.num_races = 0

    def heeds_wait(self) -> bool:
        """Note the caller as a site of a wait. Returns False if its wait is ignored."""
        frame = sys._getframe(2)
        site = WaitSite(frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno)
        self.wait_sites.add(site)
        return site not in self._ignored

    def span(self, memory: Tensor, start: int, num_bytes: int) -> Tensor:
        span = super().span(memory, start, num_bytes)
        self._in_block[span.data_ptr()] = weakref.ref(memory), start
        return span

    def _without_span(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the same memory that does not keep a span alive, as a copy of a GPU would not."""
        storage = tensor.untyped_storage()
        block, start = self._in_block.get(storage.data_ptr(), (None, 0))
        memory = None if block is None else block()
        if memory is None or storage.nbytes() > memory.numel() - start:
            return tensor
        own = memory[start : start + storage.nbytes()].view(tensor.dtype)
        return own.as_strided(tensor.size(), tensor.stride(), own.storage_offset() + tensor.storage_offset())

    def copy(self, lane: Lane, dst: Tensor, src: Tensor) -> None:
        address = (dst if lane is Lane.H2D else src).untyped_storage().data_ptr()
        host_knew = self.host_knows
        if dst.untyped_storage().data_ptr() not in self._read_in_lane:
            _poison(dst)
        delay_s = self._random.uniform(0, self._max_delay_s)
        late_dst, late_src = self._without_span(dst), self._without_span(src)

        def run() -> None:
            time.sleep(delay_s)
            # Two reads do not race.
            busy = self._busy_until if lane is Lane.H2D else self._written_until
            busy_until = busy.get(address, 0)
            if busy_until > max(self._lanes[lane].knows, host_knew):
                self.num_races += 1
                _poison(late_dst)
            else:
                late_dst.copy_(late_src)

        self._lanes[lane].queue.put(run)
        self.arena.note_copy(lane, dst, src)

    def run(
        self, lane: Lane, work: Callable[[], object], *, fills: Tensor, reads: Sequence[Tensor], name: str = "decode"
    ) -> None:
        read = {tensor.untyped_storage().data_ptr() for tensor in reads}
        if lane is Lane.H2D:
            self._read_in_lane.update(read)
        host_knew = self.host_knows

        def run_late() -> None:
            busy_until = max(
                self._busy_until.get(fills.untyped_storage().data_ptr(), 0),
                *(self._written_until.get(address, 0) for address in read),
            )
            if busy_until > max(self._lanes[lane].knows, host_knew):
                self.num_races += 1
                _poison(fills)
            else:
                work()

        self._lanes[lane].queue.put(run_late)
        self.arena.note_copy(lane, fills, *reads)

    def fetch(self, dst: Tensor, src: Tensor) -> Event:
        self._compute_time += 1
        return _FetchEvent(self, self._compute_time, dst, src)

    def record(self, lane: Lane, *tensors: Tensor, reads: Sequence[Tensor] = ()) -> Event:
        if lane is Lane.COMPUTE:
            self._compute_time += 1
            for tensor in tensors:
                self._written_until[tensor.untyped_storage().data_ptr()] = self._compute_time
            for tensor in (*tensors, *reads):
                self._busy_until[tensor.untyped_storage().data_ptr()] = self._compute_time
            return _ComputeEvent(self, self._compute_time)
        event = _CopyEvent(self)
        self._lanes[lane].queue.put(event.reached.set)
        return event

    def wait(self, lane: Lane, event: Event) -> None:
        if not self.heeds_wait():
            return
        if isinstance(event, _CopyEvent):
            if lane is Lane.COMPUTE:
                event.reached.wait()
            else:
                self._lanes[lane].queue.put(event.block)
        elif isinstance(event, _ComputeEvent) and lane is not Lane.COMPUTE:
            target = self._lanes[lane]
            compute_time = event.compute_time

            def learn() -> None:
                target.knows = max(target.knows, compute_time)

            target.queue.put(learn)

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "kind": "async double", "torch_device": str(torch.device("cpu"))}


def _poison(tensor: Tensor) -> None:
    """Fill the tensor with NaN. Bytes of ones are NaN in every floating-point type."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else 0xFF)
