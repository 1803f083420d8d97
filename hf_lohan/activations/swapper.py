"""Swaps activations in its own thread, to RAM or to the SSD: through staging buffers, or straight from the device."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from hf_lohan.activations.swapped_tensor import SwappedTensor, alias_of, as_bytes, storage_of, witness_of
from hf_lohan.compat.torch_private import version_of
from hf_lohan.costs import Placement
from hf_lohan.device import Buffer, BufferPool, Device, DeviceHasher, Event, HostRead, HostStack, IntervalStack, Lane
from hf_lohan.files import IoRequest
from hf_lohan.store import GRANULE_NUMEL, RecordFiles, RecordRead
from hf_lohan.threads import FirstFailure, WorkThread, return_freed_memory
from hf_lohan.timeline import COMPUTE_WAITS

SPILL_BLOCK = "activations"
SPILL_KIND = "activation"
_KEPT_HOLES_BYTES = 128 << 20
"""If the device is the CPU: number of swapped bytes after which glibc returns its free memory. A swapped tensor leaves
a hole in the heap. No tensor of the same size fits into the hole, because glibc needs a larger hole to align the
tensor. So the heap would grow by all bytes that a forward swaps."""

_SwapRoom: TypeAlias = "tuple[Tensor | None, int, Callable[[HostRead | None], None]]"
"""Memory in RAM or None, an offset on the SSD, and a function that frees this space."""


@dataclass(eq=False)
class _Spill:
    """Room on the SSD, counted in bytes, and staging buffers. Each tensor takes whole granules. With a ``hasher`` whole
    granules go straight from the device and back, and only a tensor's last bytes need a buffer."""

    files: RecordFiles
    staging: BufferPool
    intervals: IntervalStack
    hasher: DeviceHasher | None


