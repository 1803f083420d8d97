"""Long work shows itself on a terminal: bytes with a rate and the time left, and where a pass through the model is."""

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
"""What takes less is not worth a line."""
_MIN_INTERVAL_S = 0.1
_RATE_INTERVAL_S = 2.0
"""Over which bytes are counted for a rate."""
_NUM_RECENT = 16
"""Last steps from which the time left is estimated."""

_line: ContextVar[tqdm | None] = ContextVar("line", default=None)
"""The line of the work that this thread does."""


@contextlib.contextmanager
def long_work(what: str, total_bytes: int | None = None) -> Iterator[None]:
    """Within, `advance` moves a line on stderr; work within work belongs to the outer line. Without ``total_bytes`` the
    line only says what is done, behind that of `live_line` if there is one.

    Nothing is shown where stderr is no terminal, where progress bars of transformers are switched off, or within a
    `live_line` that is not shown.
    """
    live = _live_lines[-1] if _live_lines else None
    if live is not None and total_bytes is None:
        with live.saying(what):
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
    """So many bytes are done. Costs a look where there is no line."""
    line = _line.get()
    if line is not None:
        line.update(num_bytes)


def _is_watched() -> bool:
    return sys.stderr.isatty() and transformers_logging.is_progress_bar_enabled()


# Where a pass through the model is.


class LiveLine:
    """Says how far long work is: `step 3/16  backward block 12/32  SSD 1.2 GB/s  ETA 04:10`."""

    def __init__(self, unit: str, total: int | None, *, is_shown: bool, outer: LiveLine | None) -> None:
        self.is_shown = is_shown
        self._unit = unit
        self._total = total
        self._outermost: LiveLine = outer._outermost if outer is not None else self
        self._bar: tqdm | None = None
        """Of the outermost line, once there is something to say."""
        self._number = 0
        self._counts_forwards = True
        self._where: tuple[PassName | None, int, int] = (None, 0, 0)
        self._note: str | None = None
        self._began_s = time.perf_counter()
        self._took_s: deque[float] = deque(maxlen=_NUM_RECENT)
        self._expected_s: float | None = None
        self._counted = (0.0, 0)
        """When so many bytes had been moved."""
        self._bytes_per_s: float | None = None
        self._next_s = 0.0

    def begin(self, number: int, total: int, expected_s: float | None) -> None:
        """One of ``total`` steps begins. ``expected_s``: what one should take, if that is known. Without such calls
        each forward counts as one."""
        self._counts_forwards, self._total, self._expected_s = False, total, expected_s
        self._begin(number)

    def enter(self, phase: PassName, place: int, num_places: int, moved_bytes: Callable[[], int]) -> None:
        """A pass has come to a block."""
        before, last_place, _ = self._where
        if self._counts_forwards and phase == "forward" and (before != "forward" or place <= last_place):
            self._begin(self._number + 1)
        self._where = phase, place, num_places
        now_s = time.perf_counter()
        if now_s >= self._next_s:
            self._count(now_s, moved_bytes())
            self._draw(now_s)

    @contextlib.contextmanager
    def saying(self, what: str) -> Iterator[None]:
        """Within, the line says that this is done."""
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
        """The first step does not tell: the hardware may have been measured in it."""
        usual_s = statistics.median([*self._took_s][1:]) if len(self._took_s) > 1 else self._expected_s
        if usual_s is None:
            usual_s = self._took_s[0] if self._took_s else None
        if usual_s is None or self._total is None:
            return None
        num_behind = max(0, self._total - self._number)
        return num_behind * usual_s + max(0.0, usual_s - (now_s - self._began_s))

    def text(self, now_s: float) -> str:
        total = f"/{self._total}" if self._total is not None else ""
        phase, place, num_places = self._where
        parts = [f"{self._unit} {self._number}{total}" if self._number else self._unit]
        if self._note is not None:
            return "  ".join([*parts, f"{self._note} ..."])
        if phase is not None:
            parts.append(f"{phase} block {place}/{num_places}")
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
"""The innermost last. Of the process, not of a thread: a backward may run on one of autograd's."""


@contextlib.contextmanager
def live_line(unit: str, total: int | None = None, *, is_shown: bool = True) -> Iterator[LiveLine]:
    """Within, one line on stderr says where the passes through offloaded models are, which are ``total`` of ``unit``.
    Within another such line it takes its place for a while; within one that is not shown it is not, either."""
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
    """See `LiveLine.begin`. Costs a look where there is no line."""
    if _live_lines:
        _live_lines[-1].begin(number, total, expected_s)


def trainer_line(args: TrainingArguments, unit: str, passes: Any = None) -> AbstractContextManager[LiveLine]:
    """`live_line` of a Trainer, one in each box, unless it is to be quiet; ``passes`` may have a length."""
    is_shown = not args.disable_tqdm and args.local_process_index <= 0
    return live_line(unit, len(passes) if has_length(passes) else None, is_shown=is_shown)


def tell_of_blocks(model_blocks: ModelBlocks, timeline: Timeline) -> Callable[[PassName, Block], None]:
    """What an engine is to call when a pass has come to a block. Costs a look where no line is shown."""
    with_modules = {blocks[0] for blocks in model_blocks.needs.values() if blocks}
    in_order = [block for block in model_blocks.blocks if block in with_modules]
    places = {block: place for place, block in enumerate(in_order, start=1)}

    def moved_bytes() -> int:
        return timeline.drives_bytes

    def tell(phase: PassName, block: Block) -> None:
        if not _live_lines or not _live_lines[-1].is_shown:
            return
        place = places.get(block)
        if place is not None:
            done = place if phase == "forward" else len(places) + 1 - place
            _live_lines[-1].enter(phase, done, len(places), moved_bytes)

    return tell
