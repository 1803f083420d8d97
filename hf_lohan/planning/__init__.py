"""Plans a training step. A run carries the plan out, and the command line prints it.

`layout` fixes blocks, records, pools and copies in RAM before a batch is known. `step_plan` traces a forward on fake
tensors, and plans a step from the trace, the layout and the measured hardware. `run_plan` plans at a run's first
forward, and again after the first steps are timed. `lengths` plans for rows of many lengths. `generation` lays out a
model that is not trained.
"""

from hf_lohan.planning.generation import bytes_per_token, lay_out_generation
from hf_lohan.planning.kept_weights import (
    carried_ranks,
    coded_numel,
    group_counterparts,
    kept_ranks,
    kept_record_name,
    lending_bytes,
    part_bytes,
)
from hf_lohan.planning.layout import OffloadLayout, chunked_loss_of, lay_out
from hf_lohan.planning.lengths import LongestRow, PlannedEpoch, longest_row, plan_epoch, read_lengths
from hf_lohan.planning.order import MicroBatches, check_same_layers, check_together, why_not_together
from hf_lohan.planning.run_plan import RunPlan, stock_fit
from hf_lohan.planning.step_plan import PlannedStep, StepShape, plan_step
from hf_lohan.planning.tracing.traced_blocks import forward_without_values, trace_blocks
