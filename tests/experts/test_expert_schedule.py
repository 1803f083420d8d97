"""What is loaded when, and what makes room for it, by what is known of the experts that a pass will need."""

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
from hf_lohan.device import Event
from hf_lohan.experts.expert_schedule import Call
from hf_lohan.experts.next_expert import FarthestUse
from hf_lohan.planner import SizeClass
from hf_lohan.weights import Slot


def test_all_experts_come_in_order_and_the_turn_around_reuses_what_is_here() -> None:
    lane = Lane(num_layers=3, num_experts=4, num_slots=5)
    for _ in range(3):
        lane.loads.clear()
        lane.training_pass([None] * 3)
        lane.ring.forget()  # a step changes all weights
        lane.schedule.foresee_pass(is_training=True)
    # 24 uses. Five of the forward's are still here for the backward: those of the last layer, and one before.
    assert len(lane.loads) == 24 - 5
    assert lane.used[-24:-12] == [f"{layer}.{e}" for layer in range(3) for e in range(4)]


def test_before_the_first_call_of_all_nothing_is_known_and_behind_it_all_is() -> None:
    lane = Lane(num_layers=3, num_experts=4, num_slots=8)
    lane.begin(is_training=True)
    assert lane.loads == []
    lane.call(0, None)
    assert lane.loads == [f"{layer}.{e}" for layer in range(3) for e in range(4)][:12]
    lane.schedule.cancel_pass()


def test_the_backward_is_known_to_the_last_expert() -> None:
    lane = Lane(num_layers=4, num_experts=8, num_slots=4)
    lane.begin(is_training=True)
    routing = [[1, 5], [0, 7], [2, 3], [4, 6]]
    for layer, experts in enumerate(routing):
        lane.call(layer, experts)
    lane.loads.clear()
    for layer in reversed(range(4)):
        lane.call(layer, sorted(routing[layer], reverse=True), Call.BACKWARD)
    # Those of the two last layers are here. The others come exactly, from the last on, ahead of their calls.
    assert sorted(lane.loads[:2]) == ["1.0", "1.7"] and sorted(lane.loads[2:]) == ["0.1", "0.5"]
    assert lane.next.figures.num_here == 8, "each call of the backward found its experts"
    assert lane.next.figures.wrong_bytes == 0


def test_a_slot_is_given_up_whose_block_is_needed_last() -> None:
    lane = Lane(num_layers=3, num_experts=4, num_slots=3)
    lane.begin(is_training=True)
    lane.call(0, [0])
    lane.call(1, [1])
    lane.call(2, [2])  # the slots are full: 0.0 is needed last, 2.2 next
    lane.schedule.route(2, [3], num_rows=1, call=Call.FORWARD)
    lane.next.begin_call(2, lane.schedule.left)
    load = lane.next.find_load()
    assert load is not None and load.block.name == "2.3" and load.slot.block is not None
    assert load.slot.block.name == "0.0"


def test_hints_are_the_experts_that_passes_before_used_most() -> None:
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
    assert lane.loads == ["0.0", "1.2", "1.5"], "as many as the last pass used, the most used first"


def test_what_somebody_looked_ahead_for_is_better_than_habit() -> None:
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
    assert lane.loads == ["1.6", "1.7"], "they take the places of the last layer's"
    lane.schedule.hint(0, [5])
    lane.call(0, [0, 1])
    lane.schedule.hint(0, [4])  # too late
    lane.call(1, [6, 7])
    assert lane.next.figures.num_here == 2 + 2


