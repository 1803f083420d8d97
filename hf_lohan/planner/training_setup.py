"""What a run asks for beside its model: budgets, the form of its state, how it clips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ClipMode = Literal["none", "defer", "speculate"]
ClipRequest = Literal["none", "defer", "speculate", "auto"]
Activations = Literal["auto", "recompute", "swap", "keep"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSetup:
    """Everything that a plan depends on and that neither the hardware nor the model says."""

    gpu_memory_bytes: int
    """Limit for slots and kept activations."""
    cpu_memory_bytes: int
    """Limit for buffers, copies of records and swapped activations."""
    gpu_fixed_bytes: int = 0
    """Of the slots (`PoolPlan.gpu_pool_bytes`)."""
    cpu_fixed_bytes: int = 0
    """Of the buffer pools (`PoolPlan.cpu_pool_bytes`)."""
    ssd_capacity_bytes: int | None = None
    """Limit on the SSDs; None: their capacity."""
    activation_cpu_bytes: int | None = None
    """Limit on the RAM for swapped activations (LoHan's MEM); None: all that is left."""
    record_cpu_bytes: int | None = None
    """Limit on the RAM for copies of records; None: all that is left."""
    activations: Activations = "auto"
    """`recompute`: only the layers' inputs are swapped; `swap`: nothing is recomputed but what is cheap; `keep`: all
    that autograd saves stays on the device."""
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
    durability: Literal["step", "checkpoint"] = "step"
    """`step`: two versions of what is trained lie on the SSDs; `checkpoint`: one."""
    spilled_gradient_numel: int = 0
    """Gradients that wait for the norm on the SSD (those of `PoolPlan.spilled_blocks`)."""
    turnaround_bytes: int = 0
    """Of the last layers' weights: still in their slots when backward begins, so not read again."""
    hold_resident_records: bool = True
    """Whether records may have copies in RAM."""
    counts_fill: bool = True
    """Whether pipelines take time to fill and to drain; in LoHan's equations they take none."""

    @property
    def num_homes(self) -> int:
        return 2 if self.durability == "step" else 1

    @property
    def clip_modes(self) -> tuple[ClipMode, ...]:
        """Those to choose from."""
        return ("defer", "speculate") if self.clip == "auto" else (self.clip,)
