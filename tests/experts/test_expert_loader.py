"""A thread loads experts with the right weights: first those that are needed first, then hints."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest
from expert_lanes import CountingSource, ExpertLane

from hf_lohan.costs import SizeClass
from hf_lohan.experts.expert_schedule import Call

LaneFactory = Callable[..., ExpertLane]


@pytest.fixture
def make_lane() -> Iterator[LaneFactory]:
    lanes: list[ExpertLane] = []

    def make(num_layers: int, num_experts: int, num_slots: int, source: CountingSource | None = None) -> ExpertLane:
        lanes.append(ExpertLane(num_layers, num_experts, num_slots, source))
        return lanes[-1]

    yield make
    for lane in lanes:
        lane.loader.close()


def test_a_backward_computes_with_experts_that_are_here_first(make_lane: LaneFactory) -> None:
    lane = make_lane(2, 8, 4)
    lane.loader.begin_pass(is_training=True)
    lane.call(0, [1, 2, 3])
    lane.call(1, [4, 5, 6])
    lane.until_idle()
    lane.source.loads.clear()
    lane.call(1, [6, 5, 4], Call.BACKWARD)
    assert lane.source.loads == [] or set(lane.source.loads) <= {"0.1", "0.2", "0.3"}
    order = lane.call(0, [3, 2, 1], Call.BACKWARD)
    assert order[0] not in lane.source.loads[-1:], "experts that were here compute before loaded ones"
    assert lane.source.num_loads.total() == 2, "one of the three was still here from the forward"
    lane.loader.end_pass()


def test_a_foreseen_step_is_prefetched(make_lane: LaneFactory) -> None:
    lane = make_lane(2, 4, 3)
    everything = [0, 1, 2, 3]
    lane.loader.begin_pass(is_training=True)
    for layer, call in [(0, Call.FORWARD), (1, Call.FORWARD), (1, Call.BACKWARD), (0, Call.BACKWARD)]:
        lane.loader.route(layer, None, num_rows=100, call=call)
        for _ in everything:
            block, _ = lane.loader.acquire_any()
            lane.ring.unpin(block)
    lane.loader.end_pass()
    lane.ring.forget(block for layer in lane.layers for block in layer)
    lane.until_idle()
    lane.source.loads.clear()
    lane.loader.foresee_pass(is_training=True)
    lane.until_idle()
    assert lane.source.loads == ["0.0", "0.1", "0.2"]


def test_experts_that_change_during_a_wait_are_loaded_again(make_lane: LaneFactory) -> None:
    lane = make_lane(1, 4, 2)
    lane.loader.begin_pass(is_training=False)
    lane.loader.route(0, [0, 1], num_rows=2, call=Call.FORWARD)
    lane.until_idle()
    lane.ring.forget(lane.layers[0])
    got = {lane.loader.acquire_any()[0].name for _ in range(2)}
    assert got == {"0.0", "0.1"} and lane.source.num_loads == {"0.0": 2, "0.1": 2}


def test_a_single_acquired_expert_is_loaded_before_expected_ones(make_lane: LaneFactory) -> None:
    lane = make_lane(2, 4, 2)
    lane.loader.begin_pass(is_training=False)
    lane.loader.route(0, [0, 1], num_rows=2, call=Call.FORWARD)
    lane.until_idle()  # both slots have experts of the call
    slot = lane.loader.acquire(lane.layers[1][3])
    assert bool((slot.weights == 1003.0).all())
    lane.ring.unpin(lane.layers[1][3])
    assert lane.loader.num_urgent == 1
    assert {lane.loader.acquire_any()[0].name for _ in range(2)} == {"0.0", "0.1"}


def test_a_failed_load_raises_and_another_pass_may_succeed(make_lane: LaneFactory) -> None:
    broken = {"0.2"}
    lane = make_lane(1, 4, 2, CountingSource(fails=lambda block: block.name in broken))
    lane.loader.begin_pass(is_training=False)
    with pytest.raises(OSError, match=r"0\.2 cannot be read"):
        lane.call(0, [2])
    broken.clear()
    lane.loader.cancel_pass()
    lane.loader.begin_pass(is_training=False)
    assert lane.call(0, [2]) == ["0.2"]


def test_hints_are_prefetched_and_wrong_ones_only_cost_bytes(make_lane: LaneFactory) -> None:
    """The same calls run with right hints, with wrong hints and without hints. They get the same weights and differ
    only in what is loaded."""
    figures = {}
    for kind, hinted in {"right": [5, 6], "wrong": [1, 2], "none": []}.items():
        lane = make_lane(2, 8, 4)
        lane.loader.begin_pass(is_training=False)
        lane.loader.hint(1, hinted)
        lane.call(0, [0])
        lane.until_idle()
        assert [name for name in lane.source.loads if name[0] == "1"] == [f"1.{e}" for e in hinted]
        lane.call(1, [5, 6])
        lane.loader.begin_pass(is_training=True)  # no pass of this kind has run, so nothing is expected
        for layer in range(2):
            lane.call(layer, [0, 3, 4, 7])
        figures[kind] = lane.loader.figures
    expert_bytes = lane.layers[0][0].param_bytes
    assert figures["right"].wrong_bytes == figures["none"].wrong_bytes == 0
    assert figures["wrong"].wrong_bytes == 2 * expert_bytes
    assert figures["wrong"].num_loads == figures["none"].num_loads + 2
    assert figures["right"].num_here == figures["none"].num_here + 2


def test_needed_experts_overtake_hints(make_lane: LaneFactory) -> None:
    """The router chooses other experts while the first hint is read. They are loaded next."""
    gate, began = threading.Event(), threading.Event()

    def wait() -> float:
        began.set()
        gate.wait()
        return 0.0

    lane = make_lane(2, 8, 6, CountingSource(delay_s=wait))
    lane.loader.begin_pass(is_training=False)
    lane.loader.hint(0, [0, 1, 2, 3])
    assert began.wait(60)
    lane.loader.route(0, [6, 7], num_rows=2, call=Call.FORWARD)
    gate.set()
    assert {lane.loader.acquire_any()[0].name for _ in range(2)} == {"0.6", "0.7"}
    assert lane.source.loads[:3] == ["0.0", "0.6", "0.7"]


@pytest.mark.parametrize("num_steps", [40, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_slots", [2, 5])
def test_every_step_ends_with_two_slots_and_a_slow_store(
    num_slots: int, num_steps: int, make_lane: LaneFactory
) -> None:
    """Steps have random routing, hints, micro-batches, canceled passes, evaluations and changes of all weights."""
    rng = random.Random(num_slots)
    lane = make_lane(3, 6, num_slots, CountingSource(delay_s=lambda: rng.choice([0.0, 0.0, 1e-4])))

    def steps() -> None:
        for _ in range(num_steps):
            together = rng.choice([1, 2])
            with lane.loader.together(together):
                lane.loader.begin_pass(is_training=True)
            routing = [[rng.sample(range(6), rng.randint(1, 6)) for _ in range(together)] for _ in range(3)]
            for layer, calls in enumerate(routing):
                lane.loader.hint(min(layer + 1, 2), rng.sample(range(6), 3))
                for experts in calls:
                    lane.call(layer, experts, at_once=rng.randint(1, num_slots - 1))
            if rng.random() < 0.1:
                lane.loader.cancel_pass()
                continue
            if rng.random() < 0.2:
                lane.loader.begin_pass(is_training=False)
                lane.call(rng.randrange(3), rng.sample(range(6), 2))
                lane.loader.end_pass()
            for layer, calls in reversed(list(enumerate(routing))):
                for experts in reversed(calls):
                    lane.call(layer, experts, Call.AGAIN, at_once=num_slots)
                    lane.call(layer, experts, Call.BACKWARD)
            lane.loader.end_pass()
            lane.ring.forget(block for layer in lane.layers for block in layer)
            lane.loader.foresee_pass(is_training=True)

    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            steps()
        except BaseException as error:
            ended.append(error)
        else:
            ended.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60 + num_steps / 10)
    if not ended:
        slots = [(slot.block, slot.num_pins, slot.is_loading) for slot in lane.ring.slots[SizeClass.EXPERT]]
        pytest.fail(f"a step waits forever; slots: {slots}; left: {lane.loader._experts.left}")
    assert ended == [None], ended