def test_what_the_router_says_takes_the_place_of_hints() -> None:
    lane = Lane(num_layers=2, num_experts=8, num_slots=3)
    lane.begin(is_training=False)
    lane.call(0, [0, 1])
    lane.call(1, [2, 3, 4])
    lane.schedule.end_pass()
    lane.ring.forget()
    lane.schedule.foresee_pass(is_training=False)
    lane.load_all()  # 0.0, 0.1 and one hint for the layer behind
    lane.begin(is_training=False)
    lane.loads.clear()
    lane.call(0, [6, 7])  # none of them was foreseen
    assert lane.loads[:2] == ["0.6", "0.7"], "what is needed goes before what is left of the hints"
    wrong = lane.next.figures.wrong_bytes
    assert wrong == 200, "two loads of 100 bytes were in vain"
    lane.call(1, [2, 3, 4])
    assert lane.used[-3:] != [] and set(lane.used[-3:]) == {"1.2", "1.3", "1.4"}


class Reached(Event):
    """By the device, or not yet."""

    def __init__(self, is_reached: bool) -> None:
        self._is_reached = is_reached

    def synchronize(self) -> None:
        raise AssertionError("nobody is to wait")

    def is_reached(self) -> bool:
        return self._is_reached


def test_slots_that_the_device_still_computes_with_are_given_up_last() -> None:
    uses = {"a": 3, "b": 5, "c": 7}
    slots = {name: Slot(torch.empty(0), SizeClass.EXPERT, cast(Any, NamedBlock(name))) for name in uses}
    farthest = FarthestUse(slots.values(), lambda block: uses[block.name])
    slots["b"].last_use, slots["c"].last_use = Reached(False), Reached(False)
    assert farthest.find_slot(before=2) is slots["a"]
    assert farthest.find_slot(before=4) is slots["c"], "the one needed last, if all that may go are computed with"
    slots["b"].last_use = Reached(True)
    assert farthest.find_slot(before=2) is slots["b"]
    assert farthest.find_slot(before=6) is slots["c"]
    slots["c"].last_use = Reached(True)
    assert farthest.find_slot(before=2) is slots["c"]
    assert farthest.find_slot(before=8) is None


def test_of_hints_two_at_a_time_are_under_way() -> None:
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


def test_micro_batches_together_keep_what_others_of_them_may_need() -> None:
    lane = Lane(num_layers=2, num_experts=4, num_slots=4)
    lane.schedule.expect_together(2)
    lane.begin(is_training=True)
    lane.call(0, None)
    assert lane.loads == ["0.0", "0.1", "0.2", "0.3"], "nothing of the next layer: the other micro-batch needs these"
    lane.call(0, None)
    assert lane.loads[4:] == ["1.0", "1.1", "1.2", "1.3"]
    lane.call(1, None)
    lane.call(1, None)
    lane.loads.clear()
    lane.call(1, [3, 2, 1, 0], Call.BACKWARD, num_rows=40)
    assert lane.loads == []
    lane.call(1, [3, 2, 1, 0], Call.BACKWARD, num_rows=40)
    assert lane.loads == ["0.3", "0.2", "0.1", "0.0"]


def test_the_backward_of_micro_batches_needs_each_as_often_as_it_was_routed() -> None:
    lane = Lane(num_layers=1, num_experts=4, num_slots=2)
    lane.schedule.expect_together(2)
    lane.begin(is_training=True)
    lane.call(0, [0, 1])
    lane.call(0, [2, 3])
    lane.call(0, [2, 3], Call.AGAIN)  # made again for its backward: does not count as that
    lane.call(0, [2, 3], Call.BACKWARD)
    lane.call(0, [1, 0], Call.AGAIN)
    lane.call(0, [1, 0], Call.BACKWARD)  # two slots, which others had filled
    assert lane.used[-2:] == ["0.1", "0.0"] or lane.used[-2:] == ["0.0", "0.1"]


def test_a_pass_without_gradients_in_between_leaves_the_backward_as_it_was() -> None:
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


