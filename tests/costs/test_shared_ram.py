"""The gradients that fit in RAM with activations are counted by blocks, and equal a simulation by chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from decoder_shapes import machine, paper_setup, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from hf_lohan.costs import BlockGradient, Placement, plan_offload
from hf_lohan.costs.search.candidate_memory import held_beside, put_away_through

CHUNK_BYTES = 4
MODEL = tiny_model([(600.0, 100), (400.0, 200)])
blocks = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), min_size=1, max_size=8)
"""By block: the number of chunks, and the bytes of activations."""


def described(shape: list[tuple[int, int]]) -> tuple[list[BlockGradient], dict[str, int]]:
    """Return the blocks' gradients, and the bytes of activations after each block that has some."""
    gradients, put_away, so_far = [], {}, 0
    for number, (num_chunks, activation_bytes) in enumerate(shape):
        name = f"block {number}"
        gradients.append(BlockGradient(block=name, num_bytes=num_chunks * CHUNK_BYTES, num_chunks=num_chunks))
        so_far += activation_bytes
        if activation_bytes:
            put_away[name] = so_far
    return gradients, put_away


def held(shape: list[tuple[int, int]], num_held_chunks: int, ram_bytes: int) -> float:
    gradients, put_away = described(shape)
    arrays = {name: np.array([float(num_bytes)]) for name, num_bytes in put_away.items()}
    return held_beside(gradients, arrays, num_held_chunks=num_held_chunks, ram_bytes=ram_bytes).item()


@given(shape=blocks, num_held_chunks=st.integers(0, 10), ram_bytes=st.integers(0, 150))
def test_the_count_equals_a_simulation_by_chunks(
    shape: list[tuple[int, int]], num_held_chunks: int, ram_bytes: int
) -> None:
    """Chunks arrive from the last block on, as in a run. The next forward always has its room."""
    num_left, taken_bytes = num_held_chunks, 0
    lying: list[int] = []
    for number in reversed(range(len(shape))):
        behind_bytes = sum(activation_bytes for _, activation_bytes in shape[: number + 1])
        for _ in range(shape[number][0]):
            if num_left:
                num_left -= 1
            elif taken_bytes + CHUNK_BYTES + behind_bytes <= ram_bytes:
                taken_bytes += CHUNK_BYTES
                lying.append(number)
    assert taken_bytes <= held(shape, num_held_chunks, ram_bytes) < taken_bytes + CHUNK_BYTES
    for number in range(len(shape)):
        not_applied = CHUNK_BYTES * sum(other > number for other in lying)
        behind_bytes = sum(activation_bytes for _, activation_bytes in shape[: number + 1])
        assert not not_applied or behind_bytes + not_applied <= ram_bytes


@given(shape=blocks, num_held_chunks=st.integers(0, 10), ram_bytes=st.integers(0, 150), more=st.integers(0, 40))
def test_more_ram_never_holds_less(
    shape: list[tuple[int, int]], num_held_chunks: int, ram_bytes: int, more: int
) -> None:
    assert held(shape, num_held_chunks, ram_bytes) <= held(shape, num_held_chunks, ram_bytes + more)


@pytest.mark.parametrize("cpu_bytes", [0, 100, 250, 400, 1000])
def test_the_ram_of_activations_equals_their_placements(cpu_bytes: int) -> None:
    """This holds after each layer, except for outputs that fit partly."""
    setup = paper_setup(activation_cpu_bytes=cpu_bytes, activations="swap", cpu_memory_bytes=1000)
    plan = plan_offload(MODEL, machine(), setup)
    layers = MODEL.layers
    operations = {operation.name: operation.output_bytes for layer in layers for operation in layer.operations}
    kinds = [(size, [i for i, layer in enumerate(layers) if name in {o.name for o in layer.operations}])
             for name, size in operations.items()]  # fmt: skip
    swapped = np.array([[len(of_kind) for _, of_kind in kinds]])
    spilled = np.array([float(plan.prediction.spilled_bytes)])
    counted = put_away_through(layers, kinds, swapped, len(layers), spilled)
    placed = 0
    for layer in layers:
        sizes = {"input": layer.input_bytes} | {o.name: o.output_bytes for o in layer.operations}
        places = plan.activations[layer.name]
        placed += sum(size for name, size in sizes.items() if places[name] is Placement.CPU)
        assert placed <= counted[layer.name].item() <= placed + max(sizes.values())


def test_gradients_in_shared_ram_are_not_written_to_drives() -> None:
    """Gradients that fit are not written in the last backward and not read by the update. Earlier sums still are."""
    gradients = tuple(
        BlockGradient(block=block.name, num_bytes=block.num_trainable_params, num_chunks=1) for block in MODEL.blocks
    )
    all_bytes = sum(gradient.num_bytes for gradient in gradients)
    setup = paper_setup(
        clip="defer", activation_cpu_bytes=10_000, cpu_memory_bytes=20_000, spilled_gradient_bytes=all_bytes
    )
    for count in (1, 3):
        apart = replace(setup, num_micro_batches=count)
        beside = replace(apart, gradients=gradients)
        before, after = (plan_offload(MODEL, machine(), one).prediction for one in (apart, beside))
        assert (before.spilled_gradient_bytes, after.spilled_gradient_bytes) == (all_bytes, 0)
        assert before.ssd_write_bytes_per_step - after.ssd_write_bytes_per_step == all_bytes
        assert before.ssd_read_bytes_per_step - after.ssd_read_bytes_per_step == all_bytes
        assert after.tier_bytes["ssd"]["gradients"] == all_bytes  # other batches may still need this space
        in_ram = after.tier_bytes["cpu"]
        assert in_ram["activations"] + in_ram["gradients"] == max(all_bytes, in_ram["activations"])
