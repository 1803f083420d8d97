"""Optimizer states go to a checkpoint by name and come back into any engine of the same model."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_lohan.integrations import optimizer_checkpoint
from hf_lohan.integrations.loading import reload_weights
from hf_lohan.integrations.optimizer_checkpoint import (
    has_optimizer_states,
    load_optimizer_states,
    save_optimizer_states,
)
from hf_lohan.optim import OffloadAdamW
from hf_lohan.runtime import OffloadEngine, ParameterAccess
from hf_lohan.storage import Extent, StorageError
from hf_lohan.testing.models import tiny_batch, tiny_model

Offload = Callable[..., OffloadEngine]
INDEX = Path("lohan") / "optimizer_index.json"
NORM = "model.layers.1.input_layernorm.weight"

FORMATS = pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [(torch.float32, "float32"), (torch.bfloat16, "float32"), (torch.float32, "bfloat16"), (torch.bfloat16, "int8")],
)


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


@FORMATS
@pytest.mark.parametrize("family", ["opt", "mixtral"])
def test_a_round_trip_into_an_engine_with_other_budgets(
    family: str, dtype: torch.dtype, state_dtype: str, offload: Offload, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"layerdrop": 0.5} if family == "opt" else {}  # so that step counts differ
    stored = {"dtype": dtype, "optimizer_state_dtype": state_dtype}
    first = offload(tiny_model(family, **options), **stored, cpu_memory="3MiB", gpu_memory="1MiB")
    train(first, range(3))
    checkpoint = tmp_path / "checkpoint"
    first.model.save_pretrained(checkpoint)  # type: ignore[operator]
    save_optimizer_states(first, checkpoint)
    second = offload(tiny_model(family, seed=9, **options), **stored, **elsewhere(tmp_path))
    assert first.layout.plan.chunk_numel != second.layout.plan.chunk_numel
    with torch.no_grad():
        second.model.eval()(**tiny_batch())  # its slots hold weights that are about to be replaced
    reload_weights(second, second.model, checkpoint)
    load_optimizer_states(second, checkpoint)
    assert_same(second, first)
    for engine in (first, second):
        train(engine, range(3, 6))
    assert_same(second, first)


@FORMATS
def test_files_hold_the_states_where_the_index_says(
    dtype: torch.dtype, state_dtype: str, offload: Offload, tmp_path: Path
) -> None:
    engine = offload(tiny_model("llama"), dtype=dtype, optimizer_state_dtype=state_dtype)
    train(engine, range(2))
    assert not has_optimizer_states(tmp_path)
    save_optimizer_states(engine, tmp_path)
    assert has_optimizer_states(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    shapes = {part.name: list(part.shape) for part in engine.parameter_slices}
    assert {name: place["shape"] for name, place in index["parameters"].items()} == shapes
    assert all(place["num_updates"] == 2 for place in index["parameters"].values())
    kinds = engine.layout.master.state_kinds
    for name, place in index["parameters"].items():
        with safe_open(tmp_path / "lohan" / place["file"], framework="pt") as file:
            assert set(file.keys()) == set(kinds)
            for kind in kinds:
                stop = place["start"] + math.prod(place["shape"])
                first, last = engine.layout.master.elements(kind, place["start"], stop)
                states = file.get_slice(kind)[first:last]
                assert torch.equal(states, engine.parameters.read_flat(name, kind))


def test_every_record_begins_at_a_block_of_the_file_system(offload: Offload, tmp_path: Path) -> None:
    engine = offload(tiny_model("llama"), dtype=torch.bfloat16, optimizer_state_dtype="int8")
    save_optimizer_states(engine, tmp_path)
    files = sorted((tmp_path / "lohan").glob("*.safetensors"))
    assert len(files) == len(engine.layout.blocks)
    for path in files:
        header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
        header = json.loads(path.read_bytes()[8 : 8 + header_bytes])
        places = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        assert len(places) == 4
        assert all((8 + header_bytes + offset) % 4096 == 0 for place in places for offset in place)


def test_frozen_parameters_have_no_states_in_it(offload: Offload, tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.model.embed_tokens.requires_grad_(False)
    save_optimizer_states(offload(model), tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    assert "model.embed_tokens.weight" not in index["parameters"]
    assert "lm_head.weight" in index["parameters"]


def test_the_file_does_not_know_budgets_or_paths(offload: Offload, tmp_path: Path) -> None:
    """The same states from other chunks and two drives are the same bytes."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder, settings in zip(folders, ({"cpu_memory": "3MiB"}, elsewhere(tmp_path)), strict=True):
        engine = offload(tiny_model("llama"), **settings)
        train(engine, range(2))
        save_optimizer_states(engine, folder)
    first, second = ({path.name: path.read_bytes() for path in (folder / "lohan").iterdir()} for folder in folders)
    assert first == second


