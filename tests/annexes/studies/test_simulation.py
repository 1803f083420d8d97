"""Simulated steps follow the rules of a run, do the work of the sum of lanes, and are between its bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from decoder_shapes import decoder, machine, machines, mixed_models, paper_setup, setups, tiny_model
from hypothesis import given, settings
from test_paper_table import LOHAN_STATES, MODEL, OUR_STATES, PUBLISHED_TFLOPS, machine_with, setup

from hf_lohan.annexes.studies.simulation.lanes import NO_LANE, LaneRules, TaskGraph
from hf_lohan.annexes.studies.simulation.simulated_step import SimulatedStep, simulate_step
from hf_lohan.annexes.studies.simulation.step_tasks import StepTasks, order_loads
from hf_lohan.costs import HardwareProfile, ModelProfile, OffloadPlan, PoolPlan, SizeClass, TrainingSetup, plan_offload

PUBLISHED_AT_OTHER_BATCHES = {
    32: {1: 37.5, 2: 64.3, 3: 81.1, 6: 121.7, 12: 142.0},
    48: {1: 53.1, 2: 89.7, 3: 121.7, 6: 146.3, 12: 153.9},
}


def simulated(model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup) -> SimulatedStep:
    step = simulate_step(model, hardware, setup, plan_offload(model, hardware, setup))
    assert step is not None
    return step


# Lanes.


def test_a_lane_takes_the_most_urgent_task_and_does_not_interrupt_one() -> None:
    graph = TaskGraph()
    first = graph.add("ssd", 2.0, rank=2)
    late = graph.add("cpu", 1.0)
    write, read = graph.add("ssd", 1.0, [late], rank=2), graph.add("ssd", 1.0, [late], rank=0)
    begins, ends = graph.run(LaneRules())
    assert (begins[first], ends[first], begins[read], begins[write]) == (0.0, 2.0, 2.0, 3.0)


def test_lanes_that_share_cores_slow_each_other() -> None:
    graph = TaskGraph()
    compute, copy, drive = graph.add("compute", 3.0), graph.add("h2d", 1.0), graph.add("ssd", 1.0)
    _, ends = graph.run(LaneRules(shared=("compute", "h2d"), shared_efficiency=0.5))
    assert ends[drive] == 1.0
    assert ends[copy] == pytest.approx(4.0), "half of the cores, half of the time"
    assert ends[compute] == pytest.approx(6.0)


def test_a_task_is_skipped_if_another_has_not_ended() -> None:
    for write_s, expected in ((1.0, 7.0), (9.0, 2.0)):
        graph = TaskGraph()
        write, update = graph.add("ssd", write_s), graph.add("cpu", 2.0)
        read = graph.add("h2d", 5.0, [update])
        graph.skip_unless_ended(read, write)
        end = graph.add(NO_LANE, 0.0, [read])
        _, ends = graph.run(LaneRules())
        assert ends[end] == expected


def test_drives_and_links_that_do_both_at_once_are_slower() -> None:
    graph = TaskGraph()
    graph.add("ssd", 1.0, is_write=True)
    read = graph.add("ssd", 1.0)
    down, up = graph.add("d2h", 4.0), graph.add("h2d", 4.0)
    rules = LaneRules(opposite={"h2d": "d2h", "d2h": "h2d"}, both_ways_factor=1.5, mixed_lane="ssd", mixed_factor=2.0)
    _, ends = graph.run(rules)
    assert ends[read] == pytest.approx(3.0), "the write went first, while a read was waiting"
    assert {ends[down], ends[up]} == {4.0, 6.0}


# The order of a step.


def test_loads_wait_for_the_slot_whose_block_is_needed_last() -> None:
    names = [str(number) for number in range(5)]
    uses = [(name, SizeClass.LAYER) for name in (*names, *reversed(names))]
    loads = order_loads(uses, {SizeClass.LAYER: 3})
    # Three slots are free at once. Blocks 3 and 4 overwrite 0 and 1, which the backward needs last. It then finds 4, 3
    # and 2 in the slots, and blocks 1 and 0 overwrite 4 and 3.
    assert loads == [(0, 0), (0, 1), (0, 2), (1, 3), (2, 4), (6, 8), (7, 9)]


@settings(max_examples=150, deadline=None)
@given(mixed_models, machines, setups)
def test_the_simulation_does_the_work_that_the_sum_of_lanes_counts(
    model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup
) -> None:
    setup = replace(setup, clip_rate=0.0, spilled_gradient_bytes=0, turnaround_bytes=0)
    plan = plan_offload(model, hardware, setup)
    step = simulate_step(model, hardware, setup, plan)
    assert step is not None
    floors = plan.prediction.floor_by_resource_s
    for lane in ("compute", "d2h", "cpu"):
        # A link that is busy in both directions is slower, which the sum of lanes counts as a lane of its own.
        if lane != "d2h" or hardware.duplex_bytes_per_s is None:
            assert step.busy_s[lane] == pytest.approx(floors[lane], rel=1e-6)
    # Nothing is slower than one task after the other, nor faster than the busiest lane. Only the first step is not as
    # the others, and its work may reach into the next.
    assert step.step_s <= sum(step.busy_s.values()) * (1 + 1e-9)
    assert step.step_s >= step.busy_s["compute"] * (1 - 1e-9)
    waited_s = sum(step.waits_s.values())
    assert step.step_s == pytest.approx(step.busy_s["compute"] + waited_s, rel=1e-6)


def layers(num_layers: int, **more: Any) -> ModelProfile:
    """Layers whose forward takes 1 s, whose one product makes 100 bytes, and whose input has 50."""
    return tiny_model([(90.0, 100)], num_layers=num_layers, **{"num_params": 100, "input_bytes": 50} | more)


def test_a_step_that_nothing_delays_is_its_computing() -> None:
    fast = machine(link_bytes_per_s=1e9, ssd_read_bytes_per_s=1e9, ssd_write_bytes_per_s=1e9)
    step = simulated(layers(6), fast, paper_setup(activations="swap"))
    assert step.step_s == pytest.approx(6 * 3 * 1.0, rel=1e-3)


def test_a_step_bound_by_the_drives_takes_their_time() -> None:
    slow = machine(link_bytes_per_s=1e9, ssd_read_bytes_per_s=50.0, ssd_write_bytes_per_s=50.0)
    step = simulated(layers(6), slow, paper_setup(activations="recompute"))
    assert step.step_s == pytest.approx(step.busy_s["ssd"], rel=0.05)
    assert set(step.waits_s) <= {"weights", "updates", "gradients"}


def plan_with(model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup, **changes: Any) -> OffloadPlan:
    """Return a plan without spilled and parked gradients, with some changes."""
    plan = plan_offload(model, hardware, setup)
    prediction = replace(plan.prediction, spilled_gradient_bytes=0)
    return replace(plan, parked_share=0.0, prediction=prediction, **changes)


def first_begins(model: ModelProfile, hardware: HardwareProfile, name: str, **changes: Any) -> list[float]:
    """Return when the tasks of one name begin in the first of several steps."""
    setup = paper_setup(activations="swap")
    tasks = StepTasks(model, hardware, setup, plan_with(model, hardware, setup, **changes), 1)
    begins, _ = tasks.graph.run(LaneRules())
    return [begin for begin, own in zip(begins, tasks.graph.names, strict=True) if own == name]


def test_so_many_layers_leave_and_so_many_are_fetched_ahead() -> None:
    """Copying a layer's 150 bytes takes 2 s, and computing it 1 s. The input's 50 bytes leave after half of that."""
    model = layers(5)
    hardware = machine(link_bytes_per_s=75.0, ssd_read_bytes_per_s=1e9, ssd_write_bytes_per_s=1e9)
    weights_s = 200 / 75
    two, three = (first_begins(model, hardware, "computing", layers_leaving=number)[: 2 * 5 : 2] for number in (2, 3))
    leaving = first_begins(model, hardware, "activations to leave")
    assert leaving[0] == pytest.approx(weights_s + 0.5)
    assert leaving[1] == pytest.approx(weights_s + 0.5 + 50 / 75)
    ends = [begin + 100 / 75 for begin in leaving[1::2]]
    for layer in range(2, 5):
        assert two[layer] >= ends[layer - 2], "layer 2 waits until layer 0 has left"
    assert three[2] == pytest.approx(max(three[1] + 1.0, 3 * weights_s))
    late, early = (first_begins(model, hardware, "activations", fetch_ahead=number) for number in (1, 2))
    assert early[2] < late[2]


def test_spilled_sums_are_read_and_added_one_after_the_other() -> None:
    """Reading the sum of a layer's 200 bytes of gradients takes 1 s, and adding 100 parameters 3 s."""
    model = layers(4)
    hardware = machine(link_bytes_per_s=1e9, ssd_read_bytes_per_s=200.0, ssd_write_bytes_per_s=1e9)
    hardware = replace(hardware, cpu=replace(hardware.cpu, optimizer_params_per_s=100 * (12 / 28) / 3.0))
    spilled_bytes = model.num_trainable_params * model.param_itemsize
    setup = paper_setup(activations="recompute", num_micro_batches=2, spilled_gradient_bytes=spilled_bytes)
    tasks = StepTasks(model, hardware, setup, plan_with(model, hardware, setup), 1)
    graph = tasks.graph
    begins, ends = graph.run(LaneRules())
    numbers = [number for number, name in enumerate(graph.names) if name == "gradients"]
    reads = [n for n in numbers if graph.lanes[n] == "ssd" and graph.seconds[n] == pytest.approx(1.0)]
    adds = [n for n in numbers if graph.lanes[n] == "cpu"]
    assert len(reads) == len(adds) == 4
    for add, later in zip(adds, reads[1:], strict=False):
        assert ends[add] - begins[add] == pytest.approx(3.0)
        assert begins[later] >= ends[add]


