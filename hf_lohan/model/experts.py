"""Modules of experts that have the weights of all experts in fused tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import nn

from hf_lohan.model.block import PARAM_ALIGN_NUMEL

_DECORATOR_ATTRIBUTES = ("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated")
"""Attributes that transformers' `use_experts_implementation` sets. This room does not import transformers."""
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
    """Return the modules whose experts can stream one by one, by name. Other modules stream with their layer. These are
    modules that transformers does not call through its registry of implementations, modules whose weights have several
    dtypes, are partly frozen or are used elsewhere, and modules that an adapter wraps. Experts must also begin at
    multiples of `PARAM_ALIGN_NUMEL`, because an update computes a tensor's last elements with scalar instructions."""
    users = Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))
    by_name = {}
    for name, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        is_wrapped = name.rpartition(".")[2] == _WRAPPED_BY_ADAPTER
        if not parameters or is_wrapped or not all(hasattr(module, attribute) for attribute in _DECORATOR_ATTRIBUTES):
            continue
        experts = FusedExperts(module, int(module.num_experts), parameters)
        if _can_stream(experts) and all(users[parameter] == 1 for parameter in parameters.values()):
            by_name[name] = experts
    return by_name


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
