"""The plan: where each activation and each record is, so that a step is as short as the hardware allows."""

from __future__ import annotations

from dataclasses import dataclass

from hf_lohan.planner.placement import ActivationPlacements
from hf_lohan.planner.pool_plan import BudgetError
from hf_lohan.planner.step_prediction import StepPrediction
from hf_lohan.planner.training_setup import ClipMode


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadPlan:
    """What lives where, and what that is expected to take."""

    activations: ActivationPlacements
    """By layer, in forward order: of its input (`INPUT`, never recomputed) and of the operations that the model profile
    names. A layer's other operations are recomputed, unless all is kept."""
    resident: dict[str, tuple[str, ...]]
    """Blocks of which `param`, and of which `states` (all other records), have a copy in RAM."""
    clip: ClipMode
    prediction: StepPrediction
    refusal: str | None
    """Why the plan cannot be carried out and the smallest change that would help; None if it can."""
    warnings: tuple[str, ...]
    """What may go wrong although the plan fits."""

    @property
    def fits(self) -> bool:
        return self.refusal is None

    def check(self) -> None:
        """Raises BudgetError if the plan does not fit."""
        if self.refusal is not None:
            raise BudgetError(self.refusal)
