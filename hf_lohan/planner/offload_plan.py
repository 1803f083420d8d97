"""The plan: where each activation and each record is, so that a step is as short as the hardware allows.

`TrainingSetup` is what a run asks for, `OffloadPlan` what is decided, `StepPrediction` what that is expected to take.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeAlias

from hf_lohan.planner.collectives import ONE_RANK, Cluster, CollectiveName, TriedWay
from hf_lohan.planner.pool_plan import BudgetError, PoolPlan
from hf_lohan.planner.record_traffic import RecordTraffic, choose_resident_records

MOST_LOST_S = 600.0
"""No more time is between two commits, if nobody asks for that."""
ClipMode = Literal["none", "defer", "speculate"]
ClipRequest = Literal["none", "defer", "speculate", "auto"]
MOST_WRONG_GUESSES = 1 / 8
"""The largest fraction of the last steps that may clip while `clip: auto` guesses: each wrong guess is written to the
SSD twice."""
Activations = Literal["auto", "recompute", "swap", "keep"]
Durability = Literal["step", "checkpoint"]
Tier = Literal["gpu", "cpu", "ssd"]


class Placement(enum.Enum):
    """Where an activation waits between its forward and its backward, or that it does not."""

    GPU = "gpu"
    CPU = "cpu"
    SSD = "ssd"
    RECOMPUTE = "recompute"
    """Dropped, and made again in backward."""


INPUT = "input"
"""The name of a layer's input among its operations: what its recomputation starts from, so it is never recomputed."""

LayerPlacements: TypeAlias = Mapping[str, Placement]
"""By operation ("aten.mm#0", or `INPUT`). What is not named is recomputed, an input kept."""

