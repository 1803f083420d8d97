"""A checkpoint folder is complete or does not exist."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.trainer_utils import get_last_checkpoint, sort_checkpoints

from hf_lohan.checkpoint.whole_folder import UNFINISHED_NAME, remove_unfinished, unfinished_checkpoint
from hf_lohan.files import StorageError


def write(folder: Path, text: str = "new") -> None:
    (folder / "sub").mkdir(parents=True)
    (folder / "weights").write_text(text)
    (folder / "sub" / "state").write_text(text)


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


WHOLE = {"sub/state": "new", "weights": "new"}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A folder with two complete checkpoints."""
    for step in (2, 4):
        write(tmp_path / "run" / f"checkpoint-{step}", f"old {step}")
    return tmp_path / "run"


def test_a_checkpoint_appears_when_complete(run_dir: Path) -> None:
    with unfinished_checkpoint(str(run_dir), "checkpoint-6") as unfinished:
        write(unfinished / "checkpoint-6")
        assert get_last_checkpoint(str(run_dir)) == str(run_dir / "checkpoint-4")
        assert len(sort_checkpoints(str(run_dir), use_mtime=True)) == 2
    assert get_last_checkpoint(str(run_dir)) == str(run_dir / "checkpoint-6")
    assert content(run_dir / "checkpoint-6") == WHOLE
    assert sorted(os.listdir(run_dir)) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_the_folder_of_the_run_is_created(tmp_path: Path) -> None:
    with unfinished_checkpoint(str(tmp_path / "a" / "b"), "checkpoint-1") as unfinished:
        write(unfinished / "checkpoint-1")
    assert content(tmp_path / "a" / "b" / "checkpoint-1") == WHOLE


def test_files_of_the_run_are_beside_an_unfinished_checkpoint(run_dir: Path) -> None:
    """Trainers of other packages copy such files into each checkpoint. They may move them, too."""
    for name in ("args.json", "predictions"):
        (run_dir / name).write_text(name)
    with unfinished_checkpoint(str(run_dir), "checkpoint-6") as unfinished:
        write(unfinished / "checkpoint-6")
        shutil.copy(unfinished / "args.json", unfinished / "checkpoint-6")
        shutil.move(unfinished / "predictions", unfinished / "checkpoint-6")
    beside = {"args.json": "args.json", "predictions": "predictions"}
    assert content(run_dir / "checkpoint-6") == {**WHOLE, **beside}
    assert {path.name: path.read_text() for path in run_dir.iterdir() if path.is_file()} == beside


def test_a_checkpoint_of_the_same_name_is_replaced(run_dir: Path) -> None:
    (run_dir / "checkpoint-4" / "checkpoint-is-incomplete.txt").write_text("left over")
    with unfinished_checkpoint(str(run_dir), "checkpoint-4") as unfinished:
        write(unfinished / "checkpoint-4")
    assert content(run_dir / "checkpoint-4") == WHOLE
    assert sorted(os.listdir(run_dir)) == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt(), OSError(errno.EIO, "disk")])
@pytest.mark.parametrize("name", ["checkpoint-4", "checkpoint-6"])
def test_a_failed_save_changes_nothing(name: str, error: BaseException, run_dir: Path) -> None:
    before = content(run_dir)
    with pytest.raises(type(error)), unfinished_checkpoint(str(run_dir), name) as unfinished:
        write(unfinished / name)
        raise error
    assert content(run_dir) == before
    assert not (run_dir / UNFINISHED_NAME).exists()


