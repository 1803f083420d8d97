"""Compares predicted and measured step times, also in a sweep over the swapped bytes.

    python scripts/benchmarks/bench_planner.py  # three batches: bound by the SSD, in between, bound by compute
    python scripts/benchmarks/bench_planner.py --device cuda --hidden 4096 --layers 8 --bf16

For each batch an engine runs with `activations: auto`. It measures unknown hardware, plans at its first forward, and
corrects the plan after its fourth step. Then the same engine follows the chosen plan and other plans, from recomputing
everything to swapping everything, in turns (A B C A B C ...). Medians are compared with both predictions.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from benchmarking import BatchesOption, Options, Shape, benchmark, folder_in, offloaded_step, spread, table_of, turn
from rich.console import Console

from hf_lohan.config import OffloadConfig
from hf_lohan.costs import OffloadPlan, plan_offload, sweep_swapped_bytes
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.attachment import offload_model
from hf_lohan.huggingface.offloaded_model import run_plan_of
from hf_lohan.wording import format_bytes

STEPS_UNTIL_CORRECTED = 5
BATCHES = ["1x32", "1x256", "4x256"]


@dataclass(frozen=True)
class Contender:
    """A plan with a name."""

    name: str
    plan: OffloadPlan

    @property
    def swapped_bytes(self) -> int:
        return int(self.plan.prediction.swapped_bytes)


def contenders_of(engine: OffloadEngine, num_points: int) -> list[Contender]:
    """Return the planner's choice and the forced plans."""
    run = run_plan_of(engine)
    assert run is not None and run.now is not None
    profile, hardware, setup = run.now.profile, run.now.hardware, replace(run.now.setup, activations="auto")
    forced = sweep_swapped_bytes(profile, hardware, setup, num_points)
    chosen = plan_offload(profile, hardware, setup)
    recompute = plan_offload(profile, hardware, replace(setup, activations="recompute"))
    swap = plan_offload(profile, hardware, replace(setup, activations="swap"))
    named = {"planned": chosen, "recompute": recompute, "swap": swap}
    named |= {f"forced {format_bytes(int(plan.prediction.swapped_bytes))}": plan for plan in forced}
    return [Contender(name, plan) for name, plan in named.items()]


def measure_shape(
    shape: Shape, settings: Mapping[str, Any], folder: Path, *, device: str, num_turns: int, num_points: int
) -> dict[str, Any]:
    config = OffloadConfig.load({**settings, "ssd": str(folder), "activations": "auto"})
    engine = offload_model(shape.model(), config, torch_device=device, default_ssd_path=folder)
    run = run_plan_of(engine)
    assert run is not None
    run.begin_run(num_steps=1000)
    step = offloaded_step(engine, shape.batch(device), 1.0)
    try:
        for _ in range(STEPS_UNTIL_CORRECTED):
            step()
        engine.wait_for_updates()
        assert run.first is not None and run.now is not None
        first, corrected = run.first.plan.prediction, run.now.plan.prediction
        contenders = contenders_of(engine, num_points)
        times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        backward: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        for _ in range(num_turns):
            for contender in contenders:
                engine.planned_memory.set_placements(contender.plan.activations)
                times[contender.name].append(turn(step, engine.wait_for_updates, device=device))
                backward[contender.name].append(engine.clock.last_backward_s)
        figures = spread("step_s", times)
        medians = figures["step_s"]
        backward_s = {name: statistics.median(values) for name, values in backward.items()}
        return {
            "batch": [shape.batch_size, shape.sequence_length],
            "first_prediction": first.to_mapping(),
            "corrected_prediction": corrected.to_mapping(),
            "measured_step_s": medians["planned"],
            "first_error": first.step_s / medians["planned"] - 1,
            "corrected_error": corrected.step_s / medians["planned"] - 1,
            "swapped_bytes": {contender.name: contender.swapped_bytes for contender in contenders},
            "predicted_s": {contender.name: contender.plan.prediction.step_s for contender in contenders},
            **figures,
            "backward_s": backward_s,
            "planned_over_best": medians["planned"] / min(medians.values()),
            "backward_swap_over_recompute": backward_s["swap"] / backward_s["recompute"],
        }
    finally:
        engine.close()


def show(results: list[dict[str, Any]]) -> None:
    console = Console()
    table = table_of(
        "predicted and measured seconds a step",
        "batch",
        "bound by",
        "first",
        "corrected",
        "measured",
        "error",
        "corrected",
        "planned / best",
    )
    for result in results:
        table.add_row(
            "{} x {}".format(*result["batch"]),
            result["corrected_prediction"]["bottleneck"],
            f"{result['first_prediction']['step_s']:.3f}",
            f"{result['corrected_prediction']['step_s']:.3f}",
            f"{result['measured_step_s']:.3f}",
            f"{result['first_error']:+.1%}",
            f"{result['corrected_error']:+.1%}",
            f"{result['planned_over_best']:.3f}",
        )
    console.print(table)
    for result in results:
        title = "batch {} x {}: what is swapped, and what that takes".format(*result["batch"])
        sweep = table_of(title, "plan", "swapped", "predicted", "measured", "backward")
        for name in sorted(result["step_s"], key=lambda name: result["swapped_bytes"][name]):
            sweep.add_row(
                name,
                format_bytes(result["swapped_bytes"][name]),
                f"{result['predicted_s'][name]:.3f} s",
                f"{result['step_s'][name]:.3f} s",
                f"{result['backward_s'][name]:.3f} s",
            )
        console.print(sweep)


@benchmark("planner", cpu_memory="1GiB")
def main(
    options: Options,
    *,
    batch: BatchesOption = None,
    num_points: Annotated[int, typer.Option(help="forced amounts to swap")] = 4,
) -> dict[str, Any]:
    results = []
    for shape in options.shapes(batch or BATCHES):
        with folder_in(options.store) as folder:
            results.append(
                measure_shape(
                    shape,
                    {**options.budgets, "_clip": "defer"},
                    folder,
                    device=options.device,
                    num_turns=options.num_turns,
                    num_points=num_points,
                )
            )
    show(results)
    return {"results": results}


if __name__ == "__main__":
    typer.run(main)
