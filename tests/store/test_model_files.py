"""The model's files are part of the commit. After a power cut they are those of a commit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest
from recorded_disk import PowerCut, RecordedDisk

from hf_lohan.files import CapacityError, IoEngine, StorageError, StorePath
from hf_lohan.store import ModelIdentity, RecordSpec, Store

MODEL = ModelIdentity("Llama", 1, "abc")
RECORDS = [RecordSpec("a", "param", "float32", 2048)]
FIRST = {"config.json": b"first" * 1000, "adapter/adapter_config.json": b"{}"}
SECOND = {"config.json": b"second" * 1000}


def opened(folder: Path, engine: IoEngine) -> Store:
    return Store.open_or_create([StorePath(str(folder), 1 << 20)], RECORDS, model=MODEL, engine=engine)


def files_of(store: Store) -> dict[str, bytes] | None:
    """Return the model's files. Raises if a file differs from the commit."""
    if store.model_folder is None:
        return None
    folder = Path(store.model_folder)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_files_are_kept_until_others_are_committed(tmp_path: Path, engine: IoEngine) -> None:
    with opened(tmp_path, engine) as store:
        assert store.model_folder is None
        store.commit()
        assert files_of(store) is None
        for _ in range(2):
            store.commit(model_files=FIRST)
            store.commit()
            assert files_of(store) == FIRST
    with opened(tmp_path, engine) as store:
        assert files_of(store) == FIRST
        store.commit(model_files=SECOND)
        assert files_of(store) == SECOND
        assert sorted(path.name for path in tmp_path.glob("model*")) == [Path(store.model_folder or "").name]
        modes = {path.stat().st_mode & 0o777 for path in tmp_path.glob("model*/**/*") if path.is_file()}
        assert modes == {0o600}


@pytest.mark.parametrize("damage", ["changed", "missing", "folder", "pipe"])
def test_changed_files_are_reported_and_repaired_by_the_next_commit(
    damage: str, tmp_path: Path, engine: IoEngine
) -> None:
    with opened(tmp_path, engine) as store:
        store.commit(model_files=FIRST)
        file = Path(store.model_folder or "") / "config.json"
        file.unlink()
        if damage == "changed":
            file.write_bytes(FIRST["config.json"][:-1] + b"!")
        elif damage == "folder":
            file.mkdir()
        elif damage == "pipe":
            os.mkfifo(file)
        (error,) = store.verify_files()
        assert str(file) in str(error) and "\n" not in str(error)
        with pytest.raises(StorageError, match=r"config\.json"):
            files_of(store)
        store.commit(model_files=FIRST)
        assert files_of(store) == FIRST and not store.verify_files()


@pytest.mark.parametrize("seed", range(4))
def test_a_power_cut_leaves_the_files_of_the_last_commit(seed: int, ram_folder: Path, engine: IoEngine) -> None:
    committed: list[Mapping[str, bytes]] = [FIRST, FIRST, SECOND, FIRST]
    with RecordedDisk(ram_folder / "disk") as disk, opened(disk.root / "0", engine) as store:
        for number, files in enumerate(committed, start=1):
            store.commit({"number": number}, model_files=files)
            disk.mark(number)
    image, random, cut, marked, found = ram_folder / "image", Random(seed), PowerCut(), 0, set()
    cut.add_folder("0")
    for call in disk.calls:
        if call.name == "mark":
            marked = call.mark
            continue
        cut.apply(call)
        cut.write_image(image, random)
        with opened(image / "0", engine) as store:
            number = store.committed.facts["number"] if store.committed is not None else 0
            assert number in (marked, marked + 1)
            assert files_of(store) == (committed[number - 1] if number else None)
            store.commit({"number": 9}, model_files=SECOND)
            assert files_of(store) == SECOND
            found.add(number)
        shutil.rmtree(image)
    assert found == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("errno", [5, 28])
def test_a_commit_that_fails_keeps_the_last_files(errno: int, ram_folder: Path, engine: IoEngine) -> None:
    with RecordedDisk(ram_folder / "disk") as disk, opened(disk.root, engine) as store:
        store.commit(model_files=FIRST)
        for call in range(1, 100):
            disk.fail(call, errno)
            try:
                store.commit(model_files=SECOND)
            except (StorageError, CapacityError):
                assert files_of(store) == FIRST
                continue
            break
        assert call > 8 and files_of(store) == SECOND
