"""What torch offers nobody, and offloading needs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def mark_optimizer_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Let a scheduler of an optimizer whose steps another one takes not warn that it comes before the first step."""
    marked: Any = optimizer
    marked._opt_called = True


def cpu_has_bfloat16_units() -> bool:
    """Whether bfloat16 matmuls are fast on this CPU."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def without_torch_function() -> AbstractContextManager[object]:
    """Within, subclasses of Tensor are plain tensors to torch's functions."""
    return torch._C.DisableTorchFunctionSubclass()