# Cloning.


def clone_by_copying(num_allowed: int, refusal: int = errno.EOPNOTSUPP) -> Callable[[int, int, bytes], int]:
    """Like the ioctl, but it moves the bytes; refused after some."""
    asked: list[int] = []

    def ioctl(target_fd: int, request: int, argument: bytes) -> int:
        source_fd, source_offset, num_bytes, target_offset = struct.unpack("=qQQQ", argument)
        assert request == 0x4020940D
        assert source_offset % 4096 == num_bytes % 4096 == target_offset % 4096 == 0
        asked.append(num_bytes)
        if len(asked) > num_allowed:
            raise OSError(refusal, os.strerror(refusal))
        os.pwrite(target_fd, os.pread(source_fd, num_bytes, source_offset), target_offset)
        return 0

    return ioctl


def records_in_files(engine: OffloadEngine, folder: Path) -> dict[tuple[str, str], list[tuple[str, Extent]]]:
    """Each record in two extents of two files, the latter first, as a store over two paths may have it."""
    folder.mkdir()
    extents = {}
    for block in engine.layout.blocks:
        for kind in engine.layout.master.state_kinds:
            numel = engine.layout.master.numel(kind, block.state_numel)
            record = torch.zeros(numel, dtype=engine.parameters.state_dtype(kind))
            for part in block.trainable_slices:
                start, stop = engine.parameters.elements(part.name, kind)
                record[start:stop] = engine.parameters.read_flat(part.name, kind)
            data = record.view(torch.uint8).numpy().tobytes()
            cut = len(data) // 8192 * 4096
            first, second = (folder / f"{block.name}.{kind}.{number}" for number in range(2))
            first.write_bytes(bytes(8192) + data[:cut])
            second.write_bytes(data[cut:])
            places = [(str(second), Extent(1, 0, cut, len(data) - cut)), (str(first), Extent(0, 8192, 0, cut))]
            extents[block.name, kind] = [place for place in places if place[1].num_bytes]
    return extents


@FORMATS
@pytest.mark.parametrize("num_allowed", [0, 1, 10_000], ids=["refused", "refused_half_way", "cloned"])
def test_cloned_records_are_the_copied_ones(
    num_allowed: int,
    dtype: torch.dtype,
    state_dtype: str,
    offload: Offload,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = offload(tiny_model("llama"), dtype=dtype, optimizer_state_dtype=state_dtype)
    train(engine, range(2))
    store = engine.tiers.store
    monkeypatch.setattr(store, "extents", lambda *_: None)
    save_optimizer_states(engine, tmp_path / "copied")
    extents = records_in_files(engine, tmp_path / "records")
    monkeypatch.setattr(store, "extents", lambda block, kind: extents[block, kind])
    monkeypatch.setattr(fcntl, "ioctl", clone_by_copying(num_allowed))
    copied: list[str] = []
    read_pieces = ParameterAccess.read_pieces

    def counted(access: ParameterAccess, name: str, kind: str) -> Any:
        copied.append(f"{name}.{kind}")
        return read_pieces(access, name, kind)

    monkeypatch.setattr(ParameterAccess, "read_pieces", counted)
    save_optimizer_states(engine, tmp_path / "cloned")
    num_states = sum(len(engine.parameters.state_kinds(part.name)) for part in engine.parameter_slices)
    assert len(copied) == (0 if num_allowed == 10_000 else num_states)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name / "lohan").iterdir()}
        for name in ("copied", "cloned")
    )
    assert first == second


