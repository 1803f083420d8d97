"""Storage backends that wrap the real one and are slow, faulty, short or counted."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence

from hf_lohan.files import FileBackend


class SlowBackend(FileBackend):
    """Makes every read and write take ``delay_s`` longer, so that code without a needed wait fails."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s

    def read(self, fd: int, offset: int, views: Sequence[memoryview]) -> int:
        time.sleep(self.delay_s)
        return super().read(fd, offset, views)

    def write(self, fd: int, offset: int, views: Sequence[memoryview]) -> int:
        time.sleep(self.delay_s)
        return super().write(fd, offset, views)


class GatedBackend(FileBackend):
    """Makes reads and writes wait until the test sets ``gate``. ``arrived`` counts the requests so far."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.arrived = threading.Semaphore(0)

    def read(self, fd: int, offset: int, views: Sequence[memoryview]) -> int:
        self._pass()
        return super().read(fd, offset, views)

    def write(self, fd: int, offset: int, views: Sequence[memoryview]) -> int:
        self._pass()
        return super().write(fd, offset, views)

    def _pass(self) -> None:
        self.arrived.release()
        self.gate.wait()


class CountingBackend(FileBackend):
    """Counts calls by name in ``calls``, and records the size of every read and write in bytes."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.read_sizes_bytes: list[int] = []
        self.write_sizes_bytes: list[int] = []
        self._lock = threading.Lock()

    def count(self, call: str) -> int:
        """Count one more ``call``. Returns the new count."""
        with self._lock:
            self.calls[call] += 1
            return self.calls[call]

    def open(self, path: str, flags: int) -> int:
        self.count("open")
        return super().open(path, flags)

    def close(self, fd: int) -> None:
        self.count("close")
        super().close(fd)

    def read(self, fd: int, offset: int, views: Sequence[memoryview]) -> int:
        self.count("read")
        self.read_sizes_bytes.append(sum(view.nbytes for view in views))
        return super().read(fd, offset, views)

    def write(self, fd: int, offset: int, views: Sequence[memoryview]) -> int:
        self.count("write")
        self.write_sizes_bytes.append(sum(view.nbytes for view in views))
        return super().write(fd, offset, views)

    def allocate(self, fd: int, num_bytes: int) -> None:
        self.count("allocate")
        super().allocate(fd, num_bytes)

    def sync(self, fd: int) -> None:
        self.count("sync")
        super().sync(fd)

    def set_buffered(self, fd: int) -> None:
        self.count("set_buffered")
        super().set_buffered(fd)


class FaultyBackend(CountingBackend):
    """Raises OSError in the ``fail_on``-th ``call``, counted from 1. If ``sticky``, all later calls raise it too."""

    def __init__(self, call: str, fail_on: int, errno: int, *, sticky: bool = False) -> None:
        super().__init__()
        self.call = call
        self.fail_on = fail_on
        self.errno = errno
        self.sticky = sticky

    def count(self, call: str) -> int:
        number = super().count(call)
        if call == self.call and (number == self.fail_on or (self.sticky and number > self.fail_on)):
            raise OSError(self.errno, os.strerror(self.errno))
        return number


class ShortBackend(CountingBackend):
    """Moves at most ``max_bytes`` per call, as the kernel may. With 0, a call returns 0 as at the end of the file."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self.max_bytes = max_bytes

    def read(self, fd: int, offset: int, views: Sequence[memoryview]) -> int:
        return super().read(fd, offset, _first(views, self.max_bytes)) if self.max_bytes else 0

    def write(self, fd: int, offset: int, views: Sequence[memoryview]) -> int:
        return super().write(fd, offset, _first(views, self.max_bytes)) if self.max_bytes else 0


class FlippingBackend(CountingBackend):
    """Flips one ``bit`` of the data of the ``flip_on``-th ``call`` ("read" or "write"), counted from 1. A flipped write
    changes only the file, and not the caller's memory."""

    def __init__(self, call: str, flip_on: int, bit: int) -> None:
        super().__init__()
        self.call = call
        self.flip_on = flip_on
        self.bit = bit
        self._numbers: Counter[str] = Counter()

    def read(self, fd: int, offset: int, views: Sequence[memoryview]) -> int:
        moved_bytes = super().read(fd, offset, views)
        if self._is_meant("read"):
            self._flip(views)
        return moved_bytes

    def write(self, fd: int, offset: int, views: Sequence[memoryview]) -> int:
        if self._is_meant("write"):
            with mmap.mmap(-1, sum(view.nbytes for view in views)) as copied:  # mapped, so aligned
                copied.write(b"".join(views))
                with memoryview(copied) as view:
                    self._flip([view])
                    return super().write(fd, offset, [view])
        return super().write(fd, offset, views)

    def _is_meant(self, call: str) -> bool:
        with self._lock:
            self._numbers[call] += 1
            return call == self.call and self._numbers[call] == self.flip_on

    def _flip(self, views: Sequence[memoryview]) -> None:
        byte, bit = divmod(self.bit, 8)
        for view in views:
            if byte < view.nbytes:
                view[byte] ^= 1 << bit
                return
            byte -= view.nbytes
        raise AssertionError(f"bit {self.bit} is not in this {self.call}")


class NoDirectBackend(CountingBackend):
    """Acts as a file system without O_DIRECT. It refuses to open the file, or opens the file and refuses transfers."""

    def __init__(self, *, refuses_at_open: bool) -> None:
        super().__init__()
        self.refuses_at_open = refuses_at_open
        self._direct_fds: set[int] = set()

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_DIRECT and self.refuses_at_open:
            raise _refusal()
        fd = super().open(path, flags & ~os.O_DIRECT)
        if flags & os.O_DIRECT:
            self._direct_fds.add(fd)
        return fd

    def read(self, fd: int, offset: int, views: Sequence[memoryview]) -> int:
        if fd in self._direct_fds:
            raise _refusal()
        return super().read(fd, offset, views)

    def write(self, fd: int, offset: int, views: Sequence[memoryview]) -> int:
        if fd in self._direct_fds:
            raise _refusal()
        return super().write(fd, offset, views)

    def set_buffered(self, fd: int) -> None:
        self._direct_fds.discard(fd)
        super().set_buffered(fd)


def _refusal() -> OSError:
    return OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def _first(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    kept = []
    for view in views:
        if num_bytes:
            kept.append(view[:num_bytes])
            num_bytes -= kept[-1].nbytes
    return kept
