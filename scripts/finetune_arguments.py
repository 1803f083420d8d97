"""Command line arguments of the fine-tuning scripts, besides those of `transformers.TrainingArguments`."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import get_last_checkpoint

import hf_lohan

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A family of models: the types in their configs, and default arguments for fine-tuning them."""

    name: str
    model_types: tuple[str, ...]
    defaults: dict[str, Any]
    """Defaults of command line arguments."""


@dataclass
class ModelArguments:
    """The model and the place of its state."""

    model_name_or_path: str = field(metadata={"help": "A checkpoint folder (with --offload), or also a Hub name."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "Default: the model's own."})
    dtype: str = field(
        default="float32",
        metadata={
            "choices": list(DTYPES),
            "help": "Dtype of the loaded weights, whatever it is on disk. For bfloat16 training keep float32 and give "
            "--bf16: the store then has exact float32 masters.",
        },
    )
    offload: str | None = field(
        default=None,
        metadata={"help": 'A YAML file (see configs/) or "lohan" (all automatic). Without: everything in memory.'},
    )


@dataclass
class DataArguments:
    """The text and how it is cut."""

    train_file: list[str] = field(
        default_factory=list, metadata={"help": "Local .txt, .json, .jsonl, .parquet or .csv files of one kind."}
    )
    validation_file: list[str] = field(default_factory=list, metadata={"help": "As --train_file, for evaluation."})
    text_column: str | None = field(default=None, metadata={"help": "Default: 'text', or the only text column."})
    validation_split_percentage: float = field(
        default=5.0, metadata={"help": "Without --validation_file: this last part of the blocks is held out."}
    )
    block_size: int | None = field(default=None, metadata={"help": "Tokens a row; default: 1024 or the model's most."})
    packing: bool = field(default=True, metadata={"help": "Join documents and cut them into full rows."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first rows only."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first rows only."})
    resume: str | None = field(
        default=None,
        metadata={
            "nargs": "?",
            "const": "last",
            "help": "Continue from this checkpoint folder. Without a value: "
            "from the last checkpoint or the last committed step, whichever is newer.",
        },
    )


def choose_block_size(wanted: int | None, config: Any) -> int:
    """Tokens a row. Raises ValueError if the model has fewer positions."""
    most: int = getattr(config, "max_position_embeddings", None) or sys.maxsize
    if wanted is None:
        return min(1024, most)
    if not 2 <= wanted <= most:
        raise ValueError(f"--block_size {wanted} is not possible; this model takes 2 to {most} tokens")
    return wanted


def checkpoint_to_resume(wanted: str | None, output_dir: str) -> str | bool | None:
    """Trainer's `resume_from_checkpoint` for a folder, "last" or "last_step". Raises ValueError if there is none.

    True is the last committed step or the last checkpoint, whichever is newer.
    """
    last: str | None = get_last_checkpoint(output_dir) if Path(output_dir).is_dir() else None
    step = hf_lohan.last_step(output_dir)
    if wanted is None:
        if last is not None or step is not None:
            what = last or f"step {step} in {output_dir}"
            logger.warning("starting anew although %s exists; give --resume to continue from it", what)
        return None
    if wanted.lower() in ("last", "true"):
        if last is None and step is None:
            raise ValueError(f"nothing to resume: no checkpoint in {output_dir!r}; check --output_dir")
        return True if step is not None else last
    if wanted == "last_step":
        return wanted
    if not (Path(wanted) / "trainer_state.json").is_file():
        raise ValueError(f"nothing to resume: {wanted!r} is not a Trainer checkpoint")
    return wanted
