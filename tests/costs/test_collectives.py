"""The bytes that nodes send equal ZeRO++'s formulas and the sizes of the codecs."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_lohan.costs import Cluster, Collectives, all_ways
from hf_lohan.costs.collectives import (
    GRADIENT_FORMATS,
    WAY_WITHIN_A_NODE,
    WEIGHT_FORMAT,
    collectives_of_word,
    ways_of_ranks,
)

P = 2**23
M = 2 * P
"""Bytes of bfloat16 weights."""
WEIGHT_SCALE = Fraction(WEIGHT_FORMAT.scale_bytes, WEIGHT_FORMAT.block_numel)
GRADIENT_SCALE = Fraction(GRADIENT_FORMATS["int8"].scale_bytes, GRADIENT_FORMATS["int8"].block_numel)
SHAPES = [(2, 1), (2, 2), (4, 1), (4, 2), (8, 4)]


def sent(num_nodes: int, num_local: int, *, is_summed: bool = False, **ways: Any) -> dict[str, int]:
    cluster = Cluster(num_nodes=num_nodes, num_local=num_local, collectives=replace(WAY_WITHIN_A_NODE, **ways))
    found = cluster.bytes_by_collective(
        param_bytes=M, num_params=P, num_trainable_params=P, gradient_itemsize=2, is_summed=is_summed
    )
    return dict(found)


@pytest.mark.parametrize(("num_nodes", "num_local"), SHAPES)
def test_bytes_that_one_node_sends_in_a_pass(num_nodes: int, num_local: int) -> None:
    others = Fraction(num_nodes - 1, num_nodes)
    exact, quantized = sent(num_nodes, num_local), sent(num_nodes, num_local, forward="int8", gradients="int8")
    assert exact["forward_weights"] == exact["backward_weights"] == others * M
    assert exact["gradients"] == others * (2 * M if num_local > 1 else M), "sums of a node are float32"
    assert quantized["forward_weights"] == others * P * (1 + WEIGHT_SCALE)
    assert quantized["gradients"] == others * P * (1 + GRADIENT_SCALE)
    four_bits = sent(num_nodes, num_local, gradients="int4")["gradients"]
    assert four_bits == others * P * (Fraction(1, 2) + GRADIENT_SCALE)
    for source in ("ram", "ssd"):
        assert sent(num_nodes, num_local, backward=source)["backward_weights"] == 0
    assert sent(num_nodes, 1, is_summed=True)["gradients"] == others * 2 * M, "sums are float32"


@pytest.mark.parametrize(
    ("num_nodes", "num_local", "of_group"), [(4, 1, 2), (4, 2, 2), (8, 4, 2), (8, 1, 4), (6, 1, 3)]
)
@pytest.mark.parametrize("forward", ["exact", "int8"])
def test_a_copy_of_several_nodes_trades_ram_for_bytes_within_the_group(
    num_nodes: int, num_local: int, of_group: int, forward: str
) -> None:
    """With g of Y nodes in a group, a node sends (g - 1) / g of all weights in backward, and keeps (Y - g) / (Y g)."""
    ways: dict[str, Any] = {"forward": forward, "backward": "ram", "group_ranks": of_group * num_local}
    assert sent(num_nodes, num_local, **ways)["backward_weights"] == pytest.approx(
        M * (of_group - 1) / of_group, abs=of_group
    )
    cluster = Cluster(num_nodes=num_nodes, num_local=num_local, collectives=replace(WAY_WITHIN_A_NODE, **ways))
    assert cluster.copied_bytes(M) == pytest.approx(M * (num_nodes - of_group) / (num_nodes * of_group), abs=1)
    assert (
        sent(num_nodes, num_local, **ways)["forward_weights"]
        == sent(num_nodes, num_local, forward=forward)["forward_weights"]
    )


def test_lossless_changes_are_a_fraction_of_int8() -> None:
    change = sent(2, 2, forward="delta", backward="ram")
    ratio = sent(2, 2)["forward_weights"] / change["forward_weights"]
    assert 13.5 < ratio < 13.8, "1.17 bits for 16"
    assert change["gradients"] == sent(2, 2)["gradients"]


def test_frozen_weights_do_not_change() -> None:
    def of(forward: str) -> int:
        ways = Collectives(forward=forward, backward="ram")  # type: ignore[arg-type]
        found = Cluster(num_nodes=2, num_local=1, collectives=ways).bytes_by_collective(
            param_bytes=M, num_params=P, num_trainable_params=0, gradient_itemsize=2, is_summed=False
        )
        assert found["gradients"] == 0
        return found["forward_weights"]

    assert (of("exact"), of("delta")) == (M // 2, 0)


@given(st.integers(2, 9), st.integers(1, 4), st.integers(1, 10**6), st.sampled_from(["exact", "int8"]))
def test_unequal_parts_count_like_the_largest(num_nodes: int, num_local: int, num_params: int, forward: str) -> None:
    ways = Collectives(forward=forward, backward="world")  # type: ignore[arg-type]
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


def test_one_node_sends_nothing() -> None:
    assert set(sent(1, 4).values()) == {0}


def test_settings_fix_only_the_ways_that_they_name() -> None:
    exact = Collectives().open_ways()
    assert len(exact) == 5 and all(way.is_exact for way in exact) and exact[0] == WAY_WITHIN_A_NODE
    ways = all_ways()
    assert ways[:5] == exact and not any(way.is_exact for way in ways[5:])
    assert len(ways) == 24 + 2, "changes need kept weights; two ways of ZeRO++ round within nodes, too"
    assert ways[24:] == collectives_of_word("quantized").open_ways()
    assert Collectives(forward="int8", backward="node", gradients="int4").open_ways() == tuple(
        Collectives(forward="int8", backward=source, gradients="int4")  # type: ignore[arg-type]
        for source in ("ram", "ssd")
    )
    assert Collectives(forward="exact", backward="world").open_ways() == (WAY_WITHIN_A_NODE,)
    changes = tuple(Collectives(forward="delta", backward=source) for source in ("ram", "ssd"))  # type: ignore[arg-type]
    assert Collectives(forward="delta").open_ways() == changes
    assert Collectives(forward="delta", backward="world").open_ways() == changes, "a change needs a copy"


def test_ranks_of_one_node_have_a_way_for_each_codec_within_it() -> None:
    assert ways_of_ranks(Collectives().open_ways(), 1, 2) == (WAY_WITHIN_A_NODE,)
    assert ways_of_ranks(all_ways(), 1, 2) == (WAY_WITHIN_A_NODE, replace(WAY_WITHIN_A_NODE, within="int4"))


def test_a_group_of_one_node_has_the_ways_of_node() -> None:
    def open_ways(backward: int | str, **parts: str) -> tuple[Collectives, ...]:
        return ways_of_ranks(Collectives.of_setting({"backward": backward, **parts}).open_ways(), 4, 2)

    assert open_ways(2) == open_ways("node") and {way.forward for way in open_ways(2)} == {"exact", "delta"}
    assert open_ways(2, forward="delta") == open_ways("node", forward="delta")
    assert {(way.forward, way.group_ranks) for way in open_ways(4)} == {("exact", 4)}
    assert open_ways(8) == (WAY_WITHIN_A_NODE,)
    for of_several in (4, 8):
        with pytest.raises(ValueError, match=f"with backward: {of_several} a node keeps only a part"):
            open_ways(of_several, forward="delta")


@pytest.mark.parametrize(("within", "of_gradients"), [("int8", Fraction(34, 128)), ("int4", Fraction(18, 128))])
def test_bytes_on_the_link_of_a_device(within: str, of_gradients: Fraction) -> None:
    way = Collectives(within=within)  # type: ignore[arg-type]
    assert way.weight_fraction_within(2) == (1 + WEIGHT_SCALE) / 2 < 0.53
    assert way.gradient_fraction_within(4) == of_gradients
    assert way.rounds_weights and not way.is_exact
