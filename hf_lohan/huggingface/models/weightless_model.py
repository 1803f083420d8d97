"""Builds models without weights from a config, for planning."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from hf_lohan.compat.transformers_private import build_from_config, groups_experts
from hf_lohan.huggingface.models.adapters import adapted_skeleton

logger = logging.getLogger(__name__)

_NO_CODE: Mapping[str, Any] = MappingProxyType({})


def weightless_model(
    config: Any,
    dtype: torch.dtype | str = "auto",
    lora_rank: int | None = None,
    model_class: Any = None,
    code: Mapping[str, Any] = _NO_CODE,
) -> Any:
    """Build the model of a config on meta, with grouped experts as in training. With a `lora_rank` the model is
    frozen, and has LoRA of that rank on all linear layers. The default of ``model_class`` is `model_class_of`.
    ``code``: `trust_remote_code` and `code_revision`. Raises ValueError for a model that cannot be built or trained."""
    model_class = model_class or model_class_of(config, code)
    with torch.device("meta"):
        model = build_from_config(model_class, config, planning_dtype(config, dtype), code)
    if groups_experts(model):
        model.set_experts_implementation("grouped_mm")  # other implementations need the values of the routing
    if lora_rank is None:
        return model
    from peft import LoraConfig, TaskType

    with torch.device("meta"):
        lora = LoraConfig(r=lora_rank, target_modules="all-linear", task_type=TaskType.CAUSAL_LM)
        return adapted_skeleton(model, lora)[0]


def model_class_of(config: Any, code: Mapping[str, Any] = _NO_CODE) -> Any:
    """Return the class that the config of a checkpoint names in `architectures`, or `AutoModelForCausalLM` if it names
    none, or one without a head. With `trust_remote_code` in ``code`` a class in the checkpoint's own code has
    precedence, and the auto class that loads it is returned. Logs a warning if the class does not exist."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    name = next(iter(getattr(config, "architectures", None) or ()), "")
    references = (getattr(config, "auto_map", None) or {}) if code.get("trust_remote_code") else {}
    for auto_class, reference in references.items():
        if str(reference).rpartition(".")[2] == name and hasattr(transformers, auto_class):
            return getattr(transformers, auto_class)
    own = getattr(transformers, name, None)
    if isinstance(own, type) and issubclass(own, transformers.PreTrainedModel):
        auto_class = transformers.AutoModelForCausalLM
        is_headless = name.endswith("Model") and name in MODEL_MAPPING_NAMES.values()
        return auto_class if is_headless and type(config) in auto_class._model_mapping else own
    if name:
        logger.warning(
            "the checkpoint's config names the class %s, which transformers %s does not have; AutoModelForCausalLM "
            "chooses one by the model type %r",
            name,
            transformers.__version__,
            config.model_type,
        )
    return transformers.AutoModelForCausalLM


def planning_dtype(config: Any, dtype: torch.dtype | str = "auto") -> torch.dtype:
    """Return the working dtype to plan for. "auto" is float32 if the config has float32, and bfloat16 for all other
    configs. Raises ValueError for a dtype that cannot be trained."""
    if dtype == "auto":
        name = str(getattr(config, "dtype", None)).removeprefix("torch.")
        return torch.float32 if name == "float32" else torch.bfloat16
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if resolved not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype={str(dtype)!r} cannot be trained; use auto, bfloat16 or float32")
    assert isinstance(resolved, torch.dtype)
    return resolved
