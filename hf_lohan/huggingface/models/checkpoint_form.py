"""Reads the weights in the files of a checkpoint, which may be plain, or packed in one of several forms.

Packed weights of frozen layers are stored without decoding, if the store can decode them later. All other packed
weights are decoded while they are loaded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_lohan.compat.transformers_conversions import SourcesOfUnits, bytes_in_file, sources_of_weights
from hf_lohan.config import ResolvedConfig
from hf_lohan.costs import Quantization
from hf_lohan.costs.quantization import PACKED_METHODS, SCALES_PER_SCALE, CodeKind, EncodedMatrix
from hf_lohan.huggingface.models.hub import SaidForm, Tensors, has_safetensors, method_of, opened_tensors
from hf_lohan.huggingface.models.quantized_checkpoints import (
    FUSED_EXPERTS,
    Encoded,
    check_compute_dtype,
    compressed_block,
    finder,
    is_of_activations,
    name_unpacked,
    quantized_as_asked,
    transposed_weights,
    weight_settings,
)
from hf_lohan.huggingface.models.weight_sink import WeightSink
from hf_lohan.model import Block, dtype_name
from hf_lohan.model.discovery import find_layers
from hf_lohan.model.packed_weights import is_named, packed_forms
from hf_lohan.quantize import EncodedForm, int8_form, join_scales, scale_values, stored_bytes, values_of
from hf_lohan.quantize.encoded_weights import EncodedWeight, UnreadTensor, decode_scales, whole_pieces

_CHECKED_AT_ONCE_NUMEL = 1 << 22
_STATE = "quant_state.bitsandbytes__"


class CheckpointForm:
    """The form of the weights in a checkpoint. This class is for plain weights. `read_form` chooses the class.

    The order of calls is `settings_asked`, `fit`, `settings`, and then all others.
    """

    is_decoded = False
    """Whether packed weights that cannot stay packed are decoded."""

    def __init__(self, path: str | Path, model_config: Any) -> None:
        self.path = Path(path)
        self.model_config = model_config
        """The model's config without `quantization_config`, so that transformers loads the weights as usual."""
        self._asked: ResolvedConfig | None = None

    def settings_asked(self, config: ResolvedConfig, asked: Any, dtype: torch.dtype) -> ResolvedConfig:
        """Return the settings with `quantize` set from ``asked``, a `quantization_config` or None, for a model that
        computes in ``dtype``. Raises ValueError if ``asked`` is not supported."""
        self._asked = None if asked is None else quantized_as_asked(config, asked, dtype)
        return self._asked or config

    def fit(self, skeleton: nn.Module) -> None:
        """Find the weights that can stay packed. ``skeleton`` is on the meta device, and has no adapters yet."""
        if self._asked is not None:
            name_unpacked(skeleton, self._asked.quantize)

    def settings(self, config: ResolvedConfig, dtype: torch.dtype, frozen: Collection[str]) -> ResolvedConfig:
        """Return the settings with `quantize` set from the checkpoint, for the ``frozen`` parameters of a model that
        computes in ``dtype``. Reads only scales. Raises ValueError if settings and checkpoint cannot be combined."""
        return config

    def check_stored(self, blocks: Iterable[Block], names: Mapping[str, str]) -> None:
        """Raise ValueError if a packed weight cannot be stored without decoding. ``names`` maps the model's names of
        weights to their stored names."""

    def replace_tensors(self, tensors: Tensors, sink: WeightSink | None = None) -> Mapping[str, Any]:
        """Return the tensors that transformers loads in place of the checkpoint's ``tensors``. Loading a tensor reads
        it. The bytes of weights that stay packed are passed to ``sink``. Without it all weights are decoded."""
        return tensors

    def check_loaded(self, model: Any, unused: Collection[str]) -> None:
        """Raise ValueError if a loaded model lacks weights because tensors of the checkpoint were ``unused``."""


def read_form(
    path: str | Path, model_config: Any, said: SaidForm | None, *, stays_packed: bool = True
) -> CheckpointForm:
    """Return the form of the checkpoint in a folder. ``said``: result of `quantization_of`. Without ``stays_packed``
    all weights must be decoded.

    Raises ValueError for an unsupported form, and for scales that are missing, cut short or not finite, before weights
    are read.
    """
    if said is None:
        return CheckpointForm(path, model_config)
    packed = _FourBitForm.open(path, said) if stays_packed else None
    return packed or _EncodedForm(path, said)


def published_form(path: str | Path, model_config: Any, said: SaidForm) -> CheckpointForm:
    """Return the form of a checkpoint for a plan. Without safetensors files it follows from the config alone."""
    return read_form(path, model_config, said) if has_safetensors(path) else _NamedForm(path, said)


