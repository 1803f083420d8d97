"""A pytest plugin that offloads `transformers.Trainer` and `accelerate.Accelerator` in all tests.

    PYTHONPATH=scripts python -m pytest -p offloaded_trainer <transformers>/tests/trainer/test_trainer.py

`LOHAN_OFFLOAD` is the offload configuration, by default `lohan`. Models without layers are refused, and most of these
tests fit a line with two scalars. With `LOHAN_STOCK_WITHOUT_LAYERS=1` the stock Trainer trains such models.
docs/upstream_tests.md says where the tests are, and which of them fail.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from typing import Any

import pytest
from torch import nn

from hf_lohan.huggingface.unmodified_scripts import offload_by_default
from hf_lohan.model import DiscoveryError
from hf_lohan.model.discovery import find_layers

trainers: Counter[str] = Counter()


def pytest_configure(config: pytest.Config) -> None:
    stack = contextlib.ExitStack()
    stack.enter_context(offload_by_default(os.environ.get("LOHAN_OFFLOAD", "lohan")))
    config.add_cleanup(stack.close)
    from transformers import Trainer  # now the offloading Trainer

    init: Any = Trainer.__init__

    @functools.wraps(init)
    def counted(self: Any, model: Any = None, *args: Any, **kwargs: Any) -> None:
        is_stock = os.environ.get("LOHAN_STOCK_WITHOUT_LAYERS") == "1" and not _has_layers(model, kwargs)
        trainers["stock" if is_stock else "offloaded"] += 1
        init(self, model, *args, **(kwargs | {"offload": None} if is_stock else kwargs))

    setattr(Trainer, "__init__", counted)  # noqa: B010 - mypy knows its own


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"trainers: {dict(trainers)}")


def _has_layers(model: Any, options: dict[str, Any]) -> bool:
    make = options.get("model_init")
    if model is None and make is not None:
        model = make() if make.__code__.co_argcount == 0 else make(None)
    if not isinstance(model, nn.Module):
        return True
    with contextlib.suppress(DiscoveryError):
        find_layers(model)
        return True
    return False
