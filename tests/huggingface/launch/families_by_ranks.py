"""Trainer over several families in turn: `[torchrun ...] families_by_ranks.py <folder> <what> <family> ...`.

`what` is "stock": one stock process that accumulates the batches of all ranks. "first": two ranks that end in the
middle. "rest": two ranks that resume. "vertical": two ranks with joint micro-batches. "accumulated": two stock
micro-batches per rank. "until-4": all started ranks resume up to step 4. "parts": a stock process that accumulates the
batches of the ranks of each part. Each run writes its log and weights to `<folder>/<what>/<family>`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from trained_by_ranks import NUM_RANKS, OFFLOAD, rows
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import hf_lohan
from hf_lohan.testing.models import tiny_model

NUM_STEPS = 6
ENDS_AFTER = 3


EXPERTS = "experts one by one"
"""A family: mixtral whose experts stream one by one. It does not clip, because its norm is not torch's."""
PARTS = {2: 2, 3: 1, 5: 4, 6: 2}
"""The number of ranks of each part of a run, by its last step."""


class EndsInTheMiddle(TrainerCallback):
    """Ends a run after a step, with or without a checkpoint."""

    def __init__(self, after: int, *, saves: bool = False) -> None:
        self._after = after
        self._saves = saves

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._after:
            control.should_training_stop = True
            control.should_save = self._saves


def model_of(family: str) -> Any:
    return tiny_model("mixtral" if family == EXPERTS else family, num_layers=2)


def arguments(output_dir: Path, accumulation: int, family: str = "") -> TrainingArguments:
    return TrainingArguments(
        str(output_dir),
        max_steps=NUM_STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        weight_decay=0.1,
        max_grad_norm=0.0 if family == EXPERTS else 0.5,
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
    data: dict[str, Any] = {"train_dataset": rows(40, seed=1)}  # 1.5 epochs
    if what in ("stock", "accumulated"):
        trainer = Trainer(model, args, **data)
    else:
        callbacks = [EndsInTheMiddle(ENDS_AFTER)] if what == "first" else []
        offload = {**OFFLOAD, "vertical_micro_batches": what == "vertical"}
        trainer = hf_lohan.Trainer(model, args, **data, callbacks=callbacks, offload=offload)
    trainer.train(resume_from_checkpoint="last_step" if what == "rest" else None)
    trainer.save_model(str(folder / what / family))
    if args.process_index == 0:
        (folder / what / family / "log.json").write_text(json.dumps(trainer.state.log_history))
    if isinstance(trainer, hf_lohan.Trainer):
        trainer.offload_engine.close()


def train_until(folder: Path, last_step: int, family: str) -> None:
    """Train one part of a run from the last step of the previous part."""
    args = arguments(folder / "cut", 1, family)
    of_experts = {"experts": "streamed", "experts.lazy": False} if family == EXPERTS else {}
    trainer = hf_lohan.Trainer(
        model_of(family),
        args,
        train_dataset=rows(40, seed=1),  # type: ignore[arg-type]
        callbacks=[EndsInTheMiddle(last_step, saves=family == EXPERTS)],
        offload={**OFFLOAD, **of_experts},
    )
    resume = "last_step" if last_step > min(PARTS) else None
    if family == EXPERTS and last_step == NUM_STEPS:
        resume = f"{args.output_dir}/checkpoint-{sorted(PARTS)[-2]}"
    trainer.train(resume_from_checkpoint=resume)
    if last_step == NUM_STEPS:
        trainer.save_model(str(folder / "until-6" / family))
        if args.process_index == 0:
            (folder / "until-6" / family / "log.json").write_text(json.dumps(trainer.state.log_history))


def train_parts(folder: Path, family: str) -> None:
    """Train all parts in one stock process that accumulates the batches of the ranks."""
    checkpoint: str | None = None
    for last_step, num_ranks in PARTS.items():
        args = arguments(folder / "stock-parts", num_ranks, family)
        callbacks = [EndsInTheMiddle(last_step, saves=True)]
        data: dict[str, Any] = {"train_dataset": rows(40, seed=1)}
        # The stock Trainer resumes without experts that a checkpoint has one by one, which `from_pretrained` loads.
        is_loaded = family == EXPERTS and checkpoint is not None
        model = AutoModelForCausalLM.from_pretrained(checkpoint) if is_loaded else model_of(family)
        trainer = Trainer(model, args, callbacks=callbacks, **data)
        trainer.train(resume_from_checkpoint=checkpoint)
        checkpoint = f"{args.output_dir}/checkpoint-{last_step}"
    trainer.save_model(str(folder / "parts" / family))
    (folder / "parts" / family / "log.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for family in sys.argv[3:]:
        if sys.argv[2] == "parts":
            train_parts(Path(sys.argv[1]), family)
            continue
        if sys.argv[2].startswith("until-"):
            train_until(Path(sys.argv[1]), int(sys.argv[2].removeprefix("until-")), family)
            continue
        train(Path(sys.argv[1]), sys.argv[2], family)
