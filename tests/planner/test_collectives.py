"""What nodes send each other, in whole bytes, against ZeRO++'s formulas and the codecs themselves."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_lohan.planner import ChosenCollectives, Cluster, CollectiveChoice
from hf_lohan.planner.collectives import (
    GRADIENT_BLOCK,
    GRADIENT_SCALE_BYTES,
    WEIGHT_BLOCK,
    WEIGHT_SCALE_BYTES,
    quantized_bytes,
)

P = 2**23
M = 2 * P
"""Bytes of bfloat16 weights."""
SHAPES = [(2, 1), (2, 2), (4, 1), (4, 2), (8, 4)]


def sent(num_nodes: int, num_local: int, *, is_summed: bool = False, **ways: str) -> dict[str, int]:
    cluster = Cluster(num_nodes=num_nodes, num_local=num_local, collectives=ChosenCollectives(**ways))
    found = cluster.bytes_by_collective(
        param_bytes=M, num_params=P, num_trainable_params=P, gradient_itemsize=2, is_summed=is_summed
    )
    return dict(found)


@pytest.mark.parametrize(("num_nodes", "num_local"), SHAPES)
def test_formulas_of_one_box_and_pass(num_nodes: int, num_local: int) -> None:
    others = Fraction(num_nodes - 1, num_nodes)
    exact, quantized = sent(num_nodes, num_local), sent(num_nodes, num_local, forward="int8", gradients="int8")
    assert exact["forward_weights"] == exact["backward_weights"] == others * M
    assert exact["gradients"] == others * (2 * M if num_local > 1 else M), "sums of a node are float32"
    assert quantized["forward_weights"] == others * P * (1 + Fraction(WEIGHT_SCALE_BYTES, WEIGHT_BLOCK))
    assert quantized["gradients"] == others * P * (1 + Fraction(GRADIENT_SCALE_BYTES, GRADIENT_BLOCK))
    four_bits = sent(num_nodes, num_local, gradients="int4")["gradients"]
    assert four_bits == others * P * (Fraction(1, 2) + Fraction(GRADIENT_SCALE_BYTES, GRADIENT_BLOCK))
    for source in ("ram", "ssd"):
        assert sent(num_nodes, num_local, backward=source)["backward_weights"] == 0
    assert sent(num_nodes, 1, is_summed=True)["gradients"] == others * 2 * M, "so are those of several micro-batches"


def test_lossless_changes_are_a_fraction_of_int8() -> None:
    change = sent(2, 2, forward="delta", backward="ram")
    ratio = sent(2, 2)["forward_weights"] / change["forward_weights"]
    assert 13.5 < ratio < 13.8, "1.17 bits for 16"
    assert change["gradients"] == sent(2, 2)["gradients"]


def test_frozen_weights_do_not_change() -> None:
    def of(forward: str) -> int:
        ways = ChosenCollectives(forward=forward, backward="ram")  # type: ignore[arg-type]
        found = Cluster(num_nodes=2, num_local=1, collectives=ways).bytes_by_collective(
            param_bytes=M, num_params=P, num_trainable_params=0, gradient_itemsize=2, is_summed=False
        )
        assert found["gradients"] == 0
        return found["forward_weights"]

    assert (of("exact"), of("delta")) == (M // 2, 0)


@given(st.integers(2, 9), st.integers(1, 4), st.integers(1, 10**6), st.sampled_from(["exact", "int8"]))
def test_parts_that_are_not_equal_are_counted_as_the_largest(
    num_nodes: int, num_local: int, num_params: int, forward: str
) -> None:
    ways = ChosenCollectives(forward=forward)  # type: ignore[arg-type]
    cluster = Cluster(num_nodes=num_nodes, num_local=num_local, collectives=ways)
    found = cluster.bytes_by_collective(
        param_bytes=2 * num_params,
        num_params=num_params,
        num_trainable_params=num_params,
        gradient_itemsize=2,
        is_summed=False,
    )
    least = (num_nodes - 1) * ways.weight_bytes(2 * (num_params // num_nodes), num_params // num_nodes, 0)
    most = (num_nodes - 1) * ways.weight_bytes(2 * (num_params // num_nodes + 1), num_params // num_nodes + 1, 0)
    assert least <= found["forward_weights"] <= most
    assert all(isinstance(num_bytes, int) for num_bytes in found.values())


@pytest.mark.parametrize("num_blocks", [1, 3, 1000])
def test_messages_are_as_long_as_the_codecs_make_them(num_blocks: int) -> None:
    from hf_lohan.ranks import block_codec

    for codec, bits, block, scale_bytes in (
        (block_codec.WEIGHTS_INT8, 8, WEIGHT_BLOCK, WEIGHT_SCALE_BYTES),
        (block_codec.GRADIENTS_INT8, 8, GRADIENT_BLOCK, GRADIENT_SCALE_BYTES),
        (block_codec.GRADIENTS_INT4, 4, GRADIENT_BLOCK, GRADIENT_SCALE_BYTES),
    ):
        numel = num_blocks * block
        assert codec.message_bytes(numel) == quantized_bytes(numel, bits, block, scale_bytes)


def test_one_box_sends_nothing_and_has_one_way() -> None:
    assert set(sent(1, 4).values()) == {0}
    assert list(CollectiveChoice.parse("quantized").ways(1)) == [ChosenCollectives()]


def test_what_is_exact_comes_first_and_alone_where_nothing_else_is_asked_for() -> None:
    exact = list(CollectiveChoice().ways(2))
    assert len(exact) == 5 and all(way.is_exact for way in exact)
    ways = list(CollectiveChoice.parse("quantized").ways(2))
    assert ways[:5] == exact and not any(way.is_exact for way in ways[5:])
    assert len(ways) == 24, "no change of weights that nobody kept"
    assert list(CollectiveChoice.parse("forward=int8, backward=node, gradients=int4").ways(2)) == [
        ChosenCollectives(forward="int8", backward=source, gradients="int4") for source in ("ram", "ssd")
    ]
    assert list(CollectiveChoice.parse("backward=world").ways(2)) == [ChosenCollectives()]


@pytest.mark.parametrize("text", ["fast", "forward=int4", "upward=int8", "forward", ""])
def test_other_words_are_refused_with_those_that_are_not(text: str) -> None:
    with pytest.raises(ValueError, match=r"write exact, quantized, or some of forward=exact\|delta\|int8"):
        CollectiveChoice.parse(text)
