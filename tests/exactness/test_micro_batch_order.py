"""`vertical_micro_batches: auto` runs micro-batches together if that is faster and nothing forbids it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import slow_but
from trajectories import arguments, assert_same_tensors, dataset, finish, logged, stored_weights
from transformers import Trainer as StockTrainer
from transformers import TrainerCallback

import hf_lohan
from hf_lohan.costs import HardwareProfile
from hf_lohan.planning import run_plan
from hf_lohan.testing.models import tiny_model

BUDGETS = {"cpu_memory": "6MiB", "gpu_memory": "2MiB", "_resident_records": "none"}
ACCUMULATED = 4
ROWS = dataset(2 * ACCUMULATED * 3)
SLOW, FAST = 1e6, 1e12
REASON = "vertical_micro_batches: auto runs micro-batches one after the other: "


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the measured bandwidth of the drive, in bytes per second."""

    def measured(bytes_per_s: float) -> None:
        hardware = HardwareProfile.from_mapping(
            {
                "device": {"flops_per_s": 50e9, "memory_bytes": "1GB", "shares_cpu": True},
                "h2d_bytes_per_s": "10GB/s",
                "d2h_bytes_per_s": "10GB/s",
                "ssd": [{"read_bytes_per_s": bytes_per_s, "write_bytes_per_s": bytes_per_s, "capacity_bytes": "1TB"}],
                "cpu": {"memory_bytes": "4GB", "optimizer_params_per_s": 1e9},
            }
        )
        monkeypatch.setattr(run_plan, "cached_hardware", lambda *_args, **_kwargs: hardware)

    return measured


def trained(folder: Path, trainer_class: Any = hf_lohan.Trainer, model: Any = None, **settings: Any) -> Any:
    """Return an offloaded trainer after two steps, or `max_steps`."""
    offload = settings.pop("offload", BUDGETS)
    rest = {name: settings.pop(name) for name in ("callbacks", "compute_loss_func") if name in settings}
    args = arguments(folder, **{"max_steps": 2, "gradient_accumulation_steps": ACCUMULATED, **settings})
    model = model or tiny_model("llama")
    trainer = trainer_class(model, args, train_dataset=ROWS, offload=offload, **rest)
    trainer.train()
    return trainer


def ran_together(trainer: Any) -> bool:
    plan = json.loads((Path(trainer.args.output_dir) / "lohan" / "plan.json").read_text())
    num_together = trainer.offload_engine.planned_memory.num_together
    assert plan["num_together"] == num_together
    return num_together > 1


def llama() -> Any:
    return tiny_model("llama")


def adapted_llama() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


@pytest.mark.covering(0)
@pytest.mark.parametrize(("make_model", "max_grad_norm"), [(llama, 0.0), (llama, 1.0), (adapted_llama, 0.1)])
def test_the_speed_of_the_drive_changes_the_order_and_no_bit(
    make_model: Any, max_grad_norm: float, drive: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The losses of twelve micro-batches are added for the log as in stock."""
    settings = {"max_grad_norm": max_grad_norm, "max_steps": 3, "logging_steps": 3}
    args = arguments(tmp_path / "stock", gradient_accumulation_steps=ACCUMULATED, **settings)
    stock = finish(StockTrainer(make_model(), args, train_dataset=ROWS))
    for bytes_per_s in (SLOW, FAST):
        caplog.clear()
        drive(bytes_per_s)
        with caplog.at_level(logging.INFO, logger="hf_lohan"):
            trainer = trained(tmp_path / str(bytes_per_s), model=make_model(), **settings)
        assert ran_together(trainer) == (bytes_per_s == SLOW)
        assert "its micro-batches together (one after the other: " in caplog.text or bytes_per_s == FAST
        assert REASON not in caplog.text
        assert logged(trainer) == (stock.losses, stock.norms, stock.learning_rates)
        assert_same_tensors(stored_weights(trainer), stock.weights)
        trainer.offload_engine.close()


def test_another_number_of_micro_batches_is_planned_anew(drive: Any, tmp_path: Path) -> None:
    """The same trainer trains again with one micro-batch per step."""
    drive(SLOW)
    trainer = trained(tmp_path)
    engine = trainer.offload_engine
    assert trainer._runs_together
    trainer.args.gradient_accumulation_steps = 1
    trainer.train()
    assert trainer.offload_engine is engine and not trainer._runs_together
    engine.close()


class CustomLoss(hf_lohan.Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class CustomStep(hf_lohan.Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


class Watch(TrainerCallback):
    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass


def mean_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return outputs.logits.float().mean()


def model_with_a_hook() -> Any:
    model = tiny_model("llama")
    model.model.norm.weight.register_hook(lambda gradient: gradient)
    return model


def model_with_a_drawing_layer() -> Any:
    model = tiny_model("llama")
    model.model.embed_tokens.register_forward_hook(lambda _module, _args, output: output + torch.rand_like(output))
    return model


FORBIDDEN: dict[str, tuple[dict[str, Any], str]] = {
    "compute_loss": ({"trainer_class": CustomLoss}, "CustomLoss overrides compute_loss"),
    "training_step": ({"trainer_class": CustomStep}, "CustomStep overrides training_step"),
    "compute_loss_func": ({"compute_loss_func": mean_loss}, "compute_loss_func"),
    "neftune": ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
    "callback": ({"callbacks": [Watch()]}, "on_substep_end of Watch"),
    "dropout": ({"model": ("opt", {"dropout": 0.1})}, "dropout=0.1"),
    "router": ({"model": ("mixtral", {"output_router_logits": True})}, "output_router_logits"),
    "hook": ({"model": model_with_a_hook}, "model.norm.weight has a hook"),
    "hook of a layer": ({"model": model_with_a_drawing_layer}, "model.embed_tokens has a hook of "),
}


@pytest.mark.parametrize("name", slow_but(("compute_loss", "dropout"), FORBIDDEN))
def test_the_reason_against_running_together_is_logged_once(
    name: str, drive: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drive(SLOW)
    options, words = FORBIDDEN[name]
    if isinstance(model := options.get("model"), tuple):
        options = {**options, "model": tiny_model(model[0], **model[1])}
    elif model is not None:
        options = {**options, "model": model()}
    with caplog.at_level(logging.INFO, logger="hf_lohan"):
        trainer = trained(tmp_path, **options)
    assert not ran_together(trainer)
    trainer.offload_engine.close()
    messages = [record.getMessage() for record in caplog.records if REASON in record.getMessage()]
    assert len(messages) == 1 and words in messages[0], messages
