"""The pytest plugin that offloads the tests of transformers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import TrainingArguments

from hf_lohan.testing.models import tiny_model

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


class Cleanups:
    """Replaces pytest's config."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def add_cleanup(self, call: Any) -> None:
        self.calls.append(call)


def test_models_without_layers_can_use_the_stock_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("LOHAN_STOCK_WITHOUT_LAYERS", "1")
    import offloaded_trainer

    config = Cleanups()
    offloaded_trainer.pytest_configure(config)  # type: ignore[arg-type]
    try:
        from transformers import Trainer

        args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
        for model in (nn.Linear(2, 2), tiny_model("llama", num_layers=2)):
            Trainer(model, args)
        assert dict(offloaded_trainer.trainers) == {"stock": 1, "offloaded": 1}
    finally:
        for call in config.calls:
            call()
        del sys.modules["offloaded_trainer"]
