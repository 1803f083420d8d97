"""Parameters whose weights are in the store and not on the device.

Such a parameter has the class `AbsentParameter`. It has a shape and a dtype, and an operation that needs its values
borrows them from its `WeightProvider`. In a forward, autograd saves handles (`saved_weights`) instead of weights, so
that a slot can be reused before the backward. `stand_ins` finds the weight that a placeholder or a copy belongs to.
"""

from hf_lohan.absent.absent_parameter import AbsentParameter, gathered_parameters, parameter_behind
from hf_lohan.absent.saved_weights import saved_weight_hooks
from hf_lohan.absent.stand_ins import StandIns
from hf_lohan.absent.weight_provider import BorrowedWeights, MovedGradients, WeightView, weight_refusal
