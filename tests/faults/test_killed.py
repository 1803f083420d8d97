"""A process may end at any instant; the run resumes from its last committed step, bit for bit. Each test ends many
processes of one run and lets the last one finish. Random instants follow a report of the process (started, training
begun, step ended), so they fall into loading, resuming, forward, backward, update, commit and checkpoint. Each test
checks that the run made progress in between."""

from __future__ import annotations

import itertools
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from processes import Child, Interrupter, Interruption, finish, run_in
from runs import INTERRUPTED, TERMINATED, Mishap, Outcome, Run, assert_same, read_outcome
from write_calls import WriteCall

import hf_lohan
from hf_lohan.checkpoint.resume_point import store_paths_of
from hf_lohan.store import last_commit
from hf_lohan.updates import MISSED_STEPS_NAME

Undisturbed = Callable[[Run], Outcome]

ANYWHERE = ("started", "begun", "stepped", "stepped")
IN_TRAINING = ("begun", "stepped", "stepped")
MOST_STEPS_LOST = 2
"""The running step and the step before it, whose updates run during the forward of the running step."""


def check_progress(done: Sequence[Interruption], *, least_distinct_steps: int, most_lost: int = 2) -> None:
    """Check that no committed step was lost and that the run made progress."""
    print(Counter(one.after for one in done), [one.committed_step for one in done])
    committed = [one.committed_step for one in done]
    assert committed == sorted(committed)
    assert len(set(committed)) >= least_distinct_steps
    for one in done:
        assert one.committed_step >= one.reported_step - most_lost, one


