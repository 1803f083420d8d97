"""Keeps forked processes, such as data loader workers, from using the parent's threads, locks and files."""

from __future__ import annotations

import os
from contextlib import suppress

_closed_in_children: set[int] = set()


def close_in_children(fd: int) -> None:
    """Make every forked process close ``fd``. A child shares the parent's open file, so a lock on it would outlive the
    parent, and a deleted file would keep its disk space."""
    _closed_in_children.add(fd)


def closing(fd: int) -> None:
    """Undo `close_in_children`, because ``fd`` is about to be closed."""
    _closed_in_children.discard(fd)


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


os.register_at_fork(after_in_child=_close_all)
