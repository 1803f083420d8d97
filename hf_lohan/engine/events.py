"""What an engine asks of whoever drives its steps, and what it tells them. Given once, when the engine is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hf_lohan.planning import PlannedStep, StepShape


@dataclass(frozen=True, slots=True)
class StepsSoFar:
    """What the engine has seen of its steps."""

    clip_rate: float
    """Fraction of the last steps that clipped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineEvents:
    """All are called on the computing thread. What one raises ends the forward in which it was called."""

    is_final_backward: Callable[[], bool] = lambda: True
    """Asked in backward: whether the step's last one is running."""
    plan: Callable[[StepShape], PlannedStep | None] = lambda _shape: None
    """The first training forward begins, or the first with more micro-batches together than ever. Returns what the run
    follows from here on; None: there is no plan, so activations are recomputed."""
    step_began: Callable[[StepsSoFar], PlannedStep | None] = lambda _steps: None
    """The first training forward after a step begins: what goes wrong here harms no step. Returns another plan to
    follow, or None if nothing changes."""
