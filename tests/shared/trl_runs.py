"""Run a TRL trainer twice, stock and offloaded, and compare its logs and weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from equal_tensors import assert_same_tensors
from packaging.version import Version
from short_runs import SHORT_RUN
from tiny_tokenizer import SENTENCES, tiny_tokenizer
from torch import Tensor

import hf_lohan.trl
from hf_lohan import engine_of
from hf_lohan.testing.models import tiny_model

BUDGETS = {"cpu_memory": "8MiB", "gpu_memory": "2MiB"}
"""Two engines fit these budgets, each with two or three blocks on the device."""
NUM_STEPS = 3
IS_BEFORE_1_15 = Version(trl.__version__) < Version("1.15")
"""Whether this TRL draws adapters before it seeds, and computes log-probs in the dtype of the weights."""
_TIMES = ("runtime", "per_second", "step_time", "total_flos", "epoch")
NORM_RELATIVE_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Run:
    """The logs and final weights of a trainer."""

    trainer: Any
    logs: list[dict[str, Any]]
    weights: dict[str, Tensor]


def save_checkpoint(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    """Save a tiny model and its tokenizer."""
    tokenizer = tiny_tokenizer()
    tiny_model(family, eos_token_id=tokenizer.eos_token_id, **overrides).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def arguments(kind: str, folder: Path, **settings: Any) -> Any:
    """Arguments of a kind of trainer ("SFT", "DPO", ...) for a few steps in float32 on the CPU."""
    defaults = {**SHORT_RUN, "use_cpu": True, "bf16": False, "max_steps": NUM_STEPS}
    return getattr(trl, f"{kind}Config")(str(folder), **{**defaults, **settings})


def run(kind: str, args: Any, *, offload: Any = None, **options: Any) -> Run:
    """Make a trainer, which is stock if `offload` is None, and train."""
    if IS_BEFORE_1_15:
        torch.manual_seed(args.seed)  # a program has to seed before it makes the trainer
    if offload is None:
        trainer = getattr(trl, f"{kind}Trainer")(args=args, **options)
    else:
        trainer = getattr(hf_lohan.trl, f"{kind}Trainer")(args=args, offload=offload, **options)
    trainer.train()
    return Run(trainer, comparable(trainer.state.log_history), weights_of(trainer.model))


def weights_of(model: Any) -> dict[str, Tensor]:
    engine = engine_of(model)
    if engine is None:
        return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    access = engine.parameters
    return {name: access.read_parameter(name) for name, _ in model.named_parameters()}


def close(found: Run) -> None:
    """Close the engines of a run."""
    for model in (found.trainer.model, getattr(found.trainer, "ref_model", None)):
        engine = engine_of(model) if model is not None else None
        if engine is not None:
            engine.close()


def comparable(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a log without times."""
    return [{key: value for key, value in row.items() if not any(word in key for word in _TIMES)} for row in history]


def assert_same(ours: Run, stock: Run) -> None:
    """Check that all values are bitwise equal, except gradient norms, which are summed in another order."""
    assert len(ours.logs) == len(stock.logs) > 0
    for ours_row, stock_row in zip(ours.logs, stock.logs, strict=True):
        assert ours_row.keys() == stock_row.keys()
        for key, expected in stock_row.items():
            tolerance = NORM_RELATIVE_TOLERANCE * abs(expected) if key == "grad_norm" else 0.0
            assert abs(ours_row[key] - expected) <= tolerance, f"{key}: {ours_row[key]} against {expected}"
    assert_same_tensors(ours.weights, stock.weights)


def both(
    kind: str, folder: Path, settings: dict[str, Any], options: Callable[[], dict[str, Any]], **offload: Any
) -> tuple[Run, Run]:
    """Return the offloaded and the stock run. `options` makes the options of each run."""
    stock = run(kind, arguments(kind, folder / "stock", **settings), **options())
    ours = run(kind, arguments(kind, folder / "ours", **settings), offload={**BUDGETS, **offload}, **options())
    close(ours)
    return ours, stock


def lora(**settings: Any) -> Any:
    """Return the config of adapters for two matrices of each layer."""
    import peft

    return peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM", **settings}
    )


def texts(num_rows: int = 24) -> Dataset:
    return Dataset.from_dict({"text": SENTENCES[:num_rows]})


def preferences(num_rows: int = 12) -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": [f"block {index} goes" for index in range(num_rows)],
            "chosen": [" down to the disk"] * num_rows,
            "rejected": [" up when it is its turn"] * num_rows,
        }
    )


def judgements(num_rows: int = 12) -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": [f"block {index} goes" for index in range(num_rows)],
            "completion": [" down to the disk", " up and comes back"] * (num_rows // 2),
            "label": [True, False] * (num_rows // 2),
        }
    )


def prompts(num_rows: int = 12) -> Dataset:
    return Dataset.from_dict({"prompt": [f"block {index} goes" for index in range(num_rows)]})