@pytest.mark.parametrize("at_call", [0, 1])
def test_a_failed_rename_changes_nothing(at_call: int, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rename moves the old checkpoint aside, the second names the new checkpoint."""
    before = content(run_dir)
    outcomes = [OSError(errno.EIO, "disk") if call == at_call else None for call in range(2)]
    real = os.rename

    def rename(source: Any, target: Any) -> None:
        if outcomes and (error := outcomes.pop(0)):
            raise error
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="disk"), unfinished_checkpoint(str(run_dir), "checkpoint-4") as unfinished:
        write(unfinished / "checkpoint-4")
    assert content(run_dir) == before


def test_all_files_are_synced_before_the_rename(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        events.append(os.fstat(fd).st_ino)
        real_fsync(fd)

    def rename(source: Any, target: Any) -> None:
        events.append(Path(target).name)
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    with unfinished_checkpoint(str(run_dir), "checkpoint-6") as unfinished:
        write(unfinished / "checkpoint-6")
        (unfinished / "checkpoint-6" / "link").symlink_to("nowhere")
    named = events.index("checkpoint-6")
    parts = (".", "weights", "sub", "sub/state")
    assert {(run_dir / "checkpoint-6" / part).stat().st_ino for part in parts} == set(events[:named])
    assert events[named + 1 :] == [run_dir.stat().st_ino, run_dir.parent.stat().st_ino]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(run_dir: Path, name: str, num_renames: int | None) -> None:
    real = os.rename
    renamed: list[Any] = []

    def rename(source: Any, target: Any) -> None:
        if len(renamed) == num_renames:
            die()
        real(source, target)
        renamed.append(target)

    os.rename = rename  # type: ignore[assignment]
    with unfinished_checkpoint(str(run_dir), name) as unfinished:
        write(unfinished / name)
        if num_renames is None:
            die()


@pytest.mark.parametrize(
    ("name", "num_renames"),
    [("checkpoint-6", None), ("checkpoint-4", None), ("checkpoint-6", 0), ("checkpoint-4", 0), ("checkpoint-4", 1)],
    ids=["writing", "writing_again", "before_naming", "before_moving_aside", "between_the_renames"],
)
def test_a_killed_save_keeps_earlier_checkpoints(name: str, num_renames: int | None, run_dir: Path) -> None:
    before = content(run_dir)
    child = multiprocessing.get_context("fork").Process(target=save_and_die, args=(run_dir, name, num_renames))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert (run_dir / UNFINISHED_NAME).exists()
    last = get_last_checkpoint(str(run_dir))
    assert last is not None and set(content(Path(last)).values()) < {"old 2", "old 4"}
    remove_unfinished(str(run_dir))
    assert content(run_dir) == before
    assert sorted(os.listdir(run_dir)) == ["checkpoint-2", "checkpoint-4"]


def test_a_save_removes_the_remains_of_a_killed_save(run_dir: Path) -> None:
    write(run_dir / UNFINISHED_NAME / "checkpoint-6", "half")
    (run_dir / UNFINISHED_NAME / "checkpoint-6" / "stray").touch()
    with unfinished_checkpoint(str(run_dir), "checkpoint-6") as unfinished:
        write(unfinished / "checkpoint-6")
    assert content(run_dir / "checkpoint-6") == WHOLE
    assert not (run_dir / UNFINISHED_NAME).exists()


def test_a_checkpoint_written_elsewhere_is_logged(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with unfinished_checkpoint(str(run_dir), "checkpoint-6"):
        pass
    assert "was written directly, so a crash" in caplog.text
    assert sorted(os.listdir(run_dir)) == ["checkpoint-2", "checkpoint-4"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"this environment cannot mount: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    "save",
    [
        lambda tensor, path: Path(path).write_bytes(tensor.numpy().tobytes()),
        lambda tensor, path: torch.save(tensor, path),
        lambda tensor, path: save_file({"tensor": tensor}, path),
    ],
    ids=["python", "torch", "safetensors"],
)
def test_a_full_disk_is_named_with_bytes(save: Callable[[torch.Tensor, Path], None], small_disk: Path) -> None:
    write(small_disk / "checkpoint-2", "old")
    message = ""
    try:
        with unfinished_checkpoint(str(small_disk), "checkpoint-4") as unfinished:
            (unfinished / "checkpoint-4").mkdir()
            (unfinished / "checkpoint-4" / "first").write_bytes(bytes(100_000))
            save(torch.ones(100_000), unfinished / "checkpoint-4" / "second")
    except StorageError as error:  # `pytest.raises` would keep torch's writer and its open file alive
        assert error.errno == errno.ENOSPC
        message = str(error)
    expected = (
        rf"{small_disk}/checkpoint-4 \(No space left on device\): [\d,]{{5,}} bytes of it were written and [\d,]+ "
        "bytes were free; free"
    )
    assert re.search(expected, message), message
    assert os.listdir(small_disk) == ["checkpoint-2"]
    assert shutil.disk_usage(small_disk).free > 200_000
