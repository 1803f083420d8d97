"""A device that computes and copies by waiting: what a GPU asks of its host, beside cores that are as free.

Numbers are computed where they are asked for, on the CPU, so they are the CPU's to the bit. What takes time is
book-keeping. Each lane has a time at which its last work ends: a copy ends after its bytes over the link's rate,
compute after its FLOPs over the device's, and `wait` has a lane begin no earlier than the event. No thread is held up
by any of it before it asks for an event that is not reached: then it sleeps until it is, and that is counted.

As on a GPU weights are staged and copied. Unlike there, a core moves the bytes of each copy, and so takes
`host_copy_s` from whatever else runs.
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
    """What tells the time."""

    def now_s(self) -> float:
        """On the clock of `time.perf_counter`."""

    def sleep_until(self, at_s: float) -> None:
        """Return at `at_s`, or at once if that is over. Takes no core meanwhile."""


class WallClock:
    """The time that passes."""

    def now_s(self) -> float:
        return time.perf_counter()

    def sleep_until(self, at_s: float) -> None:
        while (left_s := at_s - time.perf_counter()) > 0:
            time.sleep(left_s)


class SteppedClock:
    """Time passes only where somebody sleeps, and then at once."""

    def __init__(self) -> None:
        self._now_s = 1000.0
        self._lock = threading.Lock()

    def now_s(self) -> float:
        return self._now_s

    def sleep_until(self, at_s: float) -> None:
        with self._lock:
            self._now_s = max(self._now_s, at_s)


class _Point(Event, Stamp):
    """A lane's time."""

    def __init__(self, device: PacedDevice, at_s: float) -> None:
        self._device = device
        self._at_s = at_s

    @property
    def time_s(self) -> float:
        """When it is reached."""
        return self._at_s

    def synchronize(self) -> None:
        self._device.hold_thread_until(self._at_s)

    def is_reached(self) -> bool:
        return self._device.clock.now_s() >= self._at_s

    def at_s(self) -> float:
        self._device.hold_thread_until(self._at_s)
        return self._at_s


class PacedDevice(CpuDevice):
    """See the module. Any thread may use it."""

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
        """`link_bytes_per_s`: of each lane, whatever the others do; `flops_per_s`: of what is paced, see
        `take_flops`."""
        super().__init__(timeline)
        self.clock: Clock = clock or WallClock()
        self.link_bytes_per_s = link_bytes_per_s
        self.flops_per_s = flops_per_s
        self._lock = threading.Lock()
        self._end_s = dict.fromkeys(Lane, 0.0)
        self.paced_flops = 0.0
        self.paced_s = 0.0
        """How long all that was paced takes, one after the other."""
        self.host_copy_s = 0.0
        """How long cores were busy with copies."""
        self.num_waits: Counter[str] = Counter()
        """How often a thread slept for the device, by its name."""
        self.wait_s: defaultdict[str, float] = defaultdict(float)
        """How long, in seconds."""

    def take_flops(self, flops: float) -> None:
        """Compute `flops`: enqueue the time that this takes."""
        seconds = flops / self.flops_per_s
        with self._lock:
            self._end_s[Lane.COMPUTE] = max(self._end_s[Lane.COMPUTE], self.clock.now_s()) + seconds
            self.paced_flops += flops
            self.paced_s += seconds

    def hold_thread_until(self, at_s: float) -> None:
        """Have the calling thread wait for the device."""
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
            self._end_s[lane] = max(self._end_s[lane], moved_s)  # nothing is there before it was moved
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
