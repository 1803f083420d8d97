"""Which way the next step clips, from what the last ones measured."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Literal

from hf_lohan.planner import StepTimes, should_speculate
from hf_lohan.updates.step_transaction import StepResult

WINDOW_STEPS = 16
"""What is older says little about the present clip rate."""

Clip = Literal["auto", "defer", "speculate"]


class ClipHistory:
    """Remembers the last steps' times and whether they clipped, and counts what speculation won and lost."""

    def __init__(self, mode: Clip) -> None:
        self._mode = mode
        self._clipped: deque[bool] = deque(maxlen=WINDOW_STEPS)
        self._forward_s: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._backward_s: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._update_s: deque[float] = deque(maxlen=WINDOW_STEPS)
        self.num_speculated = 0
        self.num_redone = 0

    @property
    def clip_rate(self) -> float:
        """Fraction of the last steps that clipped."""
        return sum(self._clipped) / len(self._clipped) if self._clipped else 0.0

    def note_step(self, result: StepResult, *, forward_s: float, backward_s: float, update_s: float) -> None:
        """A step ended; `update_s`: what the last updates took that are over, 0 if there were none."""
        self._forward_s.append(forward_s)
        self._backward_s.append(backward_s)
        self._clipped.append(result.clipped)
        if update_s:
            self._update_s.append(update_s)
        if result.outcome in ("accepted", "redone"):
            self.num_speculated += 1
        if result.outcome == "redone":
            self.num_redone += 1
            if not result.clipped:
                self.never_speculate()  # the loop changes hyperparameters between backward and step

    def never_speculate(self) -> None:
        """The loop does something between backward and step that has guesses taken back every time."""
        self._mode = "defer"

    def speculates_next(self) -> bool:
        """Whether the next step should update in backward, in the hope that its norm does not clip."""
        if self._mode != "auto":
            return self._mode == "speculate"
        if not (self._forward_s and self._update_s):
            return False
        medians = (statistics.median(values) for values in (self._forward_s, self._backward_s, self._update_s))
        return should_speculate(StepTimes(*medians), self.clip_rate)
