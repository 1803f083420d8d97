"""What a model's step consists of, as numbers: per block and per operation, for one shape of batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hf_lohan.planner.pool_plan import SizeClass


def expected_hits(num_experts: int, num_chosen: int, num_tokens: float, chances: Sequence[float] = ()) -> float:
    """Experts of a layer to which at least one of ``num_tokens`` goes, if each token chooses ``num_chosen``.

    ``chances``: of each expert, the share of tokens that choose it; without them all are alike, and E experts are
    expected to have E (1 - (1 - k/E)^T).
    """
    if not chances:
        return num_experts * _chance_of_any(num_chosen / num_experts, num_tokens)
    return math.fsum(_chance_of_any(chance, num_tokens) for chance in chances)


def _chance_of_any(chance: float, num_tokens: float) -> float:
    if chance >= 1:
        return 1.0 if num_tokens > 0 else 0.0
    return -math.expm1(num_tokens * math.log1p(-chance))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsProfile:
    """Of one layer. Parameters and bytes are those of each expert."""

    num_experts: int
    num_chosen: int
    """By each token (top-k)."""
    num_params: int
    num_trainable_params: int
    param_bytes: int
    """In working precision."""
    num_tokens: int
    """Of a micro-batch, or of all micro-batches that share the weights."""
    inner_bytes: int = 0
    """What autograd keeps of what they do, where they do not stream."""
    chances: tuple[float, ...] = ()
    """Measured: of each expert, the share of tokens that choose it. Without them all are taken to be alike."""

    def hits(self, num_micro_batches: int = 1) -> float:
        """Experts that at least one token of so many micro-batches goes to."""
        return expected_hits(self.num_experts, self.num_chosen, num_micro_batches * self.num_tokens, self.chances)

    def chances_of_hit(self, num_micro_batches: int = 1) -> list[tuple[float, int]]:
        """That a token of so many micro-batches goes to an expert, and of how many experts that is the chance."""
        num_tokens = num_micro_batches * self.num_tokens
        if not self.chances:
            return [(_chance_of_any(self.num_chosen / self.num_experts, num_tokens), self.num_experts)]
        return [(_chance_of_any(chance, num_tokens), 1) for chance in self.chances]

    @property
    def hit_bytes(self) -> float:
        """Weights that a forward of one micro-batch needs."""
        return self.hits() * self.param_bytes

    @property
    def all_hit_from_tokens(self) -> int | None:
        """With so many tokens the one that is chosen least is left out in fewer than one micro-batch of 2E, so that
        less than half an expert is expected to be. None: some are never chosen."""
        rarest = min(self.chances, default=self.num_chosen / self.num_experts)
        if rarest <= 0:
            return None
        return 1 if rarest >= 1 else math.ceil(math.log(2 * self.num_experts) / -math.log1p(-rarest))

    def routed(self, counts: Sequence[float]) -> ExpertsProfile:
        """With chances from ``counts``: how many tokens went to each expert. Raises ValueError for counts of another
        number of experts."""
        if len(counts) != self.num_experts or min(counts) < 0 or sum(counts) <= 0:
            raise ValueError(
                f"a routing histogram needs {self.num_experts} counts, none negative and not all 0; "
                f"got {len(counts)} that sum to {sum(counts)}"
            )
        num_tokens = sum(counts) / self.num_chosen
        return replace(self, chances=tuple(min(1.0, count / num_tokens) for count in counts))


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationProfile:
    """One matrix product or attention of a block's forward: what is worth keeping, because making it again takes
    many FLOPs a byte. All other operations (norms, activations, residuals) are always made again."""

    name: str
    """The operation and its how-manieth of the block it is, as the runtime counts them: "aten.mm#0"."""
    flops: float
    output_bytes: int
    module: str = ""
    """For people: the module within the block, "mlp.down_proj"."""
    forward_s: float | None = None
    """Measured; None until then."""
    loads_experts: bool = False
    """Whether to make it again loads all of the layer's experts again that tokens go to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockProfile:
    """One block: a decoder layer, or a module outside the layers."""

    name: str
    size_class: SizeClass
    num_params: int
    num_trainable_params: int
    param_bytes: int
    """In working precision."""
    flops: float
    """Of its forward, of all operations."""
    input_bytes: int = 0
    """What its recomputation starts from (LoHan's A_inter); 0 for modules outside the layers."""
    operations: tuple[OperationProfile, ...] = ()
    """In the order in which the forward runs them. Empty for modules outside the layers, which keep what they save."""
    saved_bytes: int = 0
    """All that autograd keeps of it when nothing is recomputed, without weights and without its input."""
    working_bytes: int = 0
    """The most that its forward and backward hold on the device at once, beside its weights, its input and what came
    before: what is saved, intermediates and gradients. 0 if its backward was not traced."""
    moved_bytes: int = 0
    """What its other operations read and write in a forward: they take the device's memory bandwidth, not its FLOPs."""
    forward_s: float | None = None
    """Measured; None until then."""
    experts: ExpertsProfile | None = None
    """Of a layer whose experts stream one by one. The parameters and bytes above are without them, the FLOPs with them.
    """

    @property
    def trained_fraction(self) -> float:
        """Of its weights, those of experts included."""
        num_params, num_trained = self.num_params, self.num_trainable_params
        if self.experts is not None:
            num_params += self.experts.num_experts * self.experts.num_params
            num_trained += self.experts.num_experts * self.experts.num_trainable_params
        return num_trained / num_params if num_params else 1.0

    @property
    def output_bytes(self) -> int:
        """All outputs that can be kept or swapped instead of being made again."""
        return sum(operation.output_bytes for operation in self.operations)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProfile:
    """A model under one shape of micro-batch, blocks in forward order."""

    blocks: tuple[BlockProfile, ...]
    batch_size: int
    sequence_length: int
    param_itemsize: int

    @property
    def layers(self) -> tuple[BlockProfile, ...]:
        return tuple(block for block in self.blocks if block.size_class is SizeClass.LAYER)

    @property
    def experts(self) -> tuple[ExpertsProfile, ...]:
        """Of the layers that stream them one by one."""
        return tuple(block.experts for block in self.blocks if block.experts is not None)

    @property
    def num_params(self) -> int:
        own = sum(block.num_params for block in self.blocks)
        return own + sum(experts.num_experts * experts.num_params for experts in self.experts)

    @property
    def num_trainable_params(self) -> int:
        own = self.dense_trainable_params
        return own + sum(experts.num_experts * experts.num_trainable_params for experts in self.experts)

    @property
    def param_bytes(self) -> int:
        """Of all weights."""
        return self.dense_param_bytes + sum(experts.num_experts * experts.param_bytes for experts in self.experts)

    @property
    def dense_trainable_params(self) -> int:
        return sum(block.num_trainable_params for block in self.blocks)

    @property
    def dense_param_bytes(self) -> int:
        """Of those that every forward needs: all but experts that stream one by one."""
        return sum(block.param_bytes for block in self.blocks)

    @property
    def flops(self) -> float:
        """FLOP_f: of one forward of one micro-batch."""
        return sum(block.flops for block in self.blocks)

    @property
    def inter_block_bytes(self) -> int:
        """A_inter: the inputs of all layers."""
        return sum(block.input_bytes for block in self.blocks)

    @property
    def activation_bytes(self) -> int:
        """A_all: the layers' inputs and all outputs that can be swapped."""
        return self.inter_block_bytes + sum(block.output_bytes for block in self.blocks)

    @property
    def num_tokens(self) -> int:
        return self.batch_size * self.sequence_length

    def routed(self, counts: Mapping[str, Sequence[float]]) -> ModelProfile:
        """With measured chances of experts in place of equal ones: by layer, how many tokens went to each expert.
        Raises ValueError for a layer without experts that stream one by one, or of another number of them."""
        layers = {block.name: block.experts for block in self.blocks}
        if unknown := [name for name in counts if layers.get(name) is None]:
            raise ValueError(f"a routing histogram is of {unknown[0]}, where no experts stream one by one")
        routed = {name: experts.routed(counts[name]) for name, experts in layers.items() if experts and name in counts}
        blocks = (replace(block, experts=routed.get(block.name, block.experts)) for block in self.blocks)
        return replace(self, blocks=tuple(blocks))
