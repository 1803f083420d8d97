"""Makes the `Device` of a torch device."""

from __future__ import annotations

import torch

from hf_lohan.device.base import Device
from hf_lohan.device.cpu import CpuDevice
from hf_lohan.timeline import Timeline


def default_torch_device() -> torch.device:
    """Return the current GPU, or the CPU without a GPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def num_gpus() -> int:
    """Return the number of GPUs that this process may use."""
    return torch.cuda.device_count()


def device_for(torch_device: torch.device | str, timeline: Timeline | None = None) -> Device:
    """Make the `Device` of a torch device, which records its work in `timeline`. Raises ValueError for types other than
    cpu and cuda."""
    resolved = torch.device(torch_device)
    match resolved.type:
        case "cpu":
            return CpuDevice(timeline)
        case "cuda":
            from hf_lohan.device.cuda import CudaDevice

            return CudaDevice(resolved, timeline)
        case kind:
            raise ValueError(f"device {kind!r} is not supported; use a cpu or cuda device")
