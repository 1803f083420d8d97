"""Simulates a GPU without a GPU, and compares a step with the longest of compute, drive and the CPU's optimizer.

    python scripts/benchmarks/paced_step.py --regime all --store /mnt/nvme  # 537M parameters, minutes a turn
    python scripts/benchmarks/paced_step.py --regime bytes --max-grad-norm 1 --clip defer --clip speculate
    python scripts/benchmarks/paced_step.py --regime balanced --parked auto --parked 0  # without updates in forward
    python scripts/benchmarks/paced_step.py --accumulation 4 --vertical --set prefetch_blocks=3
    python scripts/benchmarks/paced_step.py --drive 400e6 --hidden 1024 --intermediate 4096  # also a paced drive

The layers compute by waiting (`paced_layers.py`), on a device whose copies take the time of a link
(`paced_device`), so the cores are as free as beside a GPU. Engine, drive, optimizer, journal and Trainer are real.
`--set commit_every=1` commits every step.

A first short run does not wait. The I/O engine alone then moves the bytes of its last steps, which gives the drive's
time. A regime makes compute twice as long (`compute`), a quarter (`bytes`) or equally long (`balanced`); or give
`--compute-s`. Each turn is a run of each side (A B C A B C ...). Its first steps, in which the plan is corrected, are
not timed. After its last step the I/O engine alone moves a step's bytes on the run's files.

Unlike on a GPU, a core moves the bytes of each copy (`host_copy_s`) and computes the norm of each gradient.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import resource
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from benchmarking import NormsOption, Options, benchmark, folder_in, parsed_settings, table_of
from io_alone import alone_bytes_per_s, moments_of
from paced_backend import PacedBackend
from paced_device import PacedDevice
from paced_layers import pace_layers
from rich.console import Console
from torch.overrides import TorchFunctionMode
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

import hf_lohan
import hf_lohan.engine.tiers
from hf_lohan.annexes.studies.simulation.simulated_step import simulate_step
from hf_lohan.config import OffloadConfig
from hf_lohan.costs import HardwareProfile, forecast
from hf_lohan.engine import OffloadEngine
from hf_lohan.files import IoEngine
from hf_lohan.hardware import cached_hardware, measure_hardware
from hf_lohan.huggingface.attachment import offload_model
from hf_lohan.huggingface.offloaded_model import run_plan_of
from hf_lohan.planning import RunPlan, trace_blocks
from hf_lohan.planning.layout import resolved_here
from hf_lohan.timeline import Timeline
from hf_lohan.wording import format_bytes

COMPUTE_OVER_DRIVE = {"compute": 2.0, "bytes": 0.25, "balanced": 1.0}
WARM_UP_STEPS = 9
"""The plan is corrected after the fourth step, and another plan may be on trial until the eighth. The ninth step runs
during the eighth's updates."""
FIRST_RUN_STEPS = 4
NO_WAIT_FLOPS_PER_S = 1e18
HEAD_SCALE = 1e-2
"""Scales the head and the norm before it, so that the gradients' norm stays below 1."""
MAIN_THREAD = "MainThread"
IMPLICIT_WAITS = {"item", "tolist", "cpu", "__float__", "__bool__", "__int__", "__index__"}
"""Methods of a tensor that wait for its device."""


@dataclass(frozen=True)
class Side:
    """One of the measured variants."""

    regime: str
    max_grad_norm: float
    clip: str
    parked: str

    @property
    def parked_share(self) -> str | float:
        return self.parked if self.parked == "auto" else float(self.parked)

    @property
    def name(self) -> str:
        clipping = f"{self.max_grad_norm:g} {self.clip}" if self.max_grad_norm else "none"
        parking = "" if self.parked == "auto" else f", parked {self.parked}"
        return f"{self.regime}, clip {clipping}{parking}"


@dataclass(frozen=True)
class Workload:
    """Settings that all sides share."""

    options: Options
    settings: Mapping[str, Any]
    accumulation: int
    link_bytes_per_s: float
    steps_per_turn: int
    drive_bytes_per_s: float | None = None
    """Of a paced drive, whose reads and writes share this rate. None is the real drive."""

    @property
    def rows(self) -> list[dict[str, torch.Tensor]]:
        """Return sequences, which are also the labels."""
        batch = self.options.shape.batches(64, "cpu")
        return [{"input_ids": row, "labels": row} for one in batch for row in one["input_ids"]]

    def model(self, device: PacedDevice) -> Any:
        model = self.options.shape.model(head_dim=min(64, self.options.hidden))
        getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
        with torch.no_grad():
            model.lm_head.weight.mul_(HEAD_SCALE)
            model.model.norm.weight.mul_(HEAD_SCALE)
        pace_layers(model.model.layers, device)
        return model


