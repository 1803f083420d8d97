"""Slots for generation share the device's memory."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hf_lohan.costs import BlockShape, BudgetError, KeysAndValues, SizeClass, slots_for_generation, token_traffic

LAYER, OUTER, CACHE = 100, 250, 70
NUM_LAYERS = 10


def block(name: str, size_class: SizeClass, num_bytes: int) -> BlockShape:
    return BlockShape(name=name, size_class=size_class, param_bytes=num_bytes, unit_numels=(), num_trainable_params=0)


MODEL = [
    block("embedding", SizeClass.OUTER, OUTER),
    *(block(f"layer{number}", SizeClass.LAYER, LAYER) for number in range(NUM_LAYERS)),
    block("norm", SizeClass.RESIDENT, 10),
    block("head", SizeClass.OUTER, OUTER),
]
LEAST = 2 * LAYER + OUTER + 10 + CACHE
CACHED = KeysAndValues(num_sequences=2, num_tokens=1000, num_bytes=CACHE)


def slots(gpu_memory_bytes: int) -> tuple[int, int]:
    """Return the number of layer slots, and of layers that stay."""
    chosen = slots_for_generation(MODEL, gpu_memory_bytes=gpu_memory_bytes, keys_and_values=CACHED, prefetch_blocks=2)
    return chosen.num_layer_slots, len(chosen.kept_layers)


@pytest.mark.parametrize(
    ("more_bytes", "expected"),
    [
        (0, (2, 0)),
        (LAYER - 1, (2, 0)),
        (LAYER, (3, 0)),  # the ring gets slots first
        (3 * LAYER, (5, 2)),  # embedding and head share a slot, because a second one does not fit
        (LAYER + OUTER, (3, 0)),  # embedding and head have a slot each
        (3 * LAYER + OUTER, (5, 2)),
        (7 * LAYER + OUTER, (9, 6)),
        (8 * LAYER + OUTER, (10, 10)),
        (50 * LAYER, (10, 10)),
    ],
)
def test_slots_go_to_the_ring_then_embedding_and_head_then_layers_that_stay(
    more_bytes: int, expected: tuple[int, int]
) -> None:
    assert slots(LEAST + more_bytes) == expected


def test_too_little_memory_is_refused_with_numbers() -> None:
    with pytest.raises(BudgetError) as refusal:
        slots(LEAST - 1)
    assert str(refusal.value) == (
        "gpu_memory of 529 B is too small: two layers and the embeddings or head beside them take "
        "460 B, beside keys and values of 2 sequences of 1,000 tokens (70 B); set gpu_memory to at least 530 bytes "
        "(530 B), or generate fewer tokens or sequences"
    )


def test_layers_that_stay_are_spread_and_others_are_read_for_each_token() -> None:
    chosen = slots_for_generation(
        MODEL, gpu_memory_bytes=LEAST + 5 * LAYER + OUTER, keys_and_values=CACHED, prefetch_blocks=2
    )
    kept = [int(name.removeprefix("layer")) for name in chosen.kept_layers]
    assert len(kept) == 4 and max(b - a for a, b in pairwise(kept)) <= 4
    traffic = token_traffic(MODEL, chosen, num_outer_slots=2)
    read = {record.block: record.read_bytes_per_step for record in traffic}
    assert {name for name, num_bytes in read.items() if num_bytes} == {
        f"layer{number}" for number in range(NUM_LAYERS) if number not in kept
    }
    with_one = token_traffic(MODEL, chosen, num_outer_slots=1)
    assert sum(record.read_bytes_per_step for record in with_one) == 6 * LAYER + 2 * OUTER


def test_streamed_experts_get_the_memory_that_layers_leave() -> None:
    names = [f"layer{number}.experts.{expert}" for number in range(NUM_LAYERS) for expert in range(8)]
    experts = [block(name, SizeClass.EXPERT, 40) for name in names]
    least = LEAST + 2 * 40
    chosen = slots_for_generation(
        [*MODEL, *experts], gpu_memory_bytes=least + 8 * LAYER + OUTER + 900, keys_and_values=CACHED, prefetch_blocks=2
    )
    assert (chosen.num_layer_slots, len(chosen.kept_layers), chosen.num_expert_slots) == (10, 10, 2 + 22)
    traffic = token_traffic([*MODEL, *experts], chosen, num_outer_slots=2, experts_share=0.25)
    assert sum(record.read_bytes_per_step for record in traffic) == 80 * int(0.25 * (1 - 24 / 80) * 40)
    with pytest.raises(BudgetError, match="two layers, 2 experts and the embeddings"):
        slots_for_generation([*MODEL, *experts], gpu_memory_bytes=least - 1, keys_and_values=CACHED, prefetch_blocks=2)
