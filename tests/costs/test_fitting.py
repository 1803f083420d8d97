"""A plan that does not fit is refused, and each change in the refusal helps."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from decoder_shapes import GB, decoder, machine, machines, paper_setup, setups, tiny_model, tiny_models
from hypothesis import given, settings

from hf_lohan.costs import (
    BudgetError,
    Cluster,
    HardwareProfile,
    ModelProfile,
    OffloadPlan,
    TrainingSetup,
    fits_without_offloading,
    plan_offload,
    stock_training_fit,
)
from hf_lohan.costs.collectives import NodeTransport
from hf_lohan.costs.fitting import NCCL_BUFFERS_BYTES, NCCL_OWN_BYTES

MODEL = tiny_model([(600.0, 100), (400.0, 200)])


def numbers_after(words: str, plan: OffloadPlan) -> int:
    assert plan.refusal is not None
    match = re.search(rf"{words} (\d+) bytes", plan.refusal)
    assert match, plan.refusal
    return int(match.group(1))


def test_a_plan_that_fits_is_not_refused() -> None:
    plan = plan_offload(MODEL, machine(), paper_setup())
    assert plan.fits and plan.refusal is None
    plan.check()


def test_slots_larger_than_gpu_memory_are_refused() -> None:
    setup = paper_setup(gpu_memory_bytes=999, gpu_fixed_bytes=1000)
    plan = plan_offload(MODEL, machine(), setup)
    with pytest.raises(BudgetError, match="set it to at least 1000 bytes"):
        plan.check()
    assert plan_offload(MODEL, machine(), replace(setup, gpu_memory_bytes=1000)).fits


def test_buffers_larger_than_cpu_memory_are_refused() -> None:
    setup = paper_setup(cpu_memory_bytes=999, cpu_fixed_bytes=1000)
    needed = numbers_after("set cpu_memory to at least", plan_offload(MODEL, machine(), setup))
    assert plan_offload(MODEL, machine(), replace(setup, cpu_memory_bytes=needed)).fits


def test_a_plan_leaves_room_for_nccl() -> None:
    """Through RAM the same step fits without the room for NCCL. The refusal names what it takes."""
    setup = paper_setup(gpu_memory_bytes=10**6, gpu_fixed_bytes=1000, activations="recompute")

    def plan(transport: NodeTransport, num_local: int, memory_bytes: int, link: str = "pcie") -> OffloadPlan:
        cluster = Cluster(num_local=num_local, transport=transport)
        hardware = replace(machine(gpu_memory_bytes=memory_bytes), gpu_link=link)
        return plan_offload(MODEL, hardware, replace(setup, cluster=cluster))

    host = plan("host", 2, 10**9)
    for num_local, link, num_channels in ((2, "pcie", 2), (4, "pcie", 6), (4, "nvlink", 24), (2, "", 8)):
        of_nccl = NCCL_OWN_BYTES + num_channels * NCCL_BUFFERS_BYTES
        found = plan("nccl", num_local, 10**9, link)
        assert found.prediction.tier_bytes["gpu"]["nccl"] == of_nccl
        assert found.least_device_bytes == host.least_device_bytes + of_nccl
        assert plan("nccl", num_local, found.least_device_bytes, link).fits
        refused = plan("nccl", num_local, found.least_device_bytes - 1, link)
        assert refused.refusal is not None and f"{of_nccl} bytes" in refused.refusal and "NCCL" in refused.refusal
    assert plan("host", 2, host.least_device_bytes).fits
    assert "nccl" not in host.prediction.tier_bytes["gpu"]
    assert plan("nccl", 1, host.least_device_bytes).fits, "one rank has no group"


def test_a_batch_with_layers_larger_than_the_device_is_refused() -> None:
    def plan(batch_size: int) -> OffloadPlan:
        hardware = machine(gpu_memory_bytes=24 * GB, cpu_memory_bytes=600 * GB, ssd_capacity_bytes=1000 * GB)
        setup = paper_setup(gpu_memory_bytes=20 * GB, gpu_fixed_bytes=2 * GB, cpu_memory_bytes=600 * GB)
        return plan_offload(decoder(5120, 40, batch_size, 1024, 50257), hardware, setup)

    refused = plan(200)
    assert refused.refusal is not None
    batch = re.search(r"use a batch size of at most (\d+)", refused.refusal)
    assert batch, refused.refusal
    assert 64 <= int(batch.group(1)) < 200
    assert plan(int(batch.group(1))).fits


def test_kept_activations_larger_than_the_device_are_refused() -> None:
    setup = paper_setup(gpu_memory_bytes=349, activations="keep")
    needed = numbers_after("set it to at least", plan_offload(MODEL, machine(), setup))
    assert needed == 350
    assert plan_offload(MODEL, machine(), replace(setup, gpu_memory_bytes=350)).fits
    assert plan_offload(MODEL, machine(), replace(setup, activations="auto")).fits


def test_states_larger_than_the_drives_are_refused() -> None:
    plan = plan_offload(MODEL, machine(ssd_capacity_bytes=1399), paper_setup())
    assert numbers_after("give the SSDs", plan) == 1
    assert plan_offload(MODEL, machine(ssd_capacity_bytes=1400), paper_setup()).fits


def test_two_versions_larger_than_the_drives_are_refused() -> None:
    setup = paper_setup(durability="step")
    plan = plan_offload(MODEL, machine(ssd_capacity_bytes=2000), setup)
    assert plan.refusal is not None and "set durability to checkpoint" in plan.refusal
    assert numbers_after("give the SSDs", plan) == 800
    assert plan_offload(MODEL, machine(ssd_capacity_bytes=2000), replace(setup, durability="checkpoint")).fits


def test_the_limit_on_the_drives_counts_if_it_is_less() -> None:
    for limit, fits in ((1399, False), (1400, True), (10**15, True)):
        assert plan_offload(MODEL, machine(), paper_setup(ssd_capacity_bytes=limit)).fits == fits


def test_inputs_that_fit_neither_in_ram_nor_on_the_drives_are_refused() -> None:
    model = tiny_model([(600.0, 100)], num_layers=4)
    setup, hardware = paper_setup(cpu_memory_bytes=100), machine(ssd_capacity_bytes=4 * 1400 + 50)
    plan = plan_offload(model, hardware, setup)
    assert numbers_after("give the SSDs", plan) == 50
    needed = numbers_after("set cpu_memory to at least", plan)
    assert needed == 150
    assert plan_offload(model, hardware, replace(setup, cpu_memory_bytes=needed)).fits


def test_swapped_activations_never_exceed_the_drives() -> None:
    setup = paper_setup(cpu_memory_bytes=0)
    for spare_bytes, spilled in ((49, None), (50, 50), (149, 50), (150, 150), (349, 150), (350, 350)):
        hardware = machine(flops_per_s=1.0, ssd_capacity_bytes=1400 + spare_bytes)
        plan = plan_offload(MODEL, hardware, setup)
        assert plan.fits == (spilled is not None)
        assert not plan.fits or plan.prediction.spilled_bytes == spilled


@settings(max_examples=100)
@given(tiny_models, machines, setups)
def test_each_change_that_a_refusal_names_helps(
    model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup
) -> None:
    hardware = replace(hardware, ssd=(replace(hardware.ssd[0], capacity_bytes=2000),))
    plan = plan_offload(model, hardware, setup)
    if plan.refusal is None or "the SSDs'" not in plan.refusal:
        return
    missing = numbers_after("give the SSDs", plan)
    larger = replace(hardware.ssd[0], capacity_bytes=2000 + missing)
    assert plan_offload(model, replace(hardware, ssd=(larger,)), setup).fits
    too_small = replace(larger, capacity_bytes=2000 + missing - 1)
    assert not plan_offload(model, replace(hardware, ssd=(too_small,)), setup).fits
    if "set durability to checkpoint" in plan.refusal:
        assert plan_offload(model, hardware, replace(setup, durability="checkpoint")).fits
    if "set cpu_memory" in plan.refusal:
        enough = numbers_after("set cpu_memory to at least", plan)
        assert plan_offload(model, hardware, replace(setup, cpu_memory_bytes=enough)).fits


def test_a_loss_that_needs_more_than_the_device_is_refused() -> None:
    head = replace(MODEL.blocks[0], name="head", size_class=MODEL.blocks[0].size_class.OUTER, working_bytes=5000)
    model = replace(MODEL, blocks=(*MODEL.blocks, head), batch_size=4)
    setup = paper_setup(gpu_memory_bytes=2500)
    refused = plan_offload(model, machine(gpu_memory_bytes=3000), setup)
    # The head needs the input of the last layer, too.
    assert refused.refusal is not None and "the head with its logits and the loss needs 5050 bytes" in refused.refusal
    assert "use a batch size of at most 2," in refused.refusal
    enough = numbers_after("the step needs", refused)
    assert enough == 5050 + 569, "tensors, 5% that the allocator loses, and a sixteenth for workspaces"
    assert not plan_offload(model, machine(gpu_memory_bytes=enough - 1), setup).fits
    plan = plan_offload(model, machine(gpu_memory_bytes=enough), setup)
    assert plan.fits
    device = plan.prediction.tier_bytes["gpu"]
    assert device == {"slots": 0, "activations": 50, "working_set": 5000, "allocator_and_workspaces": 569}


@pytest.mark.parametrize("grows_segments", [True, False])
def test_memory_that_the_allocator_loses_is_not_planned_for_activations(grows_segments: bool) -> None:
    """The allocator loses more if segments do not grow."""
    gib = 1 << 30
    model = decoder(4096, 8, 8, 1024, 32000)
    hardware = machine(gpu_memory_bytes=6 * gib, cpu_memory_bytes=64 * gib, ssd_capacity_bytes=10**13)
    hardware = replace(hardware, device=replace(hardware.device, grows_segments=grows_segments))
    setup = paper_setup(gpu_memory_bytes=6 * gib, cpu_memory_bytes=64 * gib)
    plan = plan_offload(model, hardware, setup)
    device = plan.prediction.tier_bytes["gpu"]
    held = device["activations"] + device["working_set"]
    lost = held * (0.05 if grows_segments else 0.15)
    assert device["allocator_and_workspaces"] == pytest.approx(lost + (64 << 20), abs=2)
    assert 0.9 * 6 * gib < sum(device.values()) <= 6 * gib


def test_what_needs_not_be_offloaded_is_what_auto_trains_in_memory() -> None:
    """Both count working memory, such as logits, and the allocator's margin."""
    model = decoder(4096, 8, 8, 1024, 32000)
    for has_allocator in (False, True):
        kept = stock_training_fit(model, 10**15, 16, recomputes=False, has_allocator=has_allocator)
        for memory_bytes in (kept.needed_bytes - 1, kept.needed_bytes):
            found = fits_without_offloading(model, memory_bytes, has_allocator=has_allocator)
            expected = [
                stock_training_fit(model, memory_bytes, 16, recomputes=recomputes, has_allocator=has_allocator)
                for recomputes in (False, True)
            ]
            assert found == next((fit for fit in expected if fit.fits), expected[-1])
            assert (found.activations == "keep") == (memory_bytes == kept.needed_bytes)


