"""Runs the micro-batches of a step together. Each block is loaded once for all forwards and once for their backward.

`joint_forward` runs each micro-batch's forward in its own thread. `lockstep` lets one thread run at a time and switches
after each layer. Each micro-batch has its own parameter objects (`leaves`), so that its gradients arrive separately.
"""

from hf_lohan.micro_batches.joint_forward import JointParts, MicroBatchRun
