"""The CPU as a compute device. Copies run in the calling thread, so every event is reached when it is recorded."""

from __future__ import annotations

import mmap
import platform
import time
from collections.abc import Sequence

import psutil
import torch
from torch import Tensor

from hf_lohan.device.base import Device
from hf_lohan.device.host_memory import available_host_memory_bytes, mapped_empty
from hf_lohan.device.lanes import Event, Lane, Stamp
from hf_lohan.threads import usable_cpus


class _Reached(Event, Stamp):
    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def synchronize(self) -> None:
        return

    def is_reached(self) -> bool:
        return True

    def at_s(self) -> float:
        return self._at_s


def _in_ram(memory: Tensor) -> Tensor:
    """Take RAM for all pages of new memory at once, as pinning does. If the machine has too little, the kernel ends
    the process at the start of a run and not in a later step."""
    memory[:: mmap.PAGESIZE] = 0
    return memory


class CpuDevice(Device):
    """A device that uses host memory as device memory, with the same budget and slots."""

    torch_device = torch.device("cpu")
    memory_is_host = True
    shares_cores = True

    def empty(self, num_bytes: int) -> Tensor:
        return _in_ram(mapped_empty(num_bytes))

    def span(self, memory: Tensor, start: int, num_bytes: int) -> Tensor:
        return torch.from_numpy(memory.numpy()[start : start + num_bytes])

    def host_empty(self, num_bytes: int) -> Tensor:
        return _in_ram(mapped_empty(num_bytes))

    def stamp(self, lane: Lane) -> Stamp:
        return _Reached()

    def record(self, lane: Lane, *tensors: Tensor, reads: Sequence[Tensor] = ()) -> Event:
        return _Reached()

    def wait(self, lane: Lane, event: Event) -> None:
        event.synchronize()

    def rng_state(self) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)

    def total_memory_bytes(self) -> int:
        return available_host_memory_bytes()

    def describe(self) -> dict[str, object]:
        return {
            "kind": "cpu",
            "name": platform.processor() or platform.machine(),
            "num_cpus": usable_cpus(),
            "num_threads": torch.get_num_threads(),
            "host_memory_bytes": int(psutil.virtual_memory().total),
        }
