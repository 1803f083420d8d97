"""The costs of a model's step, by block and operation, for one shape of batch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from hf_lohan.costs.cuts import owned_experts
from hf_lohan.costs.pool_plan import SizeClass

Fusion: TypeAlias = Literal["compile", "liger"]
GRAPH = "graph"
"""The name of the one operation of a compiled layer, which stands for the layer's whole forward."""


def expected_hits(num_experts: int, num_chosen: int, num_tokens: float, chances: Sequence[float] = ()) -> float:
    """Return the expected number of experts that at least one of ``num_tokens`` tokens chooses, if each token chooses
    ``num_chosen``. ``chances``: the share of tokens that choose each expert. By default all experts are equally likely,
    and the result for E experts, k choices and T tokens is E (1 - (1 - k/E)^T)."""
    if not chances:
        return num_experts * _chance_of_any(num_chosen / num_experts, num_tokens)
    return math.fsum(_chance_of_any(chance, num_tokens) for chance in chances)


def _chance_of_any(chance: float, num_tokens: float) -> float:
    if chance >= 1:
        return 1.0 if num_tokens > 0 else 0.0
    return -math.expm1(num_tokens * math.log1p(-chance))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsProfile:
    """The experts of one layer. Parameters and bytes are per expert."""

    num_experts: int
    num_chosen: int
    """Number of experts that each token chooses (top-k)."""
    num_params: int
    num_trainable_params: int
    param_bytes: int
    """Bytes in the store, in working precision or packed."""
    decoded_numel: int = 0
    """Number of packed parameters, which each load decodes."""
    num_tokens: int
    """Number of tokens of a micro-batch, or of all micro-batches that share the weights."""
    inner_bytes: int = 0
    """Bytes that autograd saves for the experts' operations, if the experts are not streamed."""
    chances: tuple[float, ...] = ()
    """The measured share of tokens that choose each expert. If empty, all experts are equally likely."""
    owners: tuple[int, ...] = ()
    """The rank that owns each expert. If empty, each rank owns a range of experts (`owned_experts`)."""

    def hits(self, num_micro_batches: int = 1) -> float:
        """Return the expected number of experts that at least one token of the micro-batches chooses."""
        return expected_hits(self.num_experts, self.num_chosen, num_micro_batches * self.num_tokens, self.chances)

    def chances_of_hit(self, num_micro_batches: int = 1) -> list[tuple[float, int]]:
        """Return pairs of (chance that a token of the micro-batches chooses an expert, number of experts with this
        chance)."""
        num_tokens = num_micro_batches * self.num_tokens
        if not self.chances:
            return [(_chance_of_any(self.num_chosen / self.num_experts, num_tokens), self.num_experts)]
        return [(_chance_of_any(chance, num_tokens), 1) for chance in self.chances]

    def chance_to_reach(self, experts: Collection[int]) -> float:
        """Return the probability that a token chooses at least one of these experts."""
        if self.chances:
            return 1 - math.prod(1 - self.chances[expert] for expert in experts)
        others = math.comb(self.num_experts - len(experts), self.num_chosen)
        return 1 - others / math.comb(self.num_experts, self.num_chosen)

    def owned(self, layer: int, num_ranks: int) -> list[Sequence[int]]:
        """Return the experts of each rank, ascending. ``layer``: the index among the layers with experts."""
        if not self.owners:
            return [*owned_experts(self.num_experts, layer, num_ranks)]
        return [[e for e, owner in enumerate(self.owners) if owner == rank] for rank in range(num_ranks)]

    @property
    def hit_bytes(self) -> float:
        """Bytes of weights that a forward of one micro-batch needs."""
        return self.hits() * self.param_bytes

    @property
    def all_hit_from_tokens(self) -> int | None:
        """The minimum number of tokens at which the rarest of E experts is unused in less than one of 2E micro-batches.
        The expected number of unused experts is then below one half. None if some experts are never chosen."""
        rarest = min(self.chances, default=self.num_chosen / self.num_experts)
        if rarest <= 0:
            return None
        return 1 if rarest >= 1 else math.ceil(math.log(2 * self.num_experts) / -math.log1p(-rarest))

    def routed(self, counts: Sequence[float]) -> ExpertsProfile:
        """Return this profile with chances from ``counts``, the number of tokens of each expert. Raises ValueError for
        a wrong number of counts."""
        if len(counts) != self.num_experts or min(counts) < 0 or sum(counts) <= 0:
            raise ValueError(
                f"a routing histogram needs {self.num_experts} counts, none negative and not all 0; "
                f"got {len(counts)} that sum to {sum(counts)}"
            )
        num_tokens = sum(counts) / self.num_chosen
        return replace(self, chances=tuple(min(1.0, count / num_tokens) for count in counts))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsProfile:
    """The rows of a table that a micro-batch needs."""

    num_rows: int
    """Number of all rows of the table."""
    loaded_bytes: int
    """Bytes of the rows that the micro-batch needs."""
    read_bytes: int
    """Bytes of the granules that contain the needed rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationProfile:
    """One matrix product or attention of a block's forward. Its output is worth keeping, because recomputation takes
    many FLOPs per byte. All other operations (norms, activations, residuals) are always recomputed."""

    name: str
    """The operation and its number within the block, such as "aten.mm#0". The run uses the same names."""
    flops: float
    output_bytes: int
    module: str = ""
    """The module within the block, such as "mlp.down_proj". This is only shown to users."""
    forward_s: float | None = None
    """Measured seconds; None before the measurement."""
    loads_experts: bool = False
    """Whether recomputation loads all chosen experts of the layer again."""
    parts: tuple[OperationProfile, ...] = ()
    """The products and attentions of a compiled layer (`GRAPH`); empty for other operations."""
    moved_bytes: int = 0
    """Bytes that the other operations of a compiled layer read and write; 0 for other operations."""

    @property
    def attention_flops(self) -> float:
        """FLOPs of fused attention; 0 for other operations. Only attention kernels have "attention" in their names."""
        if self.parts:
            return sum(part.attention_flops for part in self.parts)
        return self.flops if "attention" in self.name else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockProfile:
    """One block, which is a decoder layer or a module outside the layers."""

    name: str
    size_class: SizeClass
    num_params: int
    num_trainable_params: int
    param_bytes: int
    """Bytes in the store, in working precision or packed."""
    flops: float
    """FLOPs of all operations of the forward."""
    decoded_numel: int = 0
    """Number of packed parameters, which each load decodes."""
    input_bytes: int = 0
    """Bytes of the layer's input, from which recomputation starts (LoHan's A_inter); 0 for modules outside the
    layers."""
    operations: tuple[OperationProfile, ...] = ()
    """Operations in forward order. Empty for modules outside the layers, which keep all saved tensors."""
    saved_bytes: int = 0
    """Bytes that autograd saves without recomputation, not counting weights and input."""
    working_bytes: int = 0
    """Peak device memory of forward and backward in bytes. It counts saved tensors, intermediates and gradients, but
    not weights, input and earlier blocks. 0 if the backward was not traced."""
    moved_bytes: int = 0
    """Bytes that the other operations read and write in a forward. Memory bandwidth, and not FLOPs, bounds these
    operations."""
    fused_bytes: tuple[tuple[Fusion, int], ...] = ()
    """`moved_bytes` with each way to fuse the other operations (`ModelProfile.fused`). Empty outside the layers."""
    graph_bytes: int = 0
    """Estimated bytes that the layer saves if it is compiled, without weights and input. The graph saves inputs and
    outputs of products and attention, and recomputes other tensors. 0 outside the layers."""
    num_chunks: int = 1
    """Number of chunks of tokens in which a layer runs. FLOPs and bytes above count all chunks. `working_bytes` counts
    one chunk, and the memory that the layer holds for all chunks."""
    repeated_flops: float = 0.0
    """FLOPs that a backward in chunks adds to recomputation, because it first recomputes keys and values."""
    repeated_bytes: int = 0
    """Bytes that the other operations of this additional recomputation read and write."""
    forward_s: float | None = None
    """Measured seconds; None before the measurement."""
    experts: ExpertsProfile | None = None
    """Streamed experts of a layer. The FLOPs above include them, and the parameters and bytes do not."""
    rows: RowsProfile | None = None
    """The rows of a table that a micro-batch needs, if the table is not loaded whole."""

    @property
    def attention_flops(self) -> float:
        """The part of `flops` in fused attention."""
        return sum(operation.attention_flops for operation in self.operations)

    @property
    def loaded_bytes(self) -> int:
        """Bytes of weights that a load brings to the device, without streamed experts."""
        return self.param_bytes if self.rows is None else self.rows.loaded_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes that a load reads if no weights are in RAM."""
        return self.param_bytes if self.rows is None else self.rows.read_bytes

    def gradient_bytes(self, itemsize: int) -> int:
        """Return the bytes of the block's gradient that leave the device."""
        whole_bytes = self.num_trainable_params * itemsize
        return whole_bytes if self.rows is None else min(whole_bytes, self.rows.loaded_bytes)

    def by_rows(self, num_rows: int, granule_bytes: int, num_tokens: int) -> BlockProfile:
        """Return this profile of a table of ``num_rows`` rows if only rows of ``num_tokens`` tokens are loaded.
        All rows are assumed to be equally likely. Texts repeat tokens, so they need fewer rows."""
        found = expected_hits(num_rows, 1, num_tokens)
        num_granules = math.ceil(self.param_bytes / granule_bytes)
        loaded_bytes = round(found / num_rows * self.param_bytes)
        rows = RowsProfile(
            num_rows=num_rows,
            loaded_bytes=loaded_bytes,
            read_bytes=min(
                self.param_bytes, max(loaded_bytes, round(expected_hits(num_granules, 1, found) * granule_bytes))
            ),
        )
        working_bytes = self.working_bytes
        if self.num_trainable_params:  # the backward makes a gradient of the rows, and not of the table
            working_bytes = max(0, working_bytes - self.param_bytes) + loaded_bytes
        working_bytes = working_bytes + loaded_bytes if self.working_bytes else 0
        return replace(self, size_class=SizeClass.ROWS, rows=rows, working_bytes=working_bytes)

    @property
    def trained_fraction(self) -> float:
        """The share of the block's weights that is trained, including experts."""
        num_params, num_trained = self.num_params, self.num_trainable_params
        if self.experts is not None:
            num_params += self.experts.num_experts * self.experts.num_params
            num_trained += self.experts.num_experts * self.experts.num_trainable_params
        return num_trained / num_params if num_params else 1.0

    @property
    def output_bytes(self) -> int:
        """Bytes of all outputs that can be kept or swapped instead of recomputed."""
        return sum(operation.output_bytes for operation in self.operations)