@pytest.mark.parametrize(
    ("memory_bytes", "fits", "activations", "needed"),
    [(2003, True, "keep", 2003), (2002, False, "recompute", 2003), (10**6, True, "keep", 2003)],
)
def test_one_layer_fits_in_memory_without_offloading(
    memory_bytes: int, fits: bool, activations: str, needed: int
) -> None:
    found = fits_without_offloading(MODEL, memory_bytes, has_allocator=False)
    assert (found.fits, found.activations, found.needed_bytes) == (fits, activations, needed)


def test_many_layers_fit_if_they_are_recomputed() -> None:
    model = tiny_model([(600.0, 100), (400.0, 200)], num_layers=10)
    margin = 0.15  # of what the allocator loses
    recomputed_bytes = int(10 * 1600 + (10 * 50 + 300) * (1 + margin))
    recomputed = fits_without_offloading(model, recomputed_bytes, has_allocator=False)
    assert recomputed.fits and recomputed.activations == "recompute"
    kept_bytes = math.ceil(10 * (1600 + 350 * (1 + margin)))
    assert fits_without_offloading(model, kept_bytes, has_allocator=False).activations == "keep"
    assert not fits_without_offloading(model, recomputed_bytes - 1, has_allocator=False).fits
    assert not stock_training_fit(model, recomputed_bytes, 18, recomputes=True, has_allocator=False).fits
