"""What a weight is while it is in the store and not on the device.

A parameter then has the class `AbsentParameter`: it knows its shape and dtype, and an operation that needs its values
borrows them from its `WeightProvider`. In a forward, `saved_weights` gives autograd handles in place of weights, so
that a slot can be reused before the backward. `stand_ins` knows which weight a placeholder or a copy belongs to.
"""

from hf_lohan.absent.absent_parameter import AbsentParameter, gathered_parameters
from hf_lohan.absent.saved_weights import saved_weight_hooks
from hf_lohan.absent.stand_ins import StandIns
from hf_lohan.absent.weight_provider import BorrowedWeights, MovedGradients, WeightProvider, WeightView, weight_refusal

__all__ = [
    "AbsentParameter",
    "BorrowedWeights",
    "MovedGradients",
    "StandIns",
    "WeightProvider",
    "WeightView",
    "gathered_parameters",
    "saved_weight_hooks",
    "weight_refusal",
]
