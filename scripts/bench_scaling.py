"""How a step's cost grows with its work: with parameters where bytes rule, with tokens where compute rules.

    python scripts/bench_scaling.py --plot docs/benchmarks/scaling.png

Layers are added at a batch of 1 x 32, tokens at 8 layers; then the store is striped over one and over two folders (of
two drives, if `--store` names two; of one, the second should change nothing). Each point is an engine of its own; all
points of a row take turns of three steps, medians are quoted, and a straight line is fitted to each row.
"""

from __future__ import annotations

import shutil
import statistics
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from benchmarking import (
    STEPS_PER_TURN,
    DeviceOption,
    OutputOption,
    Shape,
    folder_in,
    offloaded_step,
    table_of,
    turn,
    write_figures,
)
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
            generator = torch.Generator().manual_seed(1)
            size = (shape.batch_size, shape.sequence_length)
            ids = torch.randint(0, shape.vocabulary, size, generator=generator).to(device)
            engines.append(engine)
            steps.append(offloaded_step(engine, {"input_ids": ids, "labels": ids}, 0.0))
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


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    rows = (("by_parameters", "num_parameters", "million parameters", 1e6), ("by_tokens", "num_tokens", "tokens", 1.0))
    for axis, (name, amount, label, unit) in zip(axes, rows, strict=True):
        row, line = result[name], result[f"{name}_fit"]
        amounts = np.array([point[amount] for point in row])
        spread = [[p["step_s"] - min(p["step_s_all"]), max(p["step_s_all"]) - p["step_s"]] for p in row]
        axis.errorbar(
            amounts / unit, [p["step_s"] for p in row], yerr=np.array(spread).T, fmt="o", label="median, spread"
        )
        axis.plot(
            amounts / unit,
            line["s_per_unit"] * amounts + line["constant_s"],
            label=f"line, R² = {line['r_squared']:.3f}",
        )
        axis.set(xlabel=label, ylabel="seconds a step", ylim=(0, None), xlim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend()
    axes[0].set_title("batch 1 x 32: bound by bytes")
    axes[1].set_title("8 layers: bound by compute")
    figure.savefig(path, dpi=150)


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


def main(
    device: DeviceOption = "cpu",
    hidden: int = 1024,
    intermediate: int = 4096,
    vocabulary: int = 8192,
    bf16: bool = False,
    cpu_memory: str = "512MiB",
    gpu_memory: str = "512MiB",
    num_turns: Annotated[int, typer.Option(help=f"turns of {STEPS_PER_TURN} steps for each point")] = 3,
    store: Annotated[list[Path] | None, typer.Option(help="folders on the drives; default: temporary ones")] = None,
    output: OutputOption = None,
    plot_to: Annotated[Path | None, typer.Option("--plot", help="write a picture")] = None,
) -> None:
    """Measure, print a table, write JSON and a picture."""
    base = Shape(hidden, 8, intermediate, vocabulary, 1, 32, bf16)
    settings = {"cpu_memory": cpu_memory, "gpu_memory": gpu_memory, "activations": "recompute"}

    def row(name: str, shapes: list[Shape], num_paths: list[int]) -> list[Row]:
        places = [[folder / f"{name}-{index}" for folder in folders[:count]] for index, count in enumerate(num_paths)]
        points = measure_row(shapes, places, settings, device=device, num_turns=num_turns)
        for place in places:
            for folder in place:
                shutil.rmtree(folder, ignore_errors=True)
        return points

    with ExitStack() as stack:
        folders = [stack.enter_context(folder_in(path)) for path in (store or [Path(), Path()])]
        by_parameters = [replace(base, layers=layers) for layers in (4, 8, 12, 16)]
        by_tokens = [replace(base, batch_size=batch_size, sequence_length=256) for batch_size in (2, 3, 4, 5)]
        result: dict[str, Any] = {
            "by_parameters": row("parameters", by_parameters, [1] * 4),
            "by_tokens": row("tokens", by_tokens, [1] * 4),
            "by_paths": row("paths", [base, base], [1, 2]),
        }
    result["by_parameters_fit"] = fit(result["by_parameters"], "num_parameters")
    result["by_tokens_fit"] = fit(result["by_tokens"], "num_tokens")
    show(result)
    write_figures(output, result)
    if plot_to is not None:
        plot(result, plot_to)


if __name__ == "__main__":
    typer.run(main)
