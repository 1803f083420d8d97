"""What `lohan plan` prints is what a run follows: field by field, for the same model, batch, settings and hardware."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments
from typer.testing import CliRunner

import hf_lohan
from hf_lohan.cli import app
from hf_lohan.planner import SizeClass
from hf_lohan.testing.models import tiny_batch, tiny_model

BATCH_SIZE, SEQUENCE_LENGTH = 2, 16
TIGHT = {"cpu_memory": "3MiB", "gpu_memory": "1MiB"}
WIDE = {"cpu_memory": "64MiB", "gpu_memory": "16MiB"}
TOGETHER = {"vertical_micro_batches": True}
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tight": ("llama", TIGHT, {}),
    "wide": ("llama", WIDE, {}),
    "bf16": ("llama", TIGHT, {"bf16": True}),
    "not clipped": ("qwen3_moe", WIDE, {"max_grad_norm": 0.0}),
    "accumulated": ("llama", TIGHT, {"max_grad_norm": 0.0, "gradient_accumulation_steps": 4}),
    "vertical": ("qwen3_moe", {**WIDE, **TOGETHER}, {"gradient_accumulation_steps": 4}),
    "vertical, not clipped": ("llama", {**WIDE, **TOGETHER}, {"max_grad_norm": 0.0, "gradient_accumulation_steps": 4}),
    "swap": ("qwen3_moe", {**WIDE, "activations": "swap"}, {}),
    "experts one by one": ("qwen3_moe", {**TIGHT, "experts": "streamed"}, {}),
    "experts together": ("mixtral", {**WIDE, **TOGETHER, "experts": "streamed"}, {"gradient_accumulation_steps": 2}),
    "gradients beside activations": ("llama", {**TIGHT, "activations": "swap", "resident_records": "none"}, {}),
    "recompute": ("llama", {**TIGHT, "activations": "recompute", "resident_records": "none"}, {"bf16": True}),
    "half in RAM": ("llama", {"cpu_memory": "6MiB", "gpu_memory": "2MiB", "commit_every": "10min"}, {}),
    "keep, two drives": ("llama", {**WIDE, "activations": "keep", "ssd": ["one", "two"]}, {}),
}


def train(checkpoint: Path, folder: Path, settings: dict[str, Any], asked: dict[str, Any]) -> Any:
    """A short run of a saved model; returns its engine."""
    rows = [
        {name: value[0] for name, value in tiny_batch(seed=seed, sequence_length=SEQUENCE_LENGTH).items()}
        for seed in range(16)
    ]
    args = TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=1,
        per_device_train_batch_size=BATCH_SIZE,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **asked,
    )
    trainer = hf_lohan.Trainer(str(checkpoint), args, train_dataset=rows, offload=settings)
    trainer.train()
    return trainer.offload_engine


@pytest.mark.parametrize("name", RUNS)
def test_the_plan_that_is_printed_is_the_one_that_runs(name: str, tmp_path: Path) -> None:
    family, settings, asked = RUNS[name]
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / "run"
    tiny_model(family).save_pretrained(checkpoint)
    settings = {**settings, "ssd": [str(tmp_path / drive) for drive in settings.get("ssd", ["drive"])]}
    engine = train(checkpoint, folder, settings, asked)
    followed = json.loads((folder / "lohan" / "plan.json").read_text())
    summary = json.loads((folder / "lohan" / "summary.json").read_text())
    engine.close()

    hardware, offload = tmp_path / "hardware.yaml", tmp_path / "offload.yaml"
    hardware.write_text(yaml.safe_dump(summary["measured_hardware"]))
    offload.write_text(yaml.safe_dump(settings))
    options: dict[str, Any] = {
        "--model": checkpoint,
        "--batch-size": BATCH_SIZE,
        "--seq-len": SEQUENCE_LENGTH,
        "--offload": offload,
        "--hardware": hardware,
        "--gradient-accumulation-steps": asked.get("gradient_accumulation_steps", 1),
        "--max-grad-norm": asked.get("max_grad_norm", 1.0),
        "--dtype": "bfloat16" if asked.get("bf16") else "float32",
    }
    words = [str(word) for option in options.items() for word in option]
    result = CliRunner().invoke(app, ["plan", *words, "--json"])
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    assert {name: printed[name] for name in followed} == followed

    assert followed["durability"] == summary["durability"]
    layout, pools = engine.layout, followed["pools"]
    assert pools["chunk_numel"] == layout.plan.chunk_numel
    assert pools["num_slots"] == {size.value: layout.plan.num_slots[size] for size in SizeClass}
    assert followed["resident"] == [[record.block, record.kind] for record in layout.resident_records]
    if settings.get("activations") in (None, "swap"):
        placed = engine.activations._placements
        assert followed["activations"] == {
            layer: {operation: place.value for operation, place in places.items()} for layer, places in placed.items()
        }
    copies = engine.tiers.store.ram.copies
    assert [[*name] for name in copies] == followed["resident"]
    spilled_bytes = sum(record.num_bytes for record in layout.spill_records())
    assert 0 <= followed["spilled_gradient_bytes"] <= spilled_bytes
    if "beside" in name:
        assert followed["spilled_gradient_bytes"] < spilled_bytes
        assert engine.tiers.shared_ram.num_bytes > 0
    assert (engine.clip_history.way == "speculate") == (followed["clip"] == "speculate")
