"""Training with `chunks.layers: N` differs from training with whole layers only in the order of sums."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_tokenizer import SENTENCES
from torch import nn
from trajectories import (
    SMALL_BUDGETS,
    Trajectory,
    arguments,
    assert_nearly_equal,
    assert_same_bits,
    dataset,
    finish,
    train_offloaded,
    train_stock,
)
from trl_runs import BUDGETS, Run, close, save_checkpoint
from trl_runs import arguments as sft_arguments
from trl_runs import run as run_trl

import hf_lohan
from hf_lohan.activations.chunked_norms import ChunkedNorm
from hf_lohan.huggingface.offloaded_model import run_plan_of
from hf_lohan.planning import run_plan
from hf_lohan.testing.models import tiny_model

N = 6
"""Tokens of a chunk. The rows of 16 tokens have chunks of 6, 6 and 4."""
CHUNKED = {**SMALL_BUDGETS, "chunks.layers": N, "activations": "recompute"}


def assert_cut(ours: Trajectory, stock: Trajectory) -> None:
    assert_nearly_equal(ours, stock)
    assert any(not torch.equal(ours.weights[name], weight) for name, weight in stock.weights.items()), "not cut"


CASES: dict[str, dict[str, Any]] = {
    "alone": {"max_steps": 4},
    "together": {"gradient_accumulation_steps": 2, "max_steps": 4},
    "rows": {"per_device_train_batch_size": 3, "max_steps": 4},
}


@pytest.mark.covering(0)
@pytest.mark.parametrize("case", CASES)
def test_equals_whole_layers_up_to_rounding(case: str, tmp_path: Path) -> None:
    stock = train_stock("llama", tmp_path / "stock", {}, **CASES[case])
    offload = {**CHUNKED, "vertical_micro_batches": case == "together", "cpu_memory": "6MiB"}
    if case == "rows":
        offload["chunks.layers"] = 32  # two rows, then one
    assert_cut(train_offloaded("llama", tmp_path / "ours", {}, offload=offload, **CASES[case]), stock)


WAYS: dict[str, dict[str, Any]] = {
    "swap": {"activations": "swap"},
    "keep": {"activations": "keep"},
    "auto": {"activations": "auto"},
    "speculate": {"_clip": "speculate"},
}


def long_rows(num_rows: int = 8, length: int = 640) -> Any:
    return dataset(num_rows, length)


def run_long(folder: Path, offload: dict[str, Any], resume: str | None = None, **settings: Any) -> Trajectory:
    model = tiny_model("llama", max_position_embeddings=1024)
    offload = {**SMALL_BUDGETS, "cpu_memory": "8MiB", **offload}
    trainer = hf_lohan.Trainer(
        model, arguments(folder, per_device_train_batch_size=1, **settings), train_dataset=long_rows(), offload=offload
    )
    return finish(trainer, resume)


def a_device_of(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have plans count on a device with this memory."""
    measured = run_plan.cached_hardware

    def small(*args: Any, **kwargs: Any) -> Any:
        hardware = measured(*args, **kwargs)
        return replace(hardware, device=replace(hardware.device, memory_bytes=num_bytes))

    monkeypatch.setattr(run_plan, "cached_hardware", small)


def test_auto_cuts_what_does_not_fit_and_a_resumed_run_keeps_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    whole = run_long(tmp_path / "whole", {}, **settings)
    assert json.loads((tmp_path / "whole/lohan/plan.json").read_text())["chunk_tokens"] is None
    a_device_of(4 << 20, monkeypatch)
    auto = run_long(tmp_path / "auto", {}, **settings)
    number = json.loads((tmp_path / "auto/lohan/plan.json").read_text())["chunk_tokens"]
    assert number in (512, 256)
    assert_cut(auto, whole)
    assert_same_bits(run_long(tmp_path / "given", {"chunks.layers": number}, **settings), auto)
    monkeypatch.undo()
    # A device with more memory would not need chunks, but the resumed run has the bits of the first.
    for point in ("last_step", str(tmp_path / "auto/checkpoint-2")):
        assert_same_bits(run_long(tmp_path / "auto", {}, resume=point, **settings), auto)
    assert json.loads((tmp_path / "auto/lohan/plan.json").read_text())["chunk_tokens"] == number
    run_long(tmp_path / "auto", {"chunks.layers": 300}, resume=str(tmp_path / "auto/checkpoint-2"), **settings)
    assert f"this run has chunks.layers: 300 and continues a run with chunks of {number} tokens" in caplog.text


