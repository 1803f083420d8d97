"""A run's plan is corrected by the measured length of its steps and compute time of the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import resolved

from hf_lohan.annexes.studies import Studies
from hf_lohan.costs import CpuProfile, DeviceProfile, HardwareProfile, SsdProfile
from hf_lohan.device import CpuDevice
from hf_lohan.planning import PlannedStep, RunPlan, StepShape, lay_out, plan_step
from hf_lohan.planning.measured_rates import StepTimes, corrected_hardware, usual_step
from hf_lohan.planning.run_plan import NUM_STEPS_BEFORE, NUM_STEPS_TIMED
from hf_lohan.planning.step_plan import plan_again
from hf_lohan.ranks import Ranks
from hf_lohan.testing.models import tiny_model
from hf_lohan.timeline import COMPUTE, COMPUTE_WAITS, Timeline

DRIVE_BYTES_PER_S = 1e6
SSD = SsdProfile(read_bytes_per_s=DRIVE_BYTES_PER_S, write_bytes_per_s=DRIVE_BYTES_PER_S, capacity_bytes=10**9)


def machine(flops_per_s: float, *, shares_cpu: bool = False) -> HardwareProfile:
    return HardwareProfile(
        device=DeviceProfile(flops_per_s=flops_per_s, memory_bytes=1 << 30, shares_cpu=shares_cpu),
        h2d_bytes_per_s=1e9,
        d2h_bytes_per_s=1e9,
        ssd=(SSD,),
        cpu=CpuProfile(memory_bytes=1 << 30, optimizer_params_per_s=1e9),
    )


def planned_on(hardware: HardwareProfile, folder: Path) -> PlannedStep:
    settings = {"cpu_memory": "4MiB", "gpu_memory": "2MiB", "_resident_records": "none", "activations": "recompute"}
    config = resolved(folder, **settings)
    model = tiny_model("llama")
    layout = lay_out(model, config, working_dtype=torch.float32, hold_gradients=True)
    return plan_step(model, layout, config, StepShape(2, 16), measure=lambda *_: hardware)


def compute_s(planned: PlannedStep) -> float:
    return planned.plan.prediction.forward.compute_s + planned.plan.prediction.backward.compute_s


FAST = 1e15


@pytest.fixture
def truth(tmp_path: Path) -> PlannedStep:
    """The plan with the true hardware. Compute takes a third of the drive's time, so overlap pays."""
    drive_s = planned_on(machine(FAST), tmp_path).plan.prediction.step_s
    flops = compute_s(planned_on(machine(FAST), tmp_path)) * FAST
    return planned_on(machine(flops / (drive_s / 3)), tmp_path)


def test_measured_compute_decides_how_to_clip(truth: PlannedStep, tmp_path: Path) -> None:
    wrong = planned_on(machine(FAST), tmp_path)
    wrong = replace(wrong, plan=replace(wrong.plan, clip="defer"))
    deferring = replace(truth, setup=replace(truth.setup, clip="defer"))
    took_s = plan_again(deferring, truth.hardware, 0.0).plan.prediction.step_s
    measured = StepTimes(step_s=took_s, compute_s=compute_s(truth), waits_s=0.0)
    hardware = corrected_hardware(wrong, measured)
    assert hardware.device.flops_per_s == pytest.approx(truth.hardware.device.flops_per_s)
    assert hardware.ssd == truth.hardware.ssd
    assert plan_again(wrong, hardware, 0.0).plan.clip == truth.plan.clip == "speculate"


def test_compute_time_that_may_be_waits_corrects_nothing(truth: PlannedStep) -> None:
    step_s, known_s = truth.plan.prediction.step_s, compute_s(truth)
    seen = StepTimes(step_s=step_s, compute_s=1.5 * known_s, waits_s=0.6 * known_s)
    assert corrected_hardware(truth, seen) is truth.hardware
    slower = corrected_hardware(truth, replace(seen, waits_s=0.25 * known_s))
    assert slower.device.flops_per_s == pytest.approx(truth.hardware.device.flops_per_s / 1.25)


def test_faster_compute_is_corrected_too(truth: PlannedStep) -> None:
    seen = StepTimes(step_s=truth.plan.prediction.step_s, compute_s=0.5 * compute_s(truth), waits_s=0.0)
    corrected = corrected_hardware(truth, seen)
    assert corrected.device.flops_per_s == pytest.approx(2 * truth.hardware.device.flops_per_s)


def test_on_shared_cores_only_the_length_of_a_step_counts(tmp_path: Path) -> None:
    planned = planned_on(machine(FAST, shares_cpu=True), tmp_path)
    step_s = planned.plan.prediction.step_s
    assert corrected_hardware(planned, StepTimes(step_s, 10.0, 0.0)) is planned.hardware
    corrected = corrected_hardware(planned, StepTimes(2 * step_s, 10.0, 0.0))
    assert corrected.ssd_read_bytes_per_s == pytest.approx(DRIVE_BYTES_PER_S / 2)
    assert corrected.device == planned.hardware.device


