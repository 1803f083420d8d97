"""TrainingArguments that users set give the numbers of the stock Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from covering import slow_but
from trajectories import SMALL_BUDGETS, arguments, assert_same_tensors, dataset, stored_weights
from transformers import Trainer as StockTrainer
from transformers.trainer_utils import SchedulerType

import hf_lohan
from hf_lohan.testing.models import tiny_model

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
MIN_LR = {"lr_scheduler_kwargs": {"min_lr": 1e-4}}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "linear": {
        "auto_find_batch_size": True, "train_sampling_strategy": "group_by_length", "warmup_steps": 0.5,
        "label_smoothing_factor": 0.1, "torch_empty_cache_steps": 1, "skip_memory_metrics": False,
    },
    "cosine": {
        "max_steps": -1, "num_train_epochs": 1.5, "per_device_train_batch_size": 6, "dataloader_drop_last": True,
        "gradient_accumulation_steps": 3, "average_tokens_across_devices": False, "ignore_data_skip": True,
    },
    "cosine_with_restarts": {
        **EVALUATED, "eval_accumulation_steps": 2, "eval_on_start": True, "eval_delay": 1,
        "accelerator_config": {"use_seedable_sampler": False}, "optim_target_modules": "all-linear",
    },
    "polynomial": {
        **EVALUATED, "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True,
        "metric_for_best_model": "loss", "greater_is_better": True, "save_total_limit": 1,
    },
    "constant": {"seed": 5, "data_seed": 7, "neftune_noise_alpha": 5.0, "debug": "underflow_overflow"},
    "constant_with_warmup": {
        "dataloader_num_workers": 2, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 3,
        "save_strategy": "steps", "save_steps": 2, "save_only_model": True, "save_total_limit": 2,
    },
    "inverse_sqrt": {**CHECKPOINTING, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
    "reduce_lr_on_plateau": {**EVALUATED, "prediction_loss_only": True, "eval_use_gather_object": True},
    "cosine_with_min_lr": {**MIN_LR, "logging_steps": 0.5, "logging_first_step": True},
    "cosine_warmup_with_min_lr": {**MIN_LR, "include_num_input_tokens_seen": "all", "logging_nan_inf_filter": False},
    "warmup_stable_decay": {
        "lr_scheduler_kwargs": {"num_decay_steps": 2},
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"every_n_layers": 2},
    },
    "greedy": {**EVALUATED, "save_strategy": "best", "metric_for_best_model": "loss", "max_grad_norm": 0.0},
}  # fmt: skip
"""Each schedule has several arguments, so that few runs test all arguments."""
_OF_THE_MACHINE = ("runtime", "per_second")


QUICK = ("linear", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy")


@pytest.mark.parametrize("schedule", slow_but(QUICK, [kind.value for kind in SchedulerType]))
def test_the_numbers_are_those_of_the_stock_trainer(schedule: str, tmp_path: Path) -> None:
    """Compare everything logged and the final weights, bit for bit."""
    changes = {"warmup_steps": 1, "weight_decay": 0.1, "max_steps": 4, **ARGUMENTS[schedule]}
    outcomes = []
    for kind, options in ((StockTrainer, {}), (hf_lohan.Trainer, {"offload": SMALL_BUDGETS})):
        folder = tmp_path / kind.__module__.partition(".")[0]
        trainer = kind(
            tiny_model("llama", num_layers=2),
            arguments(folder, lr_scheduler_type=schedule, **changes),
            train_dataset=dataset(32),
            eval_dataset=dataset(8),
            **options,
        )
        trainer.train()
        outcomes.append((numbers(trainer), trainer))
    (stock_numbers, stock), (our_numbers, ours) = outcomes
    assert our_numbers == stock_numbers and any("loss" in row for row in our_numbers)
    assert_same_tensors(stored_weights(ours), dict(stock.model.named_parameters()))
    ours.offload_engine.close()


def numbers(trainer: Any) -> list[dict[str, Any]]:
    """The logged values without times and memory."""
    return [
        {name: value for name, value in row.items() if not name.endswith(_OF_THE_MACHINE) and "mem_" not in name}
        for row in trainer.state.log_history
    ]