class ProductNorm(torch.nn.Module):
    """Multiplies by a product, which autocast computes in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.1, 1.0, 8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.float() @ torch.diag(self.weight)


def test_the_backward_of_a_norm_in_chunks_has_the_autocast_of_its_forward() -> None:
    hidden = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))

    def gradients(chunk_tokens: int | None) -> list[torch.Tensor | None]:
        norm, own = ProductNorm(), hidden.clone().requires_grad_()
        ChunkedNorm(norm, lambda: chunk_tokens).attach()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = norm(own)
        (output * torch.linspace(0.3, 1.7, 8)).sum().backward()
        return [output.detach(), own.grad, norm.weight.grad]

    (output, of_hidden, of_weight), (whole, of_whole, of_its_weight) = gradients(4), gradients(None)
    assert output is not None and output.dtype == torch.bfloat16
    torch.testing.assert_close((output, of_hidden), (whole, of_whole), rtol=0, atol=0)
    torch.testing.assert_close(of_weight, of_its_weight, rtol=0.02, atol=0.02)


@pytest.mark.slow
def test_placements_clipping_and_resuming_change_no_bit(tmp_path: Path) -> None:
    settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "max_grad_norm": 3.1}
    expected = train_offloaded("llama", tmp_path / "defer", {}, offload={**CHUNKED, "_clip": "defer"}, **settings)
    for way, changed in WAYS.items():
        ours = train_offloaded("llama", tmp_path / way, {}, offload={**CHUNKED, **changed}, **settings)
        assert_same_bits(ours, expected)
    resumed = hf_lohan.Trainer(
        tiny_model("llama", seed=9), arguments(tmp_path / "defer", **settings), train_dataset=dataset(), offload=CHUNKED
    )
    assert_same_bits(finish(resumed, str(tmp_path / "defer" / "checkpoint-2")), expected)


@pytest.mark.slow
def test_as_many_rows_as_a_head_has_elements(tmp_path: Path) -> None:
    rows = {"per_device_train_batch_size": 16, "max_steps": 1}
    assert tiny_model("llama").config.head_dim == 16
    stock = train_stock("llama", tmp_path / "stock", {}, **rows)
    ours = train_offloaded("llama", tmp_path / "ours", {}, offload={**CHUNKED, "chunks.layers": 32}, **rows)
    assert_cut(ours, stock)


@pytest.mark.parametrize("value", [0, -4, 2.5, True, "yes"])
def test_a_chunk_of_no_tokens_is_refused(value: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^chunks\.layers: .* is not allowed; give a whole number .* \(tokens\), auto or false$"
    ):
        hf_lohan.OffloadConfig.load({"chunks.layers": value})


def test_what_needs_whole_layers_is_refused(tmp_path: Path) -> None:
    settings = {"max_steps": 1}
    with pytest.raises(ValueError, match=r"chunks\.layers: 6 would load each expert again for every chunk"):
        train_offloaded(
            "mixtral",
            tmp_path / "experts",
            {},
            offload={**CHUNKED, "experts": "streamed", "cpu_memory": "16MiB"},
            **settings,
        )
    with pytest.raises(ValueError, match="output_attentions=True needs the attention of all pairs of tokens"):
        overrides = {"output_attentions": True, "attn_implementation": "eager"}
        train_offloaded("llama", tmp_path / "attentions", overrides, offload=CHUNKED, **settings)


def test_routers_reach_the_auxiliary_loss(tmp_path: Path) -> None:
    router = {"output_router_logits": True, "router_aux_loss_coef": 1.0}
    stock = train_stock("mixtral", tmp_path / "stock", router, max_steps=3)
    offload = {**CHUNKED, "cpu_memory": "16MiB", "gpu_memory": "8MiB"}
    assert_cut(train_offloaded("mixtral", tmp_path / "ours", router, offload=offload, max_steps=3), stock)


def test_dropout_is_drawn_for_each_chunk_and_again_in_its_recomputation(tmp_path: Path) -> None:
    ours, kept = (
        train_offloaded("opt", tmp_path / way, {"dropout": 0.1}, offload={**CHUNKED, "activations": way}, max_steps=2)
        for way in ("recompute", "keep")
    )
    whole = train_offloaded("opt", tmp_path / "whole", {"dropout": 0.1}, offload=SMALL_BUDGETS, max_steps=2)
    assert_same_bits(ours, kept)
    assert ours.losses != whole.losses and ours.losses == pytest.approx(whole.losses, abs=0.1)


@pytest.mark.slow
def test_adapters_and_packed_rows(tmp_path: Path) -> None:
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
    rows = Dataset.from_dict({"text": [sentence * 3 for sentence in SENTENCES]})
    settings = {"packing": True, "max_length": 48, "dataset_num_proc": None, "per_device_train_batch_size": 1}
    for name, peft_config in (("all weights", None), ("adapters", adapters)):
        folder = save_checkpoint(tmp_path / name / "model")

        def sft(part: str, offload: Any, folder: Path = folder, peft_config: Any = peft_config) -> Run:
            args = sft_arguments("SFT", folder.parent / part, **settings)
            return run_trl("SFT", args, offload=offload, model=str(folder), train_dataset=rows, peft_config=peft_config)

        stock, ours = sft("stock", None), sft("ours", {**BUDGETS, "chunks.layers": 10, "activations": "recompute"})
        plan = run_plan_of(ours.trainer.offload_engine)
        assert plan is not None and plan.chunks is not None and plan.chunks.has_cut
        losses = [[entry["loss"] for entry in found.logs if "loss" in entry] for found in (ours, stock)]
        assert losses[0] == pytest.approx(losses[1], abs=2e-6) and len(losses[0]) > 0
        close(ours)


class CountsItsCalls(nn.Module):
    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own, self.calls = own, 0
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, hidden: torch.Tensor) -> Any:
        self.calls += 1
        self.seen += 1
        return self.own(hidden)


@pytest.mark.slow
def test_the_trial_of_a_layer_leaves_no_mark(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp = counts = CountsItsCalls(model.model.layers[1].mlp)
    offload = {**CHUNKED, "activations": "keep"}
    finish(hf_lohan.Trainer(model, arguments(tmp_path, max_steps=2), train_dataset=dataset(), offload=offload))
    assert counts.calls == int(counts.seen) == 2  # a forward of all chunks counts once, and so does its recomputation