# Codes and scales: fp8, MXFP4, compressed-tensors, int8.


class _EncodedForm(CheckpointForm):
    """The form of weights that are products of codes and scales."""

    is_decoded = True

    def __init__(self, path: str | Path, said: SaidForm) -> None:
        super().__init__(path, said.plain)
        self._method = said.method
        self._find = finder(path, said)
        self._sources: Mapping[str, SourcesOfUnits] = {}
        """Maps the name of a parameter to the weights of the checkpoint in each of its units."""
        self._matrices: dict[str, tuple[EncodedMatrix, ...]] = {}
        """Maps the name of a parameter that can stay packed to the matrices of one unit."""
        self._kept: Collection[str] = ()
        """Names of the parameters that stay packed."""
        self._check_scales()

    def _check_scales(self) -> None:
        with opened_tensors(self.path) as tensors:
            for name, (weight, names) in self._find(tensors).items():
                for index in whole_pieces(weight.scales, _CHECKED_AT_ONCE_NUMEL):
                    if not decode_scales(weight.scales[index]).isfinite().all():
                        raise ValueError(
                            f"{names[1]} in {str(self.path)!r} has scales that are not finite, so {name} cannot be "
                            "decoded; download the checkpoint again"
                        )

    def settings_asked(self, config: ResolvedConfig, asked: Any, dtype: torch.dtype) -> ResolvedConfig:
        if asked is not None and not getattr(asked, "dequantize", False):
            raise ValueError(
                f"the checkpoint is already quantized, and is decoded in its own form; leave out "
                f"quantization_config={type(asked).__name__}(...), or set its dequantize=True"
            )
        return config

    def fit(self, skeleton: nn.Module) -> None:
        """Find the weights that can stay packed. These do not include weights whose rows have another order in the
        model, and weights with codes that `EncodedMatrix` does not support."""
        if self._method == "int8":
            self._find = partial(self._find, transposed=transposed_weights(skeleton))
        with opened_tensors(self.path) as tensors:
            encoded = self._find(tensors)
            self._sources = sources_of_weights(skeleton, self.replace_tensors(tensors))
            for name, parameter in skeleton.named_parameters():
                units = self._sources.get(name)
                if units is not None and all(source in encoded for unit in units for source in unit):
                    of_unit = _unit_of(parameter.shape, _matrices_of(units, encoded))
                    if of_unit is not None:
                        self._matrices[name] = of_unit

    def settings(self, config: ResolvedConfig, dtype: torch.dtype, frozen: Collection[str]) -> ResolvedConfig:
        """Same as in the base class. If the settings ask for another form, weights are decoded and packed again."""
        weights = tuple((name, self._matrices[name]) for name in frozen if name in self._matrices)
        if config.quantize.method != "auto" or not weights:
            return config
        self._kept = dict(weights)
        return replace(config, quantize=Quantization(method=self._method, weights=weights))

    def replace_tensors(self, tensors: Tensors, sink: WeightSink | None = None) -> Mapping[str, Any]:
        encoded = self._find(tensors)
        used = {name for _, names in encoded.values() for name in names}
        replaced: dict[str, Any] = {
            name: tensor
            for name, tensor in tensors.items()
            if name not in used and not is_of_activations(name, encoded)
        }
        replaced |= {name: weight for name, (weight, _) in encoded.items()}
        if sink is not None:
            for name in filter(sink.is_packed, self._kept):
                self._store(name, encoded, sink)
                for source in (source for unit in self._sources[name] for source in unit):
                    replaced[source] = _StoredTensor(replaced[source])
        return replaced

    def _store(self, name: str, encoded: Encoded, sink: WeightSink) -> None:
        form = EncodedForm.of(self._method, self._matrices[name])
        for number, unit in enumerate(_matrices_of(self._sources[name], encoded)):
            for (weight, expert), (matrix, _, codes, scales) in zip(unit, form.starts, strict=True):
                codes += number * form.unit_codes_bytes
                scales += number * form.unit_scales_bytes
                for start, rows in weight.rows_of_codes(expert, matrix):
                    sink.store_bytes(name, "codes", codes + start * matrix.row_bytes, rows)
                sink.store_bytes(name, "scales", scales, weight.scales_of(expert, matrix))

    def check_loaded(self, model: Any, unused: Collection[str]) -> None:
        """Same as in the base class. Quantized experts may have names that the model's class does not know."""
        base = f"{getattr(model, 'base_model_prefix', '')}."
        missing = [name for name, p in model.named_parameters() if p.device.type != "meta" and name.startswith(base)]
        if missing and unused:
            raise ValueError(
                f"{str(self.path)!r} is quantized and lacks {missing[0]} of {type(model).__name__}, but has "
                f"{min(unused)}, which the model does not have; use the model's original in bfloat16"
            )


