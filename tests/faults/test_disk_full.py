"""A small real disk becomes full at some instant of a run. The run continues, because its files are allocated at the
start, or fails with one error that tells where bytes are missing and how many. With free space again it resumes from
its last committed step, to the bit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from processes import Child, finish
from runs import FAILED, Mishap, Outcome, Run, assert_same, read_outcome
from small_file_system import MIB, small_file_system, take_ballast_away
from write_calls import WriteCall

import hf_lohan

RUN = Run(family="opt", num_steps=6, save_steps=2)
NUM_INSTANTS = 20
NEEDED_AND_FREE = re.compile(
    r"needs [\d,]+ bytes.* (free space|capacity)[^;]* is [\d,]+ bytes"
    r"|needs [\d,]+ bytes and [\d,]+ are left"
    # The sizes of other libraries' files are unknown; the error tells how far the write got.
    r"|after [\d,]+ bytes of it [\d,]+ were left"
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path, 64 * MIB) as disk:
        yield disk


@pytest.fixture(scope="module")
def num_write_calls(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The number of write calls of a run on such a disk."""
    folder = tmp_path_factory.mktemp("counted")
    with small_file_system(folder, 64 * MIB) as disk:
        return finish(on(disk, folder, RUN)).num_write_calls


def on(disk: Path, beside: Path, run: Run) -> Run:
    """Return the run with all its output on the disk."""
    (disk / "out").mkdir()
    return replace(run, output_dir=disk / "out", beside=beside)


def check_free_space_error(message: str, disk: Path) -> None:
    assert "\n" not in message
    assert str(disk) in message
    assert NEEDED_AND_FREE.search(message), message


@pytest.mark.slow
@pytest.mark.parametrize("instant", range(NUM_INSTANTS))
def test_a_disk_full_from_a_random_write_call(
    instant: int, num_write_calls: int, disk: Path, undisturbed: Callable[[Run], Outcome], tmp_path: Path
) -> None:
    number = 1 + instant * (num_write_calls * 17 // 20) // NUM_INSTANTS  # counts differ a little from run to run
    run = on(disk, tmp_path, RUN)
    child = Child(run, Mishap(write_call=WriteCall(number, "fill")))
    code = child.end()
    assert take_ballast_away(disk), "the run made too few write calls for this instant"
    print(f"call {number} of {num_write_calls}: exit code {code}, {child.error or 'went on'}")
    assert code in (0, FAILED), child.output_tail()
    if code == FAILED:
        assert (hf_lohan.last_step(run.output_dir) or 0) >= child.last_step - 2
        finish(run)
    assert_same(read_outcome(tmp_path), undisturbed(RUN))
    if code == FAILED:
        check_free_space_error(child.error, disk)


def test_a_store_that_does_not_fit_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with small_file_system(tmp_path, 4 * MIB) as disk:
        child = Child(on(disk, tmp_path, Run(num_layers=16)))
        assert child.end() == FAILED, child.output_tail()
        check_free_space_error(child.error, disk)
        assert not child.num_reports("stepped")
        assert not list(disk.glob("**/*.bin")), "the refused store left files"
