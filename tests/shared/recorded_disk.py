"""A disk that records every call, so that a test can make any call fail, or cut the power after any call.

A power cut loses all that POSIX allows, even if real file systems lose less. Content is safe after its file is synced,
and a name after its directory is synced. Of all other data an arbitrary part survives, sector by sector, and not always
as written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any
from unittest.mock import patch

SECTOR_BYTES = 4096
_FOLDER = -2
"""Number of a folder, in place of a file's number."""


@dataclass(frozen=True)
class FileCall:
    """One call that changed something below the disk's root, or a ``mark`` of the test."""

    name: str
    file: int = -1
    """Number of the file, in order of creation."""
    folder: str = ""
    """The folder, relative to the root."""
    entries: tuple[str, ...] = ()
    """Names in the folder."""
    offset: int = 0
    """Offset of a write. For calls that set a size, the size."""
    content: bytes = b""
    mark: Any = None


class RecordedDisk:
    """Records the calls on files below ``root`` in this context, and passes them on."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[FileCall] = []
        self.num_attempts = 0
        """Number of calls after `fail`, including failed ones."""
        self._failing: tuple[int, int] | None = None
        self._after = ""
        self._files: dict[tuple[str, str], int] = {}
        self._open: dict[int, tuple[int, str]] = {}
        self._lock = threading.RLock()
        self._patches = ExitStack()

    def fail(self, call: int, errno: int, *, after: str = "") -> None:
        """Make a later call raise OSError. ``call``: its number, counted from 1. With ``after``, counting starts after
        the next call of this name."""
        with self._lock:
            self.num_attempts, self._failing, self._after = 0, (call, errno), after

    def mark(self, mark: Any) -> None:
        """Record a mark among the calls."""
        with self._lock:
            self._record(FileCall("mark", mark=mark))

    def __enter__(self) -> RecordedDisk:
        for name in ("pwrite", "pwritev", "ftruncate", "posix_fallocate", "fsync", "fdatasync"):
            self._patch(name, self._on_descriptor(name, getattr(os, name)))
        self._patch("open", self._opening(os.open))
        self._patch("close", self._closing(os.close))
        self._patch("replace", self._renaming(os.replace))
        self._patch("link", self._linking(os.link))
        self._patch("unlink", self._unlinking(os.unlink))
        self._patch("mkdir", self._on_folder("mkdir", os.mkdir))
        self._patch("rmdir", self._on_folder("rmdir", os.rmdir))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patches.close()

    def _patch(self, name: str, call: Callable[..., Any]) -> None:
        self._patches.enter_context(patch.object(os, name, call))

    def _attempt(self) -> None:
        if self._after:
            return
        self.num_attempts += 1
        if self._failing is not None and self.num_attempts == self._failing[0]:
            raise OSError(self._failing[1], os.strerror(self._failing[1]))

    def _record(self, call: FileCall) -> None:
        self.calls.append(call)
        if call.name == self._after:
            self._after = ""

    def _place(self, path: Any) -> tuple[str, str] | None:
        """Return the folder and the name of a path below the root; None for other paths."""
        absolute = Path(os.path.abspath(path))
        if not absolute.is_relative_to(self.root):
            return None
        return os.path.relpath(absolute.parent, self.root), absolute.name

    def _opening(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            with self._lock:
                place = self._place(path)
                if place is None:
                    return real(path, flags, *args, **kwargs)
                if flags & (os.O_CREAT | os.O_DIRECTORY):
                    self._attempt()
                fd = real(path, flags, *args, **kwargs)
                if flags & os.O_DIRECTORY:
                    self._open[fd] = (-1, os.path.relpath(path, self.root))
                    return fd
                if place not in self._files:
                    self._files[place] = sum(done.name == "create" for done in self.calls)
                    self._record(FileCall("create", self._files[place], place[0], (place[1],)))
                self._open[fd] = (self._files[place], "")
                return fd

        return call

    def _closing(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def call(fd: int) -> None:
            with self._lock:
                self._open.pop(fd, None)
                real(fd)

        return call

    def _on_descriptor(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: int, *args: Any) -> Any:
            with self._lock:
                if fd not in self._open:
                    return real(fd, *args)
                self._attempt()
                result = real(fd, *args)
                file, folder = self._open[fd]
                if name == "pwrite":
                    done = FileCall("write", file, offset=args[1], content=bytes(args[0])[:result])
                elif name == "pwritev":
                    done = FileCall("write", file, offset=args[1], content=b"".join(args[0])[:result])
                elif name == "ftruncate":
                    done = FileCall("resize", file, offset=args[0])
                elif name == "posix_fallocate":
                    done = FileCall("resize", file, offset=args[0] + args[1])
                else:
                    done = FileCall("sync", file, folder)
                self._record(done)
                return result

        return call

    def _renaming(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(source: Any, target: Any) -> None:
            with self._lock:
                old, new = self._place(source), self._place(target)
                if old is None or new is None:
                    real(source, target)
                    return
                assert old[0] == new[0], "within one folder"
                self._attempt()
                real(source, target)
                self._files[new] = self._files.pop(old)
                self._record(FileCall("rename", folder=old[0], entries=(old[1], new[1])))

        return call

    def _linking(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(source: Any, target: Any) -> None:
            with self._lock:
                old, new = self._place(source), self._place(target)
                if old is None or new is None:
                    real(source, target)
                    return
                self._attempt()
                real(source, target)
                self._files[new] = self._files[old]
                self._record(FileCall("link", self._files[new], new[0], (new[1],)))

        return call

    def _on_folder(self, name: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(path: Any, *args: Any, **kwargs: Any) -> None:
            with self._lock:
                place = self._place(path)
                if place is None:
                    real(path, *args, **kwargs)
                    return
                self._attempt()
                real(path, *args, **kwargs)
                self._record(FileCall(name, folder=place[0], entries=(place[1],)))

        return call

    def _unlinking(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(path: Any, *args: Any, **kwargs: Any) -> None:
            with self._lock:
                place = self._place(path)
                if place is None or not os.path.lexists(path):
                    real(path, *args, **kwargs)
                    return
                self._attempt()
                real(path, *args, **kwargs)
                self._files.pop(place, None)
                self._record(FileCall("unlink", folder=place[0], entries=(place[1],)))

        return call


@dataclass
class _Content:
    safe: bytearray = field(default_factory=bytearray)
    unsynced: list[FileCall] = field(default_factory=list)


@dataclass
class _Folder:
    safe: dict[str, int] = field(default_factory=dict)
    unsynced: list[FileCall] = field(default_factory=list)


class PowerCut:
    """Knows what a power cut may leave of the calls so far. A test applies the calls one by one, and writes images of
    the disk."""

    def __init__(self) -> None:
        self._contents: dict[int, _Content] = {}
        self._folders: dict[str, _Folder] = {}
        self._given: set[str] = set()

    def apply(self, call: FileCall) -> None:
        """Apply one more call, which has returned."""
        if call.name in ("create", "link", "rename", "unlink", "mkdir", "rmdir"):
            self._folders.setdefault(call.folder, _Folder()).unsynced.append(call)
            if call.name == "create":
                self._contents[call.file] = _Content()
        elif call.name in ("write", "resize"):
            self._contents[call.file].unsynced.append(call)
        elif call.name == "sync" and call.file >= 0:
            content = self._contents[call.file]
            for change in content.unsynced:
                _change(content.safe, change, lambda new, _: new)
            content.unsynced.clear()
        elif call.name == "sync":
            folder = self._folders.setdefault(call.folder, _Folder())
            for change in folder.unsynced:
                _change_names(folder.safe, change)
            folder.unsynced.clear()

    def add_folder(self, folder: str) -> None:
        """Include a folder in all images, even while it is empty."""
        self._folders.setdefault(folder, _Folder())
        self._given.add(folder)

    def write_image(self, root: Path, random: Random) -> None:
        """Write the disk in a state that is possible after the cut to ``root``."""
        made = set(self._given)
        for name, folder in sorted(self._folders.items(), key=lambda item: len(Path(item[0]).parts)):
            names = dict(folder.safe)
            for change in folder.unsynced[: random.randint(0, len(folder.unsynced))]:
                _change_names(names, change)
            made |= {os.path.normpath(os.path.join(name, entry)) for entry, file in names.items() if file == _FOLDER}
            if name not in made and name != ".":
                continue
            (root / name).mkdir(parents=True, exist_ok=True)
            for entry, file in names.items():
                if file != _FOLDER:
                    (root / name / entry).write_bytes(self._content(self._contents[file], random))
        for name in made:
            (root / name).mkdir(parents=True, exist_ok=True)

    def _content(self, content: _Content, random: Random) -> bytes:
        left = bytearray(content.safe)
        kept_fraction = random.choice([0.0, 0.5, 1.0])

        def sector(new: bytes, old: bytes) -> bytes:
            if new == old or random.random() < kept_fraction:  # an SSD writes no sector in place
                return new
            return random.randbytes(len(new)) if random.random() < 0.2 else old

        for change in content.unsynced:
            if change.name == "write" or random.random() < kept_fraction:
                _change(left, change, sector)
        return bytes(left)


def _change(content: bytearray, call: FileCall, sector: Callable[[bytes, bytes], bytes]) -> None:
    """Apply a write or a new size. ``sector(new, old)`` returns what each sector contains afterwards."""
    if call.name == "resize":
        del content[call.offset :]
        content.extend(bytes(call.offset - len(content)))
        return
    stop = call.offset + len(call.content)
    content.extend(bytes(max(0, stop - len(content))))
    for start in range(call.offset, stop, SECTOR_BYTES):
        part = slice(start, min(start + SECTOR_BYTES, stop))
        content[part] = sector(call.content[start - call.offset : part.stop - call.offset], bytes(content[part]))


def _change_names(names: dict[str, int], call: FileCall) -> None:
    if call.name in ("create", "link", "mkdir"):
        names[call.entries[0]] = _FOLDER if call.name == "mkdir" else call.file
    elif call.name in ("unlink", "rmdir"):
        names.pop(call.entries[0], None)
    elif call.entries[0] in names:
        names[call.entries[1]] = names.pop(call.entries[0])
