"""A fixed set of equal host buffers under a byte budget: lend, wait, never grow."""

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
    """One buffer on loan. `bytes` is a uint8 tensor [buffer_bytes]."""

    bytes: Tensor
    pool: BufferPool = field(repr=False)
    _num_users: int = field(default=0, repr=False)

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
                self.pool._free.append(self)
                self.pool._changed.notify()


class BufferPool:
    """`num_buffers` buffers of `buffer_bytes` each, taken from the device's host memory at construction."""

    def __init__(self, device: Device, *, name: str, num_buffers: int, buffer_bytes: int) -> None:
        self.name = name
        self.num_buffers = num_buffers
        self.buffer_bytes = buffer_bytes
        memory = device.host_empty(num_buffers * buffer_bytes) if num_buffers else torch.empty(0, dtype=torch.uint8)
        self._free = [Buffer(part, self) for part in memory.split(buffer_bytes)] if num_buffers else []
        # Entered itself, not through the condition: see `IoEngine`.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._cause: BaseException | None = None
        self.high_water_buffers = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def high_water_bytes(self) -> int:
        """The most bytes that were ever on loan at once."""
        return self.high_water_buffers * self.buffer_bytes

    def acquire(self) -> Buffer:
        """Lend a buffer, waiting until one is free. Raises PoolAborted if the pool is shut meanwhile."""
        with self._lock:
            self._changed.wait_for(lambda: self._free or self._cause is not None)
            if self._cause is not None:
                raise PoolAborted(f"buffer pool {self.name!r} was shut: {self._cause}") from self._cause
            buffer = self._free.pop()
            buffer._num_users = 1
            self.high_water_buffers = max(self.high_water_buffers, self.num_buffers - len(self._free))
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
