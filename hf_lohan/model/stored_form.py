"""The blocks and records of a model in a store, which do not depend on budgets."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hf_lohan.costs import Quantization, SizeClass, owned_experts
from hf_lohan.costs.record_traffic import PARAM
from hf_lohan.model.block import PARAM_ALIGN_NUMEL, Block, ParamSlice
from hf_lohan.model.discovery import ModelBlocks, Rules, adamw_everywhere, discover_blocks
from hf_lohan.optim import ADAMW, SCALE_BLOCK_NUMEL, STOCHASTIC, MasterFormat, MomentDtype
from hf_lohan.store import PARAMS_PER_ELEMENT, ModelIdentity, RecordSpec

assert PARAM_ALIGN_NUMEL % SCALE_BLOCK_NUMEL == 0, "no two parameters share a scale"


@dataclass(frozen=True)
class StoredForm:
    """The blocks and records of a model."""

    model_blocks: ModelBlocks
    master: MasterFormat
    """The format of most weights. Each block has a format."""
    records: tuple[RecordSpec, ...]
    """The records of this process."""
    identity: ModelIdentity

    @property
    def other_rules(self) -> dict[str, list[str]]:
        """Names of the parameters that AdamW does not update, by optimizer."""
        names: dict[str, list[str]] = {}
        for block in self.model_blocks.blocks:
            if block.master.rule != ADAMW:
                names.setdefault(str(block.master.rule), []).extend(part.name for part in block.slices)
        return names

    @property
    def other_dtypes(self) -> dict[str, str]:
        """Working dtypes by parameter name, for parameters whose dtype differs from that of most weights."""
        most = self.master.working_dtype
        others = [block for block in self.model_blocks.blocks if block.master.working_dtype != most]
        return {part.name: dtype_name(block.master.working_dtype) for block in others for part in block.slices}


def stored_form(
    model: nn.Module,
    working_dtype: torch.dtype | None,
    moment_dtype: MomentDtype,
    rules: Rules = adamw_everywhere,
    *,
    streams_experts: bool = False,
    by_rows: nn.Parameter | None = None,
    quantization: Quantization | None = None,
) -> StoredForm:
    """Return the blocks and records of `model`, real or on meta, with moments of `moment_dtype`. `discover_blocks`
    describes the other arguments and the errors."""
    model_blocks = discover_blocks(
        model,
        working_dtype,
        moment_dtype,
        rules,
        streams_experts=streams_experts,
        by_rows=by_rows,
        quantization=quantization,
    )
    trained = [block for block in model_blocks.blocks if block.state_numel]
    if moment_dtype == STOCHASTIC and trained and not any(block.master.rounds_weights for block in trained):
        raise ValueError(
            "stochastic_rounding: true rounds bfloat16 weights, and the trained weights are float32, as PEFT's "
            "adapters are; train with bf16=True, or leave the setting out"
        )
    numels: Counter[MasterFormat] = Counter()
    for block in model_blocks.blocks:
        numels[block.master] += sum(part.numel for part in block.slices)
    master = numels.most_common(1)[0][0]
    records = tuple(spec for block in model_blocks.blocks for spec in _records_of(block, 0, block.fetched_numel))
    return StoredForm(model_blocks, master, records, _identify(model, model_blocks.blocks, records, moment_dtype))


def assign_shards(model_blocks: ModelBlocks, num_ranks: int, owners: Mapping[str, int] | None = None) -> None:
    """Assign a shard of each block to each rank. Experts that are separate blocks are not cut. Each belongs to one
    rank. ``owners`` maps the name of its block to this rank; by default `owned_experts` chooses the rank."""
    for block in model_blocks.blocks:
        block.cut_for_ranks(num_ranks)
    for layer, experts in enumerate(model_blocks.experts.values()):
        for rank, owned in enumerate(owned_experts(len(experts), layer, num_ranks)):
            for block in experts[owned.start : owned.stop]:
                block.give_to_rank(owners[block.name] if owners else rank, num_ranks)


def owners_of(model_blocks: ModelBlocks) -> dict[str, int]:
    """Return the rank of each expert that belongs to one rank, by its block's name."""
    return {block.name: block.owner for block in model_blocks.blocks if block.owner is not None}


