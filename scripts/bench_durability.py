"""What checksums and commits cost: the same offloaded model with and without them, in one interleaved run.

    python scripts/bench_durability.py                  # Llama 151M, batch 2 x 256, float32, max_grad_norm 1.0
    python scripts/bench_durability.py --device cuda --hidden 4096 --layers 8 --bf16

Two engines take turns of three steps (on, off, on, off, ...). "on" is the library as it is: each read is checked, each
granule hashed when it is written, each step committed with a journal of the size that Trainer's has. "off" hashes
nothing and makes nothing durable; it moves the same bytes between the same files. Medians and their ratio are quoted.
Then each side runs alone in a process of its own, to compare peak memory.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest.mock import patch

import numpy as np
import torch
import typer
from benchmarking import (
    STEPS_PER_TURN,
    DeviceOption,
    OutputOption,
    Shape,
    StoreOption,
    TurnsOption,
    folder_in,
    offloaded_step,
    table_of,
    turn,
    write_figures,
)
from rich.console import Console
from torch import Tensor

from hf_lohan.config import OffloadConfig, format_bytes
from hf_lohan.engine import Journal
from hf_lohan.hardware import AnonymousMemoryPeak
from hf_lohan.huggingface import offload_model
from hf_lohan.store import Checksums, RecordFiles, checksums

Side = Literal["on", "off"]
SIDES: tuple[Side, ...] = ("on", "off")
JOURNAL = Journal(facts={"global_step": 1}, files={"rng_state.pth": bytes(15_000), "trainer_state.json": bytes(2_000)})


class Hashing:
    """The function that hashes, timed."""

    def __init__(self) -> None:
        self.hashed_bytes = 0
        self.cpu_s = 0.0

    def __call__(self, source: Tensor, granule_bytes: int) -> Checksums:
        began_s = time.thread_time()
        values = checksums(source, granule_bytes)
        self.cpu_s += time.thread_time() - began_s
        self.hashed_bytes += source.nbytes
        return values


def no_checksums(source: Tensor, granule_bytes: int) -> Checksums:
    """In its place on the side without: what it would return for every granule, and for any content."""
    return np.zeros(-(-source.nbytes // granule_bytes), np.uint64)


class Contender:
    """One side: an engine of its own, on a store of its own."""

    def __init__(self, side: Side, shape: Shape, settings: dict[str, Any], folder: Path, device: str) -> None:
        config = OffloadConfig.load({**settings, "ssd": str(folder / side)})
        self.hashing = Hashing()
        with patch.object(RecordFiles, "__init__", self._without_checksums(RecordFiles.__init__, side)):
            self.engine = offload_model(
                shape.model(), config, torch_device=device, default_ssd_path=folder / side, hold_gradients=True
            )
        self.engine.commits.leave_to_journal()
        if side == "off":
            setattr(self.engine.commits, "_write", self._only_turn_over)  # noqa: B010 - an instance's, on purpose

    def _without_checksums(self, real: Callable[..., None], side: Side) -> Callable[..., None]:
        def init(files: RecordFiles, *args: Any, **kwargs: Any) -> None:
            kwargs["hash_granules"] = self.hashing if side == "on" else no_checksums
            real(files, *args, **kwargs)

        return init

    def stepping(self, batch: dict[str, torch.Tensor], max_grad_norm: float) -> Callable[[], float]:
        """A turn of steps, each committed in this side's way; returns seconds a step."""
        step = offloaded_step(self.engine, batch, max_grad_norm)

        def committed_step() -> None:
            step()
            self.engine.commits.request(JOURNAL)

        return lambda: turn(committed_step, self.engine.settle, device=str(self.engine.device.torch_device))

    def _only_turn_over(self, journal: Journal) -> None:
        """What is left of a commit without durability: the next step writes to the other home."""
        versions = self.engine.tiers.store.versions
        versions.commit(*versions.draft())


