"""Each rank saves its own states. Together they form a checkpoint that any number of ranks can load."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trained_states import FORMATS, INDEX, Offload, everything, train

from hf_lohan.checkpoint import optimizer_states
from hf_lohan.checkpoint.optimizer_states import load_optimizer_states, save_optimizer_states
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.models.reloading import reload_weights
from hf_lohan.ranks import Links
from hf_lohan.testing.models import tiny_model
from hf_lohan.testing.thread_ranks import run_ranks


def save_by_ranks(engine: OffloadEngine, num_ranks: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save the states of one engine as several ranks would, each with its own range."""
    for block in engine.layout.blocks:
        block.cut_for_ranks(num_ranks)
    one_at_a_time, write_states = threading.Lock(), optimizer_states._write_states

    def write(*args: Any) -> None:
        with one_at_a_time:  # the ranks share the buffers of one engine
            write_states(*args)

    monkeypatch.setattr(optimizer_states, "_write_states", write)
    store = SimpleNamespace(extents=lambda *_: None)

    def save(links: Links) -> None:
        of_rank: Any = SimpleNamespace(
            links=links,
            layout=engine.layout,
            parameters=engine.parameters,
            step_counts=engine.step_counts,
            tiers=SimpleNamespace(store=store),
        )
        save_optimizer_states(of_rank, folder)

    try:
        run_ranks(num_ranks, save)
    finally:
        for block in engine.layout.blocks:
            block.rank_edges = ()


@pytest.mark.covering(1)
@FORMATS
@pytest.mark.parametrize("num_ranks", [2, 5])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_states_saved_by_ranks_equal_those_of_one_engine(
    family: str,
    num_ranks: int,
    dtype: torch.dtype,
    state_dtype: str,
    offload: Offload,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored = {"dtype": dtype, "optimizer_state_dtype": state_dtype}
    first = offload(tiny_model(family), **stored)
    train(first, range(2))
    checkpoint = tmp_path / "checkpoint"
    first.model.save_pretrained(checkpoint)  # type: ignore[operator]
    save_by_ranks(first, num_ranks, checkpoint, monkeypatch)
    second = offload(tiny_model(family, seed=9), **stored)
    reload_weights(second, second.model, checkpoint)
    load_optimizer_states(second, checkpoint)
    ours, theirs = everything(second), everything(first)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name], name


def test_each_file_belongs_to_one_rank(offload: Offload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = offload(tiny_model("llama"))
    train(engine, range(1))
    save_by_ranks(engine, 2, tmp_path, monkeypatch)
    files = {path.name for path in (tmp_path / "lohan").glob("*.safetensors")}
    index = json.loads((tmp_path / INDEX).read_text())
    places = [
        place for found in index["parameters"].values() for place in (found if isinstance(found, list) else [found])
    ]
    assert {place["file"] for place in places} == files
    assert {name.rsplit("-", 1)[1] for name in files} == {"0of2.safetensors", "1of2.safetensors"}
    sizes = [
        sum((tmp_path / "lohan" / name).stat().st_size for name in files if f"-{rank}of2" in name) for rank in (0, 1)
    ]
    assert min(sizes) > 0.2 * sum(sizes), "one rank has nearly all states"


def test_a_missing_part_is_refused(offload: Offload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = offload(tiny_model("llama"))
    train(engine, range(1))
    save_by_ranks(engine, 2, tmp_path, monkeypatch)
    missing = sorted((tmp_path / "lohan").glob("*-1of2.safetensors"))[0]
    missing.unlink()
    with pytest.raises(ValueError, match=rf"{missing.name}.* is missing or damaged .*; resume from another checkpoint"):
        load_optimizer_states(engine, tmp_path)
