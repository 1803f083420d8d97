"""Measures the cost of checksums and commits, with one offloaded model with and without them, in one interleaved run.

    python scripts/benchmarks/bench_durability.py  # Llama 151M, batch 2 x 256, float32, max_grad_norm 1.0
    python scripts/benchmarks/bench_durability.py --device cuda --hidden 4096 --layers 8 --bf16

Two engines take turns of three steps (on, off, on, off, ...). "on" is the unchanged library. It checks each read,
hashes each written granule, and commits each step with a journal of the same size as Trainer's. "off" hashes nothing
and makes nothing durable, but moves the same bytes between the same files. The results are medians and their ratio.
Then each side runs in a separate process, to compare peak memory.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest.mock import patch

import numpy as np
import torch
import typer
from benchmarking import (
    STEPS_PER_TURN,
    BatchesOption,
    Options,
    Shape,
    benchmark,
    folder_in,
    in_turns,
    offloaded_step,
    pairs_ratio,
    spread,
    table_of,
    turn,
)
from rich.console import Console
from torch import Tensor

from hf_lohan.config import OffloadConfig
from hf_lohan.engine import Journal
from hf_lohan.hardware import AnonymousMemoryPeak
from hf_lohan.huggingface.attachment import offload_model
from hf_lohan.store import Checksums, RecordFiles, checksums
from hf_lohan.wording import format_bytes

Side = Literal["on", "off"]
SIDES: tuple[Side, ...] = ("on", "off")
JOURNAL = Journal(facts={"global_step": 1}, files={"rng_state.pth": bytes(15_000), "trainer_state.json": bytes(2_000)})


class Hashing:
    """The hashing function, with its time."""

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
    """Replaces the hashing, and returns zeros for every granule."""
    return np.zeros(-(-source.nbytes // granule_bytes), np.uint64)


class Contender:
    """One side, with its own engine and store."""

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
        """Return a function that takes a turn of committed steps, and returns the seconds per step."""
        step = offloaded_step(self.engine, batch, max_grad_norm)

        def committed_step() -> None:
            step()
            self.engine.commits.request(JOURNAL)

        return lambda: turn(committed_step, self.engine.wait_for_updates, device=str(self.engine.device.torch_device))

    def _only_turn_over(self, *what: object) -> None:
        """Commit without durability, so that the next step writes to the other home."""
        versions = self.engine.tiers.store.versions
        versions.commit(*versions.draft())


def measure(
    shape: Shape, settings: dict[str, Any], folder: Path, *, device: str, max_grad_norm: float, num_turns: int
) -> dict[str, Any]:
    batch = shape.batch(device)
    contenders = {side: Contender(side, shape, settings, folder, device) for side in SIDES}
    turns = {side: contender.stepping(batch, max_grad_norm) for side, contender in contenders.items()}
    for one_turn in turns.values():
        one_turn()
    hashing, engine = contenders["on"].hashing, contenders["on"].engine
    hashing.hashed_bytes, hashing.cpu_s = 0, 0.0
    cpu: dict[str, list[float]] = {side: [] for side in SIDES}
    commit_s = []

    def timed_turn(side: Side) -> float:
        began_s = time.process_time()
        seconds = turns[side]()
        cpu[side].append((time.process_time() - began_s) / (1 + STEPS_PER_TURN))
        if side == "on":
            commit_s.append(engine.commits.last_commit_s)
        return seconds

    times = in_turns({side: partial(timed_turn, side) for side in SIDES}, num_turns)
    num_steps = num_turns * (1 + STEPS_PER_TURN)
    steps_s = spread("step_s", times)
    result = {
        "num_parameters": engine.layout.num_parameters,
        "max_grad_norm": max_grad_norm,
        **steps_s,
        "ratio": steps_s["step_s"]["on"] / steps_s["step_s"]["off"],
        "ratio_of_pairs": pairs_ratio(times, "on", "off"),
        **spread("cpu_s", cpu),
        "commit_s": statistics.median(commit_s),
        "hashed_bytes_per_step": hashing.hashed_bytes / num_steps,
        "hashing_cpu_s_per_step": hashing.cpu_s / num_steps,
    }
    for contender in contenders.values():
        contender.engine.close()
    return result


def peak_bytes(
    side: Side, shape: Shape, settings: dict[str, Any], folder: Path, device: str, max_grad_norm: float
) -> int:
    """Return the peak anonymous memory of a turn of one side. Needs a separate process."""
    contender = Contender(side, shape, settings, folder, device)
    one_turn = contender.stepping(shape.batch(device), max_grad_norm)
    peak = AnonymousMemoryPeak()
    peak.start()
    one_turn()
    peak.stop()
    contender.engine.close()
    return peak.peak_bytes


def show(results: list[dict[str, Any]]) -> None:
    table = table_of(
        "what checksums and commits cost (medians, interleaved)",
        "batch",
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
    for result in results:
        table.add_row(
            "{} x {}".format(*result["batch"]),
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


def alone(side: Side, shape: Shape) -> int:
    """Run `peak_bytes` in a separate process."""
    batch = f"{shape.batch_size}x{shape.sequence_length}"
    command = [sys.executable, *sys.argv, "--only-peak", side, "--peak-batch", batch]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return int(next(line for line in lines if line.startswith("peak ")).split()[1])


@benchmark("durability", num_turns=5)
def main(
    options: Options,
    *,
    batch: BatchesOption = None,
    max_grad_norm: float = 1.0,
    only_peak: Annotated[str | None, typer.Option(hidden=True)] = None,
    peak_batch: Annotated[str, typer.Option(hidden=True)] = "",
) -> dict[str, Any]:
    # The side without commits would never write copies in RAM to the drive.
    device, settings = options.device, {**options.budgets, "_clip": "defer", "_resident_records": "none"}
    if only_peak is not None:
        side: Side = "on" if only_peak == "on" else "off"
        with folder_in(options.store) as folder:
            (shape,) = options.shapes([peak_batch])
            print(f"peak {peak_bytes(side, shape, settings, folder, device, max_grad_norm)}")
        raise typer.Exit
    results = []
    for shape in options.shapes(batch):
        with folder_in(options.store) as folder:
            result = measure(
                shape, settings, folder, device=device, max_grad_norm=max_grad_norm, num_turns=options.num_turns
            )
        result["peak_anonymous_bytes"] = {side: alone(side, shape) for side in SIDES}
        results.append({"batch": [shape.batch_size, shape.sequence_length], **result})
    show(results)
    return {"results": results}


if __name__ == "__main__":
    typer.run(main)
