"""A script with Trainer whose processes share rows: `torchrun ... sequences_by_ranks.py <folder> <case> ...`. Each case
writes its log, and its weights by `save_model`, to `<folder>/<case>-<number of processes>`. One process is the stock
Trainer.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import TrainerCallback, TrainingArguments

import hf_lohan
from hf_lohan.testing.models import VOCAB_SIZE, tiny_model

LENGTH = 509
NUM_STEPS = 6
OFFLOAD = {
    "cpu_memory": "64MiB",
    "gpu_memory": "16MiB",
    "cpu_threads": 1,
    "_io_threads": 1,
    "durability": "step",
    "commit_every": 1,
}
NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def rows(case: str) -> Dataset:
    """Return rows of 509 tokens. The labels of some tokens are ignored."""
    generator = torch.Generator().manual_seed(3)
    found: dict[str, list[Any]] = {"input_ids": [], "labels": []}
    for number in range(16):
        ids = torch.randint(5, VOCAB_SIZE, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: 20 * number] = -100
        if case == "packed":
            lengths = [100 + number, 7, 250, LENGTH - 357 - number]
            positions = torch.cat([torch.arange(length) for length in lengths])
            labels[positions == 0] = -100
            found.setdefault("position_ids", []).append(positions.tolist())
        elif case == "padded":
            mask = (torch.arange(LENGTH) < LENGTH - 9 * number).long()
            labels[mask == 0] = -100
            found.setdefault("attention_mask", []).append(mask.tolist())
        else:
            found.setdefault("attention_mask", []).append([1] * LENGTH)
        found["input_ids"].append(ids.tolist())
        found["labels"].append(labels.tolist())
    return Dataset.from_dict(found)


def model_of(case: str) -> Any:
    if case == "windowed":
        torch.manual_seed(0)
        config = transformers.MistralConfig(
            vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, sliding_window=100, use_cache=False,
        )  # fmt: skip
        return transformers.MistralForCausalLM(config)
    heads = {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 7} if case == "seven_heads" else {}
    attention = {"attn_implementation": "eager"} if case == "eager" else {}
    return tiny_model("llama", max_position_embeddings=512, **heads, **attention)


def arguments(case: str, folder: Path) -> TrainingArguments:
    run = {"checkpoint": "clipped", "after_kill": "killed"}.get(case, case)
    clips = run in ("clipped", "killed")
    return TrainingArguments(
        str(folder / f"run-{run}-{NUM_RANKS}"), max_steps=NUM_STEPS,
        per_device_train_batch_size=2 if case in ("padded", "packed") else 1,
        gradient_accumulation_steps=2 if case == "accumulated" else 1, learning_rate=1e-3, weight_decay=0.1,
        max_grad_norm=0.5 if clips else 0.0 if case == "plain" else 1.0, logging_steps=1, save_steps=4,
        eval_strategy="steps" if case == "padded" else "no", eval_steps=3,
        save_strategy="steps" if NUM_RANKS > 1 and clips else "no", use_cpu=True, report_to=[], disable_tqdm=True,
        seed=3,
    )  # fmt: skip


class Killed(TrainerCallback):
    """Kills rank 1 in the middle of a forward."""

    def __init__(self, model: Any) -> None:
        self._layer = model.model.layers[1]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (args.process_index, state.global_step) == (1, 2):
            self._layer.mlp.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def main(folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    for case in cases:
        model, args = model_of(case), arguments(case, folder)
        data = {"train_dataset": rows(case), "eval_dataset": rows(case)}
        if NUM_RANKS == 1:
            trainer: Any = transformers.Trainer(model, args, **data)
        else:
            offload = {**OFFLOAD, "ranks.per_row": NUM_RANKS}
            if case == "chunked":
                offload["chunks.layers"] = 50
            trainer = hf_lohan.Trainer(model, args, **data, offload=offload)
            if case == "killed":
                trainer.add_callback(Killed(model))
        checkpoint = str(folder / f"run-clipped-{NUM_RANKS}" / "checkpoint-4")
        trainer.train(resume_from_checkpoint={"checkpoint": checkpoint, "after_kill": "last_step"}.get(case))
        folder_of_case = folder / f"{case}-{NUM_RANKS}"
        trainer.save_model(str(folder_of_case))
        if args.process_index == 0:
            (folder_of_case / "log.json").write_text(json.dumps(trainer.state.log_history))
        if NUM_RANKS > 1:
            trainer.offload_engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
