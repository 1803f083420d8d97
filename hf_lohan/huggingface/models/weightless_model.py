"""Builds models without weights from a config, for planning."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from hf_lohan.compat.transformers_conversions import sources_of_weights
from hf_lohan.compat.transformers_private import build_from_config, groups_experts
from hf_lohan.huggingface.models.quantized_checkpoints import opened_tensors

logger = logging.getLogger(__name__)

_COMPARED_NUMEL = 4 << 20
"""Elements of two tied tensors that are compared at once."""
_NO_CODE: Mapping[str, Any] = MappingProxyType({})


def weightless_model(
    config: Any, dtype: torch.dtype | str = "auto", model_class: Any = None, code: Mapping[str, Any] = _NO_CODE
) -> Any:
    """Build the model of a config on meta, with grouped experts as in training. The default of ``model_class`` is
    `model_class_of`. ``code``: `trust_remote_code` and `code_revision`. Raises ValueError for a model that cannot be
    built or trained."""
    model_class = model_class or model_class_of(config, code)
    with torch.device("meta"):
        model = build_from_config(model_class, config, planning_dtype(config, dtype), code)
    if groups_experts(model):
        model.set_experts_implementation("grouped_mm")  # other implementations need the values of the routing
    return model


def config_as_tied(
    folder: str, config: Any, build: Callable[[Any], Any], dtype: torch.dtype
) -> tuple[Any, dict[str, str | None]]:
    """Return the config, and the names under which tensors of a checkpoint are loaded if these are others.

    A checkpoint may have a weight that its model ties, such as ``lm_head.weight``. Alone it is loaded as the weight to
    which it is tied. If that weight is there too and is equal in ``dtype``, it is not loaded (None). If they differ,
    the returned config does not tie, because `from_pretrained` keeps both. ``build`` makes a model of a config.
    Raises ValueError if weights differ that the model's class always ties.
    """

    def tied_by(config: Any) -> tuple[Any, Mapping[str, str]]:
        with torch.device("meta"):
            model = build(copy.deepcopy(config))
        return model, model.all_tied_weights_keys

    model, tied_weights = tied_by(config)
    with opened_tensors(Path(folder)) as tensors:
        sources = sources_of_weights(model, list(tensors))
        renamed: dict[str, str | None] = {}
        for tied, first in tied_weights.items():
            names, others = ([name for unit in sources.get(one, ()) for name in unit] for one in (tied, first))
            if len(names) != 1 or len(others) > 1 or names == others:
                continue
            if not others:
                renamed[names[0]], sources[first] = first, sources[tied]
                continue
            if _are_equal(tensors[names[0]], tensors[others[0]], dtype):
                renamed[names[0]] = None
                continue
            untied = copy.deepcopy(config)
            untied.tie_word_embeddings = untied.get_text_config().tie_word_embeddings = False
            if tied in tied_by(untied)[1]:
                raise ValueError(
                    f"{folder!r} has different values for {tied} and {first}, which {type(model).__name__} ties; use a "
                    "checkpoint with one of them, or load the model in memory and pass it"
                )
            logger.warning(
                "%s and %s have different values in %s, so they are not tied; set tie_word_embeddings to false in "
                "its config",
                tied,
                first,
                folder,
            )
            config = untied
    return config, renamed


def ties_weights(config: Any) -> bool:
    """Return whether a config ties the head to the embeddings."""
    return any(getattr(part, "tie_word_embeddings", False) for part in (config, config.get_text_config()))


def _are_equal(tensor: Any, other: Any, dtype: torch.dtype) -> bool:
    """Return whether two unread tensors have the same values."""
    shape = tensor.get_shape()
    if shape != other.get_shape():
        return False
    rows = max(1, _COMPARED_NUMEL // max(1, math.prod(shape[1:])))
    pieces = (slice(first, first + rows) for first in range(0, shape[0], rows))
    return all(torch.equal(tensor[piece].to(dtype), other[piece].to(dtype)) for piece in pieces)


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