def experts_by_rank(experts: Sequence[Block], num_ranks: int) -> list[Sequence[int]]:
    """Return, for each rank, the indices of the layer's experts that it owns, in ascending order."""
    owned = [[number for number, block in enumerate(experts) if block.owner == rank] for rank in range(num_ranks)]
    return [_as_range(numbers) for numbers in owned]


def _as_range(numbers: list[int]) -> Sequence[int]:
    """Convert consecutive indices to a range, so that their rows are a slice. Other indices stay a list."""
    between = range(numbers[0], numbers[-1] + 1) if numbers else range(0)
    return between if len(between) == len(numbers) else numbers


def common_blocks(blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks that all ranks load together. Experts that belong to one rank, and the table if only its rows
    are loaded, are left out."""
    return [block for block in blocks if block.owner is None and block.size_class is not SizeClass.ROWS]


def records_of_rank(blocks: Sequence[Block], rank: int) -> tuple[RecordSpec, ...]:
    """Return the records of a rank's shards (`assign_shards`)."""
    return tuple(spec for block in blocks for spec in _records_of(block, *block.rank_ranges[rank]))


def _records_of(block: Block, start: int, stop: int) -> list[RecordSpec]:
    """Return the records of the fetched elements [start, stop) of a block."""
    master = block.master
    dtype, granule_numel = dtype_name(master.working_dtype), block.granule_numel
    specs = []
    trained = min(start, block.state_numel), min(stop, block.state_numel)
    num_trained = trained[1] - trained[0]
    for part in reversed(list(block.fetched_parts(start, stop))):
        if part.kind == PARAM:
            size = dtype, part.stop - part.start, num_trained, granule_numel
        else:
            size = "uint8", part.stop - part.start, 0, block.packed_granule_bytes
        specs.append(RecordSpec(block.name, part.kind, *size, part.start))
    if trained[0] < trained[1]:
        for kind in master.state_kinds:
            assert master.params_per_element(kind) == PARAMS_PER_ELEMENT.get(kind, 1), kind
            first, last = master.elements(kind, *trained)
            granule, numel = granule_numel // master.params_per_element(kind), last - first
            dtype = dtype_name(master.state_dtype(kind))
            specs.append(RecordSpec(block.name, kind, dtype, numel, numel, granule, first))
    return specs


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch.", such as "float32"."""
    return str(dtype).removeprefix("torch.")


def _text_of(part: ParamSlice) -> str:
    text = f"{part.name} {tuple(part.shape)} {part.start}"
    text = text if part.is_whole else f"{text} [{part.first}, {part.last})"
    return text if part.packed is None else f"{text} {part.packed}"


def _identify(
    model: nn.Module, blocks: list[Block], records: tuple[RecordSpec, ...], moment_dtype: MomentDtype
) -> ModelIdentity:
    """Return a model's identity. Models share a store only if parameters have the same names, shapes and offsets."""
    slices = (part for block in blocks for part in block.slices)
    text = [type(model).__name__, *map(_text_of, slices), *map(str, records)]
    optimizer = " + ".join(sorted({str(block.master.rule) for block in blocks if block.state_numel})) or str(ADAMW)
    text += [optimizer] if optimizer != str(ADAMW) else []
    return ModelIdentity(
        model_class=type(model).__name__,
        num_parameters=sum(part.numel for block in blocks for part in block.slices),
        fingerprint=hashlib.sha256("\n".join(text).encode()).hexdigest(),
        optimizer_state_dtype=moment_dtype,
        optimizer=optimizer,
        quantize=next((p.packed.setting for block in blocks for p in block.slices if p.packed is not None), "none"),
    )
