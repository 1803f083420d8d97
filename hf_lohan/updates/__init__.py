"""Takes gradients, and writes updated records.

The files, in the order in which a gradient passes through them:

- `arrival`: a gradient goes to the host.
- `row_gradients`: of an embedding table only the rows with a gradient go to the host.
- `pipeline`: the interface for the computing thread.
- `worker`: on its own thread, gradients wait for the norm or are applied, one chunk after another.
- `gradient_reduction`: with several ranks, a chunk's gradient is averaged first.
- `chunk_update`: reads, updates and writes one chunk.
- `handover`: new weights go to readers of their block; updates in backward borrow old weights from the device.
- `step`: hyperparameters, norm, clipping, and whether a step counts.
- `gradients`: the gradient of a chunk, norms, and gradients that wait.
- `masters`: float32 masters that are split into bfloat16 weights and residuals.
- `missed_steps`: steps with a gradient of zeros that are taken later.
- `setup`: the parts from which the others are built.

This package depends on neither the modules of a model nor the slots of its weights.
"""

from hf_lohan.updates.arrival import BackwardContext, GradientArrivals
from hf_lohan.updates.gradient_reduction import GradientReduction
from hf_lohan.updates.gradients import ArrivedChunk, NonFiniteGradientError
from hf_lohan.updates.handover import (
    BorrowedSlot,
    Delivery,
    OnDelivered,
    UpdatesDroppedError,
    WeightChange,
    WeightSlots,
)
from hf_lohan.updates.masters import master_pieces, read_masters, round_anew, write_masters
from hf_lohan.updates.missed_steps import MISSED_STEPS_NAME, MissedSteps, StepCounts, UpToDateRecords
from hf_lohan.updates.pipeline import GradientPipeline, RankGradientPipeline
from hf_lohan.updates.setup import UpdateSetup
from hf_lohan.updates.step import ClipHistory, ClipWay, ParamGroups, SkippedSteps, StepResult, StepTransaction
