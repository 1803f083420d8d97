"""Compares solvers and simulates the step of a plan, for `lohan plan` and for runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hf_lohan.annexes.studies.simulation.simulated_step import SimulatedStep, simulate_step
from hf_lohan.annexes.studies.solvers import choose_solver
from hf_lohan.costs import OffloadPlan
from hf_lohan.planning import PlannedStep
from hf_lohan.planning.studies import SIMULATED, PlanStudies
from hf_lohan.wording import listed, seconds

WORTH_NAMING_S = 0.01
"""Waits shorter than this fraction of the simulated step are not printed."""
_WAITS = {
    "gradients": "buffers of gradients",
    "commit": "a commit",
}
"""Names that are printed for waits, if the name in the simulation is not clear enough."""


class Studies(PlanStudies):
    """Simulates steps of runs with one rank. Runs with several ranks are not simulated."""

    def choose_solver(self, planned: PlannedStep, *, compares: bool = False) -> OffloadPlan:
        return choose_solver(planned.profile, planned.hardware, planned.setup, planned.plan, compares=compares)

    def simulated_facts(self, planned: PlannedStep) -> dict[str, Any]:
        step = _simulated(planned)
        if step is None:
            return super().simulated_facts(planned)
        most_bytes = {tier: curve.most_bytes for tier, curve in step.memory.items()}
        return dict(zip(SIMULATED, (step.busy_s, step.waits_s, most_bytes), strict=True))

    def simulated_sentences(self, planned: PlannedStep) -> Iterable[str]:
        step = _simulated(planned)
        if step is None:
            return
        longest = sorted(step.waits_s.items(), key=lambda wait: -wait[1])
        named = [(cause, wait_s) for cause, wait_s in longest if wait_s >= WORTH_NAMING_S * step.step_s]
        waits = [f"{seconds(wait_s)} for {_WAITS.get(cause, cause)}" for cause, wait_s in named]
        what = f"; computing waits {listed(waits)}" if waits else ""
        yield f"Simulated task by task: {seconds(step.step_s)} a step{what}."
        plan = planned.plan
        usual = next((solved for solved in plan.solvers if solved.name == "algorithm_1"), None)
        if plan.solver != "algorithm_1" and usual is not None and usual.simulated_step_s is not None:
            usual_s = seconds(usual.simulated_step_s)
            yield f"The plan is of the solver {plan.solver}. Algorithm 1's plan would take {usual_s} if simulated."


def _simulated(planned: PlannedStep) -> SimulatedStep | None:
    return simulate_step(planned.profile, planned.hardware, planned.setup, planned.plan)
