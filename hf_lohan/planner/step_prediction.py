"""What a plan is expected to take: seconds for each resource, bytes for each tier, and what the step waits for."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hf_lohan.planner.hardware_profile import HardwareProfile
from hf_lohan.planner.model_profile import ModelProfile
from hf_lohan.planner.step_costs import Choice, Phase, StepCosts
from hf_lohan.planner.training_setup import ClipMode, TrainingSetup

Tier = Literal["gpu", "cpu", "ssd"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lanes:
    """How long each resource is busy in all forwards, or all backwards, of a step."""

    compute_s: float
    h2d_s: float
    d2h_s: float
    ssd_read_s: float
    ssd_write_s: float
    optimizer_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPrediction:
    """One step, all its micro-batches. Times are those of a step among others, not of the first."""

    forward_s: float
    """T_f. Updates that waited for the norm are in it."""
    backward_s: float
    """T_b."""
    forward: Lanes
    backward: Lanes
    forward_bottleneck: str
    backward_bottleneck: str
    bottleneck: str
    """What the step waits for longest: "compute", "h2d", "d2h", "link" (both directions together), "ssd", or "cpu" (the
    optimizer)."""
    num_tokens: int
    model_flops: float
    """3 x forward FLOPs."""
    case: Literal[1, 2, 3]
    """LoHan's: 1: only the layers' inputs are swapped (the links are the limit); 2: nothing is recomputed (the device
    is the limit); 3: in between."""
    kept_bytes: int
    swapped_bytes: int
    """A, of one micro-batch."""
    spilled_bytes: int
    """aA: the part of it that goes on to the SSDs."""
    recomputed_flops: float
    """FLOP_r of a step: products and attention made again in backward."""
    ssd_read_bytes_per_step: int
    ssd_write_bytes_per_step: int
    tier_bytes: dict[Tier, dict[str, int]]
    """By purpose."""
    fits: bool

    @property
    def step_s(self) -> float:
        """T_iter."""
        return self.forward_s + self.backward_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.step_s

    @property
    def tflops(self) -> float:
        """10**12 FLOPs a second, counting 3 x forward whatever is recomputed."""
        return self.model_flops / self.step_s / 1e12

    def to_mapping(self) -> dict[str, Any]:
        """For JSON."""
        return {"step_s": self.step_s, "tokens_per_s": self.tokens_per_s, "tflops": self.tflops, **asdict(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a plan decides, beside what costs time."""

    kept_bytes: int
    num_swapped: int
    """Operations whose outputs are swapped."""
    num_recomputed: int
    recomputed_flops: float
    """Of one micro-batch."""
    tier_bytes: dict[Tier, dict[str, int]]
    fits: bool


def predict(
    model: ModelProfile,
    hardware: HardwareProfile,
    setup: TrainingSetup,
    choice: Choice,
    clip: ClipMode,
    outcome: Outcome,
) -> StepPrediction:
    """What one choice (arrays of one element) takes."""
    costs = StepCosts(model, hardware, setup)
    phases = costs.phases(choice, clip)
    forwards = [phase for phase in phases if phase.is_forward]
    backwards = [phase for phase in phases if not phase.is_forward]
    forward_s, backward_s = costs.step_s(choice, clip)
    loads = [phase.load * phase.count for phase in phases]
    return StepPrediction(
        forward_s=forward_s.item(),
        backward_s=backward_s.item(),
        forward=_lanes(forwards, hardware),
        backward=_lanes(backwards, hardware),
        forward_bottleneck=_bottleneck(forwards, costs),
        backward_bottleneck=_bottleneck(backwards, costs),
        bottleneck=_bottleneck(phases, costs),
        num_tokens=setup.num_micro_batches * model.num_tokens,
        model_flops=3 * setup.num_micro_batches * model.flops,
        case=1 if outcome.num_recomputed and not outcome.num_swapped else 3 if outcome.num_recomputed else 2,
        kept_bytes=outcome.kept_bytes,
        swapped_bytes=int(choice.swapped_bytes.item()),
        spilled_bytes=int(choice.spilled_bytes.item()),
        recomputed_flops=setup.num_micro_batches * outcome.recomputed_flops,
        ssd_read_bytes_per_step=round(sum(load.ssd_read_bytes.item() for load in loads)),
        ssd_write_bytes_per_step=round(sum(load.ssd_write_bytes.item() for load in loads)),
        tier_bytes=outcome.tier_bytes,
        fits=outcome.fits,
    )


def _lanes(phases: list[Phase], hardware: HardwareProfile) -> Lanes:
    def total(amount: str) -> float:
        return math.fsum(phase.count * getattr(phase.load, amount).item() for phase in phases)

    return Lanes(
        compute_s=total("compute_s"),
        h2d_s=total("h2d_bytes") / hardware.h2d_bytes_per_s,
        d2h_s=total("d2h_bytes") / hardware.d2h_bytes_per_s,
        ssd_read_s=total("ssd_read_bytes") / hardware.ssd_read_bytes_per_s,
        ssd_write_s=total("ssd_write_bytes") / hardware.ssd_write_bytes_per_s,
        optimizer_s=total("updated_params") / hardware.cpu.optimizer_params_per_s,
    )


def _bottleneck(phases: list[Phase], costs: StepCosts) -> str:
    """The resource that is the longest for most of the time."""
    waited_s: dict[str, float] = {}
    for phase in phases:
        seconds, resource = max((seconds.item(), name) for name, seconds in costs.lanes(phase.load).items())
        waited_s[resource] = waited_s.get(resource, 0.0) + phase.count * seconds
    return max(waited_s, key=lambda resource: waited_s[resource])
