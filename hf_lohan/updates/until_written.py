"""Buffers of updated records until the records are in the store and nobody reads them any more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from hf_lohan.device import Buffer


class UntilWritten:
    """Gives buffers back and calls `written` when the last of their users is done with them, well or badly."""

    def __init__(
        self, num_users: int, buffers: Sequence[Buffer], written: Callable[[BaseException | None], None]
    ) -> None:
        """`written` is told the first error, or None, on the thread of the last user."""
        self._num_users = num_users
        self._buffers = buffers
        self._written = written
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    @property
    def is_in_use(self) -> bool:
        """Whether the buffers still hold what is written."""
        return self._num_users > 0

    def one_more(self) -> bool:
        """Whether the buffers still hold what is written, and do so until this user, too, is done."""
        with self._lock:
            is_in_use = self._num_users > 0
            self._num_users += is_in_use
        return is_in_use

    def one_less(self, error: BaseException | None = None) -> None:
        """A user is done."""
        with self._lock:
            self._error = self._error or error
            self._num_users -= 1
            is_last = self._num_users == 0
        if is_last:
            for buffer in self._buffers:
                buffer.release()
            self._written(self._error)
