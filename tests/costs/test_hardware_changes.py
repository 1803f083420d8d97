"""Hardware changes are sorted by the time they save, and drives wear by their writes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decoder_shapes import machine, machines, paper_setup, records_of, setups, tiny_model, tiny_models
from hypothesis import given, settings

from hf_lohan.costs import HardwareProfile, ModelProfile, TrainingSetup, drive_life, plan_offload, what_hardware_buys

MODEL = tiny_model([(600.0, 100), (400.0, 200)], num_layers=3)


def test_a_second_drive_halves_a_step_that_drives_limit() -> None:
    hardware, setup = machine(flops_per_s=1e6), paper_setup()
    now = plan_offload(MODEL, hardware, setup).prediction
    first = what_hardware_buys(MODEL, hardware, setup)[0]
    assert first.description == "one more SSD like the first"
    assert first.step_s == pytest.approx(now.step_s / 2)
    assert first.saved_s == pytest.approx(now.step_s / 2)
    assert first.speedup == pytest.approx(2)


def test_more_ram_holds_more_records() -> None:
    hardware, setup = machine(cpu_memory_bytes=5000), paper_setup(cpu_memory_bytes=0, records=records_of(MODEL))
    more_ram = next(
        change for change in what_hardware_buys(MODEL, hardware, setup) if change.description == "twice the RAM"
    )
    assert more_ram.saved_s > 0
    assert sum(record.kind == "param" for record in more_ram.plan.resident) == 3


@settings(max_examples=30)
@given(tiny_models, machines, setups)
def test_no_hardware_change_makes_a_step_longer(
    model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup
) -> None:
    now = plan_offload(model, hardware, setup)
    changes = what_hardware_buys(model, hardware, setup)
    assert [change.saved_s for change in changes] == sorted((change.saved_s for change in changes), reverse=True)
    for change in changes:
        if now.fits:
            assert change.step_s <= now.prediction.step_s * (1 + 1e-8)
            assert change.step_s + change.saved_s == pytest.approx(now.prediction.step_s)


def test_rates_of_drives_measured_together_grow_with_their_number() -> None:
    hardware = machine(flops_per_s=1e6, ssd_together_read_bytes_per_s=10.0, ssd_together_write_bytes_per_s=5.0)
    assert what_hardware_buys(MODEL, hardware, paper_setup())[0].speedup == pytest.approx(2)


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
