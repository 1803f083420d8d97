"""Long work shows itself: a line with bytes, a rate and the time left, on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar

from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers.utils import logging as transformers_logging

DELAY_S = 0.5
"""What takes less is not worth a line."""
_MIN_INTERVAL_S = 0.1

_line: ContextVar[tqdm | None] = ContextVar("line", default=None)
"""The line of the work that this thread does."""


@contextlib.contextmanager
def long_work(what: str, total_bytes: int | None = None) -> Iterator[None]:
    """Within, `advance` moves a line on stderr; work within work belongs to the outer line. Without ``total_bytes`` the
    line only says what is done.

    Nothing is shown where stderr is no terminal, or where progress bars of transformers are switched off.
    """
    if _line.get() is not None or not sys.stderr.isatty() or not transformers_logging.is_progress_bar_enabled():
        yield
        return
    shape = {"bar_format": "{desc}"} if total_bytes is None else {"total": total_bytes}
    line = tqdm(
        desc=what if total_bytes is not None else f"{what} ...",
        unit="B",
        unit_scale=True,
        mininterval=_MIN_INTERVAL_S,
        delay=0 if total_bytes is None else DELAY_S,
        leave=total_bytes is not None,
        file=sys.stderr,
        dynamic_ncols=True,
        **shape,
    )
    token = _line.set(line)
    try:
        yield
    finally:
        _line.reset(token)
        line.close()


def advance(num_bytes: int) -> None:
    """So many bytes are done. Costs a look where there is no line."""
    line = _line.get()
    if line is not None:
        line.update(num_bytes)
