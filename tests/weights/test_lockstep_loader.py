"""Ranks that run the same passes carry out the same loads and get the right weights, whichever rank is slow."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import pytest
from lockstep_ranks import (
    Carried,
    Meeting,
    MeetingSource,
    Op,
    ProgramWriter,
    Weights,
    host_device,
    make_blocks,
    run_in_threads,
    run_program,
    slots_for,
)

from hf_lohan.device import Device
from hf_lohan.model import Block
from hf_lohan.testing.async_device import AsyncDevice
from hf_lohan.updates import DeliveryListener
from hf_lohan.weights import LayerLoader, LoadSchedule, LockstepLoader, Slot, SlotRing

BLOCKS = make_blocks()


class Rank:
    """The slots of a computing thread, and the loader that fills them."""

    def __init__(
        self,
        rank: int,
        meeting: Meeting,
        num_slots: tuple[int, int],
        device: Device,
        delays: random.Random | None = None,
    ) -> None:
        plan = slots_for(BLOCKS, num_layer_slots=num_slots[0], num_outer_slots=num_slots[1])
        self.ring = SlotRing(device, plan)
        self.weights = Weights(BLOCKS)
        self.source = MeetingSource(meeting, rank, self.ring, self.weights, delays)
        self.prefetcher = LockstepLoader(self.ring, self.source, BLOCKS)
        self._delays = delays

    def run(self, ops: Sequence[Op]) -> None:
        run_program(ops, BLOCKS, self.prefetcher, self.ring, self.weights, self._pause)

    def _pause(self) -> None:
        if self._delays is not None and self._delays.random() < 0.2:
            time.sleep(1e-3 * self._delays.random() ** 3)


def run_ranks(
    ops: Sequence[Op],
    num_ranks: int,
    num_slots: tuple[int, int],
    seed: int | None,
    device: Callable[[int], Device] = host_device,
) -> list[list[Carried]]:
    """Return the loads that each rank carried out. Wait until all ordered loads are done."""
    meeting = Meeting(num_ranks)
    delays = [None if seed is None else random.Random(f"{seed} {rank}") for rank in range(num_ranks)]
    ranks = [Rank(rank, meeting, num_slots, device(rank), delays[rank]) for rank in range(num_ranks)]
    try:
        run_in_threads([lambda rank=rank: rank.run(ops) for rank in ranks])
        until_s = time.monotonic() + 60
        while any(rank.prefetcher._ordered or rank.prefetcher._begun for rank in ranks):
            assert time.monotonic() < until_s, "an ordered load was not carried out"
            time.sleep(1e-3)
    finally:
        for rank in ranks:
            rank.prefetcher.close()
    return [rank.source.carried for rank in ranks]


def write(seed: int, num_slots: tuple[int, int], num_passes: int, oddity: float = 0.2) -> list[Op]:
    plan = slots_for(BLOCKS, num_layer_slots=num_slots[0], num_outer_slots=num_slots[1])
    return ProgramWriter(BLOCKS, plan, seed, oddity=oddity).write(num_passes)


SLOTS = [(2, 1), (3, 1), (2, 2), (4, 1), (6, 2)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_slots", SLOTS)
def test_the_loads_depend_only_on_the_passes(num_ranks: int, num_slots: tuple[int, int]) -> None:
    for seed in range(2):
        ops = write(seed, num_slots, num_passes=6)
        (expected,) = run_ranks(ops, 1, num_slots, seed=None)
        assert [carried.number for carried in expected] == list(range(len(expected)))
        for carried in run_ranks(ops, num_ranks, num_slots, seed):
            assert carried == expected


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(500))
def test_ranks_carry_out_the_same_loads_in_many_programs(seed: int) -> None:
    num_slots = SLOTS[seed % len(SLOTS)]
    ops = write(seed, num_slots, num_passes=10, oddity=(0.0, 0.1, 0.4)[seed % 3])
    first, second = run_ranks(ops, 2, num_slots, seed)
    assert first == second


@pytest.mark.parametrize("seed", range(10))
def test_no_copy_races_with_a_reader_of_the_slot(seed: int) -> None:
    devices: list[AsyncDevice] = []

    def device(rank: int) -> Device:
        devices.append(AsyncDevice(seed + 100 * rank, max_delay_s=1e-3))
        return devices[-1]

    num_slots = SLOTS[seed % len(SLOTS)]
    first, second = run_ranks(write(seed, num_slots, num_passes=3), 2, num_slots, seed, device)
    assert first == second
    assert sum(device.num_races for device in devices) == 0


class CountingSource:
    """A `WeightSource` that delivers at once."""

    def __init__(self, weights: Weights) -> None:
        self.num_loads = 0
        self._weights = weights

    def begin_load(self, block: Block, slot: Slot, listener: DeliveryListener) -> None:
        self.num_loads += 1
        slot.weights.fill_(self._weights.of(block))
        listener.on_delivered(None)

    def finish_loads(self) -> None:
        """All loads have ended."""


@pytest.mark.parametrize("num_slots", SLOTS)
def test_lockstep_loads_as_often_as_a_single_rank(num_slots: tuple[int, int]) -> None:
    """All passes are as foreseen, with some evaluations."""
    ops = write(1, num_slots, num_passes=40, oddity=0.0)
    assert ops.pop() == ("foresee", 1)  # no pass would use its loads
    plan = slots_for(BLOCKS, num_layer_slots=num_slots[0], num_outer_slots=num_slots[1])
    ring, weights = SlotRing(host_device(0), plan), Weights(BLOCKS)
    source = CountingSource(weights)
    alone = LayerLoader(ring, source, BLOCKS)
    try:
        run_program(ops, BLOCKS, alone, ring, weights)
    finally:
        alone.close()
    (carried,) = run_ranks(ops, 1, num_slots, seed=None)
    assert len(carried) <= 1.02 * source.num_loads


def test_the_block_that_is_updated_last_is_not_loaded_first() -> None:
    """The norm and the head have slots from the beginning. Their loads would wait for the last update and delay all
    others.
    """
    one_step = write(0, (2, 2), num_passes=1, oddity=0.0)
    (carried,) = run_ranks(one_step[:-1], 1, (2, 2), seed=None)
    in_forward = " ".join(load.block for load in carried[:9])
    assert in_forward == "embedding layer0 layer1 layer2 layer3 norm layer4 head layer5"


@pytest.mark.parametrize("num_slots", SLOTS)
def test_a_pass_carries_out_the_loads_of_its_schedule(num_slots: tuple[int, int]) -> None:
    plan = slots_for(BLOCKS, num_layer_slots=num_slots[0], num_outer_slots=num_slots[1])
    schedule = LoadSchedule(BLOCKS, plan.num_slots)
    schedule.foresee_pass(is_training=True)
    num_loads = len(schedule._now.order.loads)
    one_step = write(0, num_slots, num_passes=1, oddity=0.0)
    assert one_step[0] == ("begin", 1)
    (carried,) = run_ranks(one_step[:-1], 1, num_slots, seed=None)  # without loads for the next pass
    assert len(carried) == num_loads
    (carried,) = run_ranks(5 * one_step, 1, num_slots, seed=None)
    ahead = sum(plan.num_slots.values())
    assert len(carried) <= 5 * num_loads + ahead
