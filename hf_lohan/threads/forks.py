"""Keeps forked processes, such as data loader workers, from using the parent's threads, locks and files."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Protocol


class _Closable(Protocol):
    def close(self) -> None: ...


_closed_in_children: set[int] = set()
_objects_closed_in_children: weakref.WeakSet[_Closable] = weakref.WeakSet()


def close_in_children(fd: int) -> None:
    """Make every forked process close ``fd``. A child shares the parent's open file, so a lock on it would outlive the
    parent, and a deleted file would keep its disk space."""
    _closed_in_children.add(fd)


def closing(fd: int) -> None:
    """Undo `close_in_children`, because ``fd`` is about to be closed."""
    _closed_in_children.discard(fd)


def close_object_in_children(closable: _Closable) -> None:
    """Make every forked process close ``closable``, such as a socket. While a child has a socket open, the other end
    does not notice the end of this process. This keeps no reference to ``closable``."""
    _objects_closed_in_children.add(closable)


class Owner:
    """The process that made an object. A forked process has a copy of the object without threads, whose locks may never
    be released."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether the calling process made the object, and is not a child of that process."""
        return os.getpid() == self._pid


def _close_all() -> None:
    while _closed_in_children:
        with suppress(OSError):
            os.close(_closed_in_children.pop())
    for closable in list(_objects_closed_in_children):
        with suppress(OSError):
            closable.close()


os.register_at_fork(after_in_child=_close_all)