ActivationPlacements: TypeAlias = Mapping[str, LayerPlacements]
"""By layer, the block's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockGradient:
    """Of one block, as it is held."""

    block: str
    num_bytes: int
    num_chunks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSetup:
    """Everything that a plan depends on and that neither the hardware nor the model says."""

    gpu_memory_bytes: int
    """Limit for slots and kept activations."""
    cpu_memory_bytes: int
    """Limit for buffers, copies of records and swapped activations."""
    pools: PoolPlan | None = None
    """The slots and buffers that the run takes; None: none are counted."""
    gpu_fixed_bytes: int = 0
    """Of the slots (`PoolPlan.gpu_pool_bytes`)."""
    cpu_fixed_bytes: int = 0
    """Of the buffer pools (`PoolPlan.cpu_pool_bytes`)."""
    ssd_capacity_bytes: int | None = None
    """Limit on the SSDs; None: their capacity."""
    activation_cpu_bytes: int | None = None
    """Limit on the RAM for swapped activations (LoHan's MEM); None: all that is left."""
    records: tuple[RecordTraffic, ...] = ()
    record_cpu_bytes: int = 0
    activations: Activations = "auto"
    """`recompute`: only the layers' inputs stay, on the device; `swap`: nothing is kept and nothing recomputed but what
    is cheap; `keep`: all that autograd saves stays on the device."""
    state_bytes_per_param: float = 10.0
    """Of the records beside `param`, for a trainable parameter: 10 for bfloat16 (residual and float32 moments), 8 for
    float32 (moments), less with moments of an `optimizer_state_dtype` that is not float32; 12 in LoHan (float32 master
    and moments)."""
    update_reads_param: bool = True
    """Whether the optimizer reads the working weight, as half or all of the master; in LoHan it only writes it."""
    lent_bytes: int = 0
    """Of the trainable weights that the optimizer has from their slots, if it runs in backward."""
    hands_over: bool = False
    """Whether updates under the forward bring their new weights into the slots, which then need not be read."""
    clip: ClipRequest = "auto"
    """`defer`: updates run under the next forward; `none`, `speculate`: in backward; `auto`: the faster of `defer` and
    `speculate`."""
    clip_rate: float = 0.0
    """The fraction of steps in which a speculation turns out wrong."""
    num_micro_batches: int = 1
    """Forwards and backwards a step."""
    num_together: int = 1
    """Micro-batches of the run that the model profile counts as one, since their weights move once."""
    durability: Durability = "step"
    """`step`: two versions of what is trained lie on the SSDs; `checkpoint`: one."""
    commit_every_steps: int | None = 1
    """Records with a copy in RAM are written in one step of so many; 0: in none (of two checkpoints); None: in as many
    as `commit_every_s` says, or as the plan chooses."""
    commit_every_s: float | None = None
    spilled_gradient_bytes: int = 0
    """Gradients that wait for the norm on the SSD (those of `PoolPlan.spilled_blocks`), if they find no room beside
    activations."""
    gradients: tuple[BlockGradient, ...] = ()
    """All that are held, in forward order; none if those on the SSD are to find no room in RAM."""
    num_held_chunks: int = 0
    """Of them, that have buffers."""
    turnaround_bytes: int = 0
    """Of the last layers' weights: still in their slots when backward begins, so not read again."""
    lazy_experts: bool | Literal["auto"] = False
    """Whether experts that no token of a step goes to are updated when one does, or when many steps are missing."""
    cluster: Cluster = ONE_RANK
    """Budgets, records and micro-batches are those of one rank, the SSDs those of its node."""
    copy_cpu_bytes: int | None = None
    """RAM of each rank for the copy of all weights that its node keeps, if the collectives keep it in RAM; None: each
    rank's share of the weights."""
    copy_ssd_bytes: int | None = None
    """Bytes on the node's SSDs for that copy, if the collectives keep it there; None: the weights of other nodes."""
    counts_fill: bool = True
    """Whether pipelines take time to fill and to drain; in LoHan's equations they take none."""

    @property
    def num_homes(self) -> int:
        return 2 if self.durability == "step" else 1

    @property
    def clip_modes(self) -> tuple[ClipMode, ...]:
        is_committed = self.commit_every_steps == 1  # to go back to
        if self.clip == "auto":
            return ("defer", "speculate") if is_committed else ("defer",)
        return ("defer",) if self.clip == "speculate" and not is_committed else (self.clip,)

    @property
    def commit_limit_s(self) -> float:
        """The most time between two commits."""
        if self.commit_every_s is None and self.commit_every_steps is not None:
            return math.inf
        return self.commit_every_s or MOST_LOST_S

    @property
    def committed_fraction(self) -> float:
        """Of the steps."""
        return 1 / self.commit_every_steps if self.commit_every_steps else 0.0

    @property
    def resident_records(self) -> tuple[RecordTraffic, ...]:
        return choose_resident_records(self.records, free_bytes=self.record_cpu_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lanes:
    """How long each resource is busy in all forwards, or all backwards, of a step."""

    compute_s: float
    h2d_s: float
    d2h_s: float
    ssd_read_s: float
    ssd_write_s: float
    optimizer_s: float
    net_s: float = 0.0
    host_s: float = 0.0
    """Of the RAM that ranks share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPrediction:
    """What there is to say of a step of several ranks beside what is said of any."""

    bytes_by_collective: dict[CollectiveName, int]
    """What one node sends in a step."""
    hides_from_tokens: dict[str, float | None]
    """By resource: with so many tokens a step, of all ranks together, it is busy as long as the devices compute. None:
    each token keeps it busier."""

    @property
    def sent_bytes_per_step(self) -> int:
        return sum(self.bytes_by_collective.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertPrediction:
    """Of experts that stream one by one."""

    num_layers: int
    """That have some."""
    num_experts: int
    """Of all layers together."""
    param_bytes: int
    """Of the weights of all."""
    hits_per_micro_batch: float
    """Experts that it is expected to go to, of all layers."""
    loads_per_step: float
    """Into slots, from RAM and SSDs."""
    loaded_bytes_per_step: float
    active_params: int
    """Parameters that work on a token, those outside the experts included."""
    all_hit_from_tokens: int | None
    """With so many tokens at once less than half an expert of a layer is expected to be left out. None: some are
    never chosen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPrediction:
    """One step, all its micro-batches and ranks. Times are those of a step among others, not of the first."""

    forward_s: float
    """T_f. Updates that waited for the norm are in it."""
    backward_s: float
    forward: Lanes
    backward: Lanes
    forward_bottleneck: str
    backward_bottleneck: str
    bottleneck: str
    """What the step waits for longest: "compute", "h2d", "d2h", "link" (both directions together), "ssd", or "cpu" (the
    optimizer)."""
    floor_by_resource_s: dict[str, float]
    """How long each resource alone is busy with its share: FLOPs over measured throughput, bytes over measured
    bandwidth. No step is shorter than the longest, however well things overlap."""
    num_tokens: int
    model_flops: float
    case: Literal[1, 2, 3]
    """LoHan's: 1: only the layers' inputs are swapped (the links are the limit); 2: nothing is recomputed (the device
    is the limit); 3: in between."""
    kept_bytes: int
    swapped_bytes: int
    """A, of one micro-batch."""
    spilled_bytes: int
    """aA: the part of it that goes on to the SSDs."""
    spilled_gradient_bytes: int
    """Gradients of a step's last backward that wait for its end on the SSDs."""
    recomputed_flops: float
    """FLOP_r of a step: products and attention made again in backward."""
    ssd_read_bytes_per_step: int
    ssd_write_bytes_per_step: int
    ssd_hides_from_tokens: float | None
    """T*: with so many tokens for each time that the weights move, the drives are busy as long as the device. None:
    each token keeps them busier."""
    ssd_hidden_step_s: float
    """What the step would take if it never waited for the drives."""
    tier_bytes: dict[Tier, dict[str, int]]
    """Of a device, and of a machine's RAM and drives."""
    fits: bool
    ranks: RankPrediction | None = None
    """None: there is one rank."""
    experts: ExpertPrediction | None = None
    """None: none stream by themselves."""

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
        own = asdict(self)
        for name in ("ranks", "experts"):
            if own[name] is None:
                del own[name]
        return {"step_s": self.step_s, "tokens_per_s": self.tokens_per_s, "tflops": self.tflops, **own}


@dataclass(frozen=True, slots=True)
class InMemoryFit:
    """Whether a model trains without offloading."""

    fits: bool
    needed_bytes: int
    """Of the way named by `activations`; of the smaller one if neither fits."""
    memory_bytes: int
    activations: Literal["keep", "recompute"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadPlan:
    """What lives where, and what that is expected to take. `lohan plan` prints it, and a run follows it."""

    pools: PoolPlan | None
    """Slots and buffers."""
    resident: tuple[RecordTraffic, ...]
    """Records with a copy in RAM."""
    activations: ActivationPlacements
    """By layer, in forward order: of its input (`INPUT`, never recomputed) and of the operations that the model profile
    names. A layer's other operations are recomputed, unless all is kept."""
    clip: ClipMode
    durability: Durability
    commit_every_steps: int
    """0: only checkpoints are committed."""
    num_micro_batches: int
    """Forwards and backwards a step, each of which moves the weights."""
    num_together: int
    """Micro-batches that share each of them."""
    num_params: int
    other_order_step_s: float | None = None
    """What the step would take with its micro-batches in the other order (one after the other, if they share their
    weights here), if that order was open, too."""
    in_memory: InMemoryFit
    """Whether it would train without offloading."""
    prediction: StepPrediction
    cluster: Cluster = ONE_RANK
    tried_ways: tuple[TriedWay, ...] = ()
    """Between several nodes: all ways to send weights and gradients that were open."""
    refusal: str | None
    """Why the plan cannot be carried out and the smallest change that would help; None if it can."""

    @property
    def fits(self) -> bool:
        return self.refusal is None

    def check(self) -> None:
        """Raises BudgetError if the plan does not fit."""
        if self.refusal is not None:
            raise BudgetError(self.refusal)

    def resident_blocks(self, *kinds: str) -> list[str]:
        """Blocks of which a record of one of ``kinds`` has a copy in RAM."""
        return list(dict.fromkeys(record.block for record in self.resident if record.kind in kinds))

    def to_mapping(self) -> dict[str, Any]:
        """For JSON: the prediction's figures beside every decision."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        del own["prediction"], own["in_memory"], own["cluster"], own["tried_ways"]
        if self.prediction.ranks is not None:
            own["cluster"] = asdict(self.cluster)
            own["tried_ways"] = [way.to_mapping() for way in self.tried_ways]
        return {
            **self.prediction.to_mapping(),
            **own,
            "fits_without_offloading": self.in_memory.fits,
            "pools": None if self.pools is None else self.pools.to_mapping(),
            "resident": [[record.block, record.kind] for record in self.resident],
            "activations": {
                layer: {name: place.value for name, place in places.items()}
                for layer, places in self.activations.items()
            },
        }
