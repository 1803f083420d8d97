from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_lohan.files import CapacityError, ForeignStoreError, IoEngine, StorePath
from hf_lohan.store import ModelIdentity, RecordSpec, Store, last_commit
from hf_lohan.store.manifest import sealed

pytestmark = pytest.mark.storm

Records = tuple[RecordSpec, ...]


@pytest.fixture
def manifests(paths: list[StorePath], records: Records, model: ModelIdentity, engine: IoEngine) -> list[Path]:
    """The manifest files of a closed store."""
    Store.create(paths, records, model=model, engine=engine).close()
    return [Path(path.path) / "manifest.json" for path in paths]


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(sealed(json.loads(file.read_text()) | changes)))


def test_paths_differ_in_their_index_only(manifests: list[Path], records: Records) -> None:
    first, second = (json.loads(file.read_text()) for file in manifests)
    assert (first.pop("path_index"), second.pop("path_index")) == (0, 1)
    assert first.pop("xxh3") != second.pop("xxh3")
    assert first == second
    assert (first["format_version"], first["num_homes"]) == (4, 1)
    assert first["rank"] == [0, 1]
    assert first["model"] == {
        "model_class": "LlamaForCausalLM",
        "num_parameters": 12345,
        "fingerprint": "abc",
        "optimizer_state_dtype": "float32",
        "optimizer": "AdamW(exp_avg, exp_avg_sq)",
    }
    assert [record["block"] for record in first["layout"]["records"]] == [record.block for record in records]


@pytest.mark.parametrize(("version", "advice"), [(5, "upgrade"), (2, r"delete the store \(checkpoints still resume\)")])
def test_another_format_is_refused(
    manifests: list[Path],
    paths: list[StorePath],
    records: Records,
    model: ModelIdentity,
    engine: IoEngine,
    version: int,
    advice: str,
) -> None:
    edit(manifests[1], format_version=version)
    before = manifests[1].read_text()
    attempts: tuple[Callable[[], Store], ...] = (
        lambda: Store.open(paths, model=model, engine=engine),
        lambda: Store.create(paths, records, model=model, engine=engine),
        lambda: Store.open_or_create(paths, records, model=model, engine=engine),
    )
    for attempt in attempts:
        with pytest.raises(ForeignStoreError, match=f"format version {version}, and this hf_lohan reads 4; {advice}"):
            attempt()
    assert manifests[1].read_text() == before


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"format_version": 3}', "\x00\xff", '{"format_version": "x"}']
)
def test_a_damaged_manifest_is_refused(
    manifests: list[Path], paths: list[StorePath], records: Records, model: ModelIdentity, engine: IoEngine, text: str
) -> None:
    manifests[0].write_bytes(text.encode("latin-1"))
    with pytest.raises(ForeignStoreError, match=r"manifest\.json is damaged or not a store's manifest"):
        Store.open(paths, model=model, engine=engine)
    with pytest.raises(ForeignStoreError, match="damaged"):
        Store.create(paths, records, model=model, engine=engine)


def write_as_older_version(file: Path, **changes: Any) -> None:
    fields = json.loads(file.read_text()) | {"format_version": 3} | changes
    fields.pop("rank", None)
    file.write_text(json.dumps(sealed(fields)))


def test_a_manifest_without_a_rank_is_accepted(
    manifests: list[Path], paths: list[StorePath], records: Records, model: ModelIdentity, engine: IoEngine
) -> None:
    for file in manifests:
        write_as_older_version(file)
    before = [file.read_bytes() for file in manifests]
    for number in (1, 2):
        with Store.open_or_create(paths, records, model=model, engine=engine, durability="checkpoint") as store:
            assert len(store.kept_commits) == number - 1
            store.commit({"number": number})
    with Store.open(paths, model=model, engine=engine) as store:
        assert store.committed is not None and store.committed.facts == {"number": 2}
    assert [file.read_bytes() for file in manifests] == before
    content = (manifests[0].parent / "commit.safetensors").read_bytes()
    assert b"store_id" in content and b"layout_id" not in content, "the older version does not know this field"


