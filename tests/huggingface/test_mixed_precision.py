"""`mixed_precision: bf16` of accelerate gives the same bits as `bf16=True`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offloaded_models import forget_accelerator_state
from short_runs import short_arguments
from torch import nn
from transformers import TrainingArguments

import hf_lohan
from hf_lohan import Accelerator, LohanPlugin
from hf_lohan.testing.models import tiny_batch, tiny_model, tiny_rows

LINE = "mixed_precision: bf16 means bf16=True under offload"


def offload(folder: Path) -> dict[str, Any]:
    return {"cpu_memory": "4MiB", "gpu_memory": "2MiB", "ssd": str(folder / "store")}


def by_trainer(folder: Path, **arguments: Any) -> tuple[list[float], dict[str, torch.Tensor], torch.dtype]:
    args = short_arguments(folder, max_steps=3, per_device_train_batch_size=8, **arguments)
    rows = tiny_rows(24)
    trainer = hf_lohan.Trainer(tiny_model("llama"), args, train_dataset=rows, offload=offload(folder))
    trainer.train()
    engine = trainer.offload_engine
    assert engine is not None and trainer.args.bf16
    weights = {part.name: engine.parameters.read_parameter(part.name) for part in engine.parameter_slices}
    engine.close()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, weights, engine.layout.master.working_dtype


def by_loop(folder: Path, plugin_bf16: bool, **arguments: Any) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    plugin = LohanPlugin(offload=offload(folder), bf16=plugin_bf16)
    accelerator = Accelerator(cpu=True, lohan_plugin=plugin, **arguments)
    model: nn.Module = tiny_model("llama").train()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for seed in range(3):
        loss = model(**tiny_batch(seed=seed)).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    engine = accelerator.offload_engine
    assert engine is not None
    weights = {part.name: engine.parameters.read_parameter(part.name) for part in engine.parameter_slices}
    engine.close()
    return losses, weights, engine.layout.master.working_dtype


@pytest.mark.parametrize("door", ["trainer", "loop by the launcher", "loop by its argument"])
def test_bf16_equals_bf16_true(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs: dict[str, Callable[[Path, bool], Any]] = {
        "trainer": lambda folder, launched: by_trainer(folder, **({} if launched else {"bf16": True})),
        "loop by the launcher": lambda folder, launched: by_loop(folder, not launched),
        "loop by its argument": lambda folder, launched: by_loop(
            folder, not launched, **({"mixed_precision": "bf16"} if launched else {})
        ),
    }
    caplog.set_level(logging.INFO, "hf_lohan")
    expected_losses, expected, dtype = runs[door](tmp_path / "bf16", False)
    assert dtype == torch.bfloat16 and LINE not in caplog.text
    if door != "loop by its argument":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as accelerate's launcher does
    forget_accelerator_state()
    losses, weights, dtype = runs[door](tmp_path / "launched", True)
    assert losses == expected_losses and dtype == torch.bfloat16
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
    assert caplog.text.count(LINE) == 1


def test_a_model_streamed_in_float32_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    model = hf_lohan.from_pretrained(tmp_path / "model", offload=offload(tmp_path), torch_device="cpu")
    engine = hf_lohan.engine_of(model)
    assert engine is not None
    words = r"offloaded in float32, and bfloat16 weights were asked for; call from_pretrained\(\.\.\., bf16=True\)"
    with pytest.raises(ValueError, match=words):
        Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ValueError, match=words):
        hf_lohan.Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    engine.close()


def test_fp8_is_refused_before_accelerate_asks_for_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "mixed_precision='fp8' needs layers of another package, .*; set mixed_precision to 'bf16' or 'no'"
    with pytest.raises(ValueError, match=words):
        Accelerator(True, False, "fp8")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ValueError, match=words):
        Accelerator(lohan_plugin=LohanPlugin())


def test_a_model_that_was_offloaded_in_float32_is_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "checkpoint")
    model = hf_lohan.from_pretrained(tmp_path / "checkpoint", offload=offload(tmp_path))
    args = TrainingArguments(str(tmp_path), bf16=True, use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match="the model was offloaded in float32, and bfloat16 weights were asked for"):
        hf_lohan.Trainer(model, args, offload=offload(tmp_path))
