"""Better hardware makes no step longer, and drives wear by their writes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decoder_shapes import machine, machines, paper_setup, records_of, setups, tiny_model, tiny_models
from hypothesis import given, settings

from hf_lohan.costs import (
    HardwareProfile,
    ModelProfile,
    TrainingSetup,
    better_hardware,
    drive_life,
    one_more_ssd,
    plan_offload,
)

MODEL = tiny_model([(600.0, 100), (400.0, 200)], num_layers=3)


def test_a_second_drive_halves_a_step_that_drives_limit() -> None:
    hardware, setup = machine(flops_per_s=1e6), paper_setup()
    now = plan_offload(MODEL, hardware, setup).prediction
    assert plan_offload(MODEL, one_more_ssd(hardware), setup).prediction.step_s == pytest.approx(now.step_s / 2)


def test_a_device_of_twice_the_flops_halves_a_step_that_it_limits() -> None:
    hardware, setup = machine(flops_per_s=1.0), paper_setup()
    now = plan_offload(MODEL, hardware, setup).prediction
    step_s = {
        what: plan_offload(MODEL, on, own).prediction.step_s for what, on, own in better_hardware(hardware, setup)
    }
    assert step_s["a device with twice the FLOP/s"] == pytest.approx(now.step_s / 2, rel=0.01)
    assert min(step_s, key=step_s.__getitem__) == "a device with twice the FLOP/s"


def test_more_ram_holds_more_records() -> None:
    hardware, setup = machine(), paper_setup(cpu_memory_bytes=0, records=records_of(MODEL))
    now = plan_offload(MODEL, hardware, setup)
    more_ram = plan_offload(MODEL, hardware, replace(setup, cpu_memory_bytes=5000, record_cpu_bytes=5000))
    assert more_ram.prediction.step_s < now.prediction.step_s
    assert sum(record.kind == "param" for record in more_ram.resident) == 3


@settings(max_examples=30)
@given(tiny_models, machines, setups)
def test_no_better_hardware_makes_a_step_longer(
    model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup
) -> None:
    now = plan_offload(model, hardware, setup)
    for _, better, own in (*better_hardware(hardware, setup), ("a drive", one_more_ssd(hardware), setup)):
        if now.fits:
            assert plan_offload(model, better, own).prediction.step_s <= now.prediction.step_s * (1 + 1e-8)


def test_rates_of_drives_measured_together_grow_with_their_number() -> None:
    hardware = machine(flops_per_s=1e6, ssd_together_read_bytes_per_s=10.0, ssd_together_write_bytes_per_s=5.0)
    now, then = (plan_offload(MODEL, on, paper_setup()).prediction for on in (hardware, one_more_ssd(hardware)))
    assert now.step_s / then.step_s == pytest.approx(2)


def test_the_drive_with_the_least_endurance_for_its_share_wears_out_first() -> None:
    hardware = machine(ssd_capacity_bytes=30_000)
    first = hardware.ssd[0]
    worn = replace(first, capacity_bytes=10_000, endurance_bytes=4200 * 50)
    lasting = replace(first, endurance_bytes=10**9)
    hardware = replace(hardware, ssd=(lasting, worn))
    prediction = plan_offload(MODEL, hardware, paper_setup()).prediction
    assert prediction.ssd_write_bytes_per_step == 4200
    life = drive_life(hardware, prediction)
    assert life.steps == pytest.approx(4 * 50)
    assert life.days == pytest.approx(4 * 50 * prediction.step_s / 86400)


def test_drives_of_unknown_endurance_have_no_life() -> None:
    assert drive_life(machine(), plan_offload(MODEL, machine(), paper_setup()).prediction) is None
