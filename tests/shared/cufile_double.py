"""A double of libcufile whose device memory is host memory. It is as strict as GPUDirect Storage without compatibility
mode, and can be short, slow and faulty."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from hf_lohan.files import SECTOR_BYTES

CALLS = (
    *("cuFileDriverOpen", "cuFileDriverClose_v2", "cuFileHandleRegister", "cuFileHandleDeregister"),
    *("cuFileBufRegister", "cuFileBufDeregister", "cuFileRead", "cuFileWrite"),
)
_INVALID, _NOT_OPEN, _NOT_DIRECT, _NOT_REGISTERED, _TWICE = 5022, 5001, 5020, 5027, 5028
_MEMORY_TWICE, _MEMORY_UNKNOWN, _STILL_BUSY = 5023, 5024, 5006


class FakeCuFile:
    """The functions of libcufile, for `CuFileLibrary(functions)`.

    ``calls`` counts calls by name. Transfers of device memory must begin and end at sectors of a registered file, which
    is open with O_DIRECT; others fail, as do calls in a wrong order.
    """

    def __init__(
        self,
        *,
        errors: Mapping[tuple[str, int], int] | None = None,
        short: Sequence[int] = (),
        max_delay_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        """``errors`` maps (call, number of the call from 1 on) to an error: a number from 5001 on is libcufile's, a
        smaller one an ``errno``. ``short``: bytes that successive transfers move at most; -1 is no limit. Transfers are
        delayed by up to ``max_delay_s``."""
        self.calls: Counter[str] = Counter()
        self.errors = dict(errors or {})
        self.moved_bytes: Counter[str] = Counter()
        self.memory: dict[int, int] = {}
        """Registered memory: address to bytes."""
        self.files: dict[int, int] = {}
        """Registered files: handle to file descriptor."""
        self.is_open = False
        self._short = list(short)
        self._max_delay_s = max_delay_s
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._last_handle = 0x1000

    def cuFileDriverOpen(self) -> Any:
        with self._lock:
            error = self._error("cuFileDriverOpen")
            self.is_open = self.is_open or not error
            return _status(error)

    def cuFileDriverClose_v2(self) -> Any:
        with self._lock:
            error = self._error("cuFileDriverClose_v2") or (_STILL_BUSY if self.files else 0)
            self.is_open = self.is_open and bool(error)
            return _status(error)

    def cuFileHandleRegister(self, handle: Any, description: Any) -> Any:
        fd = description._obj.file.fd
        with self._lock:
            error = self._error("cuFileHandleRegister")
            if not error and not self.is_open:
                error = _NOT_OPEN
            elif not error and not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                error = _NOT_DIRECT
            elif not error and fd in self.files.values():
                error = _TWICE
            if not error:
                self._last_handle += 1
                self.files[self._last_handle] = fd
                ctypes.memmove(handle, ctypes.byref(ctypes.c_void_p(self._last_handle)), ctypes.sizeof(ctypes.c_void_p))
            return _status(error)

    def cuFileHandleDeregister(self, handle: int) -> None:
        with self._lock:
            self.calls["cuFileHandleDeregister"] += 1
            del self.files[handle]

    def cuFileBufRegister(self, address: int, num_bytes: int, flags: int) -> Any:
        with self._lock:
            error = self._error("cuFileBufRegister") or (_MEMORY_TWICE if address in self.memory else 0)
            if not error:
                self.memory[address] = num_bytes
            return _status(error)

    def cuFileBufDeregister(self, address: int) -> Any:
        with self._lock:
            error = self._error("cuFileBufDeregister") or (0 if address in self.memory else _MEMORY_UNKNOWN)
            if not error:
                del self.memory[address]
            return _status(error)

    def cuFileRead(self, handle: int, base: int, num_bytes: int, offset: int, memory_offset: int) -> int:
        return self._move("cuFileRead", handle, base + memory_offset, num_bytes, offset)

    def cuFileWrite(self, handle: int, base: int, num_bytes: int, offset: int, memory_offset: int) -> int:
        return self._move("cuFileWrite", handle, base + memory_offset, num_bytes, offset)

    def _move(self, call: str, handle: int, address: int, num_bytes: int, offset: int) -> int:
        with self._lock:
            error = self._error(call)
            fd = self.files.get(handle)
            limit = self._short.pop(0) if self._short else -1
            delay_s = self._random.uniform(0, self._max_delay_s)
        if error:
            return _failed(error)
        if fd is None:
            return -_NOT_REGISTERED
        if num_bytes % SECTOR_BYTES or offset % SECTOR_BYTES:
            return -_INVALID
        time.sleep(delay_s)
        wanted = num_bytes if limit < 0 else min(limit, num_bytes)
        content, moved = bytearray(wanted), 0
        if call == "cuFileWrite":
            self.copy_from_device(content, address)
        # By another descriptor, because O_DIRECT cannot move what a short call leaves.
        other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        try:
            while moved < wanted:
                view = memoryview(content)[moved:]
                done = (os.preadv if call == "cuFileRead" else os.pwritev)(other, [view], offset + moved)
                if not done:
                    break
                moved += done
        except OSError as error_of_file:
            return _failed(error_of_file.errno or errno.EIO)
        finally:
            os.close(other)
        if call == "cuFileRead":
            self.copy_to_device(address, content[:moved])
        with self._lock:
            self.moved_bytes[call] += moved
        return moved

    def copy_to_device(self, address: int, content: bytearray) -> None:
        """Put bytes that were read into device memory. They are there when this returns."""
        ctypes.memmove(address, (ctypes.c_char * len(content)).from_buffer(content), len(content))

    def copy_from_device(self, content: bytearray, address: int) -> None:
        """Take bytes to write from device memory, as it is now."""
        ctypes.memmove((ctypes.c_char * len(content)).from_buffer(content), address, len(content))

    def _error(self, call: str) -> int:
        """Count a call, and return the error that it is to have, or 0."""
        self.calls[call] += 1
        return self.errors.pop((call, self.calls[call]), 0)


def _status(error: int) -> Any:
    return SimpleNamespace(code=error, cuda_code=700 if error == 5011 else 0)


def _failed(error: int) -> int:
    if error > 5000:
        return -error
    ctypes.set_errno(error)
    return -1
