"""Frozen weights of fp8, MXFP4 and compressed-tensors checkpoints go to the store as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_lohan.compat.transformers_conversions import SourcesOfUnits, sources_of_weights
from hf_lohan.config import ResolvedConfig
from hf_lohan.huggingface.models.packed_checkpoints import FUSED_EXPERTS, packed_checkpoint
from hf_lohan.huggingface.models.quantized_checkpoints import (
    Encoded,
    QuantizedCheckpoint,
    Tensors,
    compressed_block,
    has_safetensors,
    method_of,
    quantization_of,
    quantized_checkpoint,
    weight_settings,
)
from hf_lohan.model.discovery import find_layers
from hf_lohan.model.packed_weights import packed_forms
from hf_lohan.planner import Quantization
from hf_lohan.planner.quantization import FORM_OF_THE_CHECKPOINT, CodeKind, EncodedMatrix
from hf_lohan.quantize import EncodedForm, int8_form
from hf_lohan.quantize.encoded_weights import EncodedWeight, UnreadTensor

StoreBytes = Callable[[str, str, int, Tensor], None]
"""Stores bytes of a weight: (name, "codes" or "scales", first byte, content)."""


@dataclass(frozen=True)
class EncodedCheckpoint:
    """The weights of a quantized checkpoint that can stay packed."""

    quantized: QuantizedCheckpoint
    sources: Mapping[str, SourcesOfUnits]
    """By the name of a parameter, the weights of the checkpoint that its units have."""
    matrices: Mapping[str, tuple[EncodedMatrix, ...]]
    """By the name of a parameter, the matrices of one unit."""

    def settings(self, config: ResolvedConfig, frozen: Sequence[str]) -> ResolvedConfig:
        """Return the settings with `quantize` as the checkpoint has it for these ``frozen`` parameters, or as they are
        if they ask for another form or if none of the parameters is packed."""
        weights = tuple((name, self.matrices[name]) for name in frozen if name in self.matrices)
        if config.quantize.method != "auto" or not weights:
            return config
        return replace(config, quantize=Quantization(method=self.quantized.method, weights=weights))

    def replace_encoded(
        self, is_packed: Callable[[str], bool], store: StoreBytes, tensors: Tensors
    ) -> dict[str, UnreadTensor]:
        """Give the bytes of packed weights to ``store``. Returns the checkpoint's tensors, decoded except for these."""
        found, encoded = self.quantized.replace_encoded(tensors), self.quantized.find(tensors)
        for name, units in self.sources.items():
            if name in self.matrices and is_packed(name):
                form = EncodedForm.of(self.quantized.method, self.matrices[name])
                for number, unit in enumerate(_matrices_of(units, encoded)):
                    for (weight, expert), (matrix, _, codes, scales) in zip(unit, form.starts, strict=True):
                        put = partial(store, name)
                        first = number * form.unit_codes_bytes + codes
                        for start, rows in weight.rows_of_codes(expert, matrix):
                            put("codes", first + start * matrix.row_bytes, rows)
                        put("scales", number * form.unit_scales_bytes + scales, weight.scales_of(expert, matrix))
                for source in (source for unit in units for source in unit):
                    found[source] = _StoredTensor(found[source])
        return found