def held_and_spilled(names: list[str]) -> PoolPlan:
    """Three buffers of gradients. The sums of the first two layers stay in them, and the others are spilled."""
    return PoolPlan(
        chunk_numel=100,
        num_staging_buffers=2,
        num_state_buffers=9,
        num_gradient_buffers=3,
        num_arrival_buffers=1,
        gradients_per_buffer=1,
        num_recall_buffers=2,
        held_blocks=tuple(names[:2]),
        spilled_blocks=tuple(names[2:]),
        slot_bytes={SizeClass.LAYER: 200},
        num_slots={SizeClass.LAYER: 3},
    )


def test_a_sum_of_gradients_that_stays_in_ram_keeps_its_buffer_for_the_whole_step() -> None:
    """Of three buffers, two have the sums of the first two layers from the first micro-batch on. In the second one, a
    gradient waits for the only other buffer until the one before it is added."""
    model = layers(4)
    hardware = machine(link_bytes_per_s=1e9, ssd_read_bytes_per_s=200.0, ssd_write_bytes_per_s=1e9)
    hardware = replace(hardware, cpu=replace(hardware.cpu, optimizer_params_per_s=100 * (12 / 28) / 3.0))
    pools = held_and_spilled([layer.name for layer in model.layers])
    setup = paper_setup(activations="recompute", num_micro_batches=2, spilled_gradient_bytes=400, pools=pools)
    for clip in ("defer", "speculate"):
        plan = plan_with(model, hardware, setup, clip=clip)
        graph = StepTasks(model, hardware, setup, plan, 1).graph
        begins, ends = graph.run(LaneRules())
        numbers = [number for number, name in enumerate(graph.names) if name == "gradients"]
        copies = [n for n in numbers if graph.lanes[n] == "d2h"]
        adds = [n for n in numbers if graph.lanes[n] == "cpu"]
        assert len(copies) == 8 and len(adds) == 2
        assert begins[copies[5]] >= ends[adds[0]] and begins[copies[6]] >= ends[adds[1]]


