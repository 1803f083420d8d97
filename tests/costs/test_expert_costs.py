"""The costs of experts that stream one by one equal sums by hand: hit experts, their loads and saved loads."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from decoder_shapes import machine, paper_setup, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from hf_lohan.costs import (
    MIN_SLOTS_TO_LEND,
    ModelProfile,
    Placement,
    PoolPlan,
    RecordTraffic,
    SizeClass,
    TrainingSetup,
    plan_offload,
)
from hf_lohan.costs.collectives import WAY_WITHIN_A_NODE, Cluster
from hf_lohan.costs.cuts import owned_experts
from hf_lohan.costs.model_profile import ExpertsProfile, expected_hits
from hf_lohan.costs.step.expert_costs import (
    MOST_STEPS_BEHIND,
    ROUTER_SYNC_S,
    ExpertCosts,
    left_out_share,
    most_loaded,
    row_traffic,
)

EXPERT_BYTES = 40
EXPERTS = ExpertsProfile(
    num_experts=16, num_chosen=2, num_params=20, num_trainable_params=20, param_bytes=EXPERT_BYTES, num_tokens=8
)
HITS = 16 * (1 - (1 - 2 / 16) ** 8)
DENSE_BYTES = 200
OUTPUT = "lohan.experts#0"


def moe_model(num_layers: int = 1, **changes: Any) -> ModelProfile:
    """Return layers with a product and with experts, whose output has 10 bytes."""
    model = tiny_model([(600.0, 100), (400.0, 10)], num_layers=num_layers)
    experts = replace(EXPERTS, **changes)

    def with_experts(block: Any) -> Any:
        product, output = block.operations
        return replace(block, experts=experts, operations=(product, replace(output, name=OUTPUT, loads_experts=True)))

    return replace(model, blocks=tuple(with_experts(block) for block in model.blocks))


def slots(number: int) -> PoolPlan:
    no_buffers = dict.fromkeys(
        ("num_staging_buffers", "num_state_buffers", "num_gradient_buffers", "num_arrival_buffers"), 0
    )
    return PoolPlan(
        chunk_numel=1,
        gradients_per_buffer=1,
        num_recall_buffers=0,
        held_blocks=(),
        spilled_blocks=(),
        slot_bytes={SizeClass.EXPERT: EXPERT_BYTES},
        num_slots={SizeClass.EXPERT: number},
        **no_buffers,
    )


def read_bytes(model: ModelProfile, setup: TrainingSetup) -> float:
    return plan_offload(model, machine(), setup).prediction.ssd_read_bytes_per_step


def kept(**changes: Any) -> TrainingSetup:
    """Return a setup with device memory for all activations."""
    return paper_setup(gpu_memory_bytes=1000, **changes)


@given(num_experts=st.integers(1, 300), num_tokens=st.integers(1, 5000), data=st.data())
def test_expected_hits_are_between_one_token_and_all(num_experts: int, num_tokens: int, data: st.DataObject) -> None:
    num_chosen = data.draw(st.integers(1, num_experts))
    hits = expected_hits(num_experts, num_chosen, num_tokens)
    assert num_chosen * (1 - 1e-12) <= hits <= min(num_experts, num_chosen * num_tokens) * (1 + 1e-12)
    assert hits == pytest.approx(num_experts * (1 - (1 - num_chosen / num_experts) ** num_tokens))


def test_expected_hits_are_the_mean_of_drawn_ones() -> None:
    """This holds for skewed routing, too. Each token draws one expert by its chance."""
    weights = [2.0**-index for index in range(8)]
    chances = [weight / sum(weights) for weight in weights]
    draw = random.Random(0)
    means = [len(set(draw.choices(range(8), chances, k=12))) for _ in range(20_000)]
    assert expected_hits(8, 1, 12, chances) == pytest.approx(sum(means) / len(means), rel=0.01)


def test_a_histogram_gives_the_chance_of_each_expert() -> None:
    measured = EXPERTS.routed([100.0] * 4 + [0.0] * 12)
    assert measured.chances == (0.5,) * 4 + (0.0,) * 12
    assert measured.hits() == pytest.approx(4 * (1 - 0.5**8))
    assert measured.all_hit_from_tokens is None
    assert EXPERTS.routed([7.0] * 16).hits() == pytest.approx(EXPERTS.hits())
    for counts in ([1.0] * 15, [0.0] * 16, [-1.0] + [1.0] * 15):
        with pytest.raises(ValueError, match="16 counts"):
            EXPERTS.routed(counts)


def test_the_number_of_tokens_that_hit_all_experts() -> None:
    tokens = EXPERTS.all_hit_from_tokens
    assert tokens is not None
    left_out = [16 * (1 - 2 / 16) ** number for number in (tokens - 1, tokens)]
    assert left_out[0] > 0.5 >= left_out[1]


def test_a_pass_loads_hit_experts_and_an_update_all() -> None:
    """`paper_setup` reads 2P + 2P + 12P bytes. Both terms of 2P count only hit experts."""
    model = moe_model()
    assert (model.num_params, model.param_bytes) == (100 + 16 * 20, DENSE_BYTES + 16 * EXPERT_BYTES)
    expected = 2 * (DENSE_BYTES + HITS * EXPERT_BYTES) + 12 * (100 + 16 * 20)
    assert read_bytes(model, kept()) == pytest.approx(expected, abs=1)
    every = moe_model(num_tokens=10_000)
    assert read_bytes(every, kept()) == pytest.approx(2 * model.param_bytes + 12 * model.num_params, abs=1)


def test_recomputing_the_output_loads_hit_experts_again() -> None:
    made_again = read_bytes(moe_model(), paper_setup(activations="recompute", gpu_memory_bytes=1000))
    assert made_again - read_bytes(moe_model(), kept()) == pytest.approx(HITS * EXPERT_BYTES, abs=1)


def test_slots_keep_experts_for_the_turn() -> None:
    """Experts in slots at the end of forward begin the backward, and those of a recomputation begin its backward. With
    at least three slots, updates in backward borrow weights from a slot.
    """
    for number in (2, 5, 16):
        saved = min(number, HITS) * EXPERT_BYTES
        lent = HITS * EXPERT_BYTES if number >= MIN_SLOTS_TO_LEND else 0
        for activations, num_turns in (("auto", 1), ("recompute", 2)):
            setup = kept(activations=activations)
            with_slots = read_bytes(moe_model(), replace(setup, pools=slots(number)))
            assert read_bytes(moe_model(), setup) - with_slots == pytest.approx(num_turns * saved + lent, abs=1)


def test_later_micro_batches_load_only_new_experts_if_slots_hold_all_hit_ones() -> None:
    """A micro-batch hits its share of the experts that the previous one left in slots."""
    one, two = (kept(num_micro_batches=count, pools=slots(16)) for count in (1, 2))
    more = read_bytes(moe_model(), two) - read_bytes(moe_model(), one)
    assert more == pytest.approx(2 * DENSE_BYTES + HITS * EXPERT_BYTES * (1 - HITS / 16), abs=1)


def test_keeping_the_output_of_experts_is_the_best_trade() -> None:
    """The product has more FLOPs per byte but needs no load. If one output fits, it is that of the experts."""
    model = moe_model()
    product, output = model.blocks[0].operations
    dear = replace(product, flops=1e6, output_bytes=10)
    model = replace(model, blocks=(replace(model.blocks[0], operations=(dear, output)),))
    slow_drive = machine(flops_per_s=1e9, ssd_read_bytes_per_s=1.0)
    slow_device = machine(flops_per_s=1e3, ssd_read_bytes_per_s=1e9)
    room = paper_setup(gpu_memory_bytes=50 + 10, activation_cpu_bytes=0, ssd_capacity_bytes=5880)  # all for records
    for hardware, name in ((slow_drive, OUTPUT), (slow_device, dear.name)):
        placed = plan_offload(model, hardware, room).activations["layers.0"]
        assert [own for own, place in placed.items() if place is Placement.GPU] == ["input", name]


def test_experts_with_a_copy_in_ram_are_not_read() -> None:
    """Copies of half the experts save half of the reads of each pass, and no update reads them."""
    setup = kept(update_reads_param=True)
    copies = tuple(
        RecordTraffic(
            block=f"expert {number}",
            kind="param",
            num_bytes=EXPERT_BYTES,
            read_bytes_per_step=3 * EXPERT_BYTES,
            update_read_bytes=EXPERT_BYTES,
            is_expert_weight=True,
        )
        for number in range(8)
    )
    saved = read_bytes(moe_model(), setup) - read_bytes(
        moe_model(), replace(setup, records=copies, record_cpu_bytes=1000)
    )
    assert saved == pytest.approx(2 * HITS * EXPERT_BYTES / 2 + 8 * EXPERT_BYTES, abs=1)


def test_a_forward_waits_for_routers_and_first_experts() -> None:
    """Each layer adds the time of a load and of reading the routing, whatever bounds the step."""
    hardware = machine(link_bytes_per_s=1e6, ssd_read_bytes_per_s=1e3)
    waits = replace(kept(), counts_fill=True)
    model = moe_model(num_layers=3)
    with_waits, without = (plan_offload(model, hardware, s).prediction for s in (waits, kept()))
    wait_s = 3 * (ROUTER_SYNC_S + EXPERT_BYTES / 1e3 + EXPERT_BYTES / 1e6)
    assert with_waits.forward_s >= without.forward_s + wait_s
    assert with_waits.forward_s <= without.forward_s + wait_s + without.forward_s / 3


def test_lazy_updates_leave_out_experts_without_tokens() -> None:
    """Experts without tokens are updated once in several steps. Experts that are behind read their states with the
    weights in forward.
    """
    eager, lazy = (plan_offload(moe_model(), machine(), kept(lazy_experts=v)).prediction for v in (False, True))
    left_out = 16 * 20 * left_out_share(1 - HITS / 16)
    behind = HITS * 20 * (1 - HITS / 16) * 12
    assert eager.ssd_write_bytes_per_step - lazy.ssd_write_bytes_per_step == pytest.approx(14 * left_out, abs=1)
    saved = eager.ssd_read_bytes_per_step - lazy.ssd_read_bytes_per_step
    assert saved == pytest.approx(12 * left_out - behind, abs=1)


@pytest.mark.parametrize("miss_chance", [0.0, 0.1, 0.5, 0.9, 0.99, 1.0])
def test_the_share_of_left_out_steps_equals_a_simulation(miss_chance: float) -> None:
    choose, num_steps, behind, num_left_out = random.Random(0), 20_000, 0, 0
    for _ in range(num_steps):
        is_left_out = choose.random() < miss_chance and behind < MOST_STEPS_BEHIND
        behind = behind + 1 if is_left_out else 0
        num_left_out += is_left_out
    assert num_left_out / num_steps == pytest.approx(left_out_share(miss_chance), abs=0.01)


def test_experts_that_are_always_or_never_hit_never_catch_up_in_a_forward() -> None:
    model = moe_model(chances=(*[1.0] * 4, *[0.0] * 12))
    eager, lazy = (plan_offload(model, machine(), kept(lazy_experts=v)).prediction for v in (False, True))
    saved = eager.ssd_read_bytes_per_step - lazy.ssd_read_bytes_per_step
    assert saved == pytest.approx(12 * 12 * 20 * (1 - 1 / 6), abs=1)


def test_many_tokens_make_lazy_updates_equal_eager_ones() -> None:
    model = moe_model(num_tokens=4096)
    eager, lazy = (plan_offload(model, machine(), kept(lazy_experts=value)).prediction for value in (False, True))
    assert math.isclose(lazy.step_s, eager.step_s)
    assert lazy.ssd_read_bytes_per_step == eager.ssd_read_bytes_per_step


@pytest.mark.parametrize(("num_tokens", "is_lazy"), [(4, True), (16, False)])
def test_auto_makes_updates_lazy_if_a_step_leaves_out_a_fifth(num_tokens: int, is_lazy: bool) -> None:
    model = moe_model(num_tokens=num_tokens)
    experts = model.experts[0]
    assert (experts.hits() <= 0.8 * experts.num_experts) == is_lazy
    automatic, explicit = (
        plan_offload(model, machine(), kept(lazy_experts=value)).prediction.ssd_write_bytes_per_step
        for value in ("auto", is_lazy)
    )
    assert automatic == explicit


# Several ranks: each expert belongs to one of them.


@pytest.mark.parametrize(("num_ranks", "num_local"), [(2, 1), (2, 2), (4, 1), (4, 2), (3, 3)])
def test_rows_to_owners_equal_a_count_of_random_choices(num_ranks: int, num_local: int) -> None:
    """Every rank draws the experts of its tokens, and the rows that leave a rank or a node are counted."""
    num_tokens, row_bytes, draw = 4000, 100, random.Random(1)
    model = moe_model(num_layers=2, num_tokens=num_tokens, num_chosen=3)
    blocks = tuple(replace(block, input_bytes=num_tokens * row_bytes) for block in model.blocks)
    rows = choices = 0
    for layer in range(2):
        ranges = owned_experts(16, layer, num_ranks)
        for sender in range(num_ranks):
            for _ in range(num_tokens):
                chosen = draw.sample(range(16), 3)
                owners = [next(rank for rank, own in enumerate(ranges) if expert in own) for expert in chosen]
                away = [owner // num_local for owner in owners if owner // num_local != sender // num_local]
                rows, choices = rows + len(set(away)), choices + len(away)
    traffic = row_traffic(replace(model, blocks=blocks), num_ranks, num_local)
    assert traffic.row_bytes == pytest.approx(row_bytes * rows / num_ranks, rel=0.02)
    assert traffic.result_bytes == pytest.approx(row_bytes * choices / num_ranks, rel=0.02)
    assert traffic.index_bytes == pytest.approx(4 * choices / num_ranks, rel=0.02)
    assert traffic.forward_bytes == traffic.row_bytes + traffic.index_bytes + traffic.result_bytes


def test_an_owner_loads_its_experts_for_the_tokens_of_all_ranks() -> None:
    setup = paper_setup(pools=slots(2), cluster=Cluster(num_nodes=1, num_local=2, collectives=WAY_WITHIN_A_NODE))
    costs = ExpertCosts(moe_model(), machine(), setup)
    hits = 16 * (1 - (1 - 2 / 16) ** (2 * 8))
    assert costs.forward_bytes == pytest.approx(hits * EXPERT_BYTES / 2)
    assert costs.backward_bytes == pytest.approx(hits * EXPERT_BYTES / 2 - 2 * EXPERT_BYTES)
    assert costs.gradient_bytes == pytest.approx(hits * 20 * moe_model().param_itemsize / 2)


def test_a_layer_waits_for_the_rank_with_the_most_rows() -> None:
    balanced = EXPERTS
    assert most_loaded(balanced, 0, 4) == pytest.approx(1)
    hot = balanced.routed([100 if expert == 0 else 1 for expert in range(16)])
    share = (hot.chances[0] + 3 * hot.chances[1]) / sum(hot.chances)
    assert most_loaded(hot, 0, 4) == pytest.approx(4 * share)
    setup = paper_setup(cluster=Cluster(num_nodes=1, num_local=4, collectives=WAY_WITHIN_A_NODE))
    steps = [
        plan_offload(moe_model(chances=experts.chances), machine(), setup).prediction.forward.compute_s
        for experts in (balanced, hot)
    ]
    assert steps[1] - steps[0] == pytest.approx((4 * share - 1) * 400 / machine().device.flops_per_s)


def test_ranks_that_balance_rows_wait_less() -> None:
    hot = replace(EXPERTS.routed([15 if expert == 0 else 1 for expert in range(16)]), num_tokens=1000)
    assert most_loaded(hot, 0, 4) > 2
    assert 1 <= most_loaded(hot, 0, 4, num_local=4, least_rows=1) <= 1.07
    assert most_loaded(hot, 0, 4, num_local=4, least_rows=2000) == most_loaded(hot, 0, 4)
    assert most_loaded(hot, 0, 4, num_local=1, least_rows=1) == most_loaded(hot, 0, 4)
    of_two = most_loaded(hot, 0, 4, num_local=2, least_rows=1)  # the other node has only cold experts
    assert 1.07 < of_two < most_loaded(hot, 0, 4)


def test_two_nodes_send_rows_and_no_expert() -> None:
    cluster = Cluster(num_nodes=2, num_local=1, collectives=WAY_WITHIN_A_NODE)
    model = moe_model()
    prediction = plan_offload(model, machine(net_bytes_per_s=10.0), paper_setup(cluster=cluster)).prediction
    assert prediction.ranks is not None
    sent, rows = prediction.ranks.bytes_by_collective, row_traffic(model, 2, 1)
    assert sent["forward_weights"] == model.dense_param_bytes // 2
    assert sent["forward_tokens"] == round(rows.forward_bytes)
    assert sent["backward_tokens"] >= round(rows.backward_bytes)
    assert prediction.forward.net_s == pytest.approx((sent["forward_weights"] + rows.forward_bytes) / 10.0)
    assert prediction.ranks.sent_bytes == {
        "weights": sent["forward_weights"] + sent["backward_weights"],
        "gradients": sent["gradients"],
        "tokens": pytest.approx(sent["forward_tokens"] + sent["backward_tokens"], abs=1),
    }
    meets = prediction.ranks.rows_equal_weights_at_tokens
    assert meets is not None
    # Undivided, half of all experts would be sent as weights in both passes, and as gradients.
    undivided = 2 * (16 * EXPERT_BYTES // 2) + 16 * 20 // 2 * model.param_itemsize
    assert meets == pytest.approx(model.num_tokens * undivided / (sent["forward_tokens"] + sent["backward_tokens"]))


def test_ranks_send_rows_within_their_node_too() -> None:
    """Two nodes of two ranks. What a rank sends is the sum of rows to its neighbour, rows to the other node, rows that
    it passes on to its neighbour, and results."""
    model = moe_model()

    def sent_by_rank(num_nodes: int, num_local: int) -> tuple[int, Any]:
        cluster = Cluster(num_nodes=num_nodes, num_local=num_local, collectives=WAY_WITHIN_A_NODE)
        step = plan_offload(model, machine(net_bytes_per_s=10.0), paper_setup(cluster=cluster)).prediction
        assert step.ranks is not None
        return step.ranks.sent_bytes["tokens"], step.ranks.bytes_by_collective

    rows = row_traffic(model, 2)
    tokens, by_collective = sent_by_rank(1, 2)
    calls = round((tokens - rows.backward_bytes) / rows.forward_bytes)  # the backward may call experts again
    assert calls >= 1 and tokens == pytest.approx(calls * rows.forward_bytes + rows.backward_bytes, abs=1)
    assert by_collective["forward_tokens"] == 0, "no row leaves the node"
    rows, to_nodes = row_traffic(model, 4), row_traffic(model, 4, 2)
    to_neighbour = rows.to_owners() / 3
    to_owners = to_neighbour + to_nodes.to_owners() + to_neighbour
    forward_bytes = to_owners + rows.result_bytes
    backward_bytes = 2 * to_owners + rows.result_bytes + rows.index_bytes
    assert sent_by_rank(2, 2)[0] == pytest.approx(calls * forward_bytes + backward_bytes, abs=1)