class _ImplicitWaits(TorchFunctionMode):
    """Counts calls of this thread that may wait for the device. Calls on host tensors count too."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += getattr(func, "__name__", "") in IMPLICIT_WAITS
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Reading:
    """All counters at the end of a step."""

    at_s: float
    cpu_s: float
    amounts: dict[str, float]


class Meter(TrainerCallback):
    """Reads the counters at the end of each step. A step lasts from the end of the previous step to its own end."""

    def __init__(self, engine: OffloadEngine, device: PacedDevice) -> None:
        self._engine = engine
        self._device = device
        self.readings: list[_Reading] = []
        self._implicit = _ImplicitWaits()
        self.implicit_waits = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:  # only in one untimed step, because it costs time
            self._implicit.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self._implicit.__exit__(None, None, None)
            self.implicit_waits = self._implicit.number
        self.readings.append(self._read())

    def _read(self) -> _Reading:
        device, engine = self._device, self._engine
        device.note_reached()
        totals = engine.timeline.totals()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return _Reading(
            at_s=time.perf_counter(),
            cpu_s=usage.ru_utime + usage.ru_stime,
            amounts={
                "compute_s": device.paced_s,
                "flops": device.paced_flops,
                "optimizer_s": totals["cpu optimizer"].busy_s,
                "host_copy_s": device.host_copy_s,
                "read_bytes": engine.tiers.io.read_bytes,
                "write_bytes": engine.tiers.io.write_bytes,
                "num_commits": engine.commits.num_commits,
                "num_host_waits": device.num_waits[MAIN_THREAD],
                "host_wait_s": device.wait_s[MAIN_THREAD],
                "num_other_waits": device.num_waits.total() - device.num_waits[MAIN_THREAD],
            }
            | {f"{lane}: {name}": s for lane, of in totals.items() for name, s in of.task_s.items()},
        )

    def per_step(self, num_steps: int) -> dict[str, Any]:
        """Return the times of the last `num_steps` steps, and the means of the other counters."""
        first, last = self.readings[-1 - num_steps], self.readings[-1]
        amounts = {name: (last.amounts[name] - first.amounts.get(name, 0.0)) / num_steps for name in last.amounts}
        times = [b.at_s - a.at_s for a, b in itertools.pairwise(self.readings[-1 - num_steps :])]
        tasks = {name: round(seconds, 4) for name, seconds in amounts.items() if ": " in name}
        return {
            "step_s": statistics.median(times),
            "steps_s": times,
            "cpu_s": (last.cpu_s - first.cpu_s) / num_steps,
            **{name: amount for name, amount in amounts.items() if ": " not in name},
            "task_s": tasks,
        }


@contextmanager
def running(
    work: Workload, side: Side, folder: Path, *, flops_per_s: float, num_steps: int, hardware: HardwareProfile | None
) -> Iterator[tuple[hf_lohan.Trainer, OffloadEngine, Meter]]:
    """Yield a run after its steps. With `hardware` the run plans for this hardware, at the device's rate of FLOPs."""
    config = OffloadConfig.load(
        {**work.settings, "_clip": side.clip, "_parked": side.parked_share, "ssd": str(folder / "store")}
    )
    timeline = Timeline(is_tracing=config.trace)
    device = PacedDevice(link_bytes_per_s=work.link_bytes_per_s, flops_per_s=flops_per_s, timeline=timeline)
    model = work.model(device)
    options = work.options
    if hardware is not None:
        keep_for_planner(hardware, model, config, device, options, folder)
    is_held = side.max_grad_norm > 0 or (work.accumulation > 1 and not config.vertical_micro_batches)
    with paced_drive(work.drive_bytes_per_s):
        engine = offload_model(
            model,
            config,
            torch_device="cpu",
            default_ssd_path=folder,
            hold_gradients=is_held,
            sums_gradients=work.accumulation > 1,
            device=device,
        )
    try:
        meter = Meter(engine, device)
        args = TrainingArguments(
            output_dir=str(folder),
            max_steps=num_steps,
            per_device_train_batch_size=options.batch_size,
            gradient_accumulation_steps=work.accumulation,
            max_grad_norm=side.max_grad_norm,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = hf_lohan.Trainer(model, args, train_dataset=work.rows, offload=config, callbacks=[meter])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        engine.wait_for_updates()
        yield trainer, engine, meter
    finally:
        engine.close()
        del model, engine
        gc.collect()


@contextmanager
def paced_drive(bytes_per_s: float | None) -> Iterator[None]:
    """Give engines that are built here a drive of this rate. None leaves them the real one."""
    if bytes_per_s is None:
        yield
        return
    backend = PacedBackend(bytes_per_s, paces_writes=True)
    paced = lambda *args, **kwargs: IoEngine(*args, **{**kwargs, "backend": backend})  # noqa: E731
    with patch.object(hf_lohan.engine.tiers, "IoEngine", paced):
        yield


def simulated(run: RunPlan, drive_bytes_per_s: float, flops_per_s: float) -> dict[str, Any]:
    """Return the step of the plan in use, simulated and as the sum of lanes, with the rates that were measured before
    the run, and the rate of the drive alone. The run's own corrections would fit the sum of lanes to its steps."""
    assert run.first is not None and run.now is not None
    now, hardware = run.now, run.first.hardware
    if hardware.device.flops_per_s != flops_per_s:
        raise RuntimeError(
            "the run did not find the hardware that `keep_for_planner` kept for it, and measured its own"
        )
    if drive_bytes_per_s:
        hardware = one_drive(hardware, drive_bytes_per_s)
    step = simulate_step(now.profile, hardware, now.setup, now.plan)
    assert step is not None
    return {
        "simulated_s": step.step_s,
        "simulated_busy_s": dict(step.busy_s),
        "simulated_waits_s": dict(step.waits_s),
        "by_lanes_s": forecast(now.profile, hardware, now.setup, now.plan).step_s,
    }


def one_drive(hardware: HardwareProfile, bytes_per_s: float) -> HardwareProfile:
    """Return the hardware with one drive whose reads and writes share a rate."""
    drive = replace(hardware.ssd[0], read_bytes_per_s=bytes_per_s, write_bytes_per_s=bytes_per_s)
    together = ("ssd_together_read_bytes_per_s", "ssd_together_write_bytes_per_s", "ssd_mixed_bytes_per_s")
    return replace(hardware, ssd=(drive,), **dict.fromkeys(together))


def keep_for_planner(
    hardware: HardwareProfile, model: Any, config: OffloadConfig, device: PacedDevice, options: Options, folder: Path
) -> None:
    """Cache the hardware profile for the run, which cannot measure products that only wait."""
    traced = trace_blocks(model, batch_size=options.batch_size, sequence_length=options.sequence_length)
    known = replace(hardware, device=replace(hardware.device, flops_per_s=device.flops_per_s))
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    cached_hardware(
        resolved_here(config, device, folder),
        device,
        matrix_shapes=traced.matrix_shapes,
        attention=traced.attention,
        dtype=dtype,
        measure_again=True,
        measure=lambda *_, **__: known,
    )


def measured_hardware(work: Workload, folder: Path) -> HardwareProfile:
    """Measure drive, link and cores. The rate of FLOPs is set for each run. Elementwise operations are not paced."""
    device = PacedDevice(link_bytes_per_s=work.link_bytes_per_s, flops_per_s=NO_WAIT_FLOPS_PER_S)
    options = work.options
    config = resolved_here(OffloadConfig.load({**work.settings, "ssd": str(folder / "store")}), device, folder)
    with torch.device("meta"):
        traced = trace_blocks(
            options.shape.model(head_dim=min(64, options.hidden)),
            batch_size=options.batch_size,
            sequence_length=options.sequence_length,
        )
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    profile = measure_hardware(config, device, matrix_shapes=traced.matrix_shapes, dtype=dtype)
    profile = replace(profile, device=replace(profile.device, memory_bytes_per_s=None))
    return one_drive(profile, work.drive_bytes_per_s) if work.drive_bytes_per_s is not None else profile


def drive_alone_s(engine: OffloadEngine, figures: Mapping[str, float]) -> float:
    """Return the seconds that the I/O engine alone needs for a step's bytes."""
    num_bytes = int(figures["read_bytes"] + figures["write_bytes"])
    if not num_bytes:
        return 0.0
    share = min(1.0, figures["write_bytes"] / max(figures["read_bytes"], 1.0))
    return num_bytes / alone_bytes_per_s(engine, moments_of(engine), share, num_bytes=num_bytes)


def take_turn(
    work: Workload, side: Side, folder: Path, *, flops_per_s: float, hardware: HardwareProfile
) -> dict[str, Any]:
    num_steps = WARM_UP_STEPS + work.steps_per_turn
    with running(work, side, folder, flops_per_s=flops_per_s, num_steps=num_steps, hardware=hardware) as run:
        trainer, engine, meter = run
        figures = meter.per_step(work.steps_per_turn)
        drive_s = drive_alone_s(engine, figures)
        lanes = {"compute": figures["compute_s"], "drive": drive_s, "optimizer": figures["optimizer_s"]}
        longest = max(lanes, key=lambda lane: lanes[lane])
        plan = run_plan_of(engine)
        assert plan is not None
        moved_bytes = figures["read_bytes"] + figures["write_bytes"]
        step = simulated(plan, moved_bytes / drive_s if drive_s else 0.0, flops_per_s)
        summary = json.loads((folder / "lohan" / "summary.json").read_text())
        norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
        predicted_s = summary["corrected_step_s"] or summary["predicted_step_s"]
        return {
            **figures,
            "lanes_s": lanes,
            "longest_lane": longest,
            "over_longest_lane": figures["step_s"] / lanes[longest],
            "share_of_drive": drive_s / figures["step_s"],
            "first_predicted_s": summary["predicted_step_s"],
            "predicted_s": predicted_s,
            "measured_over_predicted": figures["step_s"] / predicted_s if predicted_s else None,
            **step,
            "measured_over_simulated": figures["step_s"] / step["simulated_s"],
            "clip_way": plan.plan.clip if plan.plan is not None else None,
            "parked_share": plan.plan.parked_share if plan.plan is not None else None,
            "clip_rate": summary["clip_rate"],
            "num_redone_steps": summary["num_redone_steps"],
            "last_norm": float(norms[-1]) if norms else None,
            "implicit_waits_at_most": meter.implicit_waits,
            "num_parameters": engine.layout.num_parameters,
        }


def first_run(work: Workload, side: Side, folder: Path) -> dict[str, float]:
    """Return the FLOPs of a step, and the seconds that the drive needs for its bytes."""
    with running(work, side, folder, flops_per_s=NO_WAIT_FLOPS_PER_S, num_steps=FIRST_RUN_STEPS, hardware=None) as (
        _,
        engine,
        meter,
    ):
        figures = meter.per_step(2)
        return {"flops": figures["flops"], "drive_s": drive_alone_s(engine, figures)}


def wanted_compute_s(regime: str, drive_s: float) -> float:
    """Return the compute seconds of a step in a regime. Raises BadParameter if a step does not use the drive."""
    if not drive_s:
        raise typer.BadParameter("a step moves nothing from or to the drive: lower --cpu-memory, or give --compute-s")
    return COMPUTE_OVER_DRIVE[regime] * drive_s


def summarize(side: Side, turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over the turns, and the turns."""
    numbers = [name for name, value in turns[0].items() if isinstance(value, int | float)]
    medians = {name: statistics.median(turn[name] for turn in turns) for name in numbers}
    lanes = turns[0]["lanes_s"]
    medians["lanes_s"] = {lane: statistics.median(turn["lanes_s"][lane] for turn in turns) for lane in lanes}
    return {
        "side": side.name,
        "regime": side.regime,
        "max_grad_norm": side.max_grad_norm,
        "clip": side.clip,
        "parked": side.parked,
        **medians,
        "clip_ways": [turn["clip_way"] for turn in turns],
        "step_s_spread": [min(turn["step_s"] for turn in turns), max(turn["step_s"] for turn in turns)],
        "turns": turns,
    }


def show(results: list[dict[str, Any]]) -> None:
    table = table_of(
        "a paced step over its longest lane (medians of turns)",
        "regime, clip at",
        "a step",
        "compute",
        "drive alone",
        "optimizer",
        "over the longest",
        "of the drive",
        "planned",
        "measured / planned",
        "simulated",
        "measured / simulated",
        "clips by",
        "host waits",
        "others'",
        "cores busy",
    )
    for result in results:
        lanes = result["lanes_s"]
        predicted_s = result.get("predicted_s")
        table.add_row(
            result["side"],
            f"{result['step_s']:.2f} s",
            *(f"{lanes[lane]:.2f} s" for lane in ("compute", "drive", "optimizer")),
            f"{result['over_longest_lane']:.3f}",
            f"{result['share_of_drive']:.0%}",
            f"{predicted_s:.2f} s" if predicted_s else "-",
            f"{result['measured_over_predicted']:.2f}" if predicted_s else "-",
            f"{result['simulated_s']:.2f} s",
            f"{result['measured_over_simulated']:.3f}",
            "/".join(sorted({str(way) for way in result["clip_ways"]})),
            f"{result['num_host_waits']:.0f} ({result['host_wait_s']:.2f} s)",
            f"{result['num_other_waits']:.0f}",
            f"{result['cpu_s']:.2f} s",
        )
    console = Console(width=None if Console().is_terminal else 220)
    console.print(table)
    for result in results:
        moved = format_bytes(int(result["read_bytes"])), format_bytes(int(result["write_bytes"]))
        console.print(
            f"{result['side']}: {moved[0]} read, {moved[1]} written a step, {result['num_commits']:.1f} commits; "
            f"{result['implicit_waits_at_most']:.0f} implicit waits at most; cores copied for "
            f"{result['host_copy_s']:.2f} s; clip rate {result['clip_rate']:.2f}"
        )


def sides_of(regimes: list[str], norms: list[float], clips: list[str], parked: list[str]) -> list[Side]:
    every = [Side(*parts) for parts in itertools.product(regimes, norms, clips, parked)]
    # Without clipping, `clip` has no effect.
    return [side for side in every if side.max_grad_norm or side.clip == clips[0]]


@benchmark(
    "paced_step",
    hidden=2048,
    layers=8,
    intermediate=8192,
    vocabulary=256,
    batch_size=1,
    sequence_length=16,
    cpu_memory="3GiB",
    gpu_memory="2GiB",
    num_turns=5,
)
def main(
    options: Options,
    *,
    regime: Annotated[str, typer.Option(help="compute, bytes, balanced, or all of them")] = "all",
    compute_s: Annotated[float | None, typer.Option(help="seconds of waits a step, instead of a regime's")] = None,
    link_bytes_per_s: Annotated[float, typer.Option(help="of each direction, between host and device")] = 25e9,
    max_grad_norm: NormsOption = None,
    clip: Annotated[list[str] | None, typer.Option(help="auto, defer, speculate; may be given several times")] = None,
    parked: Annotated[
        list[str] | None, typer.Option(help="auto, or the share of updates under the next forward; several times")
    ] = None,
    activations: Annotated[str, typer.Option(help="where they wait for backward")] = "auto",
    accumulation: Annotated[int, typer.Option(help="micro-batches a step")] = 1,
    vertical: Annotated[bool, typer.Option("--vertical", help="all micro-batches through a block together")] = False,
    steps_per_turn: Annotated[int, typer.Option(help="timed steps of each side in a turn")] = 3,
    drive: Annotated[float | None, typer.Option(help="bytes a second of a paced drive; default: the real one")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="any other offload setting, name=value")] = None,
) -> dict[str, Any]:
    regimes = list(COMPUTE_OVER_DRIVE) if regime == "all" else [regime]
    if unknown := set(regimes) - set(COMPUTE_OVER_DRIVE):
        raise typer.BadParameter(f"--regime {unknown.pop()}; choose one of {', '.join(COMPUTE_OVER_DRIVE)}, or all")
    settings = {**options.budgets, "activations": activations, "vertical_micro_batches": vertical}
    work = Workload(options, settings | parsed_settings(set_), accumulation, link_bytes_per_s, steps_per_turn, drive)
    sides = sides_of(regimes, max_grad_norm or [0.0, 1.0], clip or ["auto"], parked or ["auto"])
    with folder_in(options.store) as folder, own_cache(folder):
        first = first_run(work, sides[0], folder)
        hardware = measured_hardware(work, folder)
        turns: dict[Side, list[dict[str, Any]]] = {side: [] for side in sides}
        for _ in range(options.num_turns):
            for side in sides:
                wanted_s = compute_s or wanted_compute_s(side.regime, first["drive_s"])
                turns[side].append(
                    take_turn(work, side, folder, flops_per_s=first["flops"] / wanted_s, hardware=hardware)
                )
    results = [summarize(side, of) for side, of in turns.items()]
    show(results)
    return {
        "link_bytes_per_s": link_bytes_per_s,
        "settings": dict(work.settings),
        "accumulation": accumulation,
        "drive_bytes_per_s": drive,
        "first_run": first,
        "results": results,
    }


@contextmanager
def own_cache(folder: Path) -> Iterator[None]:
    """Cache the hardware profiles of this benchmark in its own folder."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder.resolve() / "cache")
    try:
        yield
    finally:
        if before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = before


if __name__ == "__main__":
    typer.run(main)
