"""Which implementation serves a torch device."""

from __future__ import annotations

import torch

from hf_lohan.device.base import Device
from hf_lohan.device.cpu import CpuDevice
from hf_lohan.timeline import Timeline


def default_torch_device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def num_gpus() -> int:
    """GPUs that this process may use."""
    return torch.cuda.device_count()


def device_for(torch_device: torch.device | str, timeline: Timeline | None = None) -> Device:
    """The `Device` for a torch device; it notes in `timeline` what it does.

    Raises ValueError for a kind that is neither cpu nor cuda."""
    resolved = torch.device(torch_device)
    match resolved.type:
        case "cpu":
            return CpuDevice(timeline)
        case "cuda":
            from hf_lohan.device.cuda import CudaDevice

            return CudaDevice(resolved, timeline)
        case kind:
            raise ValueError(f"device {kind!r} is not supported; use a cpu or cuda device")
