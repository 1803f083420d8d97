"""What a forked child (a data loader's worker) must not do: anything with its parent's threads, locks and files."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Protocol


class _Closable(Protocol):
    """Has a file of its own."""

    def close(self) -> None: ...


_closed_in_children: set[int] = set()
_objects_closed_in_children: weakref.WeakSet[_Closable] = weakref.WeakSet()


def close_in_children(fd: int) -> None:
    """Have every child close ``fd``. It shares the parent's open file: a lock on that would outlive the parent, and a
    deleted file would keep its room."""
    _closed_in_children.add(fd)


def closing(fd: int) -> None:
    """``fd``, of which `close_in_children` was told, is about to be closed here."""
    _closed_in_children.discard(fd)


def close_object_in_children(closable: _Closable) -> None:
    """Have every child close ``closable``, as long as there is one: the other end of a socket does not see that this
    process ended while a child of it has the socket, too."""
    _objects_closed_in_children.add(closable)


class Owner:
    """The process that made something. Its children have a copy without threads, whose locks may be held for ever."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process, and not a child of it."""
        return os.getpid() == self._pid


def _close_all() -> None:
    while _closed_in_children:
        with suppress(OSError):
            os.close(_closed_in_children.pop())
    for closable in list(_objects_closed_in_children):
        with suppress(OSError):
            closable.close()


os.register_at_fork(after_in_child=_close_all)
