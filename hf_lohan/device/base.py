"""The interface of devices: work on lanes, and host memory for copies."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_lohan.device.device_arena import DeviceArena
from hf_lohan.device.host_memory import mapped_file
from hf_lohan.device.lanes import DeviceMemory, Event, Lane, Stamp
from hf_lohan.timeline import Timeline


@dataclass(frozen=True, slots=True)
class _Span:
    """A task of a lane between two stamps."""

    lane: Lane
    name: str
    block: str
    num_bytes: int
    began: Stamp
    ended: Stamp


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """Peaks of this process's device memory."""

    allocated_bytes: int
    """Bytes of tensors."""
    reserved_bytes: int
    """Bytes of tensors, and free bytes that torch's allocator keeps."""


class DeviceGroup(ABC):
    """Sends memory between the devices of several processes. One thread of each process enqueues all exchanges, in the
    same order in all processes."""

    @abstractmethod
    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Send tensors to members, and receive tensors from members, all in one exchange. A CUDA device enqueues the
        exchange on its current stream. Raises RuntimeError if another member has left."""

    @abstractmethod
    def abort(self) -> None:
        """End all current and later exchanges. The values of the tensors that they receive are undefined. Any thread
        may call this."""


class DeviceHasher(ABC):
    """Computes xxh3 hashes of device memory, in the order of a lane."""

    @abstractmethod
    def covers(self, tensor: Tensor) -> bool:
        """Return whether a tensor is device memory."""

    @abstractmethod
    def can_hash(self, tensor: Tensor) -> bool:
        """Return whether the memory is aligned to words."""

    @abstractmethod
    def hashes(self, content: Tensor, piece_bytes: int, lane: Lane) -> Tensor:
        """Return the hash of each piece of ``content``, uint8 [num_bytes], as int64 [pieces]. ``lane`` has waited for
        the work that fills the memory. Blocks until earlier work of ``lane`` is done."""

    @abstractmethod
    def zero(self, content: Tensor) -> None:
        """Fill memory with zeros. The work is enqueued on H2D."""


class Device(DeviceMemory):
    """One compute device with its memory, host memory for copies, and lanes.

    Copies are asynchronous. Every caller obeys these rules:

    * device memory is read by COMPUTE only after `wait(COMPUTE, event of the copy that filled it)`;
    * device memory is overwritten by H2D only after `wait(H2D, event recorded on COMPUTE after its last reader)`;
    * a tensor that COMPUTE produced is copied by D2H only after `wait(D2H, event recorded on COMPUTE)`;
      D2H_ASIDE may use memory that H2D filled, after the host has synchronized with a later event of COMPUTE, or
      memory that D2H filled, after the host has synchronized with the event of that copy;
    * host memory is read or reused only after `synchronize()` of the event of the copy that uses it.
    """

    memory_is_host: bool = False
    """Whether `empty` returns page-aligned host memory, which reads can fill without a copy."""
    is_integrated: bool = False
    """Whether the device uses host memory and has no separate memory."""
    shares_cores: bool = False
    """Whether the device's kernels run on the same cores as our threads."""
    grows_segments: bool = True
    """Whether the device's allocator grows segments, so that memory fragments little."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        """`timeline` records the work of this device."""
        self.timeline = timeline or Timeline()
        self.arena = DeviceArena(self)
        """Allocates tensors on the device that exist for a part of a pass."""
        self._spans: deque[_Span] = deque()

    def note_span(
        self, lane: Lane, name: str, began: Stamp, ended: Stamp, *, block: str = "", num_bytes: int = 0
    ) -> None:
        """Record the work between two stamps of `lane` as one task. `note_reached` adds it to the timeline."""
        self._spans.append(_Span(lane, name, block, num_bytes, began, ended))

    def note_reached(self) -> None:
        """Add all finished tasks to the timeline. Does not wait."""
        while self._spans and self._spans[0].ended.is_reached():
            span = self._spans.popleft()
            began_s, ended_s = span.began.at_s(), span.ended.at_s()
            lane, block, num_bytes = span.lane.in_timeline, span.block, span.num_bytes
            self.timeline.add_task(lane, span.name, began_s, ended_s, block=block, num_bytes=num_bytes)

    @abstractmethod
    def stamp(self, lane: Lane) -> Stamp:
        """Enqueue a time measurement on `lane`."""

    @abstractmethod
    def host_empty(self, num_bytes: int) -> Tensor:
        """Allocate host memory for copies: a page-aligned uint8 tensor [num_bytes], pinned if possible."""

    def host_shared(self, fd: int, num_bytes: int) -> Tensor:
        """Map a file in RAM that other processes map as well: a page-aligned uint8 tensor, pinned if possible."""
        return mapped_file(fd, num_bytes)

    def copy(self, lane: Lane, dst: Tensor, src: Tensor) -> None:
        """Enqueue `dst.copy_(src)` on a copy lane, and record it in the timeline. Keeps both tensors alive."""
        self.run(lane, lambda: dst.copy_(src, non_blocking=True), fills=dst, reads=(src,), name="copy")

    def run(
        self, lane: Lane, work: Callable[[], object], *, fills: Tensor, reads: Sequence[Tensor], name: str = "decode"
    ) -> None:
        """Enqueue ``work`` on a copy lane, and record it in the timeline. Its operations fill the memory ``fills``, and
        read the memory ``reads``, which this lane has filled or waited for. Keeps all of it alive."""
        with self.timeline.task(lane.in_timeline, name, num_bytes=fills.nbytes):
            work()

    def fetch(self, dst: Tensor, src: Tensor) -> Event:
        """Enqueue `dst.copy_(src)` on COMPUTE, for a few numbers that the host needs soon. `dst` is memory from
        `host_empty`, and has the numbers when the returned event is reached."""
        dst.copy_(src, non_blocking=True)
        return self.record(Lane.COMPUTE)

    @abstractmethod
    def wait(self, lane: Lane, event: Event) -> None:
        """Have later work of `lane` start after `event`. On a GPU this does not block the host."""

    def in_this_lane(self) -> AbstractContextManager[object]:
        """Return a context for another thread, in which COMPUTE is the lane COMPUTE of the thread that calls this."""
        return contextlib.nullcontext()

    def enter_thread(self) -> None:
        """Make the device current in the calling thread, for libraries that use its memory there."""
        return

    def compute_aside(self, function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        """Return ``function(value)`` as an unpinned host tensor, computed on the faster of host and device. Does not
        wait for the lanes. Only one thread may call this."""
        return function(value)

    @abstractmethod
    def rng_state(self) -> Tensor:
        """Return the state of the device's random number generator."""

    @abstractmethod
    def set_rng_state(self, state: Tensor) -> None:
        """Restore a state that `rng_state` returned."""

    @abstractmethod
    def total_memory_bytes(self) -> int:
        """Return how many more bytes this process could allocate, in addition to its current tensors."""

    def memory_peak(self) -> MemoryPeak | None:
        """Return the peaks since the process began or torch's counters were reset, or None if the device does not
        measure them. Does not wait."""
        return None

    @property
    def identity(self) -> str:
        """An identifier of the physical device on its machine."""
        return str(self.torch_device)

    def why_no_group(self, identities: Sequence[str]) -> str:
        """Return why this device and the devices with ``identities`` cannot send to each other; "" if they can."""
        return f"this run computes on the {self.torch_device.type}, and only CUDA devices send to each other"

    def open_group(self, store: Any, member: int, num_members: int) -> DeviceGroup:
        """Make a group with devices of other processes. All processes call this together. They find each other through
        ``store``, a store of torch.distributed without other keys. Raises RuntimeError."""
        raise RuntimeError(self.why_no_group([]))

    def give_back_unused(self) -> None:
        """Return the allocator's unused memory to the device. Waits for the device."""
        return

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """Return facts about the device for the run summary."""