def test_while_a_model_generates_the_next_token_is_foreseen_before_this_ones_pass_ends() -> None:
    lane = Lane(num_layers=3, num_experts=8, num_slots=5)
    for _ in range(2):
        lane.begin(is_training=False)
        for layer in range(2):
            lane.call(layer, [0, 1])
        lane.loads.clear()
        lane.call(2, [4, 5])  # what made room for these comes back behind them
        after = list(lane.loads)
        lane.schedule.end_pass()
    assert after[-1][0] in "01", "of the next token's first layers"
    lane.loads.clear()
    lane.load_all()
    assert lane.loads == []
    lane.begin(is_training=False)
    lane.call(0, [0, 1])
    assert lane.next.figures.wrong_bytes == 0


@pytest.mark.parametrize(("share", "rate"), [(0.125, 0.53), (0.25, 0.67), (0.5, 0.81)])
def test_slots_that_a_token_leaves_keep_what_tokens_use_most(share: float, rate: float) -> None:
    """Tokens that choose 8 of 128 experts with chances that fall as 1 / rank find as many in the slots as in a cache by
    frequency: half more than with what was used last (0.37, 0.57, 0.77)."""
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
    assert (loads - loads_at_50) / (used - used_at_50) == pytest.approx(1 - rate, abs=0.03), "and hints cost no bytes"


def test_a_layer_that_was_skipped_keeps_no_slot() -> None:
    lane = Lane(num_layers=3, num_experts=2, num_slots=2)
    for _ in range(2):
        lane.begin(is_training=False)
        lane.call(0, [0])
        lane.call(1, [0, 1])
        lane.call(2, [0, 1])
        lane.schedule.end_pass()
    lane.begin(is_training=False)
    lane.call(0, [0])
    lane.call(2, [0, 1])  # 1.0 and 1.1 were expected, and fill slots
    assert sorted(lane.used[-2:]) == ["2.0", "2.1"]


def test_what_a_step_changed_is_loaded_anew() -> None:
    lane = Lane(num_layers=2, num_experts=2, num_slots=4)
    lane.training_pass([None, None])
    lane.schedule.foresee_pass(is_training=True)
    lane.load_all()
    lane.ring.forget()
    lane.loads.clear()
    lane.load_all()
    assert lane.loads == ["0.0", "0.1", "1.0", "1.1"]


def test_a_pass_that_broke_off_needs_nothing_and_a_layer_may_run_by_itself() -> None:
    lane = Lane(num_layers=2, num_experts=4, num_slots=2)
    lane.begin(is_training=True)
    lane.call(0, [0, 1])
    lane.schedule.cancel_pass()
    lane.loads.clear()
    lane.load_all()
    assert lane.loads == []
    lane.call(1, [3])  # outside any pass
    assert lane.loads == ["1.3"]
    lane.call(1, [3, 2], Call.BACKWARD)
    assert lane.loads[1:] == ["1.2"]


@pytest.mark.parametrize("num_slots", [2, 3, 7, 40])
@pytest.mark.parametrize("seed", range(3))
def test_no_routing_leaves_a_call_without_a_slot(num_slots: int, seed: int) -> None:
    """Hints, calls of several micro-batches, skipped layers, passes broken off and in between: each call finds all."""
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
    """Counts lines of these modules that run while it is entered."""

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
def test_the_work_of_a_pass_grows_with_its_uses_alone(routed: bool, share: float) -> None:
    """94 layers of 128 experts, 12,032 blocks. Each use takes so many lines of Python, however many there are. Counted
    are those at the begin of the pass and in every eighth layer."""

    def lines_a_use(num_layers: int) -> float:
        rng = random.Random(0)
        lane = Lane(num_layers, 128, max(2, int(share * num_layers * 128)))
        routing = [rng.sample(range(128), 8) if routed else None for _ in range(num_layers)]
        lines, num_uses = Lines(), 0
        for _ in range(2 if routed else 1):  # what the second expects is not what it needs
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

    few, many = lines_a_use(12), lines_a_use(94)
    assert many < 1.5 * few, "lines for each use, of a model 8 times as large"
    assert many < (1500 if routed else 700), "a call of eight looks at all 128 of its layer"
