"""Compares the solvers of plans: simulated steps beside a lower bound, and two solvers' steps on a paced device.

    python scripts/benchmarks/bench_migration.py --json solvers.json          # simulated, a minute
    python scripts/benchmarks/bench_migration.py --quick --json solvers.json  # two cases
    python scripts/benchmarks/bench_migration.py --measure --json solvers.json  # also real steps, some minutes

The cases are LoHan's 13B model on 1 to 12 drives, with little RAM, so that activations spill. The bound is a linear
program (`step_bound.py`, needs scipy): no placements of activations have a shorter simulated
step.

Measured steps are those of a small model whose layers compute by waiting (`paced_step.py`), on a slow paced drive to
which activations spill. Two engines with equal weights and batches take turns, one for each solver. Their stores are
compared bit for bit at the end.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from benchmarking import Options, facts_of, offloaded_step, table_of
from paced_device import PacedDevice
from paced_step import Workload, keep_for_planner, measured_hardware, one_drive, own_cache, paced_drive
from rich.console import Console
from step_bound import least_step_s

from hf_lohan.annexes.studies.solvers import choose_solver
from hf_lohan.config import OffloadConfig
from hf_lohan.costs import (
    BlockProfile,
    HardwareProfile,
    ModelProfile,
    OperationProfile,
    SizeClass,
    TrainingSetup,
    plan_offload,
)
from hf_lohan.engine import OffloadEngine
from hf_lohan.hardware import read_hardware
from hf_lohan.huggingface.attachment import offload_model
from hf_lohan.huggingface.offloaded_model import run_plan_of
from hf_lohan.testing.stored_state import Content, content_of

ROOT = Path(__file__).resolve().parents[2]
MACHINE = ROOT / "configs" / "hardware" / "rtx4090_p5510.yaml"
NUM_TURNS, STEPS_PER_TURN, WARM_UP_STEPS = 5, 2, 2
HIDDEN, NUM_LAYERS, VOCABULARY = 5120, 40, 50257
"""LoHan's 13B model."""


def decoder_13b(batch_size: int, sequence_length: int = 1024) -> ModelProfile:
    """Return the profile of a GPT-like decoder in bfloat16."""
    num_tokens = batch_size * sequence_length

    def product(index: int, width: int) -> OperationProfile:
        return OperationProfile(
            name=f"aten.addmm#{index}", flops=2.0 * num_tokens * HIDDEN * width, output_bytes=2 * num_tokens * width
        )

    attention = OperationProfile(
        name="aten._scaled_dot_product_flash_attention#0",
        flops=4.0 * num_tokens * sequence_length * HIDDEN,
        output_bytes=2 * num_tokens * HIDDEN,
    )
    operations = (
        *(product(index, HIDDEN) for index in range(3)),
        attention,
        product(3, HIDDEN),
        product(4, 4 * HIDDEN),
    )
    num_params = 12 * HIDDEN**2 + 13 * HIDDEN
    flops = sum(operation.flops for operation in operations) + 8.0 * num_tokens * HIDDEN**2
    saved_bytes, input_bytes = 34 * num_tokens * HIDDEN, 2 * num_tokens * HIDDEN

    def block(name: str, size_class: SizeClass, num_params: int, flops: float, **more: Any) -> BlockProfile:
        return BlockProfile(
            name=name,
            size_class=size_class,
            num_params=num_params,
            num_trainable_params=num_params,
            param_bytes=2 * num_params,
            flops=flops,
            **more,
        )

    layers = [
        block(
            f"layers.{index}",
            SizeClass.LAYER,
            num_params,
            flops,
            input_bytes=input_bytes,
            operations=operations,
            saved_bytes=saved_bytes,
        )
        for index in range(NUM_LAYERS)
    ]
    embeddings = block("embed", SizeClass.OUTER, (VOCABULARY + sequence_length) * HIDDEN, 0.0)
    head = block("head", SizeClass.OUTER, 0, 2.0 * num_tokens * HIDDEN * VOCABULARY)
    return ModelProfile(
        blocks=(embeddings, *layers, head),
        batch_size=batch_size,
        sequence_length=sequence_length,
        param_itemsize=2,
    )


def simulated_row(batch_size: int, num_drives: int, ram_gb: int, clip: str) -> dict[str, Any]:
    """Return the simulated steps of one case."""
    hardware = read_hardware(str(MACHINE))
    hardware = replace(hardware, ssd=hardware.ssd * num_drives)
    setup = TrainingSetup(
        gpu_memory_bytes=20 * 10**9,
        cpu_memory_bytes=ram_gb * 10**9,
        gpu_fixed_bytes=2 * 10**9,
        clip=clip,  # type: ignore[arg-type]
        hands_over=True,
    )
    model = decoder_13b(batch_size)
    usual = plan_offload(model, hardware, setup)
    plan = choose_solver(model, hardware, setup, usual, compares=True)
    found = {solved.name: solved.simulated_step_s for solved in plan.solvers}
    return {
        "case": f"13B, {batch_size} x 1024, {num_drives} drives, {ram_gb} GB RAM, clip {usual.clip}",
        "bound_s": least_step_s(model, hardware, setup, usual),
        "algorithm_1_s": found["algorithm_1"],
        "spread_s": found.get("algorithm_1_spread"),
        "migration_s": found.get("migration"),
    }


# Measured steps.