@pytest.mark.parametrize(("clip", "num_held"), [("none", 0), ("speculate", 0), ("defer", 2)])
def test_each_gradient_gives_its_buffer_back(clip: str, num_held: int) -> None:
    """Deferred updates of the last step come after it."""
    model, hardware = layers(4), machine()
    pools = held_and_spilled([layer.name for layer in model.layers])
    setup = paper_setup(activations="recompute", num_micro_batches=3, spilled_gradient_bytes=400, pools=pools)
    tasks = StepTasks(model, hardware, setup, plan_with(model, hardware, setup, clip=clip), 2)
    assert tasks._num_arrived == 2 * 3 * 4
    assert tasks._num_arrived - tasks._num_released == num_held


def test_a_block_is_updated_by_its_chunks() -> None:
    """A large chunk and a small one take as many buffers as two large ones."""
    model = layers(1)
    hardware, setup = machine(), paper_setup(activations="recompute")
    tasks = StepTasks(model, hardware, setup, plan_with(model, hardware, setup), 1)
    (work,) = (work for work in tasks._works if work.is_layer)
    tasks._shares.clear()
    assert tasks._chunk_shares(replace(work, num_chunks=3, last_chunk_share=0.1)) == pytest.approx([0.45, 0.45, 0.1])
    tasks._shares.clear()
    assert tasks._chunk_shares(replace(work, num_chunks=30, last_chunk_share=0.01)) == pytest.approx([1 / 8] * 8)


