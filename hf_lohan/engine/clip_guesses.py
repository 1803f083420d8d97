"""Whether the next step guesses that its norm does not clip, and what happens when its weights are needed before."""

from __future__ import annotations

from hf_lohan.engine.step_clock import StepClock
from hf_lohan.updates import ClipHistory, GradientPipeline, StepResult
from hf_lohan.weights import SlotRing


class ClipGuesses:
    """Between the history of steps, which says whether guessing pays, and the pipeline, which guesses."""

    def __init__(self, history: ClipHistory, clock: StepClock, pipeline: GradientPipeline, ring: SlotRing) -> None:
        self._history = history
        self._clock = clock
        self._pipeline = pipeline
        self._ring = ring
        pipeline.speculates = history.speculates_next()

    def end_step(self, result: StepResult) -> None:
        """Choose for the next step, by the times of this one."""
        clock, pipeline = self._clock, self._pipeline
        self._history.note_step(
            result, forward_s=clock.forward_s, backward_s=clock.backward_s, update_s=pipeline.last_update_s
        )
        clock.end_step()
        pipeline.speculates = self._history.speculates_next()

    def take_back(self) -> None:
        """The step in progress needs its weights once more, as they were."""
        if taken_back := self._pipeline.stop_speculating():
            self._history.never_speculate()
            self._ring.forget(taken_back)
