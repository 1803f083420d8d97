"""Gradients in, updated records out.

Follow one gradient: `gradient_norms` measures it, `gradient_arrival` takes it to the host, and the thread of the
`gradient_pipeline` takes over its chunk. What it does with it stands in `step_gradients`: it applies it in backward, or
keeps it until the norm is known (`held_gradients`; those that spill, on the SSD: `gradient_home`).
`update_pipeline` orders reads, AdamW and writes, chunk after chunk; `state_update` does a chunk's, in the parts of
`split_update`. `blocks_in_update` has whoever needs a block wait for it, or hands it over, if it must out of the
buffers that are held `until_written`; `weight_loan` lends the weights that backward uses.
`clipping` chooses whether to guess the norm, `speculation` knows what a step guesses, `guessed_blocks` of which
blocks, and `step_transaction` makes the step count or undoes it. Knows no model and no slots.
"""

from hf_lohan.updates.blocks_in_update import Delivery
from hf_lohan.updates.clipping import ClipHistory
from hf_lohan.updates.gradient_arrival import ArrivedChunk, GradientArrivals
from hf_lohan.updates.gradient_home import GradientHome
from hf_lohan.updates.gradient_norms import GradientNorms
from hf_lohan.updates.gradient_pipeline import GradientPipeline
from hf_lohan.updates.non_finite import NonFiniteGradientError, SkippedSteps
from hf_lohan.updates.param_groups import GroupOf, ParamGroups
from hf_lohan.updates.state_update import StateUpdater
from hf_lohan.updates.step_transaction import StepResult, StepTransaction
from hf_lohan.updates.weight_loan import WeightLoan

__all__ = [
    "ArrivedChunk",
    "ClipHistory",
    "Delivery",
    "GradientArrivals",
    "GradientHome",
    "GradientNorms",
    "GradientPipeline",
    "GroupOf",
    "NonFiniteGradientError",
    "ParamGroups",
    "SkippedSteps",
    "StateUpdater",
    "StepResult",
    "StepTransaction",
    "WeightLoan",
]