def _as_graph(block: BlockProfile) -> BlockProfile:
    operation = OperationProfile(
        name=GRAPH,
        flops=block.flops,
        output_bytes=block.graph_bytes,
        forward_s=block.forward_s,
        parts=block.operations,
        moved_bytes=block.moved_bytes,
    )
    return replace(block, operations=(operation,))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProfile:
    """A model with one shape of micro-batch. Blocks are in forward order."""

    blocks: tuple[BlockProfile, ...]
    batch_size: int
    sequence_length: int
    param_itemsize: int

    @property
    def layers(self) -> tuple[BlockProfile, ...]:
        return tuple(block for block in self.blocks if block.size_class is SizeClass.LAYER)

    @property
    def experts(self) -> tuple[ExpertsProfile, ...]:
        """Experts of the layers that stream them."""
        return tuple(block.experts for block in self.blocks if block.experts is not None)

    @property
    def num_dense_params(self) -> int:
        """Number of parameters outside streamed experts."""
        return sum(block.num_params for block in self.blocks)

    @property
    def num_params(self) -> int:
        return self.num_dense_params + sum(experts.num_experts * experts.num_params for experts in self.experts)

    @property
    def num_trainable_params(self) -> int:
        own = self.dense_trainable_params
        return own + sum(experts.num_experts * experts.num_trainable_params for experts in self.experts)

    @property
    def param_bytes(self) -> int:
        """Bytes of all weights."""
        return self.dense_param_bytes + sum(experts.num_experts * experts.param_bytes for experts in self.experts)

    @property
    def dense_trainable_params(self) -> int:
        return sum(block.num_trainable_params for block in self.blocks)

    @property
    def dense_param_bytes(self) -> int:
        """Bytes of the weights that every forward needs, which are all except streamed experts."""
        return sum(block.param_bytes for block in self.blocks)

    @property
    def dense_loaded_bytes(self) -> int:
        """Bytes of weights, without streamed experts, that a forward brings to the device."""
        return sum(block.loaded_bytes for block in self.blocks)

    @property
    def dense_read_bytes(self) -> int:
        """Bytes of weights, without streamed experts, that a forward reads if none are in RAM."""
        return sum(block.read_bytes for block in self.blocks)

    @property
    def dense_gradient_bytes(self) -> int:
        """Bytes of the gradients of these weights (without streamed experts) that leave the device."""
        return sum(block.gradient_bytes(self.param_itemsize) for block in self.blocks)

    @property
    def decoded_numel(self) -> int:
        """Number of packed weights that every forward decodes."""
        return sum(block.decoded_numel for block in self.blocks)

    @property
    def decoded_per_expert_byte(self) -> float:
        """Weights that are decoded for each byte of streamed experts."""
        param_bytes = sum(experts.param_bytes for experts in self.experts)
        return sum(experts.decoded_numel for experts in self.experts) / param_bytes if param_bytes else 0.0

    @property
    def flops(self) -> float:
        """FLOP_f: FLOPs of one forward of one micro-batch."""
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

    def fused(self, how: Fusion) -> ModelProfile:
        """Return this profile with layers whose operations between products are fused. "compile": consecutive
        operations are one kernel, as with `torch.compile` at best, and a layer is one operation, unless its experts
        stream one by one. "liger": operations of each module are one kernel, as with Liger's kernels for norms, gates
        and positions."""
        blocks = (
            replace(block, moved_bytes=dict(block.fused_bytes).get(how, block.moved_bytes)) for block in self.blocks
        )
        if how == "compile":
            blocks = (_as_graph(block) if block.graph_bytes else block for block in blocks)
        return replace(self, blocks=tuple(blocks))

    def with_graphs_saving(self, factor: float) -> ModelProfile:
        """Return this profile with compiled layers that save ``factor`` times the bytes."""

        def scaled(operation: OperationProfile) -> OperationProfile:
            is_graph = operation.name == GRAPH
            return replace(operation, output_bytes=round(factor * operation.output_bytes)) if is_graph else operation

        blocks = (replace(block, operations=tuple(map(scaled, block.operations))) for block in self.blocks)
        return replace(self, blocks=tuple(blocks))

    def routed(self, counts: Mapping[str, Sequence[float]]) -> ModelProfile:
        """Return this profile with measured chances of experts. ``counts``: the number of tokens of each expert, by
        layer. Raises ValueError for a layer without streamed experts, or a wrong number of counts."""
        layers = {block.name: block.experts for block in self.blocks}
        if unknown := [name for name in counts if layers.get(name) is None]:
            raise ValueError(f"the routing histogram has {unknown[0]}, which has no streamed experts; leave it out")
        routed = {name: experts.routed(counts[name]) for name, experts in layers.items() if experts and name in counts}
        blocks = (replace(block, experts=routed.get(block.name, block.experts)) for block in self.blocks)
        return replace(self, blocks=tuple(blocks))
