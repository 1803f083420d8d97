"""Device memory: how it is taken, what the plan says of it, and what a run says when there is none left."""

from __future__ import annotations

import torch

from hf_lohan.device import device_for


def test_segments_grow_where_the_driver_lets_them() -> None:
    device = device_for("cuda")
    memory = device.empty(100 << 20)
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["address"] <= memory.data_ptr()]
    own = max(segments, key=lambda segment: segment["address"])
    assert own["is_expandable"] is device.grows_segments


def test_what_the_allocator_keeps_counts_as_free() -> None:
    device = device_for("cuda")
    before = device.total_memory_bytes()
    memory = device.empty(64 << 20)
    assert device.total_memory_bytes() == before - memory.nbytes
    peak = device.memory_peak()
    assert peak is not None and memory.nbytes <= peak.allocated_bytes <= peak.reserved_bytes
    del memory
    assert device.total_memory_bytes() == before
