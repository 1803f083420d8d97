"""Stores of other processes, and full or read-only disks, are refused by name."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from hf_lohan.device import mapped_empty
from hf_lohan.files import CapacityError, IoEngine, StorageError, StoreInUseError, StorePath
from hf_lohan.store import ModelIdentity, RecordSpec, Store

ROOT = Path(__file__).parents[2]
HOLDER = """
import os, sys, time, torch
from hf_lohan.device import mapped_empty
from hf_lohan.files import IoEngine, StorePath
from hf_lohan.store import ModelIdentity, RecordSpec, Store
paths = [StorePath(path, 1 << 20) for path in sys.argv[1:]]
record, engine = RecordSpec("layers.0", "param", "float32", 8192), IoEngine(1, 4096, 65536)
store = Store.create(paths, [record], model=ModelIdentity("Llama", 1, "abc"), engine=engine)
store.write("layers.0", "param", 0, mapped_empty(32768).view(torch.float32).fill_(7)).wait()
store.commit()
store.scratch([RecordSpec("layers.0", "gradient", "float32", 2048)])
child = os.fork()
if child == 0:  # like a data loader's worker: closing the parent's store and engine must do nothing
    store.close()
    engine.close()
    engine.__class__.close(engine)
    del store, engine
    print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_a_store_of_a_process_is_in_use_until_it_is_killed_even_if_a_forked_child_lives_on(
    paths: list[StorePath], engine: IoEngine
) -> None:
    command = [sys.executable, "-c", HOLDER, *(path.path for path in paths)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            with pytest.raises(StoreInUseError, match=rf"/a is in use by process {parent.pid}; end that run"):
                Store.open(paths, model=None, engine=engine)
            assert (Path(paths[0].path) / "gradients.bin").exists(), "the child closed something"
            parent.kill()
            parent.wait()
            os.kill(child, 0)  # the child still runs
            out = mapped_empty(32768).view(torch.float32)
            with Store.open(paths, model=ModelIdentity("Llama", 1, "abc"), engine=engine) as store:
                store.read("layers.0", "param", 0, out).wait()
                assert (out == 7).all()
                assert not any((Path(path.path) / "gradients.bin").exists() for path in paths)
        finally:
            os.kill(child, signal.SIGKILL)


@contextmanager
def mounted_disk(folder: Path, options: str) -> Iterator[Path]:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root")
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this environment cannot mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with mounted_disk(tmp_path / "disk", "size=1m") as disk:
        yield disk


def test_a_file_system_without_inodes_is_reported(tmp_path: Path, engine: IoEngine, model: ModelIdentity) -> None:
    with mounted_disk(tmp_path / "disk", "size=1m,nr_inodes=4") as disk:
        for number in range(2):
            (disk / str(number)).touch()
        record = RecordSpec("layers.0", "param", "float32", 2048)
        with pytest.raises((CapacityError, StorageError), match=r"no inode left"):
            Store.create([StorePath(str(disk / "store"), 1 << 19)], [record], model=model, engine=engine)


def test_a_disk_that_fills_up_during_creation_is_left_clean(
    small_disk: Path, engine: IoEngine, model: ModelIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the space was free when it was checked
    monkeypatch.setattr("hf_lohan.files.directories.free_bytes", lambda path: 1 << 30)
    two_mib = [RecordSpec("layers.0", "param", "float32", 1 << 19)]
    path = StorePath(str(small_disk / "store"))
    with pytest.raises(CapacityError, match=r"records-0\.bin needs 2,097,152 bytes .* free space .* is 1,0\d\d,\d+"):
        Store.create([path], two_mib, model=model, engine=engine)
    assert [entry.name for entry in (small_disk / "store").iterdir()] == ["lock"]


def test_a_full_disk_does_not_stop_a_preallocated_store(
    small_disk: Path, engine: IoEngine, model: ModelIdentity
) -> None:
    half = RecordSpec("layers.0", "param", "float32", 1 << 17)
    with Store.create([StorePath(str(small_disk / "store"))], [half], model=model, engine=engine) as store:
        with (small_disk / "ballast").open("wb", buffering=0) as ballast, pytest.raises(OSError, match="No space"):
            while True:
                ballast.write(bytes(4096))
        values = mapped_empty(1 << 19).random_(0, 256).view(torch.float32)
        store.write("layers.0", "param", 0, values).wait()
        store.sync()
        out = mapped_empty(1 << 19).view(torch.float32)
        store.read("layers.0", "param", 0, out).wait()
        assert torch.equal(out.view(torch.uint8), values.view(torch.uint8))
        with pytest.raises(CapacityError, match="needs"):
            store.scratch([half])
    assert not (small_disk / "store" / "gradients.bin").exists()


def test_a_read_only_file_system_is_named(small_disk: Path, engine: IoEngine, model: ModelIdentity) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StorageError, match=r"/store \(Read-only file system\): choose a directory"):
        record = RecordSpec("layers.0", "param", "float32", 2048)
        Store.create([StorePath(str(small_disk / "store"))], [record], model=model, engine=engine)
