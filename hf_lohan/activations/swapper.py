"""Moves activations off the device and back, on a thread of its own: to RAM, or through staging buffers to the SSD."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from hf_lohan.activations.swapped_tensor import SwappedTensor, TensorForm, alias_of, as_bytes, storage_of, witness_of
from hf_lohan.compat.torch_private import version_of
from hf_lohan.device import Buffer, BufferPool, Device, Event, HostRead, HostStack, IntervalStack, Lane
from hf_lohan.planner import Placement
from hf_lohan.store import GRANULE_NUMEL, RecordFiles
from hf_lohan.threads import FirstFailure, WorkThread
from hf_lohan.timeline import COMPUTE_WAITS

SPILL_BLOCK = "activations"
SPILL_KIND = "activation"

_Place: TypeAlias = "tuple[Tensor | None, int, Callable[[HostRead | None], None]]"
"""Memory, or else where on the SSD, and what frees it."""


@dataclass(eq=False)
class _Spill:
    """Room on the SSD, and the buffers on the way to it. One element is one byte, a place whole granules."""

    files: RecordFiles
    staging: BufferPool
    places: IntervalStack


class ActivationSwapper:
    """Takes tensors (`swap_out`) and brings them back (`expect`, then `bring_back`), in any order, best in reverse.

    Used by the computing thread (on CUDA, autograd's too, one at a time); the copies and the I/O run on its own.
    """

    def __init__(self, device: Device, ram: HostStack | None = None) -> None:
        """``ram``: whose bottom it uses; somebody else may use its top."""
        self._device = device
        self._ram = ram or HostStack(device)
        self._num_reads = 0
        self._spill: _Spill | None = None
        self._is_closed = False
        self.swapped_bytes = 0
        """Bytes that left the device, to RAM or SSD, since the start."""
        self.spilled_bytes = 0
        """Those of them that went on to the SSD."""
        self._thread = WorkThread("lohan-activations", FirstFailure(), beside_kernels=device.shares_cores)
        self._thread.start()

    def take_ram(self, num_bytes: int) -> None:
        """Reserve host memory for swapped activations, once. Call it only while nothing is swapped."""
        self._ram.reallocate(num_bytes)

    def take_ssd(self, files: RecordFiles, staging: BufferPool, num_bytes: int) -> None:
        """Use ``num_bytes`` of `files` for what RAM does not hold, through ``staging``."""
        assert staging.num_buffers and staging.buffer_bytes % GRANULE_NUMEL == 0
        self._spill = _Spill(files, staging, IntervalStack(num_bytes, GRANULE_NUMEL))

    def begin_forward(self) -> None:
        """What the one before needed of RAM does not count any more."""
        self._ram.forget_marks()

    def mark(self, where: str) -> None:
        """The forward is behind ``where``: note how much RAM it needed so far."""
        self._ram.mark(where)

    @property
    def ram_bytes(self) -> int:
        return self._ram.num_bytes

    @property
    def ssd_bytes(self) -> int:
        return self._spill.places.capacity if self._spill is not None else 0

    @property
    def high_water_bytes(self) -> int:
        """The most host memory that was ever in use at once."""
        staging = self._spill.staging.high_water_bytes if self._spill is not None else 0
        return self._ram.high_water_bytes + staging

    def swap_out(self, tensor: Tensor, placement: Placement) -> SwappedTensor | None:
        """Begin to move a tensor (`is_swappable`) to RAM or SSD, to the other if that one is full; None if both are.

        It must not be written to before `wait_until_stored`; `drain` and `bring_back` raise RuntimeError if it was.
        """
        num_bytes = tensor.numel() * tensor.element_size()
        place = self._place(num_bytes, placement)
        if place is None:
            return None
        region, start, free = place
        swapped = SwappedTensor(
            form=TensorForm.of(tensor),
            num_bytes=num_bytes,
            region=region,
            spill_start=start,
            source=alias_of(tensor),
            storage=storage_of(tensor),
            witness=witness_of(tensor),
            version=version_of(tensor),
            free=free,
            later=self._thread.submit,
        )
        self.swapped_bytes += num_bytes
        if region is None:
            self.spilled_bytes += num_bytes
        produced = self._device.record(Lane.COMPUTE, tensor)
        self._thread.submit(partial(self._store, swapped, produced))
        return swapped

    def wait_until_stored(self, swapped: SwappedTensor) -> None:
        """From here on the tensor that was swapped may be written to."""
        if swapped.may_change:
            return
        swapped.is_stored.wait()
        self._raise(swapped)
        if swapped.stored is not None:
            self._device.wait(Lane.COMPUTE, swapped.stored)
        swapped.check_unchanged()
        swapped.may_change = True

    def drain(self, swapped: Sequence[SwappedTensor]) -> None:
        """Wait until these, in the order in which they were swapped out, have left the device: their memory is free."""
        with self._device.timeline.task(COMPUTE_WAITS, "activations to leave"):
            for one in swapped:
                one.is_stored.wait()
                self._raise(one)
            leaving = [one.stored for one in swapped if one.stored is not None]
            if leaving:
                leaving[-1].synchronize()  # one lane, in the order in which they were put away: the others are reached
            for one in swapped:
                one.check_unchanged()

    def expect(self, swapped: SwappedTensor) -> None:
        """It will be asked for soon. Raises RuntimeError after `close`."""
        if self._is_closed:
            raise RuntimeError("the engine is closed, and its swapped activations are gone; load the model again")
        if not swapped.is_expected:
            landing = swapped.form.empty()
            # Its memory may be what compute that is still under way has only just given back. Only this thread knows
            # which stream that is on, and what was enqueued on it before the memory was taken.
            vacated = self._device.record(Lane.COMPUTE, landing)
            swapped.is_expected = True
            self._thread.submit(partial(self._fetch, swapped, landing, vacated))

    def bring_back(self, swapped: SwappedTensor) -> Tensor:
        """An equal tensor, for compute enqueued from now on. Raises what storing or fetching it raised."""
        self.expect(swapped)
        with self._device.timeline.task(COMPUTE_WAITS, "activations"):
            swapped.is_fetched.wait()
        self._raise(swapped)
        swapped.check_unchanged()
        tensor, ready = swapped.landed, swapped.ready
        assert tensor is not None and ready is not None
        self._device.wait(Lane.COMPUTE, ready)
        # Asked for once more (retain_graph), it is fetched once more: to keep it here would keep it from being freed.
        swapped.landed, swapped.ready, swapped.is_expected = None, None, False
        swapped.is_fetched.clear()
        return tensor

    def settle(self) -> None:
        """Wait until everything begun is done. Raises what failed."""
        self._thread.barrier()

    def close(self) -> None:
        """Finish what was begun and end the thread."""
        self._is_closed = True
        self._thread.close()

    # Places.

    def _place(self, num_bytes: int, placement: Placement) -> _Place | None:
        first, second = self._in_ram, self._on_ssd
        if placement is Placement.SSD:
            first, second = second, first
        return first(num_bytes) or second(num_bytes)

    def _in_ram(self, num_bytes: int) -> _Place | None:
        place = self._ram.push(num_bytes)
        return None if place is None else (place[1], 0, partial(self._ram.free, place[0]))

    def _on_ssd(self, num_bytes: int) -> _Place | None:
        if self._spill is None:
            return None
        start = self._spill.places.push(num_bytes)
        return None if start is None else (None, start, partial(_free_on_ssd, self._spill.places, start))

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
            swapped.error = error  # for whoever wants the tensor; the thread goes on
        finally:
            swapped.source = None
            swapped.is_stored.set()

    def _spill_out(self, swapped: SwappedTensor, flat: Tensor) -> None:
        spill = self._spill
        assert spill is not None
        for start in range(0, swapped.num_bytes, spill.staging.buffer_bytes):
            stop = min(start + spill.staging.buffer_bytes, swapped.num_bytes)
            buffer = spill.staging.acquire()
            self._device.copy(Lane.D2H, buffer.bytes[: stop - start], flat[start:stop])
            self._device.record(Lane.D2H).synchronize()
            whole = -(-(stop - start) // GRANULE_NUMEL) * GRANULE_NUMEL
            request = spill.files.write(SPILL_BLOCK, SPILL_KIND, swapped.spill_start + start, buffer.bytes[:whole])
            request.add_done_callback(partial(_release, buffer))
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
                self._read_back(swapped, flat)
            swapped.landed, swapped.ready = landing, self._device.record(Lane.H2D)
            if swapped.region is not None:
                self._num_reads += 1
                swapped.last_read = HostRead(self._num_reads, swapped.ready)
        except BaseException as error:
            swapped.error = error
        finally:
            swapped.is_fetched.set()

    def _read_back(self, swapped: SwappedTensor, flat: Tensor) -> None:
        spill = self._spill
        assert spill is not None
        for request in swapped.writes:
            request.wait()
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
            for start in range(0, swapped.num_bytes, spill.staging.buffer_bytes):
                stop = min(start + spill.staging.buffer_bytes, swapped.num_bytes)
                while spill.staging.num_free == 0 and (reading or copying):
                    free_one()
                buffer = spill.staging.acquire()
                whole = -(-(stop - start) // GRANULE_NUMEL) * GRANULE_NUMEL
                read = spill.files.read(SPILL_BLOCK, SPILL_KIND, swapped.spill_start + start, buffer.bytes[:whole])
                reading.append((read, buffer, start, stop))
            while reading:
                copy_one()
        finally:
            while reading:  # after an error: what is under way still writes into its buffer
                read, buffer, _, _ = reading.popleft()
                with contextlib.suppress(Exception):
                    read.wait()
                buffer.release()
            while copying:
                free_one()

    def _raise(self, swapped: SwappedTensor) -> None:
        if swapped.error is not None:
            raise swapped.error


def _release(buffer: Buffer, _request: object) -> None:
    buffer.release()


def _free_on_ssd(places: IntervalStack, start: int, _read: HostRead | None) -> None:
    places.free(start)
