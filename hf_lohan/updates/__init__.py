"""Gradients in, updated records out.

Follow one gradient from the top down. `arrival` takes it to the host, and `norms` measures it on the way. `pipeline` is
what the computing thread talks to, `worker` what then happens on a thread of its own: it keeps the gradient until the
norm is known (`held`), or applies it. `queue` orders the reads, updates and writes of one chunk after another,
`chunk_update` does a chunk's, and `handover` brings the new weights to whoever needs their block. `step` knows the norm
and makes the step count or undoes it. `groups` says which hyperparameters a parameter has, and `setup` what all this is
built from. Steps with a gradient of zeros may be taken later: `missed_steps` knows of them, and `caught_up` reads what
lacks them. Two refinements have a file each: a `loan` of the weights that backward uses, and `speculation` about the
norm. Knows no model and no slots.
"""

from hf_lohan.updates.arrival import GradientArrivals
from hf_lohan.updates.gradient_reduction import GradientMeans, GradientReduction, OwnGradients
from hf_lohan.updates.gradients import ArrivedChunk, GradientNorms, NonFiniteGradientError
from hf_lohan.updates.handover import BorrowedSlot, Delivery, UpdatesDroppedError
from hf_lohan.updates.missed_steps import MISSED_STEPS_NAME, MissedSteps, StepCounts, UpToDateRecords
from hf_lohan.updates.pipeline import GradientPipeline
from hf_lohan.updates.setup import ParamGroups, UpdateSetup
from hf_lohan.updates.step import ClipHistory, ClipWay, SkippedSteps, StepResult, StepTransaction

__all__ = [
    "MISSED_STEPS_NAME",
    "ArrivedChunk",
    "BorrowedSlot",
    "ClipHistory",
    "ClipWay",
    "Delivery",
    "GradientArrivals",
    "GradientMeans",
    "GradientNorms",
    "GradientPipeline",
    "GradientReduction",
    "MissedSteps",
    "NonFiniteGradientError",
    "OwnGradients",
    "ParamGroups",
    "SkippedSteps",
    "StepCounts",
    "StepResult",
    "StepTransaction",
    "UpToDateRecords",
    "UpdateSetup",
    "UpdatesDroppedError",
]
