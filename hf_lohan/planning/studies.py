"""Interface to the annex `studies`, which simulates plans. Without the annex, no plan is simulated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hf_lohan.annexes import find_annex, need_annex
from hf_lohan.costs import OffloadPlan

SIMULATED = ("simulated_busy_s", "simulated_waits_s", "simulated_most_bytes")
"""Figures of a simulated step in JSON."""


class PlanStudies:
    """Studies nothing. The annex has a subclass."""

    def choose_solver(self, planned: Any, *, compares: bool = False) -> OffloadPlan:
        """Return the plan of a `PlannedStep` (Algorithm 1), or that of another solver, with the results of all tried
        solvers. ``compares``: try all solvers."""
        plan: OffloadPlan = planned.plan
        return plan

    def simulated_facts(self, planned: Any) -> dict[str, Any]:
        """Return the figures of the simulated step of a `PlannedStep` in JSON's types. They are null if it cannot be
        simulated."""
        return dict.fromkeys(SIMULATED)

    def simulated_sentences(self, planned: Any) -> Iterable[str]:
        """Return sentences on the simulated step."""
        return ()


def plan_studies() -> PlanStudies:
    annex = find_annex("studies")
    studies: PlanStudies = PlanStudies() if annex is None else annex.Studies()
    return studies


def studies_for(option: str) -> Any:
    """Return the functions of the annex for an option of `lohan plan`. Raises ValueError without the annex."""
    return need_annex("studies", option).functions_for_options()
