"""The CPU as a device keeps the promises of the interface."""

from __future__ import annotations

import pytest
import torch

from hf_lohan.device import CpuDevice, device_for


def test_each_device_memory_has_a_separate_storage() -> None:
    device = CpuDevice()
    first, second = device.empty(64), device.empty(64)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert first.device == device.torch_device


def test_facts_are_numbers_and_strings() -> None:
    facts = CpuDevice().describe()
    assert facts["kind"] == "cpu"
    assert facts["num_threads"] == torch.get_num_threads()
    assert all(isinstance(value, str | int) for value in facts.values())


def test_the_factory_makes_a_cpu_device_and_refuses_unknown_types() -> None:
    assert isinstance(device_for("cpu"), CpuDevice)
    assert isinstance(device_for(torch.device("cpu")), CpuDevice)
    with pytest.raises(ValueError, match="'meta'"):
        device_for("meta")
