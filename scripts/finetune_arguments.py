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
    """A family of models, with the types in their configs, and default arguments for fine-tuning."""

    name: str
    model_types: tuple[str, ...]
    defaults: dict[str, Any]
    """Defaults for command line arguments."""


@dataclass
class ModelArguments:
    """The model and the location of its state."""

    model_name_or_path: str = field(metadata={"help": "A checkpoint folder, or the name of a model in the Hub."})
    model_revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit of a model in the Hub; default: main."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code from the model's repository."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "Default: the model's tokenizer."})
    dtype: str = field(
        default="float32",
        metadata={
            "choices": list(DTYPES),
            "help": "Dtype of the loaded weights. For bfloat16 training keep float32 and give --bf16, so that the "
            "store has exact float32 masters.",
        },
    )
    offload: str | None = field(
        default=None,
        metadata={
            "help": 'A YAML file (see configs/) or "lohan" (all automatic). Without this option everything is '
            "in memory."
        },
    )


@dataclass
class DataArguments:
    """The text, and how to cut it into rows."""

    train_file: list[str] = field(
        default_factory=list, metadata={"help": "Local .txt, .json, .jsonl, .parquet or .csv files of one kind."}
    )
    validation_file: list[str] = field(
        default_factory=list, metadata={"help": "Files for evaluation, in the same formats as --train_file."}
    )
    text_column: str | None = field(default=None, metadata={"help": "Default: 'text', or the only column with text."})
    validation_split_percentage: float = field(
        default=5.0, metadata={"help": "Share of the last blocks that is held out if --validation_file is missing."}
    )
    block_size: int | None = field(
        default=None, metadata={"help": "Tokens per row. Default: 1024, or the model's maximum."}
    )
    packing: bool = field(default=True, metadata={"help": "Join documents, and cut them into full rows."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train only on this number of first rows."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate only on this number of first rows."})
    resume: str | None = field(
        default=None,
        metadata={
            "nargs": "?",
            "const": "last",
            "help": "Continue from this checkpoint folder. Without a value, continue from the newer of the last "
            "checkpoint and the last committed step.",
        },
    )


def choose_block_size(wanted: int | None, config: Any) -> int:
    """Return the tokens per row. Raises ValueError if the model has fewer positions."""
    most: int = getattr(config, "max_position_embeddings", None) or sys.maxsize
    if wanted is None:
        return min(1024, most)
    if not 2 <= wanted <= most:
        raise ValueError(f"--block_size {wanted} is not possible; this model takes 2 to {most} tokens")
    return wanted


def checkpoint_to_resume(wanted: str | None, output_dir: str) -> str | bool | None:
    """Convert `wanted` (a folder, "last" or "last_step") into the value to pass to Trainer as `resume_from_checkpoint`.
    Raises ValueError if it does not
    exist.

    True is the newer of the last committed step and the last checkpoint.
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
