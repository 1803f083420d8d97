"""Figures and sentences of a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_lohan.report import sentences
from hf_lohan.report.findings import NUM_FIRST_STEPS, Findings
from hf_lohan.report.run_data import RunData
from hf_lohan.wording import count


def line(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "step_s": 4.0,
        "between_s": 0.0,
        "num_tokens": 512,
        "busy_s": {"compute": 3.2, "ssd read": 2.0, "ssd write": 1.0},
        "bytes": {"ssd read": 4 << 30, "ssd write": 2 << 30},
        "waits_s": {"compute waits": {"weights": 0.75, "the norm": 0.05}, "loads wait": {"for the SSD": 1.0}},
        "ssd_read_bytes": 4 << 30,
        "ssd_write_bytes": 2 << 30,
        **changes,
    }


def findings(steps: list[dict[str, Any]], **summary: Any) -> Findings:
    return Findings(RunData(Path("run"), {}, {"is_finished": True, **summary}, tuple(steps), ()))


def typical_run(num_steps: int = 25, **summary: Any) -> Findings:
    first = [line(step, step_s=40.0) for step in range(1, NUM_FIRST_STEPS + 1)]
    return findings([*first, *(line(step) for step in range(NUM_FIRST_STEPS + 1, num_steps + 1))], **summary)


def test_the_first_steps_are_left_out() -> None:
    run = typical_run()
    assert run.step_s == 4.0
    assert run.tokens_per_s == 128.0
    assert run.lanes[0].share == pytest.approx(0.8)
    assert findings([line(1, step_s=9.0)]).step_s == 9.0, "the only step was left out"


def test_waits_are_described_by_length_and_cause() -> None:
    assert sentences.on_waits(typical_run()) == "Compute waited 800 ms a step (20%), nearly all of it for weights."
    idle = typical_run().steps[-1] | {"waits_s": {"compute waits": {"weights": 0.001}}}
    assert "waited little" in sentences.on_waits(findings([idle]))
    several = {"weights": 0.5, "activations": 0.4, "the norm": 0.1}
    text = sentences.on_waits(findings([line(1, waits_s={"compute waits": several}, between_s=0.2)]))
    assert "for weights (500 ms), activations (400 ms) and the norm (100 ms)" in text
    assert "Between two steps 200 ms (5%)" in text


def test_waits_inside_compute_are_subtracted_on_a_cpu() -> None:
    waits = {"compute waits": {"a gradient buffer": 1.2, "weights": 0.4}}
    steps = [line(1, waits_s=waits)]
    assert findings(steps, hardware={"kind": "cuda"}).lanes[0].busy_s == pytest.approx(3.2)
    assert findings(steps, hardware={"kind": "cpu"}).lanes[0].busy_s == pytest.approx(2.0)


def test_the_bottleneck_is_named() -> None:
    assert sentences.bound_by(typical_run()) == "computing"
    waiting = line(1, busy_s={"compute": 1.0, "ssd read": 2.5, "ssd write": 1.2, "cpu optimizer": 2.0})
    assert sentences.bound_by(findings([waiting])) == "the SSDs"
    assert sentences.bound_by(findings([], bottleneck="h2d")) == "the link to the device"
    assert sentences.bound_by(findings([])) is None


def test_a_floor_above_the_steps_is_dropped() -> None:
    floors = {"floor_by_resource_s": {"compute": 30.0}, "predicted_step_s": 33.0}
    text = sentences.on_step_time(typical_run(**floors, cpu_load=13.52, num_cpus=2))
    assert "times the floor" not in text
    assert "There is no floor, because the hardware was slower when it was measured" in text
    assert text.endswith("The machine was busy when training began: a load of 13.5 on 2 CPUs.")
    text = sentences.on_step_time(
        typical_run(predicted_step_s=3.2, floor_by_resource_s={"ssd": 2.5}, cpu_load=4.0, num_cpus=2)
    )
    assert "times the floor of 2.5 s" in text and text.endswith("a load of 4.0 on 2 CPUs.")


def test_a_step_is_compared_with_plan_and_floor() -> None:
    run = typical_run(predicted_step_s=3.2, corrected_step_s=3.2, floor_by_resource_s={"compute": 1.0, "ssd": 2.5})
    assert run.floor == ("ssd", 2.5)
    assert run.corrected_s is None
    text = sentences.on_step_time(run)
    assert "1.25 times the planned 3.2 s and 1.60 times the floor of 2.5 s set by the SSDs" in text


def test_wear_counts_all_written_bytes() -> None:
    before, after = {"ssd_write_bytes": 1 << 30}, {"ssd_write_bytes": 1 << 29}
    run = findings([line(1, before=before), line(2, after=after)])
    assert run.written_bytes == 2 * (2 << 30) + (1 << 30) + (1 << 29)
    assert run.written_bytes_per_day == pytest.approx((2 << 30) / 4 * 86400)
    hardware = {"ssd": [{"endurance_bytes": 100 * run.written_bytes_per_day}]}
    text = sentences.on_bytes(findings([line(1)], measured_hardware=hardware, commit_every_steps=7))
    assert "rated for 100 such days" in text and "one step of 7" in text
    wear = {"words": "this run writes 1 TB", "is_much": False}
    assert "The plan said: this run writes 1 TB." in sentences.on_bytes(findings([line(1)], wear=wear))
    (warning,) = sentences.warnings(findings([line(1)], is_finished=True, wear=wear | {"is_much": True}))
    assert warning == "Wear: this run writes 1 TB."
    a_day = 86400 / line(1)["step_s"] * line(1)["num_tokens"]
    assert f"or {count(100 * a_day)} tokens" in text


def test_warnings() -> None:
    assert not list(sentences.warnings(typical_run(predicted_step_s=4.1)))
    (off,) = sentences.warnings(typical_run(predicted_step_s=3.0, corrected_step_s=3.9))
    assert "33% longer" in off and "corrected to 3.9 s" in off
    steps = [line(1), line(2, is_skipped=True, updates=None), line(3, updates="redone", between_s=3.0)]
    unfinished, skipped, between, redone = sentences.warnings(findings(steps, is_finished=False, num_planned_steps=10))
    assert "step 3 of 10" in unfinished
    assert skipped.startswith("1 step was skipped") and "step 2" in skipped
    assert between.startswith("38% of the time")
    assert redone.startswith("1 step guessed wrongly")


def test_a_slow_rank_is_named() -> None:
    def steps(**waited_s: float) -> tuple[dict[str, Any], ...]:
        return tuple(line(step, waited_s={name[1:]: seconds for name, seconds in waited_s.items()}) for step in (1, 2))

    of_ranks = [steps(_1=0.4, _2=3.2), steps(_0=0.2, _2=3.6), steps(_0=0.1, _1=0.1)]
    run = RunData(Path("run"), {}, {"is_finished": True}, of_ranks[0], (), tuple(of_ranks[1:]))
    (warning,) = sentences.warnings(Findings(run))
    assert warning.startswith("Rank 2 is slower than the others: they waited for it during 85% of a step, and for")
    assert "any other rank during 6% at most" in warning
    (warning,) = sentences.warnings(findings([*of_ranks[0]]))
    assert warning.startswith("Rank 2 is slower"), "the others' figures are missing"
    of_ranks = [steps(_1=2.0), steps(_0=2.4)]
    even = Findings(RunData(Path("run"), {}, {"is_finished": True}, of_ranks[0], (), (of_ranks[1],)))
    assert even.waits_for_ranks == [(0, pytest.approx(0.6)), (1, pytest.approx(0.5))]
    assert not list(sentences.warnings(even))


def test_sent_bytes_of_all_lanes_are_counted() -> None:
    sent = {"control": 1 << 10, "weights": 0, "gradients": 0, "tokens": 3 << 20, "weights uncoded": 9 << 30}
    run = findings([line(1, sent_bytes=sent)])
    assert run.sent_bytes == {name: sent[name] for name in ("control", "weights", "gradients", "tokens")}
    assert "A step sent 3 MiB to other ranks" in sentences.on_bytes(run)


def test_loss_and_clipping() -> None:
    steps = [line(1, loss=5.0, grad_norm=2.0, is_clipped=True), line(2), line(3, loss=4.0, grad_norm=None)]
    text = sentences.on_loss(findings(steps))
    assert text == (
        "The loss went from 5.000 at step 1 to 4.000 at step 3; the median gradient norm was 2, and 33% of the "
        "steps were clipped."
    )


def test_memory_is_compared_with_the_budgets() -> None:
    held = line(1, anon_rss_bytes=3 << 30, cpu_pool_bytes={"states": 1 << 30}, device_slots_bytes=1 << 29)
    run = Findings(RunData(Path("run"), {"cpu_memory": 2 << 30, "gpu_memory": 1 << 30}, {}, (held,), ()))
    text = sentences.on_memory(run)
    assert "had at most 3 GiB" in text
    assert "Host buffers and copies took 1 GiB (of 2 GiB allowed)." in text
    assert "Slots for weights took 512 MiB on the device (of 1 GiB allowed)." in text


def test_balanced_rows_are_compared_with_those_of_the_owners() -> None:
    rows = {"owned": [400, 0, 0, 0], "computed": [120, 100, 90, 90], "most_owned": 400, "most_computed": 120}
    text = sentences.on_bytes(findings([line(1)], expert_rows=rows))
    assert "the rank with the most rows of experts computed 1.20 times the mean, instead of 4.00 times" in text
    none = {"owned": [0] * 4, "computed": [0] * 4, "most_owned": 0, "most_computed": 0}
    for run in (findings([line(1)]), findings([line(1)], expert_rows=none)):
        assert "rows of experts" not in sentences.on_bytes(run)
