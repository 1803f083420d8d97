"""Finds the blocks of a causal LM, which are its decoder layers and the modules outside them that own parameters."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hf_lohan.compat.torch_private import storage_id, tree_leaves
from hf_lohan.costs import Quantization, SizeClass
from hf_lohan.model.block import Block, lay_out_block, round_up, with_large_granules
from hf_lohan.model.experts import FusedExperts, find_experts
from hf_lohan.model.packed_weights import packed_forms
from hf_lohan.optim import ADAMW, MUON, MasterFormat, MomentDtype, UpdateRule, master_format
from hf_lohan.store import RECORD_ALIGN_NUMEL

logger = logging.getLogger(__name__)

_LAYER_BASE_CLASS = "GradientCheckpointingLayer"  # a name, because this package does not import transformers
_REVERSIBLE = frozenset({"ReformerModel"})
"""Names of classes whose backward runs the layers again in an autograd function."""
_ADAPTER_FRACTION = 1 / 16
"""If less than this fraction of all parameters is trainable, the trainable parameters count as adapters."""
_RESIDENT_FRACTION = 1 / 16
"""Size relative to a layer below which a module outside the layers stays on the device instead of in a slot."""

Rules = Callable[[nn.Module], Mapping[nn.Parameter, UpdateRule]]
"""Returns the update rules of a model's parameters, real or on meta. Parameters without a rule get AdamW."""


def adamw_everywhere(model: nn.Module) -> dict[nn.Parameter, UpdateRule]:
    """Return the default `Rules`, which are AdamW for all parameters."""
    return {}


class DiscoveryError(ValueError):
    """The model has no layers that can stream."""


class MissedChangeError(ValueError):
    """The store, or a tensor of the model, would miss changes of a weight, so the model can only train in memory."""


class WrittenWeightError(MissedChangeError):
    """A forward or backward changes a weight."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} is changed while the model runs, as by nn.Embedding(max_norm=...) or weight.data.clamp_() in a "
            "forward, and the store would not get the change; change weights between steps within "
            "hf_lohan.gathered_parameters(...), or make what a forward changes a buffer"
        )


@dataclass(frozen=True)
class ModelBlocks:
    """All blocks of a model in forward order, and the blocks that each module with hooks needs."""

    blocks: list[Block]
    needs: dict[nn.Module, tuple[Block, ...]]
    layers: list[nn.Module]
    experts: dict[nn.Module, tuple[Block, ...]] = field(default_factory=dict)
    """The experts' blocks of each module whose experts stream one by one. No module with hooks needs these, because an
    expert's block is acquired when the expert is computed."""

    @property
    def table(self) -> Block | None:
        """The block of which only rows are loaded to the device. No module with hooks needs it."""
        return next((block for block in self.blocks if block.size_class is SizeClass.ROWS), None)

    @property
    def shared(self) -> list[Block]:
        """The blocks that several layers need."""
        return _blocks_of_several_layers(self.needs, self.layers)


