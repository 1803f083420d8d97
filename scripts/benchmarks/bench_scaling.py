"""How a step's cost grows with its work: with parameters where bytes rule, with tokens where compute rules.

    python scripts/benchmarks/bench_scaling.py

Layers are added at a batch of 1 x 32, tokens at 8 layers; then the store is striped over one and over two folders (of
two drives, if `--second-store` names the other; on one, it should change nothing). Each point is an engine of its own;
all points of a row take turns of three steps, medians are quoted, and a straight line is fitted to each row.
"""

from __future__ import annotations

import shutil
import statistics
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from benchmarking import STEPS_PER_TURN, Options, Shape, benchmark, folder_in, offloaded_step, table_of, turn
from rich.console import Console

from hf_lohan.config import OffloadConfig
from hf_lohan.huggingface import offload_model

Row = dict[str, Any]


def measure_row(
    shapes: list[Shape], folders: list[list[Path]], settings: dict[str, Any], *, device: str, num_turns: int
) -> list[Row]:
    """One point for each shape, its store on its folders."""
    with ExitStack() as stack:
        engines, steps = [], []
        for shape, paths in zip(shapes, folders, strict=True):
            config = OffloadConfig.load({**settings, "ssd": [str(path) for path in paths]})
            engine = offload_model(
                shape.model(), config, torch_device=device, default_ssd_path=paths[0], hold_gradients=False
            )
            stack.callback(engine.close)
            engines.append(engine)
            steps.append(offloaded_step(engine, shape.batch(device), 0.0))
            turn(steps[-1], engine.settle, device=device)
        times: list[list[float]] = [[] for _ in shapes]
        moved = [engine.tiers.io.read_bytes + engine.tiers.io.write_bytes for engine in engines]
        for _ in range(num_turns):
            for index, (engine, step) in enumerate(zip(engines, steps, strict=True)):
                times[index].append(turn(step, engine.settle, device=device))
        num_steps = num_turns * (1 + STEPS_PER_TURN)
        return [
            {
                "shape": asdict(shape),
                "num_paths": len(paths),
                "num_parameters": engine.layout.num_parameters,
                "num_tokens": shape.batch_size * shape.sequence_length,
                "step_s": statistics.median(of_point),
                "step_s_all": of_point,
                "moved_bytes_per_step": (engine.tiers.io.read_bytes + engine.tiers.io.write_bytes - before) / num_steps,
            }
            for shape, paths, engine, of_point, before in zip(shapes, folders, engines, times, moved, strict=True)
        ]


def fit(row: list[Row], amount: str) -> dict[str, float]:
    """A straight line through the points, and how much of their spread it explains."""
    amounts = np.array([point[amount] for point in row], dtype=np.float64)
    step_s = np.array([point["step_s"] for point in row])
    slope, constant = np.polyfit(amounts, step_s, 1)
    rest = step_s - (slope * amounts + constant)
    return {
        "s_per_unit": float(slope),
        "constant_s": float(constant),
        "r_squared": float(1 - rest.var() / step_s.var()),
    }


def show(result: dict[str, Any]) -> None:
    table = table_of(
        "seconds a step (medians, interleaved)",
        "parameters",
        "tokens",
        "paths",
        "a step",
        "moved, GB",
        "GB/s",
    )
    for name in ("by_parameters", "by_tokens", "by_paths"):
        for point in result[name]:
            table.add_row(
                f"{point['num_parameters'] / 1e6:.0f} M",
                str(point["num_tokens"]),
                str(point["num_paths"]),
                f"{point['step_s']:.3f} s",
                f"{point['moved_bytes_per_step'] / 1e9:.2f}",
                f"{point['moved_bytes_per_step'] / point['step_s'] / 1e9:.2f}",
            )
        table.add_section()
    Console().print(table)
    for name in ("by_parameters", "by_tokens"):
        Console().print(f"{name}: R² of a straight line {result[f'{name}_fit']['r_squared']:.4f}")


@benchmark("scaling", batch_size=1, sequence_length=32)
def main(
    options: Options,
    *,
    second_store: Annotated[Path | None, typer.Option(help="folder on another drive; default: as --store")] = None,
    layers_step: Annotated[int, typer.Option(help="layers between two points")] = 4,
    num_points: int = 4,
) -> dict[str, Any]:
    base, settings = options.shape, {**options.budgets, "activations": "recompute"}

    def row(name: str, shapes: list[Shape], num_paths: list[int]) -> list[Row]:
        places = [[folder / f"{name}-{index}" for folder in folders[:count]] for index, count in enumerate(num_paths)]
        points = measure_row(shapes, places, settings, device=options.device, num_turns=options.num_turns)
        for place in places:
            for folder in place:
                shutil.rmtree(folder, ignore_errors=True)
        return points

    counts = range(1, num_points + 1)
    with ExitStack() as stack:
        folders = [stack.enter_context(folder_in(path)) for path in (options.store, second_store or options.store)]
        by_parameters = [replace(base, layers=layers_step * count) for count in counts]
        by_tokens = [replace(base, batch_size=1 + count, sequence_length=256) for count in counts]
        result: dict[str, Any] = {
            "by_parameters": row("parameters", by_parameters, [1] * num_points),
            "by_tokens": row("tokens", by_tokens, [1] * num_points),
            "by_paths": row("paths", [base, base], [1, 2]),
        }
    result["by_parameters_fit"] = fit(result["by_parameters"], "num_parameters")
    result["by_tokens_fit"] = fit(result["by_tokens"], "num_tokens")
    show(result)
    return result


if __name__ == "__main__":
    typer.run(main)
