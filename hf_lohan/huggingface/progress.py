"""Shows the progress of long work on a terminal: bytes, rate, remaining time, and the position of a pass."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]
from tqdm.utils import disp_trim  # type: ignore[import-untyped]
from transformers import TrainingArguments
from transformers.trainer_utils import has_length
from transformers.utils import logging as transformers_logging

from hf_lohan.engine.events import PassName
from hf_lohan.model import Block, ModelBlocks
from hf_lohan.timeline import Timeline
from hf_lohan.wording import gb_per_s

DELAY_S = 0.5
"""Seconds after which a line is shown. Shorter work shows no line."""
_MIN_INTERVAL_S = 0.1
_RATE_INTERVAL_S = 2.0
"""Seconds over which a rate is measured."""
_NUM_RECENT = 16
"""Number of last steps from which the remaining time is estimated."""

_line: ContextVar[tqdm | None] = ContextVar("line", default=None)
"""The progress line of this thread's work."""


@contextlib.contextmanager
def long_work(what: str, total_bytes: int | None = None) -> Iterator[None]:
    """Show a progress line on stderr in this context. `advance` moves the line, and nested work moves the outer line.
    Without ``total_bytes`` the line has no numbers, and an open `live_line` shows it. Shows nothing if stderr
    is not a terminal, if transformers' progress bars are off, or in a hidden `live_line`."""
    live = _live_lines[-1] if _live_lines else None
    if live is not None and total_bytes is None:
        with live.noting(what):
            yield
        return
    if _line.get() is not None or not _is_watched() or (live is not None and not live.is_shown):
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
    """Move the line of this thread's work by ``num_bytes``."""
    line = _line.get()
    if line is not None:
        line.update(num_bytes)


def _is_watched() -> bool:
    return sys.stderr.isatty() and transformers_logging.is_progress_bar_enabled()


# The position of a pass in the model.


