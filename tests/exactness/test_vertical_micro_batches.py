"""Each block runs all micro-batches of a step before the next block, and the result equals stock accumulation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import model_with_a_tower
from trajectories import arguments, assert_same_bits, assert_same_tensors, dataset, finish, train_offloaded, train_stock
from transformers import Trainer as StockTrainer
from transformers import TrainerCallback

import hf_lohan
from hf_lohan.config import OffloadConfig
from hf_lohan.engine.ranks import all_agree
from hf_lohan.huggingface.trainer import trainer as trainer_module
from hf_lohan.planning import why_not_together
from hf_lohan.ranks import Links
from hf_lohan.testing.models import tiny_model
from hf_lohan.testing.thread_ranks import run_ranks

NUM_STEPS = 4
BUDGETS = {"cpu_memory": "6MiB", "gpu_memory": "2MiB", "activations": "recompute"}
VERTICAL = {**BUDGETS, "vertical_micro_batches": True}
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "opt": {}, "mixtral": {"output_router_logits": True}, "gpt2": {}}
NUM_ROWS = 14
"""These rows make seven micro-batches, so the last step of each epoch has fewer than the others."""
SHORT: dict[str, Any] = {"num_rows": NUM_ROWS, "max_steps": NUM_STEPS}
ROWS = dataset(NUM_ROWS)


@pytest.mark.covering(0)
@pytest.mark.parametrize("accumulated", [2, 4])
@pytest.mark.parametrize(("max_grad_norm", "clip"), [(0.0, "auto"), (1.0, "defer"), (1.0, "speculate")])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_stock_accumulation(
    family: str, max_grad_norm: float, clip: str, accumulated: int, tmp_path: Path
) -> None:
    settings = {"gradient_accumulation_steps": accumulated, "max_grad_norm": max_grad_norm}
    stock = train_stock(family, tmp_path / "stock", FAMILIES[family], **SHORT, **settings)
    offload = {**VERTICAL, "_clip": clip}
    ours = train_offloaded(family, tmp_path / "ours", FAMILIES[family], offload=offload, **SHORT, **settings)
    assert_same_bits(ours, stock)


@pytest.mark.slow
def test_the_norm_of_parameters_larger_than_a_chunk(tmp_path: Path) -> None:
    """Micro-batches that run one after the other sum the norm by chunks, and it is sometimes an ulp off."""
    settings = {"gradient_accumulation_steps": 4, "max_grad_norm": 0.3}
    stock = train_stock("llama", tmp_path / "stock", {"vocab_size": 40_000}, **SHORT, **settings)
    offload = {**VERTICAL, "cpu_memory": "4MiB", "gpu_memory": "32MiB"}
    assert_same_bits(
        train_offloaded("llama", tmp_path / "ours", {"vocab_size": 40_000}, offload=offload, **SHORT, **settings), stock
    )


WAYS: dict[str, dict[str, Any]] = {
    "label_smoothing": {"label_smoothing_factor": 0.1},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
}


@pytest.mark.covering(0)
@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS.keys())
def test_label_smoothing_and_checkpointing_equal_stock(settings: dict[str, Any], tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": 4, **settings}
    stock = train_stock("opt", tmp_path / "stock", {}, **SHORT, **settings)
    assert_same_bits(train_offloaded("opt", tmp_path / "ours", {}, offload=VERTICAL, **SHORT, **settings), stock)


@pytest.mark.covering(0)
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_bfloat16_gradients_are_summed_in_float32(family: str, tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": 4, "bf16": True}
    one_by_one = {**BUDGETS, "vertical_micro_batches": False}
    in_turn = train_offloaded(family, tmp_path / "in_turn", {}, offload=one_by_one, **SHORT, **settings)
    assert_same_bits(train_offloaded(family, tmp_path / "together", {}, offload=VERTICAL, **SHORT, **settings), in_turn)


@pytest.mark.parametrize("drawn", ["dropout", "neftune_noise_alpha"])
def test_settings_that_draw_random_numbers_are_refused(drawn: str, tmp_path: Path) -> None:
    """Random numbers would be drawn layer by layer, so a micro-batch would get other numbers than in stock."""
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2}
    settings |= {"neftune_noise_alpha": 5.0} if drawn == "neftune_noise_alpha" else {}
    args = arguments(tmp_path, max_steps=1, **settings)
    model = tiny_model("opt", **{"dropout": 0.1} if drawn == "dropout" else {})
    trainer = hf_lohan.Trainer(model, args, train_dataset=ROWS, offload=VERTICAL)
    with pytest.raises(
        ValueError,
        match=f"vertical_micro_batches: true would draw .*{drawn}.*; set vertical_micro_batches to false or auto",
    ):
        trainer.train()
    trainer.offload_engine.close()


def test_buffers_that_the_forward_changes_are_refused(tmp_path: Path) -> None:
    """The last micro-batch would change them first. `auto` knows of running statistics before a step."""
    model = tiny_model("llama")
    layer = model.model.layers[1]
    layer.register_buffer("count", torch.zeros(()))
    layer.register_forward_pre_hook(lambda module, _args: module.count.add_(1) and None)
    args = arguments(tmp_path, max_steps=1, gradient_accumulation_steps=2)
    trainer = hf_lohan.Trainer(model, args, train_dataset=ROWS, offload=VERTICAL)
    with pytest.raises(ValueError, match=r"the buffer model\.layers\.1\.count, .*\(vertical_micro_batches: false\)"):
        trainer.train()
    trainer.offload_engine.close()
    other = tiny_model("llama")
    assert why_not_together(other) is None
    other.model.layers[1].mlp.add_module("norm", torch.nn.BatchNorm1d(64))
    assert why_not_together(other) == (
        "model.layers.1.mlp.norm keeps running statistics, which the order of micro-batches would change"
    )


def test_a_hook_without_a_module_may_keep_state() -> None:
    """Methods of built-in types have no module."""
    model = tiny_model("llama")
    model.model.layers[1].register_forward_hook([].append)
    assert why_not_together(model) == "model.layers.1 has a hook of builtins, which may keep state"


@pytest.mark.parametrize("reasons", [(None, None), ("it has a hook", None), (None, "it has a hook")])
@pytest.mark.parametrize("num_with_tokens", [2, 1])
def test_ranks_choose_an_order_together(
    reasons: tuple[str | None, str | None], num_with_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank with a reason asks for no plan, and the other ranks would wait for it."""
    monkeypatch.setattr(trainer_module, "why_trainer_runs_in_turn", lambda trainer: trainer.reason)

    def choose(links: Links) -> bool:
        rank = links.ranks.rank
        trainer: Any = SimpleNamespace(args=SimpleNamespace(gradient_accumulation_steps=2), reason=reasons[rank])
        engine: Any = SimpleNamespace(
            config=OffloadConfig(vertical_micro_batches="auto"),
            links=links,
            choose_order=lambda _shape: all_agree(links, "whether micro-batches run together", True),
        )
        inputs = {"input_ids": torch.zeros(2, 16, dtype=torch.long)} if rank < num_with_tokens else {}
        return hf_lohan.Trainer._choose_order(trainer, engine, inputs)

    assert run_ranks(2, choose) == [reasons == (None, None) and num_with_tokens == 2] * 2


