"""Chooses the weights that are packed: frozen matrices of the layers.

As in bitsandbytes, these are weights of `nn.Linear` and `Conv1D`. Fused experts are packed too. Norms, routers,
embeddings, convolutions, adapters and everything outside the layers keep their dtype.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from hf_lohan.costs import Quantization
from hf_lohan.model.experts import fused_experts
from hf_lohan.quantize import EncodedForm, FourBitForm, PackedForm, int8_form

logger = logging.getLogger(__name__)

_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Names of linear modules that choose experts."""
_TRANSPOSED_CLASS = "Conv1D"  # a name, because this package does not import transformers
_KEPT_LISTS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
_ADAPTER_NAMES = ("adapter_layer_names", "other_param_names")
"""Attributes of PEFT's layers with the names of the adapters' parts."""
_COPIES = "modules_to_save"


def packed_forms(
    model: nn.Module, layers: Mapping[str, nn.Module], quantization: Quantization
) -> dict[nn.Parameter, PackedForm]:
    """Return a dict from each packed parameter of `model` to its form. It is empty if `quantization` packs nothing.
    Raises ValueError if no weight can be packed, or if an expert is not a whole number of blocks."""
    if not quantization.packs:
        return {}
    if quantization.weights:
        return _forms_of_checkpoint(model, layers, quantization)
    of_adapters = _adapter_modules(model)
    kept = {name for module in model.modules() for of in _KEPT_LISTS for name in getattr(module, of, None) or ()}
    _refuse_unmatched(model, quantization.skip)
    skip, quantization = quantization.skip, replace(quantization, skip=())
    forms: dict[nn.Parameter, PackedForm] = {}
    skipped: set[nn.Parameter] = set()
    candidates = {name: module for name, module in model.named_modules() if module not in of_adapters}
    for name, module in candidates.items():
        plain_name = _module_in_base(name)
        is_in_layer = any(name.startswith(f"{layer}.") for layer in layers)
        if not is_in_layer or plain_name.rpartition(".")[2] in _ROUTERS or is_named(plain_name, tuple(kept)):
            continue
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.dim() != 2:
            continue
        is_matrix = type(module) is nn.Linear or is_transposed(module)
        if is_matrix and is_named(plain_name, skip):
            skipped.add(weight)
        elif is_matrix:
            forms[weight] = _form_of(quantization, weight.shape, is_transposed=is_transposed(module))
    for name, experts in fused_experts(model).items():
        plain_name = _module_in_base(name)
        is_of_expert = {n: p.dim() > 2 and p.shape[0] == experts.num_experts for n, p in experts.parameters.items()}
        matrices = {n: p for n, p in experts.parameters.items() if is_of_expert[n] and not p.requires_grad}
        if is_named(plain_name, skip):
            skipped.update(matrices.values())
        elif not is_named(plain_name, tuple(kept)):
            for param_name, parameter in matrices.items():
                _refuse_partial_blocks(f"{name}.{param_name}", parameter[0].numel(), quantization)
                forms[parameter] = _form_of(quantization, parameter.shape[1:])
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    others = {parameter for module in tables for parameter in module.parameters(recurse=False)}
    frozen = {p: form for p, form in forms.items() if not p.requires_grad and p not in others and p.numel()}
    if not frozen and any(not p.requires_grad and p not in others for p in skipped):
        raise ValueError(
            f"quantize: skip: {list(skip)} names every frozen matrix in the layers of {type(model).__name__}, so no "
            f"weight is left for {quantization.method}; name fewer modules, or set quantize to none"
        )
    others |= {parameter for module in of_adapters for parameter in module.parameters()}
    left = [
        (name, parameter.numel(), type(model.get_submodule(name.rpartition(".")[0])).__name__)
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and parameter.dim() > 1 and parameter.numel()
        if parameter not in frozen and parameter not in skipped and parameter not in others
        if any(name.startswith(f"{layer}.") for layer in layers)
    ]
    name, numel, kind = max(left, key=lambda of: of[1], default=("", 0, ""))
    if not frozen and left:
        raise ValueError(
            f"quantize: {quantization.method} packs nn.Linear, Conv1D and fused experts, and the frozen matrices in "
            f"the layers of {type(model).__name__} are of other classes, such as {kind} of {name}; set quantize to none"
        )
    if not frozen:
        raise ValueError(
            f"quantize: {quantization.method} is for frozen weights, and no matrix in the layers of "
            f"{type(model).__name__} is frozen; train adapters (peft_config=...), freeze weights, or set quantize to "
            "none"
        )
    if numel > max(parameter.numel() for parameter in frozen) // 2:
        logger.info("quantize: %s does not pack %s of %s and %d others", quantization.method, name, kind, len(left) - 1)
    return frozen


