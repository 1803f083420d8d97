"""The optimizer's pipeline alone: states in from the drive, AdamW, states out, with no model beside it.

    python scripts/benchmarks/bench_optimizer.py

A backward fills the gradients, untimed; then all updates run at once and are waited for. In turns with it: torch's
fused AdamW over as many parameters in memory, and the I/O engine alone, which moves as much as the updates do. The
pipeline is to take as long as the longer of the two: what it takes beyond is what does not overlap.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import typer
from benchmarking import LEARNING_RATE, Options, Shape, benchmark, folder_in, spread, table_of, timed
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
    took_s = time.perf_counter() - began_s
    optimizer.zero_grad()
    return took_s, sum(moved_bytes(engine)) - before


def measure(shape: Shape, engine: OffloadEngine, *, device: str, num_turns: int) -> dict[str, Any]:
    batch = shape.batch(device)
    optimizer = OffloadAdamW(engine.model.parameters(), lr=LEARNING_RATE, engine=engine)
    flat = [torch.zeros(chunk.numel) for chunk in engine.layout.chunks()]
    for parameter in flat:
        parameter.grad = torch.full_like(parameter, 1e-3)
    in_memory = torch.optim.AdamW(flat, lr=LEARNING_RATE, fused=True)
    in_memory.step()
    update_all(engine, optimizer, batch)
    where = moments_of(engine)
    turns: dict[str, list[float]] = {"pipeline": [], "adamw": [], "io": []}
    over_longest = []
    moved = 0
    for _ in range(num_turns):
        pipeline_s, moved = update_all(engine, optimizer, batch)
        adamw_s = timed("cpu", in_memory.step)
        io_s = moved / alone_bytes_per_s(engine, where, 1.0, num_bytes=moved)
        for side, seconds in (("pipeline", pipeline_s), ("adamw", adamw_s), ("io", io_s)):
            turns[side].append(seconds)
        over_longest.append(pipeline_s / max(adamw_s, io_s))
    return {
        "num_parameters": engine.layout.num_parameters,
        "moved_bytes": moved,
        **spread("seconds", turns),
        "over_longest": statistics.median(over_longest),
        "over_longest_all": over_longest,
    }


@benchmark("optimizer", batch_size=1, sequence_length=16, cpu_memory="1GiB", num_turns=5)
def main(options: Options) -> dict[str, Any]:
    settings = {**options.budgets, "clip": "defer", "resident_records": "none"}
    with folder_in(options.store) as folder:
        config = OffloadConfig.load({**settings, "ssd": str(folder)})
        engine = offload_model(options.shape.model(), config, torch_device=options.device, default_ssd_path=folder)
        try:
            result = measure(options.shape, engine, device=options.device, num_turns=options.num_turns)
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
        *(f"{result['seconds'][side]:.3f} s" for side in ("pipeline", "adamw", "io")),
        f"{result['moved_bytes'] / 1e9:.2f}",
        f"{result['over_longest']:.3f}",
    )
    Console().print(table)
    return result


if __name__ == "__main__":
    typer.run(main)