@pytest.mark.slow
def test_a_model_with_a_tower_runs_its_micro_batches_one_after_the_other(tmp_path: Path) -> None:
    """A micro-batch of text alone would not pass the tower, and the others would."""
    model = model_with_a_tower()
    reason = why_not_together(model)
    assert reason is not None and "does not reach model.vision_tower.encoder.layers.0" in reason
    args = arguments(tmp_path, max_steps=1, gradient_accumulation_steps=2)
    trainer = hf_lohan.Trainer(model, args, train_dataset=ROWS, offload=VERTICAL)
    with pytest.raises(ValueError, match=r"must pass the same layers, .*\(vertical_micro_batches: false or auto\)"):
        trainer.train()
    trainer.offload_engine.close()


@pytest.mark.slow
def test_a_streamed_model_with_updates_in_backward_equals_stock(tmp_path: Path) -> None:
    """Gradients are not held, although micro-batches are accumulated."""
    settings = {"gradient_accumulation_steps": 4, "max_grad_norm": 0.0}
    stock = train_stock("llama", tmp_path / "stock", {}, **SHORT, **settings)
    tiny_model("llama").save_pretrained(tmp_path / "checkpoint")
    trainer = hf_lohan.Trainer(
        str(tmp_path / "checkpoint"),
        arguments(tmp_path / "ours", max_steps=NUM_STEPS, **settings),
        train_dataset=ROWS,
        offload=VERTICAL,
    )
    assert_same_bits(finish(trainer), stock)
    assert not trainer.offload_engine.layout.holds_gradients


class EndsEpoch(TrainerCallback):
    """Ends the epoch in the middle of a step, once."""

    num_substeps = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_substeps += 1
        control.should_epoch_stop = self.num_substeps == 2


def test_an_epoch_that_ends_in_the_middle_of_a_step_equals_stock(tmp_path: Path) -> None:
    """Stock keeps the gradients of that step, and the next step adds to them."""
    args = {"max_steps": 2, "gradient_accumulation_steps": 4}
    options: dict[str, Any] = {"train_dataset": ROWS, "callbacks": [EndsEpoch()]}
    stock = finish(StockTrainer(tiny_model("llama"), arguments(tmp_path / "stock", **args), **options))
    options["callbacks"] = [EndsEpoch()]
    ours = hf_lohan.Trainer(tiny_model("llama"), arguments(tmp_path / "ours", **args), **options, offload=VERTICAL)
    assert_same_tensors(finish(ours).weights, stock.weights)
