"""The receipt for bytes under way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from hf_lohan.threads import raised_anew

logger = logging.getLogger(__name__)


class IoRequest:
    """One read or write of ``num_bytes``, moved in pieces by the threads of an `IoEngine`."""

    def __init__(
        self,
        num_bytes: int,
        num_pieces: int,
        release: Callable[[int], None],
        complete: Callable[[], object] | None = None,
    ) -> None:
        """``complete`` runs when all pieces have been moved, before the request is done; what it raises fails it. A
        request of no pieces does not run it."""
        self.num_bytes = num_bytes
        self._num_pending = num_pieces
        self._release = release
        self._complete = complete
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[IoRequest], object]] = []
        self._lock = threading.Lock()
        self._finished = threading.Event()
        if num_pieces == 0:
            self._finished.set()

    @classmethod
    def finished(cls) -> IoRequest:
        """One of nothing, which is done."""
        return cls(0, 0, lambda num_bytes: None)

    @property
    def failed(self) -> bool:
        """Whether a piece of it has failed."""
        return self._error is not None

    @property
    def error(self) -> BaseException | None:
        """The first error of its pieces so far."""
        return self._error

    def done(self) -> bool:
        """Whether no thread touches its memory any more, be it moved or failed."""
        return self._finished.is_set()

    def wait(self) -> None:
        """Return when done; raise one like the first `StorageError` of its pieces, on every call anew."""
        self._finished.wait()
        if self._error is not None:
            raise raised_anew(self._error)

    def add_done_callback(self, callback: Callable[[IoRequest], object]) -> None:
        """Call ``callback(request)`` once: from an I/O thread when done, or here and now if it is.

        Keep it short; it must neither start requests nor wait for any. What it raises is logged and dropped.
        """
        with self._lock:
            if not self._finished.is_set():
                self._callbacks.append(callback)
                return
        self._call(callback)

    def fail(self, error: BaseException) -> None:
        """For the engine: what is left of it is not worth moving."""
        with self._lock:
            self._error = self._error or error

    def finish_piece(self, error: BaseException | None) -> None:
        """For the engine: count one piece as over, with its error if it failed."""
        with self._lock:
            self._error = self._error or error
            self._num_pending -= 1
            if self._num_pending:
                return
        if self._complete is not None and self._error is None:
            try:
                self._complete()
            except BaseException as caught:  # it belongs to whoever waits
                self._error = caught
        # Room first: whoever wakes up from `wait` may want it.
        self._release(self.num_bytes)
        with self._lock:
            self._finished.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[IoRequest], object]) -> None:
        try:
            callback(self)
        except Exception:
            logger.exception("a done-callback of an I/O request failed")
