"""A run with unpinned host memory, as on WSL2 or with a low memlock limit, equals stock bit for bit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from doubled_device import pin_limit
from trainer_runs import assert_same_bits, train

from hf_lohan.device import device_for


def test_torch_works_after_a_refusal(double: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pin_limit(double, 1 << 20), caplog.at_level(logging.WARNING):
        device = device_for("cuda")
        buffers = [device.host_empty(num_bytes) for num_bytes in (4 << 20, 2 << 20, 4096)]
        assert [buffer.is_pinned() for buffer in buffers] == [False, False, True]
        assert torch.ones(3, device="cuda").sum() == 3
    assert [record.getMessage()[:21] for record in caplog.records] == ["pinning 4194304 bytes"]


def test_a_run_without_pinned_memory_equals_stock(
    double: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Measuring, pools and swapped activations all pin memory."""
    offload = {"cpu_memory": "64MiB", "gpu_memory": "4MiB", "ssd": str(tmp_path / "store"), "activations": "swap"}
    with pin_limit(double, 1 << 20), caplog.at_level(logging.WARNING):
        ours = train(tmp_path / "ours", "llama", offload=offload)
    refusals = [record for record in caplog.records if "pinning" in record.getMessage()]
    assert len(refusals) == 1, [record.getMessage() for record in refusals]
    assert_same_bits(ours, train(tmp_path / "stock", "llama"))
