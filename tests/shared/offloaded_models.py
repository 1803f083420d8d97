"""Offloaded models whose engines close with the test, and the global state of Hugging Face's libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

import hf_lohan
from hf_lohan import engine_of
from hf_lohan.config import OffloadConfig
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.attachment import offload_model


@pytest.fixture(autouse=True)
def forget_global_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset accelerate's shared state, the environment variable that TrainingArguments sets and the number of
    threads."""
    num_threads = torch.get_num_threads()
    forget_accelerator_state()
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    yield
    torch.set_num_threads(num_threads)
    forget_accelerator_state()


def forget_accelerator_state() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture
def open_engines() -> Iterator[list[OffloadEngine]]:
    """Engines to close when the test ends."""
    engines: list[OffloadEngine] = []
    yield engines
    for engine in engines:
        engine.close()


def budgets(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    return {"cpu_memory": "4MiB", "gpu_memory": "2MiB", "ssd": str(folder), **settings}


@pytest.fixture
def offload(open_engines: list[OffloadEngine], tmp_path: Path) -> Callable[..., OffloadEngine]:
    """Offload a model from memory, with small budgets."""

    def build(model: Any, *, dtype: torch.dtype | None = None, **settings: Any) -> OffloadEngine:
        folder = tmp_path / f"store{len(open_engines)}"
        engine = offload_model(
            model,
            OffloadConfig.load(budgets(folder, settings)),
            torch_device="cpu",
            default_ssd_path=folder,
            working_dtype=dtype,
        )
        open_engines.append(engine)
        return engine

    return build


@pytest.fixture
def load_streamed(open_engines: list[OffloadEngine], tmp_path: Path) -> Callable[..., Any]:
    """Call `hf_lohan.from_pretrained` with small budgets."""

    def load(checkpoint: Path, *, settings: dict[str, Any] | None = None, **options: Any) -> Any:
        folder = tmp_path / f"store{len(open_engines)}"
        model = hf_lohan.from_pretrained(
            checkpoint, offload=budgets(folder, settings or {}), torch_device="cpu", **options
        )
        engine = engine_of(model)
        assert engine is not None
        open_engines.append(engine)
        return model

    return load
