"""A step's micro-batches together: their forwards in step, then one backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_lohan.device import Device
from hf_lohan.runtime.lockstep import Lockstep
from hf_lohan.runtime.model_hooks import ModelHooks
from hf_lohan.runtime.torch_threads import ThreadSettings


class MicroBatchRun:
    """Runs micro-batches together, as often as asked."""

    def __init__(self, hooks: ModelHooks, device: Device) -> None:
        self._hooks = hooks
        self._device = device
        self._losses: list[Tensor] | None = None
        """Whose backward is to come, while micro-batches run."""

    def __call__(self, micro_batches: Sequence[Callable[[], Any]]) -> list[Any]:
        """See `OffloadEngine.run_micro_batches`."""
        if self._losses is not None:
            raise RuntimeError("run_micro_batches was called within a micro-batch; run them all in one call")
        settings = ThreadSettings(self._device.torch_device.type)
        contexts = [settings.applied(self._device.in_this_lane()) for _ in micro_batches]
        lockstep = Lockstep(micro_batches, contexts)
        losses: list[Tensor] = []
        self._losses = losses
        try:
            with self._hooks.joint_forward(lockstep):
                results = lockstep.run()
        finally:
            self._losses = None
        if not losses:
            raise RuntimeError("no micro-batch gave its loss to backward; call accelerator.backward(loss) in each")
        torch.autograd.backward(losses)
        return results

    def defer_backward(self, loss: Tensor) -> bool:
        """See `OffloadEngine.defer_backward`."""
        if self._losses is None:
            return False
        self._losses.append(loss)
        return True
