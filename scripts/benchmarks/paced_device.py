"""A device that takes the time of a GPU's compute and copies by waiting, so that the host has the same work and the
same free cores as with a GPU.

Numbers are computed immediately, on the CPU, so they are the CPU's. Times are only recorded. Each lane has
a time at which its last work ends. A copy takes its bytes over the link's rate, compute takes its FLOPs over the
device's rate, and `wait` delays a lane's next work until the event. A thread sleeps only if it synchronizes with an
event that is not reached, and this sleep is counted.

Weights are staged and copied as on a GPU. But a core moves the bytes of each copy here, which takes `host_copy_s` from
other work.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from hf_lohan.device import CpuDevice, Event, Lane, Stamp
from hf_lohan.timeline import Timeline


class Clock(Protocol):
    """Interface of a clock."""

    def now_s(self) -> float:
        """Return the time in seconds, on the scale of `time.perf_counter`."""

    def sleep_until(self, at_s: float) -> None:
        """Sleep until `at_s`. Returns immediately if this time is over."""


class WallClock:
    """Real time."""

    def now_s(self) -> float:
        return time.perf_counter()

    def sleep_until(self, at_s: float) -> None:
        while (left_s := at_s - time.perf_counter()) > 0:
            time.sleep(left_s)


class SteppedClock:
    """A clock whose time advances only when a thread sleeps, and then without delay."""

    def __init__(self) -> None:
        self._now_s = 1000.0
        self._lock = threading.Lock()

    def now_s(self) -> float:
        return self._now_s

    def sleep_until(self, at_s: float) -> None:
        with self._lock:
            self._now_s = max(self._now_s, at_s)


class _Point(Event, Stamp):
    """An event at a time of a lane."""

    def __init__(self, device: PacedDevice, at_s: float) -> None:
        self._device = device
        self._at_s = at_s

    @property
    def time_s(self) -> float:
        """Time at which the event is reached."""
        return self._at_s

    def synchronize(self) -> None:
        self._device.hold_thread_until(self._at_s)

    def is_reached(self) -> bool:
        return self._device.clock.now_s() >= self._at_s

    def at_s(self) -> float:
        self._device.hold_thread_until(self._at_s)
        return self._at_s


class PacedDevice(CpuDevice):
    """See the module's description. Any thread may use it."""

    memory_is_host = False
    shares_cores = False

    def __init__(
        self,
        *,
        link_bytes_per_s: float,
        flops_per_s: float,
        clock: Clock | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """`link_bytes_per_s`: rate of each copy lane, independent of the others. `flops_per_s`: rate of paced compute,
        see `take_flops`."""
        super().__init__(timeline)
        self.clock: Clock = clock or WallClock()
        self.link_bytes_per_s = link_bytes_per_s
        self.flops_per_s = flops_per_s
        self._lock = threading.Lock()
        self._end_s = dict.fromkeys(Lane, 0.0)
        self.paced_flops = 0.0
        self.paced_s = 0.0
        """Seconds of all paced compute, one after the other."""
        self.host_copy_s = 0.0
        """Seconds in which cores were busy with copies."""
        self.num_waits: Counter[str] = Counter()
        """Number of sleeps for the device, by the thread's name."""
        self.wait_s: defaultdict[str, float] = defaultdict(float)
        """Seconds of these sleeps, by the thread's name."""

    def take_flops(self, flops: float) -> None:
        """Enqueue compute that takes the time of `flops`."""
        seconds = flops / self.flops_per_s
        with self._lock:
            self._end_s[Lane.COMPUTE] = max(self._end_s[Lane.COMPUTE], self.clock.now_s()) + seconds
            self.paced_flops += flops
            self.paced_s += seconds

    def hold_thread_until(self, at_s: float) -> None:
        """Make the calling thread sleep for the device until `at_s`."""
        began_s = self.clock.now_s()
        if began_s >= at_s:
            return
        self.clock.sleep_until(at_s)
        name = threading.current_thread().name
        with self._lock:
            self.num_waits[name] += 1
            self.wait_s[name] += self.clock.now_s() - began_s

    def copy(self, lane: Lane, dst: Tensor, src: Tensor) -> None:
        with self._lock:
            moving_s = self.clock.now_s()
            began_s = max(self._end_s[lane], moving_s)
            ended_s = self._end_s[lane] = began_s + dst.nbytes / self.link_bytes_per_s
        dst.copy_(src)
        with self._lock:
            moved_s = self.clock.now_s()
            self.host_copy_s += moved_s - moving_s
            self._end_s[lane] = max(self._end_s[lane], moved_s)  # the data is present only after the move
        self.arena.note_copy(lane, dst, src)
        self.note_span(lane, "copy", _Point(self, began_s), _Point(self, ended_s), num_bytes=dst.nbytes)

    def stamp(self, lane: Lane) -> Stamp:
        with self._lock:
            return _Point(self, max(self._end_s[lane], self.clock.now_s()))

    def record(self, lane: Lane, *tensors: Tensor, reads: Sequence[Tensor] = ()) -> Event:
        with self._lock:
            return _Point(self, self._end_s[lane])

    def wait(self, lane: Lane, event: Event) -> None:
        assert isinstance(event, _Point)
        with self._lock:
            self._end_s[lane] = max(self._end_s[lane], event.time_s)

    def describe(self) -> dict[str, object]:
        return {
            **super().describe(),
            "kind": "paced double",
            "link_bytes_per_s": self.link_bytes_per_s,
            "flops_per_s": self.flops_per_s,
        }
