"""How long the forwards and backwards of a step take, as the computing thread sees them."""

from __future__ import annotations

import time


class StepClock:
    """Adds up over the backwards of a step."""

    def __init__(self) -> None:
        self.forward_s = 0.0
        self.backward_s = 0.0
        self.last_forward_s = 0.0
        """Of the step before."""
        self.last_backward_s = 0.0
        self._began_s = 0.0

    def begin(self) -> None:
        """A forward or a backward begins."""
        self._began_s = time.perf_counter()

    def end_forward(self) -> None:
        self.forward_s += time.perf_counter() - self._began_s

    def end_backward(self) -> None:
        self.backward_s += time.perf_counter() - self._began_s

    def end_step(self) -> None:
        """Begin to count anew."""
        self.last_forward_s, self.last_backward_s = self.forward_s, self.backward_s
        self.forward_s = self.backward_s = 0.0
