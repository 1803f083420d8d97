"""What checksums and commits cost: the same offloaded model with and without them, in one interleaved run.

    python scripts/bench_durability.py                  # Llama 151M, batch 2 x 256, float32, max_grad_norm 1.0
    python scripts/bench_durability.py --device cuda --hidden 4096 --layers 8 --bf16

Two engines take turns of three steps (on, off, on, off, ...). "on" is the library as it is: each read is checked, each
granule hashed when it is written, each step committed with a journal of the size that Trainer's has. "off" hashes nothing
and commits nothing; it moves the same bytes. Medians and their ratio are quoted. Then each side runs alone in a process
of its own, to compare peak memory.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest.mock import patch

import numpy as np
import torch
import typer
from bench_step import STEPS_PER_TURN, Shape, offloaded_step, timed, turn
from rich.console import Console
from rich.table import Table

import hf_lohan.storage.record_files
from hf_lohan.config import OffloadConfig, format_bytes
from hf_lohan.integrations.attachment import offload_model
from hf_lohan.profiler import AnonymousMemoryPeak
from hf_lohan.runtime import Journal, OffloadEngine
from hf_lohan.storage.granules import Checksums, checksums

Side = Literal["on", "off"]
JOURNAL = Journal(facts={"global_step": 1}, files={"rng_state.pth": bytes(15_000), "trainer_state.json": bytes(2_000)})


class Hashing:
    """Stands in for the function that hashes, and times it where it hashes."""

    def __init__(self) -> None:
        self.is_on = True
        self.hashed_bytes = 0
        self.hashing_s = 0.0

    def __call__(self, view: memoryview, granule_bytes: int) -> Checksums:
        if not self.is_on:
            return np.zeros(-(-view.nbytes // granule_bytes), np.uint64)
        began_s = time.thread_time()
        values = checksums(view, granule_bytes)
        self.hashing_s += time.thread_time() - began_s
        self.hashed_bytes += view.nbytes
        return values


def build(shape: Shape, config: OffloadConfig, folder: Path, device: str, side: Side) -> OffloadEngine:
    engine = offload_model(
        shape.model(), config, torch_device=device, default_ssd_path=folder / side, hold_gradients=True
    )
    engine.commits_each_step = False
    return engine


def step_of(engine: OffloadEngine, batch: dict[str, torch.Tensor], max_grad_norm: float, side: Side) -> Any:
    step = offloaded_step(engine, batch, max_grad_norm)

    def committed_step() -> None:
        step()
        engine.commit(JOURNAL)

    return committed_step if side == "on" else step


def side_turn(step: Callable[[], None], engine: OffloadEngine) -> None:
    """A turn that leaves nothing under way, not even blocks that are read ahead for the next step."""
    turn(step, engine)
    engine.pause_reading_ahead()


def measure(
    shape: Shape, settings: dict[str, Any], folder: Path, *, device: str, max_grad_norm: float, num_turns: int
) -> dict[str, Any]:
    hashing = Hashing()
    batch = a_batch(shape, device)
    with patch.object(hf_lohan.storage.record_files, "checksums", hashing):
        engines: dict[Side, OffloadEngine] = {}
        steps: dict[Side, Callable[[], None]] = {}
        sides: tuple[Side, ...] = ("on", "off")
        for side in sides:
            hashing.is_on = side == "on"
            config = OffloadConfig.load({**settings, "ssd": str(folder / side)})
            engines[side] = build(shape, config, folder, device, side)
            steps[side] = step_of(engines[side], batch, max_grad_norm, side)
            side_turn(steps[side], engines[side])
        hashing.hashed_bytes, hashing.hashing_s = 0, 0.0
        times: dict[Side, list[float]] = {side: [] for side in sides}
        commit_s = []
        for _ in range(num_turns):
            for side in sides:
                hashing.is_on = side == "on"
                work = lambda side=side: side_turn(steps[side], engines[side])  # noqa: E731
                times[side].append(timed(device, work) / STEPS_PER_TURN)
                commit_s.append(engines[side].step_log.last_commit_s)
        hardware = engines["on"].device.describe()
        num_parameters = engines["on"].layout.num_parameters
        for side in sides:
            hashing.is_on = side == "on"
            engines[side].close()
    num_steps = num_turns * STEPS_PER_TURN
    medians = {side: statistics.median(values) for side, values in times.items()}
    return {
        "num_parameters": num_parameters,
        "max_grad_norm": max_grad_norm,
        "step_s": medians,
        "step_s_all": times,
        "ratio": medians["on"] / medians["off"],
        "ratio_of_pairs": statistics.median(a / b for a, b in zip(times["on"], times["off"], strict=True)),
        "commit_s": statistics.median(value for value in commit_s if value),
        "hashed_bytes_per_step": hashing.hashed_bytes / num_steps,
        "hashing_cpu_s_per_step": hashing.hashing_s / num_steps,
        "hardware": hardware,
    }


def a_batch(shape: Shape, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, shape.vocabulary, (shape.batch_size, shape.sequence_length), generator=generator)
    return {"input_ids": ids.to(device), "labels": ids.to(device)}


def peak_bytes(shape: Shape, settings: dict[str, Any], folder: Path, device: str, max_grad_norm: float, side: Side) -> int:
    """Anonymous memory that three steps of one side take at most; call it in a process of its own."""
    hashing = Hashing()
    hashing.is_on = side == "on"
    with patch.object(hf_lohan.storage.record_files, "checksums", hashing):
        config = OffloadConfig.load({**settings, "ssd": str(folder / side)})
        engine = build(shape, config, folder, device, side)
        step = step_of(engine, a_batch(shape, device), max_grad_norm, side)
        peak = AnonymousMemoryPeak()
        peak.start()
        turn(step, engine)
        peak.stop()
        engine.close()
    return peak.peak_bytes


def show(result: dict[str, Any]) -> None:
    table = Table(title="what checksums and commits cost (medians, interleaved)")
    for heading in ("on", "off", "ratio", "commit", "hashed a step", "hashing, CPU time a step", "peak RAM on", "off"):
        table.add_column(heading, justify="right")
    table.add_row(
        f"{result['step_s']['on']:.3f} s",
        f"{result['step_s']['off']:.3f} s",
        f"{result['ratio']:.3f}",
        f"{1000 * result['commit_s']:.1f} ms",
        format_bytes(int(result["hashed_bytes_per_step"])),
        f"{result['hashing_cpu_s_per_step']:.3f} s",
        *(format_bytes(result["peak_anonymous_bytes"][side]) for side in ("on", "off")),
    )
    Console().print(table)


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    hidden: int = 1024,
    layers: int = 8,
    intermediate: int = 4096,
    vocabulary: int = 8192,
    batch_size: int = 2,
    sequence_length: int = 256,
    bf16: bool = False,
    cpu_memory: str = "512MiB",
    gpu_memory: str = "512MiB",
    max_grad_norm: float = 1.0,
    num_turns: Annotated[int, typer.Option(help=f"turns of {STEPS_PER_TURN} steps for each side")] = 5,
    store: Annotated[Path | None, typer.Option(help="folder on the drive to measure; default: a temporary one")] = None,
    output: Annotated[Path | None, typer.Option(help="write the figures as JSON")] = None,
    only_peak: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure, print a table, and write JSON."""
    shape = Shape(hidden, layers, intermediate, vocabulary, batch_size, sequence_length, bf16)
    settings = {"cpu_memory": cpu_memory, "gpu_memory": gpu_memory, "clip": "defer"}
    folder = store or Path(tempfile.mkdtemp(prefix="lohan-bench-", dir="."))
    if only_peak is not None:
        side: Side = "on" if only_peak == "on" else "off"
        print(f"peak {peak_bytes(shape, settings, folder, device, max_grad_norm, side)}")
        return
    try:
        result = measure(shape, settings, folder, device=device, max_grad_norm=max_grad_norm, num_turns=num_turns)
        shutil.rmtree(folder, ignore_errors=True)
        result["peak_anonymous_bytes"] = {side: alone(side, folder) for side in ("on", "off")}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(result)
    if output is not None:
        output.write_text(json.dumps({"shape": shape.__dict__, **result}, indent=2) + "\n")


def alone(side: str, folder: Path) -> int:
    command = [sys.executable, *sys.argv, "--store", str(folder), "--only-peak", side]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return int(next(line for line in lines if line.startswith("peak ")).split()[1])


if __name__ == "__main__":
    typer.run(main)