class ActivationSwapper:
    """Swaps tensors out (`swap_out`) and in (`prefetch`, then `swap_in`). Swapping in is fastest in reverse order.

    The computing thread calls it, and on CUDA also autograd's thread, but not both at once. Copies and I/O run in a
    thread of the swapper.
    """

    def __init__(self, device: Device, ram: HostStack | None = None) -> None:
        """The swapper takes the bottom of ``ram``. Other users may take the top."""
        self._device = device
        self._ram = ram or HostStack(device)
        self._num_reads = 0
        self._holes_bytes = 0
        self._spill: _Spill | None = None
        self._is_closed = False
        self.swapped_bytes = 0
        """Bytes swapped out to RAM or SSD since the start."""
        self.spilled_bytes = 0
        """The part of `swapped_bytes` that went to the SSD."""
        self._thread = WorkThread("lohan-activations", FirstFailure(), beside_kernels=device.shares_cores)
        self._thread.start()

    def use_ssd(
        self, files: RecordFiles, staging: BufferPool, num_bytes: int, hasher: DeviceHasher | None = None
    ) -> None:
        """Swap to ``num_bytes`` of ``files`` as well, through the buffers ``staging``. With ``hasher``, whole granules
        go straight between files and device memory, if ``files`` use it too."""
        assert staging.num_buffers and staging.buffer_bytes % GRANULE_NUMEL == 0
        self._spill = _Spill(files, staging, IntervalStack(num_bytes, GRANULE_NUMEL), hasher)

    def leave_ssd(self) -> None:
        """Swap to RAM alone, because the files are closed. No tensor may be on the SSD."""
        assert not self.ssd_bytes_in_use, "the SSD has swapped tensors"
        self._spill = None

    def begin_forward(self) -> None:
        """Forget the RAM marks of the previous forward."""
        self._ram.forget_marks()

    def mark(self, layer: str) -> None:
        """Record how much RAM the forward has used up to the end of ``layer``."""
        self._ram.mark(layer)

    @property
    def ram_bytes(self) -> int:
        return self._ram.num_bytes

    @property
    def ssd_bytes(self) -> int:
        return self._spill.intervals.capacity if self._spill is not None else 0

    @property
    def ssd_bytes_in_use(self) -> int:
        return self._spill.intervals.in_use if self._spill is not None else 0

    @property
    def free_bytes(self) -> int:
        """Bytes that could be swapped out now, to RAM and to the SSD."""
        in_ram = self._ram.num_bytes - self._ram.bytes_in_use - self._ram.top_bytes_in_use
        return in_ram + self.ssd_bytes - self.ssd_bytes_in_use

    @property
    def high_water_bytes(self) -> int:
        """Largest amount of host memory that was in use at once."""
        staging = self._spill.staging.high_water_bytes if self._spill is not None else 0
        return self._ram.high_water_bytes + staging

    def swap_out(self, tensor: Tensor, placement: Placement) -> SwappedTensor | None:
        """Begin to move a tensor (`is_swappable`) to the tier ``placement``, or to the other tier if that is full.
        Returns None if RAM and SSD are full.

        If the tensor is written to before `wait_until_stored`, `drain` and `swap_in` raise RuntimeError.
        """
        num_bytes = tensor.numel() * tensor.element_size()
        room = self._find_room(num_bytes, placement)
        if room is None:
            return None
        region, start, free = room
        swapped = SwappedTensor(
            new_landing=partial(self._device.arena.empty, tensor.size(), tensor.dtype, stride=tensor.stride()),
            num_bytes=num_bytes,
            region=region,
            spill_start=start,
            source=alias_of(tensor),
            storage=storage_of(tensor),
            witness=witness_of(tensor),
            version=version_of(tensor),
            free=free,
            run_later=self._thread.submit,
        )
        self.swapped_bytes += num_bytes
        if region is None:
            self.spilled_bytes += num_bytes
        produced = self._device.record(Lane.COMPUTE, tensor)
        self._thread.submit(partial(self._store, swapped, produced))
        return swapped

    def wait_until_stored(self, swapped: SwappedTensor) -> None:
        """Wait until the original tensor may be written to."""
        if swapped.may_change:
            return
        swapped.is_stored.wait()
        self._raise_error(swapped)
        if swapped.stored is not None:
            self._device.wait(Lane.COMPUTE, swapped.stored)
        swapped.check_unchanged()
        swapped.may_change = True

    def drain(self, swapped: Sequence[SwappedTensor]) -> None:
        """Wait until these tensors have left the device. They are in the order in which they were swapped out."""
        with self._device.timeline.task(COMPUTE_WAITS, "activations to leave"):
            for one in swapped:
                one.is_stored.wait()
                self._raise_error(one)
            leaving = [one.stored for one in swapped if one.stored is not None]
            if leaving:
                leaving[-1].synchronize()  # copies of one lane end in order
            for one in swapped:
                one.check_unchanged()

    def prefetch(self, swapped: SwappedTensor) -> None:
        """Begin to swap a tensor in. Raises RuntimeError after `close`."""
        if self._is_closed:
            raise RuntimeError("the engine is closed and its swapped activations were freed; load the model again")
        if not swapped.is_prefetched:
            landing = swapped.new_landing()
            # Running compute may still use the landing's memory. Only this thread knows its stream.
            vacated = self._device.record(Lane.COMPUTE, landing)
            swapped.is_prefetched = True
            self._thread.submit(partial(self._fetch, swapped, landing, vacated))

    def swap_in(self, swapped: SwappedTensor) -> Tensor:
        """Return an equal tensor for compute enqueued from now on. Raises the error of storing or fetching it."""
        self.prefetch(swapped)
        with self._device.timeline.task(COMPUTE_WAITS, "activations"):
            swapped.is_fetched.wait()
        self._raise_error(swapped)
        swapped.check_unchanged()
        tensor, ready = swapped.landed, swapped.ready
        assert tensor is not None and ready is not None
        self._device.wait(Lane.COMPUTE, ready)
        # No reference stays here, which would keep the tensor alive. A second swap_in (retain_graph) fetches it again.
        swapped.landed, swapped.ready, swapped.is_prefetched = None, None, False
        swapped.is_fetched.clear()
        return tensor

    def wait_until_idle(self) -> None:
        """Wait for all copies. Raises their error."""
        self._thread.barrier()

    def close(self) -> None:
        """Finish all copies and end the thread."""
        self._is_closed = True
        self._thread.close()

    # Room.

    def _find_room(self, num_bytes: int, placement: Placement) -> _SwapRoom | None:
        first, second = self._in_ram, self._on_ssd
        if placement is Placement.SSD:
            first, second = second, first
        return first(num_bytes) or second(num_bytes)

    def _in_ram(self, num_bytes: int) -> _SwapRoom | None:
        interval = self._ram.push(num_bytes)
        return None if interval is None else (interval[1], 0, partial(self._ram.free, interval[0]))

    def _on_ssd(self, num_bytes: int) -> _SwapRoom | None:
        if self._spill is None:
            return None
        start = self._spill.intervals.push(num_bytes)
        return None if start is None else (None, start, partial(_free_on_ssd, self._spill.intervals, start))

    # The swapper's thread.

    def _store(self, swapped: SwappedTensor, produced: Event) -> None:
        try:
            assert swapped.source is not None
            flat = as_bytes(swapped.source)
            self._device.wait(Lane.D2H, produced)
            if swapped.region is not None:
                self._device.copy(Lane.D2H, swapped.region, flat)
                swapped.stored = self._device.record(Lane.D2H)
            else:
                self._spill_out(swapped, flat)
        except BaseException as error:
            swapped.error = error  # swap_in raises it, and this thread continues
        finally:
            if swapped.direct_bytes:  # its memory is read until the first write is done
                swapped.writes[0].add_done_callback(partial(_end_store, swapped))
            else:
                _end_store(swapped)
            self._return_holes(swapped.num_bytes)

    def _spill_out(self, swapped: SwappedTensor, flat: Tensor) -> None:
        spill = self._spill
        assert spill is not None
        whole = swapped.num_bytes // GRANULE_NUMEL * GRANULE_NUMEL
        if whole and spill.hasher is not None and spill.hasher.can_hash(flat):
            hashes = spill.hasher.hashes(flat[:whole], GRANULE_NUMEL, Lane.D2H)  # waits for the tensor
            checksums = hashes.numpy().view(np.uint64)
            request = spill.files.write(SPILL_BLOCK, SPILL_KIND, swapped.spill_start, flat[:whole], checksums=checksums)
            swapped.writes.append(request)
            swapped.direct_bytes = whole
        for start in range(swapped.direct_bytes, swapped.num_bytes, spill.staging.buffer_bytes):
            stop = min(start + spill.staging.buffer_bytes, swapped.num_bytes)
            buffer = spill.staging.acquire()
            self._device.copy(Lane.D2H, buffer.bytes[: stop - start], flat[start:stop])
            self._device.record(Lane.D2H).synchronize()
            whole = -(-(stop - start) // GRANULE_NUMEL) * GRANULE_NUMEL
            request = spill.files.write(SPILL_BLOCK, SPILL_KIND, swapped.spill_start + start, buffer.bytes[:whole])
            request.add_done_callback(partial(_release_buffer, buffer))
            swapped.writes.append(request)

    def _fetch(self, swapped: SwappedTensor, landing: Tensor, vacated: Event) -> None:
        if swapped.error is not None:
            swapped.is_fetched.set()
            return
        try:
            self._device.wait(Lane.H2D, vacated)
            flat = as_bytes(landing)
            if swapped.region is not None:
                assert swapped.stored is not None
                self._device.wait(Lane.H2D, swapped.stored)
                self._device.copy(Lane.H2D, flat, swapped.region)
            else:
                self._read_back(swapped, flat, vacated)
            swapped.landed, swapped.ready = landing, self._device.record(Lane.H2D)
            if swapped.region is not None:
                self._num_reads += 1
                swapped.last_read = HostRead(self._num_reads, swapped.ready)
        except BaseException as error:
            swapped.error = error
        finally:
            swapped.is_fetched.set()
            self._return_holes(swapped.num_bytes)

    def _return_holes(self, num_bytes: int) -> None:
        """Count the bytes of a moved tensor, and return free memory after enough bytes."""
        if not self._device.shares_cores:
            return
        self._holes_bytes += num_bytes
        if self._holes_bytes >= _KEPT_HOLES_BYTES:
            self._holes_bytes = 0
            return_freed_memory()

    def _read_back(self, swapped: SwappedTensor, flat: Tensor, vacated: Event) -> None:
        spill = self._spill
        assert spill is not None
        for request in swapped.writes:
            request.wait()
        straight: RecordRead | None = None
        if swapped.direct_bytes:
            vacated.synchronize()  # the drive does not wait for events
            straight = spill.files.read(SPILL_BLOCK, SPILL_KIND, swapped.spill_start, flat[: swapped.direct_bytes])
        reading: deque[tuple[Any, Buffer, int, int]] = deque()
        copying: deque[tuple[Event, Buffer]] = deque()

        def copy_one() -> None:
            read, buffer, start, stop = reading.popleft()
            try:
                read.wait()
            except BaseException:
                buffer.release()
                raise
            self._device.copy(Lane.H2D, flat[start:stop], buffer.bytes[: stop - start])
            copying.append((self._device.record(Lane.H2D), buffer))

        def free_one() -> None:
            if not copying:
                copy_one()
            event, buffer = copying.popleft()
            event.synchronize()
            buffer.release()

        try:
            for start in range(swapped.direct_bytes, swapped.num_bytes, spill.staging.buffer_bytes):
                stop = min(start + spill.staging.buffer_bytes, swapped.num_bytes)
                while spill.staging.num_free == 0 and (reading or copying):
                    free_one()
                buffer = spill.staging.acquire()
                whole = -(-(stop - start) // GRANULE_NUMEL) * GRANULE_NUMEL
                read = spill.files.read(SPILL_BLOCK, SPILL_KIND, swapped.spill_start + start, buffer.bytes[:whole])
                reading.append((read, buffer, start, stop))
            while reading:
                copy_one()
            if straight is not None:
                straight.wait()
        finally:
            if straight is not None:
                with contextlib.suppress(Exception):
                    straight.wait_for_bytes()
            while reading:  # after an error, running reads still write to their buffers
                read, buffer, _, _ = reading.popleft()
                with contextlib.suppress(Exception):
                    read.wait()
                buffer.release()
            while copying:
                free_one()

    def _raise_error(self, swapped: SwappedTensor) -> None:
        if swapped.error is not None:
            raise swapped.error


def _end_store(swapped: SwappedTensor, request: IoRequest | None = None) -> None:
    if request is not None:
        swapped.error = swapped.error or request.error
    swapped.source = None
    swapped.is_stored.set()


def _release_buffer(buffer: Buffer, _request: object) -> None:
    buffer.release()


def _free_on_ssd(intervals: IntervalStack, start: int, _read: HostRead | None) -> None:
    intervals.free(start)
