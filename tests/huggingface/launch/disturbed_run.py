"""A script with Trainer, which a launcher offloads: `disturbed_run.py <folder> <options as JSON>`. It kills some of its
processes. `dies`: (attempt, step, rank) of each, where rank -1 is the last.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_lohan.testing.models import tiny_model

OPTIONS: dict[str, Any] = {"dies": [], "waits_s": 0.0, "resume": None, "family": "llama", "path": None}
NUM_RANKS = int(os.environ["WORLD_SIZE"])
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class Dies(TrainerCallback):
    def __init__(self, folder: str, options: dict[str, Any]) -> None:
        self._steps, self._options = f"{folder}-steps", options

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(self._options["waits_s"])
        for attempt, step, rank in self._options["dies"]:
            if (attempt, step, rank % NUM_RANKS) == (ATTEMPT, state.global_step, args.process_index):
                os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.process_index == 0:
            with open(self._steps, "a") as file:
                file.write(f"{state.global_step}/{NUM_RANKS}\n")


def mostly_the_first_two(_router: Any, _args: Any, output: Any) -> Any:
    *others, index = output
    return *others, torch.arange(index.numel()).view(index.shape) % 2 + 2 * (index % 4 == 3)


def main(folder: str, options: dict[str, Any]) -> None:
    rows = torch.randint(5, 60, (64, 8), generator=torch.Generator().manual_seed(3)).tolist()
    args = TrainingArguments(
        folder, max_steps=9, per_device_train_batch_size=1, gradient_accumulation_steps=2 // NUM_RANKS,
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    model = options["path"] or tiny_model(options["family"], num_layers=2)
    rows = Dataset.from_dict({"input_ids": rows, "labels": rows})
    trainer = Trainer(model, args, train_dataset=rows, callbacks=[Dies(folder, options)])
    for module in trainer.model.modules():
        if type(module).__name__ == "MixtralTopKRouter":
            module.register_forward_hook(mostly_the_first_two)
    trainer.train(resume_from_checkpoint=options["resume"])
    trainer.save_model(f"{folder}/final")
    if args.process_index == 0:
        trainer.state.save_to_json(f"{folder}/state.json")


if __name__ == "__main__":
    main(sys.argv[1], OPTIONS | json.loads(sys.argv[2]))
