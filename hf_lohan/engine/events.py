"""What an engine asks of whoever drives its steps, and what it tells them. Given once, when the engine is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hf_lohan.activations import LayerTrace
from hf_lohan.planner.placement import ActivationPlacements


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What the first training forward is given."""

    batch_size: int
    sequence_length: int
    num_together: int = 1
    """Micro-batches that have their forwards before the first of them has its backward."""


@dataclass(frozen=True, slots=True)
class ActivationPlan:
    """Where the layers' activations go, known before the first layer runs."""

    placements: ActivationPlacements
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Bytes of all that one micro-batch could put away: by layer, then by operation in the order of backward."""


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
    plan_activations: Callable[[BatchShape], ActivationPlan | None] = lambda _batch: None
    """The first training forward begins. None: no plan yet, so the first step is watched."""
    plan_watched: Callable[[Mapping[str, LayerTrace], int], ActivationPlacements] = lambda _trace, _num_together: {}
    """The first step was watched, and recomputed everything; so many micro-batches ran together. Where activations go
    from now on. Asked again when more of them run together than ever."""
    step_began: Callable[[StepsSoFar], ActivationPlacements | None] = lambda _steps: None
    """The first training forward after a step begins: what goes wrong here harms no step. Returns where activations go
    from now on, or None if nothing changes."""
