"""The schedule decides the order of loads and the slots they overwrite from the experts that a pass is expected to
need.
"""

from __future__ import annotations

import random
import sys
from contextlib import nullcontext
from types import FrameType
from typing import Any, cast

import pytest
import torch
from lane_without_threads import Lane, NamedBlock
from routings import routed

import hf_lohan.experts.expert_schedule as schedule_module
import hf_lohan.experts.next_expert as next_module
import hf_lohan.weights.schedule as passes_module
from hf_lohan.costs import SizeClass
from hf_lohan.device import Event
from hf_lohan.experts.expert_schedule import Call
from hf_lohan.experts.next_expert import FarthestUse
from hf_lohan.weights import Slot


def test_all_experts_are_loaded_in_order_and_backward_reuses_experts_in_slots() -> None:
    lane = Lane(num_layers=3, num_experts=4, num_slots=5)
    for _ in range(3):
        lane.loads.clear()
        lane.training_pass([None] * 3)
        lane.ring.forget()  # a step changes all weights
        lane.schedule.foresee_pass(is_training=True)
    # Of 24 uses, five find an expert in its slot when backward begins: four of the last layer and one of the layer
    # before.
    assert len(lane.loads) == 24 - 5
    assert lane.used[-24:-12] == [f"{layer}.{e}" for layer in range(3) for e in range(4)]


def test_after_the_first_call_all_experts_are_expected() -> None:
    lane = Lane(num_layers=3, num_experts=4, num_slots=8)
    lane.begin(is_training=True)
    assert lane.loads == []
    lane.call(0, None)
    assert lane.loads == [f"{layer}.{e}" for layer in range(3) for e in range(4)][:12]
    lane.schedule.cancel_pass()


def test_the_backward_loads_exactly_its_experts() -> None:
    lane = Lane(num_layers=4, num_experts=8, num_slots=4)
    lane.begin(is_training=True)
    routing = [[1, 5], [0, 7], [2, 3], [4, 6]]
    for layer, experts in enumerate(routing):
        lane.call(layer, experts)
    lane.loads.clear()
    for layer in reversed(range(4)):
        lane.call(layer, sorted(routing[layer], reverse=True), Call.BACKWARD)
    # Experts of the last two layers are here. The others are loaded before their calls, from the last layer on.
    assert sorted(lane.loads[:2]) == ["1.0", "1.7"] and sorted(lane.loads[2:]) == ["0.1", "0.5"]
    assert lane.next.figures.num_here == 8, "each call of the backward found its experts"
    assert lane.next.figures.wrong_bytes == 0


def test_the_slot_of_the_block_needed_last_is_overwritten() -> None:
    lane = Lane(num_layers=3, num_experts=4, num_slots=3)
    lane.begin(is_training=True)
    lane.call(0, [0])
    lane.call(1, [1])
    lane.call(2, [2])  # the slots are full, 0.0 is needed last and 2.2 next
    lane.schedule.route(2, [3], num_rows=1, call=Call.FORWARD)
    lane.next.begin_call(2, lane.schedule.left)
    load = lane.next.find_load()
    assert load is not None and load.block.name == "2.3" and load.slot.block is not None
    assert load.slot.block.name == "0.0"


def test_hints_are_the_most_used_experts_of_earlier_passes() -> None:
    lane = Lane(num_layers=2, num_experts=8, num_slots=8)
    for experts in ([1, 2], [2, 3], [2, 5]):
        lane.begin(is_training=False)
        lane.call(0, [0])
        lane.call(1, experts)
        lane.schedule.end_pass()
    lane.ring.forget()
    lane.loads.clear()
    lane.schedule.foresee_pass(is_training=False)
    lane.load_all()
    assert lane.loads == ["0.0", "1.2", "1.5"], "the number of the last pass, most used first"


