"""A checkpoint is there whole or not at all, whatever ends the save; all else is as the stock Trainer has it."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from safetensors.torch import save_file
from transformers import TrainingArguments
from transformers.trainer_utils import HPSearchBackend, get_last_checkpoint, sort_checkpoints

import hf_lohan
from hf_lohan.integrations import checkpoint_folder
from hf_lohan.integrations.checkpoint_folder import UNFINISHED_NAME, remove_unfinished, unfinished_checkpoint
from hf_lohan.storage import StorageError
from hf_lohan.testing.models import VOCAB_SIZE, tiny_model

# The folder alone.


def write(folder: Path, text: str = "new") -> None:
    (folder / "sub").mkdir(parents=True)
    (folder / "weights").write_text(text)
    (folder / "sub" / "state").write_text(text)


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


WHOLE = {"sub/state": "new", "weights": "new"}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two whole checkpoints."""
    for step in (2, 4):
        write(tmp_path / "run" / f"checkpoint-{step}", f"old {step}")
    return tmp_path / "run"


def test_it_appears_when_it_is_whole(run_dir: Path) -> None:
    with unfinished_checkpoint(str(run_dir), "checkpoint-6") as unfinished:
        write(unfinished / "checkpoint-6")
        assert get_last_checkpoint(str(run_dir)) == str(run_dir / "checkpoint-4")
        assert len(sort_checkpoints(str(run_dir), use_mtime=True)) == 2
    assert get_last_checkpoint(str(run_dir)) == str(run_dir / "checkpoint-6")
    assert content(run_dir / "checkpoint-6") == WHOLE
    assert sorted(os.listdir(run_dir)) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_the_runs_folder_is_made(tmp_path: Path) -> None:
    with unfinished_checkpoint(str(tmp_path / "a" / "b"), "checkpoint-1") as unfinished:
        write(unfinished / "checkpoint-1")
    assert content(tmp_path / "a" / "b" / "checkpoint-1") == WHOLE


def test_a_checkpoint_of_that_name_is_replaced(run_dir: Path) -> None:
    (run_dir / "checkpoint-4" / "checkpoint-is-incomplete.txt").write_text("left over")
    with unfinished_checkpoint(str(run_dir), "checkpoint-4") as unfinished:
        write(unfinished / "checkpoint-4")
    assert content(run_dir / "checkpoint-4") == WHOLE
    assert sorted(os.listdir(run_dir)) == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt(), OSError(errno.EIO, "disk")])
@pytest.mark.parametrize("name", ["checkpoint-4", "checkpoint-6"])
def test_a_failure_leaves_all_as_it_was(name: str, error: BaseException, run_dir: Path) -> None:
    before = content(run_dir)
    with pytest.raises(type(error)), unfinished_checkpoint(str(run_dir), name) as unfinished:
        write(unfinished / name)
        raise error
    assert content(run_dir) == before
    assert not (run_dir / UNFINISHED_NAME).exists()


