"""A wrong plan is replaced by a plan with the measured rates of its steps, which is kept if steps get shorter."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import resolved

from hf_lohan.costs import COMPUTING_RATES, HardwareProfile, OffloadPlan, forecast
from hf_lohan.hardware import read_hardware
from hf_lohan.planning import RunPlan, StepShape, lay_out, measured_rates, run_plan
from hf_lohan.planning.measured_rates import computing_slower, drives_slower, optimizer_slower
from hf_lohan.planning.step_plan import plan_again
from hf_lohan.testing.models import tiny_model
from hf_lohan.timeline import COMPUTE, COMPUTE_WAITS, CPU_OPTIMIZER, D2H, H2D, SSD_READ, SSD_WRITE, LaneTotals

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHAPE = StepShape(batch_size=32, sequence_length=1024)
BUDGETS = {"gpu_memory": "400MB", "cpu_memory": "600MB", "commit_every": 1}
BACK = "the first plan is used again"


class FakeMachine:
    """Simulates steps. Their times are those of the cost model on its true hardware."""

    memory_is_host = False
    torch_device = "cpu"

    def __init__(self, hardware: HardwareProfile) -> None:
        self.hardware = hardware
        self.now_s = 100.0
        self.last_s = 0.0
        self.drives_busy_s = 0.0
        self._totals = {
            lane: LaneTotals() for lane in (COMPUTE, COMPUTE_WAITS, CPU_OPTIMIZER, D2H, H2D, SSD_READ, SSD_WRITE)
        }
        self.timeline = self

    def totals(self) -> dict[str, LaneTotals]:
        return dict(self._totals)

    def perf_counter(self) -> float:
        return self.now_s

    def run_step(self, run: RunPlan, *, hidden_s: float = 0.0) -> None:
        """Take a step by the plan of `run`, and `hidden_s` seconds that no lane shows."""
        assert run.now is not None and run.plan is not None
        step = forecast(run.now.profile, self.hardware, run.now.setup, run.plan)
        self.last_s = step.step_s + hidden_s
        self.now_s += self.last_s
        both = (step.forward, step.backward)
        for lane, name in (
            (COMPUTE, "compute_s"), (CPU_OPTIMIZER, "optimizer_s"), (D2H, "d2h_s"), (H2D, "h2d_s"),
            (SSD_READ, "ssd_read_s"), (SSD_WRITE, "ssd_write_s"),
        ):  # fmt: skip
            busy_s = sum(getattr(lanes, name) for lanes in both)
            num_bytes = {
                SSD_READ: step.ssd_read_bytes_per_step,
                SSD_WRITE: step.ssd_write_bytes_per_step,
                H2D: round(busy_s * self.hardware.h2d_bytes_per_s),
                D2H: round(busy_s * self.hardware.d2h_bytes_per_s),
            }.get(lane, 0)
            before = self._totals[lane]
            self._totals[lane] = LaneTotals(before.busy_s + busy_s, before.num_bytes + num_bytes)
            if lane in (SSD_READ, SSD_WRITE):
                self.drives_busy_s += busy_s


@pytest.fixture
def desktop() -> HardwareProfile:
    return read_hardware(CONFIGS / "hardware" / "rtx4090_desktop.yaml")


@pytest.fixture
def make_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that plans a run of 0.2 billion parameters in little memory on a machine with the measured
    profile `measured`.
    """

    def make(
        machine: FakeMachine,
        measured: HardwareProfile,
        family: str = "llama",
        shape: StepShape = SHAPE,
        **settings: Any,
    ) -> RunPlan:
        with torch.device("meta"):
            model = tiny_model(family, num_layers=8, hidden_size=1024, vocab_size=4096)
        config = resolved(tmp_path, **{**BUDGETS, **settings})
        layout = lay_out(model, config, working_dtype=torch.bfloat16, hold_gradients=True)
        monkeypatch.setattr(run_plan, "cached_hardware", lambda *_args, **_kwargs: measured)
        monkeypatch.setattr(run_plan, "has_cached_hardware", lambda *_args, **_kwargs: True)
        monkeypatch.setattr(measured_rates, "time", SimpleNamespace(perf_counter=machine.perf_counter))
        device: Any = machine
        run = RunPlan(model, layout, config, device, "step")
        assert run.plan_batches(shape) is not None
        return run

    return make


