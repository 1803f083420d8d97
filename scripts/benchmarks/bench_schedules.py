"""The optimizer pipeline's schedules against each other: LoHan's Fig. 7, in one interleaved run.

    python scripts/benchmarks/bench_schedules.py  # Llama 151M, batch 2 x 256, float32, no clipping
    python scripts/benchmarks/bench_schedules.py --batch 1x64 --batch 2x256

`optimized` reads the next chunk's states before it updates and writes this one's, while backward goes on; `naive` does
one after the other, while backward goes on; `serial` does what naive does, when backward has ended. One engine each, on
a store of its own, in turns of three steps (A A A B B B C C C A A A ...).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import typer
from benchmarking import (
    BatchesOption,
    Options,
    Shape,
    benchmark,
    folder_in,
    in_turns,
    offloaded_step,
    spread,
    table_of,
    turn,
)
from rich.console import Console

from hf_lohan.config import OffloadConfig
from hf_lohan.huggingface import offload_model

SCHEDULES = ("optimized", "naive", "serial")


def measure(shape: Shape, settings: dict[str, Any], folder: Path, *, device: str, num_turns: int) -> dict[str, Any]:
    batch = shape.batch(device)
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
        sides = {
            schedule: partial(turn, steps[schedule], engines[schedule].settle, device=device) for schedule in SCHEDULES
        }
        figures = spread("step_s", in_turns(sides, num_turns))
        medians = figures["step_s"]
        return {
            "num_parameters": engines["optimized"].layout.num_parameters,
            **figures,
            "over_optimized": {schedule: medians[schedule] / medians["optimized"] for schedule in SCHEDULES},
        }
    finally:
        for engine in engines.values():
            engine.close()


@benchmark("schedules")
def main(options: Options, *, batch: BatchesOption = None) -> dict[str, Any]:
    settings = {**options.budgets, "activations": "recompute"}
    results = []
    for shape in options.shapes(batch):
        with folder_in(options.store) as folder:
            result = measure(shape, settings, folder, device=options.device, num_turns=options.num_turns)
        results.append({"batch": [shape.batch_size, shape.sequence_length], **result})
    table = table_of(
        "seconds a step by schedule (medians, interleaved)",
        "batch",
        "schedule",
        "a step",
        "over optimized",
        "fastest",
        "slowest",
    )
    for result in results:
        for schedule in SCHEDULES:
            table.add_row(
                "{} x {}".format(*result["batch"]),
                schedule,
                f"{result['step_s'][schedule]:.3f} s",
                f"{result['over_optimized'][schedule]:.3f}",
                *(f"{seconds:.3f} s" for seconds in result["step_s_spread"][schedule]),
            )
    Console().print(table)
    return {"results": results}


if __name__ == "__main__":
    typer.run(main)
