"""Train an engine and read everything it stores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_lohan.engine import OffloadEngine
from hf_lohan.optim import OffloadAdamW
from hf_lohan.testing.models import tiny_batch

Offload = Callable[..., OffloadEngine]
INDEX = Path("lohan") / "optimizer_index.json"

FORMATS = pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [(torch.float32, "float32"), (torch.bfloat16, "float32"), (torch.float32, "bfloat16"), (torch.bfloat16, "int8")],
)


def train(engine: OffloadEngine, seeds: range, *, max_norm: float = 0.5) -> None:
    model: Any = engine.model
    optimizer = engine.optimizer or OffloadAdamW(model.parameters(), lr=1e-3, engine=engine)
    for seed in seeds:
        torch.manual_seed(seed)
        model.train()(**tiny_batch(seed=seed)).loss.backward()
        engine.clip_grad_norm(max_norm)
        optimizer.step()
        optimizer.zero_grad()


def everything(engine: OffloadEngine) -> dict[str, Any]:
    access = engine.parameters
    values: dict[str, Any] = {}
    for part in engine.parameter_slices:
        for kind in ("param", *access.state_kinds(part.name)):
            values[f"{part.name}.{kind}"] = access.read_flat(part.name, kind)
        values[f"{part.name}.num_updates"] = engine.step_counts[part]
    return values
