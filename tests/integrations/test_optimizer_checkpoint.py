"""Optimizer states go to a checkpoint by name and come back into any engine of the same model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from hf_lohan.integrations.loading import reload_weights
from hf_lohan.integrations.optimizer_checkpoint import (
    has_optimizer_states,
    load_optimizer_states,
    save_optimizer_states,
)
from hf_lohan.optim import OffloadAdamW
from hf_lohan.runtime import OffloadEngine
from hf_lohan.testing.models import tiny_batch, tiny_model

Offload = Callable[..., OffloadEngine]
INDEX = Path("lohan") / "optimizer_index.json"
NORM = "model.layers.1.input_layernorm.weight"


def train(engine: OffloadEngine, seeds: range) -> None:
    model: Any = engine.model
    optimizer = engine.optimizer or OffloadAdamW(model.parameters(), lr=1e-3, engine=engine)
    for seed in seeds:
        torch.manual_seed(seed)
        model.train()(**tiny_batch(seed=seed)).loss.backward()
        engine.clip_grad_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()


def everything(engine: OffloadEngine) -> dict[str, Any]:
    access = engine.parameters
    found: dict[str, Any] = {}
    for part in engine.parameter_slices:
        for kind in ("param", *access.state_kinds(part.name)):
            found[f"{part.name}.{kind}"] = access.read_flat(part.name, kind)
        found[f"{part.name}.num_updates"] = part.num_updates
    return found


def assert_same(ours: OffloadEngine, theirs: OffloadEngine) -> None:
    a, b = everything(ours), everything(theirs)
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]) if isinstance(value, torch.Tensor) else value == b[name], name


def elsewhere(folder: Path) -> dict[str, Any]:
    """Other budgets, so other chunks, on two drives."""
    return {"cpu_memory": "64MiB", "gpu_memory": "8MiB", "ssd": [str(folder / "a"), str(folder / "b")]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["opt", "mixtral"])
def test_a_round_trip_into_an_engine_with_other_budgets(
    family: str, dtype: torch.dtype, offload: Offload, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"layerdrop": 0.5} if family == "opt" else {}  # so that step counts differ
    first = offload(tiny_model(family, **options), dtype=dtype, cpu_memory="3MiB", gpu_memory="1MiB")
    train(first, range(3))
    checkpoint = tmp_path / "checkpoint"
    first.model.save_pretrained(checkpoint)  # type: ignore[operator]
    save_optimizer_states(first, checkpoint)
    second = offload(tiny_model(family, seed=9, **options), dtype=dtype, **elsewhere(tmp_path))
    assert first.layout.plan.chunk_numel != second.layout.plan.chunk_numel
    with torch.no_grad():
        second.model.eval()(**tiny_batch())  # its slots hold weights that are about to be replaced
    reload_weights(second, second.model, checkpoint)
    load_optimizer_states(second, checkpoint)
    assert_same(second, first)
    for engine in (first, second):
        train(engine, range(3, 6))
    assert_same(second, first)


def test_files_hold_the_states_under_the_parameters_names(offload: Offload, tmp_path: Path) -> None:
    engine = offload(tiny_model("llama"))
    train(engine, range(2))
    assert not has_optimizer_states(tmp_path)
    save_optimizer_states(engine, tmp_path)
    assert has_optimizer_states(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["num_updates"] == {name: 2 for name, _ in engine.model.named_parameters()}
    names: list[str] = []
    for file_name, parameters in index["files"].items():
        with safe_open(tmp_path / "lohan" / file_name, framework="pt") as file:
            assert set(file.keys()) == {f"{name}.{kind}" for name in parameters for kind in ("exp_avg", "exp_avg_sq")}
        names += parameters
    assert sorted(names) == sorted(name for name, _ in engine.model.named_parameters())
    holder = next(file_name for file_name, parameters in index["files"].items() if NORM in parameters)
    with safe_open(tmp_path / "lohan" / holder, framework="pt") as file:
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(file.get_tensor(f"{NORM}.{kind}"), engine.parameters.read_flat(NORM, kind))


def test_frozen_parameters_have_no_states_in_it(offload: Offload, tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.model.embed_tokens.requires_grad_(False)
    save_optimizer_states(offload(model), tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    assert "model.embed_tokens.weight" not in index["num_updates"]


# Refusals.


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
    with pytest.raises(ValueError, match="float32 working weights, this run uses bfloat16"):
        load_optimizer_states(offload(tiny_model("llama"), dtype=torch.bfloat16), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(format_version=99), "has format 99.*update hf_lohan"),
        (lambda index: index["files"].update({"../stray.safetensors": []}), r"outside its folder: '\.\./stray"),
    ],
    ids=["newer_format", "file_outside"],
)
def test_an_index_that_is_not_ours_is_refused(
    change: Callable[[dict[str, Any]], None], message: str, offload: Offload, tmp_path: Path
) -> None:
    engine = offload(tiny_model("llama"))
    save_optimizer_states(engine, tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    change(index)
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        load_optimizer_states(engine, tmp_path)


def test_states_of_other_shapes_are_refused_and_change_nothing(offload: Offload, tmp_path: Path) -> None:
    """The same names, as two sizes of one family have them."""
    save_optimizer_states(offload(tiny_model("llama", hidden_size=32)), tmp_path)
    engine = offload(tiny_model("llama"))
    train(engine, range(1))
    before = everything(engine)
    with pytest.raises(ValueError, match=r"lm_head|embed_tokens|layers"):
        load_optimizer_states(engine, tmp_path)
    after = everything(engine)
    assert all(torch.equal(before[name], after[name]) for name in before if isinstance(before[name], torch.Tensor))
