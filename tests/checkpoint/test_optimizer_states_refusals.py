"""Incomplete optimizer states, and those of another model, are refused and change nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from trained_states import INDEX, Offload, everything, train

from hf_lohan.checkpoint.optimizer_states import load_optimizer_states, save_optimizer_states
from hf_lohan.engine import OffloadEngine
from hf_lohan.testing.models import tiny_model

NORM = "model.layers.1.input_layernorm.weight"


def test_a_checkpoint_without_states_is_refused(offload: Offload, tmp_path: Path) -> None:
    engine = offload(tiny_model("llama"))
    with pytest.raises(ValueError, match="has no optimizer states of an offloaded run"):
        load_optimizer_states(engine, tmp_path)


def test_states_for_other_trainable_parameters_are_refused(offload: Offload, tmp_path: Path) -> None:
    save_optimizer_states(offload(tiny_model("llama")), tmp_path)
    model = tiny_model("llama")
    model.lm_head.requires_grad_(False)
    with pytest.raises(ValueError, match=r"\(1 differ, such as lm_head\.weight\)"):
        load_optimizer_states(offload(model), tmp_path)


def test_states_of_another_working_dtype_are_refused(offload: Offload, tmp_path: Path) -> None:
    save_optimizer_states(offload(tiny_model("llama")), tmp_path)
    with pytest.raises(ValueError, match="float32 working weights, and this run uses bfloat16"):
        load_optimizer_states(offload(tiny_model("llama"), dtype=torch.bfloat16), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(format_version=99), "has format 99.*update hf_lohan"),
        (lambda index: index.update(format_version=1), "has format 1, and this version reads 3; start a new run from"),
        (lambda index: index["parameters"][NORM].update(file="../stray"), r"outside the folder: '\.\./stray"),
        (lambda index: index["parameters"][NORM].update(start=-1), "must be whole numbers, not .-1, "),
        (lambda index: index["parameters"][NORM].pop("shape"), r"damaged \(KeyError\('shape'\)\)"),
        (lambda index: index["parameters"][NORM].update(start=1 << 40), "is damaged: it has no flat tensor"),
        (lambda index: index["parameters"][NORM].update(file="none"), "none' is missing or damaged"),
        (
            lambda index: index.update(optimizer_state_dtype="int8"),
            "state_dtype: int8, and this run has optimizer_state_dtype: float32",
        ),
    ],
    ids=["newer_format", "older_format", "file_outside", "negative", "no_shape", "after_the_end", "no_file", "dtype"],
)
def test_an_unreadable_index_is_refused(
    change: Callable[[dict[str, Any]], None], message: str, offload: Offload, tmp_path: Path
) -> None:
    engine = offload(tiny_model("llama"))
    save_optimizer_states(engine, tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    change(index)
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        load_optimizer_states(engine, tmp_path)


def test_incomplete_files_are_refused_and_change_nothing(offload: Offload, tmp_path: Path) -> None:
    engine = offload(tiny_model("llama"))
    save_optimizer_states(engine, tmp_path)
    train(engine, range(1))
    before = everything(engine)
    last = max((tmp_path / "lohan").glob("*.safetensors"))
    os.truncate(last, last.stat().st_size - 1)
    with pytest.raises(ValueError, match=f"{last.name}' is missing or damaged"):
        load_optimizer_states(engine, tmp_path)
    save_file({"exp_avg": torch.zeros(10_000)}, last)
    with pytest.raises(ValueError, match=f"{last.name}' is damaged: it has no flat tensor exp_avg"):
        load_optimizer_states(engine, tmp_path)
    assert_unchanged(engine, before)


def test_states_of_other_shapes_are_refused_and_change_nothing(offload: Offload, tmp_path: Path) -> None:
    """Two sizes of one family have the same parameter names."""
    save_optimizer_states(offload(tiny_model("llama", hidden_size=32)), tmp_path)
    engine = offload(tiny_model("llama"))
    train(engine, range(1))
    before = everything(engine)
    message = r"for model\.embed_tokens\.weight of shape \[\d+, 32\], and here it has shape \["
    with pytest.raises(ValueError, match=message):
        load_optimizer_states(engine, tmp_path)
    assert_unchanged(engine, before)


def assert_unchanged(engine: OffloadEngine, before: dict[str, Any]) -> None:
    after = everything(engine)
    assert all(torch.equal(before[name], after[name]) for name in before if isinstance(before[name], torch.Tensor))
