"""Pool plans stay within their budgets, have the required buffers, and refuse with a number that works."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_lohan.costs import BlockShape, BudgetError, PoolPlan, PoolRequest, SizeClass, plan_pools

KIB, MIB = 1024, 1024**2
MIN_CHUNK_BYTES = 64 * KIB
UNIT_NUMEL = 2048
NUM_PIPELINE_CHUNKS = 3
DECODING_BYTES_PER_CODE = 14


def shape(name: str, size_class: SizeClass, unit_numels: tuple[int, ...], frozen_numel: int = 0) -> BlockShape:
    numel = sum(unit_numels) + frozen_numel
    return BlockShape(
        name=name,
        size_class=size_class,
        param_bytes=4 * numel,
        unit_numels=unit_numels,
        num_trainable_params=2 * len(unit_numels),
    )


often = settings(max_examples=200)
unit_sectors = st.one_of(st.integers(1, 8), st.integers(1, 300))
units = st.lists(unit_sectors.map(lambda n: n * UNIT_NUMEL), min_size=1, max_size=8).map(tuple)


@st.composite
def requests(draw: st.DrawFn) -> PoolRequest:
    """Random models with budgets from exactly enough to plenty."""
    layers = draw(st.lists(units, min_size=1, max_size=6))
    outer = draw(st.lists(units, max_size=2))
    frozen = draw(st.sampled_from([0, UNIT_NUMEL, 50 * UNIT_NUMEL]))
    blocks = [shape(f"layer.{i}", SizeClass.LAYER, numels, frozen) for i, numels in enumerate(layers)]
    blocks += [shape(f"outer.{i}", SizeClass.OUTER, numels) for i, numels in enumerate(outer)]
    if draw(st.booleans()):
        blocks.append(shape("resident", SizeClass.RESIDENT, (UNIT_NUMEL,)))
    if draw(st.booleans()):
        blocks.append(shape("frozen", SizeClass.LAYER, (), 7 * UNIT_NUMEL))
    num_state_buffers_per_chunk = draw(st.sampled_from([3, 5]))
    stages_params, stages_codes = draw(st.booleans()), draw(st.booleans())
    gpu_bytes, cpu_bytes = enough(blocks, num_state_buffers_per_chunk)
    if stages_params and stages_codes:
        gpu_bytes += DECODING_BYTES_PER_CODE * MIN_CHUNK_BYTES
    return PoolRequest(
        blocks=blocks,
        gpu_memory_bytes=int(gpu_bytes * draw(st.floats(1, 4))),
        cpu_memory_bytes=int(cpu_bytes * draw(st.floats(1, 20))),
        prefetch_blocks=draw(st.integers(1, 6)),
        num_state_buffers_per_chunk=num_state_buffers_per_chunk,
        hold_gradients=draw(st.booleans()),
        halves_gradients=draw(st.booleans()),
        stages_params=stages_params,
        stages_codes=stages_codes,
    )


def enough(blocks: list[BlockShape], num_state_buffers_per_chunk: int) -> tuple[int, int]:
    """Return GPU and CPU bytes with which every plan must be possible. The GPU needs two layers, the largest outer
    block and resident blocks. The CPU needs the larger of two blocks and the smallest possible buffers: one for each
    pipeline stage and each parameter of a block.
    """
    largest = {kind: max((b.param_bytes for b in blocks if b.size_class is kind), default=0) for kind in SizeClass}
    gpu_bytes = 2 * largest[SizeClass.LAYER] + largest[SizeClass.OUTER] + largest[SizeClass.RESIDENT]
    num_chunks = max(block.num_trainable_params for block in blocks) + 1
    num_buffers = 2 + NUM_PIPELINE_CHUNKS * num_state_buffers_per_chunk + num_chunks + 2 + 2
    return gpu_bytes, max(2 * largest[SizeClass.LAYER], num_buffers * MIN_CHUNK_BYTES)


def of_class(request: PoolRequest, size_class: SizeClass) -> list[BlockShape]:
    return [block for block in request.blocks if block.size_class is size_class]


def staging_bytes(plan: PoolPlan) -> int:
    return plan.num_staging_buffers * plan.chunks_per_staging_buffer * 4 * plan.chunk_numel


@pytest.mark.parametrize("stages_params", [True, False])
def test_weights_are_staged_in_large_pieces_even_if_few_are_trained(stages_params: bool) -> None:
    """With adapters, a layer of 32 MiB has 64 KiB of trained weights."""
    layers = [shape(f"layer.{i}", SizeClass.LAYER, (8 * UNIT_NUMEL,), 8 * MIB) for i in range(4)]
    request = PoolRequest(
        blocks=layers,
        gpu_memory_bytes=128 * MIB,
        cpu_memory_bytes=256 * MIB,
        prefetch_blocks=2,
        num_state_buffers_per_chunk=3,
        hold_gradients=True,
        stages_params=stages_params,
    )
    plan = plan_pools(request)
    assert plan.buffer_bytes == 64 * KIB and plan.staging_buffer_bytes == 4 * MIB
    assert bool(plan.num_staging_buffers) == stages_params and not plan.spilled_blocks
    assert plan.cpu_pool_bytes <= request.cpu_memory_bytes
    in_little = plan_pools(replace(request, cpu_memory_bytes=72 * MIB))
    assert in_little.staging_buffer_bytes == MIB and not in_little.spilled_blocks
    trained = [replace(layer, unit_numels=(UNIT_NUMEL,) * 4096) for layer in layers]
    assert plan_pools(replace(request, blocks=trained)).chunks_per_staging_buffer == 1


@settings(max_examples=400)
@given(requests())
def test_a_plan_keeps_both_budgets_and_has_the_required_slots_and_buffers(request: PoolRequest) -> None:
    plan = plan_pools(request)
    assert plan.cpu_pool_bytes <= request.cpu_memory_bytes
    assert plan.gpu_pool_bytes <= request.gpu_memory_bytes
    num_buffers = plan.num_state_buffers + plan.num_gradient_buffers + plan.num_recall_buffers
    assert plan.cpu_pool_bytes == num_buffers * 4 * plan.chunk_numel + staging_bytes(plan)
    assert plan.chunk_numel % UNIT_NUMEL == 0  # chunks begin and end at whole sectors
    assert plan.num_staging_buffers >= (2 if request.is_staged else 0)
    assert plan.num_state_buffers == NUM_PIPELINE_CHUNKS * request.num_state_buffers_per_chunk
    assert plan.num_gradient_buffers >= 3
    for size_class in SizeClass:
        blocks = of_class(request, size_class)
        assert all(block.param_bytes <= plan.slot_bytes[size_class] for block in blocks)
        assert plan.num_slots[size_class] <= len(blocks)
    assert plan.num_slots[SizeClass.LAYER] >= min(2, len(of_class(request, SizeClass.LAYER)))
    assert plan.num_slots[SizeClass.OUTER] >= min(1, len(of_class(request, SizeClass.OUTER)))
    assert plan.num_slots[SizeClass.RESIDENT] == len(of_class(request, SizeClass.RESIDENT))
    check_gradient_buffers(request, plan)


def check_gradient_buffers(request: PoolRequest, plan: PoolPlan) -> None:
    """Three kinds of chunks need buffers while others are held or borrowed: a block's chunks that wait for each other,
    one that is arriving, and one in the pipeline."""
    chunks = {block.name: block.num_chunks(plan.chunk_numel) for block in request.blocks}
    num_held = sum(chunks[name] for name in plan.held_blocks)
    num_arriving = 2 + max(min(chunks[block.name], block.num_trainable_params + 1) for block in request.blocks)
    assert plan.num_gradient_buffers * plan.gradients_per_buffer >= num_held + max(num_arriving, 3)
    assert plan.num_arrival_buffers * plan.gradients_per_buffer >= num_arriving
    assert plan.num_gradient_buffers >= num_arriving  # float32 sums need a whole buffer each
    if not request.hold_gradients:
        assert plan.held_blocks == plan.spilled_blocks == ()
        assert plan.num_recall_buffers == 0
        return
    trainable = [name for name, num_chunks in chunks.items() if num_chunks]
    assert [*plan.held_blocks, *plan.spilled_blocks] == trainable  # gradients of the first blocks arrive last
    assert plan.gradients_per_buffer == (2 if request.halves_gradients else 1)
    assert (plan.num_recall_buffers > 0) == bool(plan.spilled_blocks or request.halves_gradients)


@often
@given(requests())
def test_twice_as_many_gradients_of_half_the_size_are_held(request: PoolRequest) -> None:
    wide, halved = (plan_pools(replace(request, halves_gradients=halves)) for halves in (False, True))
    assert halved.cpu_pool_bytes <= request.cpu_memory_bytes
    assert halved.chunk_numel == wide.chunk_numel
    chunks = {block.name: block.num_chunks(wide.chunk_numel) for block in request.blocks}
    num_wide = sum(chunks[name] for name in wide.held_blocks)
    num_halved = sum(chunks[name] for name in halved.held_blocks)
    assert halved.held_blocks[: len(wide.held_blocks)] == wide.held_blocks
    if halved.spilled_blocks:
        assert num_halved + chunks[halved.spilled_blocks[0]] > 2 * num_wide


@often
@given(requests(), st.sampled_from(["gpu_memory", "cpu_memory"]))
def test_the_minimum_that_a_refusal_names_is_enough_and_needed(request: PoolRequest, budget: str) -> None:
    other = "cpu_memory_bytes" if budget == "gpu_memory" else "gpu_memory_bytes"
    poor: dict[str, Any] = {other: 1 << 40, f"{budget}_bytes": 1}
    request = replace(request, **poor)
    with pytest.raises(BudgetError) as refused:
        plan_pools(request)
    message = str(refused.value)
    assert message.startswith(f"{budget} of 1 bytes is ")
    found = re.search(rf"set {budget} to at least (\d+)$", message)
    assert found, message
    enough_by_name: dict[str, Any] = {f"{budget}_bytes": int(found[1])}
    plan_pools(replace(request, **enough_by_name))
    if budget == "gpu_memory":
        with pytest.raises(BudgetError):
            plan_pools(replace(request, gpu_memory_bytes=int(found[1]) - 1))


@pytest.mark.parametrize("hold_gradients", [False, True])
def test_the_minimum_named_for_a_model_of_small_blocks_is_enough(hold_gradients: bool) -> None:
    """In this model the buffers take more memory than two blocks do. The first refusal must name a number that
    works."""
    blocks = [shape(f"layer.{i}", SizeClass.LAYER, (UNIT_NUMEL,)) for i in range(3)]
    request = replace(request_for(1, hold_gradients=hold_gradients), blocks=blocks, cpu_memory_bytes=1)
    with pytest.raises(BudgetError) as refused:
        plan_pools(request)
    needed = int(str(refused.value).rsplit(" ", 1)[1])
    assert plan_pools(replace(request, cpu_memory_bytes=needed)).cpu_pool_bytes <= needed


@often
@given(requests(), st.integers(0, 64 * MIB), st.integers(0, 64 * MIB))
def test_more_memory_is_never_worse(request: PoolRequest, more_gpu: int, more_cpu: int) -> None:
    plan = plan_pools(request)
    richer = plan_pools(
        replace(
            request,
            gpu_memory_bytes=request.gpu_memory_bytes + more_gpu,
            cpu_memory_bytes=request.cpu_memory_bytes + more_cpu,
        )
    )
    more_layers = richer.num_slots[SizeClass.LAYER] - plan.num_slots[SizeClass.LAYER]
    # Larger pieces of codes take more memory of the device, in which they are decoded.
    takes_larger = request.stages_codes and richer.staging_buffer_bytes > plan.staging_buffer_bytes
    assert more_layers >= 0 or takes_larger
    if more_layers == 0 and not takes_larger:  # one more layer may have replaced a second outer slot
        assert richer.num_slots[SizeClass.OUTER] >= plan.num_slots[SizeClass.OUTER]
    assert richer.chunk_numel >= plan.chunk_numel
    if richer.chunk_numel == plan.chunk_numel:
        assert len(richer.held_blocks) >= len(plan.held_blocks)
        assert richer.num_staging_buffers >= plan.num_staging_buffers


def request_for(num_layers: int, **settings: int | bool) -> PoolRequest:
    defaults = {
        "gpu_memory_bytes": 64 * MIB,
        "cpu_memory_bytes": 1 << 40,
        "prefetch_blocks": 2,
        "num_state_buffers_per_chunk": 3,
        "hold_gradients": True,
    }
    blocks = [shape(f"layer.{i}", SizeClass.LAYER, (32 * UNIT_NUMEL,) * 3) for i in range(num_layers)]
    return PoolRequest(blocks=blocks, **{**defaults, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize(("prefetch_blocks", "num_slots"), [(1, 2), (2, 3), (5, 6), (50, 8)])
def test_prefetched_blocks_have_slots(prefetch_blocks: int, num_slots: int) -> None:
    plan = plan_pools(request_for(8, prefetch_blocks=prefetch_blocks))
    assert plan.num_slots[SizeClass.LAYER] == num_slots


def test_gradients_are_spilled_only_if_they_do_not_fit() -> None:
    roomy = plan_pools(request_for(8))
    assert (len(roomy.held_blocks), roomy.spilled_blocks) == (8, ())
    tight = plan_pools(request_for(8, cpu_memory_bytes=8 * MIB))
    assert tight.held_blocks == tuple(f"layer.{i}" for i in range(len(tight.held_blocks)))
    assert 0 < len(tight.spilled_blocks) <= 8


def test_chunks_are_no_larger_than_the_largest_record_needs() -> None:
    numel = 3 * 32 * UNIT_NUMEL
    assert numel <= plan_pools(request_for(8)).chunk_numel < 2 * numel


def test_a_budget_below_two_blocks_is_refused_with_both_numbers() -> None:
    two_blocks = 2 * 4 * 96 * UNIT_NUMEL
    with pytest.raises(BudgetError, match=rf"gpu_memory of {two_blocks - 1} bytes .*\b{two_blocks}$"):
        plan_pools(request_for(8, gpu_memory_bytes=two_blocks - 1))
    with pytest.raises(BudgetError, match=rf"cpu_memory of {two_blocks - 1} bytes .*\b{two_blocks}\b"):
        plan_pools(request_for(8, cpu_memory_bytes=two_blocks - 1))


@often
@given(requests(), st.integers(2, 8))
def test_gradients_that_devices_add_stay_within_gpu_memory(request: PoolRequest, num_devices: int) -> None:
    """A refusal names a `gpu_memory` that is enough."""
    request = replace(request, num_adding_devices=num_devices)
    try:
        plan = plan_pools(request)
    except BudgetError as error:
        needed = re.search(r"set gpu_memory to at least (\d+)", str(error))
        assert needed is not None, error
        request = replace(request, gpu_memory_bytes=int(needed[1]))
        plan = plan_pools(request)
    assert plan.gpu_pool_bytes <= request.gpu_memory_bytes
    num_buffers = plan.num_arrival_buffers * plan.gradients_per_buffer + num_devices
    assert plan.unpacking_bytes >= num_buffers * plan.buffer_bytes


def test_a_refusal_names_enough_memory_for_gradients_that_devices_add() -> None:
    """With more memory chunks could be larger, and then need more than the number in the refusal."""
    request = PoolRequest(
        blocks=[shape(f"layer.{number}", SizeClass.LAYER, (300 * UNIT_NUMEL,) * 8) for number in range(3)],
        gpu_memory_bytes=MIB,
        cpu_memory_bytes=1024 * MIB,
        prefetch_blocks=1,
        num_state_buffers_per_chunk=3,
        hold_gradients=True,
        num_adding_devices=2,
    )
    with pytest.raises(BudgetError) as refused:
        plan_pools(request)
    needed = re.search(r"set gpu_memory to at least (\d+)", str(refused.value))
    assert needed is not None
    plan = plan_pools(replace(request, gpu_memory_bytes=int(needed[1])))
    assert plan.gpu_pool_bytes <= int(needed[1])


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("trained_kib", [64, 512])
def test_codes_are_decoded_within_gpu_memory(trained_kib: int, num_devices: int) -> None:
    """Decoding takes 14 bytes for each byte of a staging buffer, and a larger buffer is of no use if slots lack it."""
    units = (trained_kib * KIB // 4,) * 14
    layers = [shape(f"layer.{i}", SizeClass.LAYER, units, 16 * MIB - sum(units)) for i in range(8)]
    request = PoolRequest(
        blocks=layers,
        gpu_memory_bytes=140 * MIB,
        cpu_memory_bytes=1024 * MIB,
        prefetch_blocks=2,
        num_state_buffers_per_chunk=3,
        hold_gradients=True,
        stages_codes=True,
        num_adding_devices=num_devices,
    )
    for num_mib in (140, 150, 200, 400):
        plan = plan_pools(replace(request, gpu_memory_bytes=num_mib * MIB))
        assert plan.gpu_pool_bytes <= num_mib * MIB
        assert plan.unpacking_bytes >= DECODING_BYTES_PER_CODE * plan.staging_buffer_bytes
    ample = plan_pools(replace(request, gpu_memory_bytes=4096 * MIB))
    assert ample.staging_buffer_bytes >= 2 * MIB
