"""A store that is missing, read-only or in use gives one clear error, and no file on disk changes."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from processes import Child, finish, run_in
from runs import FAILED, TERMINATED, Mishap, Outcome, Run, assert_same, read_outcome
from short_runs import train_until
from small_file_system import MIB, make_read_only, make_writable, small_file_system
from typer.testing import CliRunner

import hf_lohan
from hf_lohan.cli import app

RUN = Run(num_steps=8)
NUM_STEPS_BEFORE = 4


def begin(run: Run) -> None:
    """Train some steps and end with SIGTERM, so that all of them are committed."""
    child = Child(run, Mishap(signals=(signal.SIGTERM,), event="on_step_end", step=NUM_STEPS_BEFORE))
    assert child.end() == TERMINATED, child.output_tail()
    assert hf_lohan.last_step(run.output_dir) == NUM_STEPS_BEFORE


def error_of(run: Run, mishap: Mishap | None = None) -> str:
    """Return the one-line error of a run that fails before its first step."""
    child = Child(run, mishap)
    assert child.end() == FAILED, child.output_tail()
    assert not child.num_reports("stepped")
    assert child.error and "\n" not in child.error
    return child.error


def run_with_store(folder: Path, run: Run = RUN) -> Run:
    """Return a run with its store in a known folder."""
    return replace(run_in(folder, run), ssd=str(folder / "store"))


def store_of(run: Run) -> Path:
    return Path(run.ssd)


@pytest.mark.covering(0)
@pytest.mark.parametrize("resume", ["last_step", True])
def test_removed_before_resuming(resume: bool | str, tmp_path: Path) -> None:
    run = run_with_store(tmp_path, replace(RUN, resume=resume, insists=True))
    begin(run_with_store(tmp_path))
    store_of(run).rename(tmp_path / "elsewhere")
    assert hf_lohan.last_step(run.output_dir) is None
    message = error_of(run)
    assert message.startswith("ValueError: "), message
    assert str(store_of(run)) in message or str(run.output_dir) in message


def test_removed_and_put_back(undisturbed: Callable[[Run], Outcome], tmp_path: Path) -> None:
    run = run_with_store(tmp_path)
    begin(run)
    store_of(run).rename(tmp_path / "elsewhere")
    error_of(replace(run, insists=True))
    if store_of(run).exists():
        store_of(run).rename(tmp_path / "made by the attempt")
    (tmp_path / "elsewhere").rename(store_of(run))
    finish(run)
    assert_same(read_outcome(tmp_path), undisturbed(RUN))


def test_taken_away_while_training(undisturbed: Callable[[Run], Outcome], tmp_path: Path) -> None:
    """The next commit has no folder. The earlier commits are in the moved folder."""
    run = run_with_store(tmp_path)
    child = Child(run, Mishap(holds_at=NUM_STEPS_BEFORE))
    assert child.wait_for("stepped", NUM_STEPS_BEFORE), child.output_tail()
    store_of(run).rename(tmp_path / "elsewhere")
    child.go_on()
    assert child.end() == FAILED, child.output_tail()
    assert str(store_of(run)) in child.error
    assert "\n" not in child.error
    (tmp_path / "elsewhere").rename(store_of(run))
    committed = hf_lohan.last_step(run.output_dir)
    assert committed is not None
    assert committed >= NUM_STEPS_BEFORE - 2
    finish(run)
    assert_same(read_outcome(tmp_path), undisturbed(RUN))


@pytest.mark.covering(0)
@pytest.mark.parametrize("what", ["the store", "all output"])
def test_read_only(what: str, undisturbed: Callable[[Run], Outcome], tmp_path: Path) -> None:
    with small_file_system(tmp_path, 64 * MIB) as disk:
        run = Run(num_steps=8, output_dir=disk / "out", beside=tmp_path)
        if what == "the store":
            run = replace(run, output_dir=tmp_path / "out", ssd=str(disk / "store"))
        begin(run)
        make_read_only(disk)
        assert hf_lohan.last_step(run.output_dir) == NUM_STEPS_BEFORE  # reading the last step needs no write access
        message = error_of(run)
        assert str(disk / "store" if what == "the store" else run.output_dir) in message
        assert "Read-only file system" in message
        make_writable(disk)
        finish(run)
        assert_same(read_outcome(tmp_path), undisturbed(RUN))


@pytest.mark.covering(0)
@pytest.mark.parametrize("what", ["as a run left it", "a copy without its lock", "after a kill", "in use"])
def test_a_read_only_store_is_verified_and_exported(what: str, tmp_path: Path) -> None:
    """Such as a backup or a snapshot. A lock that another process holds through another mount still counts."""

    def lohan(*args: object) -> tuple[int, str]:
        result = CliRunner().invoke(app, [*map(str, args)])
        return result.exit_code, result.stdout + result.stderr

    with small_file_system(tmp_path, 64 * MIB) as disk, ExitStack() as held:
        train_until(disk / "run", 2)
        store = disk / "run" / "_lohan" / "store"
        if what == "a copy without its lock":
            (store / "lock").unlink()
        elif what == "after a kill":
            (store / "gradients.bin").write_bytes(b"spilled")
        make_read_only(disk)
        if what == "in use":
            other = held.enter_context((store / "lock").open())
            fcntl.flock(other, fcntl.LOCK_EX)
            assert "is in use by process" in lohan("verify", disk / "run")[1]
            return
        before = sorted(store.iterdir())
        code, output = lohan("verify", disk / "run")
        assert code == 0 and "every checksum is right" in output, output
        assert lohan("export", disk / "run", tmp_path / "exported")[0] == 0
        assert sorted(store.iterdir()) == before
        code, output = lohan("reshard", disk / "run", "--ranks", 2)
        assert code != 0 and "Read-only file system" in output, output


def test_two_processes_on_one_store(undisturbed: Callable[[Run], Outcome], tmp_path: Path) -> None:
    """The second process is refused, whether it resumes or starts anew, and the first process is not disturbed."""
    first = run_with_store(tmp_path)
    child = Child(first, Mishap(holds_at=NUM_STEPS_BEFORE))
    assert child.wait_for("stepped", NUM_STEPS_BEFORE), child.output_tail()
    for number, resume in enumerate(("last_step", False)):
        beside = tmp_path / f"second{number}"
        beside.mkdir()
        second = replace(first, beside=beside, resume=resume, insists=True)
        message = error_of(second)
        assert message.startswith("StoreInUseError: "), message
        assert f"process {child.pid}" in message
        assert os.path.realpath(store_of(first)) in message
    child.go_on()
    assert child.end() == 0, child.output_tail()
    assert_same(read_outcome(tmp_path), undisturbed(RUN))
