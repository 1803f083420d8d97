"""Modules of experts that have the weights of all experts in fused tensors."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from hf_lohan.config import LoadExperts, ResolvedConfig, SsdPath
from hf_lohan.files import ForeignStoreError
from hf_lohan.model.block import PARAM_ALIGN_NUMEL
from hf_lohan.ranks import Links
from hf_lohan.store.commits import COMMIT_NAME
from hf_lohan.store.manifest import read_manifest

logger = logging.getLogger(__name__)

_DECORATOR_ATTRIBUTES = ("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated")
"""Attributes that transformers' `use_experts_implementation` sets. This package does not import transformers."""
_WRAPPED_BY_ADAPTER = "base_layer"
"""Name of the wrapped module in PEFT's adapters."""


@dataclass(frozen=True)
class FusedExperts:
    """The weights of one module of experts."""

    module: nn.Module
    num_experts: int
    parameters: dict[str, nn.Parameter]
    """Tensors [num_experts, ...] by their names in the module."""

    def part(self, parameter: nn.Parameter, expert: int) -> tuple[int, int]:
        """Return one expert's elements [first, last) of a flattened parameter."""
        numel = parameter.numel() // self.num_experts
        return expert * numel, (expert + 1) * numel


def find_experts(model: nn.Module) -> dict[str, FusedExperts]:
    """Return the modules whose experts can stream one by one, by name. Others stream with their layer, because
    transformers does not call them through its registry of implementations, an adapter wraps them, or their weights
    have several dtypes, are partly frozen or are used elsewhere. Experts must also begin at multiples of
    `PARAM_ALIGN_NUMEL`, because an update computes a tensor's last elements with scalar instructions."""
    users = Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))
    return {
        name: experts
        for name, experts in fused_experts(model).items()
        if name.rpartition(".")[2] != _WRAPPED_BY_ADAPTER
        and _can_stream(experts)
        and all(users[parameter] == 1 for parameter in experts.parameters.values())
    }


def fused_experts(model: nn.Module) -> dict[str, FusedExperts]:
    """Return all modules that have the weights of their experts in fused tensors, by name."""
    return {
        name: FusedExperts(module, int(module.num_experts), parameters)
        for name, module in model.named_modules()
        if all(hasattr(module, attribute) for attribute in _DECORATOR_ATTRIBUTES)
        and (parameters := dict(module.named_parameters(recurse=False)))
    }


def _can_stream(experts: FusedExperts) -> bool:
    parameters, num = list(experts.parameters.values()), experts.num_experts
    has_others = any(True for child in experts.module.children() for _ in child.parameters())
    return (
        num > 1
        and not has_others
        and not getattr(experts.module, "has_post_expert_norm", False)
        and len({(parameter.dtype, parameter.requires_grad) for parameter in parameters}) == 1
        and all(parameter.dim() > 1 and parameter.shape[0] == num for parameter in parameters)
        and all(parameter.numel() // num % PARAM_ALIGN_NUMEL == 0 for parameter in parameters)
    )


_LOADED = {"streamed": "are loaded one by one", "with_layer": "are loaded with their layers"}


def experts_as_stored(model: nn.Module, config: ResolvedConfig, links: Links) -> ResolvedConfig:
    """Return the configuration with `experts: auto` resolved to the form in the store at its paths, and log it. All
    other settings must be resolved. All ranks call this together, because a rank may own no expert. Raises
    ForeignStoreError if the configuration requires the other form and the store belongs to this model class."""
    found = find_experts(model)
    if not found:
        return config
    stored_blocks = _stored_blocks(model, config.ssd)
    blocks = stored_blocks or set()
    is_streamed = any(f"{name}.{expert}" in blocks for name, of in found.items() for expert in range(of.num_experts))
    is_streamed = b"1" in links.all_gather("the form of experts in stores", b"1" if is_streamed else b"")
    if stored_blocks is None:  # opening the store reports the error
        return config
    stored: LoadExperts = "streamed" if is_streamed else "with_layer"
    if config.experts.load == stored:
        return config
    directory = config.ssd[0].path
    if config.experts.load != "auto":
        raise ForeignStoreError(
            f"{directory} holds a store of this model whose experts {_LOADED[stored]}, but experts: "
            f"{config.experts.load} is set; set experts to auto or {stored} to continue from it, or choose another "
            "directory and resume from a checkpoint, which works with both"
        )
    logger.info("experts %s, as in the store in %s", _LOADED[stored], directory)
    return replace(config, experts=replace(config.experts, load=stored))


def owners_as_stored(model: nn.Module, config: ResolvedConfig, links: Links) -> dict[str, int] | None:
    """Return the rank of each streamed expert, by the name of the expert's block, from the stores at the ranks' paths.
    All ranks call this together and get equal keys. None if the stores do not exist, have no commits, or do not have
    each expert once. Then the default owners apply, and a store without each expert cannot be opened."""
    found = {name: of.num_experts for name, of in find_experts(model).items()}
    if not found:
        return None
    # A store without a commit may come from a `lohan reshard --balance` that was killed.
    is_committed = any(os.path.lexists(os.path.join(ssd.path, COMMIT_NAME)) for ssd in config.ssd)
    blocks = (_stored_blocks(model, config.ssd) if is_committed else None) or set()
    own = {name: [number for number in range(num) if f"{name}.{number}" in blocks] for name, num in found.items()}
    told = links.all_gather("the experts in each rank's store", json.dumps(own).encode())
    by_rank = [
        [f"{name}.{number}" for name, numbers in json.loads(of_rank).items() for number in numbers] for of_rank in told
    ]
    return owners_by_name(by_rank, (f"{name}.{number}" for name, num in found.items() for number in range(num)))


def owners_by_name(by_rank: Iterable[Iterable[str]], experts: Iterable[str]) -> dict[str, int] | None:
    """Return the rank of each of ``experts``: the rank whose store has a block with the expert's name. None unless each
    expert is in the store of one rank."""
    wanted = set(experts)
    pairs = [(name, rank) for rank, names in enumerate(by_rank) for name in names if name in wanted]
    owners = dict(pairs)
    return owners if len(pairs) == len(owners) == len(wanted) > 0 else None


def _stored_blocks(model: nn.Module, paths: Sequence[SsdPath]) -> set[str] | None:
    """Return the names of the blocks in the model's store at these paths; None if there is no store of this model."""
    manifest = read_manifest(paths[0].path)
    own = type(model).__name__, sum(parameter.numel() for parameter in model.parameters())
    if manifest is None or (manifest.model.model_class, manifest.model.num_parameters) != own:
        return None
    return {record.block for record in manifest.layout.records}
