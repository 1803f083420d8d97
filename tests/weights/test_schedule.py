"""The order of loads follows from the order of uses and the number of slots."""

from __future__ import annotations

import torch
from torch import nn

from hf_lohan.costs import SizeClass
from hf_lohan.model import Block, lay_out_block
from hf_lohan.weights import LoadSchedule
from hf_lohan.weights.schedule import NEVER


def block(name: str, size_class: SizeClass = SizeClass.LAYER) -> Block:
    return lay_out_block(name, size_class, {name: nn.Parameter(torch.empty(1))})


LAYERS = [block(f"b{number}") for number in range(6)]
EMBEDDING, HEAD = block("embedding", SizeClass.OUTER), block("head", SizeClass.OUTER)
MODEL = [EMBEDDING, *LAYERS, HEAD]


def all_loads(schedule: LoadSchedule) -> str:
    order = schedule._now.order
    return " ".join(order.uses[place].name for place in order.loads)


def test_a_training_pass_loads_each_class_as_early_as_its_slots_allow() -> None:
    schedule = LoadSchedule(MODEL, {SizeClass.LAYER: 2, SizeClass.OUTER: 1, SizeClass.RESIDENT: 0})
    schedule.foresee_pass(is_training=True)
    assert all_loads(schedule) == "embedding b0 b1 head b2 b3 b4 b5 embedding b3 b2 b1 b0"


def test_a_training_pass_continues_after_an_evaluation_before_its_backward() -> None:
    schedule = LoadSchedule(LAYERS, {SizeClass.LAYER: 2, SizeClass.OUTER: 0, SizeClass.RESIDENT: 0})
    schedule.begin_pass(is_training=True)
    for used in LAYERS:
        schedule.use(used)
    schedule.begin_pass(is_training=False)
    assert schedule.next_load(lambda _block: False) == (0, LAYERS[0])
    for used in LAYERS:
        schedule.use(used)
    schedule.end_pass()
    loaded = []
    for used in reversed(LAYERS):
        load = schedule.next_load(lambda _block: False)
        loaded.append(load[1].name)
        schedule.use(used)
    assert loaded == ["b5", "b4", "b3", "b2", "b1", "b0"]
    schedule.end_pass()
    schedule.foresee_pass(is_training=False)
    assert all_loads(schedule) == "b0 b1 b2 b3 b4 b5"
    schedule.foresee_pass(is_training=True)
    assert all_loads(schedule) == "b0 b1 b2 b3 b4 b5 b3 b2 b1 b0"


def test_a_displaced_block_is_loaded_again() -> None:
    schedule = LoadSchedule(LAYERS, {SizeClass.LAYER: 2, SizeClass.OUTER: 0, SizeClass.RESIDENT: 0})
    schedule.begin_pass(is_training=False)
    here = {LAYERS[0], LAYERS[1]}
    schedule.use(LAYERS[0])
    assert schedule.next_load(here.__contains__) == (2, LAYERS[2])
    here.remove(LAYERS[1])
    schedule.note_displaced(LAYERS[1])
    assert schedule.next_load(here.__contains__) == (1, LAYERS[1])
    schedule.use(LAYERS[1])
    assert schedule.next_load(here.__contains__) == (2, LAYERS[2])


def test_skipped_uses_are_not_loaded() -> None:
    schedule = LoadSchedule(LAYERS, {SizeClass.LAYER: 2, SizeClass.OUTER: 0, SizeClass.RESIDENT: 0})
    schedule.begin_pass(is_training=False)
    schedule.use(LAYERS[3])
    assert schedule.next_use(LAYERS[2]) == NEVER
    assert schedule.next_load(lambda _block: False) == (4, LAYERS[4])


def test_a_use_does_not_cost_a_walk_over_all_blocks() -> None:
    """Experts are blocks, so there may be 12,000. A walk for each use would exceed the time limit."""
    blocks = [block(f"e{number}") for number in range(12_000)]
    schedule = LoadSchedule(blocks, {SizeClass.LAYER: 8, SizeClass.OUTER: 0, SizeClass.RESIDENT: 0})
    schedule.begin_pass(is_training=True)
    here: dict[Block, None] = {}
    for used in [*blocks, *reversed(blocks)]:
        while (load := schedule.next_load(here.__contains__)) is not None and len(here) < 8:
            here[load[1]] = None
        schedule.use(used)
        here.pop(used, None)
    schedule.end_pass()


def test_a_displaced_block_is_forgotten_when_its_pass_is_canceled() -> None:
    blocks = LAYERS
    schedule = LoadSchedule(blocks, {SizeClass.LAYER: 2, SizeClass.OUTER: 0, SizeClass.RESIDENT: 0})
    schedule.begin_pass(is_training=True)
    schedule.use(blocks[0])
    schedule.note_displaced(blocks[4])
    schedule.cancel_pass()
    assert schedule.next_load(lambda _block: False) is None
