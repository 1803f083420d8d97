"""A script that trains under DDP, by the stock Trainer or in a loop, and offloaded: `beside_ddp.py <folder> <case>...`.
It forks both ranks of each run. Each rank writes its log, and rank 0 the weights, to `<folder>/<case>/<side>`."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import accelerate
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
"""Arguments of Trainer."""
NO_SYNC = "no_sync"
"""The case of a loop that accumulates by `no_sync`."""
TIMES = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}


def _scaled(mlp: Any, x: Tensor) -> Tensor:
    """Scale by running means that each forward changes, as the codes of a quantizer do, or replaces."""
    out: Tensor = type(mlp).forward(mlp, x)
    if mlp.training:
        mlp.scale.mul_(0.7).add_(0.3 * out.detach().abs().mean())
        mlp.count += 1
        mlp.replaced = 0.9 * mlp.replaced + 0.1 * out.detach().abs().mean()
    return out / (1 + mlp.scale + mlp.replaced)


def model_with_buffers() -> Any:
    model = tiny_model("llama", num_layers=2)
    mlp: nn.Module = model.model.layers[1].mlp
    mlp.register_buffer("scale", torch.ones(()))
    mlp.register_buffer("replaced", torch.ones(()))
    mlp.register_buffer("count", torch.zeros((), dtype=torch.long))
    mlp.forward = types.MethodType(_scaled, mlp)
    return model


def accumulate(folder: Path, side: str) -> None:
    if side == "stock":
        accelerator = accelerate.Accelerator(cpu=True)
    else:
        plugin = hf_lohan.LohanPlugin(offload=OFFLOAD, ssd_path=folder / "store")
        accelerator = hf_lohan.Accelerator(cpu=True, lohan_plugin=plugin)
    model = model_with_buffers().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    loader = torch.utils.data.DataLoader(rows(24, seed=1), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    log = []
    for number, batch in enumerate(loader):
        with accelerator.no_sync(model) if number % 2 == 0 else contextlib.nullcontext():
            loss = model(**batch).loss / 2
            accelerator.backward(loss)
        log.append(loss.item())
        if number % 2:
            log.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))  # type: ignore[arg-type]
            optimizer.step()
            optimizer.zero_grad()
    weights = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        folder / "model", state_dict=weights, is_main_process=accelerator.is_main_process
    )
    write_facts(folder, log, accelerator.unwrap_model(model))


def write_facts(folder: Path, log: list[Any], model: Any) -> None:
    mlp = model.model.layers[1].mlp
    facts = {"log": log, "scale": float(mlp.scale), "count": int(mlp.count), "replaced": float(mlp.replaced)}
    (folder / f"facts-{os.environ['RANK']}.json").write_text(json.dumps(facts))


def train(folder: Path, side: str, **given: Any) -> None:
    args = TrainingArguments(
        str(folder / "run"), max_steps=4, per_device_train_batch_size=2, per_device_eval_batch_size=2,
        learning_rate=1e-2, max_grad_norm=0.5, logging_steps=1, eval_strategy="steps", eval_steps=2, save_strategy="no",
        use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True, seed=3, **given,
    )  # fmt: skip
    data: dict[str, Any] = {"train_dataset": rows(40, seed=1), "eval_dataset": rows(7, seed=2)}
    if side == "stock":
        trainer = Trainer(model_with_buffers(), args, **data)
    else:
        trainer = hf_lohan.Trainer(model_with_buffers(), args, **data, offload=OFFLOAD)
    trainer.train()
    trainer.save_model(str(folder / "model"))
    log = [{name: value for name, value in entry.items() if name not in TIMES} for entry in trainer.state.log_history]
    write_facts(folder, log[:-1], trainer.model)


def main(folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    statuses: dict[str, int] = {}
    for case in cases:
        for side in SIDES:
            if is_forked_rank(f"{case}/{side}", statuses):
                run = folder / case / side
                run.mkdir(parents=True, exist_ok=True)
                if case == NO_SYNC:
                    accumulate(run, side)
                else:
                    train(run, side, **CASES[case])
                atexit._run_exitfuncs()
                os._exit(0)  # freeing all that was imported before the fork would copy it
    sys.exit(max(statuses.values()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