@dataclass(frozen=True)
class Case:
    """A paced model on a slow drive, with too little RAM for its activations."""

    flops_per_s: float = 6e9
    link_bytes_per_s: float = 125e6
    drive_bytes_per_s: float = 31e6
    batch_size: int = 16
    sequence_length: int = 64

    @property
    def work(self) -> Workload:
        options = Options(
            hidden=128,
            layers=16,
            intermediate=512,
            vocabulary=256,
            batch_size=self.batch_size,
            sequence_length=self.sequence_length,
        )
        settings = {
            "cpu_memory": "12MiB",
            "gpu_memory": "6MiB",
            "_resident_records": "none",
            "commit_every": 1,
            "activations": "auto",
        }
        return Workload(options, settings, 1, self.link_bytes_per_s, STEPS_PER_TURN, self.drive_bytes_per_s)


@contextmanager
def engine_with(case: Case, solver: str, folder: Path, hardware: HardwareProfile) -> Iterator[OffloadEngine]:
    """Yield an engine that plans with a solver."""
    work = case.work
    config = OffloadConfig.load({**work.settings, "_solver": solver, "ssd": str(folder / "store")})
    device = PacedDevice(link_bytes_per_s=case.link_bytes_per_s, flops_per_s=case.flops_per_s)
    model = work.model(device)
    keep_for_planner(hardware, model, config, device, work.options, folder)
    with paced_drive(case.drive_bytes_per_s):
        engine = offload_model(
            model,
            config,
            torch_device="cpu",
            default_ssd_path=folder,
            hold_gradients=False,
            sums_gradients=False,
            device=device,
        )
    try:
        yield engine
    finally:
        engine.close()
        gc.collect()


def measured(case: Case, names: tuple[str, str]) -> dict[str, Any]:
    """Return the steps of two solvers in turns, and whether their stores are equal."""
    batch = case.work.options.shape.batch("cpu")
    times: dict[str, list[float]] = {solver: [] for solver in names}
    with tempfile.TemporaryDirectory() as name, own_cache(Path(name)):
        folder = Path(name)
        hardware = one_drive(measured_hardware(case.work, folder), case.drive_bytes_per_s)
        with (
            engine_with(case, names[0], folder / "first", hardware) as first,
            engine_with(case, names[1], folder / "second", hardware) as second,
        ):
            engines = dict(zip(names, (first, second), strict=True))
            steps = {solver: offloaded_step(engine, batch, 0.0) for solver, engine in engines.items()}
            for solver, engine in engines.items():
                run = run_plan_of(engine)
                assert run is not None
                run.begin_run(num_steps=1000)
                for _ in range(WARM_UP_STEPS):
                    steps[solver]()
                engine.wait_for_updates()
            for _, solver in itertools.product(range(NUM_TURNS), names):
                run = run_plan_of(engines[solver])
                assert run is not None and run.first is not None
                engines[solver].planned_memory.follow_plan(run.first)  # a run corrects its plan by its steps
                steps[solver]()  # no updates of an earlier step run during it
                began_s = time.perf_counter()
                for _ in range(STEPS_PER_TURN):
                    steps[solver]()
                times[solver].append((time.perf_counter() - began_s) / STEPS_PER_TURN)
                engines[solver].wait_for_updates()
            contents: list[Content] = [content_of(engine.tiers.store) for engine in engines.values()]
            plans = {}
            for solver, engine in engines.items():
                run = run_plan_of(engine)
                assert run is not None and run.first is not None
                plan = run.first.plan
                plans[solver] = {
                    "solver": plan.solver,
                    "fetch_ahead": plan.fetch_ahead,
                    "layers_leaving": plan.layers_leaving,
                    "simulated_step_s": plan.simulated_step_s,
                    "swapped_bytes": plan.prediction.swapped_bytes,
                    "spilled_bytes": plan.prediction.spilled_bytes,
                }
    medians = {solver: statistics.median(of) for solver, of in times.items()}
    return {
        "plans": plans,
        "step_s": medians,
        "step_s_all": times,
        "ratio": medians[names[1]] / medians[names[0]],
        "bits_are_equal": contents[0] == contents[1],
    }


def main(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="two cases")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="also measure steps of a paced model")] = False,
    json_: Annotated[Path | None, typer.Option("--json", help="file for the figures")] = None,
) -> None:
    torch.manual_seed(0)
    cases = [(64, 3, 120, "none"), (32, 6, 60, "none")]
    if not quick:
        cases += [(batch, drives, 120, "none") for batch in (32, 64) for drives in (1, 6, 12)]
        cases += [(64, 3, 120, "defer"), (64, 6, 60, "none"), (64, 3, 700, "none")]
    rows = [simulated_row(*case) for case in cases]
    table = table_of("simulated seconds of a step", "case", "bound", "algorithm_1", "spread", "migration")
    for row in rows:
        figures = (row[name] for name in ("bound_s", "algorithm_1_s", "spread_s", "migration_s"))
        table.add_row(row["case"], *("-" if value is None else f"{value:.2f}" for value in figures))
    console = Console(width=None if Console().is_terminal else 160)
    console.print(table)
    result: dict[str, Any] = {"rows": rows}
    if measure:
        result["measured"] = found = measured(Case(), ("algorithm_1", "migration"))
        usual_s, migration_s = found["step_s"].values()
        console.print(
            f"measured: algorithm_1 {usual_s:.3f} s, migration {migration_s:.3f} s "
            f"({100 * (1 - found['ratio']):.1f}% shorter), bits equal: {found['bits_are_equal']}"
        )
    if json_ is not None:
        json_.write_text(json.dumps({**facts_of("cpu"), **result}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
