"""A script that uses only transformers is offloaded by each launcher and trains the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from python_runs import run_python

from hf_lohan.threads import usable_cpus

SCRIPT = """
import json, os, sys
import torch
from transformers import Trainer, TrainingArguments
from hf_lohan.testing.models import tiny_batch, tiny_model

class MyTrainer(Trainer):
    pass

output_dir, report = sys.argv[1:]
batch = tiny_batch(batch_size=8)
rows = [{name: values[row] for name, values in batch.items()} for row in range(8)]
args = TrainingArguments(
    output_dir=output_dir, max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
    save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=3,
)
trainer = MyTrainer(model=tiny_model("llama"), args=args, train_dataset=rows)
trainer.train()
facts = {
    "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    "grad_norms": [entry["grad_norm"] for entry in trainer.state.log_history if "loss" in entry],
    "num_threads": torch.get_num_threads(),
    "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
}
with open(report, "w") as file:
    json.dump(facts, file)
"""
ACCELERATE_CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
mixed_precision: 'no'
num_processes: 1
use_cpu: false
"""
ROUTES = {
    "python": ["-m", "hf_lohan.run", "--offload", "lohan", "script.py"],
    "accelerate": [
        *["-m", "accelerate.commands.launch", "--config_file", "single.yaml"],
        *["-m", "hf_lohan.run", "--offload", "offload.yaml", "script.py"],
    ],
    "lohan": [
        *["-m", "hf_lohan.cli", "launch", "--config_file", "single.yaml", "--offload", "offload.yaml"],
        *["--mixed_precision", "no", "script.py"],
    ],
}
OMP_NUM_THREADS = {"python": "1", "accelerate": "1", "lohan": str(usable_cpus())}
"""What each launcher exports. The test does it for Python."""


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_an_unmodified_script_is_offloaded_and_trains_the_same(route: str, tmp_path: Path) -> None:
    """`lohan launch` starts `accelerate launch -m hf_lohan.run`. Stock runs in this process."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "single.yaml").write_text(ACCELERATE_CONFIG)
    (tmp_path / "offload.yaml").write_text("cpu_memory: 64MiB\ngpu_memory: 16MiB\n")
    one_thread = {"OMP_NUM_THREADS": "1"} if route == "python" else {}
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("OMP_NUM_THREADS", raising=False)
        run_python(*ROUTES[route], tmp_path / "ours", tmp_path / "ours.json", cwd=tmp_path, **one_thread)
        patched.setattr(sys, "argv", ["script.py", str(tmp_path / "stock"), str(tmp_path / "stock.json")])
        exec(compile(SCRIPT, "script.py", "exec"), {"__name__": "__main__"})
    ours, stock = (json.loads((tmp_path / name).read_text()) for name in ("ours.json", "stock.json"))
    summary = json.loads((tmp_path / "ours" / "lohan" / "summary.json").read_text())
    assert summary["num_steps"] == 3
    assert summary["ssd_write_bytes"] > 0
    assert route == "python" or summary["config"]["cpu_memory"] == 64 * 2**20, "the launcher's settings"
    assert len(ours["losses"]) == 3
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-6)
    assert ours["grad_norms"] == pytest.approx(stock["grad_norms"], rel=1e-5)
    assert not (tmp_path / "stock" / "lohan").exists()
    assert ours["omp_num_threads"] == OMP_NUM_THREADS[route], "accelerate no longer exports one thread"
    assert ours["num_threads"] == usable_cpus(), "the optimizer uses every core whatever the launcher exports"