def decisions(plan: OffloadPlan) -> Any:
    return plan.activations, plan.clip


def follow(run: RunPlan, machine: FakeMachine, num_steps: int, hidden_s: Any = lambda plan: 0.0) -> list[float]:
    """Run steps and return the seconds of each."""
    steps_s = []
    for _ in range(num_steps):
        began_s = machine.now_s
        machine.run_step(run, hidden_s=hidden_s(run.plan))
        steps_s.append(machine.now_s - began_s)
        run.step_began(clip_rate=0.0)
    return steps_s


WRONG: dict[str, Any] = {
    "drives too fast": lambda true: drives_slower(true, 1 / 20),
    "drives too slow": lambda true: drives_slower(true, 20),
    "device too fast": lambda true: computing_slower(true, 1 / 10),
    "device too slow": lambda true: computing_slower(true, 10),
    "all wrong": lambda true: optimizer_slower(computing_slower(drives_slower(true, 1 / 20), 5), 3),
}


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_rates_are_corrected_to_the_plan_of_the_true_ones(
    name: str, desktop: HardwareProfile, make_run: Any
) -> None:
    machine = FakeMachine(desktop)
    run = make_run(machine, WRONG[name](desktop))
    first = run.now
    best = plan_again(first, desktop, 0.0).plan
    steps_s = follow(run, machine, 12)
    assert steps_s[-1] <= 1.03 * best.prediction.step_s
    assert steps_s[-1] <= steps_s[0]
    assert run.plan.prediction.step_s == pytest.approx(steps_s[-1], rel=0.01)
    assert decisions(run.plan) == decisions(best)
    assert (decisions(first.plan) == decisions(best)) is (name == "device too slow")


def test_the_second_plan_uses_the_rates_of_the_run(desktop: HardwareProfile, make_run: Any) -> None:
    machine = FakeMachine(desktop)
    run = make_run(machine, WRONG["all wrong"](desktop))
    follow(run, machine, 6)
    found = run.now.hardware
    assert found.ssd_read_bytes_per_s == pytest.approx(desktop.ssd_read_bytes_per_s)
    assert found.ssd_write_bytes_per_s == pytest.approx(desktop.ssd_write_bytes_per_s)
    assert found.device.flops_per_s == pytest.approx(desktop.device.flops_per_s)
    assert found.cpu.optimizer_params_per_s == pytest.approx(desktop.cpu.optimizer_params_per_s)


def test_the_second_plan_uses_the_measured_routing(desktop: HardwareProfile, make_run: Any) -> None:
    machine = FakeMachine(desktop)
    run = make_run(machine, desktop, family="mixtral", experts="streamed")
    first = run.now.profile.experts
    assert len(first) == 8 and all(experts.hits() > 0.99 * experts.num_experts for experts in first)
    layers = [block.name for block in run.now.profile.blocks if block.experts is not None]
    seen = {name: [100, 100, *[0] * (first[0].num_experts - 2)] for name in layers}
    for _ in range(4):
        machine.run_step(run)
        run.step_began(clip_rate=0.0, routing=seen)
    assert [experts.hits() for experts in run.now.profile.experts] == [2.0] * 8
    assert run.plan.prediction.experts.hits_per_micro_batch == 2 * 8


def test_guessing_stops_while_steps_clip(desktop: HardwareProfile, make_run: Any) -> None:
    """Wrong guesses are written twice, so guessing stops even if it takes no longer."""
    machine = FakeMachine(desktop)
    run = make_run(machine, desktop)
    assert run.plan.clip == "speculate"
    for _ in range(4):
        machine.run_step(run)
        run.step_began(clip_rate=1.0)
    assert (run.plan.clip, run.now.setup.clip_rate) == ("defer", 1.0)
    for clip_rate in (0.5, 0.25, 0.0625):
        machine.run_step(run)
        run.step_began(clip_rate=clip_rate)
    assert run.plan.clip == "defer"
    follow(run, machine, 8)
    assert (run.plan.clip, run.now.setup.clip_rate) == ("speculate", 0.0)