def find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the decoder layers by name. Raises DiscoveryError if there are none or if they cannot stream."""
    if reversible := {type(module).__name__ for module in model.modules()} & _REVERSIBLE:
        raise DiscoveryError(
            f"{reversible.pop()} has reversible layers, whose backward runs them again in its own order, which "
            "streamed weights do not support; train it in memory, or choose a model without reversible layers"
        )
    named = {name: module for name, module in model.named_modules() if any(True for _ in module.parameters())}
    no_split = set(getattr(model, "_no_split_modules", None) or ())
    for module in named.values():
        no_split |= set(getattr(module, "_no_split_modules", None) or ())
    layers = _outermost(
        {name: m for name, m in named.items() if any(c.__name__ == _LAYER_BASE_CLASS for c in type(m).__mro__)}
    )
    if layers and no_split and not any(type(layer).__name__ in no_split for layer in layers.values()):
        logger.warning(
            "the layers (%s) are not among the model's _no_split_modules (%s); streaming them anyway",
            ", ".join(sorted({type(layer).__name__ for layer in layers.values()})),
            ", ".join(sorted(no_split)),
        )
    layers = layers or _outermost({name: m for name, m in named.items() if type(m).__name__ in no_split})
    layers = layers or _layers_in_lists(model)
    if not layers:
        raise DiscoveryError(
            f"{type(model).__name__} has no {_LAYER_BASE_CLASS} layers, no _no_split_modules and no list of modules of "
            "one class, so it cannot be cut into blocks; use a transformers causal LM"
        )
    return layers


def _layers_in_lists(model: nn.Module) -> dict[str, nn.Module]:
    """Return the children of the largest outermost module lists of one class. Two lists may have halves of the layers,
    such as attentions and feed-forwards."""
    lists = {
        name: {f"{name}.{key}": child for key, child in module.named_children()}
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and _may_be_layers(module)
    }
    lists = {name: lists[name] for name in _outermost({name: model.get_submodule(name) for name in lists})}
    numels = {name: sum(p.numel() for child in lists[name].values() for p in child.parameters()) for name in lists}
    most = max(numels.values(), default=0)
    return {
        name: child
        for list_name, children in lists.items()
        if numels[list_name] > most * _RESIDENT_FRACTION
        for name, child in children.items()
    }


def _may_be_layers(modules: nn.ModuleList) -> bool:
    """Return whether the list has several children of one class that can be called and have weights."""
    classes = {type(child) for child in modules}
    called = all(type(child).forward is not nn.Module.forward for child in modules)  # lists and dicts have no forward
    return len(modules) > 1 and len(classes) == 1 and called and all(any(True for _ in m.parameters()) for m in modules)


def _outermost(named: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules that are in no other module of ``named``."""
    return {
        name: module
        for name, module in named.items()
        if not any(name.startswith(f"{other}.") for other in named if other != name)
    }


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the matrices of the layers, which Muon updates. Embeddings, the head, norms and biases are left out, and
    fused experts, because these have three dimensions. Raises DiscoveryError for a model without layers."""
    modules = (module for layer in find_layers(model).values() for module in layer.modules())
    return {
        parameter
        for module in modules
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 2
    }


def kept_in_float32(model: nn.Module) -> set[str]:
    """Return the names of parameters that stay in float32 in a bfloat16 model of this class, such as some routers."""
    lists = (getattr(module, "_keep_in_fp32_modules_strict", None) or () for module in model.modules())
    patterns = {pattern.replace("*", ".*") for names in lists for pattern in names}
    any_pattern = re.compile("|".join(sorted(patterns)))
    return {name for name, _ in model.named_parameters() if patterns and any_pattern.search(name)}


def muon_for_matrices(model: nn.Module) -> dict[nn.Parameter, UpdateRule]:
    """Return the `Rules` with Muon for `hidden_matrices` and AdamW for all other parameters."""
    return dict.fromkeys(hidden_matrices(model), MUON)


def discover_blocks(
    model: nn.Module,
    working_dtype: torch.dtype | None = None,
    moment_dtype: MomentDtype = "float32",
    rules: Rules = adamw_everywhere,
    *,
    streams_experts: bool = False,
    by_rows: nn.Parameter | None = None,
    quantization: Quantization | None = None,
) -> ModelBlocks:
    """Cut `model` into blocks. Every parameter is in exactly one block. Tied weights are in the first block that uses
    them. Fused experts are in the block of their layer, or each in a separate block with `streams_experts`.

    `working_dtype` is the dtype of all parameters except integers and those in `kept_in_float32`. With None, each
    parameter keeps its dtype. A block has parameters of one dtype and one rule, so a module with several has several
    blocks. `by_rows` is the weight of which only rows are loaded to the device (`table_of_rows`), unless it stays
    there. `quantization` says how frozen weights of the layers are packed. Raises DiscoveryError, or ValueError for a
    dtype that cannot be trained, a quantization that packs nothing, or a trained parameter in the memory of another.
    """
    layers = find_layers(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    _refuse_shared_memory(names)
    _refuse_kept_views(model, names)
    rule_of = rules(model)
    kept = kept_in_float32(model) if working_dtype == torch.bfloat16 else set[str]()

    def form_of(parameter: nn.Parameter) -> MasterFormat:
        rule = rule_of.get(parameter, ADAMW)
        if parameter.requires_grad:
            rule.refuse_shape(names[parameter], tuple(parameter.shape))
        cast_dtype = torch.float32 if names[parameter] in kept else working_dtype
        dtype = cast_dtype if cast_dtype and parameter.is_floating_point() else parameter.dtype
        trained_name = names[parameter] if parameter.requires_grad else None
        return master_format(dtype, moment_dtype, rule, trained_name=trained_name)

    forms = packed_forms(model, layers, quantization or Quantization())
    packed = {names[parameter]: form for parameter, form in forms.items()}
    adapters = _adapters(list(names), layers)
    shared = _in_several(layers, set(adapters))
    owned: set[nn.Parameter] = {*adapters, *shared}
    fused = _inside(layers, find_experts(model), owned) if streams_experts else {}
    in_experts = {parameter for experts in fused.values() for parameter in experts.parameters.values()}
    owned |= in_experts
    blocks: list[Block] = []

    def add(name: str, size_class: SizeClass, parameters: list[nn.Parameter]) -> None:
        owned.update(parameters)
        for block_name, form, alike in _by_form(name, parameters, form_of):
            blocks.append(lay_out_block(block_name, size_class, {names[p]: p for p in alike}, form, packed=packed))

    small: dict[nn.Parameter, None] = {}  # a set that keeps the order
    odd: dict[str, list[nn.Parameter]] = {}
    for name, layer in layers.items():
        fresh = [p for p in layer.parameters() if p not in owned]
        if fresh:
            (_, _, most), *others = _by_form(name, fresh, form_of)
            add(name, SizeClass.LAYER, most)
            odd.update({other_name: alike for other_name, _, alike in others})
    if not blocks:
        raise DiscoveryError(
            f"the layers of {type(model).__name__} ({next(iter(layers))} and so on) have no separate weights, so "
            "nothing can stream; train it in memory"
        )
    outer = _modules_outside(model, layers)
    # Padding for states is not counted, because the format of states must not change the blocks.
    largest_layer = max(round_up(max(part.stop for part in block.slices), RECORD_ALIGN_NUMEL) for block in blocks)

    def add_or_keep(name: str, parameters: list[nn.Parameter], *, is_kept: bool = False) -> None:
        if is_kept or sum(p.numel() for p in parameters) <= largest_layer * _RESIDENT_FRACTION:
            small.update(dict.fromkeys(parameters))
        else:
            is_table = len(parameters) == 1 and parameters[0] is by_rows
            add(name, SizeClass.ROWS if is_table else SizeClass.OUTER, parameters)

    for name, parameters in odd.items():
        add_or_keep(name, parameters)
    for name, module in outer.items():
        fresh = [p for p in module.parameters(recurse=False) if p not in owned and p not in small]
        is_leaf = next(_nearest_with_forward(name, model).children(), None) is None
        add_or_keep(name, fresh, is_kept=not is_leaf)
    if small:
        add("resident", SizeClass.RESIDENT, list(small))
    if shared:
        add("shared", SizeClass.RESIDENT, shared)
    if adapters:
        add("adapters", SizeClass.RESIDENT, adapters)
    for name, experts in fused.items():
        named = {names[parameter]: parameter for parameter in experts.parameters.values()}
        form = form_of(next(iter(named.values())))
        for number in range(experts.num_experts):
            parts = {param_name: experts.part(parameter, number) for param_name, parameter in named.items()}
            blocks.append(lay_out_block(f"{name}.{number}", SizeClass.EXPERT, named, form, parts=parts, packed=packed))

    blocks = with_large_granules(blocks)
    by_name = {block.name: block for block in blocks}
    shown = (block for block in blocks if block.size_class is not SizeClass.ROWS)
    block_of = {part.parameter: block for block in shown for part in block.slices if part.is_whole}
    return ModelBlocks(
        _in_forward_order(blocks, model),
        _needs(model, layers, outer, block_of),
        list(layers.values()),
        {
            experts.module: tuple(by_name[f"{name}.{number}"] for number in range(experts.num_experts))
            for name, experts in fused.items()
        },
    )


def _refuse_shared_memory(names: Mapping[nn.Parameter, str]) -> None:
    """Raise ValueError if a trained parameter has elements in common with another parameter. The store has separate
    elements for each, so an update of one would not reach the other."""
    in_storage: dict[int, list[nn.Parameter]] = {}
    for parameter in names:
        if type(parameter) is nn.Parameter and parameter.numel():
            in_storage.setdefault(storage_id(parameter), []).append(parameter)
    for together in in_storage.values():
        together.sort(key=_first_byte)
        for number, one in enumerate(together):
            end = _end_byte(one)
            for other in together[number + 1 :]:
                if _first_byte(other) >= end:
                    break
                if (one.requires_grad or other.requires_grad) and _have_common_elements(one, other):
                    raise ValueError(
                        f"{names[one]} and {names[other]} are two parameters in the same memory, which offload cannot "
                        "update together as torch does; tie them with one nn.Parameter (b.weight = a.weight), give one "
                        "a copy (clone()), or leave ensure_weight_tying of PEFT out"
                    )


def _refuse_kept_views(model: nn.Module, names: Mapping[nn.Parameter, str]) -> None:
    """Raise MissedChangeError if a module keeps a tensor in a trained parameter's memory. No update would reach it."""
    trained = {storage_id(p): name for p, name in names.items() if p.requires_grad and type(p) is nn.Parameter}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            leaves = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.layout is torch.strided)
            shared = {storage_id(leaf) for leaf in leaves if not isinstance(leaf, nn.Parameter)} & trained.keys()
            if shared and not hasattr(module, f"{name}_orig"):  # spectral_norm makes such a tensor again
                raise MissedChangeError(
                    f"{path or type(model).__name__} keeps a tensor in the memory of {trained[shared.pop()]}, which is "
                    "trained, but updates in the store would not reach this tensor; make it in the forward, or clone it"
                )


