"""A fixed set of equal host buffers, which are borrowed whole or in halves. Borrowers wait for a free buffer."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_lohan.device.base import Device


class PoolAborted(RuntimeError):
    """The pool was closed, so no buffer will become free. `__cause__` is the reason."""


@dataclass(eq=False)
class Buffer:
    """A borrowed buffer or half of one. `bytes` is a uint8 tensor [buffer_bytes] or [buffer_bytes / 2]."""

    bytes: Tensor
    pool: BufferPool = field(repr=False)
    _num_users: int = field(default=0, repr=False)
    _whole: Buffer | None = field(default=None, repr=False)
    """The whole buffer, if this is a half."""
    _other_half: Buffer | None = field(default=None, repr=False)

    def view(self, dtype: torch.dtype, numel: int, *, start_byte: int = 0) -> Tensor:
        """View `numel` elements of `dtype` from `start_byte` on."""
        return self.bytes[start_byte : start_byte + numel * dtype.itemsize].view(dtype)

    def retain(self) -> None:
        """Add a user of a borrowed buffer. Each user calls `release`."""
        with self.pool._lock:
            assert self._num_users > 0, "the buffer is not borrowed"
            self._num_users += 1

    def release(self) -> None:
        """Remove a user. The last user returns the buffer to the pool."""
        with self.pool._lock:
            assert self._num_users > 0, "the buffer was returned already"
            self._num_users -= 1
            if self._num_users == 0:
                self.pool._take_back(self)


class BufferPool:
    """`num_buffers` buffers of `buffer_bytes` each, in the device's host memory or in `memory`, which is a page-aligned
    uint8 tensor [num_buffers * buffer_bytes] from which the device can copy.

    A half is taken from a split buffer if one has a free half. A buffer becomes whole when both halves are returned, so
    n borrowed halves split at most n buffers.
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
        """Free halves whose other half is borrowed."""
        # The lock is not taken through the condition, for the reason in `IoEngine`.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._cause: BaseException | None = None
        self._borrowed_bytes = 0
        self.high_water_bytes = 0
        """Largest number of bytes that were borrowed at once."""

    @property
    def num_free(self) -> int:
        """Number of free whole buffers."""
        return len(self._free)

    def acquire(self, *, half: bool = False) -> Buffer:
        """Wait until a buffer, or half of one, is free and borrow it. Raises PoolAborted if the pool is closed."""
        buffer = self.acquire_within(None, half=half)
        assert buffer is not None
        return buffer

    def acquire_within(self, timeout_s: float | None, *, half: bool = False) -> Buffer | None:
        """Same as `acquire`, but return None if nothing is free after ``timeout_s``. With None, wait forever."""
        with self._lock:
            is_free = self._changed.wait_for(lambda: self._is_ready(half), timeout_s)
            return self._take(half) if is_free else None

    def _is_ready(self, half: bool) -> bool:
        """Return whether a buffer is free or the pool is closed."""
        return bool(self._free or (half and self._free_halves) or self._cause is not None)

    def _take(self, half: bool) -> Buffer:
        if self._cause is not None:
            raise PoolAborted(f"buffer pool {self.name!r} was closed: {self._cause}") from self._cause
        buffer = self._take_half() if half else self._free.pop()
        buffer._num_users = 1
        self._borrowed_bytes += buffer.bytes.numel()
        self.high_water_bytes = max(self.high_water_bytes, self._borrowed_bytes)
        return buffer

    def try_acquire(self, num_buffers: int = 1, *, leave: int = 0) -> list[Buffer] | None:
        """Borrow `num_buffers` buffers if `leave` more are free, or return None. Does not wait. Raises PoolAborted if
        the pool is closed."""
        with self._lock:
            if self._cause is None and len(self._free) < num_buffers + leave:
                return None
            return [self.acquire() for _ in range(num_buffers)]

    def abort(self, cause: BaseException) -> None:
        """Close the pool if the thread that returns buffers has died. All current and later borrowers raise."""
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
        self._borrowed_bytes -= buffer.bytes.numel()
        if buffer._whole is None:
            self._free.append(buffer)
        elif buffer._other_half in self._free_halves:
            del self._free_halves[buffer._other_half]
            self._free.append(buffer._whole)
        else:
            self._free_halves[buffer] = None
        self._changed.notify_all()  # the first thread may wait for a whole buffer and be unable to use a half
