"""Step time of an offloaded model against the same model in memory, in one interleaved run.

    python scripts/benchmarks/bench_step.py  # Llama 151M, batch 2 x 256, float32, all records on the SSD
    python scripts/benchmarks/bench_step.py --device cuda --hidden 4096 --layers 8 --bf16

Both sides run the same steps in turns (A A A A B B B B A A A A ...; a turn's first step is not timed, so that each
timed one has, as in a run, a step before it), with the same activation recomputation and the same AdamW; medians are
quoted. Beside them stands the floor: bytes moved over the bandwidth that the I/O engine reaches alone on the same
files, and FLOPs over the throughput of this model's own matrix shapes, both measured in the same run.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from benchmarking import (
    STEPS_PER_TURN,
    NormsOption,
    Options,
    Shape,
    benchmark,
    folder_in,
    in_memory_step,
    in_turns,
    offloaded_step,
    pairs_ratio,
    spread,
    table_of,
    timed,
    turn,
)
from io_alone import alone_bytes_per_s, moments_of
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from hf_lohan.config import OffloadConfig
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface import offload_model
from hf_lohan.wording import format_bytes


def io_floor(engine: OffloadEngine, read_bytes: float, write_bytes: float) -> dict[str, float]:
    """Seconds that a step's reads and writes take when nothing else runs."""
    num_bytes = read_bytes + write_bytes
    # Where copies in RAM save the step its reads, they save them here.
    where, share = moments_of(engine), min(1.0, write_bytes / max(read_bytes, 1.0))
    alone = [alone_bytes_per_s(engine, where, share, num_bytes=int(num_bytes)) for _ in range(3)]
    rate = statistics.median(alone)
    return {"alone_bytes_per_s": rate, "io_floor_s": num_bytes / rate}


def compute_floor(model: Any, batch: dict[str, torch.Tensor], shape: Shape, device: str) -> dict[str, float]:
    """Seconds that a step's FLOPs take at the throughput of this model's largest matrix product."""
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    model.zero_grad()
    tokens = shape.batch_size * shape.sequence_length
    dtype = next(model.parameters()).dtype
    left = torch.randn(tokens, shape.hidden, dtype=dtype, device=device)
    right = torch.randn(shape.intermediate, shape.hidden, dtype=dtype, device=device)
    flops = 2 * tokens * shape.hidden * shape.intermediate
    per_s = flops / statistics.median(timed(device, lambda: left @ right.T) for _ in range(15))
    total = float(counter.get_total_flops())
    return {"flops_per_step": total, "flops_per_s": per_s, "compute_floor_s": total / per_s}


def measure(
    shape: Shape, config: OffloadConfig, folder: Path, *, device: str, max_grad_norm: float, num_turns: int
) -> dict[str, Any]:
    batch = shape.batch(device)
    reference = shape.model().to(device)
    engine = offload_model(
        shape.model(), config, torch_device=device, default_ssd_path=folder, hold_gradients=max_grad_norm > 0
    )
    try:
        floor = compute_floor(reference, batch, shape, device)
        sides = {
            "in_memory": in_memory_step(reference, batch, max_grad_norm),
            "offloaded": offloaded_step(engine, batch, max_grad_norm),
        }
        for step in sides.values():
            turn(step, engine.settle, device=device)
        io = engine.tiers.io
        before = io.read_bytes, io.write_bytes
        times = in_turns(
            {name: partial(turn, step, engine.settle, device=device) for name, step in sides.items()}, num_turns
        )
        num_steps = num_turns * (1 + STEPS_PER_TURN)
        read_bytes = (io.read_bytes - before[0]) / num_steps
        write_bytes = (io.write_bytes - before[1]) / num_steps
        floor |= io_floor(engine, read_bytes, write_bytes)
        steps_s = spread("step_s", times)
        return {
            "max_grad_norm": max_grad_norm,
            "num_parameters": engine.layout.num_parameters,
            **steps_s,
            "ratio": steps_s["step_s"]["offloaded"] / steps_s["step_s"]["in_memory"],
            "ratio_of_pairs": pairs_ratio(times, "offloaded", "in_memory"),
            "read_bytes_per_step": read_bytes,
            "write_bytes_per_step": write_bytes,
            "store_bytes": engine.tiers.store_bytes,
            "cpu_pool_bytes": engine.layout.plan.cpu_pool_bytes,
            "gpu_pool_bytes": engine.layout.plan.gpu_pool_bytes,
            **floor,
        }
    finally:
        engine.close()


def show(results: list[dict[str, Any]]) -> None:
    table = table_of(
        "step time, offloaded against in memory (medians, interleaved)",
        "clip at",
        "in memory",
        "offloaded",
        "ratio",
        "read",
        "written",
        "I/O floor",
        "compute floor",
    )
    for result in results:
        table.add_row(
            f"{result['max_grad_norm']:g}",
            f"{result['step_s']['in_memory']:.3f} s",
            f"{result['step_s']['offloaded']:.3f} s",
            f"{result['ratio']:.3f}",
            format_bytes(int(result["read_bytes_per_step"])),
            format_bytes(int(result["write_bytes_per_step"])),
            f"{result['io_floor_s']:.3f} s",
            f"{result['compute_floor_s']:.3f} s",
        )
    Console().print(table)


@benchmark("step")
def main(
    options: Options,
    *,
    schedule: str = "optimized",
    activations: Annotated[str, typer.Option(help="recompute is what the model in memory does")] = "recompute",
    max_grad_norm: NormsOption = None,
) -> dict[str, Any]:
    settings = {**options.budgets, "schedule": schedule, "activations": activations}
    with folder_in(options.store) as folder:
        config = OffloadConfig.load({**settings, "ssd": str(folder)})
        results = [
            measure(
                options.shape, config, folder, device=options.device, max_grad_norm=norm, num_turns=options.num_turns
            )
            for norm in (max_grad_norm or [0.0, 1.0])
        ]
    show(results)
    return {"results": results}


if __name__ == "__main__":
    typer.run(main)
