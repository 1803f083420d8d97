"""The optimizer pipeline's schedules against each other: LoHan's Fig. 7, in one interleaved run.

    python scripts/bench_schedules.py                       # Llama 151M, batch 2 x 256, float32, no clipping
    python scripts/bench_schedules.py --batch-size 1 --sequence-length 32

`optimized` reads the next chunk's states before it updates and writes this one's, while backward goes on; `naive` does
one after the other, while backward goes on; `serial` does what naive does, when backward has ended. One engine each, on
a store of its own, in turns of three steps (A A A B B B C C C A A A ...).
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from benchmarking import (
    STEPS_PER_TURN,
    DeviceOption,
    OutputOption,
    Shape,
    StoreOption,
    folder_in,
    offloaded_step,
    table_of,
    turn,
    write_figures,
)
from rich.console import Console

from hf_lohan.config import OffloadConfig
from hf_lohan.huggingface import offload_model

SCHEDULES = ("optimized", "naive", "serial")


def measure(shape: Shape, settings: dict[str, Any], folder: Path, *, device: str, num_turns: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, shape.vocabulary, (shape.batch_size, shape.sequence_length), generator=generator)
    batch = {"input_ids": ids.to(device), "labels": ids.to(device)}
    engines, steps = {}, {}
    for schedule in SCHEDULES:
        config = OffloadConfig.load({**settings, "schedule": schedule, "ssd": str(folder / schedule)})
        engine = offload_model(
            shape.model(), config, torch_device=device, default_ssd_path=folder, hold_gradients=False
        )
        engines[schedule], steps[schedule] = engine, offloaded_step(engine, batch, 0.0)
    try:
        for schedule in SCHEDULES:
            turn(steps[schedule], engines[schedule].settle, device=device)
        times: dict[str, list[float]] = {schedule: [] for schedule in SCHEDULES}
        for _ in range(num_turns):
            for schedule in SCHEDULES:
                times[schedule].append(turn(steps[schedule], engines[schedule].settle, device=device))
        medians = {schedule: statistics.median(values) for schedule, values in times.items()}
        return {
            "shape": asdict(shape),
            "settings": settings,
            "num_parameters": engines["optimized"].layout.num_parameters,
            "step_s": medians,
            "step_s_all": times,
            "over_optimized": {schedule: medians[schedule] / medians["optimized"] for schedule in SCHEDULES},
            "hardware": engines["optimized"].device.describe(),
        }
    finally:
        for engine in engines.values():
            engine.close()


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
    num_turns: Annotated[int, typer.Option(help=f"turns of {STEPS_PER_TURN} steps for each schedule")] = 3,
    store: StoreOption = None,
    output: OutputOption = None,
) -> None:
    """Measure, print a table, and write JSON."""
    shape = Shape(hidden, layers, intermediate, vocabulary, batch_size, sequence_length, bf16)
    settings = {"cpu_memory": cpu_memory, "gpu_memory": gpu_memory, "activations": "recompute"}
    with folder_in(store) as folder:
        result = measure(shape, settings, folder, device=device, num_turns=num_turns)
    table = table_of(
        f"seconds a step by schedule, batch {batch_size} x {sequence_length} (medians, interleaved)",
        "schedule",
        "a step",
        "over optimized",
        "fastest",
        "slowest",
    )
    for schedule in SCHEDULES:
        values = result["step_s_all"][schedule]
        table.add_row(
            schedule,
            f"{result['step_s'][schedule]:.3f} s",
            f"{result['over_optimized'][schedule]:.3f}",
            f"{min(values):.3f} s",
            f"{max(values):.3f} s",
        )
    Console().print(table)
    write_figures(output, result)


if __name__ == "__main__":
    typer.run(main)
