"""One of two ranks, each a process, is killed, hangs or has a full disk at a random instant. Both ranks end soon, with
an error that names the failed rank. The resumed run equals a run without faults bit for bit."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rank_runs import NET_TIMEOUT_S, Fault, RankRun
from runs import FAILED, Outcome, Run, assert_same
from typer.testing import CliRunner

import hf_lohan
from hf_lohan.cli import app
from hf_lohan.cli.stores import verify_stores
from hf_lohan.report.findings import Findings
from hf_lohan.report.run_data import read_run
from hf_lohan.report.sentences import warnings
from hf_lohan.store import kept_commits
from hf_lohan.store.commits import write_commit
from hf_lohan.store.manifest import sealed

RUN = Run(num_ranks=2, num_steps=40)
SHORT = Run(num_ranks=2, num_steps=20)
IN_RAM = Run(num_ranks=2, num_steps=40, commit_every=3, cpu_memory="64MiB")
OF_FOUR = Run(num_ranks=4, num_steps=50)
FAULTS: tuple[Fault, ...] = ("killed", "hangs", "disk full")
FAULTS_A_RUN = 4
NUM_RUNS = 15


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    return RankRun(RUN, tmp_path_factory.mktemp("undisturbed")).finish()


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    "settings", [{}, {"transport": "nccl"}, pytest.param({"embedding": "rows"}, marks=pytest.mark.slow)], ids=str
)
def test_a_killed_rank_ends_the_other_and_the_run_resumes(settings: dict[str, Any], tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("undisturbed", "killed")]
    for folder in folders:
        folder.mkdir()
    whole, run = RankRun(SHORT, folders[0]), RankRun(replace(SHORT, **settings), folders[1])
    random = Random(0)
    for victim in (0, 1):
        print(run.befall("killed", victim, random))
    run.check_against(whole.finish())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(4))
def test_faults_while_weights_go_from_device_to_device(seed: int, undisturbed: list[Outcome], tmp_path: Path) -> None:
    """The undisturbed run sends weights through host memory, and the bits are equal."""
    random = Random(100 + seed)
    run = RankRun(replace(RUN, net_timeout=NET_TIMEOUT_S, transport="nccl"), tmp_path)
    for _ in range(FAULTS_A_RUN):
        print(run.befall(random.choice(("killed", "killed", "hangs")), random.randrange(RUN.num_ranks), random))
    run.check_against(undisturbed)


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
def undisturbed_of_four(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], list[Outcome]]:
    known: dict[Run, list[Outcome]] = {}

    def outcome_of(run: Run) -> list[Outcome]:
        if run not in known:
            known[run] = RankRun(run, tmp_path_factory.mktemp("undisturbed")).finish()
        return known[run]

    return outcome_of


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("seed", range(6))
def test_one_of_four_ranks_is_killed(
    seed: int, family: Any, undisturbed_of_four: Callable[[Run], list[Outcome]], tmp_path: Path
) -> None:
    """60 kills in all. The ranks of a mixture send rows to each other's experts, and rank 0 has torch's store."""
    random, run = Random(200 + seed), RankRun(replace(OF_FOUR, family=family), tmp_path)
    for number in range(5):
        print(run.befall("killed", 0 if number == seed % 5 else random.randrange(4), random))
    run.check_against(undisturbed_of_four(replace(OF_FOUR, family=family)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_rank_is_waited_for_and_named(slow: int, tmp_path: Path) -> None:
    """A rank that runs during a tenth of the time changes nothing but the time, and the report names it."""
    folders = [tmp_path / name for name in ("undisturbed", "slowed")]
    for folder in folders:
        folder.mkdir()
    whole, run = RankRun(SHORT, folders[0]).finish(), RankRun(SHORT, folders[1])
    children = run.start()
    assert all(child.wait_for("begun") for child in children)
    target, other = children[slow], children[1 - slow]
    while other.lives_for(0.01):
        target.send_signal(signal.SIGSTOP)
        other.lives_for(0.09)
        target.send_signal(signal.SIGCONT)
    assert [child.end() for child in children] == [0, 0]
    for ours, theirs in zip(run.outcomes(), whole, strict=True):
        assert_same(ours, theirs)
    findings = Findings(read_run(run.run.output_dir))
    print(findings.waits_for_ranks)
    assert any(text.startswith(f"Rank {slow} is slower than the others") for text in warnings(findings))


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
    """`lohan verify` accepts the stores at the step from which a resume would continue, even if one rank is one
    commit ahead of the other."""
    random, run = Random(seed), RankRun(IN_RAM, tmp_path)
    for _ in range(FAULTS_A_RUN):
        ended = run.befall("killed", random.randrange(2), random)
        if hf_lohan.last_step(run.run.output_dir) is not None:
            assert verify_stores([str(run.run.output_dir)])
        output = capsys.readouterr().out
        with capsys.disabled():
            print(f"after step {ended.after_step}: {'one rank ahead' if 'also has commit' in output else 'none ahead'}")
    run.check_against(undisturbed_in_ram)


def swap(run: RankRun) -> None:
    first, second, aside = run.store_of(0), run.store_of(1), run.folder / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def copy(run: RankRun) -> None:
    shutil.rmtree(run.store_of(1))
    shutil.copytree(run.store_of(0), run.store_of(1))


def forge_manifest(run: RankRun) -> None:
    file = run.store_of(1) / "manifest.json"
    fields = json.loads(file.read_text())
    fields["layout"]["records"][0]["first"] = 1 << 40
    file.write_text(json.dumps(sealed(fields)))


def forge_journal(run: RankRun) -> None:
    for commit in reversed(kept_commits([str(run.store_of(1))])):
        forged = {name: content for name, content in commit.journal.items() if name != "trainer_state.json"}
        write_commit(replace(commit, journal=forged), str(run.store_of(1)), keep_previous=True)


def flip(name: str) -> Callable[[RankRun], None]:
    def flip_in_all(run: RankRun) -> None:
        for file in run.store_of(1).glob(name):
            content = bytearray(file.read_bytes())
            for at in range(len(content) // 2, len(content), 1 << 16):
                content[at] ^= 8
            file.write_bytes(content)

    return flip_in_all


def remove(name: str) -> Callable[[RankRun], None]:
    return lambda run: (run.store_of(1) / name).unlink()


@pytest.mark.slow
@pytest.mark.storm
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (swap, "holds the store of rank 1 of 2, not of rank 0 of 2"),
        (copy, "holds the store of rank 0 of 2, not of rank 1 of 2"),
        (forge_manifest, "does not belong to"),
        (forge_journal, "has a journal that no run has written"),
        (flip("manifest.json"), "is damaged or not a store's manifest"),
        (flip("commit.safetensors"), "no valid commit in|wrong checksum in"),
        (flip("records-*.bin"), "is damaged from element"),
        (flip("log.jsonl"), "wrong checksum in .*log.jsonl"),
        (remove("manifest.json"), "the store of rank 1 of 2 is not under"),
        (remove("records-1.bin"), r"records-1\.bin"),
        (lambda run: shutil.rmtree(run.store_of(1)), "the store of rank 1 of 2 is not under"),
        (flip("commit-previous.safetensors"), ""),
        (remove("commit-previous.safetensors"), ""),
    ],
    ids=[
        *("swapped", "copied", "forged-manifest", "forged-journal", "damaged-manifest", "damaged-commit"),
        *("damaged-records", "damaged-log", "no-manifest", "no-records", "no-folder"),
        *("damaged-previous", "no-previous"),
    ],
)
def test_a_damaged_store_of_one_rank_is_refused_by_both_ranks_or_ignored(
    harm: Callable[[RankRun], None], message: str, undisturbed_in_ram: list[Outcome], tmp_path: Path
) -> None:
    """A resume and `lohan verify` give the same error, and a user can understand it without knowing the code."""
    run, random = RankRun(IN_RAM, tmp_path), Random(1)
    while (hf_lohan.last_step(run.run.output_dir) or 0) < 6:
        run.befall("killed", 1, random)
    harm(run)
    if not message:
        assert verify_stores([str(run.run.output_dir)])
        run.check_against(undisturbed_in_ram)
        return
    result = CliRunner().invoke(app, ["verify", str(run.run.output_dir)])
    output = " ".join((result.stdout + result.stderr).split())
    assert result.exit_code in (1, 2) and re.search(message, output), output
    children = run.start()
    codes = [child.end() for child in children]
    errors = [child.error for child in children]
    assert codes == [FAILED] * 2 and any(re.search(message, error) for error in errors), errors
    kinds = {error.partition(":")[0] for error in errors}
    assert kinds <= {"ForeignStoreError", "StorageError", "CorruptionError", "RankFailedError", "ValueError"}, errors
