"""Searches for the fastest way to keep, swap and recompute activations and to clip (LoHan's Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hf_lohan.costs.collectives import ONE_RANK, TriedWay
from hf_lohan.costs.fitting import (
    activation_ram_bytes,
    allocator_bytes,
    device_limit_bytes,
    explain_refusal,
    fits_without_offloading,
    layer_working_bytes,
    measure_room,
    nccl_bytes,
    outer_working_bytes,
    ram_copy_bytes,
    record_bytes,
    room_to_hold_bytes,
    tied_gradient_bytes,
)
from hf_lohan.costs.hardware_profile import HardwareProfile
from hf_lohan.costs.model_profile import ModelProfile
from hf_lohan.costs.offload_plan import (
    INPUT,
    ActivationPlacements,
    ClipMode,
    OffloadPlan,
    Placement,
    StepPrediction,
    Tier,
    TrainingSetup,
)
from hf_lohan.costs.search.activation_choices import ActivationChoices, Candidates, KeptActivations
from hf_lohan.costs.search.candidate_memory import FullestMoment, held_beside, put_away_through
from hf_lohan.costs.step.expert_costs import ExpertCosts
from hf_lohan.costs.step.rank_costs import step_costs
from hf_lohan.costs.step.step_costs import Choice, Values, gradient_itemsize, operation_s

COMMIT_FRACTION = 0.02
"""Commits may lengthen steps by this share, on average."""
COMMITTED_BYTES_PER_S = 2e6
"""Commits may write at this rate on average. It is a quarter of the rate that wears out a consumer drive with an
endurance of 1.2 PB in the five years of its warranty."""
LITTLE_S, LITTLE_BYTES = 0.25, 64 << 20
"""Every step is committed if this takes less than `LITTLE_S` and writes less than `LITTLE_BYTES` in addition."""
AS_FAST = 1.03
"""A plan that writes less to the drives may take at most this many times as long as the fastest plan."""
EQUALLY_FAST = 1 + 1e-9
"""Among plans within this factor of the fastest, the search chooses the plan whose resources are least busy."""


def plan_offload(
    model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup, *, swapped_bytes: int | None = None
) -> OffloadPlan:
    """Return the fastest plan (LoHan's Algorithm 1, extended by activations that stay on the device).

    With `swapped_bytes`, return instead the plan in Algorithm 1's sequence that swaps the most bytes up to this number.
    Layer inputs that the device cannot keep are swapped in any case. If nothing fits, the plan's `refusal` says why.

    Without a number of steps between commits, every step is committed if this costs almost no time and no bytes, if
    rare commits would make steps longer, or for speculation, which returns to the previous commit.
    """

    def planned(commit_every_steps: int) -> OffloadPlan:
        own = replace(setup, commit_every_steps=commit_every_steps)
        return _Search(model, hardware, own).run(swapped_bytes)

    if setup.durability == "checkpoint":
        return planned(0)
    if setup.commit_every_steps is not None:
        return planned(setup.commit_every_steps)
    if setup.clip == "speculate":
        return planned(1)
    each, never = planned(1), planned(0)
    each_step, never_step = each.prediction, never.prediction
    more_s = each_step.step_s - never_step.step_s
    more_bytes = each_step.ssd_write_bytes_per_step - never_step.ssd_write_bytes_per_step
    most = int((setup.commit_limit_s - more_s) / never_step.step_s)
    wanted_s = max(more_s / COMMIT_FRACTION, more_bytes / COMMITTED_BYTES_PER_S)
    steps = most if setup.commit_every_s else min(most, math.ceil(wanted_s / never_step.step_s))
    if steps <= 1 or (more_s < LITTLE_S and more_bytes < LITTLE_BYTES and not setup.commit_every_s):
        return each
    rarely = planned(steps)
    return rarely if setup.commit_every_s else (each, rarely)[least_wearing((each, rarely))]


def least_wearing(plans: Sequence[OffloadPlan]) -> int:
    """Return the index of the best of ``plans``. A plan may take longer than the fastest, up to `AS_FAST` times, if it
    saves a larger share of the bytes that are written to the drives."""
    steps = [plan.prediction for plan in plans]
    fast_s = AS_FAST * min(step.step_s for step in steps)
    fast = (index for index, step in enumerate(steps) if step.step_s <= fast_s)
    # Of steps that write nothing, the shortest is best.
    return min(fast, key=lambda index: steps[index].step_s * (1 + max(0, steps[index].ssd_write_bytes_per_step)))


def sweep_swapped_bytes(
    model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup, num_points: int = 40
) -> list[OffloadPlan]:
    """Return plans from the fewest swapped bytes to the most (LoHan, Fig. 9b), without repetitions."""
    search = _Search(model, hardware, setup)
    targets = np.linspace(0, model.activation_bytes, num_points)
    plans = {plan.prediction.swapped_bytes: plan for plan in (search.run(int(target)) for target in targets)}
    return [plans[swapped] for swapped in sorted(plans)]


@dataclass(frozen=True, slots=True)
class _Found:
    """The best candidate of a set."""

    step_s: float
    busy_s: float
    candidates: Candidates
    row: int
    clip: ClipMode


class _Search:
    """Compares all candidates of one plan, thousands at once on arrays."""

    def __init__(self, model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup) -> None:
        self._model = model
        self._hardware = hardware
        self._setup = setup
        self._costs = step_costs(model, hardware, setup)
        self._room = measure_room(model, hardware, setup)
        experts = ExpertCosts(model, hardware, setup)
        self._activations = ActivationChoices(
            model, lambda operation: operation_s(operation, hardware), experts.reload_bytes
        )
        self._fullest = FullestMoment(model, self._activations.kinds, setup.num_together)
        self._room_to_hold = room_to_hold_bytes(hardware, setup)
        self._least_held_bytes = 0
        """Kept activations and working memory of the choice that needs the least memory of the device."""
        self._resident = setup.resident_records
        self._resident_bytes = sum(record.num_bytes for record in self._resident)
        self._ram_beside_records = activation_ram_bytes(self._room, setup, self._resident)
        self._gradient_bytes = experts.gradient_bytes + sum(
            block.gradient_bytes(gradient_itemsize(model, setup)) for block in model.blocks
        )

    def run(self, swapped_bytes: int | None) -> OffloadPlan:
        found = [self._candidates(kept, swapped_bytes) for kept in self._kept()]
        all_ways = [(candidates, self._working(candidates)) for candidates in found]
        least, working = min(all_ways, key=lambda way: (way[0].kept.num_bytes + way[1]).min())
        self._least_held_bytes = least.kept.num_bytes + math.ceil(working.min())
        explain = partial(
            explain_refusal,
            self._model,
            self._hardware,
            self._setup,
            kept_bytes=least.kept.num_bytes,
            working_bytes=math.ceil(working.min()),
        )
        refusal = explain(least_swapped_bytes=int(min(candidates.swapped_bytes.min() for candidates in found)))
        if refusal is not None:
            all_ways = [(least, np.zeros_like(working))]  # this choice is closest to fitting
        best = self._best_of(all_ways, ignores_drives=refusal is not None)
        if math.isinf(best.step_s):  # nothing that fits the device also fits the drives
            refusal = explain(least_swapped_bytes=int(least.swapped_bytes[working.argmin()]))
            best = self._best_of([(least, np.zeros_like(working))], ignores_drives=True)
        return self._assemble(best, refusal)

    def _best_of(self, ways: list[tuple[Candidates, Values]], *, ignores_drives: bool) -> _Found:
        """Return the best of ``ways``: pairs of candidates and the bytes of device memory in which they work."""
        found = [
            self._best(candidates, working, choice, clip, ignores_drives=ignores_drives)
            for candidates, working, choice in [(way[0], way[1], self._choice(way[0])) for way in ways]
            for clip in self._setup.clip_modes
        ]
        costs = [best.step_s * self._wear_factor(best.clip) for best in found]
        least = min(costs) * EQUALLY_FAST
        return min(
            (best for best, cost in zip(found, costs, strict=True) if cost <= least), key=lambda best: best.busy_s
        )

    def _with_parking(self, choice: Choice, clip: ClipMode) -> Choice:
        """Return the choice with its share of parked updates. With clipping RAM sets no limit: all gradients are
        held."""
        setup, share = self._setup, self._setup.parked_share
        if clip == "defer" or not self._gradient_bytes:
            return choice
        most = np.ones(1)
        if clip == "none":
            in_ram = choice.swapped_bytes - choice.spilled_bytes
            # With several ranks nothing is parked without clipping, because gradients then have no buffers to wait in.
            most = np.clip((self._ram_beside_records - in_ram) / self._gradient_bytes, 0.0, setup.cluster == ONE_RANK)
        best = self._costs.parked_share(choice, clip, most) if share is None else np.minimum(share, most)
        return replace(choice, parked_share=best)

    def _parked_bytes(self, choice: Choice, clip: ClipMode) -> int:
        return math.ceil(choice.parked_share.item() * self._gradient_bytes) if clip == "none" else 0

    def _working(self, candidates: Candidates) -> Values:
        """Return the bytes [num_candidates] that candidates need on the device besides slots and kept activations."""
        return self._fullest.beside_kept(candidates, keeps_all=self._setup.activations == "keep")

    def _wear_factor(self, clip: ClipMode) -> float:
        """Return the factor by which step times are multiplied before they are compared. A wrong guess writes twice, so
        speculation writes 1 + `clip_rate` times as much, and must shorten steps by this factor."""
        return 1 + self._setup.clip_rate if clip == "speculate" else 1.0

    def _kept(self) -> list[KeptActivations]:
        layers = self._model.layers
        match self._setup.activations:
            case "keep":
                everything = self._activations.kept_choices(self._model.activation_bytes)[0]
                saved_bytes = sum(layer.saved_bytes + layer.input_bytes for layer in layers)
                return [replace(everything, num_bytes=saved_bytes)]
            case "recompute":
                nothing = self._activations.kept_choices(0)[0]
                return [replace(nothing, num_inputs=len(layers), num_bytes=self._model.inter_block_bytes)]
            case "inputs":
                return [kept.inputs_alone([layer.input_bytes for layer in layers]) for kept in self._kept_in_room()]
            case "swap":
                return self._activations.kept_choices(0)[:1]
            case "auto":
                return self._kept_in_room()

    def _kept_in_room(self) -> list[KeptActivations]:
        """Return kept activations that leave room for a step's working memory. This memory may include a layer's own
        outputs, or swapped outputs of another layer. There is a choice for each case."""
        model, layers = self._model, self._model.layers
        allowed_bytes = max(0, self._setup.gpu_memory_bytes - self._setup.gpu_fixed_bytes)
        most = self._room_to_hold - outer_working_bytes(model)
        beside_layer = self._room_to_hold - layer_working_bytes(model) - tied_gradient_bytes(model)
        own_bytes = max((layer.output_bytes // layer.num_chunks for layer in layers), default=0)
        swapped_bytes = own_bytes + max((layer.input_bytes for layer in layers), default=0)
        budgets = {
            max(0, min(allowed_bytes, most - of_head, beside_layer + own))
            for of_head, own in ((0, own_bytes), (0, 0), (swapped_bytes, 0), (swapped_bytes, -swapped_bytes), (most, 0))
        }
        found = {
            (kept.num_inputs, *kept.num_of_kind): kept
            for budget_bytes in sorted(budgets, reverse=True)
            for kept in self._activations.kept_choices(budget_bytes)
        }
        return list(found.values())

    def _candidates(self, kept: KeptActivations, swapped_bytes: int | None) -> Candidates:
        candidates = self._activations.candidates(kept, self._setup.activations)
        if swapped_bytes is None:
            return candidates
        num_ranked = 1 + self._activations.num_operations
        ranked = candidates.swapped_bytes[:num_ranked]
        allowed = np.flatnonzero(ranked <= max(swapped_bytes, ranked.min()))
        return candidates.only(allowed[-1:])

    def _choice(self, candidates: Candidates) -> Choice:
        cpu_bytes = self._ram_beside_records
        spilled_bytes = np.maximum(0.0, candidates.swapped_bytes - cpu_bytes)
        return Choice(
            swapped_bytes=candidates.swapped_bytes,
            spilled_bytes=spilled_bytes,
            recompute_s=candidates.recompute_s,
            spilled_gradient_bytes=self._spilled_gradient_bytes(candidates, spilled_bytes, cpu_bytes),
            reloaded_bytes=candidates.reloaded_bytes,
            num_expert_calls=candidates.num_expert_calls,
        )

    def _spilled_gradient_bytes(self, candidates: Candidates, spilled_bytes: Values, cpu_bytes: int) -> Values:
        gradients, all_bytes = self._setup.gradients, self._setup.spilled_gradient_bytes
        if not gradients or not all_bytes or not cpu_bytes:
            return np.full(1, float(all_bytes))
        kinds = [(kind.output_bytes, [layer for layer, _ in kind.places]) for kind in self._activations.kinds]
        num_inputs = len(self._model.layers) - candidates.kept.num_inputs
        put_away = put_away_through(self._model.layers, kinds, candidates.swapped, num_inputs, spilled_bytes)
        held = held_beside(gradients, put_away, num_held_chunks=self._setup.num_held_chunks, ram_bytes=cpu_bytes)
        return np.maximum(0.0, all_bytes - held)

    def _best(
        self, candidates: Candidates, working: Values, choice: Choice, clip: ClipMode, *, ignores_drives: bool
    ) -> _Found:
        shape, choice = choice.swapped_bytes.shape, self._with_parking(choice, clip)
        forward_s, backward_s = self._costs.step_s(choice, clip)
        step_s = np.broadcast_to(forward_s + backward_s, shape)
        if not ignores_drives:
            fits = candidates.kept.num_bytes + working <= self._room_to_hold
            step_s = np.where(fits & (choice.spilled_bytes <= self._room.ssd_bytes), step_s, np.inf)
        fastest = step_s <= step_s.min() * EQUALLY_FAST
        busy_s = np.where(fastest, np.broadcast_to(self._costs.busy_s(choice, clip), shape), np.inf)
        row = int(busy_s.argmin())
        return _Found(float(step_s[row]), float(busy_s[row]), candidates, row, clip)

    def _assemble(self, best: _Found, refusal: str | None) -> OffloadPlan:
        model, setup = self._model, self._setup
        candidates = best.candidates.only(np.array([best.row]))
        choice = self._with_parking(self._choice(candidates), best.clip)
        swapped_bytes, spilled_bytes = choice.swapped_bytes.item(), choice.spilled_bytes.item()
        is_swapped, is_recomputed = candidates.swapped.sum() > 0, candidates.num_recomputed[0] > 0
        prediction = self._costs.predict(
            choice,
            best.clip,
            num_tokens=setup.cluster.num_ranks * setup.num_micro_batches * model.num_tokens,
            model_flops=3 * setup.cluster.num_ranks * setup.num_micro_batches * model.flops,
            case=1 if is_recomputed and not is_swapped else 3 if is_recomputed else 2,
            kept_bytes=candidates.kept.num_bytes,
            recomputed_flops=setup.num_micro_batches * float(candidates.recomputed_flops[0]),
            tier_bytes=self._tier_bytes(
                candidates.kept, math.ceil(self._working(candidates).item()), choice, best.clip
            ),
            fits=refusal is None,
        )
        return OffloadPlan(
            pools=setup.pools,
            resident=self._resident,
            activations=self._place(candidates, swapped_bytes - spilled_bytes),
            clip=best.clip,
            parked_share=choice.parked_share.item(),
            parked_bytes=self._parked_bytes(choice, best.clip),
            durability=setup.durability,
            commit_every_steps=setup.commit_every_steps or 0,
            num_micro_batches=setup.num_micro_batches,
            num_together=setup.num_together,
            num_params=model.num_params,
            least_device_bytes=setup.gpu_fixed_bytes
            + self._least_held_bytes
            + allocator_bytes(self._hardware, setup, self._least_held_bytes)
            + nccl_bytes(self._hardware, setup),
            cluster=setup.cluster,
            in_memory=fits_without_offloading(
                model,
                device_limit_bytes(self._hardware, setup),
                has_allocator=not self._hardware.device.shares_cpu,
            ),
            prediction=prediction,
            refusal=refusal,
        )

    def _tier_bytes(
        self, kept: KeptActivations, working_bytes: int, choice: Choice, clip: ClipMode
    ) -> dict[Tier, dict[str, int]]:
        model, setup, spilled = self._model, self._setup, int(choice.spilled_bytes.item())
        in_ram = int(choice.swapped_bytes.item() - choice.spilled_bytes.item())
        gradients_in_ram = setup.spilled_gradient_bytes - int(choice.spilled_gradient_bytes.item())
        held_bytes = max(0, gradients_in_ram - in_ram)  # the gradients that do not fit the RAM of activations
        num_local, copy_bytes = setup.cluster.num_local, ram_copy_bytes(model, setup)
        own_bytes = {
            "buffers": setup.cpu_fixed_bytes,
            "records": self._resident_bytes,
            "activations": in_ram,
            "gradients": held_bytes + self._parked_bytes(choice, clip),
            **({"weights": copy_bytes} if copy_bytes else {}),
            **({"shared_keys": setup.shared_key_bytes} if setup.shared_key_bytes else {}),
        }
        return {
            "gpu": {
                "slots": setup.gpu_fixed_bytes,
                "activations": kept.num_bytes,
                "working_set": working_bytes,
                **({"allocator_and_workspaces": on_top} if (on_top := self._on_top(kept, working_bytes)) else {}),
                **({"nccl": of_nccl} if (of_nccl := nccl_bytes(self._hardware, setup)) else {}),
            },
            "cpu": {name: num_local * num_bytes for name, num_bytes in own_bytes.items()},
            "ssd": {
                "records": record_bytes(model, setup),
                "gradients": num_local * setup.spilled_gradient_bytes,
                "activations": num_local * spilled,
            },
        }

    def _on_top(self, kept: KeptActivations, working_bytes: int) -> int:
        return allocator_bytes(self._hardware, self._setup, kept.num_bytes + working_bytes)

    def _place(self, candidates: Candidates, cpu_bytes: float) -> ActivationPlacements:
        """Return the placements of one candidate. Swapped outputs are placed from the last layer to the first, in RAM
        while they fit `cpu_bytes`. The others, which backward needs last, go to the SSDs."""
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


_DECIDED = ("num_tokens", "model_flops", "case", "kept_bytes", "recomputed_flops", "tier_bytes", "fits")
"""Figures of a prediction that do not depend on the hardware."""


def forecast(model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup, plan: OffloadPlan) -> StepPrediction:
    """Return the prediction for ``plan`` without a new search."""
    before = plan.prediction
    recomputed = [
        (layer, operation)
        for layer in model.layers
        for operation in layer.operations
        if plan.activations[layer.name][operation.name] is Placement.RECOMPUTE
    ]
    recompute_s = sum(operation_s(operation, hardware) for _, operation in recomputed)
    experts = ExpertCosts(model, hardware, setup)
    recomputed_experts = [layer for layer, operation in recomputed if operation.loads_experts]
    reloaded_bytes = sum(map(experts.reload_bytes, recomputed_experts))
    choice = Choice(
        swapped_bytes=np.array([float(before.swapped_bytes)]),
        spilled_bytes=np.array([float(before.spilled_bytes)]),
        recompute_s=np.array([recompute_s]),
        spilled_gradient_bytes=np.array([float(before.spilled_gradient_bytes)]),
        reloaded_bytes=np.array([float(reloaded_bytes)]),
        num_expert_calls=np.array([float(len(recomputed_experts))]),
        parked_share=np.array([plan.parked_share]),
    )
    own = replace(setup, commit_every_steps=plan.commit_every_steps)
    decided = {name: getattr(before, name) for name in _DECIDED}
    return step_costs(model, hardware, own).predict(choice, plan.clip, **decided)


def scaled_to(prediction: StepPrediction, step_s: float) -> StepPrediction:
    """Return the prediction with its step time scaled to ``step_s`` seconds."""
    factor = step_s / prediction.step_s
    return replace(prediction, forward_s=factor * prediction.forward_s, backward_s=factor * prediction.backward_s)


WORTH_ANOTHER_WAY = 0.99
"""A way to exchange that rounds more or needs a copy must take less than this share of the best way's step time."""


def fastest_way(plans: Sequence[OffloadPlan]) -> tuple[int, tuple[TriedWay, ...]]:
    """Return the index of the best of ``plans``, and all compared ways if there are several. ``plans`` has one plan for
    each way to exchange weights and gradients. An earlier way is better unless a later way is clearly faster. If none
    fits, the first is chosen."""
    best = 0
    for index, plan in enumerate(plans):
        is_faster = plan.prediction.step_s < WORTH_ANOTHER_WAY * plans[best].prediction.step_s
        if plan.fits and (is_faster or not plans[best].fits):
            best = index
    tried = [TriedWay(plan.cluster.collectives, plan.prediction.step_s, plan.fits) for plan in plans]
    return best, tuple(tried) if len(tried) > 1 else ()