def measure(
    shape: Shape, settings: dict[str, Any], folder: Path, *, device: str, max_grad_norm: float, num_turns: int
) -> dict[str, Any]:
    batch = a_batch(shape, device)
    contenders = {side: Contender(side, shape, settings, folder, device) for side in SIDES}
    turns = {side: contender.stepping(batch, max_grad_norm) for side, contender in contenders.items()}
    for one_turn in turns.values():
        one_turn()
    hashing, engine = contenders["on"].hashing, contenders["on"].engine
    hashing.hashed_bytes, hashing.cpu_s = 0, 0.0
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu: dict[str, list[float]] = {side: [] for side in SIDES}
    commit_s = []
    for _ in range(num_turns):
        for side, one_turn in turns.items():
            began_s = time.process_time()
            times[side].append(one_turn())
            cpu[side].append((time.process_time() - began_s) / (1 + STEPS_PER_TURN))
        commit_s.append(engine.commits.last_commit_s)
    num_steps = num_turns * (1 + STEPS_PER_TURN)
    medians = {side: statistics.median(values) for side, values in times.items()}
    result = {
        "num_parameters": engine.layout.num_parameters,
        "max_grad_norm": max_grad_norm,
        "step_s": medians,
        "step_s_all": times,
        "ratio": medians["on"] / medians["off"],
        "ratio_of_pairs": statistics.median(a / b for a, b in zip(times["on"], times["off"], strict=True)),
        "cpu_s": {side: statistics.median(values) for side, values in cpu.items()},
        "cpu_s_all": cpu,
        "commit_s": statistics.median(commit_s),
        "hashed_bytes_per_step": hashing.hashed_bytes / num_steps,
        "hashing_cpu_s_per_step": hashing.cpu_s / num_steps,
        "hardware": engine.device.describe(),
    }
    for contender in contenders.values():
        contender.engine.close()
    return result


def a_batch(shape: Shape, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, shape.vocabulary, (shape.batch_size, shape.sequence_length), generator=generator)
    return {"input_ids": ids.to(device), "labels": ids.to(device)}


def peak_bytes(
    side: Side, shape: Shape, settings: dict[str, Any], folder: Path, device: str, max_grad_norm: float
) -> int:
    """Anonymous memory that a turn of one side takes at most; call it in a process of its own."""
    contender = Contender(side, shape, settings, folder, device)
    one_turn = contender.stepping(a_batch(shape, device), max_grad_norm)
    peak = AnonymousMemoryPeak()
    peak.start()
    one_turn()
    peak.stop()
    contender.engine.close()
    return peak.peak_bytes


def show(result: dict[str, Any]) -> None:
    table = table_of(
        "what checksums and commits cost (medians, interleaved)",
        "on",
        "off",
        "ratio",
        "CPU time on",
        "off",
        "commit",
        "hashed a step",
        "hashing, CPU time a step",
        "peak RAM on",
        "off",
    )
    table.add_row(
        f"{result['step_s']['on']:.3f} s",
        f"{result['step_s']['off']:.3f} s",
        f"{result['ratio']:.3f}",
        f"{result['cpu_s']['on']:.2f} s",
        f"{result['cpu_s']['off']:.2f} s",
        f"{1000 * result['commit_s']:.1f} ms",
        format_bytes(int(result["hashed_bytes_per_step"])),
        f"{result['hashing_cpu_s_per_step']:.3f} s",
        *(format_bytes(result["peak_anonymous_bytes"][side]) for side in SIDES),
    )
    Console().print(table)


def main(
    device: DeviceOption = "cpu",
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
    num_turns: TurnsOption = 5,
    store: StoreOption = None,
    output: OutputOption = None,
    only_peak: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure, print a table, and write JSON."""
    shape = Shape(hidden, layers, intermediate, vocabulary, batch_size, sequence_length, bf16)
    settings = {"cpu_memory": cpu_memory, "gpu_memory": gpu_memory, "clip": "defer"}
    if only_peak is not None:
        side: Side = "on" if only_peak == "on" else "off"
        with folder_in(store) as folder:
            print(f"peak {peak_bytes(side, shape, settings, folder, device, max_grad_norm)}")
        return
    with folder_in(store) as folder:
        result = measure(shape, settings, folder, device=device, max_grad_norm=max_grad_norm, num_turns=num_turns)
    result["peak_anonymous_bytes"] = {side: alone(side) for side in SIDES}
    show(result)
    write_figures(output, {"shape": shape.__dict__, **result})


def alone(side: str) -> int:
    command = [sys.executable, *sys.argv, "--only-peak", side]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return int(next(line for line in lines if line.startswith("peak ")).split()[1])


if __name__ == "__main__":
    typer.run(main)
