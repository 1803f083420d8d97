"""SIGTERM, which schedulers and shutdowns send: finish the step, commit it, end."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, NoReturn

logger = logging.getLogger(__name__)


class Termination:
    """While entered, the first SIGTERM only asks; a second one acts as it always did.

    Leaves a handler that somebody else installed alone, and does nothing outside the main thread, where Python
    cannot handle signals.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._previous: Any = None

    def __enter__(self) -> Termination:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def exit(self) -> NoReturn:
        """End the process as the shell reports one that SIGTERM ended."""
        raise SystemExit(128 + signal.SIGTERM)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.is_requested = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        logger.warning("SIGTERM: the run ends when the step in progress is committed; once more ends it at once")