@pytest.mark.parametrize("at_call", [0, 1])
def test_a_rename_that_fails_leaves_all_as_it_was(at_call: int, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moving the old one aside, and giving the new one its name."""
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


def test_all_is_on_the_medium_before_it_gets_its_name(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_killed_save_leaves_the_checkpoints_before_it(name: str, num_renames: int | None, run_dir: Path) -> None:
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


def test_the_next_save_removes_what_a_killed_one_left(run_dir: Path) -> None:
    write(run_dir / UNFINISHED_NAME / "checkpoint-6", "half")
    (run_dir / UNFINISHED_NAME / "checkpoint-6" / "stray").touch()
    with unfinished_checkpoint(str(run_dir), "checkpoint-6") as unfinished:
        write(unfinished / "checkpoint-6")
    assert content(run_dir / "checkpoint-6") == WHOLE
    assert not (run_dir / UNFINISHED_NAME).exists()


def test_what_is_written_elsewhere_is_told(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with unfinished_checkpoint(str(run_dir), "checkpoint-6"):
        pass
    assert "was not written where it was asked for" in caplog.text
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
def test_a_full_disk_is_named_with_numbers(save: Callable[[torch.Tensor, Path], None], small_disk: Path) -> None:
    write(small_disk / "checkpoint-2", "old")
    message = ""
    try:
        with unfinished_checkpoint(str(small_disk), "checkpoint-4") as unfinished:
            (unfinished / "checkpoint-4").mkdir()
            (unfinished / "checkpoint-4" / "first").write_bytes(bytes(100_000))
            save(torch.ones(100_000), unfinished / "checkpoint-4" / "second")
    except StorageError as error:  # not `pytest.raises`, which keeps torch's writer, and so its file, alive
        assert error.errno == errno.ENOSPC
        message = str(error)
    told = (
        rf"{small_disk}/checkpoint-4 \(No space left on device\): after [\d,]{{5,}} bytes of it [\d,]+ were left; free"
    )
    assert re.search(told, message), message
    assert os.listdir(small_disk) == ["checkpoint-2"]
    assert shutil.disk_usage(small_disk).free > 200_000


# In training.


def dataset(num_rows: int = 16) -> Dataset:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(5, VOCAB_SIZE, (num_rows, 8), generator=generator).tolist()
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def make(folder: Path, *, stock: bool = False, **settings: Any) -> Any:
    defaults: dict[str, Any] = {
        "max_steps": 6, "save_steps": 2, "learning_rate": 1e-3, "per_device_train_batch_size": 2, "use_cpu": True,
        "report_to": [], "disable_tqdm": True, "seed": 0,
    }  # fmt: skip
    args = TrainingArguments(str(folder), **{**defaults, **settings})
    data: dict[str, Any] = {"train_dataset": dataset(), "eval_dataset": dataset(4)}
    if stock:
        return transformers.Trainer(tiny_model("llama"), args, **data)
    return hf_lohan.Trainer(
        tiny_model("llama"), args, **data, offload={"cpu_memory": "4MiB", "gpu_memory": "2MiB", "ssd": f"{folder}-ssd"}
    )


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Trainers whose engines end with the test."""
    trainers: list[Any] = []

    def build(folder: Path = tmp_path / "run", **settings: Any) -> Any:
        for trainer in trainers:
            close(trainer)
        trainers.append(make(folder, **settings))
        return trainers[-1]

    yield build
    for trainer in trainers:
        close(trainer)


def close(trainer: Any) -> None:
    engine = getattr(trainer, "offload_engine", None)
    if engine is not None:
        engine.close()


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    access = trainer.offload_engine.parameters
    return {name: access.read_parameter(name) for name in access.slices}


def checkpoints(folder: Path) -> list[str]:
    """Everything in a run's folder but an engine's own."""
    return sorted(name for name in os.listdir(folder) if name != "lohan")


def end_stage(owner: Any, name: str, checkpoint: str, end: Callable[[], None]) -> Callable[..., Any]:
    """The stage, which ends badly when it has written its part of `checkpoint`."""
    real = getattr(owner, name)

    def stage(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(self, *args, **kwargs)
        if any(checkpoint in str(place) for place in (*args, *kwargs.values())):
            end()
        return result

    return stage


def raising(error: BaseException) -> Callable[[], None]:
    def end() -> None:
        raise error

    return end


STAGES = [
    (transformers.Trainer, "_save"),
    (hf_lohan.Trainer, "_save_optimizer_and_scheduler"),
    (transformers.Trainer, "_save_rng_state"),
    (transformers.TrainerState, "save_to_json"),
]


@pytest.mark.parametrize(("owner", "stage"), STAGES, ids=[name for _, name in STAGES])
def test_a_save_that_fails_leaves_the_last_checkpoint(
    owner: Any, stage: str, make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(owner, stage, end_stage(owner, stage, "checkpoint-4", raising(full)))
    trainer = make_trainer(save_total_limit=1)
    with pytest.raises(StorageError, match=r"cannot save the checkpoint .*checkpoint-4 .*Earlier checkpoints are unt"):
        trainer.train()
    assert checkpoints(tmp_path / "run") == ["checkpoint-2"]
    state = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2


def train_and_die(folder: Path, owner: Any, stage: str) -> None:
    setattr(owner, stage, end_stage(owner, stage, "checkpoint-4", die))
    make(folder).train()


def kill_in_each_stage(folder: Path) -> None:
    """A process for each, forked before torch has threads, which do not survive a fork."""
    for owner, stage in STAGES:
        pid = os.fork()
        if not pid:
            train_and_die(folder / stage, owner, stage)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, stage


@pytest.fixture(scope="module")
def killed_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder for each stage, by its name, as a process left it that was killed in that stage."""
    folder = tmp_path_factory.mktemp("killed")
    child = multiprocessing.get_context("spawn").Process(target=kill_in_each_stage, args=(folder,))
    child.start()
    child.join()
    assert child.exitcode == 0
    return folder


@pytest.fixture(scope="module")
def undisturbed_weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    whole = make(tmp_path_factory.mktemp("undisturbed"))
    whole.train()
    weights = weights_of(whole)
    close(whole)
    return weights


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "stage"), STAGES, ids=[name for _, name in STAGES])
def test_a_run_killed_while_it_saves_goes_on_from_the_checkpoint_before(
    owner: Any, stage: str, make_trainer: Callable[..., Any], killed_runs: Path, undisturbed_weights: dict[str, Any]
) -> None:
    folder = killed_runs / stage
    assert (folder / UNFINISHED_NAME / "checkpoint-4").exists()
    assert get_last_checkpoint(str(folder)) == str(folder / "checkpoint-2")
    resumed = make_trainer(folder)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert checkpoints(folder) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    weights = weights_of(resumed)
    assert all(torch.equal(weight, weights[name]) for name, weight in undisturbed_weights.items())


BEST = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
WORSE = {"learning_rate": 0.5}
"""Ruins the model: the first checkpoint stays the best."""


@pytest.mark.parametrize(
    "settings",
    [
        {"save_total_limit": 1},
        {"save_total_limit": 2},
        {"save_total_limit": None},
        {**BEST, "save_total_limit": 2},
        {**BEST, **WORSE, "save_total_limit": 2},
        {**BEST, **WORSE, "save_total_limit": 1},
        {**BEST, **WORSE, "save_strategy": "best"},
        {"save_only_model": True, "save_total_limit": 2},
    ],
    ids=["one", "two", "all", "best_is_new", "best_is_old", "best_alone", "best_only", "only_model"],
)
def test_the_same_checkpoints_are_kept_as_by_the_stock_trainer(
    settings: dict[str, Any], make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    bests = []
    for folder in (stock, ours):
        trainer = make_trainer(folder, stock=folder == stock, **settings)
        trainer.train()
        bests.append(trainer.state.best_model_checkpoint)
    assert checkpoints(ours) == checkpoints(stock)
    assert bests[1] == (bests[0] and bests[0].replace(str(stock), str(ours)))
    for name in checkpoints(stock):
        ours_files, stock_files = set(os.listdir(ours / name)), set(os.listdir(stock / name))
        assert ours_files - {"lohan", "lohan.yaml"} == stock_files
        states = [json.loads((folder / name / "trainer_state.json").read_text()) for folder in (stock, ours)]
        for state in states:
            state["best_metric"] = None
            state["log_history"] = None
        assert states[1] == json.loads(json.dumps(states[0]).replace(str(stock), str(ours)))


def test_old_checkpoints_go_only_when_the_new_one_is_there(
    make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    real = shutil.rmtree

    def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
        if Path(path).name.startswith("checkpoint-"):
            seen.append(checkpoints(tmp_path / "run"))
        real(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    make_trainer(save_total_limit=1).train()
    assert seen == [["checkpoint-2", "checkpoint-4"], ["checkpoint-4", "checkpoint-6"]]


def test_a_failed_save_does_not_name_the_best(
    make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = end_stage(transformers.Trainer, "_save_rng_state", "checkpoint-2", raising(RuntimeError("broken")))
    monkeypatch.setattr(transformers.Trainer, "_save_rng_state", stage)
    trainer = make_trainer(**BEST)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train()
    assert trainer.state.best_global_step == 2
    assert trainer.state.best_model_checkpoint == str(tmp_path / "run" / "checkpoint-1")


def test_the_best_checkpoint_of_a_moved_run_is_found_again(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    make_trainer(tmp_path / "first", max_steps=2, **BEST, **WORSE).train()
    (tmp_path / "first").rename(tmp_path / "moved")
    trainer = make_trainer(tmp_path / "moved", max_steps=3, **BEST, **WORSE)
    trainer.train(resume_from_checkpoint=str(tmp_path / "moved" / "checkpoint-2"))
    assert trainer.state.best_model_checkpoint == str(tmp_path / "moved" / "checkpoint-1")
    state = json.loads((tmp_path / "moved" / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / "moved" / "checkpoint-1")


def test_a_push_waits_for_the_checkpoint_to_have_its_name(
    make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        transformers.Trainer,
        "_push_from_checkpoint",
        lambda self, folder: pushed.append((folder, (Path(folder) / "trainer_state.json").is_file())),
    )
    trainer = make_trainer(save_strategy="no", max_steps=1)
    trainer.train()
    trainer.args.push_to_hub = True  # from the start it would make a repository
    trainer._save_checkpoint(trainer.model, None)
    trainer.args.push_to_hub = False
    trainer._save_checkpoint(trainer.model, None)
    assert pushed == [(str(tmp_path / "run" / "checkpoint-1"), True)]


def test_a_hyperparameter_search_keeps_its_runs_apart(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    trainer = make_trainer(save_strategy="no", max_steps=1)
    trainer.train()
    trainer.hp_search_backend = HPSearchBackend.OPTUNA
    trainer._save_checkpoint(trainer.model, SimpleNamespace(number=3))
    assert checkpoints(tmp_path / "run") == ["run-3"]
    assert checkpoints(tmp_path / "run" / "run-3") == ["checkpoint-1"]


def test_without_offload_nothing_is_touched(
    make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_folder, "unfinished_checkpoint", None)
    args = TrainingArguments(
        str(tmp_path / "run"), max_steps=2, save_steps=1, save_total_limit=1, use_cpu=True, report_to=[]
    )
    hf_lohan.Trainer(tiny_model("llama"), args, train_dataset=dataset()).train()
    assert checkpoints(tmp_path / "run") == ["checkpoint-2"]
