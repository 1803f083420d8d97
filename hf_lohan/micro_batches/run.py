"""A step's micro-batches together: their forwards in step, then one backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from hf_lohan.device import Device
from hf_lohan.micro_batches.heads import MicroBatchHeads
from hf_lohan.micro_batches.lockstep import Lockstep
from hf_lohan.micro_batches.torch_threads import ThreadSettings


class BeginJointForward(Protocol):
    """A context within which ``lockstep`` runs the forwards of micro-batches that have one backward; gives their heads.
    ``heads_apart``: whether to try and take those back one by one."""

    def __call__(self, lockstep: Lockstep, *, heads_apart: bool) -> AbstractContextManager[MicroBatchHeads]: ...


class MicroBatchRun:
    """Runs micro-batches together, as often as asked."""

    def __init__(self, joint_forward: BeginJointForward, device: Device) -> None:
        self._joint_forward = joint_forward
        self._device = device
        self._losses: dict[int, list[Tensor]] = {}
        self._lockstep: Lockstep | None = None
        """While micro-batches run."""
        self._heads_apart = True

    def __call__(self, micro_batches: Sequence[Callable[[], Any]]) -> list[Any]:
        """See `OffloadEngine.run_micro_batches`."""
        if self._lockstep is not None:
            raise RuntimeError("run_micro_batches was called within a micro-batch; run them all in one call")
        settings = ThreadSettings(self._device.torch_device.type)
        contexts = [settings.applied(self._device.in_this_lane()) for _ in micro_batches]
        heads: MicroBatchHeads

        def run(number: int) -> Any:
            self._losses[number] = []
            result = micro_batches[number]()
            heads.take_back(number, self._losses.pop(number))
            return result

        self._lockstep = Lockstep([partial(run, number) for number in range(len(micro_batches))], contexts)
        try:
            with self._joint_forward(self._lockstep, heads_apart=self._heads_apart) as heads:
                results = self._lockstep.run()
        finally:
            self._lockstep = None
            self._losses.clear()
        self._heads_apart = heads.are_apart
        heads.backward()
        return results

    def refuse_within(self, call: str) -> None:
        """Raises RuntimeError while micro-batches run: their backward is still to come."""
        if self._lockstep is not None:
            raise RuntimeError(f"{call} was called within a micro-batch; call it once, after run_micro_batches")

    def defer_backward(self, loss: Tensor) -> bool:
        """See `OffloadEngine.defer_backward`."""
        if self._lockstep is None:
            return False
        self._losses[self._lockstep.running].append(loss)
        return True
