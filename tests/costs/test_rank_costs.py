"""The costs of a step of several ranks equal sums by hand, and compute hides transfers by three laws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from decoder_shapes import (
    decoder,
    machine,
    machines,
    mixed_models,
    paper_setup,
    records_of,
    setups,
    tiny_model,
    tiny_models,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_lohan.costs import (
    BlockProfile,
    Cluster,
    Collectives,
    ExpertsProfile,
    HardwareProfile,
    ModelProfile,
    SizeClass,
    StepPrediction,
    TrainingSetup,
    all_ways,
    better_hardware,
    fastest_way,
    plan_offload,
)
from hf_lohan.costs.collectives import WAY_WITHIN_A_NODE, NodeTransport
from hf_lohan.costs.offload_plan import ClipMode
from hf_lohan.costs.step.rank_costs import RankStepCosts, step_costs
from hf_lohan.costs.step.step_costs import Choice, ResourceUse, StepCosts
from hf_lohan.planning.measured_rates import slowed

MODEL = tiny_model([(600.0, 100), (400.0, 200)])
P = 100
CLIPS = ["none", "defer", "speculate"]
F = 153e12
"""FLOP/s of an RTX 4090 in bfloat16."""


def cluster_of(num_nodes: int, num_local: int, **ways: Any) -> Cluster:
    return Cluster(num_nodes=num_nodes, num_local=num_local, collectives=replace(WAY_WITHIN_A_NODE, **ways))


def predict(
    cluster: Cluster, hardware: HardwareProfile | None = None, model: ModelProfile = MODEL, **changes: Any
) -> StepPrediction:
    own = hardware or machine(net_bytes_per_s=10.0)
    return plan_offload(model, own, paper_setup(cluster=cluster, **changes), swapped_bytes=150).prediction


@settings(max_examples=300)
@given(mixed_models, machines, setups, st.integers(0, 400), st.integers(0, 400), st.sampled_from(CLIPS))
def test_one_rank_costs_the_same_in_both_models(
    model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup, swapped: int, spilled: int, clip: ClipMode
) -> None:
    """The two cost models agree to the last digit, although they compute a step in different ways."""
    setup = replace(setup, records=records_of(model), record_cpu_bytes=2 * model.param_bytes)
    choice = Choice(*(np.array([float(value)]) for value in (swapped, min(swapped, spilled), 3, spilled // 2, 0, 0)))
    alone, ranks = (kind(model, hardware, setup) for kind in (StepCosts, RankStepCosts))
    assert isinstance(step_costs(model, hardware, setup), StepCosts)
    assert not isinstance(step_costs(model, hardware, setup), RankStepCosts)
    assert alone.step_s(choice, clip) == ranks.step_s(choice, clip)
    assert alone.busy_s(choice, clip) == ranks.busy_s(choice, clip)
    for one, other in zip(alone.phases(choice, clip), ranks.phases(choice, clip), strict=True):
        alike = ("compute_s", "h2d_bytes", "d2h_bytes", "ssd_read_bytes", "ssd_write_bytes", "updated_params")
        assert all(getattr(one.load, name) == getattr(other.load, name) for name in alike)


def test_plans_of_one_rank_have_no_fields_of_several() -> None:
    shared = machine(net_bytes_per_s=1e-6)
    shared = replace(shared, cpu=replace(shared.cpu, memory_bytes_per_s=1e-6))
    plan, same = (plan_offload(MODEL, own, paper_setup()) for own in (machine(), shared))
    assert plan.to_mapping() == same.to_mapping(), "shared resources of ranks do not count"
    assert not plan.to_mapping().keys() & {"ranks", "cluster", "tried_ways"}


def test_two_ranks_of_one_node_share_its_drives_but_not_its_links() -> None:
    one, two = predict(Cluster()), predict(cluster_of(1, 2))
    assert two.ssd_read_bytes_per_step == one.ssd_read_bytes_per_step == 200 + 200 + 1200
    assert two.ssd_write_bytes_per_step == one.ssd_write_bytes_per_step
    assert (two.forward.h2d_s, two.backward.d2h_s) == (one.forward.h2d_s, one.backward.d2h_s)
    assert two.forward.compute_s == one.forward.compute_s
    assert (two.num_tokens, two.model_flops) == (2 * one.num_tokens, 2 * one.model_flops)
    assert two.step_s == one.step_s, "drives are the limit, so two ranks have twice the tokens per second"
    spilling = [predict(cluster, activation_cpu_bytes=0) for cluster in (Cluster(), cluster_of(1, 2))]
    spilled = [p.ssd_write_bytes_per_step - one.ssd_write_bytes_per_step for p in spilling]
    assert spilled == [150, 300]


def test_each_node_stores_its_part_of_the_records() -> None:
    for num_nodes in (2, 4):
        step = predict(cluster_of(num_nodes, 1))
        assert step.ssd_read_bytes_per_step == (200 + 200 + 1200) // num_nodes
        assert step.ssd_write_bytes_per_step == 1400 // num_nodes
        assert step.backward.optimizer_s == pytest.approx(P / num_nodes / 1e9)
        assert sum(step.tier_bytes["ssd"].values()) == 1400 // num_nodes


@pytest.mark.parametrize(
    ("ways", "reads", "writes", "forward_net", "backward_net", "stored"),
    [
        ({}, 100 + 100 + 600, 700, 100, 100 + 100, 700),
        ({"backward": "ram"}, 100 + 100 + 600, 700, 100, 100, 700),
        ({"backward": "ssd"}, 100 + 200 + 600, 700 + 100, 100, 100, 800),
        ({"backward": "ram", "forward": "delta"}, 100 + 100 + 600, 700, 8, 100, 700),
        ({"backward": "ssd", "forward": "delta"}, 200 + 200 + 600, 700 + 100, 8, 100, 800),
        ({"forward": "int8", "gradients": "int4"}, 100 + 100 + 600, 700, 260, 260 + 34, 700),
    ],
)
def test_the_bytes_of_each_source_of_weights_for_backward(
    ways: dict[str, str], reads: int, writes: int, forward_net: int, backward_net: int, stored: int
) -> None:
    """Two nodes of one rank each have half of P = 100 parameters, with 2 bytes of weights and 12 of states."""
    step = predict(cluster_of(2, 1, **ways))
    assert (step.ssd_read_bytes_per_step, step.ssd_write_bytes_per_step) == (reads, writes)
    assert step.forward.net_s == pytest.approx(forward_net / 10)
    assert step.backward.net_s == pytest.approx(backward_net / 10)
    assert sum(step.tier_bytes["ssd"].values()) == stored
    assert step.tier_bytes["cpu"].get("weights", 0) == (200 if ways.get("backward") == "ram" else 0)
    assert step.ranks is not None and step.ranks.sent_bytes_per_step == forward_net + backward_net
    assert sum(step.ranks.sent_bytes.values()) == forward_net + backward_net
    # A quarter of the weights is still in slots. Of the shards that a node reads in backward, it reads three quarters.
    turned = predict(cluster_of(2, 1, **ways), turnaround_bytes=50)
    num_shards = 2 if ways.get("backward") == "ssd" else 1
    assert step.ssd_read_bytes_per_step - turned.ssd_read_bytes_per_step == num_shards * 25


@pytest.mark.parametrize(("source", "more"), [("ram", 0), ("ssd", 50)])
def test_the_bytes_of_a_copy_of_two_nodes(source: str, more: int) -> None:
    """Of P = 100 parameters each of 4 nodes has a quarter, and keeps half of those of the other two nodes."""
    step = predict(cluster_of(4, 1, backward=source, group_ranks=2))
    assert step.ssd_read_bytes_per_step == 50 + 50 + more + 300
    assert step.ssd_write_bytes_per_step == 350 + more
    assert step.forward.net_s == pytest.approx(3 * 50 / 10)
    assert step.backward.net_s == pytest.approx((50 + 50 + 3 * 50) / 10)


@pytest.mark.parametrize(("num_nodes", "num_local"), [(1, 2), (2, 1), (2, 2), (4, 2)])
def test_nodes_send_the_rows_of_a_table_and_not_the_table(num_nodes: int, num_local: int) -> None:
    """A node sends its rows to all ranks of other nodes that ask, and their owners the rows that its ranks used."""
    num_rows, width = 1000, 8
    table = BlockProfile(
        name="table",
        size_class=SizeClass.OUTER,
        num_params=num_rows * width,
        num_trainable_params=num_rows * width,
        param_bytes=2 * num_rows * width,
        flops=0.0,
    )
    by_rows = table.by_rows(num_rows, 400, MODEL.num_tokens)
    without, rows, whole = (
        predict(cluster_of(num_nodes, num_local), model=replace(MODEL, blocks=(*blocks, *MODEL.blocks)))
        for blocks in ((), (by_rows,), (table,))
    )
    assert without.ranks is not None and rows.ranks is not None and whole.ranks is not None
    more = {
        name: size - without.ranks.bytes_by_collective.get(name, 0)
        for name, size in rows.ranks.bytes_by_collective.items()
    }
    assert by_rows.rows is not None
    elsewhere = (num_nodes - 1) / num_nodes
    itemsize = 4 if num_local > 1 else MODEL.param_itemsize  # a sum of a node is float32
    of_node = num_rows * (1 - (1 - 1 / num_rows) ** (num_local * MODEL.num_tokens))
    assert more == {
        "forward_weights": 0,
        "forward_rows": round(elsewhere * num_local * by_rows.rows.loaded_bytes),
        "backward_weights": 0,
        "gradients": pytest.approx(elsewhere * (of_node * width * itemsize + num_rows / 8), abs=1),
    }
    assert (rows.ranks.sent_bytes_per_step < whole.ranks.sent_bytes_per_step) == (num_nodes > 1)
    assert rows.ranks.link_bytes.d2h - without.ranks.link_bytes.d2h == by_rows.rows.loaded_bytes


# Links between the devices of a node.


def of_transport(
    transport: NodeTransport, num_local: int, rate: float | None = None, link: str = "nvlink", **changes: Any
) -> StepPrediction:
    hardware = machine(net_bytes_per_s=10.0, gpu_link=link, gpu_link_bytes_per_s=rate)
    return predict(replace(cluster_of(1, num_local), transport=transport), hardware, **changes)


@pytest.mark.parametrize("num_local", [2, 4])
def test_devices_of_a_node_send_each_other_weights_and_gradients(num_local: int) -> None:
    """Of P = 100 parameters with 2 bytes each, 50 are in slots when the backward begins. The rates are 50 bytes/s of a
    link to RAM, and 1000 between devices."""
    host, nccl = (of_transport(word, num_local, 1000.0, turnaround_bytes=100) for word in ("host", "nccl"))
    elsewhere = (num_local - 1) / num_local
    for of_host, of_nccl, num_bytes in ((host.forward, nccl.forward, 200), (host.backward, nccl.backward, 100)):
        assert of_host.gathered_s == 0
        assert of_nccl.gathered_s == pytest.approx(elsewhere * num_bytes / 1000)
        assert of_host.h2d_s - of_nccl.h2d_s == pytest.approx(elsewhere * num_bytes / 50)
    # Each device copied its gradient to RAM. Now that of a chunk's owner copies the float32 sum.
    assert host.backward.d2h_s - nccl.backward.d2h_s == pytest.approx((200 - 400 / num_local) / 50)
    assert nccl.backward.exchanged_s == pytest.approx(elsewhere * 200 / 1000)
    assert nccl.forward.exchanged_s == host.backward.exchanged_s == 0
    moved = nccl.ranks.between_gpus
    assert (moved.h2d, moved.d2h) == (elsewhere * 300, elsewhere * 200)
    assert host.ranks.link_bytes.h2d - nccl.ranks.link_bytes.h2d == moved.h2d
    assert nccl.ranks.link_bytes.d2h == 400 // num_local and host.ranks.link_bytes.d2h == 200
    assert host.ranks.between_gpus.h2d == host.ranks.between_gpus.d2h == 0
    assert nccl.ssd_read_bytes_per_step == host.ssd_read_bytes_per_step


def test_devices_send_each_other_coded_bytes() -> None:
    """The sum of a chunk is float32, so no codec saves bytes of it on the link to RAM."""
    exact, cluster = of_transport("nccl", 2, 1000.0), cluster_of(1, 2)
    way = replace(cluster.collectives, within="int8")
    hardware = machine(net_bytes_per_s=10.0, gpu_link="nvlink", gpu_link_bytes_per_s=1000.0)
    coded = predict(replace(cluster, transport="nccl", collectives=way), hardware)
    weights, gradients = way.weight_fraction_within(2), way.gradient_fraction_within(2)
    for ours, theirs in ((coded.forward, exact.forward), (coded.backward, exact.backward)):
        assert ours.gathered_s == pytest.approx(weights * theirs.gathered_s) and ours.gathered_s > 0
        assert theirs.h2d_s - ours.h2d_s == pytest.approx((1 - weights) * 2 * P / 2 / 50)
    assert coded.backward.exchanged_s == pytest.approx(gradients * exact.backward.exchanged_s)
    assert coded.backward.d2h_s == pytest.approx(exact.backward.d2h_s)
    assert coded.ranks is not None and exact.ranks is not None
    assert coded.ranks.between_gpus.h2d == pytest.approx(weights * exact.ranks.between_gpus.h2d, abs=1)
    assert coded.ranks.link_bytes.h2d == pytest.approx(weights * exact.ranks.link_bytes.h2d, abs=1)


def test_sums_of_several_backwards_are_not_sent_between_devices() -> None:
    several = of_transport("nccl", 2, 1000.0, num_micro_batches=2)
    assert several.backward.exchanged_s == 0 and several.backward.gathered_s > 0
    assert several.backward.d2h_s == of_transport("host", 2, num_micro_batches=2).backward.d2h_s
    together = of_transport("nccl", 2, 1000.0, num_together=2)
    assert together.backward.exchanged_s == pytest.approx(4 * P / 2 / 1000), "a sum on the device is float32"
    assert of_transport("host", 2, num_together=2).backward.d2h_s == pytest.approx(4 * P / 50)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_devices_add_no_gradients_of_streamed_experts(num_nodes: int) -> None:
    """Nor do they send each other weights of experts. Sums of nodes are added in RAM."""
    experts = ExpertsProfile(
        num_experts=4, num_chosen=4, num_params=20, num_trainable_params=20, param_bytes=40, num_tokens=8
    )
    mixture = replace(MODEL, blocks=tuple(replace(block, experts=experts) for block in MODEL.blocks))
    choice = Choice(*(np.zeros(1) for _ in range(6)))

    def backward(model: ModelProfile, transport: NodeTransport) -> dict[str, float]:
        setup = paper_setup(cluster=replace(cluster_of(num_nodes, 2), transport=transport))
        load = step_costs(model, machine(net_bytes_per_s=10.0), setup).phases(choice, "none")[-1].load
        return {name: getattr(load, name).item() for name in ResourceUse.__slots__}

    host, nccl, host_experts, nccl_experts = (
        backward(model, word) for model in (MODEL, mixture) for word in ("host", "nccl")
    )
    assert nccl["gathered_bytes"] == nccl_experts["gathered_bytes"] > 0
    assert nccl["exchanged_bytes"] == nccl_experts["exchanged_bytes"] > 0
    for name, num_bytes in host_experts.items():
        assert num_bytes - host[name] == pytest.approx(nccl_experts[name] - nccl[name])
    links_bytes = 2 * sum(host[name] - nccl[name] for name in ("h2d_bytes", "d2h_bytes"))
    # Without devices, the RAM of a node has the gradients of two ranks, and the float32 sums of all parameters.
    assert host["host_bytes"] - nccl["host_bytes"] - links_bytes == pytest.approx(2 * 2 * P + 4 * P)


def test_pcie_carries_what_devices_send_each_other_in_both_directions() -> None:
    """A link to RAM that also carries the exchanges is busy for as long as without them, or longer."""
    free = {"ssd_read_bytes_per_s": 1e9, "ssd_write_bytes_per_s": 1e9, "flops_per_s": 1e9}
    setup = paper_setup(cluster=replace(cluster_of(1, 2), transport="nccl"))
    choice = Choice(*(np.zeros(1) for _ in range(6)))
    for link, rate in (("pcie", None), ("", None), ("", 50.0), ("", 51.0), ("nvlink", 50.0)):
        hardware = machine(**free, gpu_link=link, gpu_link_bytes_per_s=rate)
        costs = step_costs(MODEL, hardware, setup)
        forward, backward = (costs.lanes(phase.load) for phase in costs.phases(choice, "none"))
        is_shared = hardware.gpus_share_links
        assert is_shared == ((link, rate) not in (("", 51.0), ("nvlink", 50.0)))
        between = rate or 50.0
        assert forward["h2d"].item() == pytest.approx(100 / 50 + 100 / between)
        assert forward["d2h"].item() == pytest.approx(100 / 50 if is_shared else 0)
        assert backward["h2d"].item() == pytest.approx(100 / 50 + (200 if is_shared else 100) / between)
        assert backward["d2h"].item() == pytest.approx(200 / 50 + (200 if is_shared else 100) / between)
        assert backward["gpu_link"].item() == pytest.approx(200 / between)


@pytest.mark.parametrize(("rate", "binds"), [(1e6, "h2d"), (10.0, "gpu_link")])
def test_links_between_devices_can_be_the_bottleneck(rate: float, binds: str) -> None:
    fast = {"ssd_read_bytes_per_s": 1e9, "ssd_write_bytes_per_s": 1e9, "flops_per_s": 1e9}
    hardware = machine(**fast, gpu_link="nvlink", gpu_link_bytes_per_s=rate)
    setup = paper_setup(cluster=replace(cluster_of(1, 2), transport="nccl"), gpu_memory_bytes=10**6)
    step = plan_offload(MODEL, hardware, setup).prediction
    assert step.forward_bottleneck == binds
    assert step.forward_s == pytest.approx(100 / 50 + 100 / rate), "an exchange stands behind the copy of a shard"
    assert step.ranks.hides_from_tokens.keys() >= {"gpu_link"}
    better = better_hardware(hardware, setup)
    step_s = {what: plan_offload(MODEL, on, own).prediction.step_s for what, on, own in better}
    assert (min(step_s, key=step_s.__getitem__) == "links between GPUs twice as fast") == (binds == "gpu_link")
    assert slowed(hardware, "gpu_link", 2.0).between_gpus_bytes_per_s == rate / 2


def test_a_cpu_sends_nothing_between_devices() -> None:
    hardware = machine(net_bytes_per_s=10.0)
    cores = replace(hardware, device=replace(hardware.device, shares_cpu=True))
    host, nccl = (predict(replace(cluster_of(1, 2), transport=word), cores) for word in ("host", "nccl"))
    assert nccl == host


def test_the_network_can_be_the_bottleneck() -> None:
    fast, slow = (predict(cluster_of(2, 1), machine(net_bytes_per_s=rate)) for rate in (1e9, 0.1))
    assert fast.bottleneck != "net" and slow.bottleneck == "net"
    assert (slow.forward_s, slow.backward_s) == (100 / 0.1, 200 / 0.1)


def test_shared_ram_can_be_the_bottleneck() -> None:
    def with_ram(rate: float, num_local: int) -> StepPrediction:
        hardware = machine(link_bytes_per_s=1e9, ssd_read_bytes_per_s=1e9, ssd_write_bytes_per_s=1e9)
        own = replace(hardware, cpu=replace(hardware.cpu, memory_bytes_per_s=rate))
        return predict(cluster_of(1, num_local), own)

    two, four = with_ram(1.0, 2), with_ram(1.0, 4)
    assert two.bottleneck == four.bottleneck == "host"
    # Forward: the drives read 200 bytes. Each link copies 200 bytes down and 150 swapped bytes up.
    assert (two.forward.host_s, four.forward.host_s) == (200 + 2 * 350, 200 + 4 * 350)
    # Backward: drives read 200 + 1200 and write 1400. Each link copies 200 + 150 down and 200 of gradients up, which
    # are read and summed to 400. The optimizer reads 1200 of states and 400 of gradients, and writes 1400.
    assert two.backward.host_s == 200 + 1200 + 1400 + 2 * 550 + 2 * 200 + 400 + 1200 + 400 + 1400
    assert four.backward.host_s - two.backward.host_s == 2 * (550 + 200)
    assert with_ram(1e9, 2).bottleneck == "compute"


def test_a_step_on_shared_cores_is_longer_by_the_number_of_ranks() -> None:
    hardware = machine(ssd_read_bytes_per_s=1e9, ssd_write_bytes_per_s=1e9)
    cores = replace(hardware, device=replace(hardware.device, shares_cpu=True))
    one, two = predict(Cluster(), cores), predict(cluster_of(1, 2), cores)
    assert two.bottleneck == "compute" and two.step_s == pytest.approx(2 * one.step_s, rel=0.01)


# The three laws.


def full_recompute(cluster: Cluster, tokens: int, **rates: float) -> StepPrediction:
    """Predict a step that recomputes everything: 8 FLOPs per parameter and token."""
    num_params = 2**20
    flops = 2.0 * num_params * tokens
    model = replace(tiny_model([(flops, 1)], num_params=num_params, input_bytes=0), sequence_length=tokens)
    block = replace(model.blocks[0], flops=flops)
    model = replace(model, blocks=(block,))
    free = {"link_bytes_per_s": 1e18, "ssd_read_bytes_per_s": 1e18, "ssd_write_bytes_per_s": 1e18}
    hardware = machine(flops_per_s=F, optimizer_params_per_s=1e18, **(free | rates))
    setup = paper_setup(cluster=cluster, activations="recompute", gpu_memory_bytes=10**9)
    return plan_offload(model, hardware, setup).prediction


def hides_from(cluster: Cluster, resource: str, **rates: float) -> float:
    for tokens in (10, 10_000):
        ranks = full_recompute(cluster, tokens, **rates).ranks
        found = ranks.hides_from_tokens[resource]
    assert found is not None
    return found


def test_tokens_that_hide_the_drives_grow_with_the_ranks_of_a_node() -> None:
    rate = {"ssd_read_bytes_per_s": 6e9, "ssd_write_bytes_per_s": 6e9}
    one = full_recompute(Cluster(), 1000, **rate).ssd_hides_from_tokens
    assert one == pytest.approx(30 * F / (8 * 6e9)), (
        "per parameter, two passes move 4 bytes of weights and an update 26"
    )
    for num_local in (2, 4):
        assert hides_from(cluster_of(1, num_local), "ssd", **rate) == pytest.approx(num_local * one)
    for num_nodes in (2, 4):
        step = full_recompute(cluster_of(num_nodes, 2), 1000, **rate)
        assert step.ssd_hides_from_tokens == pytest.approx(2 * one), (
            "each node reads its part, so the total is the same"
        )
        assert step.ranks.hides_from_tokens["ssd"] == pytest.approx(step.ssd_hides_from_tokens)


def test_tokens_that_hide_a_link_are_the_same_for_each_device() -> None:
    for num_local in (2, 4):
        found = hides_from(cluster_of(1, num_local), "h2d", link_bytes_per_s=20e9)
        assert found / num_local == pytest.approx(F / (2 * 20e9))
        assert 3.8e3 < found / num_local < 3.9e3


@pytest.mark.parametrize(("gbit", "tokens"), [(1, 324e3), (2.5, 130e3), (10, 32e3), (25, 13e3)])
def test_exact_collectives_of_two_nodes_hide_from_this_many_tokens(gbit: float, tokens: float) -> None:
    """F / (4 BW) tokens per node. Weights are sent once in bfloat16, because backward has its own copy, and gradients
    in bfloat16.
    """
    rate = 0.94 * gbit / 8 * 1e9
    found = hides_from(cluster_of(2, 1, backward="ram"), "net", net_bytes_per_s=rate)
    assert found / 2 == pytest.approx(F / (4 * rate))
    assert found / 2 == pytest.approx(tokens, rel=0.03)


@pytest.mark.parametrize(
    ("ways", "num_local", "bytes_per_param"),
    [
        ({}, 1, 2 + 2 + 2),
        ({}, 2, 2 + 2 + 4),
        ({"backward": "ram", "forward": "delta"}, 1, 0.14625 + 2),
        ({"backward": "ram", "forward": "int8", "gradients": "int8"}, 2, 1.015625 + 1.03125),
    ],
)
def test_tokens_that_hide_the_network_follow_the_bytes_sent(
    ways: dict[str, str], num_local: int, bytes_per_param: float
) -> None:
    found = hides_from(cluster_of(2, num_local, **ways), "net", net_bytes_per_s=1e9)
    assert found / (2 * num_local) == pytest.approx(bytes_per_param / 2 * F / (8 * 1e9), rel=1e-3)


# The choice of a way.


def choice(link: float, *, may_round: bool = False, **changes: Any) -> tuple[Collectives, Any]:
    model = decoder(4096, 32, batch_size=16, sequence_length=1024, vocabulary=32000)
    hardware = machine(
        flops_per_s=150e12,
        link_bytes_per_s=20e9,
        ssd_read_bytes_per_s=7e9,
        ssd_write_bytes_per_s=4.2e9,
        gpu_memory_bytes=24 * 10**9,
        cpu_memory_bytes=64 * 10**9,
        net_bytes_per_s=link * 0.94e9 / 8,
    )
    setup = TrainingSetup(
        gpu_memory_bytes=20 * 10**9,
        gpu_fixed_bytes=2 * 10**9,
        cpu_memory_bytes=60 * 10**9,
        cluster=Cluster(num_nodes=2, num_local=1),
        num_together=4,
    )
    ways = all_ways() if may_round else Collectives().open_ways()
    setups = [replace(setup, cluster=replace(setup.cluster, collectives=way), **changes) for way in ways]
    plans = [plan_offload(model, hardware, setup) for setup in setups]
    index, tried_ways = fastest_way(plans)
    return ways[index], replace(plans[index], tried_ways=tried_ways)


def test_a_slow_link_needs_a_copy_and_a_fast_one_does_not() -> None:
    slow, plan = choice(1.0)
    assert (slow.forward, slow.backward, slow.gradients) == ("delta", "ram", "exact")
    assert plan.prediction.step_s < 0.6 * max(way.step_s for way in plan.tried_ways)
    fast, plan = choice(400.0)
    assert fast == WAY_WITHIN_A_NODE or fast.backward == "ram"
    assert plan.prediction.bottleneck != "net"


def test_the_copy_is_on_the_drives_if_ram_is_too_small() -> None:
    slow, plan = choice(1.0, cpu_memory_bytes=6 * 10**9)
    assert (slow.forward, slow.backward) == ("delta", "ssd")
    assert {way.fits for way in plan.tried_ways if way.collectives.backward == "ram"} == {False}


def test_rounding_is_chosen_only_if_it_is_allowed() -> None:
    exact, plan = choice(1.0)
    quantized, faster = choice(1.0, may_round=True)
    assert exact.is_exact and not quantized.is_exact
    assert faster.prediction.step_s < 0.5 * plan.prediction.step_s
    enough, _ = choice(400.0, may_round=True)
    assert enough.is_exact, "nothing is rounded if it saves no time"


@settings(max_examples=100)
@given(tiny_models)
def test_more_nodes_never_read_more_bytes_each(model: ModelProfile) -> None:
    reads = [predict(cluster_of(number, 1), model=model).ssd_read_bytes_per_step for number in (2, 3, 4)]
    assert reads == sorted(reads, reverse=True)
