"""An unmodified TRL program is offloaded. Its model and its reference model are streamed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("trl")
import trl_runs
from python_runs import ROOT, run_python
from trl_runs import arguments, preferences, run

PROGRAM = """
import sys
from datasets import load_dataset
from trl import DPOConfig, DPOTrainer

checkpoint, data, out, num_steps = sys.argv[1:]
args = DPOConfig(
    out, use_cpu=True, bf16=False, max_steps=int(num_steps), per_device_train_batch_size=2, learning_rate=1e-3,
    report_to=[], disable_tqdm=True, save_strategy="no", seed=0,
)
trainer = DPOTrainer(checkpoint, args=args, train_dataset=load_dataset("json", data_files=data, split="train"))
kinds = {type(weight).__name__ for model in (trainer.model, trainer.ref_model) for weight in model.parameters()}
assert kinds == {"AbsentParameter"}, f"weights in memory: {kinds}"
trainer.train()
trainer.save_model()
"""


def run_module(folder: Path, module: str, *arguments: str) -> str:
    """Run a module in a folder with `lohan.yaml` and return its stderr."""
    (folder / "lohan.yaml").write_text("cpu_memory: 8MiB\ngpu_memory: 2MiB\n")
    # What is on this process's path goes on: another TRL there would otherwise train one of the two runs alone.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return run_python("-m", module, *arguments, cwd=folder, PYTHONPATH=os.pathsep.join(paths)).stderr


@pytest.mark.slow
def test_a_trl_program_is_offloaded_with_its_reference(tmp_path: Path) -> None:
    checkpoint = trl_runs.save_checkpoint(tmp_path / "model")
    (tmp_path / "program.py").write_text(PROGRAM)
    preferences().to_json(tmp_path / "data.jsonl")
    program = ["program.py", str(checkpoint), "data.jsonl", "out", str(trl_runs.NUM_STEPS)]
    stderr = run_module(tmp_path, "hf_lohan.run", "--offload", "lohan.yaml", *program)
    assert "has its own offload settings" not in stderr
    assert (tmp_path / "out" / "_lohan" / "store" / "ref").is_dir()
    stock = run("DPO", arguments("DPO", tmp_path / "stock"), model=str(checkpoint), train_dataset=preferences())
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(weights[name], weight) for name, weight in stock.weights.items())


@pytest.mark.slow
def test_the_trl_command_line_is_offloaded(tmp_path: Path) -> None:
    checkpoint = trl_runs.save_checkpoint(tmp_path / "model")
    (tmp_path / "data").mkdir()
    trl_runs.texts().to_json(tmp_path / "data" / "train.jsonl")
    options = ["--bf16", "false", "--use_cpu", "--max_steps", "1", "--report_to", "none", "--save_strategy", "no"]
    sft = ["-m", "trl.cli.main", "sft", "--model_name_or_path", str(checkpoint), "--dataset_name", "data"]
    stderr = run_module(
        tmp_path, "hf_lohan.cli", "launch", "--offload", "lohan.yaml", *sft, "--output_dir", "out", *options
    )
    assert (tmp_path / "out" / "_lohan" / "store" / "manifest.json").is_file()
    assert "nothing was offloaded" not in stderr