def test_hints_of_routers_replace_habits() -> None:
    lane = Lane(num_layers=3, num_experts=8, num_slots=4)
    lane.begin(is_training=False)
    for layer in range(3):
        lane.call(layer, [0, 1])
    lane.schedule.end_pass()
    lane.ring.forget()
    lane.begin(is_training=False)
    lane.loads.clear()
    lane.schedule.hint(1, [6, 7])
    lane.next.note_layer(1)
    lane.load_all()
    assert lane.loads == ["1.6", "1.7"], "they replace experts of the last layer"
    lane.schedule.hint(0, [5])
    lane.call(0, [0, 1])
    lane.schedule.hint(0, [4])  # too late
    lane.call(1, [6, 7])
    assert lane.next.figures.num_here == 2 + 2


def test_routed_experts_replace_hints() -> None:
    lane = Lane(num_layers=2, num_experts=8, num_slots=3)
    lane.begin(is_training=False)
    lane.call(0, [0, 1])
    lane.call(1, [2, 3, 4])
    lane.schedule.end_pass()
    lane.ring.forget()
    lane.schedule.foresee_pass(is_training=False)
    lane.load_all()  # 0.0, 0.1 and one hint for the next layer
    lane.begin(is_training=False)
    lane.loads.clear()
    lane.call(0, [6, 7])  # these were not foreseen
    assert lane.loads[:2] == ["0.6", "0.7"], "needed experts are loaded before the remaining hints"
    wrong = lane.next.figures.wrong_bytes
    assert wrong == 200, "two loads of 100 bytes were in vain"
    lane.call(1, [2, 3, 4])
    assert lane.used[-3:] != [] and set(lane.used[-3:]) == {"1.2", "1.3", "1.4"}


class Reached(Event):
    """An event that the device has reached or not."""

    def __init__(self, is_reached: bool) -> None:
        self._is_reached = is_reached

    def synchronize(self) -> None:
        raise AssertionError("a thread waited")

    def is_reached(self) -> bool:
        return self._is_reached


def test_slots_in_use_by_the_device_are_overwritten_last() -> None:
    uses = {"a": 3, "b": 5, "c": 7}
    slots = {name: Slot(torch.empty(0), SizeClass.EXPERT, cast(Any, NamedBlock(name))) for name in uses}
    farthest = FarthestUse(slots.values(), lambda block: uses[block.name])
    slots["b"].last_use, slots["c"].last_use = Reached(False), Reached(False)
    assert farthest.find_slot(before=2) is slots["a"]
    assert farthest.find_slot(before=4) is slots["c"], "the one needed last, if the device uses all candidates"
    slots["b"].last_use = Reached(True)
    assert farthest.find_slot(before=2) is slots["b"]
    assert farthest.find_slot(before=6) is slots["c"]
    slots["c"].last_use = Reached(True)
    assert farthest.find_slot(before=2) is slots["c"]
    assert farthest.find_slot(before=8) is None


def test_two_hints_are_loaded_at_a_time() -> None:
    lane = Lane(num_layers=2, num_experts=8, num_slots=6)
    lane.begin(is_training=False)
    lane.call(0, [0, 1, 2])
    lane.schedule.end_pass()
    lane.ring.forget()
    lane.schedule.foresee_pass(is_training=False)
    for _ in range(2):
        hint = lane.next.find_load()
        assert hint is not None and hint.is_hint
        lane.next.claim_slot(hint)
    assert lane.next.find_load() is None
    lane.schedule.begin_pass(is_training=False)
    lane.schedule.route(0, [5], num_rows=1, call=Call.FORWARD)
    needed = lane.next.find_load()
    assert needed is not None and needed.block.name == "0.5" and not needed.is_hint


