"""Builds models without weights from a config, for planning."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import torch

from hf_lohan.compat.transformers_private import build_from_config, groups_experts
from hf_lohan.huggingface.models.adapters import adapted_skeleton

logger = logging.getLogger(__name__)

_CONFIG_NAME = "config.json"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def weightless_model(
    config: Any, dtype: torch.dtype | str = "auto", lora_rank: int | None = None, model_class: Any = None
) -> Any:
    """Build the model of a config on meta, with grouped experts as in training. With a `lora_rank` the model is
    frozen, and has LoRA of that rank on all linear layers. The default of ``model_class`` is `model_class_of`. Raises
    ValueError for a model that cannot be built or trained."""
    with torch.device("meta"):
        model = build_from_config(model_class or model_class_of(config), config, planning_dtype(config, dtype))
    if groups_experts(model):
        model.set_experts_implementation("grouped_mm")  # other implementations need the values of the routing
    if lora_rank is None:
        return model
    from peft import LoraConfig, TaskType

    with torch.device("meta"):
        lora = LoraConfig(r=lora_rank, target_modules="all-linear", task_type=TaskType.CAUSAL_LM)
        return adapted_skeleton(model, lora)[0]


def model_class_of(config: Any) -> Any:
    """Return the class that the config of a checkpoint names in `architectures`, or `AutoModelForCausalLM` if it names
    none. Logs a warning if transformers does not have the class."""
    import transformers

    name = next(iter(getattr(config, "architectures", None) or ()), "")
    own = getattr(transformers, name, None)
    if isinstance(own, type) and issubclass(own, transformers.PreTrainedModel):
        return own
    if name:
        logger.warning(
            "the checkpoint's config names the class %s, which transformers %s does not have; AutoModelForCausalLM "
            "chooses one by the model type %r",
            name,
            transformers.__version__,
            config.model_type,
        )
    return transformers.AutoModelForCausalLM


def read_model_config(path_or_config: str | Path) -> Any:
    """Return the transformers config of a folder with a `config.json`, of such a file, or of a model in the Hub. Raises
    ValueError if it does not exist."""
    from transformers import AutoConfig

    path = Path(path_or_config)
    if path.is_dir() and not (path / _CONFIG_NAME).is_file():
        raise ValueError(
            f"the folder {str(path)!r} has no {_CONFIG_NAME}; give a checkpoint folder or a {_CONFIG_NAME}"
        )
    if not path.exists() and not _HUB_NAME.fullmatch(str(path_or_config)):
        raise ValueError(
            f"{str(path)!r} does not exist; give a checkpoint folder, a {_CONFIG_NAME} or a model in the Hub"
        )
    try:
        return AutoConfig.from_pretrained(os.fspath(path_or_config))
    except (OSError, ValueError, KeyError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        if not path.exists():
            raise ValueError(
                f"{str(path)!r} is not a folder here, and no model of this name is in the Hub or its cache "
                f"({reason.rstrip('.')}); give the path of a checkpoint folder or of a {_CONFIG_NAME}, or the name of "
                "a model in the Hub"
            ) from None
        raise ValueError(f"{str(path)!r} has no model config: {reason}") from None


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
