"""Trainer in two processes equals a stock process that accumulates the same batches, bit for bit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trained_by_ranks
from equal_tensors import assert_same_tensors
from python_runs import TWO_RANKS, run_python
from safetensors.torch import load_file
from typer.testing import CliRunner

from hf_lohan.cli import app
from hf_lohan.ranks import Links

SCRIPT = str(Path(__file__).parent / "trained_by_ranks.py")
ONE_PROCESS = ("stock", "alone", "stock_loop")
FORKED = ("whole,differ", "outside")
"""Launches of one process that forks both ranks. Runs of one launch run one after another; the last ends the ranks'
connections."""
Run = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    """Return a function that makes a run of the script once and returns its stderr. Runs of one process run in this
    process."""
    done: dict[str, subprocess.CompletedProcess[str]] = {}

    def run_here(what: str) -> None:
        num_threads = torch.get_num_threads()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Links, "all_gather", Links.all_gather)  # the script replaces it
            trained_by_ranks.main(folder, what)
        torch.set_num_threads(num_threads)

    def run_once(what: str, *, status: int = 0) -> str:
        if what not in done and what in ONE_PROCESS:
            run_here(what)
            done[what] = subprocess.CompletedProcess(what, 0, stderr="")
        elif what not in done:
            forks = any(what in launch.split(",") for launch in FORKED)
            command = [SCRIPT, folder, *FORKED] if forks else [*TWO_RANKS, SCRIPT, folder, what]
            done[what] = process = run_python(*command, status=0 if forks else status, OMP_NUM_THREADS="1")
            if forks:
                for run, code in json.loads((folder / "statuses.json").read_text()).items():
                    done[run] = subprocess.CompletedProcess(run, code, stderr=process.stderr)
        assert done[what].returncode == status, done[what].stderr
        return done[what].stderr

    return run_once


def weights(folder: Path, what: str) -> dict[str, torch.Tensor]:
    return load_file(folder / what / "model.safetensors")


def facts(folder: Path, what: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / what / "facts.json").read_text())
    return found


def steps(folder: Path, what: str) -> list[tuple[Any, ...]]:
    names = ("step", "loss", "grad_norm", "learning_rate")
    return [tuple(entry[name] for name in names) for entry in facts(folder, what)["log"] if "loss" in entry]


def assert_as_stock(folder: Path, what: str) -> None:
    ours, theirs = weights(folder, what), weights(folder, "stock")
    assert_same_tensors(ours, theirs)
    assert steps(folder, what) == steps(folder, "stock")


def test_two_ranks_equal_stock_accumulation(run: Run, folder: Path) -> None:
    run("stock")
    run("whole")
    assert_as_stock(folder, "whole")
    assert facts(folder, "whole")["wrapped"] == "LlamaForCausalLM", (
        "DDP would average gradients that are averaged already"
    )
    ours, theirs = (
        [entry["eval_loss"] for entry in facts(folder, what)["log"] if "eval_loss" in entry]
        for what in ("whole", "stock")
    )
    # Stock weights the losses of batches differently with several ranks.
    assert len(ours) == 3 and ours == pytest.approx(theirs, rel=5e-3)


@pytest.mark.slow
def test_rows_of_embeddings_equal_stock(run: Run, folder: Path) -> None:
    """Evaluation, saving and the summary, too."""
    run("stock")
    run("rows")
    assert_as_stock(folder, "rows")
    summary = folder / "by_rows" / "lohan" / "summary.json"
    loaded_bytes = json.loads(summary.read_text())["embedding_rows_bytes"]
    assert loaded_bytes > 0 and loaded_bytes % (64 * 4) == 0


def test_ranks_that_begin_differently_are_refused_by_name(run: Run, folder: Path) -> None:
    """Before a store is made, and before the first step."""
    run("differ")
    of_ranks = [json.loads((folder / "differ" / str(rank) / "told.json").read_text()) for rank in range(2)]
    for told in of_ranks:
        for what in ("from_pretrained", "by path", "generation"):
            assert re.match(r'lm_head.weight in model.safetensors is "\w+" on rank 0 and "\w+" on rank 1', told[what])
        assert "max_grad_norm is 0.0 on rank 0 and 1.0 on rank 1; give the Accelerator" in told["Accelerator"]
        assert "rms_norm_eps of the config is 1e-06 on rank 0 and 2e-06 on rank 1" in told["config"]
        assert told["stores"] == ""
        assert "learning_rate is 0.01 on rank 0 and 0.02 on rank 1; give all ranks the same training" in told["train"]


def test_an_exception_outside_train_ends_the_other_ranks(run: Run, folder: Path) -> None:
    run("outside", status=1)
    stderrs = [(folder / f"stderr-{rank}").read_text() for rank in (0, 1)]
    assert "OSError: the drive of my loop is full" in stderrs[0]
    assert "failed: OSError: the drive of my loop is full while rank 1 waited for the next step" in stderrs[1]


def test_a_step_has_one_exchange_for_its_decisions(run: Run, folder: Path) -> None:
    """Three other exchanges count the items of all batches, compare their lengths before the forward, and wait for
    logging."""
    run("whole")
    every_step = ["what is logged, evaluated and saved", "a number of each rank", "the lengths of batches of a forward"]
    every_step.append("the end of the step")
    steps = facts(folder, "whole")["exchanged"]
    assert len(steps) == 7, "one list after each step, and one before the first"
    assert [steps[step] for step in (1, 3, 5)] == [every_step] * 3, "these steps neither evaluate nor save"
    assert all(step.count("the end of the step") == 1 for step in steps[:-1])


def test_a_checkpoint_is_written_once_with_a_part_of_each_rank(run: Run, folder: Path) -> None:
    run("whole")
    checkpoints = sorted(path.name for path in (folder / "run").glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-4", "checkpoint-6"], "the first was removed"
    checkpoint = folder / "run" / "checkpoint-4"
    names = {path.name for path in checkpoint.iterdir()}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"} <= names
    states = {path.name.rsplit("-", 1)[1] for path in (checkpoint / "lohan").glob("*.safetensors")}
    assert states == {"0of2.safetensors", "1of2.safetensors"}
    stores = sorted(path.name for path in (folder / "run" / "_lohan" / "store").iterdir())
    assert stores == ["rank-0-of-2", "rank-1-of-2"]
    summary = json.loads((folder / "run" / "lohan" / "summary.json").read_text())
    assert summary["is_finished"] and summary["num_steps"] == 6


def test_the_last_step_of_two_ranks_is_resharded_for_three_and_for_one(run: Run, folder: Path, tmp_path: Path) -> None:
    run("whole")
    copy = shutil.copytree(folder / "run", tmp_path / "run")

    def lohan(*args: object) -> str:
        result = CliRunner().invoke(app, [str(arg) for arg in args])
        assert result.exit_code == 0, result.output
        return result.stdout

    for num_ranks in (3, 1):
        assert lohan("reshard", copy, "--ranks", num_ranks, "--remove-old").startswith("step 6 of ")
        assert "every checksum is right" in lohan("verify", copy)
    lohan("export", copy, tmp_path / "out")
    exported, trained = load_file(tmp_path / "out" / "model.safetensors"), weights(folder, "whole")
    assert_same_tensors(exported, trained)


def test_one_process_resumes_from_a_checkpoint_of_two_ranks(run: Run, folder: Path) -> None:
    run("stock")
    run("whole")
    run("alone")
    assert_as_stock(folder, "alone")


@pytest.mark.slow
def test_sigterm_to_one_rank_ends_all_after_the_same_step(run: Run, folder: Path) -> None:
    run("stock")
    stderr = run("asked", status=1)
    assert "exitcode  : 143" in stderr and "[rank0]: Traceback" not in stderr and "[rank1]: Traceback" not in stderr
    run("last_step")
    assert_as_stock(folder, "last_step")


@pytest.mark.slow
def test_all_ranks_resume_after_one_was_killed(run: Run, folder: Path) -> None:
    run("stock")
    stderr = run("killed", status=1)
    assert re.search(r"RankFailedError: rank 1 \(pid \d+, \S+\) ended.* while rank 0 (waited|sent|was)", stderr), stderr
    run("after_kill")  # from the newer of its last step and last checkpoint
    assert_as_stock(folder, "after_kill")


@pytest.mark.slow
def test_an_exception_in_one_rank_ends_the_others_with_its_message(run: Run) -> None:
    stderr = run("fails", status=1)
    assert "RankFailedError: rank 1 (pid" in stderr
    assert "failed: RuntimeError: a callback of rank 1 does not want to go on" in stderr


@pytest.mark.slow
def test_a_rank_that_stops_earlier_is_named_at_once(run: Run) -> None:
    stderr = run("stops", status=1)
    told = r"rank 1 is at 'the end of training' where rank 0|rank 0 is at '.+' where rank 1 is at 'the end of training'"
    assert re.search(told, stderr) and "was silent for" not in stderr, stderr


@pytest.mark.slow
def test_a_custom_loop_of_two_ranks_equals_torch(run: Run, folder: Path) -> None:
    run("stock_loop")
    run("loop")
    ours, theirs = weights(folder, "loop"), weights(folder, "stock_loop")
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    assert facts(folder, "loop")["norms"] == facts(folder, "stock_loop")["norms"]
    state = folder / "loop" / "state"
    assert (state / "model.safetensors").is_file()
    assert {path.name.rsplit("-", 1)[1] for path in (state / "lohan").glob("*.safetensors")} == {
        "0of2.safetensors",
        "1of2.safetensors",
    }
    assert (folder / "loop_run" / "lohan" / "summary.json").is_file()