class LiveLine:
    """A line such as `step 3/16  backward block 12/32  SSD 1.2 GB/s  ETA 04:10`."""

    def __init__(self, unit: str, total: int | None, *, is_shown: bool, outer: LiveLine | None) -> None:
        self.is_shown = is_shown
        self._unit = unit
        self._total = total
        self._outermost: LiveLine = outer._outermost if outer is not None else self
        self._bar: tqdm | None = None
        """The bar of the outermost line, created with its first text. Other lines have no bar."""
        self._number = 0
        self._counts_forwards = True
        self._position: tuple[PassName | None, int, int] = (None, 0, 0)
        self._note: str | None = None
        self._began_s = time.perf_counter()
        self._took_s: deque[float] = deque(maxlen=_NUM_RECENT)
        self._expected_s: float | None = None
        self._counted = (0.0, 0)
        """(time in seconds, bytes moved until then)."""
        self._bytes_per_s: float | None = None
        self._next_s = 0.0

    def begin_step(self, number: int, total: int, expected_s: float | None) -> None:
        """Begin step ``number`` of ``total``. ``expected_s``: expected seconds of a step, or None if they are not
        known. If this is never called, each forward counts as a step."""
        self._counts_forwards, self._total, self._expected_s = False, total, expected_s
        self._begin(number)

    def enter_block(self, phase: PassName, number: int, num_blocks: int, moved_bytes: Callable[[], int]) -> None:
        """Show the block that a pass begins. ``number`` counts from 1, in the order of the pass."""
        last_phase, last_number, _ = self._position
        if self._counts_forwards and phase == "forward" and (last_phase != "forward" or number <= last_number):
            self._begin(self._number + 1)
        self._position = phase, number, num_blocks
        now_s = time.perf_counter()
        if now_s >= self._next_s:
            self._count(now_s, moved_bytes())
            self._draw(now_s)

    @contextlib.contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Within this context, show the text ``what`` in the line."""
        before, self._note = self._note, what
        self._draw(time.perf_counter())
        try:
            yield
        finally:
            self._note = before

    def _begin(self, number: int) -> None:
        now_s = time.perf_counter()
        if self._number:
            self._took_s.append(now_s - self._began_s)
        self._number, self._began_s = number, now_s

    def _count(self, now_s: float, num_bytes: int) -> None:
        then_s, then_bytes = self._counted
        if then_s and now_s - then_s < _RATE_INTERVAL_S:
            return
        if then_s and num_bytes >= then_bytes:
            self._bytes_per_s = (num_bytes - then_bytes) / (now_s - then_s)
        self._counted = now_s, num_bytes

    def _left_s(self, now_s: float) -> float | None:
        # The first step is left out, because it may include a measurement of the hardware.
        usual_s = statistics.median([*self._took_s][1:]) if len(self._took_s) > 1 else self._expected_s
        if usual_s is None:
            usual_s = self._took_s[0] if self._took_s else None
        if usual_s is None or self._total is None:
            return None
        num_behind = max(0, self._total - self._number)
        return num_behind * usual_s + max(0.0, usual_s - (now_s - self._began_s))

    def text(self, now_s: float) -> str:
        total = f"/{self._total}" if self._total is not None else ""
        phase, number, num_blocks = self._position
        parts = [f"{self._unit} {self._number}{total}" if self._number else self._unit]
        if self._note is not None:
            return "  ".join([*parts, f"{self._note} ..."])
        if phase is not None:
            parts.append(f"{phase} block {number}/{num_blocks}")
        if self._bytes_per_s is not None:
            parts.append(f"SSD {gb_per_s(self._bytes_per_s)}")
        left_s = self._left_s(now_s)
        if left_s is not None:
            parts.append(f"ETA {tqdm.format_interval(left_s)}")
        return "  ".join(parts)

    def _draw(self, now_s: float) -> None:
        if not self.is_shown:
            return
        self._next_s = now_s + _MIN_INTERVAL_S
        text, owner = self.text(now_s), self._outermost
        if owner._bar is None:
            owner._bar = tqdm(desc=text, bar_format="{desc}", leave=False, file=sys.stderr, dynamic_ncols=True)
            return
        width = owner._bar.format_dict["ncols"]
        owner._bar.set_description_str(disp_trim(text, width - 1) if width else text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


_live_lines: list[LiveLine] = []
"""The open lines, from outer to inner. All threads share them, because a backward may run on a thread of autograd."""


@contextlib.contextmanager
def live_line(unit: str, total: int | None = None, *, is_shown: bool = True) -> Iterator[LiveLine]:
    """In this context, show the position of the current pass in an offloaded model, in a line on stderr. ``total``:
    number of passes. The line replaces an outer line, and is hidden if the outer line is hidden."""
    outer = _live_lines[-1] if _live_lines else None
    may_show = outer.is_shown if outer is not None else _is_watched()
    line = LiveLine(unit, total, is_shown=is_shown and may_show, outer=outer)
    _live_lines.append(line)
    try:
        yield line
    finally:
        _live_lines.remove(line)
        line.close()


def begin_step(number: int, total: int, expected_s: float | None) -> None:
    if _live_lines:
        _live_lines[-1].begin_step(number, total, expected_s)


def trainer_line(args: TrainingArguments, unit: str, passes: Any = None) -> AbstractContextManager[LiveLine]:
    """Return a Trainer's `live_line`. One rank of each node shows it, unless `disable_tqdm` is set."""
    is_shown = not args.disable_tqdm and args.local_process_index <= 0
    return live_line(unit, len(passes) if has_length(passes) else None, is_shown=is_shown)


def show_blocks(model_blocks: ModelBlocks, timeline: Timeline) -> Callable[[PassName, Block], None]:
    """Return a callback for an engine. The engine calls it when a pass begins a block."""
    with_modules = {blocks[0] for blocks in model_blocks.needs.values() if blocks}
    in_order = [block for block in model_blocks.blocks if block in with_modules]
    numbers = {block: number for number, block in enumerate(in_order, start=1)}

    def on_block(phase: PassName, block: Block) -> None:
        if not _live_lines or not _live_lines[-1].is_shown:
            return
        number = numbers.get(block)
        if number is not None:
            in_pass = number if phase == "forward" else len(numbers) + 1 - number
            _live_lines[-1].enter_block(phase, in_pass, len(numbers), lambda: timeline.drives_bytes)

    return on_block