def test_joint_micro_batches_keep_experts_that_others_may_need() -> None:
    lane = Lane(num_layers=2, num_experts=4, num_slots=4)
    lane.schedule.expect_together(2)
    lane.begin(is_training=True)
    lane.call(0, None)
    assert lane.loads == ["0.0", "0.1", "0.2", "0.3"], "the other micro-batch needs these before the next layer"
    lane.call(0, None)
    assert lane.loads[4:] == ["1.0", "1.1", "1.2", "1.3"]
    lane.call(1, None)
    lane.call(1, None)
    lane.loads.clear()
    lane.call(1, [3, 2, 1, 0], Call.BACKWARD, num_rows=40)
    assert lane.loads == []
    lane.call(1, [3, 2, 1, 0], Call.BACKWARD, num_rows=40)
    assert lane.loads == ["0.3", "0.2", "0.1", "0.0"]


def test_an_evaluation_does_not_change_the_following_backward() -> None:
    lane = Lane(num_layers=2, num_experts=4, num_slots=2)
    lane.begin(is_training=True)
    lane.call(0, [0, 1])
    lane.call(1, [2, 3])
    lane.begin(is_training=False)
    lane.call(0, [2])
    lane.call(1, [0])
    lane.schedule.end_pass()
    lane.loads.clear()
    lane.load_all()
    assert lane.loads == ["1.3", "1.2"]
    lane.call(1, [3, 2], Call.BACKWARD)
    lane.call(0, [1, 0], Call.BACKWARD)
    assert lane.used[-4:-2] == ["1.3", "1.2"] or lane.used[-4:-2] == ["1.2", "1.3"]


def test_in_generation_the_next_token_is_prefetched_before_the_pass_ends() -> None:
    lane = Lane(num_layers=3, num_experts=8, num_slots=5)
    for _ in range(2):
        lane.begin(is_training=False)
        for layer in range(2):
            lane.call(layer, [0, 1])
        lane.loads.clear()
        lane.call(2, [4, 5])  # overwritten experts are loaded again after these
        after = list(lane.loads)
        lane.schedule.end_pass()
    assert after[-1][0] in "01", "experts of the next token's first layers"
    lane.loads.clear()
    lane.load_all()
    assert lane.loads == []
    lane.begin(is_training=False)
    lane.call(0, [0, 1])
    assert lane.next.figures.wrong_bytes == 0


@pytest.mark.parametrize(("share", "rate"), [(0.125, 0.53), (0.25, 0.67), (0.5, 0.81)])
def test_in_generation_slots_keep_the_most_used_experts(share: float, rate: float) -> None:
    """Each token chooses 8 of 128 experts with chances that fall as 1 / rank. Slots have the hit rate of a cache by
    frequency, which is higher than by last use (0.37, 0.57, 0.77).
    """
    num_layers, num_tokens = 4, 200
    tokens = [routed(num_tokens, 1, 1.0, seed=layer) for layer in range(num_layers)]
    lane = Lane(num_layers, 128, int(share * num_layers * 128))
    figures = []
    for token in range(num_tokens):
        lane.begin(is_training=False)
        for layer in range(num_layers):
            lane.call(layer, tokens[layer][token])
        lane.schedule.end_pass()
        figures.append((lane.next.figures.num_used, lane.next.figures.num_here, lane.next.figures.num_loads))
    (used, here, loads), (used_at_50, here_at_50, loads_at_50) = figures[-1], figures[50]
    assert (here - here_at_50) / (used - used_at_50) == pytest.approx(rate, abs=0.03)
    assert (loads - loads_at_50) / (used - used_at_50) == pytest.approx(1 - rate, abs=0.03), "hints cost no bytes"


def test_a_canceled_pass_loads_nothing_and_a_single_layer_may_run() -> None:
    lane = Lane(num_layers=2, num_experts=4, num_slots=2)
    lane.begin(is_training=True)
    lane.call(0, [0, 1])
    lane.schedule.cancel_pass()
    lane.loads.clear()
    lane.load_all()
    assert lane.loads == []
    lane.call(1, [3])  # outside a pass
    assert lane.loads == ["1.3"]
    lane.call(1, [3, 2], Call.BACKWARD)
    assert lane.loads[1:] == ["1.2"]


