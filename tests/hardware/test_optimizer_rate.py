"""The optimizer's rate is measured on all elements, in the run's formats, while the device is busy."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from hf_lohan.device import CpuDevice, Event, Lane
from hf_lohan.hardware import cpu_rates
from hf_lohan.hardware.cpu_rates import checksum_bytes_per_s, optimizer_params_per_s
from hf_lohan.optim import MomentDtype
from hf_lohan.threads import KernelThreads

FORMATS = pytest.mark.parametrize(
    ("dtype", "moment_dtype"),
    [(torch.float32, "float32"), (torch.bfloat16, "float32"), (torch.float32, "bfloat16"), (torch.bfloat16, "int8")],
)


@FORMATS
def test_every_format_has_a_rate(dtype: torch.dtype, moment_dtype: MomentDtype) -> None:
    assert optimizer_params_per_s(CpuDevice(), dtype, numel=5000, budget_s=0.0, moment_dtype=moment_dtype) > 0


@FORMATS
def test_every_element_is_updated(dtype: torch.dtype, moment_dtype: MomentDtype) -> None:
    chunk = cpu_rates._Chunk(dtype, 40_001, KernelThreads(2), moment_dtype)
    chunk.update()
    moved = chunk.records["exp_avg"] != 0
    assert moved.numel() >= 40_001
    assert int(moved.sum()) >= moved.numel() - 10  # gradients near the middle are close to 0


def test_a_type_without_masters_is_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        optimizer_params_per_s(CpuDevice(), torch.float16, numel=5000, budget_s=0.0)


class Accelerator(CpuDevice):
    """A device with its own cores that counts the finished products."""

    class torch_device:
        type = "accelerator"

    def __init__(self) -> None:
        self.num_waits = 0
        self.threads: set[str] = set()

    def record(self, lane: Lane, *tensors: Tensor) -> Event:
        self.num_waits += 1
        self.threads.add(threading.current_thread().name)
        return super().record(lane, *tensors)


def test_a_gpu_is_busy_during_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    device, ones = Accelerator(), torch.ones

    def small_ones(*size: int, dtype: torch.dtype, device: object) -> Tensor:
        return ones(4, 4, dtype=dtype)

    monkeypatch.setattr(torch, "ones", small_ones)
    with cpu_rates._kept_busy(device):
        while device.num_waits < 3:
            pass
    assert device.threads == {"lohan-device-load"}
    assert "lohan-device-load" not in {thread.name for thread in threading.enumerate()}


def test_a_cpu_device_is_not_busy_during_the_measurement() -> None:
    with cpu_rates._kept_busy(CpuDevice()):
        assert "lohan-device-load" not in {thread.name for thread in threading.enumerate()}


def test_checksums_have_a_rate() -> None:
    assert checksum_bytes_per_s(num_threads=2, budget_s=0.0) > 0
