"""Real processes with collectives under way in several lanes. If one is killed, fails, hangs or leaves, all others end
by an error that names it, and their interpreters end without an abort."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from busy_ranks import FAULTS, Fault, befall, kill_in_a_gather
from covering import slow_but

pytestmark = pytest.mark.usefixtures("fork_server")


@pytest.mark.parametrize("fault", slow_but(("killed", "fails", "leaves"), FAULTS))
def test_all_others_name_the_rank_with_a_fault(fault: Fault) -> None:
    befall(fault, 0, 2).check()


@pytest.mark.slow
def test_a_rank_that_is_killed_with_the_store_and_a_living_child_is_named() -> None:
    """The child keeps the store's connections open, too, so calls to it hang."""
    befall("killed with a child", 0, 4, rank_0_has_store=True).check()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_local", [2, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_at_random_instants(fault: Fault, num_local: int) -> None:
    for seed in range(1, 11):
        befall(fault, seed, num_local).check()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", ["killed", "fails"])
@pytest.mark.parametrize("num_local", [4, 2])
def test_the_process_with_the_store_ends_first(fault: Fault, num_local: int) -> None:
    for seed in range(5):
        befall(fault, seed, num_local, rank_0_has_store=True).check()


@pytest.mark.slow
@pytest.mark.storm
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", ["fails", "killed"])
def test_interpreters_end_while_64_mib_are_under_way(fault: Fault) -> None:
    """Over 200 ends by a failure in all. Each neither aborts nor hangs, and leaves nothing in RAM."""
    before = set(os.listdir("/dev/shm"))
    for seed in range(40):
        befall(fault, seed, 2, num_bytes=64 << 20).check()
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "lohan" in name and "tests" not in name}


@pytest.mark.parametrize("with_child", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_process_that_waits_in_torchs_own_collective_for_a_killed_rank_ends(with_child: bool, tmp_path: Path) -> None:
    codes, errors = kill_in_a_gather(tmp_path / "gather", with_child=with_child)
    assert codes == [1, 1]
    for error in errors:
        assert "RankFailedError: rank 1 (pid " in error or not with_child, error
