"""Finds the weights that the tensors of a quantized checkpoint encode, and refuses unsupported checkpoints."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_lohan.config import ResolvedConfig
from hf_lohan.costs import Quantization
from hf_lohan.huggingface.models.hub import SaidForm, Tensors
from hf_lohan.model import dtype_name
from hf_lohan.model.packed_weights import is_named, is_transposed, linear_routers
from hf_lohan.quantize.encoded_weights import (
    EncodedWeight,
    UnreadTensor,
    decode_fp4,
    decode_int4,
    decode_int8,
    decode_numbers,
)

logger = logging.getLogger(__name__)

FUSED_EXPERTS = "experts"
"""Suffix of the names of fused experts. bitsandbytes does not quantize these."""
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_OF_ACTIVATIONS = re.compile(r"(.+)([._])(activation_scale|qscale_act|(input|output)_(scale|zero_point|global_scale))")
_COMPRESSED_FORMATS = ("dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized")

Encoded = dict[str, tuple[EncodedWeight, tuple[str, ...]]]
"""Maps names of weights to (weight, names of the tensors that encode it)."""


def finder(path: str | Path, said: SaidForm) -> Callable[..., Encoded]:
    """Return the function that finds encoded weights, for the method in the config. It reads no tensor. For int8 it
    also takes the names of ``transposed`` weights. Raises ValueError for a method that is not decoded."""
    refuse_other_methods(path, said.method)
    return partial(_FINDERS[said.method], said.fields)


def refuse_other_methods(path: str | Path, method: str) -> None:
    """Raise ValueError for a method of quantization that is not decoded."""
    if method not in _FINDERS:
        raise ValueError(
            f"{str(path)!r} is quantized by {method}, which is not dequantized while it streams (as "
            f"{', '.join(_FINDERS)} are); use the model's original in bfloat16"
        )


def _scales_of(name: str, candidates: Sequence[str], tensors: Tensors) -> str:
    """Return the first of the ``candidates`` that the checkpoint has. Raises ValueError if it has none of them."""
    found = next((scales for scales in candidates if scales in tensors), None)
    if found is None:
        raise ValueError(
            f"{name} is quantized, but the checkpoint has no {candidates[0]} with its scales; download the checkpoint "
            "again, or use the model's original in bfloat16"
        )
    return found


def _check_scales(
    name: str, scales: str, tensors: Tensors, allowed: Mapping[tuple[int, ...], tuple[int, int]]
) -> tuple[int, int]:
    """Return the value in ``allowed`` for the shape of the scales. Raises ValueError if the shape is not in it."""
    shape = tuple(tensors[scales].get_shape())
    if shape not in allowed:
        raise ValueError(
            f"{scales} has shape {list(shape)}, and the scales of {name} with shape "
            f"{tensors[name].get_shape()} need {' or '.join(str(list(other)) for other in allowed)}; download the "
            "checkpoint again"
        )
    return allowed[shape]


def _matrices(name: str, tensor: UnreadTensor) -> list[int]:
    """Return a weight's shape: [rows, columns] or [experts, rows, columns]. Raises ValueError for another shape."""
    shape = tensor.get_shape()
    if len(shape) not in (2, 3):
        raise ValueError(
            f"{name} is quantized and has shape {shape}; only weights of two or three dimensions are dequantized"
        )
    return shape


def is_of_activations(name: str, encoded: Collection[str]) -> bool:
    """Return whether a tensor has the scales of inputs or outputs of an encoded weight. Decoding does not need these. A
    parameter of a model may have a name of the same form."""
    match = _OF_ACTIVATIONS.fullmatch(name)
    return match is not None and (f"{match[1]}.weight" if match[2] == "." else match[1]) in encoded