class _StoredTensor:
    """Stands for a weight that the store has already."""

    is_stored = True

    def __init__(self, tensor: UnreadTensor) -> None:
        self._shape, self._dtype = tensor.get_shape(), tensor.get_dtype()

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return self._dtype

    def decode(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((last - first, *self._shape[1:]), dtype=dtype, device="meta")

    def __getitem__(self, index: Any) -> Tensor:
        raise AssertionError("the store has this weight")


def encoded_checkpoint(quantized: QuantizedCheckpoint, skeleton: nn.Module) -> EncodedCheckpoint:
    """Return what can stay packed of a checkpoint for the model ``skeleton``, which is on meta. Weights whose rows the
    model has in another order, and weights in other codes than those of `EncodedMatrix`, cannot."""
    quantized = quantized.of_model(skeleton)
    with quantized.opened() as tensors:
        encoded = quantized.find(tensors)
        sources = sources_of_weights(skeleton, quantized.replace_encoded(tensors))
        matrices: dict[str, tuple[EncodedMatrix, ...]] = {}
        for name, parameter in skeleton.named_parameters():
            units = sources.get(name)
            if units is not None and all(source in encoded for unit in units for source in unit):
                of_parameter = _unit_of(parameter.shape, _matrices_of(units, encoded))
                if of_parameter is not None:
                    matrices[name] = of_parameter
        return EncodedCheckpoint(quantized, {name: sources[name] for name in matrices}, matrices)


def packed_as_published(
    path: str | Path, model_config: Any, skeleton: nn.Module, config: ResolvedConfig, dtype: torch.dtype
) -> ResolvedConfig:
    """Return the settings with `quantize` as the checkpoint of a frozen model has it, for a plan. Where there are no
    safetensors files, its config alone says what is packed.

    ``skeleton``: the model on meta, which computes in ``dtype``. Raises the errors of `packed_checkpoint`,
    `quantized_checkpoint` and `encoded_checkpoint`.
    """
    fields = quantization_of(model_config)
    packed = packed_checkpoint(path, model_config)
    if packed is not None:
        return packed.settings(config, dtype)
    if fields is None:
        return config
    if fields.get("load_in_4bit") and config.quantize.method not in ("auto", fields.get("bnb_4bit_quant_type", "fp4")):
        raise ValueError(
            f"{str(path)!r} is packed in 4 bits, and quantize: {config.quantize.method} was asked for; leave quantize "
            "out, or plan the checkpoint from before it was packed"
        )
    if config.quantize.method != "auto":
        return config
    if not has_safetensors(path):
        return replace(config, quantize=_named_in_config(fields, skeleton.requires_grad_(False)))
    quantized = quantized_checkpoint(path, model_config)
    assert quantized is not None
    encoded = encoded_checkpoint(quantized, skeleton)
    return encoded.settings(config, [name for name, _ in skeleton.named_parameters()])


def _named_in_config(fields: Mapping[str, Any], skeleton: nn.Module) -> Quantization:
    """The form of a checkpoint whose `quantization_config` has these ``fields``. Kinds of codes that it does not name
    are those of its method's usual files."""
    method = method_of(fields)
    skip = [*(fields.get("modules_to_not_convert") or ()), *(fields.get("ignore") or ())]
    skip += fields.get("llm_int8_skip_modules") or ()
    names = tuple(name.removeprefix("re:") for name in skip)
    if fields.get("load_in_4bit"):
        is_double = bool(fields.get("bnb_4bit_use_double_quant"))
        of_bnb = Quantization(method=fields.get("bnb_4bit_quant_type", "fp4"), double=is_double, skip=names)
        return replace(of_bnb, skip=(*names, FUSED_EXPERTS))
    make = _USUAL[method]
    candidates = packed_forms(skeleton, find_layers(skeleton), Quantization(method="nf4", block=32, skip=names))
    weights = []
    for name, parameter in skeleton.named_parameters():
        of_unit = make(fields, parameter.shape) if parameter in candidates else ()
        if of_unit:
            weights.append((name, of_unit))
    return Quantization(method=method, weights=tuple(weights)) if weights else FORM_OF_THE_CHECKPOINT


def _usual_fp8(fields: Mapping[str, Any], shape: torch.Size) -> tuple[EncodedMatrix, ...]:
    rows, columns = shape[-2:]
    block = fields.get("weight_block_size", (128, 128)) or (rows, columns)
    of_block = min(block[0], rows), min(block[1], columns)
    return (EncodedMatrix(rows=rows, columns=columns, codes="float8_e4m3fn", scales="float32", block=of_block),)


def _usual_mxfp8(_fields: Mapping[str, Any], shape: torch.Size) -> tuple[EncodedMatrix, ...]:
    rows, columns = shape[-2:]
    block = 1, min(32, columns)
    return (EncodedMatrix(rows=rows, columns=columns, codes="float8_e4m3fn", scales="uint8", block=block),)


def _usual_mxfp4(_fields: Mapping[str, Any], shape: torch.Size) -> tuple[EncodedMatrix, ...]:
    if len(shape) != 3:
        return ()
    columns, rows = shape[-2:]
    return (EncodedMatrix(rows=rows, columns=columns, codes="fp4", scales="uint8", block=(1, 32), is_transposed=True),)


def _usual_compressed(fields: Mapping[str, Any], shape: torch.Size) -> tuple[EncodedMatrix, ...]:
    rows, columns = shape[-2:]
    group = next(iter(weight_settings(fields)), None)
    if group is None:
        return ()
    codes: CodeKind = "float8_e4m3fn" if group.get("type") == "float" else "int8"
    if codes == "int8" and fields.get("format") == "pack-quantized":
        codes = "int4_in_int32" if group.get("num_bits") == 4 else "int8_in_int32"
    block = compressed_block(group, rows, columns)
    of_block = min(block[0], rows), min(block[1], columns)
    has_zero_points = group.get("symmetric") is False
    return (
        EncodedMatrix(
            rows=rows, columns=columns, codes=codes, scales="bfloat16", block=of_block, has_zero_points=has_zero_points
        ),
    )


def _usual_int8(_fields: Mapping[str, Any], shape: torch.Size) -> tuple[EncodedMatrix, ...]:
    return int8_form(*shape).matrices if len(shape) == 2 else ()  # bitsandbytes leaves fused experts dense


_USUAL: Mapping[str, Callable[[Mapping[str, Any], torch.Size], tuple[EncodedMatrix, ...]]] = {
    "fp8": _usual_fp8,
    "mxfp8": _usual_mxfp8,
    "mxfp4": _usual_mxfp4,
    "compressed-tensors": _usual_compressed,
    "int8": _usual_int8,
}


def _matrices_of(units: SourcesOfUnits, encoded: Encoded) -> list[list[tuple[EncodedWeight, int | None]]]:
    """The matrices of each unit: a weight of the checkpoint, and the expert of it."""
    if len(units) == 1 and len(units[0]) == 1:
        weight = encoded[units[0][0]][0]
        if len(weight.shape) == 3:
            return [[(weight, expert)] for expert in range(weight.shape[0])]
    return [[(encoded[source][0], None) for source in unit] for unit in units]


def _unit_of(
    shape: torch.Size, units: Sequence[Sequence[tuple[EncodedWeight, int | None]]]
) -> tuple[EncodedMatrix, ...] | None:
    """The matrices of each unit of a parameter of this shape. None if they differ, or are no rows of the parameter."""
    described = [tuple(weight.matrix() for weight, _ in unit) for unit in units[:1]]
    first = described[0]
    matrices = [matrix for matrix in first if matrix is not None]
    if len(matrices) < len(first) or len({matrix.cut_bytes for matrix in matrices}) != 1:
        return None
    if any(tuple(weight.matrix() for weight, _ in unit) != first for unit in units[1:]):
        return None
    if len(matrices) > 1 and any(matrix.is_transposed for matrix in matrices):
        return None
    rows, columns = sum(matrix.rows for matrix in matrices), {matrix.columns for matrix in matrices}
    of_unit = (columns.pop(), rows) if matrices[0].is_transposed else (rows, columns.pop())
    whole = of_unit if len(shape) == 2 else (len(units), *of_unit)
    return tuple(matrices) if not columns and tuple(shape) == whole and (len(shape) == 3 or len(units) == 1) else None
