"""The plan, which places activations and records so that a step is as short as the hardware allows.

`TrainingSetup` is the input, `OffloadPlan` is the decision, and `StepPrediction` is the expected step.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeAlias

from hf_lohan.costs.collectives import ONE_RANK, Cluster, CollectiveName, SentAs, TriedWay
from hf_lohan.costs.pool_plan import BudgetError, PoolPlan
from hf_lohan.costs.record_traffic import RecordTraffic, choose_resident_records

MOST_LOST_S = 600.0
"""The default limit of the time between two commits."""
ClipMode = Literal["none", "defer", "speculate"]
ClipRequest = Literal["none", "defer", "speculate", "auto"]
MOST_WRONG_GUESSES = 1 / 8
"""`clip: auto` speculates only while at most this share of the last steps clips, because a wrong guess writes the
update twice.
"""
Activations = Literal["auto", "recompute", "inputs", "swap", "keep"]
Durability = Literal["step", "checkpoint"]
SolverName = Literal["algorithm_1", "algorithm_1_spread", "migration"]
Solver = Literal["auto", "algorithm_1", "migration"]
FETCH_AHEAD, LAYERS_LEAVING = 1, 2
"""The usual number of layers whose activations are fetched before their backward, and of layers whose activations may
still be on the device after their forward (MEMO's two buffers)."""
Tier = Literal["gpu", "cpu", "ssd"]


class Placement(enum.Enum):
    """Where an activation is between its forward and its backward."""

    GPU = "gpu"
    CPU = "cpu"
    SSD = "ssd"
    RECOMPUTE = "recompute"
    """It is dropped, and recomputed in backward."""


INPUT = "input"
"""The name of a layer's input among its operations. Recomputation starts from it, so it is never recomputed."""

LayerPlacements: TypeAlias = Mapping[str, Placement]
"""Placements by operation ("aten.mm#0", or `INPUT`). Operations without an entry are recomputed. An input without an
entry is kept."""

ActivationPlacements: TypeAlias = Mapping[str, LayerPlacements]
"""Placements by layer (the name of its block)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockGradient:
    """The gradient of one block while it is held."""

    block: str
    num_bytes: int
    num_chunks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSetup:
    """The input of a plan, together with hardware and model."""

    gpu_memory_bytes: int
    """Limit for slots and kept activations."""
    device_memory_bytes: int | None = None
    """Limit for all memory of the device. None is the memory that is free."""
    cpu_memory_bytes: int
    """Limit for buffers, copies of records and swapped activations."""
    pools: PoolPlan | None = None
    """The run's slots and buffers. With None they are not counted."""
    gpu_fixed_bytes: int = 0
    """Bytes of the slots (`PoolPlan.gpu_pool_bytes`)."""
    cpu_fixed_bytes: int = 0
    """Bytes of the buffer pools (`PoolPlan.cpu_pool_bytes`)."""
    sequence_ranks: int = 1
    """Ranks that share each row. Profiles count the tokens of one rank."""
    shared_key_bytes: int = 0
    """Bytes of a rank's part of the RAM that ranks share for keys, values and sums of their gradients."""
    ssd_capacity_bytes: int | None = None
    """Limit for bytes on the SSDs. None is their capacity."""
    activation_cpu_bytes: int | None = None
    """Limit for swapped activations in RAM (LoHan's MEM). None is all free RAM."""
    records: tuple[RecordTraffic, ...] = ()
    record_cpu_bytes: int = 0
    activations: Activations = "auto"
    """With `recompute` only the layers' inputs are kept, on the device. With `swap` nothing stays on the device, and
    only cheap operations are recomputed. With `keep` all saved tensors stay on the device."""
    state_bytes_per_param: float = 10.0
    """Bytes of a trainable parameter in all records except `param`. This is 10 for bfloat16 (residual and float32
    moments), 8 for float32 (moments), and less with a smaller `optimizer_state_dtype`. LoHan has 12 (float32 master and
    moments)."""
    update_reads_param: bool = True
    """Whether the optimizer reads the working weight as a part of the master. LoHan's optimizer only writes it."""
    parked_share: float | None = 0.0
    """The share of updates in backward that wait for the next forward. None means the best share."""
    lent_bytes: int = 0
    """Bytes of trainable weights that slots can lend to an optimizer in backward (`lending_layers`)."""
    hands_over: bool = False
    """Whether updates during the forward copy new weights to slots, so that loads need not read them again."""
    clip: ClipRequest = "auto"
    """With `defer` updates run during the next forward, and with `none` and `speculate` in backward. `auto` is the
    faster of `defer` and `speculate`."""
    clip_rate: float = 0.0
    """The fraction of steps whose speculation is wrong."""
    num_micro_batches: int = 1
    """Forwards and backwards in a step."""
    num_together: int = 1
    """Micro-batches that the model profile counts as one, because weights move once for all of them."""
    durability: Durability = "step"
    """With `step` the SSDs have two versions of trained records, and with `checkpoint` one."""
    commit_every_steps: int | None = 1
    """Records with a copy in RAM are written once in this number of steps. With 0 they are written only for
    checkpoints. With None `commit_every_s` or the plan decides."""
    commit_every_s: float | None = None
    spilled_gradient_bytes: int = 0
    """Bytes of gradients that are held on the SSD (`PoolPlan.spilled_blocks`), unless RAM has room for them and
    activations."""
    gradients: tuple[BlockGradient, ...] = ()
    """All held gradients, in forward order. Empty if they may not use RAM that activations leave."""
    num_held_chunks: int = 0
    """Number of chunks whose held gradients have buffers."""
    turnaround_bytes: int = 0
    """Bytes of the last layers' weights, which are still in slots when backward begins."""
    solver: Solver = "algorithm_1"
    """The solver whose plan is taken. `auto` is the plan with the shortest simulated step."""
    lazy_experts: bool | Literal["auto"] = False
    """Whether experts without tokens in a step are updated later."""
    least_moved_rows: int = 0
    """Minimum number of rows of one rank for one expert that another rank of the node computes, to balance rows. 0 if
    no rank computes rows for another rank's expert."""
    cluster: Cluster = ONE_RANK
    """Budgets, records and micro-batches are per rank, and SSDs are per node."""
    copy_cpu_bytes: int | None = None
    """RAM of each rank for its node's copy of all weights, if the collectives keep it in RAM. None is an equal share of
    the weights."""
    copy_ssd_bytes: int | None = None
    """Bytes of this copy on the node's SSDs, if the collectives keep it there. None means all weights of other
    nodes."""
    counts_fill: bool = True
    """Whether pipelines take time to fill and drain. In LoHan's equations they take none."""

    @property
    def num_homes(self) -> int:
        return 2 if self.durability == "step" else 1

    @property
    def clip_modes(self) -> tuple[ClipMode, ...]:
        is_committed = self.commit_every_steps == 1  # speculation returns to the last commit
        if self.clip == "auto":
            return ("defer", "speculate") if is_committed else ("defer",)
        return ("defer",) if self.clip == "speculate" and not is_committed else (self.clip,)

    @property
    def commit_limit_s(self) -> float:
        """The longest time between two commits, in seconds."""
        if self.commit_every_s is None and self.commit_every_steps is not None:
            return math.inf
        return self.commit_every_s or MOST_LOST_S

    @property
    def committed_fraction(self) -> float:
        """The share of steps that are committed."""
        return 1 / self.commit_every_steps if self.commit_every_steps else 0.0

    @property
    def resident_records(self) -> tuple[RecordTraffic, ...]:
        return choose_resident_records(self.records, free_bytes=self.record_cpu_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lanes:
    """Busy seconds of each resource in all forwards or all backwards of a step."""

    compute_s: float
    h2d_s: float
    d2h_s: float
    ssd_read_s: float
    ssd_write_s: float
    optimizer_s: float
    net_s: float = 0.0
    host_s: float = 0.0
    """Busy seconds of the RAM that the ranks of a node share."""
    gathered_s: float = 0.0
    exchanged_s: float = 0.0
    """Seconds of links between GPUs, for weights and for gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkBytes:
    """Bytes of weights and gradients on the link of one device in a step."""

    h2d: int
    """Weights that are copied to the device."""
    d2h: int
    """Gradients that are copied from the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPrediction:
    """The part of a prediction for several ranks."""

    bytes_by_collective: dict[CollectiveName, int]
    """Bytes that one node sends to others in a step."""
    sent_bytes: dict[SentAs, int]
    """Bytes that one rank sends in a step, including bytes to ranks of its node, by the names of `sent_bytes` in a
    run's summary. Rows of experts and of embeddings are "tokens". Bytes that ranks of a node read in shared memory do
    not count."""
    link_bytes: LinkBytes
    exact_link_bytes: LinkBytes
    """`link_bytes` if nothing is rounded within a node."""
    between_gpus: LinkBytes
    """Bytes that one GPU gets from the others of its node, and sends to them, in a step: weights (`h2d`), and gradients
    (`d2h`)."""
    hides_from_tokens: dict[str, float | None]
    """For each resource, the number of tokens per step (of all ranks) at which it is busy for the same time as the
    devices. None if it takes longer than computing with any number of tokens."""
    rows_equal_weights_at_tokens: float | None = None
    """Number of tokens in a rank's micro-batch at which sending rows to experts costs the same number of bytes between
    nodes as sending the experts' weights and gradients. None if no rows leave a node."""

    @property
    def sent_bytes_per_step(self) -> int:
        return sum(self.bytes_by_collective.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertPrediction:
    """The part of a prediction about streamed experts."""

    num_layers: int
    """Number of layers with streamed experts."""
    num_experts: int
    """Number of experts of all layers."""
    param_bytes: int
    """Bytes of the weights of all experts."""
    hits_per_micro_batch: float
    """Expected number of experts of all layers that a micro-batch reaches."""
    loads_per_step: float
    """Number of loads of experts to slots, from RAM and SSDs."""
    loaded_bytes_per_step: float
    active_params: int
    """Number of parameters that a token uses, including parameters outside the experts."""
    all_hit_from_tokens: int | None
    """The minimum number of tokens at which the expected number of unused experts of a layer is below one half. None if
    some experts are never chosen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPrediction:
    """One step with all its micro-batches and ranks. It is a step in the middle of a run, not the first."""

    forward_s: float
    """T_f, including deferred updates."""
    backward_s: float
    forward: Lanes
    backward: Lanes
    forward_bottleneck: str
    backward_bottleneck: str
    bottleneck: str
    """The resource that bounds the step. It is "compute", "h2d", "d2h", "link" (both directions together), "ssd" or
    "cpu" (the optimizer), and with several ranks "net", "host" or "gpu_link"."""
    floor_by_resource_s: dict[str, float]
    """Busy seconds of each resource alone, which are FLOPs over measured throughput, or bytes over measured bandwidth.
    No step is shorter than the longest of these."""
    num_tokens: int
    model_flops: float
    case: Literal[1, 2, 3]
    """LoHan's case. In case 1 only the layers' inputs are swapped (the links are the limit). In case 2 nothing is
    recomputed (the device is the limit). Case 3 is in between."""
    kept_bytes: int
    swapped_bytes: int
    """A, the bytes of swapped activations of one micro-batch."""
    spilled_bytes: int
    """aA, the part of A that goes to the SSDs."""
    spilled_gradient_bytes: int
    """Bytes of gradients of a step's last backward that are held on the SSDs."""
    recomputed_flops: float
    """FLOP_r of a step, which counts products and attention that backward recomputes."""
    ssd_read_bytes_per_step: int
    ssd_write_bytes_per_step: int
    ssd_hides_from_tokens: float | None
    """T*, the number of tokens per move of the weights at which the drives are busy for the same time as the device.
    None if the drives take longer with any number of tokens."""
    ssd_hidden_step_s: float
    """The step time without waits for the drives."""
    tier_bytes: dict[Tier, dict[str, int]]
    """Bytes on each tier, by purpose. They are per device for "gpu", and per machine for "cpu" and "ssd"."""
    fits: bool
    ranks: RankPrediction | None = None
    """Set only with several ranks."""
    experts: ExpertPrediction | None = None
    """Set only with streamed experts."""

    @property
    def step_s(self) -> float:
        """T_iter."""
        return self.forward_s + self.backward_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.step_s

    @property
    def tflops(self) -> float:
        """10**12 FLOPs per second. Recomputation is not counted, so a step has 3 times the FLOPs of its forward."""
        return self.model_flops / self.step_s / 1e12

    def to_mapping(self) -> dict[str, Any]:
        own = asdict(self)
        for name in ("ranks", "experts"):
            if own[name] is None:
                del own[name]
        return {"step_s": self.step_s, "tokens_per_s": self.tokens_per_s, "tflops": self.tflops, **own}


@dataclass(frozen=True, slots=True)
class SolvedPlan:
    """The result of one solver."""

    name: SolverName
    step_s: float
    """Predicted seconds of a step, without a simulation."""
    simulated_step_s: float | None
    """None with several ranks."""
    written_bytes: int
    """Bytes that a step writes to the drives."""


@dataclass(frozen=True, slots=True)
class InMemoryFit:
    """Whether a model trains without offloading."""

    fits: bool
    needed_bytes: int
    """Memory in bytes that training with `activations` needs. If neither "keep" nor "recompute" fits, this is the
    smaller need."""
    memory_bytes: int
    activations: Literal["keep", "recompute"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadPlan:
    """The tier of each tensor, and the expected step. `lohan plan` prints the plan, and a run follows it."""

    pools: PoolPlan | None
    """Slots and buffers."""
    resident: tuple[RecordTraffic, ...]
    """Records with a copy in RAM."""
    activations: ActivationPlacements
    """For each layer in forward order, the placements of its input (`INPUT`, never recomputed) and of its operations in
    the model profile. A layer's other operations are recomputed, unless everything is kept."""
    clip: ClipMode
    parked_share: float = 0.0
    """The share of updates that are parked until the next forward (`parking.spread_share`); 0 with `defer`."""
    parked_bytes: int = 0
    """Bytes of a rank's RAM for parked gradients. Gradients that are held in any case do not count."""
    durability: Durability
    commit_every_steps: int
    """Every n-th step is committed. With 0 only checkpoints are committed."""
    num_micro_batches: int
    """Number of forwards and backwards in a step. Each moves the weights."""
    num_together: int
    """Number of micro-batches that run together in each forward and backward."""
    num_params: int
    least_device_bytes: int
    """Minimum device memory of the step with these slots, over all choices of kept activations."""
    chunk_tokens: int | None = None
    """Tokens that a layer computes at a time; None if layers run whole."""
    other_order_step_s: float | None = None
    """The step time with the other order of micro-batches, if the plan compared it."""
    in_memory: InMemoryFit
    """Whether the model trains without offloading."""
    prediction: StepPrediction
    cluster: Cluster = ONE_RANK
    tried_ways: tuple[TriedWay, ...] = ()
    """All compared ways to send weights and gradients, with several nodes."""
    solver: SolverName = "algorithm_1"
    """The solver whose plan this is."""
    solvers: tuple[SolvedPlan, ...] = ()
    """The results of the compared solvers."""
    fetch_ahead: int = FETCH_AHEAD
    """Number of layers whose activations are fetched before their backward."""
    layers_leaving: int = LAYERS_LEAVING
    """Number of layers whose activations may still be on the device after their forward."""
    refusal: str | None
    """Why the plan does not fit, and the smallest change that helps; None if it fits."""

    @property
    def simulated_step_s(self) -> float | None:
        """The simulated step, if solvers were compared and there is one rank."""
        return next((solved.simulated_step_s for solved in self.solvers if solved.name == self.solver), None)

    @property
    def fits(self) -> bool:
        return self.refusal is None

    @property
    def cpu_bytes(self) -> int:
        """Bytes of a rank's RAM that the plan uses."""
        return sum(self.prediction.tier_bytes["cpu"].values()) // self.cluster.num_local

    def check(self) -> None:
        """Raise BudgetError if the plan does not fit."""
        if self.refusal is not None:
            raise BudgetError(self.refusal)

    def to_mapping(self) -> dict[str, Any]:
        """Return all decisions and the figures of the prediction, for JSON."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        del own["prediction"], own["in_memory"], own["cluster"], own["tried_ways"], own["solvers"]
        if self.prediction.ranks is not None:
            own["cluster"] = asdict(self.cluster) | {"collectives": self.cluster.collectives.to_mapping()}
            own["tried_ways"] = [way.to_mapping() for way in self.tried_ways]
        return {
            **self.prediction.to_mapping(),
            **own,
            "fits_without_offloading": self.in_memory.fits,
            "pools": None if self.pools is None else self.pools.to_mapping(),
            "resident": [[record.block, record.kind] for record in self.resident],
            "simulated_step_s": self.simulated_step_s,
            "activations": {
                layer: {name: place.value for name, place in places.items()}
                for layer, places in self.activations.items()
            },
        }
