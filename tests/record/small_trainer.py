"""A minimal Trainer of a tiny model on random rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from short_runs import short_arguments

import hf_lohan
from hf_lohan.testing.models import tiny_model, tiny_rows


def small_trainer(
    folder: Path, offload: dict[str, Any] | None, *, family: str = "llama", num_rows: int = 16, **arguments: Any
) -> hf_lohan.Trainer:
    rows = tiny_rows(num_rows)
    args = short_arguments(folder, **{"logging_steps": 500, **arguments})
    return hf_lohan.Trainer(tiny_model(family), args, train_dataset=rows, offload=offload)
