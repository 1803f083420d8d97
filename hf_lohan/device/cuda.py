"""CUDA devices: a stream for each copy lane, events, pinned host memory of exact size, and growing segments."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_lohan.compat.torch_private import allocator_settings, begin_sends, nccl_group, set_allocator_settings
from hf_lohan.device.base import Device, DeviceGroup, MemoryPeak
from hf_lohan.device.gpu_links import uuid_of, why_not_linked
from hf_lohan.device.host_memory import mapped_empty, mapped_file
from hf_lohan.device.lanes import COPY_LANES, Event, Lane, Stamp
from hf_lohan.timeline import Timeline

logger = logging.getLogger(__name__)

_EXPANDABLE = "expandable_segments"
_VIRTUAL_MEMORY = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"""


class _CudaEvent(Event):
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def synchronize(self) -> None:
        self.event.synchronize()

    def is_reached(self) -> bool:
        return bool(self.event.query())


class _Clock:
    """Converts events to host times, relative to a reference event. Later events replace the reference, because CUDA's
    measurements of long times are inexact."""

    _MAX_SPAN_S = 10.0

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(torch.cuda.current_stream(device))
        self._event.synchronize()
        self._event_s = time.perf_counter()

    def at_s(self, event: torch.cuda.Event) -> float:
        if not event.query():
            event.synchronize()
        since_s: float = self._event.elapsed_time(event) / 1e3
        at_s = self._event_s + since_s
        if since_s > self._MAX_SPAN_S:
            self._event, self._event_s = event, at_s
        return at_s


class _CudaStamp(Stamp):
    def __init__(self, event: torch.cuda.Event, clock: _Clock) -> None:
        self._event = event
        self._clock = clock

    def is_reached(self) -> bool:
        return bool(self._event.query())

    def at_s(self) -> float:
        return self._clock.at_s(self._event)


class _Span:
    """A range of device memory for `torch.as_tensor`. The storage of that tensor keeps this object alive."""

    def __init__(self, memory: Tensor, start: int, num_bytes: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (memory.data_ptr() + start, False),
            "version": 2,
        }


class HostPinning:
    """Pins host memory with cudaHostRegister, which does not round sizes. WSL2 and low memlock limits may refuse a
    buffer. After that only smaller buffers are tried."""

    def __init__(self, cudart: Any, take_error: Callable[[], object]) -> None:
        """``take_error`` clears the CUDA error of this thread's last call."""
        self._cudart = cudart
        self._take_error = take_error
        self._refused_bytes: int | None = None
        """Size of the smallest refused buffer."""

    @property
    def was_refused(self) -> bool:
        """Whether any buffer was refused."""
        return self._refused_bytes is not None

    def pin(self, address: int, num_bytes: int) -> bool:
        """Pin memory and return whether it is pinned. The first refusal logs a warning."""
        if self._refused_bytes is not None and num_bytes >= self._refused_bytes:
            return False
        status = int(self._cudart.cudaHostRegister(address, num_bytes, 0))
        if status == 0:
            return True
        self._take_error()
        if self._refused_bytes is None:
            logger.warning(
                "pinning %d bytes of host memory was refused (cudaError %d), so copies are slower; "
                "raise the memlock limit or lower cpu_memory (WSL2 allows only part of the RAM)",
                num_bytes,
                status,
            )
        self._refused_bytes = num_bytes
        return False

    def unpin(self, address: int) -> None:
        """Unpin memory before it is unmapped, so that its address can be pinned again."""
        with contextlib.suppress(Exception):  # the interpreter or CUDA may be shutting down
            if int(self._cudart.cudaHostUnregister(address)) != 0:
                self._take_error()


class _NcclGroup(DeviceGroup):
    def __init__(self, group: Any) -> None:
        self._group = group

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        for work in begin_sends(self._group, sends, receives):
            work.wait()  # the current stream waits, and not the host

    def abort(self) -> None:
        self._group.abort()