def test_steps_correct_the_links_between_gpus(tmp_path: Path) -> None:
    """The lane of a link also has exchanges, so its bytes and seconds do not say how fast copies are."""
    hardware = replace(machine(FAST), ssd=(replace(SSD, read_bytes_per_s=1e12, write_bytes_per_s=1e12),))
    hardware = replace(hardware, gpu_link="nvlink", gpu_link_bytes_per_s=1e5)
    config = resolved(
        tmp_path, cpu_memory="4MiB", gpu_memory="4MiB", **{"ranks.transport": "nccl"}, _resident_records="none"
    )
    model = tiny_model("llama")
    layout = lay_out(model, config, working_dtype=torch.float32, hold_gradients=True, ranks=Ranks(0, 2, 0, 2))
    planned = plan_step(model, layout, config, StepShape(2, 16), measure=lambda *_: hardware)
    step = planned.plan.prediction
    assert planned.setup.cluster.transport == "nccl" and step.bottleneck == "gpu_link"
    lanes = {"h2d_s": 1.0, "h2d_bytes": 1e6, "d2h_s": 1.0, "d2h_bytes": 1e6}
    measured = StepTimes(2 * step.step_s, compute_s=compute_s(planned), waits_s=0.0, **lanes)
    corrected = corrected_hardware(planned, measured)
    assert corrected.between_gpus_bytes_per_s == pytest.approx(1e5 / 2)
    assert (corrected.h2d_bytes_per_s, corrected.d2h_bytes_per_s) == (1e9, 1e9)


def test_step_times_are_read_from_the_timeline() -> None:
    timeline = Timeline()
    before = StepTimes.so_far(timeline)
    timeline.add_task(COMPUTE, "forward", 0.0, 2.0)
    timeline.add_task(COMPUTE, "backward", 2.0, 6.0)
    timeline.add_task(COMPUTE_WAITS, "a gradient buffer", 3.0, 4.0)
    timeline.add_task(COMPUTE_WAITS, "weights", 6.0, 9.0)
    step = StepTimes.so_far(timeline).since(before)
    assert (step.compute_s, step.waits_s, step.least_compute_s) == (6.0, 1.0, 5.0)


def test_an_unusually_long_step_does_not_count() -> None:
    usual, other, long = StepTimes(1.0, 0.5, 0.1), StepTimes(1.2, 0.7, 0.3), StepTimes(2.0, 0.5, 0.1)
    assert usual_step([usual, long]) == usual
    assert usual_step([usual, other]) == StepTimes(*(pytest.approx(value) for value in (1.1, 0.6, 0.2)))


def test_a_run_keeps_its_plan_if_its_step_cannot_be_simulated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: object, **settings: object) -> None:
        raise ZeroDivisionError("no rate")

    simulated = planned_on(machine(FAST), tmp_path)
    monkeypatch.setattr(Studies, "choose_solver", fails)
    planned = planned_on(machine(FAST), tmp_path)
    assert planned.plan == replace(simulated.plan, solvers=())
    assert plan_again(planned, machine(FAST / 2), 0.0).plan.fits
    assert caplog.text.count("stays, because its step cannot be simulated: ZeroDivisionError('no rate')") == 2


def test_a_solver_of_one_rank_is_refused_for_several(tmp_path: Path) -> None:
    config = resolved(tmp_path, cpu_memory="4MiB", gpu_memory="2MiB", _solver="migration")
    with pytest.raises(ValueError, match="plans the lanes of one rank, and this run has 2; set solver to auto"):
        lay_out(tiny_model("llama"), config, working_dtype=torch.float32, hold_gradients=True, ranks=Ranks(0, 2, 0, 2))


def test_the_bytes_of_graphs_are_corrected(tmp_path: Path) -> None:
    """The run saves half of the estimate. Later plans of the run know it."""
    model, config = tiny_model("llama"), resolved(tmp_path, cpu_memory="4MiB", gpu_memory="2MiB", activations="swap")
    layout = lay_out(model, config, working_dtype=torch.float32, hold_gradients=True)
    plan = RunPlan(model, layout, config, CpuDevice(), "step")
    plan.compile_layers()
    first = plan.plan_batches(StepShape(2, 16))
    assert first is not None
    graphs = [sizes["graph"] for sizes in first.activation_bytes.values()]
    assert all(graphs)
    for _ in range(NUM_STEPS_BEFORE + NUM_STEPS_TIMED):
        plan.step_began(0.0, saved_share=0.5)
    assert plan.now is not None
    for after in (plan.now, plan.plan_batches(StepShape(2, 16))):
        assert after is not None
        assert [sizes["graph"] for sizes in after.activation_bytes.values()] == [number // 2 for number in graphs]