class _StoredTensor:
    """Replaces a weight that is already in the store."""

    is_stored = True

    def __init__(self, tensor: UnreadTensor) -> None:
        self._shape, self._dtype = tensor.get_shape(), tensor.get_dtype()

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return self._dtype

    def decode(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((last - first, *self._shape[1:]), dtype=dtype, device="meta")


def _matrices_of(units: SourcesOfUnits, encoded: Encoded) -> list[list[tuple[EncodedWeight, int | None]]]:
    """Return the matrices of each unit: (weight of the checkpoint, index of the expert in it or None)."""
    if len(units) == 1 and len(units[0]) == 1:
        weight = encoded[units[0][0]][0]
        if len(weight.shape) == 3:
            return [[(weight, expert)] for expert in range(weight.shape[0])]
    return [[(encoded[source][0], None) for source in unit] for unit in units]


def _unit_of(
    shape: torch.Size, units: Sequence[Sequence[tuple[EncodedWeight, int | None]]]
) -> tuple[EncodedMatrix, ...] | None:
    """Return the matrices of one unit of a parameter. None if units differ, or matrices are not rows of ``shape``."""
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


# 4 bits of bitsandbytes.


class _FourBitForm(CheckpointForm):
    """The form of weights that bitsandbytes packed in 4 bits. All of them stay packed."""

    @classmethod
    def open(cls, path: str | Path, said: SaidForm) -> _FourBitForm | None:
        """Return the form, from the config and the names of tensors. Return None if bitsandbytes did not pack the
        weights in 4 bits."""
        method = said.fields.get("bnb_4bit_quant_type")
        if not said.fields.get("load_in_4bit") or method not in PACKED_METHODS or not has_safetensors(path):
            return None
        with opened_tensors(Path(path)) as tensors:
            ends = (".weight.absmax", f".weight.{_STATE}{method}")
            packed = {_weight_of(name) for name in tensors if name.endswith(ends)}
            if not packed:
                return None
            names = {weight: weight in packed for weight in map(_weight_of, tensors)}
            return cls(path, said, names, tensors)

    def __init__(self, path: str | Path, said: SaidForm, names: Mapping[str, bool], tensors: Tensors) -> None:
        """``names`` maps each weight of the checkpoint to whether it is packed."""
        super().__init__(path, said.plain)
        self._compute_dtype = said.fields.get("bnb_4bit_compute_dtype")
        self._names = names
        self._dtype = torch.float32
        self._shapes: dict[str, tuple[int, ...]] = {}
        name = self._packed_names[0]
        state = self._state_of(name, self._parts_by_name(tensors)[name])
        is_double, block = "nested_blocksize" in state, state["blocksize"]
        method = said.fields["bnb_4bit_quant_type"]
        self._form = Quantization.parse({"method": method, "double": is_double, "block": block})

    def fit(self, skeleton: nn.Module) -> None:
        """Do nothing, because the files show which weights are packed."""

    def settings(self, config: ResolvedConfig, dtype: torch.dtype, frozen: Collection[str]) -> ResolvedConfig:
        """Same as in the base class. Also raises ValueError if the settings skip a packed module, and for scales that
        are missing, cut short or not finite."""
        self._dtype = dtype
        check_compute_dtype(f"the quantization_config of {str(self.path)!r}", self._compute_dtype, dtype)
        said = config.quantize
        if said.method != "auto" and replace(said, skip=()) != self._form:
            raise ValueError(
                f"{str(self.path)!r} is packed as {self._form.to_setting()}, and quantize: {said.to_setting()} was "
                "asked for; leave quantize out, or use the checkpoint from before it was packed"
            )
        packed_modules = [name.removesuffix(".weight") for name in self._packed_names]
        for pattern in said.skip:
            named = [module for module in packed_modules if is_named(module, (pattern,))]
            if named and pattern != FUSED_EXPERTS:
                raise ValueError(
                    f"quantize: skip: {pattern!r} was asked for, and {named[0]} of {str(self.path)!r} is packed; "
                    "leave it out of skip, or use the checkpoint from before it was packed"
                )
        with opened_tensors(self.path) as tensors:
            for name, parts in self._parts_by_name(tensors).items():
                state, _ = self._scales_of(name, parts)
                self._check_codes(name, tensors[name], state)
                self._shapes[name] = tuple(state["shape"])
        dense = tuple(name.removesuffix(".weight") for name, is_packed in self._names.items() if not is_packed)
        return replace(config, quantize=replace(self._form, skip=(*dense, FUSED_EXPERTS)))

    def check_stored(self, blocks: Iterable[Block], names: Mapping[str, str]) -> None:
        parts = {part.name: part for block in blocks for part in block.packed_slices}
        for name, shape in self._shapes.items():
            part = parts.get(names.get(name, ""))
            if part is None or part.packed is None:
                raise ValueError(
                    f"{name} is packed in the checkpoint, but hf_lohan packs only matrices in the layers of the model, "
                    "and no routers; use the checkpoint from before it was packed, with quantize: nf4"
                )
            expected = tuple(part.shape) if part.packed.takes_rows else tuple(reversed(part.shape))
            if shape != expected:
                raise ValueError(
                    f"{name} of {str(self.path)!r} is packed with the shape {shape}, but the model expects {expected}"
                )

    def replace_tensors(self, tensors: Tensors, sink: WeightSink | None = None) -> Mapping[str, Any]:
        """Same as in the base class. Packed weights become zeros without memory, which the sink does not store."""
        assert sink is not None, "these weights are not decoded"
        parts_by_name = self._parts_by_name(tensors)
        replaced: dict[str, Any] = {key: part for key, part in tensors.items() if _weight_of(key) not in parts_by_name}
        for name, parts in parts_by_name.items():
            _, scales = self._scales_of(name, parts)
            sink.store_bytes(name, "codes", 0, tensors[name][...].reshape(-1).view(torch.uint8))
            sink.store_bytes(name, "scales", 0, scales)
            replaced[name] = torch.zeros((), dtype=self._dtype).expand(sink.shape_of(name))
        return replaced

    @cached_property
    def _packed_names(self) -> list[str]:
        return [name for name, is_packed in self._names.items() if is_packed]

    def _parts_by_name(self, tensors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return for each packed weight a dict of its tensors. A key is the rest of a name after the weight's name."""
        parts: dict[str, dict[str, Any]] = {name: {} for name in self._packed_names}
        for key, source in tensors.items():
            name = _weight_of(key)
            if name in parts:
                parts[name][key.removeprefix(f"{name}.")] = source
        if missing := [name for name, of in parts.items() if name not in of]:
            raise ValueError(f"{missing[0]} of {str(self.path)!r} has no codes; download the checkpoint again")
        return parts

    def _check_codes(self, name: str, codes: Any, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the size of the codes does not fit the shape. An element may have several bytes."""
        numel, num_bytes = math.prod(state["shape"]), bytes_in_file(codes)
        if self._form.codes_bytes(numel) != num_bytes:
            raise ValueError(f"{name} of {str(self.path)!r} has {num_bytes} bytes for {numel} codes; download it again")

    def _state_of(self, name: str, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Return bitsandbytes' description of a packed weight. Raises ValueError for an invalid field."""
        key = next((key for key in parts if key.startswith(_STATE)), None)
        if key is None:
            raise ValueError(f"{name} of {str(self.path)!r} has no {_STATE}; download the checkpoint again")
        try:
            state: dict[str, Any] = json.loads(bytes(parts[key][...].tolist()))
            is_right = math.isfinite(state.get("nested_offset", 0.0)) and isinstance(state["quant_type"], str)
            sizes = (*state["shape"], state["blocksize"], state.get("nested_blocksize", 1))
            is_right &= isinstance(state["dtype"], str) and all(type(size) is int and size > 0 for size in sizes)
            is_right &= ("nested_offset" in state) == ("nested_blocksize" in state)
        except (ValueError, KeyError, TypeError, AttributeError):
            is_right = False
        if not is_right:
            raise ValueError(
                f"{key} of {name} of {str(self.path)!r} is damaged: it needs a shape, blocksize, dtype, quant_type "
                "and, for nested scales, a finite nested_offset; download it again"
            )
        return state

    def _scales_of(self, name: str, parts: Mapping[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
        """Return the description of a packed weight, and the bytes of its scales to store. Raises ValueError if they do
        not fit the form of the checkpoint."""
        state, form = self._state_of(name, parts), self._form
        numel = math.prod(state["shape"])
        needed = ["absmax", "quant_map", *(["nested_absmax", "nested_quant_map"] if form.double else [])]
        if missing := [part for part in needed if part not in parts]:
            raise ValueError(f"{name} of {str(self.path)!r} has no {missing[0]}; download the checkpoint again")
        read = {part: parts[part][...].reshape(-1) for part in needed}
        is_of_form = (state["quant_type"], state["blocksize"]) == (form.method, form.block)
        is_of_form &= torch.equal(read["quant_map"], values_of(form.method))
        if form.double:
            maps = torch.equal(read["nested_quant_map"], scale_values())
            is_of_form &= maps and state.get("nested_blocksize") == SCALES_PER_SCALE
        if not is_of_form:
            raise ValueError(f"{name} of {str(self.path)!r} is not packed as {form.to_setting()}; use the original")
        if state["dtype"] != dtype_name(self._dtype):
            raise ValueError(
                f"{name} of {str(self.path)!r} was packed from {state['dtype']}, but the model computes in "
                f"{dtype_name(self._dtype)}; load it with dtype={state['dtype']!r}"
            )
        outer = read["nested_absmax" if form.double else "absmax"]
        num_scales = form.num_scales(numel)
        num_outer = -(-num_scales // SCALES_PER_SCALE) if form.double else num_scales
        if read["absmax"].numel() != num_scales or outer.numel() != num_outer or not outer.isfinite().all():
            raise ValueError(f"scales of {name} of {str(self.path)!r} are cut short, or not finite; download it again")
        if form.double:
            return state, join_scales(read["absmax"], outer, state["nested_offset"], form, numel)
        return state, stored_bytes(outer.to(torch.float32), form.scales_bytes(numel))


def _weight_of(name: str) -> str:
    """Return the weight to which a tensor of a checkpoint belongs: "a.weight" for "a.weight.absmax" and "a.weight"."""
    before, weight, _ = name.partition(".weight")
    return before + weight


# A plan without files.


class _NamedForm(CheckpointForm):
    """The form that a config describes. If it does not describe the codes, they are the usual codes of its method."""

    def __init__(self, path: str | Path, said: SaidForm) -> None:
        super().__init__(path, said.plain)
        self._fields = fields = said.fields
        self._is_four_bit = bool(fields.get("load_in_4bit"))
        self._method = fields.get("bnb_4bit_quant_type", "fp4") if self._is_four_bit else said.method
        self._matrices: dict[str, tuple[EncodedMatrix, ...]] = {}
        names = ("modules_to_not_convert", "ignore", "llm_int8_skip_modules")
        skip = (module for name in names for module in fields.get(name) or ())
        self._skip = tuple(module.removeprefix("re:") for module in skip)

    def fit(self, skeleton: nn.Module) -> None:
        if self._is_four_bit:
            return
        skeleton.requires_grad_(False)
        of_matrices = Quantization(method="nf4", block=32, skip=self._skip)
        candidates = packed_forms(skeleton, find_layers(skeleton), of_matrices)
        for name, parameter in skeleton.named_parameters():
            of_unit = _USUAL[self._method](self._fields, parameter.shape) if parameter in candidates else ()
            if of_unit:
                self._matrices[name] = of_unit

    def settings(self, config: ResolvedConfig, dtype: torch.dtype, frozen: Collection[str]) -> ResolvedConfig:
        asked = config.quantize.method
        if self._is_four_bit and asked not in ("auto", self._method):
            raise ValueError(
                f"{str(self.path)!r} is packed in 4 bits, and quantize: {asked} was asked for; leave quantize out, "
                "or plan the checkpoint from before it was packed"
            )
        if asked != "auto" or not (self._is_four_bit or self._matrices):
            return config
        if self._is_four_bit:
            is_double = bool(self._fields.get("bnb_4bit_use_double_quant"))
            quantize = Quantization(method=self._method, double=is_double, skip=(*self._skip, FUSED_EXPERTS))
        else:
            quantize = Quantization(method=self._method, weights=tuple(self._matrices.items()))
        return replace(config, quantize=quantize)


def _usual_float8(fields: Mapping[str, Any], shape: torch.Size) -> tuple[EncodedMatrix, ...]:
    rows, columns = shape[-2:]
    is_mx = method_of(fields) == "mxfp8"
    block = (1, 32) if is_mx else fields.get("weight_block_size", (128, 128)) or (rows, columns)
    of_block, scales = (min(block[0], rows), min(block[1], columns)), "uint8" if is_mx else "float32"
    return (EncodedMatrix(rows=rows, columns=columns, codes="float8_e4m3fn", scales=scales, block=of_block),)


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
    "fp8": _usual_float8,
    "mxfp8": _usual_float8,
    "mxfp4": _usual_mxfp4,
    "compressed-tensors": _usual_compressed,
    "int8": _usual_int8,
}
