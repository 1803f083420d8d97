"""The benchmarks run at small sizes on the CPU, where their figures mean nothing."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import renew_benchmarks
import typer.main
from typer.testing import CliRunner

BENCHMARKS = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"
SMALL = [
    *("--hidden", "64", "--layers", "2", "--intermediate", "128", "--vocabulary", "128", "--batch-size", "2"),
    *("--sequence-length", "8", "--cpu-memory", "64MiB", "--gpu-memory", "16MiB", "--num-turns", "1"),
]
Run = Callable[..., dict[str, Any]]


def app_of(name: str) -> typer.Typer:
    app = typer.Typer()
    app.command()(importlib.import_module(name).main)
    return app


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a benchmark in an empty folder and returns its figures. Nothing else may be left in that folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def run(name: str, *arguments: str, output: str = "figures.json") -> dict[str, Any]:
        words = [*arguments, "--output", str(tmp_path / output)]
        monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / f"{name}.py"), *words])
        result = CliRunner().invoke(app_of(name), words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        (written,) = (path for path in tmp_path.rglob("*") if path.is_file())
        assert str(tmp_path) not in written.read_text()
        return {"file": written.name, **json.loads(written.read_text())}

    return run


def test_gpu_step_runs_on_the_cpu(run: Run) -> None:
    figures = run("gpu_step", *SMALL, output="figures")
    assert figures["file"].startswith("gpu_step_cpu_") and figures["file"].endswith("cores.json")
    assert figures["first_losses_equal"], (figures["in_memory"], figures["offloaded"])
    assert set(figures["step_s"]) == set(figures["step_s_spread"]) == {"in_memory", "offloaded"}
    assert figures["offloaded"]["write_bytes_per_step"] > 0
    assert figures["commit"] and figures["hardware"]["name"]
    assert figures["command"].startswith("python scripts/benchmarks/gpu_step.py --hidden 64")


def test_paced_step_runs(run: Run) -> None:
    own = ["--regime", "balanced", "--max-grad-norm", "1", "--steps-per-turn", "1"]
    figures = run("paced_step", *SMALL, *own, "--set", "_resident_records=none", "--set", "commit_every=1")
    assert figures["settings"]["_resident_records"] == "none"
    (result,) = figures["results"]
    (turn,) = result["turns"]
    assert len(turn["steps_s"]) == 1 and turn["num_commits"] == 1 and turn["write_bytes"] > 0
    assert turn["clip_way"] in ("defer", "speculate") and turn["clip_rate"] == 0
    assert turn["flops"] >= 3 * 2 * 2 * 8 * figures["results"][0]["num_parameters"] * 0.5
    assert turn["lanes_s"]["compute"] == turn["compute_s"] > 0
    assert result["over_longest_lane"] == turn["step_s"] / max(turn["lanes_s"].values())


def test_bench_codecs_runs(run: Run) -> None:
    codecs = run("bench_codecs", "--numel", "70000", "--num-turns", "1")["codecs"]
    assert codecs["gradients, int4"]["bits_per_value"] == pytest.approx(4.25, rel=1e-3)
    assert 1 < codecs["step delta, lr 5e-6"]["bits_per_value"] < codecs["step delta, lr 1e-4"]["bits_per_value"] < 2
    assert all(figures["pays_below_gbit_s"] > 0 for figures in codecs.values())


@pytest.mark.slow
def test_bench_packed_runs(run: Run) -> None:
    figures = run("bench_packed", *SMALL, "--steps-per-turn", "1", "--intermediate", "2048")
    assert figures["read_bytes"]["packed"] < figures["read_bytes"]["unpacked"]
    assert figures["decoded_per_s"]["nf4, float32"] > 0


def test_all_benchmarks_take_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = [path.stem for path in BENCHMARKS.glob("*.py") if "@benchmark(" in path.read_text()]
    names.remove("bench_rivals")  # defines its command only when run, because DeepSpeed's environment lacks hf_lohan
    names.remove("benchmarking")
    assert {"bench_io", "bench_large", "gpu_step", "paced_step"} <= set(names)
    for name in names:
        options = {parameter.name for parameter in typer.main.get_command(app_of(name)).params}
        assert {"device", "hidden", "layers", "cpu_memory", "num_turns", "store", "output"} <= options, name


def test_the_measured_rows_have_valid_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for benchmark in renew_benchmarks.BENCHMARKS:
        name = benchmark.script.removesuffix(".py")
        if name != "bench_rivals":
            typer.main.get_command(app_of(name)).make_context(name, list(benchmark.arguments))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("balanced_experts", ["--num-ranks", "2", "--row-us", "1", "--intermediate", "64"]),
        ("bench_durability", ["--batch", "2x8"]),
        ("bench_io", ["--file-bytes", "32MiB"]),
        ("bench_large", ["--alone-bytes", "8MiB", "--steps-per-turn", "1"]),
        ("bench_planner", ["--batch", "2x8", "--num-points", "1"]),
        ("shaped_links", ["--rate", "50mbit", "--nodes", "2", "--ranks-a-node", "1"]),
    ],
)
def test_other_benchmarks_run(name: str, own: list[str], run: Run) -> None:
    try:
        assert run(name, *SMALL, *own)["commit"]
    except PermissionError as error:  # raised without network namespaces
        pytest.skip(str(error))


@pytest.mark.slow
def test_generate_from_ssd_runs(run: Run) -> None:
    figures = run("generate_from_ssd", *SMALL, "--layers", "8", "--drive", "10e6", "--tokens", "2")
    assert figures["is_drive_paced"] and figures["drive_bytes_per_s"] == 10e6
    assert figures["missing_bytes_per_token"]["all"] == 0 < figures["missing_bytes_per_token"]["ring"]
    assert figures["slot_bytes"]["bytes"] < figures["slot_bytes"]["ring"] < figures["slot_bytes"]["all"]
    assert all(figures["token_s"][side] >= 0.9 * figures["bound_s"][side] for side in figures["bound_s"])
