"""Large mixtures of experts are planned in seconds, with the bytes of their configs on any machine."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections import Counter
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import pytest
import yaml
from moe_shapes import MOE_CONFIGS
from planned_models import DESKTOP, drives, estimate, hardware_file, plan, planned

from hf_lohan.cli.plan_request import PlannedRun, PlanRequest, plan_run
from hf_lohan.costs import SizeClass
from hf_lohan.testing.models import tiny_config

GB, WITHIN = 1e9, 0.1

# In billions: all parameters, and active ones per token. In GB: the weights of an expert, its weights and states, all
# experts of a layer, the rest of a layer, two such rests with eight experts, the traffic of a step, and the store with
# two homes.
EXPECTED: dict[str, tuple[float, ...]] = {
    "Qwen3-30B-A3B": (30.5, 3.4, 0.0094, 0.057, 1.21, 0.038, 0.15, 790, 730),
    "gpt-oss-20b": (20.9, 4.2, 0.0498, 0.299, 1.59, 0.053, 0.50, 540, 500),
    "Qwen3-235B-A22B": (235, 22, 0.0377, 0.226, 4.83, 0.144, 0.59, 6100, 5600),
    "gpt-oss-120b": (117, 5.7, 0.0498, 0.299, 6.37, 0.054, 0.51, 3000, 2800),
    "DeepSeek-V3": (671, 37.6, 0.088, 0.528, 22.6, 0.466, 1.6, 17_500, 16_100),
    "GLM-4.5-Air": (107, 13.4, 0.0346, 0.208, 4.43, 0.254, 0.78, 2800, 2600),
}
QUICK = ("Qwen3-30B-A3B", "gpt-oss-20b")
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in EXPECTED]


def saved_config(tmp_path: Path, name: str) -> str:
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({**MOE_CONFIGS[name], "dtype": "bfloat16"}))
    return str(path)


def settings_file(tmp_path: Path, **settings: Any) -> str:
    path = tmp_path / "offload.yaml"
    path.write_text(yaml.safe_dump({"experts": "streamed", "_resident_records": "none", **settings}))
    return str(path)


def planned_run(tmp_path: Path, name: str) -> PlannedRun:
    hardware = hardware_file(tmp_path / "hardware.yaml", DESKTOP, ssd=drives(1, capacity_bytes="30TB"))
    request = PlanRequest(
        model=saved_config(tmp_path, name),
        batch_size=1,
        sequence_length=2048,
        offload=settings_file(tmp_path),
        hardware=hardware,
        max_grad_norm=0.0,
    )
    return plan_run(request)


@pytest.mark.parametrize("name", CASES)
def test_planned_bytes_of_large_mixtures(tmp_path: Path, name: str) -> None:
    run = planned_run(tmp_path, name)
    plan, profile = run.plan, run.profile
    plan.check()
    step, experts = plan.prediction, plan.prediction.experts
    assert experts is not None and plan.pools is not None
    expert_bytes = experts.param_bytes / experts.num_experts
    dense_bytes = median(block.param_bytes for block in profile.blocks if block.experts)
    state_bytes = expert_bytes / 2 * (2 + run.setup.state_bytes_per_param)
    measured = (
        profile.num_params / 1e9,
        experts.active_params / 1e9,
        expert_bytes / GB,
        state_bytes / GB,
        experts.param_bytes / experts.num_layers / GB,
        dense_bytes / GB,
        (2 * dense_bytes + 8 * expert_bytes) / GB,
        (step.ssd_read_bytes_per_step + step.ssd_write_bytes_per_step) / GB,
        step.tier_bytes["ssd"]["records"] / GB,
    )
    assert measured == pytest.approx(EXPECTED[name], rel=WITHIN)

    # 2048 tokens use all experts. The slots of experts need less than a quarter of the device's memory.
    num_experts, num_chosen = (getattr(profile.experts[0], field) for field in ("num_experts", "num_chosen"))
    left_out = num_experts * (1 - num_chosen / num_experts) ** 2048
    assert experts.num_experts - experts.hits_per_micro_batch == pytest.approx(left_out * experts.num_layers, abs=1e-6)
    slots = plan.pools.num_slots[SizeClass.EXPERT]
    assert slots >= 8 and slots * plan.pools.slot_bytes[SizeClass.EXPERT] <= run.hardware.device.memory_bytes / 4
    # Each expert is loaded once in forward and once in backward, except those that backward finds in slots. Outputs of
    # experts are not recomputed, because that would load all experts a third time.
    assert experts.loads_per_step == pytest.approx(2 * experts.num_experts - slots, rel=0.01)


def test_estimate_prints_the_costs_of_experts(tmp_path: Path) -> None:
    path = saved_config(tmp_path, "gpt-oss-20b")
    words = ["--hardware", str(DESKTOP), "--offload", settings_file(tmp_path), "--seq-len", "8", "--batch-size", "1"]
    result = estimate(path, *words)
    assert result.exit_code == 0, result.stderr
    printed = result.stdout
    sizes = re.search(r"768 experts of ([\d.]+) MiB in 24 layers stream one by one, ([\d.]+) GiB in all", printed)
    assert sizes is not None, printed
    weights = 3 * 2880 * 2880 + 3 * 2880
    expected = 2 * weights / 2**20, 768 * 2 * weights / 2**30
    assert [float(size) for size in sizes.groups()] == pytest.approx(expected, rel=0.02)
    share = 100 * (1 - (1 - 4 / 32) ** 8)
    assert f"sends 8 tokens to {share:.3g}% of a layer's experts (32 or more reach all)" in printed
    assert "A step needs these SSDs for at least " in printed


def test_a_refusal_of_a_large_mixture_has_numbers(tmp_path: Path) -> None:
    """A store of 2.6 TB on a drive of 2 TB."""
    path, settings = saved_config(tmp_path, "gpt-oss-20b"), settings_file(tmp_path)
    hardware = hardware_file(tmp_path / "hardware.yaml", DESKTOP, ssd=drives(1, capacity_bytes="100GB"))
    result = estimate(path, "--hardware", hardware, "--offload", settings)
    assert result.exit_code == 2
    assert "the SSDs' 100000000000 bytes" in result.stderr and "cannot hold the training state" in result.stderr


def lines_run(tmp_path: Path, num_experts: int) -> Counter[str]:
    """Count the lines that each of our functions runs while it plans a model of 2 layers. A loop in one line counts
    each iteration.
    """
    config = tiny_config("qwen3_moe", num_layers=2, num_experts=num_experts, moe_intermediate_size=8)
    config.save_pretrained(tmp_path / str(num_experts))
    request = PlanRequest(
        model=str(tmp_path / str(num_experts)),
        batch_size=1,
        sequence_length=16,
        offload=settings_file(tmp_path, gpu_memory="64MiB", cpu_memory="256MiB", _resident_records="auto"),
        hardware=str(DESKTOP),
    )
    num_lines: Counter[str] = Counter()

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        num_lines[f"{frame.f_code.co_filename} {frame.f_code.co_qualname}"] += event == "line"
        return count

    def choose(frame: FrameType, event: str, arg: Any) -> Any:
        return count if "/hf_lohan/" in frame.f_code.co_filename else None

    threading.settrace(choose)
    sys.settrace(choose)
    try:
        run = plan_run(request)
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    assert run.plan.prediction.experts.num_experts == 2 * num_experts
    return num_lines


@pytest.mark.slow
def test_planning_is_linear_in_the_number_of_experts(tmp_path: Path) -> None:
    few, some, many = (lines_run(tmp_path, number) for number in (8, 40, 160))
    growing = {name: (many[name] - few[name]) / max(500, some[name] - few[name]) for name in many}
    assert {name: factor for name, factor in growing.items() if factor > 1.5 * (160 - 8) / (40 - 8)} == {}
    assert max(growing.values()) > 0.9 * (160 - 8) / (40 - 8)


def test_copies_of_an_expert_count_when_codes_scales_and_biases_have_them(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_local_experts": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128}
    config = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], **sizes, **heads}
    (tmp_path / "config.json").write_text(json.dumps(config))
    offload = settings_file(tmp_path, _resident_records="auto", cpu_memory="2MiB", gpu_memory="8MiB")
    words = ["--hardware", str(DESKTOP), "--offload", offload, "--lora-rank", "2", "--quantize", "nf4"]
    request = {"batch_size": 1, "seq_len": 8}
    text = plan(str(tmp_path / "config.json"), *words, **request).stdout
    kinds: dict[str, set[str]] = {}
    for name, kind in planned(str(tmp_path / "config.json"), *words, **request)["resident"]:
        if ".experts" in name:
            kinds.setdefault(name, set()).add(kind)
    whole = sum(of == {"param", "codes", "scales"} for of in kinds.values())
    assert 0 < whole < len(kinds) <= 32, "some experts have a copy of a part alone"
    assert f"weights of {whole} and optimizer states of 0 of 32 experts." in " ".join(text.split())
