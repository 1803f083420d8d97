"""Train many steps and print the memory of the process at intervals; `test_growth` runs it in a new process.

python train_many_steps.py OUT NUM_STEPS LOOK_EVERY
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback, TrainingArguments

import hf_lohan
from hf_lohan.hardware import anonymous_memory_bytes
from hf_lohan.testing.models import tiny_model


class Looks(TrainerCallback):
    """Counts anonymous memory and Python objects at intervals."""

    def __init__(self, every: int) -> None:
        self._every = every
        self.rows: list[dict[str, int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._every == 0:
            gc.collect()
            row = {"step": state.global_step, "anonymous_bytes": anonymous_memory_bytes()}
            self.rows.append({**row, "num_objects": len(gc.get_objects())})


def main(output_dir: str, num_steps: str, every: str) -> list[dict[str, int]]:
    torch.set_num_threads(2)
    rows = torch.randint(5, 250, (64, 32), generator=torch.Generator().manual_seed(3)).tolist()
    args = TrainingArguments(
        output_dir=output_dir, use_cpu=True, max_steps=int(num_steps), per_device_train_batch_size=2,
        max_grad_norm=1.0, report_to=[], logging_steps=int(num_steps), disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    looks = Looks(int(every))
    trainer = hf_lohan.Trainer(
        tiny_model("llama", num_layers=4),
        args,
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        callbacks=[looks],
        offload={"cpu_memory": "64MiB", "gpu_memory": "16MiB"},
    )
    trainer.train()
    return looks.rows


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(*sys.argv[1:])))
