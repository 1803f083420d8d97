"""What ranks send each other in a step, in bytes, and the ways there are to send less.

A node has `num_local` ranks, which share its memory: between them nothing is sent. Between nodes each byte is sent once
a node, never once a rank. Bytes are what one node sends (its *egress*); it receives as many. With P parameters on Y
nodes, each of which owns a Y-th of them:

    weights, as they are or by a codec     (Y - 1) x message(P / Y)      once for each pass that has no copy in the node
    gradients, summed in the node           (Y - 1) x message(P / Y)      once for each backward
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal, get_args

ForwardCodec = Literal["exact", "delta", "int8"]
"""`delta`: what the step changed of weights that the node has still. As exact as `exact`."""
BackwardSource = Literal["world", "ram", "ssd"]
"""`world`: sent again; `ram`, `ssd`: from the copy that forward left in the node (`ram`: ZeRO++'s hpZ)."""
GradientCodec = Literal["exact", "int8", "int4"]

WEIGHT_BLOCK, WEIGHT_SCALE_BYTES = 256, 4
"""Elements that share a scale, and the scale's bytes."""
GRADIENT_BLOCK, GRADIENT_SCALE_BYTES = 64, 2
SUM_BYTES = 4
"""Of an element of a sum of gradients."""
DELTA_BITS_PER_1000_PARAMS = 1170
"""Measured on bfloat16 weights at a learning rate of 2e-5, where 4 to 5% of them change in a step. 1e-4: 1620."""


def quantized_bytes(numel: int, bits: int, block: int, scale_bytes: int) -> int:
    """Codes of whole blocks, and a scale for each."""
    return -(-numel // block) * (block * bits // 8 + scale_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenCollectives:
    """One way to send weights and gradients."""

    forward: ForwardCodec = "exact"
    backward: BackwardSource = "world"
    gradients: GradientCodec = "exact"

    @property
    def is_exact(self) -> bool:
        return self.forward in ("exact", "delta") and self.gradients == "exact"

    def weight_bytes(self, param_bytes: int, num_params: int, num_trainable_params: int) -> int:
        """Of a message of so many weights."""
        match self.forward:
            case "exact":
                return param_bytes
            case "int8":
                return quantized_bytes(num_params, 8, WEIGHT_BLOCK, WEIGHT_SCALE_BYTES)
            case "delta":
                return -(-num_trainable_params * DELTA_BITS_PER_1000_PARAMS // 8000)

    def gradient_bytes(self, numel: int, itemsize: int) -> int:
        """Of a message of so many gradients, which take ``itemsize`` bytes each where no codec makes them smaller."""
        if self.gradients == "exact":
            return numel * itemsize
        bits = {"int8": 8, "int4": 4}[self.gradients]
        return quantized_bytes(numel, bits, GRADIENT_BLOCK, GRADIENT_SCALE_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Equal nodes with equally many ranks each."""

    num_nodes: int = 1
    num_local: int = 1
    """Ranks of a node."""
    collectives: ChosenCollectives = ChosenCollectives()

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.num_local

    def copied_bytes(self, param_bytes: int) -> int:
        """What a copy in the node adds to the weights that its ranks own."""
        return param_bytes - param_bytes // self.num_nodes

    def bytes_by_collective(
        self, *, param_bytes: int, num_params: int, num_trainable_params: int, gradient_itemsize: int, is_summed: bool
    ) -> dict[CollectiveName, int]:
        """What one node sends in one forward and one backward. ``is_summed``: gradients of several micro-batches."""

        def part(whole: int) -> int:
            return -(-whole // self.num_nodes)

        ways, to = self.collectives, self.num_nodes - 1
        weights = to * ways.weight_bytes(part(param_bytes), part(num_params), part(num_trainable_params))
        itemsize = SUM_BYTES if is_summed or self.num_local > 1 else gradient_itemsize
        return {
            "forward_weights": weights,
            "backward_weights": weights if ways.backward == "world" else 0,
            "gradients": to * ways.gradient_bytes(part(num_trainable_params), itemsize),
        }


CollectiveName = Literal["forward_weights", "backward_weights", "gradients"]
ONE_RANK = Cluster()


@dataclass(frozen=True, slots=True)
class CollectiveChoice:
    """The ways that a plan may choose from."""

    forward: tuple[ForwardCodec, ...] = ("exact", "delta")
    backward: tuple[BackwardSource, ...] = get_args(BackwardSource)
    gradients: tuple[GradientCodec, ...] = ("exact",)

    @classmethod
    def parse(cls, text: str) -> CollectiveChoice:
        """Of "exact", "quantized", or what is wanted by name: "forward=int8,backward=node,gradients=int4". Of what is
        not named, all that is exact. Raises ValueError."""
        if text == "exact":
            return cls()
        if text == "quantized":
            return cls(forward=get_args(ForwardCodec), gradients=get_args(GradientCodec))
        allowed = {
            "forward": {name: (name,) for name in get_args(ForwardCodec)},
            "backward": {**{name: (name,) for name in get_args(BackwardSource)}, "node": ("ram", "ssd")},
            "gradients": {name: (name,) for name in get_args(GradientCodec)},
        }
        named: dict[str, Any] = {}
        for word in text.split(","):
            key, _, value = (part.strip() for part in word.partition("="))
            if value not in allowed.get(key, {}):
                ways = ", ".join(f"{name}={'|'.join(values)}" for name, values in allowed.items())
                raise ValueError(f"collectives = {text!r} is not allowed; write exact, quantized, or some of {ways}")
            named[key] = allowed[key][value]
        return cls(**named)

    def ways(self, num_nodes: int) -> Iterator[ChosenCollectives]:
        """Those that differ, what is exact first. In one node nothing is sent, so there is one."""
        if num_nodes == 1:
            yield ChosenCollectives()
            return
        ways = [
            ChosenCollectives(forward=forward, backward=backward, gradients=gradients)
            for gradients, forward, backward in product(self.gradients, self.forward, self.backward)
            if forward != "delta" or backward != "world"  # a change of what nobody kept
        ]
        yield from sorted(ways, key=lambda way: not way.is_exact)


@dataclass(frozen=True, slots=True)
class TriedWay:
    """A way that a plan could have taken, and what the step would take then."""

    collectives: ChosenCollectives
    step_s: float
    fits: bool

    def to_mapping(self) -> dict[str, Any]:
        return {**asdict(self.collectives), "step_s": self.step_s, "fits": self.fits}
