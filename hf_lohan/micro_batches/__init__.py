"""Runs the micro-batches of a step together: each block is loaded once for all forwards and once for their backward.

`joint_forward` runs each micro-batch's own forward in a thread. `lockstep` lets one thread run at a time and switches
behind each layer. Each micro-batch has parameter objects (`leaves`) of its own, so its gradients arrive separately.
"""

from hf_lohan.micro_batches.joint_forward import JointParts, MicroBatchRun

__all__ = ["JointParts", "MicroBatchRun"]
