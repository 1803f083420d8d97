"""Other users may not write the files of a run, whatever the umask, because the next run computes with them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

from hf_lohan import Trainer
from hf_lohan.checkpoint.whole_folder import unfinished_checkpoint
from hf_lohan.files.directories import make_directory
from hf_lohan.huggingface.models.export import export_model
from hf_lohan.testing.models import tiny_model


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> list[Path]:
    made = [path for path in folder.rglob("*") if not path.is_symlink()]
    return [path for path in made if stat.S_IMODE(path.stat().st_mode) & 0o022]


def test_other_users_may_not_write_the_files_of_a_run(tmp_path: Path) -> None:
    rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)} for _ in range(4)]
    run = tmp_path / "deep" / "run"
    arguments = TrainingArguments(str(run), max_steps=2, save_steps=2, report_to=[], use_cpu=True)
    offload = {"cpu_memory": "3MiB", "gpu_memory": "2MiB"}  # gradients go to the SSD
    trainer = Trainer(model=tiny_model("llama"), args=arguments, train_dataset=rows, offload=offload)
    trainer.train()
    trainer.train(resume_from_checkpoint="last_step")
    assert len(list(tmp_path.rglob("*"))) > 30
    folders = [run / "_lohan" / name for name in ("store", "last_step")]
    private = [*folders, *(path for folder in folders for path in folder.rglob("*"))]
    assert {"records-0.bin", "gradients.bin", "manifest.json", "lock"} <= {path.name for path in private}
    assert not [path for path in private if path.stat().st_mode & 0o077]
    assert not open_to_others(tmp_path)
    trainer.offload_engine.close()
    os.umask(0)  # another process may export
    export_model(run, tmp_path / "out" / "model")
    assert not open_to_others(tmp_path)


def test_other_users_may_not_write_the_folders_above(tmp_path: Path) -> None:
    make_directory(str(tmp_path / "ssd" / "deep" / "store"))
    with unfinished_checkpoint(str(tmp_path / "runs" / "deep"), "checkpoint-1") as unfinished:
        (unfinished / "checkpoint-1").mkdir(mode=0o700)
    assert not open_to_others(tmp_path)
    assert stat.S_IMODE((tmp_path / "ssd" / "deep").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "ssd" / "deep" / "store").stat().st_mode) == 0o700
