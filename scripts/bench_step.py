"""Step time of an offloaded model against the same model in memory, in one interleaved run.

    python scripts/bench_step.py                       # Llama 151M, batch 2 x 256, float32, all records on the SSD
    python scripts/bench_step.py --device cuda --hidden 4096 --layers 8 --bf16

Both sides run the same steps in turns (A A A A B B B B A A A A ...; a turn's first step is not timed, so that each
timed one has, as in a run, a step before it), with the same activation recomputation and the same AdamW; medians are
quoted. Beside them stands the floor: bytes moved over the bandwidth that the I/O engine reaches alone on the same
files, and FLOPs over the throughput of this model's own matrix shapes, both measured in the same run.
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
    NormsOption,
    OutputOption,
    Shape,
    StoreOption,
    TurnsOption,
    folder_in,
    in_memory_step,
    offloaded_step,
    table_of,
    timed,
    turn,
    write_figures,
)
from io_alone import alone_bytes_per_s, moments_of
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from hf_lohan.config import OffloadConfig, format_bytes
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface import offload_model


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
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, shape.vocabulary, (shape.batch_size, shape.sequence_length), generator=generator)
    batch = {"input_ids": ids.to(device), "labels": ids.to(device)}
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
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(num_turns):
            for name, step in sides.items():
                times[name].append(turn(step, engine.settle, device=device))
        num_steps = num_turns * (1 + STEPS_PER_TURN)
        read_bytes = (io.read_bytes - before[0]) / num_steps
        write_bytes = (io.write_bytes - before[1]) / num_steps
        floor |= io_floor(engine, read_bytes, write_bytes)
        medians = {name: statistics.median(values) for name, values in times.items()}
        return {
            "max_grad_norm": max_grad_norm,
            "num_parameters": engine.layout.num_parameters,
            "step_s": medians,
            "step_s_all": times,
            "ratio": medians["offloaded"] / medians["in_memory"],
            "ratio_of_pairs": statistics.median(
                b / a for a, b in zip(times["in_memory"], times["offloaded"], strict=True)
            ),
            "read_bytes_per_step": read_bytes,
            "write_bytes_per_step": write_bytes,
            "store_bytes": engine.tiers.store_bytes,
            "cpu_pool_bytes": engine.layout.plan.cpu_pool_bytes,
            "gpu_pool_bytes": engine.layout.plan.gpu_pool_bytes,
            **floor,
            "hardware": engine.device.describe(),
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
    schedule: str = "optimized",
    activations: Annotated[str, typer.Option(help="recompute is what the model in memory does")] = "recompute",
    max_grad_norm: NormsOption = None,
    num_turns: TurnsOption = 3,
    store: StoreOption = None,
    output: OutputOption = None,
) -> None:
    """Measure, print a table, and write JSON."""
    shape = Shape(hidden, layers, intermediate, vocabulary, batch_size, sequence_length, bf16)
    settings = {
        "cpu_memory": cpu_memory,
        "gpu_memory": gpu_memory,
        "schedule": schedule,
        "activations": activations,
    }
    with folder_in(store) as folder:
        config = OffloadConfig.load({**settings, "ssd": str(folder)})
        results = [
            measure(shape, config, folder, device=device, max_grad_norm=norm, num_turns=num_turns)
            for norm in (max_grad_norm or [0.0, 1.0])
        ]
    show(results)
    write_figures(output, {"shape": asdict(shape), "results": results})


if __name__ == "__main__":
    typer.run(main)
