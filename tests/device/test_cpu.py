"""The CPU as a device keeps the promises of the interface."""

from __future__ import annotations

import pytest
import torch

from hf_lohan.device import CpuDevice, Lane, device_for


def test_a_copy_is_done_when_its_event_is() -> None:
    device = CpuDevice()
    source, target = device.host_empty(4096).fill_(3), device.empty(4096).zero_()
    device.copy(Lane.H2D, target, source)
    copied = device.record(Lane.H2D)
    device.wait(Lane.COMPUTE, copied)
    copied.synchronize()
    assert torch.equal(target, source)


def test_copies_move_any_dtype() -> None:
    device = CpuDevice()
    source = torch.randn(100).bfloat16()
    target = device.empty(200).view(torch.bfloat16)
    device.copy(Lane.D2H, target, source)
    assert torch.equal(target, source)


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