def changed_records(file: Path, **changes: Any) -> dict[str, Any]:
    layout: dict[str, Any] = json.loads(file.read_text())["layout"]
    layout["records"][0] |= changes
    return layout


@pytest.mark.parametrize("change", [{"first": 1 << 40}, {"block": "another"}, {"dtype": "int16"}])
def test_a_manifest_of_other_records_is_refused(
    manifests: list[Path],
    paths: list[StorePath],
    records: Records,
    model: ModelIdentity,
    engine: IoEngine,
    change: dict[str, Any],
) -> None:
    """The manifest has a right checksum, so it was edited or belongs to another store."""
    with Store.open(paths, model=model, engine=engine) as store:
        store.commit()
    sound = [file.read_text() for file in manifests]
    for file in manifests:
        edit(file, layout=changed_records(file, **change))
    attempts: tuple[Callable[[], object], ...] = (
        lambda: Store.open(paths, model=None, engine=engine),
        lambda: last_commit([path.path for path in paths]),
    )
    for attempt in attempts:
        with pytest.raises(ForeignStoreError, match=r"manifest\.json in .* does not belong to"):
            attempt()
    for file, text in zip(manifests, sound, strict=True):
        file.write_text(text)
        write_as_older_version(file, layout=changed_records(file, **change))
    (manifests[0].parent / "commit.safetensors").unlink()
    with pytest.raises(ForeignStoreError, match="whose records differ from those of this run, first in elements"):
        Store.open_or_create(paths, records, model=model, engine=engine)


def test_a_manifest_without_a_state_dtype_means_float32(
    manifests: list[Path], paths: list[StorePath], model: ModelIdentity, engine: IoEngine
) -> None:
    for file in manifests:
        identity = json.loads(file.read_text())["model"]
        del identity["optimizer_state_dtype"]
        edit(file, model=identity)
    with Store.open(paths, model=model, engine=engine) as store:
        assert store.model == model and model.optimizer_state_dtype == "float32"


@pytest.mark.parametrize("change", [{"num_homes": 2}, {"store_id": "other"}, {"path_index": 1}])
def test_a_manifest_that_was_changed_is_refused(
    manifests: list[Path], paths: list[StorePath], model: ModelIdentity, engine: IoEngine, change: dict[str, Any]
) -> None:
    manifests[0].write_text(json.dumps(json.loads(manifests[0].read_text()) | change))
    with pytest.raises(ForeignStoreError, match="its checksum is wrong"):
        Store.open(paths, model=model, engine=engine)


def test_an_index_out_of_range_or_given_twice_is_refused(
    manifests: list[Path], paths: list[StorePath], model: ModelIdentity, engine: IoEngine
) -> None:
    edit(manifests[1], path_index=2)
    with pytest.raises(ForeignStoreError, match="path_index 2 is out of range"):
        Store.open(paths, model=model, engine=engine)
    edit(manifests[1], path_index=0)
    with pytest.raises(ForeignStoreError, match="over 2 paths, and 2 of them were passed"):
        Store.open(paths, model=model, engine=engine)


def test_paths_in_a_manifest_are_never_followed(
    manifests: list[Path], paths: list[StorePath], model: ModelIdentity, engine: IoEngine, tmp_path: Path
) -> None:
    for file in manifests:
        layout = json.loads(file.read_text())["layout"]
        for entry in layout["paths"]:
            entry["path"] = str(tmp_path / "elsewhere")
        edit(file, layout=layout)
    with Store.open(paths, model=model, engine=engine) as store:
        assert [path.path for path in store.paths] == [path.path for path in paths]
    assert not (tmp_path / "elsewhere").exists()


def test_a_failed_rewrite_leaves_no_partial_file(
    paths: list[StorePath], records: Records, model: ModelIdentity, engine: IoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(CapacityError, match=r"/a/manifest\.json needs [\d,]+ bytes .* but its free space .* is [\d,]+"):
        Store.create(paths, records, model=model, engine=engine)
    left = {file.name for path in paths for file in Path(path.path).iterdir()}
    assert left == {"lock"}
    monkeypatch.undo()
    Store.create(paths, records, model=model, engine=engine).close()
