"""Algorithm 1: of all ways to keep, swap, recompute and hold, the fastest."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hf_lohan.planner.activation_choices import ActivationChoices, Candidates, Kept
from hf_lohan.planner.fitting import (
    explain_refusal,
    gradient_spill_bytes,
    layer_working_bytes,
    measure_room,
    record_bytes,
    warn,
)
from hf_lohan.planner.hardware_profile import HardwareProfile
from hf_lohan.planner.model_profile import ModelProfile
from hf_lohan.planner.offload_plan import OffloadPlan
from hf_lohan.planner.placement import INPUT, ActivationPlacements, Placement
from hf_lohan.planner.residency import PARAM, STATES, residency_choices
from hf_lohan.planner.step_costs import Choice, StepCosts, Values, operation_s
from hf_lohan.planner.step_prediction import Outcome, Tier, predict
from hf_lohan.planner.training_setup import ClipMode, TrainingSetup

EQUALLY_FAST = 1 + 1e-9
"""Of plans within this factor of the fastest, the one that keeps the resources least busy is taken."""


def plan_offload(
    model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup, *, swapped_bytes: int | None = None
) -> OffloadPlan:
    """The fastest plan (LoHan's Algorithm 1, together with what stays on the device and in RAM).

    With `swapped_bytes` not the fastest, but the one in Algorithm 1's row that swaps most without swapping more than
    that; the inputs of the layers that the device cannot keep are swapped in any case. What does not fit is planned all
    the same, and `refusal` says why.
    """
    return _Search(model, hardware, setup).run(swapped_bytes)


def sweep_swapped_bytes(
    model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup, num_points: int = 40
) -> list[OffloadPlan]:
    """Plans from the fewest swapped bytes to the most (LoHan, Fig. 9b), without repetitions."""
    search = _Search(model, hardware, setup)
    targets = np.linspace(0, model.activation_bytes, num_points)
    plans = {plan.prediction.swapped_bytes: plan for plan in (search.run(int(target)) for target in targets)}
    return [plans[swapped] for swapped in sorted(plans)]


@dataclass(frozen=True, slots=True)
class _Found:
    """The best of one grid of candidates (row: what is swapped; column: what is resident)."""

    step_s: float
    busy_s: float
    candidates: Candidates
    row: int
    column: int
    clip: ClipMode


class _Search:
    """Tries all candidates of one planning problem: arithmetic on arrays, a few hundred thousand at once."""

    def __init__(self, model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup) -> None:
        self._model = model
        self._hardware = hardware
        self._setup = setup
        self._costs = StepCosts(model, hardware, setup)
        self._room = measure_room(model, hardware, setup)
        self._activations = ActivationChoices(model, lambda operation: operation_s(operation, hardware))
        self._residency = residency_choices(model, setup)

    def run(self, swapped_bytes: int | None) -> OffloadPlan:
        all_candidates = [self._candidates(kept, swapped_bytes) for kept in self._kept()]
        refusal = explain_refusal(
            self._model,
            self._hardware,
            self._setup,
            kept_bytes=all_candidates[0].kept.num_bytes,
            least_swapped_bytes=int(min(candidates.swapped_bytes.min() for candidates in all_candidates)),
        )
        found = [
            self._best(candidates, clip, ignore_ssd_room=refusal is not None)
            for candidates in all_candidates
            for clip in self._setup.clip_modes
        ]
        fastest_s = min(best.step_s for best in found)
        best = min((best for best in found if best.step_s <= fastest_s * EQUALLY_FAST), key=lambda best: best.busy_s)
        return self._assemble(best, refusal)

    def _kept(self) -> list[Kept]:
        if self._setup.activations == "keep":
            everything = self._activations.kept_choices(self._model.activation_bytes)[0]
            saved_bytes = sum(layer.saved_bytes + layer.input_bytes for layer in self._model.layers)
            return [replace(everything, num_bytes=saved_bytes)]
        return self._activations.kept_choices(max(0, self._room.kept_bytes))

    def _candidates(self, kept: Kept, swapped_bytes: int | None) -> Candidates:
        candidates = self._activations.candidates(kept, self._setup.activations)
        if swapped_bytes is None:
            return candidates
        num_ranked = 1 + self._activations.num_operations
        ranked = candidates.swapped_bytes[:num_ranked]
        allowed = np.flatnonzero(ranked <= max(swapped_bytes, ranked.min()))
        return candidates.only(allowed[-1:])

    def _choice(self, candidates: Candidates) -> tuple[Choice, npt.NDArray[np.bool_]]:
        """All combinations with what is resident, [num_candidates, num_resident], and which of them the SSDs hold."""
        residency, setup = self._residency, self._setup
        cpu_bytes = np.maximum(0.0, self._room.cpu_bytes - residency.num_bytes)
        if setup.activation_cpu_bytes is not None:
            cpu_bytes = np.minimum(cpu_bytes, setup.activation_cpu_bytes)
        swapped_bytes = candidates.swapped_bytes[:, None]
        choice = Choice(
            swapped_bytes=swapped_bytes,
            spilled_bytes=np.maximum(0.0, swapped_bytes - cpu_bytes),
            recompute_s=candidates.recompute_s[:, None],
            resident_param_bytes=residency.fetched_bytes,
            resident_update_read_bytes=residency.update_read_bytes,
        )
        return choice, choice.spilled_bytes <= self._room.ssd_bytes

    def _best(self, candidates: Candidates, clip: ClipMode, *, ignore_ssd_room: bool) -> _Found:
        choice, is_possible = self._choice(candidates)
        shape = is_possible.shape
        forward_s, backward_s = self._costs.step_s(choice, clip)
        step_s = np.broadcast_to(forward_s + backward_s, shape)
        if not ignore_ssd_room:
            step_s = np.where(is_possible, step_s, np.inf)
        fastest = step_s <= step_s.min() * EQUALLY_FAST
        busy_s = np.where(fastest, np.broadcast_to(self._busy_s(choice, clip), shape), np.inf)
        row, column = np.unravel_index(int(busy_s.argmin()), shape)
        return _Found(float(step_s[row, column]), float(busy_s[row, column]), candidates, int(row), int(column), clip)

    def _busy_s(self, choice: Choice, clip: ClipMode) -> Values:
        busy_s: Values = np.zeros(1)
        for phase in self._costs.phases(choice, clip):
            for seconds in self._costs.lanes(phase.load).values():
                busy_s = busy_s + phase.count * seconds
        return busy_s

    def _assemble(self, best: _Found, refusal: str | None) -> OffloadPlan:
        candidates = best.candidates.only(np.array([best.row]))
        choice, _ = self._choice(candidates)
        choice = _column(choice, best.column)
        outcome = Outcome(
            kept_bytes=candidates.kept.num_bytes,
            num_swapped=int(candidates.swapped.sum()),
            num_recomputed=int(candidates.num_recomputed[0]),
            recomputed_flops=float(candidates.recomputed_flops[0]),
            tier_bytes=self._tier_bytes(candidates.kept, choice, self._residency.num_bytes[best.column]),
            fits=refusal is None,
        )
        return OffloadPlan(
            activations=self._place(candidates, float(choice.swapped_bytes[0] - choice.spilled_bytes[0])),
            resident=self._resident(best.column),
            clip=best.clip,
            prediction=predict(self._model, self._hardware, self._setup, choice, best.clip, outcome),
            refusal=refusal,
            warnings=warn(self._model, self._hardware, self._setup),
        )

    def _tier_bytes(self, kept: Kept, choice: Choice, resident_bytes: float) -> dict[Tier, dict[str, int]]:
        model, setup = self._model, self._setup
        swapped, spilled = choice.swapped_bytes.item(), choice.spilled_bytes.item()
        return {
            "gpu": {
                "slots": setup.gpu_fixed_bytes,
                "activations": kept.num_bytes,
                "working_set": layer_working_bytes(model),
            },
            "cpu": {
                "buffers": setup.cpu_fixed_bytes,
                "records": int(resident_bytes),
                "activations": int(swapped - spilled),
            },
            "ssd": {
                "records": record_bytes(model, setup),
                "gradients": gradient_spill_bytes(setup),
                "activations": int(spilled),
            },
        }

    def _resident(self, num_records: int) -> dict[str, tuple[str, ...]]:
        records = self._residency.records[:num_records]
        return {kind: tuple(record.block for record in records if record.kind == kind) for kind in (PARAM, STATES)}

    def _place(self, candidates: Candidates, cpu_bytes: float) -> ActivationPlacements:
        """One candidate, spelled out. What is swapped goes to RAM from the last layer back, as long as whole outputs
        fit `cpu_bytes`; the rest, needed latest, to the SSDs."""
        layers = self._activations.layers
        kept = candidates.kept
        inputs = [Placement.CPU] * len(layers)
        inputs[len(layers) - kept.num_inputs :] = [Placement.GPU] * kept.num_inputs
        places = [[Placement.RECOMPUTE] * len(layer.operations) for layer in layers]
        for index, kind in enumerate(self._activations.kinds):
            num_swapped, num_kept = int(candidates.swapped[0, index]), int(kept.num_of_kind[index])
            for layer, operation in kind.places[:num_swapped]:
                places[layer][operation] = Placement.CPU
            for layer, operation in kind.places[len(kind.places) - num_kept :]:
                places[layer][operation] = Placement.GPU
        for index in reversed(range(len(layers))):
            operations = layers[index].operations
            for number in reversed(range(len(operations))):
                if places[index][number] is Placement.CPU:
                    cpu_bytes -= operations[number].output_bytes
                    places[index][number] = Placement.CPU if cpu_bytes >= 0 else Placement.SSD
            if inputs[index] is Placement.CPU:
                cpu_bytes -= layers[index].input_bytes
                inputs[index] = Placement.CPU if cpu_bytes >= 0 else Placement.SSD
        return {
            layer.name: {
                INPUT: inputs[index],
                **{operation.name: place for operation, place in zip(layer.operations, places[index], strict=True)},
            }
            for index, layer in enumerate(layers)
        }


def _column(choice: Choice, column: int) -> Choice:
    """One row's choice [1, num_resident] at one number of resident records."""
    return Choice(
        swapped_bytes=choice.swapped_bytes[0],
        spilled_bytes=choice.spilled_bytes[0, column : column + 1],
        recompute_s=choice.recompute_s[0],
        resident_param_bytes=choice.resident_param_bytes[column : column + 1],
        resident_update_read_bytes=choice.resident_update_read_bytes[column : column + 1],
    )
