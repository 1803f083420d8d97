"""Counts each call of this process that changes files of one folder, just before it happens. Calls of `os` and opens
for writing are counted. Writes within compiled libraries are not: torch and safetensors write checkpoints themselves,
but always between calls that are counted."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, Literal, NamedTuple

from small_file_system import fill

BY_DESCRIPTOR = ("write", "pwrite", "writev", "pwritev", "posix_fallocate", "ftruncate", "fsync", "fdatasync")
BY_PATH = ("open", "os.rename", "os.mkdir", "os.remove", "os.truncate")
"""Names of Python's audit events. `os.replace` raises "os.rename" and `os.unlink` raises "os.remove"."""

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class WriteCall(NamedTuple):
    """Fill the file system, or die, just before the `number`-th call, counted from 1."""

    number: int
    action: Literal["fill", "die"]


class Watched:
    """Counts calls on all threads and acts at one of them."""

    def __init__(self, folder: Path, at: WriteCall | None) -> None:
        self.num_calls = 0
        self._folder = str(folder)
        self._at = at
        self._lock = threading.RLock()
        self._is_acting = False

    def see(self, path: Any, *, empties: bool = False) -> None:
        """Count a call on `path`. A call with `empties` truncates the file before new bytes are written."""
        if not isinstance(path, str | os.PathLike) or not os.fspath(path).startswith(self._folder):
            return
        with self._lock:
            if self._is_acting:
                return
            self.num_calls += 1
            if self._at is None or self.num_calls != self._at.number:
                return
            self._is_acting = True
            if self._at.action == "die":
                if empties and os.path.exists(path):
                    os.truncate(path, 0)  # as if it died after opening and before writing
                os.kill(os.getpid(), signal.SIGKILL)
            fill(self._folder)
            self._is_acting = False

    def see_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in BY_PATH:
            return
        flags = arguments[2] if event == "open" else WRITING
        if isinstance(flags, int) and flags & WRITING:
            self.see(arguments[0], empties=event == "open" and bool(flags & os.O_TRUNC))


def watch_write_calls(folder: Path, at: WriteCall | None) -> Watched:
    """Count the write calls of this process until it ends. Call this only in a forked process."""
    watched = Watched(folder, at)
    sys.addaudithook(watched.see_event)
    for name in BY_DESCRIPTOR:
        setattr(os, name, _seen(getattr(os, name), watched))
    return watched


def _seen(call: Any, watched: Watched) -> Any:
    def seen(descriptor: int, *arguments: Any) -> Any:
        watched.see(os.readlink(f"/proc/self/fd/{descriptor}"))
        return call(descriptor, *arguments)

    return seen
