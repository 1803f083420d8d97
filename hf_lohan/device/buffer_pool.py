"""A fixed set of equal host buffers under a byte budget: lend, whole or in halves, wait, never grow."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_lohan.device.base import Device


class PoolAborted(RuntimeError):
    """The pool was shut while somebody waited for a buffer; `__cause__` says why."""


@dataclass(eq=False)
class Buffer:
    """One buffer on loan, or half of one. `bytes` is a uint8 tensor [buffer_bytes], or [buffer_bytes / 2]."""

    bytes: Tensor
    pool: BufferPool = field(repr=False)
    _num_users: int = field(default=0, repr=False)
    _whole: Buffer | None = field(default=None, repr=False)
    """What it is half of."""
    _other_half: Buffer | None = field(default=None, repr=False)

    def view(self, dtype: torch.dtype, numel: int, *, start_byte: int = 0) -> Tensor:
        """The first `numel` elements from `start_byte` on, as `dtype`."""
        return self.bytes[start_byte : start_byte + numel * dtype.itemsize].view(dtype)

    def retain(self) -> None:
        """It has one user more, who has to `release` it as well. To be called while there is one."""
        with self.pool._lock:
            assert self._num_users > 0, "nobody has it"
            self._num_users += 1

    def release(self) -> None:
        """A user is done. After the last one its contents belong to somebody else."""
        with self.pool._lock:
            assert self._num_users > 0, "it was given back already"
            self._num_users -= 1
            if self._num_users == 0:
                self.pool._take_back(self)


class BufferPool:
    """`num_buffers` buffers of `buffer_bytes` each, taken from the device's host memory at construction, or from
    `memory`: uint8, page-aligned, known to the device, of all their bytes.

    Half a buffer is taken from one that is lent in half already, if there is one, and a buffer is whole again when both
    its halves are back: so many halves never keep more buffers from being whole than there are halves.
    """

    def __init__(
        self, device: Device, *, name: str, num_buffers: int, buffer_bytes: int, memory: Tensor | None = None
    ) -> None:
        self.name = name
        self.num_buffers = num_buffers
        self.buffer_bytes = buffer_bytes
        if memory is None:
            memory = device.host_empty(num_buffers * buffer_bytes) if num_buffers else torch.empty(0, dtype=torch.uint8)
        assert memory.numel() == num_buffers * buffer_bytes
        self._free = [Buffer(part, self) for part in memory.split(buffer_bytes)] if num_buffers else []
        self._free_halves: dict[Buffer, None] = {}
        """Those whose other half is on loan."""
        # Entered itself, not through the condition: see `IoEngine`.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._cause: BaseException | None = None
        self._bytes_on_loan = 0
        self.high_water_bytes = 0
        """The most bytes that were ever on loan at once."""

    @property
    def num_free(self) -> int:
        """Whole ones."""
        return len(self._free)

    def acquire(self, *, half: bool = False) -> Buffer:
        """Lend a buffer, or half of one; wait until one is free. Raises PoolAborted if the pool is shut meanwhile."""
        buffer = self.acquire_within(None, half=half)
        assert buffer is not None
        return buffer

    def acquire_within(self, timeout_s: float | None, *, half: bool = False) -> Buffer | None:
        """`acquire`, but returns None if nothing is free after ``timeout_s``. None waits for ever."""
        with self._lock:
            is_free = self._changed.wait_for(lambda: self._has(half), timeout_s)
            return self._take(half) if is_free else None

    def _has(self, half: bool) -> bool:
        """Whether there is something to take, or nothing will ever be."""
        return bool(self._free or (half and self._free_halves) or self._cause is not None)

    def _take(self, half: bool) -> Buffer:
        if self._cause is not None:
            raise PoolAborted(f"buffer pool {self.name!r} was shut: {self._cause}") from self._cause
        buffer = self._take_half() if half else self._free.pop()
        buffer._num_users = 1
        self._bytes_on_loan += buffer.bytes.numel()
        self.high_water_bytes = max(self.high_water_bytes, self._bytes_on_loan)
        return buffer

    def try_acquire(self, num_buffers: int = 1, *, leave: int = 0) -> list[Buffer] | None:
        """Lend so many buffers if they and `leave` more are free now; else None. Raises PoolAborted if the pool is
        shut."""
        with self._lock:
            if self._cause is None and len(self._free) < num_buffers + leave:
                return None
            return [self.acquire() for _ in range(num_buffers)]

    def abort(self, cause: BaseException) -> None:
        """Wake everybody who waits, with `cause`. Used when the thread that would free buffers has died."""
        with self._lock:
            self._cause = cause
            self._changed.notify_all()

    def _take_half(self) -> Buffer:
        if self._free_halves:
            return self._free_halves.popitem()[0]
        whole = self._free.pop()
        half, other = (Buffer(part, self, _whole=whole) for part in whole.bytes.split(self.buffer_bytes // 2))
        half._other_half, other._other_half = other, half
        self._free_halves[other] = None
        return half

    def _take_back(self, buffer: Buffer) -> None:
        self._bytes_on_loan -= buffer.bytes.numel()
        if buffer._whole is None:
            self._free.append(buffer)
        elif buffer._other_half in self._free_halves:
            del self._free_halves[buffer._other_half]
            self._free.append(buffer._whole)
        else:
            self._free_halves[buffer] = None
        self._changed.notify_all()  # who waits for a whole one has no use for a half
