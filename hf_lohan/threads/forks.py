"""What a forked child (a data loader's worker) must not do: anything with its parent's threads, locks and files."""

from __future__ import annotations

import os
from contextlib import suppress

_closed_in_children: set[int] = set()


def close_in_children(fd: int) -> None:
    """Have every child close ``fd``. It shares the parent's open file: a lock on that would outlive the parent, and a
    deleted file would keep its room."""
    _closed_in_children.add(fd)


def closing(fd: int) -> None:
    """``fd``, of which `close_in_children` was told, is about to be closed here."""
    _closed_in_children.discard(fd)


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


os.register_at_fork(after_in_child=_close_all)
