"""Two processes are killed, their experts get other owners, and the run ends as one that nothing disturbed."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from resharded_stores import STORE

from hf_lohan.annexes.resharding import reshard as resharding
from hf_lohan.device import num_gpus
from hf_lohan.testing.models import tiny_model

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(num_gpus() > 0, reason="the launchers would take the GPUs"),
]
SCRIPT = """
import json, os, signal, sys
from datasets import Dataset
import torch
from transformers import TrainerCallback, TrainingArguments
import hf_lohan
from hf_lohan.testing.models import tiny_model

folder, dies_at, resume, path = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]

class Kill(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if (state.global_step, args.process_index) == (dies_at, args.world_size - 1):
            os.kill(os.getpid(), signal.SIGKILL)

def first_two(router, args, output):
    *others, index = output
    return *others, torch.arange(index.numel()).view(index.shape) % 2 + 2 * (index % 4 == 3)

model = tiny_model("mixtral", num_layers=2)
rows = torch.randint(5, 60, (64, 8), generator=torch.Generator().manual_seed(3)).tolist()
args = TrainingArguments(
    folder, max_steps=6, per_device_train_batch_size=2, report_to=[], logging_steps=1, save_strategy="no",
    use_cpu=True, disable_tqdm=True, learning_rate=1e-2, max_grad_norm=0.5,
)
trainer = hf_lohan.Trainer(
    path or model, args, train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}), callbacks=[Kill()],
    offload={
        "cpu_memory": "32MiB", "gpu_memory": "8MiB", "experts": "streamed", "experts.lazy": False, "commit_every": 1
    },
)
for module in trainer.model.modules():
    if type(module).__name__ == "MixtralTopKRouter":
        module.register_forward_hook(first_two)
trainer.train(resume_from_checkpoint=resume or None)
trainer.save_model(folder + "/final")
if args.process_index == 0:
    trainer.state.save_to_json(folder + "/state.json")
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def lohan(folder: Path, *arguments: object, fails: bool = False) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "hf_lohan.cli", *map(str, arguments)],
        cwd=folder,
        env=ENVIRONMENT | {"WORLD_SIZE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode != 0) == fails, done.stderr
    return done.stdout


def outcome(folder: Path) -> tuple[list[Any], bytes]:
    rows = json.loads((folder / "state.json").read_text())["log_history"]
    losses = [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row]
    assert len(losses) == 6
    return losses, (folder / "final" / "model.safetensors").read_bytes()


def test_a_run_with_balanced_experts_ends_as_an_undisturbed_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    two = "launch", "--cpu", "--num_processes", 2, "script.py"
    lohan(tmp_path, *two, "undisturbed", -1, "", "")
    lohan(tmp_path, *two, "run", 3, "", "", fails=True)
    told = lohan(tmp_path, "reshard", "run", "--num_processes", 2, "--balance")
    assert "rows of experts, the most loaded rank of a layer has on average 1." in told and "step" in told
    lohan(tmp_path, *two, "run", -1, "last_step", "")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "undisturbed")
    assert "all 2 ranks hold" in lohan(tmp_path, "verify", "run")
    told = lohan(tmp_path, "reshard", "run", "--ranks", 1, "--remove-old")
    assert "of 2 ranks is in" in told


def fails_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, which fails instead at this call."""
    numbers = itertools.count(1)

    def counted(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) == call:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    return counted


def test_a_streamed_model_resumes_beside_new_stores_of_a_balance_that_was_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed one leaves new stores without commits, with other owners of experts than a run would choose."""
    tiny_model("mixtral", num_layers=2).save_pretrained(tmp_path / "model")
    (tmp_path / "script.py").write_text(SCRIPT)
    one, two = (("launch", "--cpu", "--num_processes", number, "script.py") for number in (1, 2))
    lohan(tmp_path, *one, "run", 3, "", "model", fails=True)
    monkeypatch.setattr(resharding, "copy_records", fails_at(1, resharding.copy_records))
    monkeypatch.setattr(resharding, "remove_folder", lambda folder: None)
    with pytest.raises(KeyboardInterrupt):
        resharding.reshard([[str(tmp_path / "run" / STORE)]], 2, balances=True)
    assert [*(tmp_path / "run" / STORE).glob("rank-*")]
    lohan(tmp_path, *two, "run", -1, "last_step", "model")
    assert len(outcome(tmp_path / "run")[0]) == 6
