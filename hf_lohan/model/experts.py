"""Experts of a mixture: modules that hold the weights of all their experts in fused tensors, one behind the other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import nn

from hf_lohan.model.block import PARAM_ALIGN_NUMEL

_SAID_BY_DECORATOR = ("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated")
"""What transformers' `use_experts_implementation` says of a module; this room does not import transformers."""
_WRAPPED_BY_ADAPTER = "base_layer"
"""By this name PEFT's adapters have what they are added to."""


@dataclass(frozen=True)
class FusedExperts:
    """The weights of one module of experts."""

    module: nn.Module
    num_experts: int
    parameters: dict[str, nn.Parameter]
    """By their names in the module; each is [num_experts, ...]."""

    def part(self, parameter: nn.Parameter, expert: int) -> tuple[int, int]:
        """Elements [first, last) of a flattened parameter that are one expert's."""
        numel = parameter.numel() // self.num_experts
        return expert * numel, (expert + 1) * numel


def find_experts(model: nn.Module) -> dict[str, FusedExperts]:
    """By name, the modules of experts whose experts can stream one by one. Left out, so that they stream with their
    layer, are those that transformers does not call through its registry of implementations; whose weights have
    different dtypes, are used elsewhere, too, or in part frozen; that an adapter wraps, which adds to their weights as
    they are read; and whose experts are no whole number of vectors apart: an update rounds the last elements of a
    tensor as scalars are."""
    users = Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))
    found = {}
    for name, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        is_wrapped = name.rpartition(".")[2] == _WRAPPED_BY_ADAPTER
        if not parameters or is_wrapped or not all(hasattr(module, said) for said in _SAID_BY_DECORATOR):
            continue
        experts = FusedExperts(module, int(module.num_experts), parameters)
        if _can_stream(experts) and all(users[parameter] == 1 for parameter in parameters.values()):
            found[name] = experts
    return found


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
