"""A step's micro-batches together: all of them through a block before the next one, then one backward.

Follow one micro-batch: `run` gives it a thread with its caller's settings; `lockstep` says when it is
its turn, which `joint_forward` ends behind each layer, told by the model's hooks; its parameters are `leaves` of its
own, so that its gradients arrive by themselves; and `heads` takes its loss back to the last layer's output at once.
"""

from hf_lohan.micro_batches.joint_forward import JointParts
from hf_lohan.micro_batches.run import MicroBatchRun

__all__ = [
    "JointParts",
    "MicroBatchRun",
]
