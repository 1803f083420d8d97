"""Find the blocks of any causal LM: its decoder layers, and the modules outside them that own parameters."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass

from torch import nn

from hf_lohan.model.block import Block, lay_out_block, round_up, with_good_granules
from hf_lohan.planner import SizeClass
from hf_lohan.store import RECORD_ALIGN_NUMEL

logger = logging.getLogger(__name__)

_LAYER_BASE_CLASS = "GradientCheckpointingLayer"  # by name: this room does not import transformers
_RESIDENT_FRACTION = 1 / 16
"""A module outside the layers this much smaller than a layer is not worth a slot of its own: it stays on the device."""


class DiscoveryError(ValueError):
    """The model has no layers that could stream."""


@dataclass(frozen=True)
class ModelBlocks:
    """All blocks of a model in forward order, and which of them each hooked module needs."""

    blocks: list[Block]
    needs: dict[nn.Module, tuple[Block, ...]]
    layers: list[nn.Module]


def find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The decoder layers by name. Raises DiscoveryError where none can be told."""
    named = {name: module for name, module in model.named_modules() if any(True for _ in module.parameters())}
    no_split = set(getattr(model, "_no_split_modules", None) or ())
    for module in named.values():
        no_split |= set(getattr(module, "_no_split_modules", None) or ())
    layers = _outermost(
        {name: m for name, m in named.items() if any(c.__name__ == _LAYER_BASE_CLASS for c in type(m).__mro__)}
    )
    if layers and no_split and not any(type(layer).__name__ in no_split for layer in layers.values()):
        logger.warning(
            "the layers found (%s) are not among the model's _no_split_modules (%s); streaming them all the same",
            ", ".join(sorted({type(layer).__name__ for layer in layers.values()})),
            ", ".join(sorted(no_split)),
        )
    if not layers:
        layers = _outermost({name: m for name, m in named.items() if type(m).__name__ in no_split})
    if not layers:
        raise DiscoveryError(
            f"{type(model).__name__} has no {_LAYER_BASE_CLASS} layers and no _no_split_modules, so it cannot be cut "
            "into blocks; use a transformers causal LM"
        )
    return layers


def _outermost(named: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Drop modules that lie inside another of the set."""
    return {
        name: module
        for name, module in named.items()
        if not any(name.startswith(f"{other}.") for other in named if other != name)
    }


def discover_blocks(model: nn.Module, align_numel: int = 1) -> ModelBlocks:
    """Cut `model` into blocks. Every parameter lands in exactly one; tied weights in the first that uses them.
    `align_numel`: see `Block`."""
    layers = find_layers(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    owned: dict[nn.Parameter, Block] = {}
    blocks: list[Block] = []

    def add(name: str, size_class: SizeClass, parameters: list[nn.Parameter]) -> None:
        block = lay_out_block(name, size_class, {names[p]: p for p in parameters}, align_numel)
        blocks.append(block)
        owned.update({part.parameter: block for part in block.slices})

    for name, layer in layers.items():
        fresh = [p for p in layer.parameters() if p not in owned]
        if fresh:
            add(name, SizeClass.LAYER, fresh)
    outer = _modules_outside(model, layers)
    # As it is without padding for states, whose form must not decide which blocks there are.
    largest_layer = max(round_up(max(part.stop for part in block.slices), RECORD_ALIGN_NUMEL) for block in blocks)
    small: dict[nn.Parameter, None] = {}  # a set that keeps the order
    for name, module in outer.items():
        fresh = [p for p in module.parameters(recurse=False) if p not in owned and p not in small]
        is_leaf = next(_nearest_with_forward(name, model).children(), None) is None
        if sum(p.numel() for p in fresh) <= largest_layer * _RESIDENT_FRACTION or not is_leaf:
            small.update(dict.fromkeys(fresh))
        else:
            add(name, SizeClass.OUTER, fresh)
    if small:
        add("resident", SizeClass.RESIDENT, list(small))

    blocks = with_good_granules(blocks)
    owned = {part.parameter: block for block in blocks for part in block.slices}
    return ModelBlocks(_in_forward_order(blocks, model), _needs(model, layers, outer, owned), list(layers.values()))


def _modules_outside(model: nn.Module, layers: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Modules that own parameters themselves and lie in no layer."""
    return {
        name: module
        for name, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
        and not any(name == layer or name.startswith(f"{layer}.") for layer in layers)
    }


def _needs(
    model: nn.Module, layers: dict[str, nn.Module], outer: dict[str, nn.Module], owned: dict[nn.Parameter, Block]
) -> dict[nn.Module, tuple[Block, ...]]:
    needs: dict[nn.Module, tuple[Block, ...]] = {}
    for name, module in layers.items():
        needs[module] = tuple(dict.fromkeys(owned[p] for p in module.parameters()))
        if sum(block.size_class is SizeClass.LAYER for block in needs[module]) > 1:
            raise DiscoveryError(f"{name} shares weights with another layer, which cannot be offloaded yet")
    for name, module in outer.items():
        user = _nearest_with_forward(name, model)
        fresh = tuple(owned[p] for p in module.parameters(recurse=False))
        needs[user] = tuple(dict.fromkeys((*needs.get(user, ()), *fresh)))
    return needs


def _nearest_with_forward(name: str, model: nn.Module) -> nn.Module:
    """Containers (a ParameterDict of PEFT, say) are never called: whoever holds them uses what they own."""
    module = model.get_submodule(name)
    while isinstance(module, nn.ParameterDict | nn.ParameterList | nn.ModuleDict | nn.ModuleList):
        name = name.rpartition(".")[0]
        module = model.get_submodule(name)
    return module


def _in_forward_order(blocks: list[Block], model: nn.Module) -> list[Block]:
    """Modules are declared in the order of use almost everywhere; where not, the recorded order corrects prefetch."""
    position = {parameter: index for index, parameter in enumerate(model.parameters())}
    return sorted(blocks, key=lambda block: min(position[part.parameter] for part in block.slices))


def check_one_dtype(blocks: list[Block]) -> None:
    """Raises ValueError where parameters have several dtypes: a block's record is flat, of one element type."""
    by_dtype: dict[str, str] = {}
    counts: dict[str, int] = defaultdict(int)
    for block in blocks:
        for part in block.slices:
            dtype = str(part.parameter.dtype)
            by_dtype.setdefault(dtype, part.name)
            counts[dtype] += 1
    if len(by_dtype) > 1:
        found = ", ".join(f"{counts[dtype]} of {dtype} (such as {name})" for dtype, name in by_dtype.items())
        raise ValueError(f"the model's parameters have several dtypes: {found}; load it with one dtype=... "
            "(PEFT adapters: autocast_adapter_dtype=False)")
