"""The benchmarks run, at sizes that measure nothing; what only a GPU can run is run here on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "scripts" / "benchmarks"
SMALL = [
    *("--hidden", "64", "--layers", "2", "--intermediate", "128", "--vocabulary", "128", "--batch-size", "2"),
    *("--sequence-length", "8", "--cpu-memory", "64MiB", "--gpu-memory", "16MiB", "--num-turns", "1"),
]


def run(script: Path, *arguments: str, folder: Path) -> str:
    command = [sys.executable, str(script), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_a_gpu_step_in_small_on_the_cpu(tmp_path: Path) -> None:
    output = tmp_path / "figures"
    run(BENCHMARKS / "gpu_step.py", *SMALL, "--output", str(output), folder=tmp_path)
    (written,) = output.iterdir()
    assert written.name.startswith("gpu_step_cpu_") and written.name.endswith("cores.json")
    figures = json.loads(written.read_text())
    assert figures["first_losses_equal"], (figures["in_memory"], figures["offloaded"])
    assert set(figures["step_s"]) == set(figures["step_s_spread"]) == {"in_memory", "offloaded"}
    assert figures["offloaded"]["write_bytes_per_step"] > 0
    assert figures["commit"] and figures["hardware"]["name"]
    assert figures["command"].startswith("python scripts/benchmarks/gpu_step.py --hidden 64")
    assert str(tmp_path) not in written.read_text()


def test_a_paced_step_in_small(tmp_path: Path) -> None:
    own = ["--regime", "balanced", "--max-grad-norm", "1", "--steps-per-turn", "1"]
    own += ["--set", "resident_records=none", "--set", "commit_every=1"]
    run(BENCHMARKS / "paced_step.py", *SMALL, *own, "--output", str(tmp_path / "figures.json"), folder=tmp_path)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["settings"]["resident_records"] == "none"
    (result,) = figures["results"]
    (turn,) = result["turns"]
    assert len(turn["steps_s"]) == 1 and turn["num_commits"] == 1 and turn["write_bytes"] > 0
    assert turn["clip_way"] in ("defer", "speculate") and turn["clip_rate"] == 0
    assert turn["flops"] >= 3 * 2 * 2 * 8 * figures["results"][0]["num_parameters"] * 0.5
    assert turn["lanes_s"]["compute"] == turn["compute_s"] > 0
    assert result["over_longest_lane"] == turn["step_s"] / max(turn["lanes_s"].values())
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_losses_under_quantized_collectives_in_small(tmp_path: Path) -> None:
    own = ["--num-steps", "3", "--seed", "5", "--mode", "qgZ int4", "--vocabulary", "256"]  # bytes
    output = ["--output", str(tmp_path / "figures.json")]
    run(BENCHMARKS / "measure_quantized_collectives.py", *SMALL, *own, *output, folder=tmp_path)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures["modes"]) == {"exact", "qgZ int4"}
    exact, coded = (figures["modes"][name] for name in ("exact", "qgZ int4"))
    assert exact["last_training_loss_minus_exact"] == [0.0]
    assert 0 < abs(coded["last_training_loss_minus_exact"][0]) < 0.1
    (errors,) = figures["errors_after_exact_runs"]
    assert errors["gradients int4"]["64"]["relative_rms"] < errors["gradients int4"]["4096"]["relative_rms"]


def test_codecs_speeds_in_small(tmp_path: Path) -> None:
    own = ["--numel", "70000", "--num-turns", "1", "--output", str(tmp_path / "figures.json")]
    run(BENCHMARKS / "bench_codecs.py", *own, folder=tmp_path)
    codecs = json.loads((tmp_path / "figures.json").read_text())["codecs"]
    assert codecs["gradients, int4"]["bits_per_value"] == pytest.approx(4.25, rel=1e-3)
    assert 1 < codecs["step delta, lr 5e-6"]["bits_per_value"] < codecs["step delta, lr 1e-4"]["bits_per_value"] < 2
    assert all(figures["pays_below_gbit_s"] > 0 for figures in codecs.values())


COMMANDS = """
import runpy, sys
from pathlib import Path
import typer.main
sys.path.insert(0, sys.argv[1])
for script in sorted(Path(sys.argv[1]).glob("*.py")):
    main = runpy.run_path(str(script)).get("main")
    if main is not None:
        app = typer.Typer()
        app.command()(main)
        print(script.stem, *(parameter.name for parameter in typer.main.get_command(app).params))
"""


def test_every_benchmark_takes_the_same_arguments(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMMANDS, str(BENCHMARKS)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    options = {name: set(rest) for name, *rest in map(str.split, result.stdout.splitlines())}
    assert {"bench_step", "bench_io", "gpu_step", "measure_state_dtypes", "paced_step"} <= set(options)
    shared = set.intersection(*options.values())
    assert {"device", "hidden", "layers", "cpu_memory", "num_turns", "store", "output"} <= shared


@pytest.mark.slow
def test_generating_from_a_paced_drive_in_small(tmp_path: Path) -> None:
    own = ["--layers", "8", "--drive", "10e6", "--tokens", "2", "--store", str(tmp_path / "store")]
    run(BENCHMARKS / "generate_from_ssd.py", *SMALL, *own, "--output", str(tmp_path / "figures.json"), folder=tmp_path)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["is_drive_paced"] and figures["drive_bytes_per_s"] == 10e6
    assert figures["missing_bytes_per_token"]["all"] == 0 < figures["missing_bytes_per_token"]["ring"]
    assert figures["slot_bytes"]["bytes"] < figures["slot_bytes"]["ring"] < figures["slot_bytes"]["all"]
    assert all(figures["token_s"][side] >= 0.9 * figures["bound_s"][side] for side in figures["bound_s"])