def test_memory_returns_to_what_is_fixed_and_counts_what_is_swapped() -> None:
    model, hardware = layers(6), machine()
    setup = paper_setup(activations="swap")
    plan = plan_offload(model, hardware, setup)
    step = simulate_step(model, hardware, setup, plan)
    assert step is not None
    ram, device = step.memory["ram"], step.memory["device"]
    assert ram.most_bytes <= plan.prediction.swapped_bytes + model.num_trainable_params * model.param_itemsize
    assert ram.most_bytes >= plan.prediction.swapped_bytes
    assert (ram.num_bytes >= -1e-6).all() and (device.num_bytes >= -1e-6).all()
    assert (ram.times_s[1:] >= ram.times_s[:-1]).all()


def test_several_ranks_have_no_simulated_step() -> None:
    model, hardware, alone = layers(2), machine(), paper_setup()
    ranks = replace(alone, cluster=replace(alone.cluster, num_local=2))
    assert simulate_step(model, hardware, ranks, plan_offload(model, hardware, ranks)) is None


def test_a_large_step_has_few_tasks() -> None:
    """Seconds of a simulation follow from the number of tasks, about 10 us each."""
    deep = decoder(8192, 80, batch_size=1, sequence_length=2048, vocabulary=128_256)
    hardware = machine_with(3)
    for num_micro_batches, most in ((1, 20_000), (32, 90_000)):
        many = setup(num_micro_batches=num_micro_batches, **OUR_STATES)
        plan = plan_with(deep, hardware, many)
        num_steps = 3 if num_micro_batches == 1 else 2
        assert len(StepTasks(deep, hardware, many, plan, num_steps).graph) < most


# The paper.


@pytest.mark.parametrize("batch_size", [32, 48, 64])
def test_published_throughput_is_predicted_as_well_as_by_the_sum_of_lanes(batch_size: int) -> None:
    published = {**PUBLISHED_AT_OTHER_BATCHES, 64: PUBLISHED_TFLOPS}[batch_size]
    model = MODEL if batch_size == 64 else decoder(5120, 40, batch_size, sequence_length=1024, vocabulary=50257)
    for states in (LOHAN_STATES, OUR_STATES):
        for num_drives, measured in published.items():
            own = setup(**states)
            plan = plan_offload(model, machine_with(num_drives), own)
            step = simulate_step(model, machine_with(num_drives), own, plan)
            assert step is not None
            tflops = plan.prediction.model_flops / step.step_s / 1e12
            off, off_by_lanes = (abs(value / measured - 1) for value in (tflops, plan.prediction.tflops))
            assert off <= off_by_lanes + 0.02