@pytest.mark.parametrize("num_slots", [2, 3, 7, 40])
@pytest.mark.parametrize("seed", range(3))
def test_every_call_gets_its_experts_whatever_the_routing(num_slots: int, seed: int) -> None:
    """Passes have hints, several micro-batches, skipped layers, cancellations and evaluations."""
    rng = random.Random(seed)
    lane = Lane(num_layers=4, num_experts=6, num_slots=num_slots)
    for _ in range(60):
        is_training, together = rng.random() < 0.7, rng.choice([1, 1, 2, 3])
        lane.schedule.expect_together(together)
        lane.begin(is_training=is_training)
        routing: list[tuple[int, list[list[int]]]] = []
        for layer in range(4):
            if rng.random() < 0.1:
                continue
            calls = [rng.sample(range(6), rng.randint(1, 6)) for _ in range(rng.choice([together, 1]))]
            routing.append((layer, calls))
            for experts in calls:
                before = len(lane.used)
                lane.call(layer, experts, num_rows=rng.choice([0, 0, 100]))
                assert sorted(lane.used[before:]) == sorted(f"{layer}.{e}" for e in experts)
                if rng.random() < 0.3:
                    lane.schedule.hint(min(layer + 1, 3), rng.sample(range(6), 3))
                    lane.next.note_layer(min(layer + 1, 3))
                    lane.load_all(at_most=rng.randint(0, 3))
        if rng.random() < 0.1:
            lane.schedule.cancel_pass()
            continue
        for layer, calls in reversed(routing) if is_training else ():
            for experts in reversed(calls):
                if rng.random() < 0.5:
                    lane.call(layer, experts, Call.AGAIN)
                lane.call(layer, experts, Call.BACKWARD)
        lane.schedule.end_pass()
        if rng.random() < 0.5:
            lane.ring.forget()
        if rng.random() < 0.5:
            lane.schedule.foresee_pass(is_training=rng.random() < 0.7)
            lane.load_all(at_most=rng.randint(0, 20))


class Lines:
    """Counts the lines of these modules that run within its block."""

    def __init__(self) -> None:
        self.num = 0
        self._files = {module.__file__ for module in (schedule_module, passes_module, next_module)}

    def _note(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        self.num += event == "line"
        return self._note

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._note)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)


@pytest.mark.parametrize(
    ("routed", "share"), [(False, 0.0), (True, 0.1)], ids=["all, two slots", "eight of each layer, slots for a tenth"]
)
def test_the_work_of_a_pass_is_linear_in_its_uses(routed: bool, share: float) -> None:
    """The lines of Python per use do not grow with the number of blocks, up to 94 layers of 128 experts. Lines are
    counted at the begin of the pass and in every eighth layer.
    """

    def lines_per_use(num_layers: int) -> float:
        rng = random.Random(0)
        lane = Lane(num_layers, 128, max(2, int(share * num_layers * 128)))
        routing = [rng.sample(range(128), 8) if routed else None for _ in range(num_layers)]
        lines, num_uses = Lines(), 0
        for _ in range(2 if routed else 1):  # the second pass needs other experts than it expects
            lines.num = num_uses = 0
            with lines:
                lane.begin(is_training=True)
            calls = [(layer, Call.FORWARD) for layer in range(num_layers)]
            for layer, call in [*calls, *((layer, Call.BACKWARD) for layer, _ in reversed(calls))]:
                num_before = len(lane.used)
                with lines if layer % 8 == 4 else nullcontext():
                    lane.call(layer, routing[layer], call)
                num_uses += (len(lane.used) - num_before) * (layer % 8 == 4)
            lane.schedule.end_pass()
            lane.ring.forget()
            routing.reverse()
        return lines.num / num_uses

    few, many = lines_per_use(12), lines_per_use(94)
    assert many < 1.5 * few, "lines per use of a model 8 times as large"
    assert many < (1500 if routed else 700), "a call of eight looks at all 128 of its layer"
