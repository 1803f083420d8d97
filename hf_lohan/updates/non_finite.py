"""Steps whose gradients are not finite: skipped, counted, and after too many in a row the end of the run."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class NonFiniteGradientError(RuntimeError):
    """Gradients were NaN or infinite for too long. Names the first parameter concerned."""


class SkippedSteps:
    """Counts them."""

    def __init__(self, max_in_a_row: int) -> None:
        self._max_in_a_row = max_in_a_row
        self._in_a_row = 0
        self.total = 0

    def note_good_step(self) -> None:
        self._in_a_row = 0

    def note(self, parameter_name: str) -> None:
        """A step was skipped because of `parameter_name`. Raises NonFiniteGradientError if that was one too many."""
        self.total += 1
        self._in_a_row += 1
        logger.warning("skipped a step: the gradient of %s is not finite (%d in a row)", parameter_name, self._in_a_row)
        if self._in_a_row >= self._max_in_a_row:
            raise NonFiniteGradientError(
                f"the gradient of {parameter_name} is not finite, for the {self._in_a_row}. step in a row "
                f"(max_skipped_steps={self._max_in_a_row}); lower the learning rate or look at the data. The store "
                "holds the last good step"
            )
