"""The optimizer's pipeline alone: states in from the drive, AdamW, states out, with no model beside it.

    python scripts/bench_optimizer.py

A backward fills the gradients, untimed; then all updates run at once and are waited for. In turns with it: torch's
fused AdamW over as many parameters in memory, and the I/O engine alone, which moves as much as the updates do. The
pipeline is to take as long as the longer of the two: what it takes beyond is what does not overlap.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict
from typing import Any

import torch
import typer
from benchmarking import (
    LEARNING_RATE,
    DeviceOption,
    OutputOption,
    Shape,
    StoreOption,
    TurnsOption,
    folder_in,
    table_of,
    timed,
    write_figures,
)
from io_alone import alone_bytes_per_s, moments_of, moved_bytes
from rich.console import Console

from hf_lohan.config import OffloadConfig
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface import offload_model
from hf_lohan.optim import OffloadAdamW

NEVER_CLIPS = 1e9
"""A norm is waited for, so gradients are kept until the step; nothing is scaled."""


def update_all(engine: OffloadEngine, optimizer: OffloadAdamW, batch: dict[str, torch.Tensor]) -> tuple[float, int]:
    """Seconds that the updates of one step take, with nothing else to do, and the bytes they move."""
    model: Any = engine.model
    model(**batch).loss.backward()
    engine.clip_grad_norm(NEVER_CLIPS)
    before, began_s = sum(moved_bytes(engine)), time.perf_counter()
    optimizer.step()
    engine.settle()
    return time.perf_counter() - began_s, sum(moved_bytes(engine)) - before


def measure(shape: Shape, engine: OffloadEngine, *, device: str, num_turns: int) -> dict[str, Any]:
    ids = torch.randint(0, shape.vocabulary, (1, 16), generator=torch.Generator().manual_seed(1)).to(device)
    batch = {"input_ids": ids, "labels": ids}
    optimizer = OffloadAdamW(engine.model.parameters(), lr=LEARNING_RATE, engine=engine)
    flat = [torch.zeros(chunk.numel) for chunk in engine.layout.chunks()]
    for parameter in flat:
        parameter.grad = torch.full_like(parameter, 1e-3)
    in_memory = torch.optim.AdamW(flat, lr=LEARNING_RATE, fused=True)
    in_memory.step()
    update_all(engine, optimizer, batch)
    where = moments_of(engine)
    turns: dict[str, list[float]] = {"pipeline_s": [], "adamw_s": [], "io_s": [], "over_longest": []}
    moved = 0
    for _ in range(num_turns):
        pipeline_s, moved = update_all(engine, optimizer, batch)
        adamw_s = timed("cpu", in_memory.step)
        io_s = moved / alone_bytes_per_s(engine, where, 1.0, num_bytes=moved)
        turns["pipeline_s"].append(pipeline_s)
        turns["adamw_s"].append(adamw_s)
        turns["io_s"].append(io_s)
        turns["over_longest"].append(pipeline_s / max(adamw_s, io_s))
    return {
        "num_parameters": engine.layout.num_parameters,
        "moved_bytes": moved,
        **{name: statistics.median(values) for name, values in turns.items()},
        "all": turns,
        "hardware": engine.device.describe(),
    }


def main(
    device: DeviceOption = "cpu",
    hidden: int = 1024,
    layers: int = 8,
    intermediate: int = 4096,
    vocabulary: int = 8192,
    bf16: bool = False,
    cpu_memory: str = "1GiB",
    gpu_memory: str = "512MiB",
    num_turns: TurnsOption = 5,
    store: StoreOption = None,
    output: OutputOption = None,
) -> None:
    """Measure, print a table, and write JSON."""
    shape = Shape(hidden, layers, intermediate, vocabulary, 1, 16, bf16)
    settings = {"cpu_memory": cpu_memory, "gpu_memory": gpu_memory, "clip": "defer", "resident_records": "none"}
    with folder_in(store) as folder:
        config = OffloadConfig.load({**settings, "ssd": str(folder)})
        engine = offload_model(shape.model(), config, torch_device=device, default_ssd_path=folder)
        try:
            result = measure(shape, engine, device=device, num_turns=num_turns)
        finally:
            engine.close()
    table = table_of(
        "all updates of a step (medians, interleaved)",
        "pipeline",
        "AdamW in memory",
        "I/O alone",
        "moved, GB",
        "pipeline / the longer",
    )
    table.add_row(
        f"{result['pipeline_s']:.3f} s",
        f"{result['adamw_s']:.3f} s",
        f"{result['io_s']:.3f} s",
        f"{result['moved_bytes'] / 1e9:.2f}",
        f"{result['over_longest']:.3f}",
    )
    Console().print(table)
    write_figures(output, {"shape": asdict(shape), "settings": settings, **result})


if __name__ == "__main__":
    typer.run(main)