def check_against(run: Run, undisturbed: Undisturbed) -> None:
    """Finish the run and compare its outcome with that of a run without faults."""
    finish(run)
    assert_same(read_outcome(run.beside), undisturbed(run))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "num_kills"),
    [
        (Run(num_steps=150), 100),
        (Run(family="opt", num_steps=40, save_steps=3), 25),
        (Run(family="opt", num_steps=40, save_steps=3, resume=True, activations="swap"), 25),
        (Run(num_steps=40, save_steps=3, cpu_memory="7MiB"), 20),
        (Run(num_steps=40, cpu_memory="64MiB"), 20),
        (Run(num_steps=40, optimizer="Muon"), 20),
        (Run(num_steps=40, parked=0.4, activations="swap"), 20),
        (Run(num_steps=60, bf16=True), 40),
        (Run(num_steps=40, bf16=True, family="mixtral", cpu_memory="64MiB"), 20),
        (Run(num_steps=30, compiled=True, activations="swap"), 8),
        (Run(num_steps=40, save_steps=3, activations="swap", chunked_layers=6), 20),
        (Run(family="mixtral", num_steps=6, parked=0.4), 2),
        pytest.param(Run(family="qwen3_moe", num_steps=80), 50, marks=pytest.mark.storm),
        pytest.param(Run(family="mixtral", num_steps=80, activations="swap"), 50, marks=pytest.mark.storm),
    ],
    ids=[
        *("hundred-kills", "among-checkpoints", "resume-true", "most-records-in-ram", "all-records-in-ram", "muon"),
        "parked-updates",
        *("bfloat16", "bfloat16-experts-in-ram", "compiled"),
        *("in-chunks", "streamed-experts"),
        "experts-behind",
        "experts-swapped",
    ],
)
def test_killed_again_and_again(run: Run, num_kills: int, undisturbed: Undisturbed, tmp_path: Path) -> None:
    run = run_in(tmp_path, run)
    done = Interrupter(run, seed=num_kills).interrupt(signal.SIGKILL, num_kills, ANYWHERE)
    assert {one.exit_code for one in done} == {-signal.SIGKILL}
    check_progress(done, least_distinct_steps=num_kills // 3)
    afters = Counter(one.after for one in done)
    assert all(afters[kind] >= num_kills // 10 for kind in ANYWHERE), afters
    check_against(run, undisturbed)


def test_killed_while_expert_updates_are_pending(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """The commit records the missed steps, so that another process can apply them."""
    run = run_in(tmp_path, Run(family="qwen3_moe", num_steps=6, save_steps=4))
    kill_after(run, num_steps=3)
    commit = last_commit(store_paths_of(run.output_dir)[0])
    assert commit is not None and MISSED_STEPS_NAME in commit.journal
    check_against(run, undisturbed)


@pytest.mark.slow
@pytest.mark.storm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cpu_memory", ["7MiB", "64MiB"], ids=["most-records-in-ram", "all-records-in-ram"])
def test_killed_between_commits(cpu_memory: str, undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Records that were only in RAM are lost, and the steps since the last commit are repeated."""
    run = run_in(tmp_path, Run(num_steps=420, commit_every=7, cpu_memory=cpu_memory))
    done = Interrupter(run, seed=7).interrupt(signal.SIGKILL, 50, ANYWHERE)
    assert {one.exit_code for one in done} == {-signal.SIGKILL}
    check_progress(done, least_distinct_steps=10, most_lost=7 + MOST_STEPS_LOST)
    assert {one.committed_step % 7 for one in done} == {0}
    check_against(run, undisturbed)


def test_killed_between_two_commits(undisturbed: Undisturbed, tmp_path: Path) -> None:
    run = run_in(tmp_path, Run(num_steps=8, commit_every=3, cpu_memory="64MiB"))
    kill_after(run, num_steps=5)
    assert hf_lohan.last_step(run.output_dir) == 3
    check_against(run, undisturbed)


@pytest.mark.slow
def test_killed_before_each_write_of_a_step(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Kill the process before every call that changes a file, from opening the store to the end of a step."""
    run = run_in(tmp_path, Run(num_steps=12))
    calls_of_a_run = finish(run_in(_folder(tmp_path, "short"), Run(num_steps=1))).num_write_calls
    calls_of_two = finish(run_in(_folder(tmp_path, "longer"), Run(num_steps=2))).num_write_calls
    calls_of_a_step = calls_of_two - calls_of_a_run
    kill_after(run, num_steps=3)
    resumed_at = hf_lohan.last_step(run.output_dir)
    last = resumed_at
    for number in itertools.count(1):
        child = Child(run, Mishap(write_call=WriteCall(number, "die")))
        code = child.end()
        assert code == -signal.SIGKILL, f"exit code {code}:\n{child.output_tail()}"
        step = hf_lohan.last_step(run.output_dir)
        assert step is not None and last is not None and resumed_at is not None
        assert last <= step <= last + 1
        last = step
        if step > resumed_at + 1:
            break
    assert number > calls_of_a_step // 2, "all kills came before the commit"
    check_against(run, undisturbed)


def _folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


def kill_after(run: Run, num_steps: int) -> None:
    """Train this many steps, then kill the process."""
    child = Child(run, Mishap(holds_at=num_steps))
    assert child.wait_for("stepped", num_steps), child.output_tail()
    child.send_signal(signal.SIGKILL)
    assert child.end() == -signal.SIGKILL


@pytest.mark.slow
def test_terminated_again_and_again(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """SIGTERM loses nothing: the last completed step is committed."""
    run = run_in(tmp_path, Run(num_steps=350))
    done = Interrupter(run, seed=1).interrupt(signal.SIGTERM, 100, IN_TRAINING)
    assert {one.exit_code for one in done} == {TERMINATED}
    check_progress(done, least_distinct_steps=67)
    afters = Counter(one.after for one in done)
    assert all(afters[kind] >= 10 for kind in IN_TRAINING), afters
    for one in done:
        assert one.committed_step == one.reported_step, one
    check_against(run, undisturbed)


@pytest.mark.slow
def test_terminated_before_training(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """SIGTERM ends the process at once before `train()` and while the store is opened."""
    run = run_in(tmp_path, Run(num_steps=12))
    done = Interrupter(run, seed=2).interrupt(signal.SIGTERM, 5, ("started",))
    assert {one.exit_code for one in done} <= {-signal.SIGTERM, TERMINATED}
    check_against(run, undisturbed)


@pytest.mark.slow
def test_ctrl_c_again_and_again(undisturbed: Undisturbed, tmp_path: Path) -> None:
    run = run_in(tmp_path, Run(num_steps=60))
    done = Interrupter(run, seed=3).interrupt(signal.SIGINT, 10, IN_TRAINING)
    assert {one.exit_code for one in done} == {INTERRUPTED}
    check_progress(done, least_distinct_steps=6)
    check_against(run, undisturbed)


@pytest.mark.parametrize(
    "event",
    [
        pytest.param("on_step_begin", marks=pytest.mark.slow),
        "on_pre_optimizer_step",
        pytest.param("on_optimizer_step", marks=pytest.mark.slow),
        *(pytest.param(event, marks=pytest.mark.slow) for event in ("on_step_end", "on_log")),
        "on_save",
    ],
)
def test_terminated_in_a_step_commits_that_step(event: str, undisturbed: Undisturbed, tmp_path: Path) -> None:
    run = run_in(tmp_path, Run(family="opt", num_steps=8, save_steps=2))
    child = Child(run, Mishap(signals=(signal.SIGTERM,), event=event, step=4))
    assert child.end() == TERMINATED, child.output_tail()
    assert child.last_step == 4
    assert hf_lohan.last_step(run.output_dir) == 4
    check_against(run, undisturbed)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("signals", "codes"),
    [
        ((signal.SIGTERM, signal.SIGTERM), (TERMINATED, -signal.SIGTERM)),
        ((signal.SIGINT,), (INTERRUPTED,)),
        ((signal.SIGTERM, signal.SIGINT), (INTERRUPTED,)),
    ],
    ids=["second-sigterm", "ctrl-c", "ctrl-c-after-sigterm"],
)
@pytest.mark.parametrize("event", ["on_step_begin", "on_optimizer_step"])
def test_ctrl_c_or_a_second_sigterm_abandons_the_step(
    event: str, signals: tuple[int, ...], codes: tuple[int, ...], undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = run_in(tmp_path, Run(num_steps=8))
    child = Child(run, Mishap(signals=signals, event=event, step=4))
    assert child.end() in codes, child.output_tail()
    assert child.last_step == 3, "the step was completed"
    committed = hf_lohan.last_step(run.output_dir)
    assert committed is not None
    assert 4 - MOST_STEPS_LOST <= committed <= 3
    check_against(run, undisturbed)


def test_ctrl_c_while_the_first_step_is_planned(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """An exception in a function that torch calls during planning would abort the process."""
    run = run_in(tmp_path, Run(num_steps=8))
    child = Child(run, Mishap(signals=(signal.SIGINT,), event="in_trace"))
    assert child.end() == INTERRUPTED, child.output_tail()
    assert child.num_reports("begun") == 1 and child.last_step == 0
    check_against(run, undisturbed)


@pytest.mark.slow
def test_a_hanging_process_prints_its_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child(run_in(tmp_path, Run()), Mishap(holds_at=1))
    assert child.wait_for("stepped"), child.output_tail()
    monkeypatch.setattr("processes.HANGS_AFTER_S", 0.5)
    with pytest.raises(pytest.fail.Exception, match="in on_step_end"):
        child.end()


def test_killed_when_all_steps_are_done(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """No step is left: a resume gives the same log and weights."""
    run = run_in(tmp_path, Run(num_steps=8))
    finish(run)
    (tmp_path / "outcome.safetensors").unlink()
    child = finish(run)
    assert child.num_reports("stepped") == 0
    assert_same(read_outcome(tmp_path), undisturbed(run))
