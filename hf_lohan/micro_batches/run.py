"""A step's micro-batches together: their forwards in step, then one backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from hf_lohan.micro_batches.joint_forward import JointForward, JointParts
from hf_lohan.micro_batches.lockstep import Lockstep
from hf_lohan.threads import ThreadSettings


class MicroBatchRun:
    """Runs micro-batches together, as often as asked."""

    def __init__(self, parts: JointParts) -> None:
        self._parts = parts
        self._losses: dict[int, list[Tensor]] = {}
        self._lockstep: Lockstep | None = None
        """While micro-batches run."""
        self._heads_apart = True

    def __call__(self, micro_batches: Sequence[Callable[[], Any]]) -> list[Any]:
        """See `OffloadEngine.run_micro_batches`."""
        if self._lockstep is not None:
            raise RuntimeError("run_micro_batches was called within a micro-batch; run them all in one call")
        parts = self._parts
        settings = ThreadSettings(parts.device.torch_device.type)
        contexts = [settings.applied(parts.device.in_this_lane()) for _ in micro_batches]
        joint: JointForward

        def run(number: int) -> Any:
            self._losses[number] = []
            result = micro_batches[number]()
            joint.heads.take_back(number, self._losses.pop(number))
            return result

        self._lockstep = lockstep = Lockstep([partial(run, n) for n in range(len(micro_batches))], contexts)
        joint = JointForward(parts, lockstep, heads_apart=self._heads_apart)
        try:
            parts.model_pass.begin_forward(is_training=True)
            with parts.going_by(joint):
                with joint.forwards():
                    results = lockstep.run()
                self._lockstep = None
                self._heads_apart = joint.heads.are_apart
                joint.backward()
        finally:
            self._lockstep = None
            self._losses.clear()
        return results

    def refuse_within(self, call: str) -> None:
        """Raises RuntimeError while micro-batches run: their backward is still to come."""
        if self._lockstep is not None:
            raise RuntimeError(f"{call} was called within a micro-batch; call it once, after run_micro_batches")

    @property
    def is_running(self) -> bool:
        """Whether micro-batches run their forwards."""
        return self._lockstep is not None

    def defer_backward(self, loss: Tensor) -> bool:
        """See `OffloadEngine.defer_backward`."""
        if self._lockstep is None:
            return False
        self._losses[self._lockstep.running].append(loss)
        return True
