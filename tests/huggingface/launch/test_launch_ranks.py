"""Several processes of each launcher become one run. Separate runs are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from python_runs import ROOT, TWO_RANKS, run_python

from hf_lohan.device import num_gpus
from hf_lohan.threads import usable_cpus

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
    "torchrun": [*TWO_RANKS, "-m", "hf_lohan.run", "script.py", "torchrun", "0"],
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_rank_of_two_hundred_that_fail_is_aborted(tmp_path: Path) -> None:
    """Each process ends with the interpreter's own end."""
    ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    done = run_python("-c", FAILING_LOOPS, cwd=tmp_path, timeout_s=900, **ranks)
    assert done.stdout.splitlines()[-1] == "{1: 200}", done.stderr[-3000:]
    assert not re.search("terminate called|Fatal Python error", done.stderr)
    assert done.stderr.count("failed: OSError: the drive of my loop is full while rank") == 100


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Start two ranks with each launcher and return their reports."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "script.py").write_text(SCRIPT)
    found = {}
    for route, command in ROUTES.items():
        run_python(*command, cwd=folder, status=STATUS.get(route, 0))
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
    done = run_python(*TWO_RANKS, "trapped.py", cwd=tmp_path, status=1)
    assert "WORLD_SIZE=2: 2 processes were launched together" in done.stderr
    assert not (tmp_path / "out").exists()
