"""Trainer over several families in turn: `[torchrun ...] families_by_ranks.py <folder> <what> <family> ...`.

`what`: "stock", one process with as much accumulation as there are ranks; "first", two ranks that end in the middle;
"rest", two that go on; "vertical", two ranks whose micro-batches pass each block together; "accumulated", two of stock.
Each leaves in `<folder>/<what>/<family>` what it logged, and the weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from trained_by_ranks import NUM_RANKS, OFFLOAD, rows
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_lohan
from hf_lohan.testing.models import tiny_model

NUM_STEPS = 6
ENDS_AFTER = 3


class EndsInTheMiddle(TrainerCallback):
    """Without a checkpoint."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == ENDS_AFTER


def arguments(output_dir: Path, accumulation: int) -> TrainingArguments:
    return TrainingArguments(
        str(output_dir),
        max_steps=NUM_STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        weight_decay=0.1,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )


def train(folder: Path, what: str, family: str) -> None:
    run = folder / ("run" if what in ("first", "rest") else what) / family
    args = arguments(run, accumulation=NUM_RANKS if what in ("stock", "vertical", "accumulated") else 1)
    model = tiny_model(family, num_layers=2)
    data: dict[str, Any] = {"train_dataset": rows(40, seed=1)}  # an epoch and a half
    if what in ("stock", "accumulated"):
        trainer = Trainer(model, args, **data)
    else:
        callbacks = [EndsInTheMiddle()] if what == "first" else []
        offload = {**OFFLOAD, "vertical_micro_batches": what == "vertical"}
        trainer = hf_lohan.Trainer(model, args, **data, callbacks=callbacks, offload=offload)
    trainer.train(resume_from_checkpoint="last_step" if what == "rest" else None)
    trainer.save_model(str(folder / what / family))
    if args.process_index == 0:
        (folder / what / family / "log.json").write_text(json.dumps(trainer.state.log_history))
    if isinstance(trainer, hf_lohan.Trainer):
        assert trainer.offload_engine is not None
        trainer.offload_engine.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for family in sys.argv[3:]:
        train(Path(sys.argv[1]), sys.argv[2], family)