def linear_routers(model: nn.Module) -> list[str]:
    """Return the names of the linear modules that choose experts, which are not packed."""
    names = (_module_in_base(name) for name, module in model.named_modules() if type(module) is nn.Linear)
    return [name for name in names if name.rpartition(".")[2] in _ROUTERS]


def _module_in_base(name: str) -> str:
    """Return the name that a module had before the model got adapters."""
    return re.sub(r"\.base_layer(?=\.|$)", "", name.removeprefix("base_model.model."))


def _refuse_unmatched(model: nn.Module, skip: tuple[str, ...]) -> None:
    """Raise ValueError for a pattern that names no module with weights. Lists with "experts" are not checked. They come
    from checkpoints or a `BitsAndBytesConfig`, and may name modules of other models."""
    owners = {_module_in_base(name) for name, module in model.named_modules() if [*module.parameters(recurse=False)]}
    for pattern in () if "experts" in skip else skip:
        if not any(is_named(name, (pattern,)) for name in owners):
            names = sorted({_module_in_base(name) for name, _ in model.named_modules()})
            ends = sorted({name.rpartition(".")[2] for name in names})
            near = [name for name in names if name.endswith(pattern)] or difflib.get_close_matches(pattern, ends, 1)
            raise ValueError(
                f"quantize: skip: {pattern!r} names no module with weights of {type(model).__name__}; give the end of "
                f"a name, or a regular expression for its beginning{f', such as {near[0]!r}' if near else ''}"
            )


def _form_of(quantization: Quantization, shape: torch.Size, *, is_transposed: bool = False) -> PackedForm:
    """Return the form of a weight, or of an expert, of this shape."""
    if quantization.method == "int8":
        rows, columns = (shape[1], shape[0]) if is_transposed else (shape[:-1].numel(), shape[-1])
        return int8_form(rows, columns, is_transposed=is_transposed)
    return FourBitForm(quantization, shape.numel(), transposed_width=shape[0] if is_transposed else 0)


def _forms_of_checkpoint(
    model: nn.Module, layers: Mapping[str, nn.Module], quantization: Quantization
) -> dict[nn.Parameter, PackedForm]:
    """Return the packed forms in which the checkpoint has frozen parameters of the layers. All others are dense."""
    matrices = dict(quantization.weights)
    return {
        parameter: EncodedForm.of(quantization.method, matrices[plain_name])
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
        and (plain_name := name_in_base(name)) in matrices
        and any(name.startswith(f"{layer}.") for layer in layers)
    }


def name_in_base(name: str) -> str:
    """Return the name that a parameter had before the model got adapters."""
    return re.sub(r"\.(base_layer|original_module)(?=\.)", "", name.removeprefix("base_model.model."))


def is_transposed(module: nn.Module) -> bool:
    """Return whether a linear module stores its matrix transposed. bitsandbytes packs the transpose of this matrix."""
    return type(module).__name__ == _TRANSPOSED_CLASS


def is_named(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a module is skipped, by the rule of transformers: a pattern is the end of the name, or a regular
    expression for its beginning that ends at a dot."""
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return any(name.endswith(pattern) or re.match(rf"(?:{pattern}){boundary}", name) for pattern in patterns)


def _adapter_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules that belong to adapters of PEFT, and their copies of whole modules. Adapters that are not
    trained are frozen linear modules, but no part of the base."""
    found: set[nn.Module] = set()
    for module in model.modules():
        names = {_COPIES, *(name for of in _ADAPTER_NAMES for name in getattr(module, of, None) or ())}
        if hasattr(module, _ADAPTER_NAMES[0]) or hasattr(module, _COPIES):
            for name, child in module.named_children():
                if name in names:
                    found.update(child.modules())
    return found


def _refuse_partial_blocks(name: str, numel: int, quantization: Quantization) -> None:
    """Raise ValueError if an expert of ``numel`` elements would share a block with the next expert."""
    if quantization.method != "int8" and numel % quantization.block:
        raise ValueError(
            f"quantize: each expert of {name} has {numel} elements, which is not a multiple of block "
            f"{quantization.block}; choose another block, or skip: [{name.rpartition('.')[0]}]"
        )
