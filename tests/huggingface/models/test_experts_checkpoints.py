"""Experts are copied one by one between checkpoints and the store, and equal those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import slow_but
from equal_tensors import assert_same_tensors, tensors_in
from safetensors.torch import load_file
from stored_weights import assert_stored
from tiny_experts import FAMILIES, FUSED_IN_FILES, HIDDEN, INNER, NUM_EXPERTS, tiny_experts
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_lohan import engine_of
from hf_lohan.compat.transformers_conversions import SavingConversion
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.models import weight_sink
from hf_lohan.huggingface.models.reloading import reload_weights
from hf_lohan.huggingface.models.weight_sink import WeightSink

Load = Callable[..., Any]
Offload = Callable[..., OffloadEngine]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy a few experts at a time, so that tiny weights count as large."""
    monkeypatch.setattr(weight_sink, "_MOST_ROWS_BYTES", 8 * HIDDEN * INNER * 2)


@pytest.fixture
def rows_taken(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, int]]]:
    """By name: the first row and the number of rows of each piece."""
    taken: dict[str, list[tuple[int, int]]] = {}
    stock = WeightSink.store_rows

    def take(self: WeightSink, name: str, shape: torch.Size, first: int, rows: Tensor) -> bool:
        taken.setdefault(name, []).append((first, rows.shape[0]))
        return stock(self, name, shape, first, rows)

    monkeypatch.setattr(WeightSink, "store_rows", take)
    return taken


def assert_same_files(ours: Path, stock: Path) -> None:
    assert_same_tensors(tensors_in(ours), tensors_in(stock))
    others = ({path.name for path in folder.iterdir() if path.suffix != ".safetensors"} for folder in (ours, stock))
    assert next(others) == next(others)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("dtype", "experts"),
    [(torch.float32, "with_layer"), (torch.bfloat16, "with_layer"), (torch.bfloat16, "streamed")],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_loaded_and_saved_as_by_transformers(
    family: str,
    dtype: torch.dtype,
    experts: str,
    load_streamed: Load,
    rows_taken: dict[str, list[tuple[int, int]]],
    tmp_path: Path,
) -> None:
    path = tmp_path / "checkpoint"
    tiny_experts(family, dtype=dtype).save_pretrained(path, max_shard_size="400KB")
    is_fused = not any(".experts.0." in name or "experts.0.w1" in name for name in tensors_in(path))
    assert is_fused == (family in FUSED_IN_FILES)
    model = load_streamed(path, settings={"cpu_memory": "16MiB", "gpu_memory": "16MiB", "experts": experts})
    stock = AutoModelForCausalLM.from_pretrained(path)
    assert_stored(model, stock)
    blocks = {len(parts) for parts in engine_of(model).parameters.parts.values()}  # type: ignore[union-attr]
    assert blocks == ({1, NUM_EXPERTS} if experts == "streamed" else {1})
    fused = {name for name, p in stock.named_parameters() if p.dim() == 3 and p.shape[0] == NUM_EXPERTS}
    assert fused and fused <= rows_taken.keys()
    for name in fused:
        assert max(num_rows for _, num_rows in rows_taken[name]) <= NUM_EXPERTS // 2, name
        assert [first for first, _ in rows_taken[name]] == sorted({first for first, _ in rows_taken[name]})
    stock.save_pretrained(tmp_path / "stock", max_shard_size="300KB")
    model.save_pretrained(tmp_path / "ours", max_shard_size="300KB")
    assert_same_files(tmp_path / "ours", tmp_path / "stock")
    shards = [load_file(path) for path in (tmp_path / "ours").glob("*.safetensors")]
    assert all(len(shard) == 1 or sum(t.nbytes for t in shard.values()) <= 300_000 for shard in shards)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert_same_tensors(dict(saved.named_parameters()), dict(stock.named_parameters()))


@pytest.mark.parametrize(
    "family", slow_but(("MixtralConfig", "GptOssConfig", "PhimoeConfig", "Lfm2MoeConfig"), FAMILIES)
)
def test_saving_reads_experts_one_by_one(
    family: str, offload: Offload, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = tiny_experts(family)
    model.save_pretrained(tmp_path / "stock")
    offload(model, cpu_memory="16MiB", gpu_memory="16MiB")
    seen: list[torch.Size] = []
    stock = SavingConversion.results

    def results(self: SavingConversion, value_of: Callable[[Tensor], Tensor]) -> list[Tensor]:
        def value(form: Tensor) -> Tensor:
            found = value_of(form)
            if found.device.type != "meta":
                seen.append(found.shape)
            return found

        return stock(self, value)

    monkeypatch.setattr(SavingConversion, "results", results)
    model.save_pretrained(tmp_path / "ours")
    assert_same_files(tmp_path / "ours", tmp_path / "stock")
    assert bool(seen) == (family not in FUSED_IN_FILES)
    assert all(shape[0] == 1 for shape in seen)


@pytest.mark.parametrize("family", ["MixtralConfig", "GraniteMoeConfig", "Ernie4_5_MoeConfig"])
def test_reloading_writes_experts_one_by_one(
    family: str, offload: Offload, rows_taken: dict[str, list[tuple[int, int]]], tmp_path: Path
) -> None:
    tiny_experts(family, seed=7).save_pretrained(tmp_path / "other")
    model = tiny_experts(family)
    engine = offload(model, cpu_memory="16MiB", gpu_memory="16MiB")
    reload_weights(engine, model, tmp_path / "other")
    assert_stored(model, AutoModelForCausalLM.from_pretrained(tmp_path / "other"))
    assert rows_taken


@pytest.mark.parametrize("family", ["MixtralConfig", "GptOssConfig"])
def test_a_cast_by_rows_equals_a_cast_of_the_whole(family: str, load_streamed: Load, tmp_path: Path) -> None:
    tiny_experts(family).save_pretrained(tmp_path / "checkpoint")
    settings = {"cpu_memory": "16MiB", "gpu_memory": "16MiB"}
    model = load_streamed(tmp_path / "checkpoint", dtype=torch.bfloat16, settings=settings)
    assert_stored(model, AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype="bfloat16"))


def test_another_number_of_experts_is_refused_as_by_stock(load_streamed: Load, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    tiny_experts("MixtralConfig").save_pretrained(path)
    config = (path / "config.json").read_text().replace('"num_local_experts": 16', '"num_local_experts": 12')
    (path / "config.json").write_text(config)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load_streamed(path, settings={"cpu_memory": "16MiB", "gpu_memory": "16MiB"})