def _first_byte(parameter: nn.Parameter) -> int:
    return int(parameter.storage_offset()) * parameter.element_size()


def _end_byte(parameter: nn.Parameter) -> int:
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return _first_byte(parameter) + (last + 1) * parameter.element_size()


def _have_common_elements(one: nn.Parameter, other: nn.Parameter) -> bool:
    """Return whether two parameters whose ranges overlap have common elements. Columns of a matrix do not."""
    if one.element_size() != other.element_size():
        return True
    first, end = min(map(_first_byte, (one, other))), max(map(_end_byte, (one, other)))
    used = torch.zeros(2, (end - first) // one.element_size(), dtype=torch.bool, device="cpu")
    for row, parameter in zip(used, (one, other), strict=True):
        start = row.storage_offset() + parameter.storage_offset() - first // one.element_size()
        row.as_strided(parameter.shape, parameter.stride(), start).fill_(True)
    return bool(used.all(dim=0).any())


def _inside(
    layers: dict[str, nn.Module], experts: dict[str, FusedExperts], others: set[nn.Parameter]
) -> dict[str, FusedExperts]:
    """Return the experts in layers whose weights are not among ``others``."""
    return {
        name: module
        for name, module in experts.items()
        if any(name.startswith(f"{layer}.") for layer in layers) and others.isdisjoint(module.parameters.values())
    }


def _adapters(parameters: list[nn.Parameter], layers: dict[str, nn.Module]) -> list[nn.Parameter]:
    """Return the trainable parameters if they are few and every layer has frozen weights. They stay on the device, so
    that their updates never make a layer's slot outdated."""
    trainable = [p for p in parameters if p.requires_grad]
    is_few = sum(p.numel() for p in trainable) < _ADAPTER_FRACTION * sum(p.numel() for p in parameters)
    has_base = all(any(not p.requires_grad for p in layer.parameters()) for layer in layers.values())
    return trainable if is_few and has_base else []


def _in_several(layers: dict[str, nn.Module], others: set[nn.Parameter]) -> list[nn.Parameter]:
    """Return the weights that several layers share, which stay on the device."""
    num_users = Counter(p for layer in layers.values() for p in layer.parameters() if p not in others)
    return [p for p, number in num_users.items() if number > 1]


def _by_form(
    name: str, parameters: list[nn.Parameter], form_of: Callable[[nn.Parameter], MasterFormat]
) -> list[tuple[str, MasterFormat, list[nn.Parameter]]]:
    """Group a module's parameters by format, with a block name for each format. The largest group is first."""
    alike: dict[MasterFormat, list[nn.Parameter]] = {}
    for parameter in parameters:
        alike.setdefault(form_of(parameter), []).append(parameter)
    most_first = sorted(alike.items(), key=lambda item: -sum(p.numel() for p in item[1]))

    def name_of(form: MasterFormat) -> str:
        most, _ = most_first[0]
        dtype = str(form.working_dtype).removeprefix("torch.")
        suffix = [dtype] if form.working_dtype != most.working_dtype else []
        return ".".join([name, *suffix, *([form.rule.name] if form.rule != most.rule else [])])

    return [(name_of(form), form, of_form) for form, of_form in most_first]


def _modules_outside(model: nn.Module, layers: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules outside the layers that own parameters directly."""
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
        needed = dict.fromkeys(owned[p] for p in module.parameters() if p in owned)  # no streamed experts
        needs[module] = tuple(sorted(needed, key=lambda block: block.size_class is not SizeClass.LAYER))
        assert sum(block.size_class is SizeClass.LAYER for block in needs[module]) <= 1, f"{name} needs other layers"
    for name, module in outer.items():
        user = _nearest_with_forward(name, model)
        fresh = tuple(owned[p] for p in module.parameters(recurse=False) if p in owned)  # no table of rows
        needs[user] = tuple(dict.fromkeys((*needs.get(user, ()), *fresh)))
    # The whole model needs the shared blocks, so that they are shown once per pass and not once per layer.
    if shared := _blocks_of_several_layers(needs, layers.values()):
        needs[model] = tuple(dict.fromkeys((*needs.get(model, ()), *shared)))
    return needs


def _blocks_of_several_layers(needs: dict[nn.Module, tuple[Block, ...]], layers: Iterable[nn.Module]) -> list[Block]:
    num_users = Counter(block for layer in layers for block in needs[layer])
    return [block for block, number in num_users.items() if number > 1 and block.size_class is SizeClass.RESIDENT]


def _nearest_with_forward(name: str, model: nn.Module) -> nn.Module:
    """Return the module or its nearest parent that can be called. PEFT's ParameterDict cannot be called."""
    module = model.get_submodule(name)
    while isinstance(module, nn.ParameterDict | nn.ParameterList | nn.ModuleDict | nn.ModuleList):
        name = name.rpartition(".")[0]
        module = model.get_submodule(name)
    return module


def _in_forward_order(blocks: list[Block], model: nn.Module) -> list[Block]:
    """Sort blocks by declaration, which almost always is the order of use. Later loads follow a recorded order."""
    position = {parameter: index for index, parameter in enumerate(model.parameters())}
    return sorted(blocks, key=lambda block: min(position[part.parameter] for part in block.slices))
