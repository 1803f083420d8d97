"""One of two ranks, each a process, is killed, hangs, or has a full disk, at random instants: both end soon, with a
sentence that names it, and what they then go on to is to the bit the run that nothing happened to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from rank_runs import NET_TIMEOUT_S, Fault, RankRun
from runs import Outcome, Run

import hf_lohan
from hf_lohan.cli.verification import verify_store

RUN = Run(num_ranks=2, num_steps=40)
SHORT = Run(num_ranks=2, num_steps=20)
IN_RAM = Run(num_ranks=2, num_steps=40, commit_every=3, cpu_memory="64MiB")
FAULTS: tuple[Fault, ...] = ("killed", "hangs", "disk full")
FAULTS_A_RUN = 4
NUM_RUNS = 15


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    return RankRun(RUN, tmp_path_factory.mktemp("undisturbed")).finish()


def test_a_killed_rank_ends_the_other_and_the_run_goes_on(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("undisturbed", "killed")]
    for folder in folders:
        folder.mkdir()
    whole, run = (RankRun(SHORT, folder) for folder in folders)
    random = Random(0)
    for victim in (0, 1):
        print(run.befall("killed", victim, random))
    run.check_against(whole.finish())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(NUM_RUNS))
def test_random_faults_of_random_ranks(seed: int, undisturbed: list[Outcome], tmp_path: Path) -> None:
    random = Random(seed)
    run = RankRun(replace(RUN, net_timeout=NET_TIMEOUT_S), tmp_path)
    with_small_disk = random.randrange(RUN.num_ranks)
    with run.small_disk(with_small_disk):
        for _ in range(FAULTS_A_RUN):
            fault = random.choice(FAULTS)
            victim = with_small_disk if fault == "disk full" else random.randrange(RUN.num_ranks)
            print(run.befall(fault, victim, random))
        run.check_against(undisturbed)


@pytest.fixture(scope="module")
def undisturbed_in_ram(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    return RankRun(IN_RAM, tmp_path_factory.mktemp("undisturbed")).finish()


@pytest.mark.slow
@pytest.mark.storm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(NUM_RUNS))
def test_killed_between_commits_of_records_in_ram(
    seed: int, undisturbed_in_ram: list[Outcome], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is left verifies at the step that a resume takes, whichever rank is ahead."""
    random, run = Random(seed), RankRun(IN_RAM, tmp_path)
    for _ in range(FAULTS_A_RUN):
        ended = run.befall("killed", random.randrange(2), random)
        if hf_lohan.last_step(run.run.output_dir) is not None:
            assert verify_store([str(run.run.output_dir)])
        said = capsys.readouterr().out
        with capsys.disabled():
            print(f"after step {ended.after_step}: {'one rank ahead' if 'is ahead' in said else 'none ahead'}")
    run.check_against(undisturbed_in_ram)
