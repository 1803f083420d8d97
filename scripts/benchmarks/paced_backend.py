"""A storage backend that is held to a rate, as a slower drive is."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from hf_lohan.files import FileBackend


class PacedBackend(FileBackend):
    """Reads ``bytes_per_s`` over all requests together, so requests wait for each other. With ``paces_writes``, reads
    and writes share this rate, as in a drive that does one at a time. Without it, writes are not slowed."""

    def __init__(self, bytes_per_s: float, *, paces_writes: bool = False) -> None:
        self.bytes_per_s = bytes_per_s
        self.paces_writes = paces_writes
        self._lock = threading.Lock()
        self._end_s = 0.0

    def read(self, fd: int, offset: int, views: Sequence[memoryview]) -> int:
        began_s = time.perf_counter()
        num_bytes = super().read(fd, offset, views)
        self._pace(num_bytes, began_s)
        return num_bytes

    def write(self, fd: int, offset: int, views: Sequence[memoryview]) -> int:
        began_s = time.perf_counter()
        num_bytes = super().write(fd, offset, views)
        if self.paces_writes:
            self._pace(num_bytes, began_s)
        return num_bytes

    def _pace(self, num_bytes: int, began_s: float) -> None:
        with self._lock:
            end_s = self._end_s = max(self._end_s, began_s) + num_bytes / self.bytes_per_s
        while (left_s := end_s - time.perf_counter()) > 0:
            time.sleep(left_s)
