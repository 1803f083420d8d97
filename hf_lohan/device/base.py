"""The interface: lanes of work, events between them, and two kinds of memory."""

from __future__ import annotations

import contextlib
import enum
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_lohan.device.host_memory import mapped_file
from hf_lohan.timeline import Timeline


class Lane(enum.Enum):
    """An ordered queue of device work. Lanes run at the same time; only events order one against another."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    D2H_ASIDE = "d2h aside"
    """To the host, too, for what is there and must not wait behind gradients that are still to be computed: the host is
    layers ahead of the device."""

    @property
    def in_timeline(self) -> str:
        """The lane that its work is noted under."""
        return str(Lane.D2H.value if self is Lane.D2H_ASIDE else self.value)


COPY_LANES: tuple[Lane, ...] = (Lane.H2D, Lane.D2H, Lane.D2H_ASIDE)


class Event(ABC):
    """A point in a lane's queue. It is reached when all work enqueued before it is done."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling host thread until the event is reached."""

    @abstractmethod
    def is_reached(self) -> bool:
        """Whether it is known to be reached, without waiting."""


class Stamp(ABC):
    """A point in a lane's queue whose time can be asked for."""

    @abstractmethod
    def is_reached(self) -> bool:
        """Whether all work enqueued before it is done."""

    @abstractmethod
    def at_s(self) -> float:
        """When it was reached, on the clock of `time.perf_counter`. Waits for that."""


@dataclass(frozen=True, slots=True)
class _Span:
    """A task of a lane, between two stamps."""

    lane: Lane
    name: str
    block: str
    num_bytes: int
    began: Stamp
    ended: Stamp


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The most device memory that this process ever had at once."""

    allocated_bytes: int
    """By tensors."""
    reserved_bytes: int
    """That, and what torch's allocator keeps for tensors to come, or cannot use."""


class Device(ABC):
    """One compute device: its memory, the host memory it copies from, and its lanes.

    Copies are asynchronous. The rules every caller keeps:

    * device memory is read by COMPUTE only after `wait(COMPUTE, event of the copy that filled it)`;
    * device memory is overwritten by H2D only after `wait(H2D, event recorded on COMPUTE after its last reader)`;
    * a tensor that COMPUTE produced is copied by D2H only after `wait(D2H, event recorded on COMPUTE)`;
      D2H_ASIDE copies what H2D brought, once the host has synchronised with compute behind that;
    * host memory is read, or used again, only after `synchronize()` of the event of the copy that uses it.
    """

    torch_device: torch.device
    memory_is_host: bool = False
    """Whether what `empty` gives is page-aligned host memory that I/O may fill: then nothing has to be copied to it."""
    shares_cores: bool = False
    """Whether its kernels run on the cores that our threads run on."""
    grows_segments: bool = True
    """Whether its memory fragments little: an allocator takes it in segments that grow."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        """`timeline` is where what this device does is noted, and what others do for it."""
        self.timeline = timeline or Timeline()
        self._spans: deque[_Span] = deque()

    def note_span(
        self, lane: Lane, name: str, began: Stamp, ended: Stamp, *, block: str = "", num_bytes: int = 0
    ) -> None:
        """What was enqueued on `lane` between two stamps was one task. It is in the timeline after `note_reached`."""
        self._spans.append(_Span(lane, name, block, num_bytes, began, ended))

    def note_reached(self) -> None:
        """Put what is done by now into the timeline. Waits for nothing."""
        while self._spans and self._spans[0].ended.is_reached():
            span = self._spans.popleft()
            began_s, ended_s = span.began.at_s(), span.ended.at_s()
            lane, block, num_bytes = span.lane.in_timeline, span.block, span.num_bytes
            self.timeline.add_task(lane, span.name, began_s, ended_s, block=block, num_bytes=num_bytes)

    @abstractmethod
    def stamp(self, lane: Lane) -> Stamp:
        """Take the time at the present end of `lane`."""

    @abstractmethod
    def empty(self, num_bytes: int) -> Tensor:
        """Device memory: a uint8 tensor [num_bytes] with its own storage, aligned for any dtype."""

    @abstractmethod
    def host_empty(self, num_bytes: int) -> Tensor:
        """Host memory to copy from and to: a page-aligned uint8 tensor [num_bytes], pinned where that is possible."""

    def host_shared(self, fd: int, num_bytes: int) -> Tensor:
        """As `host_empty`, over a file in RAM that other processes map, too."""
        return mapped_file(fd, num_bytes)

    @abstractmethod
    def copy(self, lane: Lane, dst: Tensor, src: Tensor) -> None:
        """Enqueue `dst.copy_(src)` on `lane` (not COMPUTE), and note it. Both tensors stay alive until it has run."""

    def fetch(self, dst: Tensor, src: Tensor) -> Event:
        """Enqueue `dst.copy_(src)` on COMPUTE: a few numbers that the host is about to ask for, to memory of
        `host_empty`. Once the event is reached they are there; later work does not hold them up."""
        dst.copy_(src, non_blocking=True)
        return self.record(Lane.COMPUTE)

    @abstractmethod
    def record(self, lane: Lane, *tensors: Tensor, reads: Sequence[Tensor] = ()) -> Event:
        """Mark the present end of `lane`. For COMPUTE, `tensors` are those whose use up to here the event closes, and
        `reads` those that it only read: they may be copied from before."""

    @abstractmethod
    def wait(self, lane: Lane, event: Event) -> None:
        """Work enqueued on `lane` from now on starts only after `event`. Does not block the host on a GPU."""

    def in_this_lane(self) -> AbstractContextManager[object]:
        """To be entered by another thread whose compute is to go where the calling thread's goes."""
        return contextlib.nullcontext()

    def compute_aside(self, function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        """What ``function`` makes of a host tensor, on the host: computed where that is fastest, beside the lanes, when
        this returns. Its memory is torch's own. To be called by one thread."""
        return function(value)

    @abstractmethod
    def rng_state(self) -> Tensor:
        """State of the generator that random operations on this device draw from."""

    @abstractmethod
    def set_rng_state(self, state: Tensor) -> None:
        """Go on drawing from a state that `rng_state` returned."""

    @abstractmethod
    def total_memory_bytes(self) -> int:
        """Memory that the device could give to this process now, beside what tensors have."""

    def memory_peak(self) -> MemoryPeak | None:
        """What its allocator has counted, since the process began or somebody had torch count anew. None: nothing
        counts. Waits for nothing."""
        return None

    def give_back_unused(self) -> None:
        """Give the device back the memory that its allocator keeps and nobody uses. Waits for the device."""
        return

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """Plain facts about the device for the run summary."""
