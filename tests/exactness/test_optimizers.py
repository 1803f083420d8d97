"""Optimizers other than AdamW equal stock bit for bit, also in interrupted and resumed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from covering import slow_but
from short_runs import StopsAfter
from trajectories import (
    SMALL_BUDGETS,
    arguments,
    assert_same_bits,
    assert_same_tensors,
    dataset,
    finish,
    logged,
    train_offloaded,
    train_stock,
)
from transformers import AutoModelForCausalLM
from transformers import Trainer as StockTrainer

import hf_lohan
from hf_lohan.files import ForeignStoreError
from hf_lohan.huggingface.models.export import export_model
from hf_lohan.model import hidden_matrices
from hf_lohan.testing.models import tiny_model

BY_ARGUMENTS: dict[str, dict[str, Any]] = {
    "sgd": {"optim": "sgd", "learning_rate": 0.1, "optim_args": "momentum=0.9,nesterov=true", "weight_decay": 0.1},
    "rmsprop": {"optim": "rmsprop", "optim_args": "momentum=0.9,centered=true", "gradient_accumulation_steps": 2},
    "adafactor": {"optim": "adafactor", "learning_rate": 1e-2, "weight_decay": 0.1},
}
NUM_STEPS = 4


@pytest.mark.covering(0)
@pytest.mark.parametrize("settings", BY_ARGUMENTS.values(), ids=BY_ARGUMENTS.keys())
def test_an_optimizer_named_by_the_arguments_equals_stock(settings: dict[str, Any], tmp_path: Path) -> None:
    settings = {"max_steps": NUM_STEPS, "lr_scheduler_type": "cosine", **settings}
    stock = train_stock("llama", tmp_path / "stock", {}, **settings)
    assert_same_bits(train_offloaded("llama", tmp_path / "ours", {}, **settings), stock, norms=False)


EIGHT_BITS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")


@pytest.mark.covering(0)
@pytest.mark.parametrize("optim", EIGHT_BITS)
def test_an_8_bit_adamw_stores_moments_in_int8(optim: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"max_steps": NUM_STEPS, "weight_decay": 0.1}
    int8 = {**SMALL_BUDGETS, "optimizer_state_dtype": "int8"}
    expected = train_offloaded("llama", tmp_path / "int8", {}, offload=int8, **settings)
    named = train_offloaded("llama", tmp_path / optim, {}, **settings, optim=optim)
    assert_same_bits(named, expected)
    (line,) = [record.getMessage() for record in caplog.records if "optim=" in record.getMessage()]
    assert line.startswith(f"optim='{optim}' means optimizer_state_dtype: int8, which rounds differently from bits")


@pytest.mark.slow
def test_the_paged_adamw_is_exact(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": NUM_STEPS, "weight_decay": 0.1}
    stock = train_stock("llama", tmp_path / "stock", {}, **settings, optim="adamw_torch_fused")
    assert_same_bits(train_offloaded("llama", tmp_path / "ours", {}, **settings, optim="paged_adamw_32bit"), stock)


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("offload", "message"),
    [
        (
            {"optimizer_state_dtype": "float32"},
            "means optimizer_state_dtype: int8, and optimizer_state_dtype is 'float32'",
        ),
        ({"optimizer": "muon"}, "means optimizer_state_dtype: int8, which is for AdamW alone, and optimizer is 'muon'"),
    ],
    ids=["another type", "another optimizer"],
)
def test_an_8_bit_adamw_with_other_settings_is_refused(offload: dict[str, Any], message: str, tmp_path: Path) -> None:
    args = arguments(tmp_path, optim="adamw_8bit")
    with pytest.raises(ValueError, match=message):
        hf_lohan.Trainer(tiny_model("llama"), args, train_dataset=dataset(), offload=offload)


def test_an_8_bit_adamw_for_a_model_streamed_with_exact_moments_is_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    offload = {**SMALL_BUDGETS, "ssd": str(tmp_path / "store")}
    model = hf_lohan.from_pretrained(tmp_path / "model", offload=offload, torch_device="cpu")
    with pytest.raises(
        ValueError, match="offloaded with optimizer_state_dtype: float32, and optimizer_state_dtype: int8 was asked for"
    ):
        hf_lohan.Trainer(model, arguments(tmp_path, optim="adamw_8bit"), train_dataset=dataset())
    hf_lohan.engine_of(model).close()


def trainer_over(folder: Path, model: Any = None, **settings: Any) -> Any:
    names = {"optimizers", "optimizer_cls_and_kwargs", "callbacks"} & settings.keys()
    given = {name: settings.pop(name) for name in names}
    return hf_lohan.Trainer(
        model or tiny_model("llama"),
        arguments(folder, max_steps=NUM_STEPS, **settings),
        train_dataset=dataset(),
        offload=SMALL_BUDGETS,
        **given,
    )


def weights_after(trainer: Any, resume: str | bool | None = None) -> dict[str, torch.Tensor]:
    return finish(trainer, resume).weights


LAYOUTS: dict[str, dict[str, Any]] = {
    "none": {"optim": "sgd", "learning_rate": 0.1},
    "one": {"optim": "lion_32bit"},
    "three": BY_ARGUMENTS["rmsprop"],
    "rows and columns": BY_ARGUMENTS["adafactor"],
    "matrices": {"optimizer_cls_and_kwargs": (torch.optim.Muon, {"lr": 1e-2})},
}


@pytest.mark.parametrize("layout", slow_but(("rows and columns",), LAYOUTS))
def test_exporting_and_resuming_change_no_bit(layout: str, tmp_path: Path) -> None:
    """Export, and resume from the last step and from a checkpoint, with each layout of optimizer states."""
    settings = {"lr_scheduler_type": "cosine", "save_strategy": "steps", "save_steps": 2, **LAYOUTS[layout]}
    undisturbed = weights_after(trainer_over(tmp_path / "undisturbed", **settings))
    assert export_model(tmp_path / "undisturbed", tmp_path / "exported") == NUM_STEPS
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert_same_tensors(undisturbed, dict(exported.named_parameters()))
    weights_after(trainer_over(tmp_path / "run", callbacks=[StopsAfter(3)], **settings))
    for resume in ("last_step", str(tmp_path / "run" / "checkpoint-2")):
        resumed = weights_after(trainer_over(tmp_path / "run", **settings), resume)
        assert_same_tensors(resumed, undisturbed)


def test_a_store_or_checkpoint_of_another_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    sgd = {**BY_ARGUMENTS["sgd"], "save_strategy": "steps", "save_steps": 2}
    weights_after(trainer_over(tmp_path / "run", **sgd))
    with pytest.raises(ForeignStoreError, match=r"states of SGD\(momentum_buffer\), and this run has AdamW.*set that"):
        trainer_over(tmp_path / "run").train(resume_from_checkpoint="last_step")
    other = trainer_over(tmp_path / "other")
    with pytest.raises(ValueError, match=r"are for SGD\(momentum_buffer\), and this run uses AdamW\(exp_avg,"):
        other.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    other.offload_engine.close()


def with_a_scheduler(model: Any) -> tuple[torch.optim.Optimizer, Any]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "momentum": 0.9}, {"params": vectors, "lr": 0.01}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def without_one(model: Any) -> tuple[torch.optim.Optimizer, Any]:
    return torch.optim.SGD(model.parameters(), lr=0.1), None


@pytest.mark.parametrize("optimizers", slow_but((with_a_scheduler,), (with_a_scheduler, without_one)))
def test_the_callers_optimizer_and_scheduler_equal_stock(optimizers: Any, tmp_path: Path) -> None:
    """Without a scheduler it gets the one of the arguments."""
    stock_model, model = tiny_model("llama"), tiny_model("llama")
    settings = {"learning_rate": 0.1, "lr_scheduler_type": "linear", "warmup_steps": 2}
    args = arguments(tmp_path / "stock", max_steps=NUM_STEPS, **settings)
    stock = StockTrainer(stock_model, args, train_dataset=dataset(), optimizers=optimizers(stock_model))
    stock.train()
    ours = trainer_over(tmp_path / "ours", model, optimizers=optimizers(model), **settings)
    weights = weights_after(ours)
    assert logged(ours)[2] == logged(stock)[2] and len(set(logged(ours)[2])) > 1
    assert_same_tensors(weights, dict(stock_model.named_parameters()))


def test_an_optimizer_class_over_a_streamed_model_equals_stock(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    given = (torch.optim.RMSprop, {"lr": 1e-3, "centered": True})
    stock_model = tiny_model("llama")
    args = arguments(tmp_path / "stock", max_steps=NUM_STEPS, weight_decay=0.1)
    StockTrainer(stock_model, args, train_dataset=dataset(), optimizer_cls_and_kwargs=given).train()
    streamed = trainer_over(
        tmp_path / "ours", str(tmp_path / "model"), optimizer_cls_and_kwargs=given, weight_decay=0.1
    )
    weights = weights_after(streamed)
    assert_same_tensors(weights, dict(stock_model.named_parameters()))


@pytest.mark.covering(0)
@pytest.mark.parametrize("clip", [0.0, 2.0], ids=["in_backward", "clipped"])
def test_muon_for_matrices_and_adamw_for_the_rest_equal_torch(clip: float, tmp_path: Path) -> None:
    settings = {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "max_grad_norm": clip}
    stock_model = tiny_model("llama").train()
    matrices = hidden_matrices(stock_model)
    of_layers = [p for p in stock_model.parameters() if p in matrices]
    rest = [p for p in stock_model.parameters() if p not in matrices]
    muon = torch.optim.Muon(of_layers, lr=1e-2, weight_decay=0.0)
    adamw = torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.0, fused=True)
    ours = trainer_over(tmp_path / "ours", optimizer_cls_and_kwargs=(torch.optim.Muon, {"lr": 1e-2}), **settings)
    batches: list[Any] = []
    stock_step = ours.training_step

    def noted(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        batches.append({name: value.clone() for name, value in inputs.items()})
        return stock_step(model, inputs, *args, **kwargs)

    ours.training_step = noted
    weights = weights_after(ours)
    for batch in batches:
        stock_model(**batch).loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(stock_model.parameters(), clip)
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    assert len(batches) == NUM_STEPS
    assert_same_tensors(weights, dict(stock_model.named_parameters()))


@pytest.mark.slow
def test_the_muon_setting_equals_the_muon_class(tmp_path: Path) -> None:
    """Command-line flags cannot name Muon, so a setting does. Muon gets AdamW's learning rate and weight decay."""
    settings = {"learning_rate": 1e-3, "weight_decay": 0.1}
    given = (torch.optim.Muon, {"lr": 1e-3, "adjust_lr_fn": "match_rms_adamw"})
    named = weights_after(trainer_over(tmp_path / "named", optimizer_cls_and_kwargs=given, **settings))
    offload: dict[str, Any] = {**SMALL_BUDGETS, "optimizer": "muon"}
    configured = train_offloaded(
        "llama", tmp_path / "configured", {}, offload=offload, max_steps=NUM_STEPS, **settings
    ).weights
    assert_same_tensors(configured, named)
    tiny_model("llama").save_pretrained(tmp_path / "model")
    offload["ssd"] = str(tmp_path / "streamed")
    model = hf_lohan.from_pretrained(tmp_path / "model", offload, torch_device="cpu")
    engine = hf_lohan.engine_of(model)
    assert "Muon(momentum_buffer)" in engine.layout.identity.optimizer
    engine.close()
