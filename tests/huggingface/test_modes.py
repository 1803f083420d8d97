"""Nobody else may write what a run leaves, whatever the umask: it decides what the next run computes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import torch
from transformers import TrainingArguments

from hf_lohan import Trainer
from hf_lohan.testing.models import tiny_model


def test_nobody_else_may_write_what_a_run_leaves(tmp_path: Path) -> None:
    rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)} for _ in range(4)]
    old_mask = os.umask(0)
    try:
        arguments = TrainingArguments(
            str(tmp_path / "deep" / "run"), max_steps=2, save_steps=2, report_to=[], use_cpu=True
        )
        offload = {"cpu_memory": "8MiB", "gpu_memory": "4MiB"}
        Trainer(model=tiny_model("llama"), args=arguments, train_dataset=rows, offload=offload).train()
    finally:
        os.umask(old_mask)
    made = [path for path in tmp_path.rglob("*") if not path.is_symlink()]
    assert len(made) > 30
    open_to_others = [path for path in made if stat.S_IMODE(path.stat().st_mode) & 0o022]
    assert not open_to_others