def test_a_slower_second_plan_is_dropped(
    desktop: HardwareProfile, make_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """No lane shows the extra time."""
    machine = FakeMachine(desktop)
    run = make_run(machine, WRONG["drives too fast"](desktop))
    first = run.plan
    with caplog.at_level(logging.INFO, logger="hf_lohan"):
        steps_s = follow(run, machine, 20, lambda plan: 0.0 if decisions(plan) == decisions(first) else 1000.0)
    assert sum(step_s > 1000 for step_s in steps_s) == 1 + run_plan.NUM_STEPS_TRIED
    assert decisions(run.plan) == decisions(first)
    assert run.plan.prediction.step_s == pytest.approx(steps_s[-1])
    assert len([record for record in caplog.records if BACK in record.getMessage()]) == 1


def test_a_right_plan_is_kept(desktop: HardwareProfile, make_run: Any, caplog: pytest.LogCaptureFixture) -> None:
    machine = FakeMachine(desktop)
    run = make_run(machine, desktop)
    first = run.plan
    with caplog.at_level(logging.INFO, logger="hf_lohan"):
        follow(run, machine, 12)
    assert decisions(run.plan) == decisions(first)
    assert run.plan.prediction.step_s == pytest.approx(first.prediction.step_s)
    assert "tried" not in caplog.text


def test_time_that_no_lane_shows_counts_for_the_bottleneck(desktop: HardwareProfile, make_run: Any) -> None:
    machine = FakeMachine(desktop)
    run = make_run(machine, desktop)
    lost_s = run.first.plan.prediction.step_s / 3
    steps_s = follow(run, machine, 12, lambda plan: lost_s)
    assert run.plan.prediction.step_s == pytest.approx(steps_s[-1])
    assert run.plan.prediction.step_s > 1.2 * run.first.plan.prediction.step_s


@pytest.mark.covering(0)
@pytest.mark.parametrize(("lost_s", "slower"), [(0.2, 3.0), (0.2, 1.0), (0.0, 3.0)])
@pytest.mark.parametrize("shares_cpu", [False, True])
@pytest.mark.parametrize("lengths", [(64, 8192), (512, 4096), (64, 2048, 8192), (64, 80)])
def test_fixed_costs_of_short_steps_are_not_costs_of_each_token(
    lengths: tuple[int, ...],
    shares_cpu: bool,
    lost_s: float,
    slower: float,
    desktop: HardwareProfile,
    make_run: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each step has the same ``lost_s`` seconds, and products of rows of the first length are slower."""
    fast_drives = drives_slower(computing_slower(desktop, 10), 1 / 100)
    long_rows = replace(fast_drives, device=replace(fast_drives.device, shares_cpu=shares_cpu))
    short_rows = computing_slower(long_rows, slower)
    machine, measured = FakeMachine(short_rows), []

    def measure(profile: HardwareProfile, *_args: Any, **_kwargs: Any) -> HardwareProfile:
        measured.append(profile)
        rates = {name: getattr(long_rows.device, name) for name in COMPUTING_RATES}
        return replace(profile, device=replace(profile.device, **rates))

    monkeypatch.setattr(run_plan, "measure_computing", measure)
    run = make_run(machine, short_rows, shape=StepShape(1, lengths[0]), _resident_records="none")
    follow(run, machine, 12, lambda plan: lost_s)
    assert run.plan.prediction.step_s == pytest.approx(machine.last_s, rel=0.02)
    for length in lengths[1:]:
        is_longer = length >= 2 * lengths[0]
        machine.hardware = long_rows if is_longer else short_rows
        assert run.plan_batches(StepShape(1, length)) is not None
        predicted_s = run.plan.prediction.step_s
        [first_s] = follow(run, machine, 1, lambda plan: lost_s)
        assert first_s / 1.3 < predicted_s < 1.3 * first_s
    assert len(measured) == (len(lengths) - 1 if is_longer else 0)
    follow(run, machine, 12, lambda plan: lost_s)
    assert run.plan.prediction.step_s == pytest.approx(machine.last_s, rel=0.02)
