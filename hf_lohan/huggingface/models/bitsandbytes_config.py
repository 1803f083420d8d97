"""What `BitsAndBytesConfig` means for weights in a store."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hf_lohan.config import ResolvedConfig
from hf_lohan.model import dtype_name
from hf_lohan.model.packed_weights import is_named, linear_routers
from hf_lohan.planner import Quantization

logger = logging.getLogger(__name__)

FUSED_EXPERTS = "experts"
"""The end of the names of fused experts, which bitsandbytes does not quantize."""


def quantized_as_asked(config: ResolvedConfig, asked: Any, compute_dtype: torch.dtype) -> ResolvedConfig:
    """The settings with `quantize` as a ``quantization_config`` asks; unchanged if it is None. Modules that either of
    them skips are skipped.

    ``compute_dtype``: the dtype in which the model computes. Raises ValueError for a field that cannot be honoured, and
    if the settings ask for another form.
    """
    if asked is None:
        return config
    quantization = _quantization_of(asked, compute_dtype)
    said = config.quantize
    if said.method != "auto" and replace(said, skip=()) != replace(quantization, skip=()):
        raise ValueError(
            f"quantization_config asks for {replace(quantization, skip=()).to_setting()}, and the offload settings for "
            f"quantize: {said.to_setting()}; give only one of them"
        )
    if said.method == "auto":
        return replace(config, quantize=quantization)
    skip = tuple(dict.fromkeys((*said.skip, *quantization.skip)))
    return replace(config, quantize=replace(said, skip=skip))


def name_unpacked(model: nn.Module, quantization: Quantization) -> None:
    """Log which modules bitsandbytes would pack, and `quantization`, which a `BitsAndBytesConfig` asked for, does
    not."""
    names = [name for name in linear_routers(model) if not is_named(name, quantization.skip)]
    if names:
        logger.warning(
            "quantization_config: bitsandbytes packs %s and %d more, and hf_lohan packs no module that chooses "
            "experts, so the numbers differ; name it in llm_int8_skip_modules for the numbers of bitsandbytes",
            names[0],
            len(names) - 1,
        )


def _quantization_of(asked: Any, compute_dtype: torch.dtype) -> Quantization:
    from transformers import BitsAndBytesConfig

    if isinstance(asked, Mapping):
        method = asked.get("quant_method", "bitsandbytes")
        asked = BitsAndBytesConfig.from_dict(dict(asked)) if method == "bitsandbytes" else asked
    if not isinstance(asked, BitsAndBytesConfig):
        raise ValueError(
            f"quantization_config={type(asked).__name__} is not honoured under offload; give a BitsAndBytesConfig with "
            "load_in_4bit=True, or set quantize in the offload settings"
        )
    if not asked.load_in_4bit:
        field = f"load_in_8bit={asked.load_in_8bit}"
        raise ValueError(
            f"quantization_config: {field} is not honoured under offload; set load_in_4bit=True, or set quantize: int8 "
            "in the offload settings, which computes with decoded weights"
        )
    if asked.llm_int8_enable_fp32_cpu_offload:
        raise ValueError(
            "quantization_config: llm_int8_enable_fp32_cpu_offload=True places weights on the CPU, where hf_lohan has "
            "them already; leave it out"
        )
    check_compute_dtype("quantization_config", asked.bnb_4bit_compute_dtype, compute_dtype)
    skip = tuple(asked.llm_int8_skip_modules or ())
    return Quantization(
        method=asked.bnb_4bit_quant_type,
        double=asked.bnb_4bit_use_double_quant,
        skip=tuple(dict.fromkeys((*skip, FUSED_EXPERTS))),
    )


def check_compute_dtype(config_name: str, asked: Any, compute_dtype: torch.dtype) -> None:
    """Raise ValueError if the configuration's bnb_4bit_compute_dtype, ``asked``, is not honoured."""
    # float32 is bitsandbytes' default, and stands for the dtype of the inputs.
    if str(asked or "float32").removeprefix("torch.") not in ("float32", dtype_name(compute_dtype)):
        raise ValueError(
            f"{config_name}: bnb_4bit_compute_dtype={asked} differs from the dtype of the model, {compute_dtype}, in "
            "which decoded weights compute; give both the same dtype"
        )
