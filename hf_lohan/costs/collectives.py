"""The setting `collectives`, the ways in which it lets ranks exchange weights and gradients, and the bytes of each way.

A node has `num_local` ranks, which share its memory and send nothing to each other. Between nodes, each byte is sent
once for each node, not for each rank. Numbers of bytes are the *egress* of one node. A node receives
the same number. With P parameters on Y nodes, where each node owns P / Y of them:

    weights, exact or coded           (Y - 1) x payload(P / Y)      for each pass without a copy
    weights of a copy of g nodes      (g - 1) / g x P               for each pass with a copy
    gradients, summed in the node     (Y - 1) x payload(P / Y)      for each backward

Within a node, all weights cross the link to each device, and each device's gradients cross it back:

    weights, exact or coded           payload(P)                    for each pass
    gradients, exact or coded         payload(P)                    for each backward
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Literal, TypeAlias, get_args

ForwardCodec: TypeAlias = Literal["auto", "exact", "int8", "delta"]
BackwardSource: TypeAlias = Literal["auto", "world", "node", "ram", "ssd"]
GradientCodec: TypeAlias = Literal["exact", "int8", "int4"]
WithinCodec: TypeAlias = Literal["exact", "int8", "int4"]
NodeTransport: TypeAlias = Literal["host", "nccl"]

SUM_BYTES = 4
"""Bytes of one element of a sum of gradients."""
DELTA_BITS_PER_1000_PARAMS = 1170
"""Measured on bfloat16 weights at a learning rate of 2e-5, with which 4 to 5% of the weights change in a step. At 1e-4,
1620 were measured."""


@dataclass(frozen=True, slots=True)
class CodecFormat:
    """The size of values that are quantized in blocks. Each block has a scale."""

    num_bits: int
    block_numel: int
    scale_bytes: int

    def payload_bytes(self, numel: int) -> int:
        """Return the bytes of ``numel`` quantized values in whole blocks, and of their scales."""
        return -(-numel // self.block_numel) * (self.block_numel * self.num_bits // 8 + self.scale_bytes)

    @property
    def bytes_per_value(self) -> float:
        """Bytes of a value in a whole block, with its share of the scale."""
        return self.payload_bytes(self.block_numel) / self.block_numel


WEIGHT_FORMAT = CodecFormat(num_bits=8, block_numel=256, scale_bytes=4)
GRADIENT_FORMATS = {
    "int8": CodecFormat(num_bits=8, block_numel=64, scale_bytes=2),
    "int4": CodecFormat(num_bits=4, block_numel=64, scale_bytes=2),
}

GRADIENT_FORMATS_WITHIN = {
    "int8": CodecFormat(num_bits=8, block_numel=32, scale_bytes=2),
    "int4": CodecFormat(num_bits=4, block_numel=32, scale_bytes=2),
}
"""Within a node. Parameters begin at multiples of this block in a chunk, so a chunk's coded gradient has no gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """How weights and gradients are sent between nodes, and between the memory of a node and its devices."""

    forward: ForwardCodec = "auto"
    """Weights between nodes. "exact" sends all bits, "int8" rounds, and "delta" sends the exact change of a step.
    "auto" is "exact" or "delta", and the plan chooses."""

    backward: BackwardSource = "auto"
    """Source of weights in backward. With "world" all nodes send them again. "node" is a copy in each node, in "ram" or
    on the "ssd". "auto" is the source with the fastest plan. "delta" needs a copy."""

    gradients: GradientCodec = "exact"
    """Gradients between nodes. "exact" sends float32 sums, and "int8" and "int4" round them."""

    group_ranks: int | None = None
    """Number of ranks, in whole nodes, that keep one copy together, if `backward` is a number of ranks in the setting.
    A group saves RAM, because each node keeps only a part of the copy. The nodes send each other their parts in each
    backward. None if each node keeps a copy."""

    within: WithinCodec = "exact"
    """Weights and gradients within a node, on the link of each device. "exact" copies all bits. "int8" and "int4" round
    gradients to 8 or 4 bits, and both round weights to 8 bits."""

    def __post_init__(self) -> None:
        for name, allowed in COLLECTIVE_VALUES.items():
            if getattr(self, name) not in allowed:
                choices = " or ".join(map(repr, allowed))
                also = ", or a number of ranks" if name == "backward" else ""
                raise ValueError(
                    f"ranks.collectives: {name}: {getattr(self, name)!r} is not allowed; choose {choices}{also}"
                )
        if self.group_ranks is not None and self.group_ranks < 1:
            raise ValueError(
                f"ranks.collectives: backward: {self.group_ranks} is not a number of ranks; give at least 1"
            )

    @classmethod
    def of_setting(cls, fields: Mapping[str, Any]) -> Collectives:
        """Return the ways that a table sets. `backward` may be a number of ranks. Raises ValueError."""
        number = fields.get("backward")
        if type(number) is int:
            return cls(**{**fields, "backward": "node", "group_ranks": number})
        return cls(**fields)

    @property
    def is_exact(self) -> bool:
        """Whether nothing is rounded."""
        return self.forward != "int8" and self.gradients == "exact" and self.within == "exact"

    @property
    def rounds_weights(self) -> bool:
        """Whether devices compute with rounded weights."""
        return self.forward == "int8" or self.within != "exact"

    @property
    def keeps_own(self) -> bool:
        """Whether a rank also keeps its own shard as sent, to compute the change of the next step."""
        return self.forward == "delta"

    def to_setting(self) -> str | dict[str, Any]:
        """Return the setting in JSON types. It is a string if one exists, and otherwise the fields that are not "auto",
        without `within` if it rounds nothing."""
        for word in COLLECTIVE_WORDS:
            if self == collectives_of_word(word):
                return word
        fields = {name: value for name, value in asdict(self).items() if value != "auto" and name != "group_ranks"}
        if self.group_ranks is not None:
            fields["backward"] = self.group_ranks
        if self.within == "exact":
            del fields["within"]
        return fields

    def to_mapping(self) -> dict[str, Any]:
        """Return the fields in JSON types, without groups if each node keeps a copy."""
        fields = asdict(self)
        return fields if self.group_ranks is not None else {name: fields[name] for name in COLLECTIVE_VALUES}

    def open_ways(self) -> tuple[Collectives, ...]:
        """Return the ways among which a plan of several nodes may choose, without "auto" or "node"."""
        forwards: tuple[str, ...] = ("exact", "delta") if self.forward == "auto" else (self.forward,)
        copies = {"auto": ("world", "ram", "ssd"), "world": ("world",), "node": ("ram", "ssd")}
        sources = copies.get(self.backward, (self.backward,))
        if self.forward == "delta" and self.backward == "world":
            sources = ("ram", "ssd")
        ways = _ways(forwards, sources, (self.gradients,), self.within)
        return tuple(replace(way, group_ranks=self.group_ranks) for way in ways)

    def nodes_of_group(self, num_local: int) -> int:
        """Return the number of nodes that share one copy, if a node has ``num_local`` ranks."""
        return 1 if self.group_ranks is None else self.group_ranks // num_local

    def weight_bytes(self, param_bytes: int, num_params: int, num_trainable_params: int, packed_bytes: int = 0) -> int:
        """Return the payload bytes of ``num_params`` weights that may be rounded, and of ``packed_bytes`` of packed
        weights, which are never rounded again."""
        if self.forward == "int8":
            return WEIGHT_FORMAT.payload_bytes(num_params) + packed_bytes
        if self.forward == "delta":
            return -(-num_trainable_params * DELTA_BITS_PER_1000_PARAMS // 8000)
        return param_bytes

    def gradient_bytes(self, numel: int, itemsize: int) -> int:
        """Return the payload bytes of gradients. ``itemsize``: bytes of each element if it is not quantized."""
        return numel * itemsize if self.gradients == "exact" else GRADIENT_FORMATS[self.gradients].payload_bytes(numel)

    def weight_fraction_within(self, itemsize: float) -> float:
        """Return the bytes of weights on a device's link, divided by their bytes if each has ``itemsize`` bytes."""
        return 1.0 if self.within == "exact" else WEIGHT_FORMAT.bytes_per_value / itemsize

    def gradient_fraction_within(self, itemsize: float) -> float:
        """Return the bytes of gradients on a device's link, divided by their bytes if each has ``itemsize`` bytes."""
        return 1.0 if self.within == "exact" else GRADIENT_FORMATS_WITHIN[self.within].bytes_per_value / itemsize


COLLECTIVE_VALUES: dict[str, tuple[str, ...]] = {
    "forward": get_args(ForwardCodec),
    "backward": get_args(BackwardSource),
    "gradients": get_args(GradientCodec),
    "within": get_args(WithinCodec),
}
"""Allowed values of each field."""
COLLECTIVE_WORDS = ("exact", "quantized")
ANY_EXACT_WAY = Collectives()
WAY_WITHIN_A_NODE = Collectives(forward="exact", backward="world")
ZERO_PLUS_PLUS = Collectives(forward="int8", backward="node", gradients="int4", within="int4")


def collectives_of_word(word: str) -> Collectives:
    """Return the setting for a string. "exact" allows every way that rounds nothing. "quantized" is ZeRO++, between
    nodes and within them."""
    return ZERO_PLUS_PLUS if word == "quantized" else ANY_EXACT_WAY


def all_ways() -> tuple[Collectives, ...]:
    """Return all ways to exchange weights and gradients between nodes, and the ways of ZeRO++ that also round within
    nodes. Ways that round nothing are first."""
    ways = _ways(("exact", "delta", "int8"), ("world", "ram", "ssd"), get_args(GradientCodec))
    return (*sorted(ways, key=lambda way: not way.is_exact), *ZERO_PLUS_PLUS.open_ways())


def ways_of_ranks(asked: Iterable[Collectives], num_nodes: int, num_local: int) -> tuple[Collectives, ...]:
    """Return the ways for ``num_nodes`` nodes of ``num_local`` ranks. A group of one node is `node`, a group of all
    nodes is `world`, and one node has one way. Groups of several nodes have no "delta". Raises ValueError for groups
    that are not whole nodes, or not equal, and for groups of several nodes if ``asked`` has only "delta"."""
    ways, groups_of_delta = [], []
    for way in asked:
        group, num_ranks = way.group_ranks, num_nodes * num_local
        if group is not None and (group % num_local or num_ranks % group):
            raise ValueError(
                f"ranks.collectives: backward: {group} is set with {num_ranks} ranks on nodes of {num_local}; the "
                f"ranks of a node share one copy in its memory, so a group is whole nodes: give a multiple of "
                f"{num_local} that divides {num_ranks}, or node"
            )
        if group not in (None, num_local) and way.forward == "delta":  # "delta" needs all weights of the previous step
            groups_of_delta.append(group)
            continue
        if group == num_ranks:
            way = replace(way, backward="world")
        if group in (num_local, num_ranks):
            way = replace(way, group_ranks=None)
        ways.append(replace(WAY_WITHIN_A_NODE, within=way.within) if num_ranks == num_local else way)
    if groups_of_delta and not ways:
        raise ValueError(
            "ranks.collectives: forward: delta needs a copy of all weights in each node, and with backward: "
            f"{groups_of_delta[0]} a node keeps only a part; set backward to node, or forward to exact or int8"
        )
    return tuple(dict.fromkeys(ways))


def _ways(
    forwards: Iterable[Any], sources: Iterable[Any], gradients: Iterable[Any], within: WithinCodec = "exact"
) -> tuple[Collectives, ...]:
    return tuple(
        Collectives(forward=forward, backward=backward, gradients=codec, within=within)
        for codec, forward, backward in product(gradients, forwards, sources)
        if forward != "delta" or backward != "world"  # "delta" needs a copy
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Equal nodes with the same number of ranks."""

    num_nodes: int = 1
    num_local: int = 1
    """Number of ranks of a node."""
    collectives: Collectives = WAY_WITHIN_A_NODE
    transport: NodeTransport = "host"
    """Whether the ranks of a node exchange weights and gradients through its RAM, or through links between GPUs."""

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.num_local

    def copied_bytes(self, param_bytes: int) -> int:
        """Return the bytes that a copy of all weights in a node takes in addition to the weights that its ranks own. If
        g nodes keep one copy, each node has 1 / g of the weights of the other nodes."""
        of_group = self.collectives.nodes_of_group(self.num_local)
        return (param_bytes - of_group * (param_bytes // self.num_nodes)) // of_group

    def sent_gradient_itemsize(self, gradient_itemsize: int, *, is_summed: bool) -> int:
        """Return the bytes of an element of a gradient between nodes. Sums are float32, and other gradients are sent
        unchanged."""
        return SUM_BYTES if is_summed or self.num_local > 1 else gradient_itemsize

    def bytes_by_collective(
        self,
        *,
        param_bytes: int,
        num_params: int,
        num_trainable_params: int,
        gradient_itemsize: int,
        is_summed: bool,
        packed_bytes: int = 0,
    ) -> dict[CollectiveName, int]:
        """Return the bytes that one node sends in one forward and one backward. ``num_params``: weights that are not
        packed. ``is_summed``: gradients are sums of several micro-batches. ``packed_bytes``: see `weight_bytes`."""

        def shard(whole: int) -> int:
            return -(-whole // self.num_nodes)

        way, num_receivers = self.collectives, self.num_nodes - 1
        weight_bytes = way.weight_bytes(
            shard(param_bytes), shard(num_params), shard(num_trainable_params), shard(packed_bytes)
        )
        itemsize = self.sent_gradient_itemsize(gradient_itemsize, is_summed=is_summed)
        # Each node of a group sends the others its own weights and the weights that it keeps, unchanged.
        in_group = way.nodes_of_group(self.num_local) - 1
        of_group = in_group * (shard(param_bytes) + self.copied_bytes(param_bytes)) if in_group else 0
        return {
            "forward_weights": num_receivers * weight_bytes,
            "backward_weights": num_receivers * weight_bytes if way.backward == "world" else of_group,
            "gradients": num_receivers * way.gradient_bytes(shard(num_trainable_params), itemsize),
        }


CollectiveName: TypeAlias = Literal[
    "forward_weights", "backward_weights", "gradients", "forward_rows", "forward_tokens", "backward_tokens"
]
SentAs: TypeAlias = Literal["weights", "gradients", "tokens"]
"""Kinds of data that ranks send, as a run names them."""
ONE_RANK = Cluster()


@dataclass(frozen=True, slots=True)
class TriedWay:
    """A way that the plan compared, and its step time."""

    collectives: Collectives
    step_s: float
    fits: bool

    def to_mapping(self) -> dict[str, Any]:
        return {**self.collectives.to_mapping(), "step_s": self.step_s, "fits": self.fits}
