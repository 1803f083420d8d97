"""Several processes of each launcher become one run. Separate runs are refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_lohan.device import num_gpus
from hf_lohan.threads import usable_cpus

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "configs" / "accelerate_2cpu.yaml"
SCRIPT = """
import json, os, sys
from transformers import TrainingArguments

folder = sys.argv[1]
args = TrainingArguments(folder, report_to=[])
facts = {
    "world_size": args.world_size,
    "device": str(args.device),
    "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    "num_local": os.environ.get("LOCAL_WORLD_SIZE"),
}
os.makedirs(folder, exist_ok=True)
with open(os.path.join(folder, f"{os.environ['RANK']}.json"), "w") as file:
    json.dump(facts, file)
sys.exit(int(sys.argv[2]) if os.environ["RANK"] == "1" else 0)
"""
ROUTES = {
    "lohan": ["-m", "hf_lohan.cli", "launch", "--cpu", "--num_processes", "2", "script.py", "lohan", "0"],
    "config": ["-m", "hf_lohan.cli", "launch", "--config_file", str(CONFIG), "script.py", "config", "3"],
    "accelerate": [
        *["-m", "accelerate.commands.launch", "--config_file", str(CONFIG), "--main_process_port", "0"],
        *["-m", "hf_lohan.run", "script.py", "accelerate", "0"],
    ],
    "torchrun": [
        *["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
        *["-m", "hf_lohan.run", "script.py", "torchrun", "0"],
    ],
}
STATUS = {"config": 3}
TRAPPED = """
import sys
from transformers import TrainingArguments
import hf_lohan
from hf_lohan.testing.models import tiny_batch, tiny_model
rows = [{name: values[0] for name, values in tiny_batch().items()}]
hf_lohan.Trainer(tiny_model("llama"), TrainingArguments("out", report_to=[]), train_dataset=rows, offload="lohan")
"""


FAILING_LOOPS = """
import collections, os, socket, sys
import accelerate
from hf_lohan.huggingface.ranks import links_to_other_ranks

ended = collections.Counter()
for number in range(100):
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    for rank in (0, 1):
        pid = os.fork()
        if not pid:
            break
    if not pid:
        break
    ended.update(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2))
else:
    print(dict(ended))
    sys.exit()
os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
state = accelerate.PartialState(cpu=True)
links = links_to_other_ranks()
links.barrier("the start")
if rank == number % 2:
    raise OSError("the drive of my loop is full")
links.barrier("the next step")
"""


RESTARTED = """
import os, signal, sys
from datasets import Dataset
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from hf_lohan.testing.models import tiny_model

folder, num_kills = sys.argv[1], int(sys.argv[2])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

class Kill(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if attempt < num_kills and state.global_step == 2 + 2 * attempt and args.process_index == attempt % 2:
            os.kill(os.getpid(), signal.SIGKILL)

rows = torch.randint(5, 60, (32, 8), generator=torch.Generator().manual_seed(3)).tolist()
args = TrainingArguments(
    folder, max_steps=9, per_device_train_batch_size=1, report_to=[], logging_steps=1, save_strategy="no"
)
rows = Dataset.from_dict({"input_ids": rows, "labels": rows})
trainer = Trainer(tiny_model("llama", num_layers=2), args, train_dataset=rows, callbacks=[Kill()])
trainer.train()
trainer.save_model(folder + "/final")
if args.process_index == 0:
    trainer.state.save_to_json(folder + "/state.json")
"""


@pytest.mark.slow
@pytest.mark.skipif(num_gpus() > 0, reason="accelerate's launcher would take the GPUs")
def test_restarted_attempts_end_as_an_undisturbed_run(tmp_path: Path) -> None:
    """A rank is killed in each of three attempts, first rank 0, then rank 1, then rank 0."""
    (tmp_path / "script.py").write_text(RESTARTED)
    results = []
    for name, num_kills in (("undisturbed", 0), ("restarted", 3)):
        done = subprocess.run(
            [
                *[sys.executable, "-m", "hf_lohan.cli", "launch", "--cpu", "--num_processes", "2"],
                *["--max_restarts", "3", "script.py", name, str(num_kills)],
            ],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("of this run continues from last_step") == num_kills, done.stderr
        rows = json.loads((tmp_path / name / "state.json").read_text())["log_history"]
        losses = [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row]
        results.append((losses, (tmp_path / name / "final" / "model.safetensors").read_bytes()))
    assert results[0] == results[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_rank_of_two_hundred_that_fail_is_aborted(tmp_path: Path) -> None:
    """Each process ends with the interpreter's own end."""
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", FAILING_LOOPS], cwd=tmp_path, env=os.environ | env, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "{1: 200}", done.stderr[-3000:]
    assert not re.search("terminate called|Fatal Python error", done.stderr)
    assert done.stderr.count("failed: OSError: the drive of my loop is full while rank") == 100


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Start two ranks with each launcher and return their reports."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = {}
    for route, command in ROUTES.items():
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == STATUS.get(route, 0), f"{route}:\n{done.stdout}{done.stderr}"
        found[route] = [json.loads(file.read_text()) for file in sorted((folder / route).glob("*.json"))]
    return found


@pytest.mark.slow
@pytest.mark.skipif(num_gpus() > 0, reason="accelerate's launcher and torchrun would take the GPUs")
def test_every_launcher_makes_one_run_of_two_ranks_on_cpus(reported: dict[str, list[dict[str, Any]]]) -> None:
    for route, ranks in reported.items():
        assert [facts["world_size"] for facts in ranks] == [2, 2], route
        assert {facts["device"] for facts in ranks} == {"cpu:0"}, route
        assert {facts["num_local"] for facts in ranks} == {"2"}, route
    assert reported["lohan"][0]["omp_num_threads"] == str(max(1, usable_cpus() // 2))


@pytest.mark.slow
@pytest.mark.skipif(num_gpus() > 0, reason="torchrun would take the GPUs")
def test_two_launched_processes_without_a_group_are_refused(tmp_path: Path) -> None:
    (tmp_path / "trapped.py").write_text(TRAPPED)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "trapped.py"]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    assert "WORLD_SIZE=2: 2 processes were launched together" in done.stderr
    assert not (tmp_path / "out").exists()
