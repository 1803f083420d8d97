#!/usr/bin/env python
"""Supervised fine-tuning with TRL on local text, in memory or with its training state on SSD.

    python scripts/sft.py --model_name_or_path models/llama-3-8b --offload configs/lohan.yaml \\
        --train_file notes.jsonl --eval_file heldout.jsonl --packing --output_dir outputs/sft

It accepts all flags of TRL's own script (`trl.SFTConfig` and `trl.ModelConfig`, including LoRA) and `--config
file.yaml`. Without --offload it is a plain TRL run. It prints the held-out loss before and after training.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import text_data
from trl import ModelConfig, SFTConfig, TrlParser, get_peft_config

from hf_lohan import LohanArguments
from hf_lohan.trl import SFTTrainer  # instead of `from trl import SFTTrainer`


@dataclass
class RunArguments:
    """The text."""

    train_file: list[str] = field(metadata={"help": "Local .txt, .json, .jsonl, .parquet or .csv files of one kind."})
    eval_file: list[str] = field(
        default_factory=list, metadata={"help": "Held-out files, in the same formats as --train_file."}
    )
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Evaluate only on this number of first documents."}
    )


@dataclass(repr=False)
class SFTArguments(LohanArguments, SFTConfig):
    """TRL's arguments, and `offload`, which the trainer reads."""


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, evaluate and save. Returns the held-out losses. Bad input ends it with one line and exit status 1."""
    parser = TrlParser((RunArguments, SFTArguments, ModelConfig))
    try:
        run_args, args, model_args = parser.parse_args_and_config(argv, fail_with_unknown_args=True)
        trainer = prepare(run_args, args, model_args)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    losses = {}
    if trainer.eval_dataset is not None:
        losses["before"] = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if trainer.eval_dataset is not None:
        losses["after"] = trainer.evaluate()["eval_loss"]
        print(f"held-out loss: {losses['before']:.4f} before, {losses['after']:.4f} after")
    trainer.save_model()
    return losses


def prepare(run_args: RunArguments, args: SFTConfig, model_args: ModelConfig) -> SFTTrainer:
    """Return a trainer that is ready to run. Raises ValueError or OSError for bad input."""
    args.model_init_kwargs = {
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
        "revision": model_args.model_revision,
        **(args.model_init_kwargs or {}),
    }
    held_out = text_data.read_documents(run_args.eval_file) if run_args.eval_file else None
    if held_out is not None and run_args.max_eval_samples is not None:
        held_out = held_out.select(range(min(run_args.max_eval_samples, len(held_out))))
    return SFTTrainer(
        model=model_args.model_name_or_path,
        args=args,
        train_dataset=text_data.read_documents(run_args.train_file),
        eval_dataset=held_out,
        peft_config=get_peft_config(model_args),
    )


if __name__ == "__main__":
    main()
