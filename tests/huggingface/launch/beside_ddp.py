"""A script that trains by the stock Trainer under DDP, and offloaded: `beside_ddp.py <folder> <case>...`. It forks both
ranks of each run. Each rank writes its log, and rank 0 the weights, to `<folder>/<case>/<side>`."""

from __future__ import annotations

import atexit
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from trained_by_ranks import OFFLOAD, is_forked_rank, rows
from transformers import Trainer, TrainingArguments

import hf_lohan
from hf_lohan.testing.models import tiny_model

SIDES = ("stock", "ours")
CASES: dict[str, dict[str, Any]] = {
    "buffers": {},
    "buffers_accumulated": {"gradient_accumulation_steps": 2},
    "own_buffers": {"ddp_broadcast_buffers": False},
}
"""Arguments of Trainer, and settings of the offloaded side."""
TIMES = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}


def _scaled(mlp: Any, x: Tensor) -> Tensor:
    """Scale by a running mean that each forward changes, as the codes of a quantizer do."""
    out: Tensor = type(mlp).forward(mlp, x)
    if mlp.training:
        mlp.scale.mul_(0.7).add_(0.3 * out.detach().abs().mean())
        mlp.count += 1
    return out / (1 + mlp.scale)


def model_with_buffers() -> Any:
    model = tiny_model("llama", num_layers=2)
    mlp: nn.Module = model.model.layers[1].mlp
    mlp.register_buffer("scale", torch.ones(()))
    mlp.register_buffer("count", torch.zeros((), dtype=torch.long))
    mlp.forward = types.MethodType(_scaled, mlp)
    return model


def train(folder: Path, side: str, offload: dict[str, Any] | None = None, **given: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    args = TrainingArguments(
        str(folder / "run"), max_steps=4, per_device_train_batch_size=2, per_device_eval_batch_size=2,
        learning_rate=1e-2, max_grad_norm=0.5, logging_steps=1, eval_strategy="steps", eval_steps=2, save_strategy="no",
        use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True, seed=3, **given,
    )  # fmt: skip
    data: dict[str, Any] = {"train_dataset": rows(40, seed=1), "eval_dataset": rows(7, seed=2)}
    if side == "stock":
        trainer = Trainer(model_with_buffers(), args, **data)
    else:
        trainer = hf_lohan.Trainer(model_with_buffers(), args, **data, offload=OFFLOAD | (offload or {}))
    trainer.train()
    trainer.save_model(str(folder / "model"))
    log = [{name: value for name, value in entry.items() if name not in TIMES} for entry in trainer.state.log_history]
    mlp: Any = trainer.model.model.layers[1].mlp  # type: ignore[union-attr]
    facts = {"log": log[:-1], "scale": float(mlp.scale), "count": int(mlp.count)}
    (folder / f"facts-{os.environ['RANK']}.json").write_text(json.dumps(facts))


def main(folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    statuses: dict[str, int] = {}
    for case in cases:
        for side in SIDES:
            if is_forked_rank(f"{case}/{side}", statuses):
                train(folder / case / side, side, **CASES[case])
                atexit._run_exitfuncs()
                os._exit(0)  # freeing all that was imported before the fork would copy it
    sys.exit(max(statuses.values()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