def test_a_clone_that_fails_for_good_is_an_error(
    offload: Offload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = offload(tiny_model("llama"))
    extents = records_in_files(engine, tmp_path / "records")
    monkeypatch.setattr(engine.tiers.store, "extents", lambda block, kind: extents[block, kind])
    monkeypatch.setattr(fcntl, "ioctl", clone_by_copying(0, errno.EIO))
    with pytest.raises(StorageError, match=r"cannot clone \d+ bytes into .*optimizer-00000"):
        save_optimizer_states(engine, tmp_path)


# Full disks.


def test_a_disk_without_room_is_refused_before_anything_is_written(
    offload: Offload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For clones too: they take room when the store writes its next version, in the middle of a step."""
    engine = offload(tiny_model("llama"))
    needed_bytes = sum(8 * block.state_numel for block in engine.layout.blocks)
    usage = shutil.disk_usage(tmp_path)._replace(free=needed_bytes - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StorageError, match=f"they need {needed_bytes:,} bytes and {needed_bytes - 1:,} are free"):
        save_optimizer_states(engine, tmp_path)
    assert not list((tmp_path / "lohan").iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed_bytes))
    save_optimizer_states(engine, tmp_path)


def test_a_write_that_fails_gives_the_buffers_back(
    offload: Offload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = offload(tiny_model("llama"))

    def fail(path: Path, tensors: Any) -> None:
        next(iter(tensors[0].pieces)), next(iter(tensors[0].pieces))  # in the middle of a parameter
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(optimizer_checkpoint, "write_safetensors", fail)
    before = engine.tiers.states.num_free
    with pytest.raises(OSError, match="broken") as _kept:
        save_optimizer_states(engine, tmp_path)
    assert engine.tiers.states.num_free == before


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
        (lambda index: index.update(format_version=1), "has format 1, this version reads 2; start anew from"),
        (lambda index: index["parameters"][NORM].update(file="../stray"), r"outside its folder: '\.\./stray"),
        (lambda index: index["parameters"][NORM].update(start=-1), "must be whole numbers, not .-1, "),
        (lambda index: index["parameters"][NORM].pop("shape"), r"damaged \(KeyError\('shape'\)\)"),
        (lambda index: index["parameters"][NORM].update(start=1 << 40), "no flat tensor .* which its index promises"),
        (lambda index: index["parameters"][NORM].update(file="none"), "none' is missing or damaged"),
        (lambda index: index.update(optimizer_state_dtype="int8"), "optimizer_state_dtype=int8, this run has float32"),
    ],
    ids=["newer_format", "older_format", "file_outside", "negative", "no_shape", "behind_the_end", "no_file", "dtype"],
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


def test_files_that_are_not_whole_are_refused_and_change_nothing(offload: Offload, tmp_path: Path) -> None:
    engine = offload(tiny_model("llama"))
    save_optimizer_states(engine, tmp_path)
    train(engine, range(1))
    before = everything(engine)
    last = max((tmp_path / "lohan").glob("*.safetensors"))
    os.truncate(last, last.stat().st_size - 1)
    with pytest.raises(ValueError, match=f"{last.name}' is missing or damaged"):
        load_optimizer_states(engine, tmp_path)
    save_file({"exp_avg": torch.zeros(10_000)}, last)
    with pytest.raises(ValueError, match=f"{last.name}' has no flat tensor exp_avg"):
        load_optimizer_states(engine, tmp_path)
    assert_unchanged(engine, before)


def test_states_of_other_shapes_are_refused_and_change_nothing(offload: Offload, tmp_path: Path) -> None:
    """The same names, as two sizes of one family have them."""
    save_optimizer_states(offload(tiny_model("llama", hidden_size=32)), tmp_path)
    engine = offload(tiny_model("llama"))
    train(engine, range(1))
    before = everything(engine)
    with pytest.raises(ValueError, match=r"for model\.embed_tokens\.weight of shape \[\d+, 32\], this model's has \["):
        load_optimizer_states(engine, tmp_path)
    assert_unchanged(engine, before)


def assert_unchanged(engine: OffloadEngine, before: dict[str, Any]) -> None:
    after = everything(engine)
    assert all(torch.equal(before[name], after[name]) for name in before if isinstance(before[name], torch.Tensor))
