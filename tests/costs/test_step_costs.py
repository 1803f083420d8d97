"""The cost model equals sums by hand: LoHan's equations, and each cost that they omit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from decoder_shapes import machine, paper_setup, tiny_model, tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_lohan.annexes.studies.simulation.simulated_step import simulate_step
from hf_lohan.costs import (
    HardwareProfile,
    ModelProfile,
    OperationProfile,
    RecordTraffic,
    StepPrediction,
    TrainingSetup,
    plan_offload,
)
from hf_lohan.costs.offload_plan import MOST_LOST_S
from hf_lohan.costs.search import plan_search
from hf_lohan.costs.search.plan_search import AS_FAST, COMMIT_FRACTION, LITTLE_S
from hf_lohan.costs.step.step_costs import SHARED_CORES_EFFICIENCY, lending_layers
from hf_lohan.planning.order import profile_together

# One layer: P = 100 parameters (200 bytes), 1000 FLOPs in products, 10 elsewhere; input 50 bytes, outputs 100 and 200.
MODEL = tiny_model([(600.0, 100), (400.0, 200)])
P = 100


def predict(
    hardware: HardwareProfile, setup: TrainingSetup, model: ModelProfile = MODEL, swapped_bytes: int = 150
) -> StepPrediction:
    """Predict a step. By default the input and the first operation are swapped."""
    return plan_offload(model, hardware, setup, swapped_bytes=swapped_bytes).prediction


def test_attention_has_a_rate_of_its_own() -> None:
    hardware = machine(flops_per_s=100.0)
    attends = replace(hardware, device=replace(hardware.device, attention_flops_per_s=40.0))
    (layer,) = MODEL.blocks
    operations = replace(layer.operations[0], name="aten.scaled_dot_product_attention#0"), layer.operations[1]
    model = replace(MODEL, blocks=(replace(layer, operations=operations),))
    assert predict(hardware, paper_setup(), model).forward.compute_s == pytest.approx(1010 / 100)
    step = predict(attends, paper_setup(), model, swapped_bytes=0)
    forward_s = 600 / 40 + 410 / 100
    assert step.forward.compute_s == pytest.approx(forward_s)
    assert step.backward.compute_s == pytest.approx(2 * forward_s + 600 / 40 + 400 / 100)


rates = st.floats(1.0, 500.0)


@settings(max_examples=300)
@given(rates, rates, rates, rates, st.integers(0, 300), tiny_models, st.floats(0, 1))
def test_predictions_equal_lohans_equations(
    flops_per_s: float, link: float, read: float, write: float, activation_ram: int, model: ModelProfile, part: float
) -> None:
    hardware = machine(
        flops_per_s=flops_per_s, link_bytes_per_s=link, ssd_read_bytes_per_s=read, ssd_write_bytes_per_s=write
    )
    setup = paper_setup(activation_cpu_bytes=activation_ram)
    step = predict(hardware, setup, model, swapped_bytes=int(part * model.activation_bytes))
    swapped, spilled = step.swapped_bytes, max(0, step.swapped_bytes - activation_ram)
    params = model.num_params
    forward_s = max(model.flops / flops_per_s, swapped / link, 2 * params / link, 2 * params / read + spilled / write)
    backward_s = max(
        (2 * model.flops + step.recomputed_flops) / flops_per_s,
        2 * params / link,
        (2 * params + swapped) / link,
        (14 * params + spilled) / read + 14 * params / write,
        params / 1e9,
    )
    assert step.spilled_bytes == spilled
    assert step.forward_s == pytest.approx(forward_s)
    assert step.backward_s == pytest.approx(backward_s)


def test_operations_that_are_neither_kept_nor_swapped_are_recomputed() -> None:
    assert predict(machine(), paper_setup()).recomputed_flops == 400
    assert predict(machine(), paper_setup(), swapped_bytes=50).recomputed_flops == 1000
    assert predict(machine(), paper_setup(), swapped_bytes=350).recomputed_flops == 0
    assert predict(machine(), paper_setup(), swapped_bytes=350).backward_s == pytest.approx(1400 / 20 + 1400 / 10)


@pytest.mark.parametrize(
    ("clip", "forward_reads", "forward_writes", "backward_reads", "backward_writes"),
    [("none", 200, 0, 200 + 1200, 1200), ("speculate", 200, 0, 200 + 1200, 1200), ("defer", 200 + 1200, 1200, 200, 0)],
)
def test_updates_run_in_backward_or_in_the_next_forward(
    clip: str, forward_reads: int, forward_writes: int, backward_reads: int, backward_writes: int
) -> None:
    """Our update reads and writes weight, residual and moments: 12 bytes per parameter each way."""
    setup = paper_setup(clip=clip, state_bytes_per_param=10, update_reads_param=True, durability="step")
    step = predict(machine(), setup)
    assert step.forward_s == pytest.approx(max(1010 / 100, forward_reads / 20 + forward_writes / 10))
    assert step.backward_s == pytest.approx(max(2420 / 100, backward_reads / 20 + backward_writes / 10))
    assert (step.ssd_read_bytes_per_step, step.ssd_write_bytes_per_step) == (1600, 1200)
    lanes = step.forward if clip == "defer" else step.backward
    assert lanes.optimizer_s == pytest.approx(P / 1e9)


def test_wrong_guesses_cost_a_second_update() -> None:
    setup = paper_setup(clip="speculate", durability="step")
    right, wrong = (predict(machine(), replace(setup, clip_rate=rate)) for rate in (0.0, 0.5))
    forward_s, forward_with_update_s = 1010 / 100, 200 / 20 + 1200 / 20 + 1400 / 10
    assert wrong.step_s == pytest.approx(right.step_s + 0.5 * (forward_with_update_s - forward_s))


def test_auto_clips_in_the_faster_way() -> None:
    setup = paper_setup(clip="auto", durability="step")
    often_wrong, never_wrong = (plan_offload(MODEL, machine(), replace(setup, clip_rate=rate)) for rate in (1.0, 0.0))
    assert (often_wrong.clip, never_wrong.clip) == ("defer", "speculate")


def test_guesses_must_save_as_much_time_as_they_write_twice() -> None:
    """Here guesses save time even if half of them are wrong. They save less than half of the time, but write half of
    the steps twice.
    """
    setup, hardware = paper_setup(durability="step"), machine(flops_per_s=10)

    def step_s(clip: str, clip_rate: float) -> float:
        return plan_offload(MODEL, hardware, replace(setup, clip=clip, clip_rate=clip_rate)).prediction.step_s

    assert step_s("speculate", 0.5) < step_s("defer", 0.5) < 1.5 * step_s("speculate", 0.5)
    plans = [plan_offload(MODEL, hardware, replace(setup, clip="auto", clip_rate=rate)) for rate in (0.0, 0.05, 0.5)]
    assert [plan.clip for plan in plans] == ["speculate", "speculate", "defer"]


def test_weights_move_with_each_micro_batch_and_states_once() -> None:
    one, three = (predict(machine(), paper_setup(num_micro_batches=count)) for count in (1, 3))
    plain_backward_s = max((2 * 1010 + 400) / 100, (200 + 150) / 50, 200 / 20)
    assert three.forward_s == pytest.approx(3 * one.forward_s)
    assert three.backward_s == pytest.approx(one.backward_s + 2 * plain_backward_s)
    assert three.ssd_read_bytes_per_step == one.ssd_read_bytes_per_step + 2 * 2 * 200
    assert three.ssd_write_bytes_per_step == one.ssd_write_bytes_per_step
    assert three.recomputed_flops == 3 * one.recomputed_flops
    assert three.num_tokens == 3 * one.num_tokens
    assert three.tflops == pytest.approx(3 * 3 * 1010 / three.step_s / 1e12)


def test_spilled_gradients_are_written_and_read() -> None:
    plain, spilling = (predict(machine(), paper_setup(clip="defer", spilled_gradient_bytes=n)) for n in (0, 200))
    assert spilling.ssd_write_bytes_per_step - plain.ssd_write_bytes_per_step == 200
    assert spilling.ssd_read_bytes_per_step - plain.ssd_read_bytes_per_step == 200
    several = paper_setup(clip="defer", spilled_gradient_bytes=200, num_micro_batches=3)
    without = replace(several, spilled_gradient_bytes=0)
    more = predict(machine(), several).ssd_read_bytes_per_step - predict(machine(), without).ssd_read_bytes_per_step
    assert more == 3 * 200, "two reads to add to it and one to apply it"


def test_the_optimizer_can_be_the_bottleneck() -> None:
    step = predict(machine(optimizer_params_per_s=0.2), paper_setup())
    assert step.backward_s == pytest.approx(P / 0.2)
    assert (step.backward_bottleneck, step.bottleneck) == ("cpu", "cpu")


def test_checksums_use_the_same_cpu() -> None:
    hardware = machine(optimizer_params_per_s=0.2)
    hardware = replace(hardware, cpu=replace(hardware.cpu, checksum_bytes_per_s=4.0))
    assert predict(hardware, paper_setup()).backward_s == pytest.approx(P / 0.2 + (1400 + 1400) / 4)


def test_a_device_that_moves_files_computes_the_checksums_of_weights() -> None:
    hardware = machine(optimizer_params_per_s=0.2)
    hardware = replace(hardware, cpu=replace(hardware.cpu, checksum_bytes_per_s=4.0))
    direct = replace(hardware, device=replace(hardware.device, moves_files=True))
    # Of the 1400 bytes that are read, 200 are weights. The drives and the link move as many bytes as before.
    assert predict(direct, paper_setup()).backward_s == pytest.approx(P / 0.2 + (1200 + 1400) / 4)
    without = replace(direct, cpu=replace(direct.cpu, checksum_bytes_per_s=None))
    assert predict(without, paper_setup()) == predict(
        replace(without, device=replace(without.device, moves_files=False)), paper_setup()
    )


def test_a_link_may_be_slower_in_both_directions_at_once() -> None:
    slow_link = machine(link_bytes_per_s=1.0)
    assert predict(slow_link, paper_setup()).backward_s == pytest.approx(350.0)
    both_ways = replace(slow_link, duplex_bytes_per_s=1.1)
    step = predict(both_ways, paper_setup())
    assert step.backward_s == pytest.approx((350 + 200) / 1.1)
    assert step.backward_bottleneck == "link"


@pytest.mark.parametrize(("mixed_bytes_per_s", "seconds"), [(None, 210.0), (10.0, 280.0), (20.0, 140.0), (1e9, 140.0)])
def test_drives_may_be_slower_reading_and_writing_at_once(mixed_bytes_per_s: float | None, seconds: float) -> None:
    """1400 bytes are read and written. That is never faster than the write alone."""
    assert predict(machine(ssd_mixed_bytes_per_s=mixed_bytes_per_s), paper_setup()).backward_s == pytest.approx(seconds)


def test_on_a_cpu_the_times_of_a_phase_add_up() -> None:
    hardware = machine(optimizer_params_per_s=10.0, ssd_read_bytes_per_s=1e9, ssd_write_bytes_per_s=1e9)
    hardware = replace(hardware, device=replace(hardware.device, shares_cpu=True))
    step = predict(hardware, paper_setup())
    # Weights are read into slots directly, so only activations and gradients are copied.
    forward_s = 1010 / 100 + 150 / 50
    backward_s = (2 * 1010 + 400) / 100 + 150 / 50 + 200 / 50 + P / 10
    assert step.forward_s == pytest.approx(forward_s / SHARED_CORES_EFFICIENCY)
    assert step.backward_s == pytest.approx(backward_s / SHARED_CORES_EFFICIENCY)
    assert step.bottleneck == "compute"


def test_elementwise_operations_take_time_and_are_recomputed() -> None:
    hardware = machine(ssd_read_bytes_per_s=1e9, ssd_write_bytes_per_s=1e9)
    hardware = replace(hardware, device=replace(hardware.device, memory_bytes_per_s=25.0))
    model = replace(MODEL, blocks=tuple(replace(block, moved_bytes=100) for block in MODEL.blocks))
    step = predict(hardware, paper_setup(), model)
    assert step.forward_s == pytest.approx(1010 / 100 + 4)
    assert step.backward_s == pytest.approx(2 * (1010 / 100 + 4) + 400 / 100 + 4)


def test_a_compiled_layer_is_swapped_or_recomputed_whole() -> None:
    """Its graph saves 400 bytes beside the input. Recomputation has all 1010 FLOPs, and the 50 bytes that move."""
    hardware = machine(ssd_read_bytes_per_s=1e9, ssd_write_bytes_per_s=1e9)
    hardware = replace(hardware, device=replace(hardware.device, memory_bytes_per_s=25.0))
    block = replace(MODEL.blocks[0], moved_bytes=100, fused_bytes=(("compile", 50),), graph_bytes=400)
    compiled = replace(MODEL, blocks=(block,)).fused("compile")
    again = predict(hardware, paper_setup(), compiled, swapped_bytes=449)
    assert (again.swapped_bytes, again.recomputed_flops) == (50, 1010)
    assert again.backward.compute_s == pytest.approx(3 * (1010 / 100 + 2))
    swapped = predict(hardware, paper_setup(), compiled, swapped_bytes=450)
    assert (swapped.swapped_bytes, swapped.recomputed_flops) == (450, 0)
    assert swapped.backward.compute_s == pytest.approx(2 * (1010 / 100 + 2))
    assert predict(hardware, paper_setup(), compiled.with_graphs_saving(0.5), swapped_bytes=250).swapped_bytes == 250
    assert MODEL.with_graphs_saving(0.5) == MODEL


def test_a_compiled_layer_has_the_attention_of_its_parts() -> None:
    (layer,) = MODEL.blocks
    parts = replace(layer.operations[0], name="aten.scaled_dot_product_attention#0"), layer.operations[1]
    model = replace(MODEL, blocks=(replace(layer, operations=parts, graph_bytes=400),))
    assert model.fused("compile").layers[0].attention_flops == 600
    together = profile_together(model.fused("compile"), 2).layers[0]
    assert (together.attention_flops, together.operations[0].output_bytes) == (1200, 800)


def measured(operation: OperationProfile) -> OperationProfile:
    return replace(operation, forward_s=operation.flops / 50)


def test_measured_times_replace_computed_ones() -> None:
    operations = tuple(measured(operation) for operation in MODEL.layers[0].operations)
    block = replace(MODEL.blocks[0], operations=operations, forward_s=25.0)
    hardware = machine(ssd_read_bytes_per_s=1e9, ssd_write_bytes_per_s=1e9)
    step = predict(hardware, paper_setup(), replace(MODEL, blocks=(block,)))
    # Of 25 s, 12 and 8 are the operations and 0.1 is a product that is not listed. The rest is always recomputed.
    assert step.forward_s == pytest.approx(25)
    assert step.backward_s == pytest.approx(2 * 25 + 8 + 4.9)


def test_frozen_weights_have_no_gradients_and_no_states() -> None:
    block = replace(MODEL.blocks[0], num_trainable_params=0)
    step = predict(machine(), paper_setup(), replace(MODEL, blocks=(block,)))
    assert step.backward_s == pytest.approx((1010 + 400) / 100)
    assert step.backward.d2h_s == 0
    assert (step.ssd_read_bytes_per_step, step.ssd_write_bytes_per_step) == (400, 0)


def test_weights_that_are_still_in_slots_are_not_read_again() -> None:
    plain, turned = (predict(machine(), paper_setup(turnaround_bytes=size)) for size in (0, 120))
    assert plain.ssd_read_bytes_per_step - turned.ssd_read_bytes_per_step == 120
    assert plain.backward.h2d_s - turned.backward.h2d_s == pytest.approx(120 / 50)


def test_filling_the_pipeline_takes_one_block_of_each_other_lane() -> None:
    model = tiny_model([(600.0, 100), (400.0, 200)], num_layers=2)
    step = predict(machine(), paper_setup(counts_fill=True), model, swapped_bytes=300)
    compute_s, d2h_s, h2d_s, read_s = 2020 / 100, 300 / 50, 400 / 50, 400 / 20
    assert step.forward_s == pytest.approx(compute_s + (d2h_s + h2d_s + read_s) / 2)


@settings(max_examples=100)
@given(rates, rates, tiny_models)
def test_compute_hides_the_drives_from_a_number_of_tokens_on(
    flops_per_s: float, rate: float, model: ModelProfile
) -> None:
    """The number is 30 bytes per parameter over the compute per token, whatever the model's size. LoHan reads weights
    twice and writes them once, and reads and writes states.
    """
    model = replace(model, blocks=tuple(replace(block, flops=2.0 * block.num_params) for block in model.blocks))
    hardware = machine(
        flops_per_s=flops_per_s, link_bytes_per_s=1e9, ssd_read_bytes_per_s=rate, ssd_write_bytes_per_s=rate
    )
    step = plan_offload(model, hardware, paper_setup(activations="recompute", activation_cpu_bytes=10**9)).prediction
    compute_s = step.forward.compute_s + step.backward.compute_s
    ssd_s = (2 + 2 + 12 + 14) * model.num_params / rate
    assert step.ssd_hides_from_tokens == pytest.approx(step.num_tokens * ssd_s / compute_s)


def test_the_tokens_that_hide_the_drives_do_not_depend_on_micro_batches() -> None:
    setup = paper_setup(num_micro_batches=1)
    once, often = (predict(machine(), replace(setup, num_micro_batches=number), swapped_bytes=0) for number in (1, 8))
    assert often.ssd_hides_from_tokens == pytest.approx(once.ssd_hides_from_tokens)


def in_ram(**changes: Any) -> TrainingSetup:
    """Return a setup with all weights and moments of `MODEL` in RAM."""
    records = tuple(
        RecordTraffic(block="layer", kind=kind, num_bytes=size, read_bytes_per_step=3 * size, update_read_bytes=size)
        for kind, size in (("param", 200), ("exp_avg", 400), ("exp_avg_sq", 600))
    )
    settings = {"durability": "step", "clip": "defer", "records": records, "record_cpu_bytes": 1200}
    return paper_setup(state_bytes_per_param=10, update_reads_param=True, **{**settings, **changes})


@pytest.mark.parametrize(("every", "written"), [(1, 1200), (4, 300), (0, 0)])
def test_records_in_ram_are_written_with_commits(every: int, written: int) -> None:
    step = predict(machine(), in_ram(commit_every_steps=every))
    assert (step.ssd_read_bytes_per_step, step.ssd_write_bytes_per_step) == (0, written)
    always, never = (predict(machine(), in_ram(commit_every_steps=steps)).step_s for steps in (1, 0))
    part = 1 / every if every else 0.0
    assert step.step_s == pytest.approx(part * always + (1 - part) * never)


def test_a_store_with_one_version_is_written_with_checkpoints() -> None:
    plan = plan_offload(MODEL, machine(), in_ram(durability="checkpoint"))
    assert (plan.commit_every_steps, plan.prediction.ssd_write_bytes_per_step) == (0, 0)


def test_auto_commits_rarely_enough_to_cost_little() -> None:
    setup = in_ram(commit_every_steps=None, commit_every_s=None)
    each, never = (predict(machine(), replace(setup, commit_every_steps=steps)).step_s for steps in (1, 0))
    assert each > 2 * never + LITTLE_S
    fast = machine(flops_per_s=1e4, link_bytes_per_s=2000, ssd_read_bytes_per_s=2000, ssd_write_bytes_per_s=1000)
    plan = plan_offload(MODEL, fast, setup)
    assert plan.commit_every_steps > 1
    never_s = predict(fast, replace(setup, commit_every_steps=0)).step_s
    assert plan.prediction.step_s <= (1 + COMMIT_FRACTION) * never_s
    assert plan.commit_every_steps * plan.prediction.step_s <= MOST_LOST_S
    # At most ten minutes pass between commits, whatever they cost.
    slow = plan_offload(MODEL, machine(), setup)
    assert slow.commit_every_steps > 1 and slow.commit_every_steps * slow.prediction.step_s <= MOST_LOST_S
    asked = plan_offload(MODEL, fast, replace(setup, commit_every_s=MOST_LOST_S / 2))
    assert asked.commit_every_steps * asked.prediction.step_s == pytest.approx(MOST_LOST_S / 2, rel=0.1)


def test_auto_commits_each_step_if_that_costs_nothing() -> None:
    much = 1e5  # a step takes less than 10 ms
    tiny = machine(flops_per_s=much, link_bytes_per_s=much, ssd_read_bytes_per_s=much, ssd_write_bytes_per_s=much / 10)
    assert plan_offload(MODEL, tiny, in_ram(commit_every_steps=None)).commit_every_steps == 1
    hidden = plan_offload(MODEL, machine(ssd_write_bytes_per_s=1e9), in_ram(commit_every_steps=None))
    nothing_there = plan_offload(MODEL, machine(), in_ram(commit_every_steps=None, record_cpu_bytes=0))
    assert hidden.commit_every_steps == nothing_there.commit_every_steps == 1


def test_auto_commits_rarely_if_that_writes_much_less(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = machine(ssd_write_bytes_per_s=1e9)  # commits take no time
    setup = in_ram(commit_every_steps=None, commit_every_s=None)
    step_s = plan_offload(MODEL, drive, setup).prediction.step_s
    monkeypatch.setattr(plan_search, "LITTLE_BYTES", 1200)
    for num_steps in (4, 1e9):
        monkeypatch.setattr(plan_search, "COMMITTED_BYTES_PER_S", 1200 / (num_steps * step_s))
        plan = plan_offload(MODEL, drive, setup)
        assert plan.commit_every_steps == min(num_steps, MOST_LOST_S // step_s)
        assert plan.prediction.step_s == pytest.approx(step_s)
    # Updates that wait for the norm make a step longer, and rare commits need them.
    slow = machine(ssd_write_bytes_per_s=1e9, optimizer_params_per_s=1.0)
    asked = replace(setup, clip="auto")
    each, rarely = (plan_offload(MODEL, slow, replace(asked, commit_every_steps=steps)) for steps in (1, 0))
    assert rarely.prediction.step_s > AS_FAST * each.prediction.step_s
    assert plan_offload(MODEL, slow, asked).commit_every_steps == 1


def test_auto_commits_each_step_if_speculation_is_set() -> None:
    """Undoing a guess needs a commit of the previous step, whatever it costs."""
    setup = in_ram(commit_every_steps=None, commit_every_s=None)
    assert plan_offload(MODEL, machine(), setup).commit_every_steps > 1
    speculating = plan_offload(MODEL, machine(), replace(setup, clip="speculate"))
    assert (speculating.clip, speculating.commit_every_steps) == ("speculate", 1)


def test_nothing_is_guessed_without_a_commit_to_go_back_to() -> None:
    assert in_ram(clip="auto", commit_every_steps=1).clip_modes == ("defer", "speculate")
    assert in_ram(clip="auto", commit_every_steps=4).clip_modes == ("defer",)


def test_every_second_layer_lends_its_slot_where_the_device_computes_while_the_host_goes_on() -> None:
    """Three of five layers of 100 parameters in 2 bytes, the last and every second one before it."""
    model = tiny_model([(90.0, 100)], num_layers=5, num_params=100)
    assert model.num_trainable_params == 500
    for shares_cpu, num_lent in ((False, 3), (True, 5)):
        hardware = replace(machine(), device=replace(machine().device, shares_cpu=shares_cpu))
        names = [layer.name for layer in lending_layers(model, hardware)]
        assert names == [f"layers.{index}" for index in range(4, -1, -1 if shares_cpu else -2)]
        reads = []
        for lent in (0, 5 * 200):
            setup = paper_setup(clip="none", lent_bytes=lent, update_reads_param=True)
            plan = plan_offload(model, hardware, setup)
            step = simulate_step(model, hardware, setup, plan)
            assert step is not None
            reads.append((plan.prediction.ssd_read_bytes_per_step, step.busy_s["ssd"]))
        (read_bytes, busy_s), (fewer_bytes, less_s) = reads
        assert read_bytes - fewer_bytes == 200 * num_lent
        assert busy_s - less_s == pytest.approx(200 * num_lent / hardware.ssd_read_bytes_per_s)
