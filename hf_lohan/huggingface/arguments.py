"""What a Trainer's arguments mean under offload."""

from __future__ import annotations

import logging
import os
from typing import Any

from transformers import TrainingArguments

logger = logging.getLogger(__name__)

BFLOAT16_MEANING = (
    "mixed_precision: bf16 means bf16=True under offload: bfloat16 weights with exact float32 masters, without autocast"
)


def precision_asked(
    device_placement: bool = True, split_batches: Any = None, mixed_precision: Any = None, *rest: Any, **kwargs: Any
) -> str:
    """The mixed precision of an `Accelerator` with these arguments, by its arguments or the launcher."""
    return str(mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no").lower()


def take_launched_precision(args: TrainingArguments) -> bool:
    """Set `bf16=True` if the launcher asks for bfloat16 and the arguments do not. Returns whether it does."""
    if args.bf16 or getattr(args, "mixed_precision", "no") != "bf16":
        return False
    logger.info(BFLOAT16_MEANING)
    args.bf16 = True
    return True