class CudaDevice(Device):
    """One CUDA device. COMPUTE is the calling thread's current stream."""

    def __init__(self, torch_device: torch.device, timeline: Timeline | None = None) -> None:
        super().__init__(timeline)
        index = torch_device.index if torch_device.index is not None else torch.cuda.current_device()
        self.torch_device = torch.device("cuda", index)
        self.grows_segments = grow_segments(index)
        self.is_integrated = bool(torch.cuda.get_device_properties(index).is_integrated)
        # With other allocators, `record_stream` fails for a tensor over a part of an allocation (`span`).
        self.plans_addresses = torch.cuda.get_allocator_backend() == "native"
        self._copy_streams = {lane: torch.cuda.Stream(self.torch_device) for lane in COPY_LANES}
        self._pinning = HostPinning(torch.cuda.cudart(), partial(_take_error, self.torch_device))
        self._copy_locks = {lane: threading.Lock() for lane in self._copy_streams}
        self._clock: _Clock | None = None
        self._aside: torch.cuda.Stream | None = None

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return self._copy_streams.get(lane) or torch.cuda.current_stream(self.torch_device)

    def empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def span(self, memory: Tensor, start: int, num_bytes: int) -> Tensor:
        return torch.as_tensor(_Span(memory, start, num_bytes), device=self.torch_device)

    def compute_lane(self) -> int:
        return int(self._stream(Lane.COMPUTE).cuda_stream)

    def host_empty(self, num_bytes: int) -> Tensor:
        pinned: list[int] = []
        return self._pinned(mapped_empty(num_bytes, before_unmap=partial(_unpin, self._pinning, pinned)), pinned)

    def host_shared(self, fd: int, num_bytes: int) -> Tensor:
        pinned: list[int] = []  # each process pins the file for its own CUDA context
        return self._pinned(mapped_file(fd, num_bytes, before_unmap=partial(_unpin, self._pinning, pinned)), pinned)

    def _pinned(self, host: Tensor, pinned: list[int]) -> Tensor:
        if self._pinning.pin(host.data_ptr(), host.numel()):
            pinned.append(host.data_ptr())
        return host

    def run(
        self, lane: Lane, work: Callable[[], object], *, fills: Tensor, reads: Sequence[Tensor], name: str = "decode"
    ) -> None:
        stream = self._stream(lane)
        with self._copy_locks[lane]:  # no other thread's work may come between the stamps
            began = self.stamp(lane)
            with torch.cuda.stream(stream):
                work()
            ended = self.stamp(lane)
        for tensor in (fills, *reads):
            if tensor.is_cuda:
                # The caching allocator must not reuse this memory before the stream is done with it.
                tensor.record_stream(stream)
        self.arena.note_copy(lane, fills, *reads)
        self.note_span(lane, name, began, ended, num_bytes=fills.nbytes)

    def stamp(self, lane: Lane) -> Stamp:
        if self._clock is None:
            self._clock = _Clock(self.torch_device)
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream(lane))
        return _CudaStamp(event, self._clock)

    def record(self, lane: Lane, *tensors: Tensor, reads: Sequence[Tensor] = ()) -> Event:
        event = torch.cuda.Event(blocking=True)  # a waiting host thread leaves its core to the optimizer
        event.record(self._stream(lane))
        return _CudaEvent(event)

    def wait(self, lane: Lane, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self._stream(lane).wait_event(event.event)

    def in_this_lane(self) -> AbstractContextManager[object]:
        stream: AbstractContextManager[object] = torch.cuda.stream(self._stream(Lane.COMPUTE))
        return stream

    def enter_thread(self) -> None:
        # torch skips cudaSetDevice for the initial device of a thread, although this thread has no CUDA context yet.
        with torch.cuda.device(self.torch_device):
            torch.cuda.Event().record(self._copy_streams[Lane.D2H_ASIDE])

    def compute_aside(self, function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        self._aside = self._aside or torch.cuda.Stream(self.torch_device)
        with torch.cuda.stream(self._aside):
            return function(value.to(self.torch_device)).cpu()

    def rng_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.torch_device)

    def set_rng_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self.torch_device)

    def total_memory_bytes(self) -> int:
        free_bytes, device = int(torch.cuda.mem_get_info(self.torch_device)[0]), self.torch_device
        # Memory that was freed but stays in torch's allocator can be allocated again.
        return free_bytes + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    def memory_peak(self) -> MemoryPeak:
        device = self.torch_device
        return MemoryPeak(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))

    @property
    def identity(self) -> str:
        return uuid_of(self.torch_device.index)

    def why_no_group(self, identities: Sequence[str]) -> str:
        if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
            return "this torch was built without NCCL"
        return why_not_linked(self.identity, identities)

    def open_group(self, store: Any, member: int, num_members: int) -> DeviceGroup:
        return _NcclGroup(nccl_group(store, member, num_members, self.torch_device))

    def give_back_unused(self) -> None:
        with torch.cuda.device(self.torch_device):
            torch.cuda.empty_cache()

    def describe(self) -> dict[str, object]:
        properties = torch.cuda.get_device_properties(self.torch_device)
        return {
            "kind": "cuda",
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "cuda_version": torch.version.cuda,
            "pinned_host_memory": not self._pinning.was_refused,
            "expandable_segments": self.grows_segments,
        }


def _unpin(pinning: HostPinning, addresses: list[int]) -> None:
    for address in addresses:
        pinning.unpin(address)


def _take_error(device: torch.device) -> None:
    """Clear the error of the last CUDA call. torch does not expose cudaGetLastError, but launching a kernel raises the
    error and clears it."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)


def grow_segments(device_index: int) -> bool:
    """Set the allocator to grow its segments. Returns whether it does. Keeps the user's settings (`PYTORCH_ALLOC_CONF`,
    `PYTORCH_CUDA_ALLOC_CONF`). Another allocator or the driver may not support growing."""
    settings = allocator_settings()
    if _EXPANDABLE in settings:
        return f"{_EXPANDABLE}:true" in settings.lower().replace(" ", "")
    if torch.cuda.get_allocator_backend() != "native" or not has_virtual_memory(device_index):
        logger.info("the CUDA driver or allocator cannot grow segments, so device memory may fragment more")
        return False
    # New settings replace all earlier settings.
    set_allocator_settings(",".join(one for one in (settings, f"{_EXPANDABLE}:True") if one))
    return True


def has_virtual_memory(device_index: int, driver: str = "libcuda.so.1", nvml: str = "libnvidia-ml.so.1") -> bool:
    """Return whether the driver can map memory to reserved addresses and NVML can be loaded. torch calls NVML without
    checking that it exists."""
    try:
        cuda = ctypes.CDLL(driver)
        ctypes.CDLL(nvml)
        cuda.cuMemAddressReserve  # noqa: B018
    except (OSError, AttributeError):
        return False
    number, can_map = ctypes.c_int(), ctypes.c_int()
    is_known = (
        cuda.cuInit(0) == 0
        and cuda.cuDeviceGet(ctypes.byref(number), device_index) == 0
        and cuda.cuDeviceGetAttribute(ctypes.byref(can_map), _VIRTUAL_MEMORY, number) == 0
    )
    return is_known and can_map.value == 1
