"""Device memory: segments, peaks compared with the plan, and out of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import train

from hf_lohan.device import device_for

PAGE_TABLES_BYTES = 8 << 20
"""Memory that a driver may use for its page tables."""


def test_segments_grow_if_the_driver_supports_it() -> None:
    device = device_for("cuda")
    memory = device.empty(100 << 20)
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["address"] <= memory.data_ptr()]
    segment = max(segments, key=lambda segment: segment["address"])
    assert segment["is_expandable"] is device.grows_segments


def test_cached_memory_counts_as_free() -> None:
    device = device_for("cuda")
    before = device.total_memory_bytes()
    memory = device.empty(64 << 20)
    assert device.total_memory_bytes() == pytest.approx(before - memory.nbytes, abs=PAGE_TABLES_BYTES)
    peak = device.memory_peak()
    assert peak is not None and memory.nbytes <= peak.allocated_bytes <= peak.reserved_bytes
    del memory
    assert device.total_memory_bytes() == pytest.approx(before, abs=PAGE_TABLES_BYTES)


def test_the_record_has_measured_and_planned_peaks(tmp_path: Path) -> None:
    offload = {"cpu_memory": "64MiB", "gpu_memory": "4MiB", "ssd": str(tmp_path / "store")}
    train(tmp_path / "run", "llama", offload=offload)
    lines = [json.loads(line) for line in (tmp_path / "run" / "lohan" / "steps.jsonl").read_text().splitlines()]
    plan = json.loads((tmp_path / "run" / "lohan" / "plan.json").read_text())["tier_bytes"]["gpu"]
    last = lines[-1]
    assert 0 < last["device_peak_allocated_bytes"] <= last["device_peak_reserved_bytes"]
    assert last["device_planned_bytes"] == sum(plan.values())
    assert plan["allocator_and_workspaces"] > 0


REPLAY = """
import sys, torch
from transformers import AutoModelForCausalLM, LlamaConfig
from hf_lohan.model import discover_blocks
from hf_lohan.annexes.studies.allocators import compare_addresses
from hf_lohan.annexes.studies.step_trace import trace_step

sizes = dict(hidden_size=1024, intermediate_size=3584, num_attention_heads=8, num_key_value_heads=2, vocab_size=8192)
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=3, **sizes), dtype=torch.bfloat16)
traced = trace_step(model, discover_blocks(model), batch_size=1, sequence_length=2048, fused_attention=True)
changes = [(one.born, 1, number) for number, one in enumerate(traced.tensors)]
changes += [(one.died, 0, number) for number, one in enumerate(traced.tensors)]
alive = {}
for _ in range(2):
    for _, is_birth, number in sorted(changes):
        if is_birth:
            alive[number] = torch.empty(traced.tensors[number].num_bytes, dtype=torch.uint8, device="cuda")
        else:
            del alive[number]
found = compare_addresses(traced.tensors)
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
print(found.live_bytes, found.caching_bytes, found.expandable_bytes)
print(int(all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())))
"""


@pytest.mark.parametrize("is_expandable", [False, True])
def test_the_model_of_the_caching_allocator_reserves_what_it_reserves(is_expandable: bool) -> None:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{is_expandable}"}
    done = subprocess.run([sys.executable, "-c", REPLAY], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    allocated, reserved, live, fixed, expandable, has_grown = map(int, done.stdout.split())
    if is_expandable and not has_grown:
        pytest.skip("the driver cannot grow segments")
    assert allocated == live
    assert reserved == (expandable if is_expandable else fixed)


QUICK = (3, 60, 400)
"""An allocation of slots, one in the first step and one in a later step."""


@pytest.mark.parametrize(
    "numbers",
    [QUICK, *(pytest.param(range(first, first + 25), marks=pytest.mark.slow) for first in range(1, 101, 25))],
    ids=lambda numbers: f"{numbers[0]}_to_{numbers[-1]}",
)
def test_out_of_memory_at_any_allocation_can_be_resumed(double: Any, numbers: Sequence[int], tmp_path: Path) -> None:
    """A failure in planning only loses the plan. A failure in a step ends the run with advice, and the next run resumes
    from the last commit. torch's allocator does not cache, so each tensor is a device allocation."""
    if not hasattr(double, "fail_allocation"):
        pytest.skip("this double cannot fail an allocation")
    command = [sys.executable, str(Path(__file__).with_name("out_of_memory_in_turn.py")), str(tmp_path)]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_DOUBLE_ASYNC": "0"}
    done = subprocess.run([*command, *map(str, numbers)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ended = [line for line in done.stdout.splitlines() if line.endswith(" ended")]
    assert len(ended) >= len(numbers) // 2, done.stdout[-2000:]