def _grid(rows: int, columns: int, block: tuple[int, int]) -> tuple[int, int]:
    return -(-rows // block[0]), -(-columns // block[1])


# fp8 and mxfp8: float8 codes, with a scale for each block or one scale. Experts may also have FP4 codes.


def _find_fp8(settings: Mapping[str, Any], tensors: Tensors) -> Encoded:
    block = settings.get("weight_block_size", (128, 128))
    encoded: Encoded = {}
    for name, tensor in tensors.items():
        is_fp4 = tensor.get_dtype() == "I8"
        if not is_fp4 and tensor.get_dtype() not in _FLOAT8 and f"{name}_scale_inv" not in tensors:
            continue
        stem = name.removesuffix(".weight")
        ends = (".weight_scale_inv", ".scale", ".qscale_weight") if stem != name else ("_scale_inv",)
        if f"{stem}.weight_scale" in tensors and not any(stem + end in tensors for end in ends):
            raise ValueError(
                f"{name} is in the format of AutoFP8, with its scale in {stem}.weight_scale, which transformers "
                "does not read; use the model's original in bfloat16, or a checkpoint of compressed-tensors"
            )
        scales = _scales_of(name, [stem + end for end in ends], tensors)
        *experts, rows, columns = _matrices(name, tensor)
        columns *= 2 if is_fp4 else 1
        sizes = [(1, 32), (1, 16)] if is_fp4 else [tuple(block), (1, 32)] if block else [(rows, columns), (1, columns)]
        allowed = {(*experts, *_grid(rows, columns, size)): size for size in reversed(sizes)}
        if not block:
            allowed |= dict.fromkeys(((), (1,), tuple(experts)), (rows, columns))
        size = _check_scales(name, scales, tensors, allowed)
        shape, decode = torch.Size((*experts, rows, columns)), decode_fp4 if is_fp4 else decode_numbers
        encoded[name] = EncodedWeight(shape, tensor, tensors[scales], decode, size), (name, scales)
    return encoded


# MXFP4: fused experts of gpt-oss.


def _find_mxfp4(settings: Mapping[str, Any], tensors: Tensors) -> Encoded:
    encoded: Encoded = {}
    for name in {key.removesuffix(end) for end in ("_blocks", "_scales") for key in tensors if key.endswith(end)}:
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        _scales_of(blocks, [scales], tensors)
        if blocks not in tensors or len(tensors[blocks].get_shape()) != 4:
            raise ValueError(f"{scales} has scales of MXFP4, but the checkpoint has no {blocks} [experts, rows, n, 16]")
        experts, rows, groups, stored = tensors[blocks].get_shape()
        size = _check_scales(blocks, scales, tensors, {(experts, rows, groups): (1, stored * 2)})
        shape = torch.Size((experts, groups * stored * 2, rows))
        weight = EncodedWeight(shape, tensors[blocks], tensors[scales], decode_fp4, size, is_transposed=True)
        encoded[name] = weight, (blocks, scales)
    return encoded


# compressed-tensors: float8, int8, and integers of 4 or 8 bits packed into int32.


def _find_compressed(settings: Mapping[str, Any], tensors: Tensors) -> Encoded:
    groups = weight_settings(settings)
    encoded: Encoded = {}
    for codes, tensor in tensors.items():
        name = codes.removesuffix("_packed")
        is_float = tensor.get_dtype() in _FLOAT8
        if codes.endswith("zero_point") or not (
            name.endswith(".weight") and (f"{name}_scale" in tensors or is_float or tensor.get_dtype() in ("I8", "I32"))
        ):
            continue
        scales = _scales_of(codes, [f"{name}_scale"], tensors)
        rows, columns, decode = _compressed_matrix(codes, tensors)
        kind = "float" if is_float else "int"
        sizes = [compressed_block(group, rows, columns) for group in groups if group.get("type", "int") == kind]
        allowed: dict[tuple[int, ...], tuple[int, int]] = {}
        for size in reversed(sizes):
            allowed[_grid(rows, columns, size)] = size
            if size == (rows, columns):
                allowed |= dict.fromkeys(((), (1,)), size)
        size = _check_scales(codes, scales, tensors, allowed)
        is_reordered = any(
            group.get("actorder") in ("group", "dynamic", True) and compressed_block(group, rows, columns) == size
            for group in groups
        )
        _check_order(name, columns, size[1], tensors, is_reordered=is_reordered)
        zero_points = tensors.get(f"{name}_zero_point")
        if zero_points is not None and size[0] != 1:
            raise ValueError(f"{name} has zero points for more than one row, which are not dequantized")
        weight = EncodedWeight(torch.Size((rows, columns)), tensor, tensors[scales], decode, size, zero_points)
        encoded[name] = weight, (codes, scales, *(name + end for end in ("_shape", "_zero_point", "_g_idx")))
    return encoded


def _check_order(name: str, columns: int, group_size: int, tensors: Tensors, *, is_reordered: bool) -> None:
    """Raise ValueError unless each group of a weight has consecutive columns. ``is_reordered``: whether the settings
    assign other columns to groups."""
    groups = tensors.get(f"{name}_g_idx")
    if groups is None and is_reordered:
        raise ValueError(
            f"{name} is quantized with actorder 'group', but the checkpoint has no {name}_g_idx with the group of each "
            "column; download the checkpoint again, or use the model's original in bfloat16"
        )
    if groups is not None and groups[...].flatten().tolist() != [column // group_size for column in range(columns)]:
        raise ValueError(
            f"{name}_g_idx assigns the columns of {name} to groups in another order (actorder 'group'), which is not "
            "dequantized while it streams; use the model's original in bfloat16"
        )


def _compressed_matrix(codes: str, tensors: Tensors) -> tuple[int, int, Callable[[Tensor], Tensor]]:
    """Return the rows and columns of a weight, and the function that decodes its codes."""
    tensor, name = tensors[codes], codes.removesuffix("_packed")
    if tensor.get_dtype() in (*_FLOAT8, "I8") and name == codes and len(tensor.get_shape()) == 2:
        rows, columns = tensor.get_shape()
        return rows, columns, decode_numbers
    shape = tensors.get(f"{name}_shape")
    if tensor.get_dtype() == "I32" and shape is not None:
        rows, columns = (int(size) for size in shape[...].tolist())
        for bits, decode in ((4, decode_int4), (8, decode_int8)):
            if tensor.get_shape() == [rows, -(-columns * bits // 32)]:
                return rows, columns, decode
    raise ValueError(
        f"{codes} has dtype {tensor.get_dtype()} and shape {tensor.get_shape()}, but compressed-tensors are only "
        "dequantized in float8, int8, or 4 or 8 bits packed into int32; use the model's original in bfloat16"
    )


def compressed_block(group: Mapping[str, Any], rows: int, columns: int) -> tuple[int, int]:
    """Return the number of rows and the number of columns that share a scale."""
    match group.get("strategy"):
        case "group":
            return 1, group["group_size"]
        case "block":
            block_rows, block_columns = group["block_structure"]
            return block_rows, block_columns
        case "tensor":
            return rows, columns
    return 1, columns


_BY_GROUPS = {"type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
_BY_ROWS = {"num_bits": 8, "strategy": "channel", "symmetric": True}
_PRESETS: Mapping[str, Mapping[str, Any] | None] = {
    "UNQUANTIZED": None,
    **{preset: {**_BY_GROUPS, "num_bits": 4} for preset in ("W4A16", "W4A8", "W4A4", "W4AFP8")},
    "W4A16_ASYM": {**_BY_GROUPS, "num_bits": 4, "symmetric": False},
    "W8A16": {**_BY_GROUPS, "num_bits": 8},
    **{preset: {**_BY_ROWS, "type": "int"} for preset in ("W8A8", "INT8")},
    "FP8": {**_BY_ROWS, "type": "float", "strategy": "tensor"},
    "FP8_DYNAMIC": {**_BY_ROWS, "type": "float"},
    "FP8_BLOCK": {**_BY_ROWS, "type": "float", "strategy": "block", "block_structure": [128, 128]},
}
"""Maps each preset of compressed-tensors to its settings for weights."""


def _group_of(name: str, group: Any) -> Mapping[str, Any]:
    """Return the settings of a group of `config_groups`, which may be a preset. Raises ValueError for unknown
    presets."""
    if isinstance(group, Mapping):
        return group
    if name.upper() not in _PRESETS:
        raise ValueError(
            f"the checkpoint is quantized by compressed-tensors with the preset {name!r} of config_groups, which is "
            f"not dequantized while it streams (as {', '.join(_PRESETS)} are); use the model's original in bfloat16"
        )
    return {"targets": group, "weights": _PRESETS[name.upper()]}


def weight_settings(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the settings for weights of each group. Raises ValueError if such weights cannot be dequantized."""
    named = (_group_of(name, group) for name, group in (settings.get("config_groups") or {}).items())
    groups = [group for group in named if group.get("weights")]
    whole, sparsity = settings.get("format", "dense"), (settings.get("sparsity_config") or {}).get("format", "dense")
    formats = {group.get("format") or whole for group in groups} | {whole, sparsity} - {"mixed-precision"}
    strategies = {group["weights"].get("strategy") for group in groups}
    refused = sorted(formats.difference(_COMPRESSED_FORMATS))
    refused += [f"strategy {name}" for name in strategies - {None, "tensor", "channel", "group", "block"}]
    refused += ["transform_config"] if settings.get("transform_config") else []
    if refused:
        raise ValueError(
            f"the checkpoint is quantized by compressed-tensors with {refused[0]}, which is not dequantized while it "
            f"streams (as {', '.join(_COMPRESSED_FORMATS[1:])} are); use the model's original in bfloat16"
        )
    return [group["weights"] for group in groups]


# int8 of bitsandbytes: a weight is its code times the row's scale / 127.


def transposed_weights(model: nn.Module) -> Collection[str]:
    """Return the names of weights that bitsandbytes packs transposed, which are weights of `Conv1D`. The files do not
    show which weights these are. The model may be on the meta device."""
    return {f"{name}.weight" for name, module in model.named_modules() if is_transposed(module)}


def _find_int8(_settings: Mapping[str, Any], tensors: Tensors, transposed: Collection[str] = ()) -> Encoded:
    """Find int8 weights. Names in the checkpoint and in ``transposed`` may have different prefixes, because a
    checkpoint of a causal LM may be loaded as its base model."""
    encoded: Encoded = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if stem == name or tensor.get_dtype() != "I8":
            continue
        scales = _scales_of(name, [f"{stem}.SCB"], tensors)
        rows, columns = _matrices(name, tensor)
        size = _check_scales(name, scales, tensors, {(rows,): (1, columns), (rows, 1): (1, columns)})
        layout = tensors.get(f"{stem}.weight_format")
        if layout is not None and int(layout[...].item()) != 0:
            raise ValueError(
                f"{name} has int8 codes in an order of an early bitsandbytes ({stem}.weight_format is not 0), which is "
                "not decoded; use the checkpoint from before it was packed, with quantize: int8"
            )
        is_turned = any(f".{full}".endswith(f".{name}") or name.endswith(f".{full}") for full in transposed)
        weight = EncodedWeight(
            torch.Size((columns, rows) if is_turned else (rows, columns)),
            tensor,
            _AsColumn(tensors[scales]),
            decode_numbers,
            size,
            is_transposed=is_turned,
            is_of_127=True,
        )
        encoded[name] = weight, (name, scales, f"{stem}.weight_format")
    return encoded


@dataclass(frozen=True)
class _AsColumn:
    """Scales of rows, with shape [rows, 1]."""

    scales: UnreadTensor

    def get_shape(self) -> list[int]:
        return [self.scales.get_shape()[0], 1]

    def get_dtype(self) -> str:
        return self.scales.get_dtype()

    def __getitem__(self, index: Any) -> Tensor:
        return self.scales[index].reshape(-1, 1)


_FINDERS: Mapping[str, Callable[..., Encoded]] = {
    "fp8": _find_fp8,
    "mxfp8": _find_fp8,
    "mxfp4": _find_mxfp4,
    "compressed-tensors": _find_compressed,
    "int8": _find_int8,
}


# `BitsAndBytesConfig` as an argument: weights are packed while they are stored.


def quantized_as_asked(config: ResolvedConfig, asked: Any, compute_dtype: torch.dtype) -> ResolvedConfig:
    """Return the settings with `quantize` set from ``asked``, a `quantization_config`. Modules to skip are combined.

    ``compute_dtype``: the dtype in which the model computes. Raises ValueError for an unsupported field, and if the
    settings ask for another form.
    """
    quantization = _quantization_of(asked, compute_dtype)
    said = config.quantize
    if said.method != "auto" and replace(said, skip=()) != replace(quantization, skip=()):
        raise ValueError(
            f"quantization_config asks for {replace(quantization, skip=()).to_setting()}, but the offload settings ask "
            f"for quantize: {said.to_setting()}; give only one of them"
        )
    if said.method == "auto":
        return replace(config, quantize=quantization)
    skip = tuple(dict.fromkeys((*said.skip, *quantization.skip)))
    return replace(config, quantize=replace(said, skip=skip))


def name_unpacked(model: nn.Module, quantization: Quantization) -> None:
    """Warn of modules that bitsandbytes would pack, but that ``quantization`` (from a `BitsAndBytesConfig`) skips."""
    names = [name for name in linear_routers(model) if not is_named(name, quantization.skip)]
    if names:
        logger.warning(
            "quantization_config: bitsandbytes packs %s and %d more, but hf_lohan packs no module that chooses "
            "experts, so results differ; for equal results, name these modules in llm_int8_skip_modules",
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
            "quantization_config: llm_int8_enable_fp32_cpu_offload=True places weights on the CPU, where hf_lohan "
            "keeps them already; leave it out"
        )
    check_compute_dtype("quantization_config", asked.bnb_4bit_compute_dtype, compute_dtype)
    skip = tuple(asked.llm_int8_skip_modules or ())
    return Quantization(
        method=asked.bnb_4bit_quant_type,
        double=asked.bnb_4bit_use_double_quant,
        skip=tuple(dict.fromkeys((*skip, FUSED_EXPERTS))),
    )


def check_compute_dtype(config_name: str, asked: Any, compute_dtype: torch.dtype) -> None:
    """Raise ValueError if ``asked``, the configuration's bnb_4bit_compute_dtype, differs from the model's dtype."""
    # float32 is the default of bitsandbytes, which then computes in the dtype of the inputs.
    if str(asked or "float32").removeprefix("torch.") not in ("float32", dtype_name(compute_dtype)):
        raise ValueError(
            f"{config_name}: bnb_4bit_compute_dtype={asked} differs from the dtype of the model, {compute_dtype}, in "
            "which decoded weights compute; give both the same dtype"
        )
