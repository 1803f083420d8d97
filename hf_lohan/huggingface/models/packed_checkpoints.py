"""What `BitsAndBytesConfig` means for weights in a store, and checkpoints that bitsandbytes packed in 4 bits."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_lohan.compat.transformers_conversions import bytes_in_file
from hf_lohan.config import ResolvedConfig
from hf_lohan.huggingface.models.quantized_checkpoints import (
    has_safetensors,
    opened_tensors,
    quantization_of,
    without_quantization,
)
from hf_lohan.model import Block, dtype_name
from hf_lohan.model.packed_weights import is_named, linear_routers
from hf_lohan.planner import Quantization
from hf_lohan.planner.quantization import PACKED_METHODS, SCALES_PER_SCALE
from hf_lohan.quantize import join_scales, scale_values, values_of

logger = logging.getLogger(__name__)

_STATE = "quant_state.bitsandbytes__"

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
    _check_compute_dtype("quantization_config", asked.bnb_4bit_compute_dtype, compute_dtype)
    skip = tuple(asked.llm_int8_skip_modules or ())
    return Quantization(
        method=asked.bnb_4bit_quant_type,
        double=asked.bnb_4bit_use_double_quant,
        skip=tuple(dict.fromkeys((*skip, FUSED_EXPERTS))),
    )


def _check_compute_dtype(config_name: str, asked: Any, compute_dtype: torch.dtype) -> None:
    """Raise ValueError if the configuration's bnb_4bit_compute_dtype, ``asked``, is not honoured."""
    # float32 is bitsandbytes' default, and stands for the dtype of the inputs.
    if str(asked or "float32").removeprefix("torch.") not in ("float32", dtype_name(compute_dtype)):
        raise ValueError(
            f"{config_name}: bnb_4bit_compute_dtype={asked} differs from the dtype of the model, {compute_dtype}, in "
            "which decoded weights compute; give both the same dtype"
        )


class PackedCheckpoint:
    """A checkpoint whose weights bitsandbytes packed in 4 bits. They go to the store as they are."""

    model_config: Any
    """The config of the model, without `quantization_config`."""

    def __init__(
        self,
        path: str | Path,
        model_config: Any,
        fields: Mapping[str, Any],
        names: Mapping[str, bool],
        tensors: Mapping[str, Any],
    ) -> None:
        """``names`` says of each weight of the checkpoint whether it is packed. ``fields`` are those of the
        `quantization_config` in ``model_config``, and ``tensors`` those of its files."""
        self.model_config = without_quantization(model_config)
        self._path = path
        self._compute_dtype = fields.get("bnb_4bit_compute_dtype")
        self._names = names
        self._dtype = torch.float32
        self._shapes: dict[str, tuple[int, ...]] = {}
        name = self._packed_names[0]
        state = self._state_of(name, self._parts_by_name(tensors)[name])
        is_double, block = "nested_blocksize" in state, state["blocksize"]
        method = fields["bnb_4bit_quant_type"]
        self._form = Quantization.parse({"method": method, "double": is_double, "block": block})

    def settings(self, config: ResolvedConfig, dtype: torch.dtype) -> ResolvedConfig:
        """Return the settings with `quantize` as the checkpoint has it. Raises ValueError if they ask for another form,
        or skip a packed module, and for scales that are missing, cut short or not finite. The model computes in
        ``dtype``. Of packed weights only the scales are read."""
        self._dtype = dtype
        _check_compute_dtype(f"the quantization_config of {str(self._path)!r}", self._compute_dtype, dtype)
        said = config.quantize
        if said.method != "auto" and replace(said, skip=()) != self._form:
            raise ValueError(
                f"{str(self._path)!r} is packed as {self._form.to_setting()}, and quantize: {said.to_setting()} was "
                "asked for; leave quantize out, or use the checkpoint from before it was packed"
            )
        packed_modules = [name.removesuffix(".weight") for name in self._packed_names]
        for pattern in said.skip:
            named = [module for module in packed_modules if is_named(module, (pattern,))]
            if named and pattern != FUSED_EXPERTS:
                raise ValueError(
                    f"quantize: skip: {pattern!r} was asked for, and {named[0]} of {str(self._path)!r} is packed; "
                    "leave it out of skip, or use the checkpoint from before it was packed"
                )
        with opened_tensors(Path(self._path)) as tensors:
            for name, parts in self._parts_by_name(tensors).items():
                state, _ = self._scales_of(name, parts)
                self._check_codes(name, tensors[name], state)
                self._shapes[name] = tuple(state["shape"])
        dense = tuple(name.removesuffix(".weight") for name, is_packed in self._names.items() if not is_packed)
        return replace(config, quantize=replace(self._form, skip=(*dense, FUSED_EXPERTS)))

    def check_shapes(self, blocks: Iterable[Block], names: Mapping[str, str]) -> None:
        """Raise ValueError if the store does not pack a packed weight, or expects another shape. ``names``: the stored
        names of the model's weights. Call this after `settings`."""
        parts = {part.name: part for block in blocks for part in block.packed_slices}
        for name, shape in self._shapes.items():
            part = parts.get(names.get(name, ""))
            if part is None or part.packed is None:
                raise ValueError(
                    f"{name} is packed in the checkpoint, and hf_lohan packs only matrices in the layers of the model, "
                    "but no routers; use the checkpoint from before it was packed, with quantize: nf4"
                )
            expected = tuple(part.shape) if part.packed.takes_rows else tuple(reversed(part.shape))
            if shape != expected:
                raise ValueError(
                    f"{name} of {str(self._path)!r} is packed with the shape {shape}, and the model expects {expected}"
                )

    def store_packed(self, store: Callable[..., torch.Size], tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Give packed weights to ``store``. Returns ``tensors`` with zeros without memory in their places."""
        parts_by_name = self._parts_by_name(tensors)
        found = {key: source for key, source in tensors.items() if _weight_of(key) not in parts_by_name}
        for name, parts in parts_by_name.items():
            _, scales = self._scales_of(name, parts)
            codes = tensors[name][...].reshape(-1).view(torch.uint8)
            shape = store(name, codes, scales)
            found[name] = torch.zeros((), dtype=self._dtype).expand(shape)
        return found

    @cached_property
    def _packed_names(self) -> list[str]:
        return [name for name, is_packed in self._names.items() if is_packed]

    def _parts_by_name(self, tensors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The tensors of each packed weight, by the rest of their names."""
        parts: dict[str, dict[str, Any]] = {name: {} for name in self._packed_names}
        for key, source in tensors.items():
            name = _weight_of(key)
            if name in parts:
                parts[name][key.removeprefix(f"{name}.")] = source
        if missing := [name for name, of in parts.items() if name not in of]:
            raise ValueError(f"{missing[0]} of {str(self._path)!r} has no codes: the checkpoint is cut short")
        return parts

    def _check_codes(self, name: str, codes: Any, state: Mapping[str, Any]) -> None:
        """Raise ValueError if a weight has not the codes of its shape. They may be numbers of several bytes."""
        numel, num_bytes = math.prod(state["shape"]), bytes_in_file(codes)
        if self._form.codes_bytes(numel) != num_bytes:
            raise ValueError(f"{name} of {str(self._path)!r} has {num_bytes} bytes of codes for {numel} weights")

    def _state_of(self, name: str, parts: Mapping[str, Any]) -> dict[str, Any]:
        """The fields in which bitsandbytes describes a packed weight. Raises ValueError if they are no such fields."""
        key = next((key for key in parts if key.startswith(_STATE)), None)
        if key is None:
            raise ValueError(f"{name} of {str(self._path)!r} has no {_STATE}: the checkpoint is cut short")
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
                f"{key} of {name} of {str(self._path)!r} is damaged: it needs a shape, blocksize, dtype, quant_type "
                "and, for nested scales, a finite nested_offset; download it again"
            )
        return state

    def _scales_of(self, name: str, parts: Mapping[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
        """The state of a weight, and the stored bytes of its scales. Raises ValueError if they are not what the form of
        the checkpoint needs."""
        state, form = self._state_of(name, parts), self._form
        numel = math.prod(state["shape"])
        needed = ["absmax", "quant_map", *(["nested_absmax", "nested_quant_map"] if form.double else [])]
        if missing := [part for part in needed if part not in parts]:
            raise ValueError(f"{name} of {str(self._path)!r} has no {missing[0]}: the checkpoint is cut short")
        read = {part: parts[part][...].reshape(-1) for part in needed}
        is_of_form = (state["quant_type"], state["blocksize"]) == (form.method, form.block)
        is_of_form &= torch.equal(read["quant_map"], values_of(form.method))
        if form.double:
            maps = torch.equal(read["nested_quant_map"], scale_values(torch.device("cpu")))
            is_of_form &= maps and state.get("nested_blocksize") == SCALES_PER_SCALE
        if not is_of_form:
            raise ValueError(f"{name} of {str(self._path)!r} is packed in another form than {form.to_setting()}")
        if state["dtype"] != dtype_name(self._dtype):
            raise ValueError(
                f"{name} of {str(self._path)!r} was packed from {state['dtype']}, and the model computes in "
                f"{dtype_name(self._dtype)}; load it with dtype={state['dtype']!r}"
            )
        outer = read["nested_absmax" if form.double else "absmax"]
        num_scales = form.num_scales(numel)
        num_outer = -(-num_scales // SCALES_PER_SCALE) if form.double else num_scales
        if read["absmax"].numel() != num_scales or outer.numel() != num_outer or not outer.isfinite().all():
            raise ValueError(f"the scales of {name} of {str(self._path)!r} are cut short, or not finite")
        if form.double:
            return state, join_scales(read["absmax"], outer, state["nested_offset"], form, numel)
        scales = torch.zeros(form.scales_bytes(numel), dtype=torch.uint8)
        scales[: 4 * num_scales] = outer.to(torch.float32).view(torch.uint8)
        return state, scales


def _weight_of(name: str) -> str:
    """The weight that a tensor of a checkpoint belongs to: "a.weight" of "a.weight.absmax" and "a.weight"."""
    before, weight, _ = name.partition(".weight")
    return before + weight


def packed_checkpoint(path: str | Path, model_config: Any) -> PackedCheckpoint | None:
    """Return the packed weights of a checkpoint, or None if bitsandbytes did not pack it in 4 bits. Its
    ``model_config`` has no quantization, so that transformers loads the other weights as usual."""
    fields = quantization_of(model_config)
    if fields is None or not fields.get("load_in_4bit") or fields.get("bnb_4bit_quant_type") not in PACKED_METHODS:
        return None
    if not has_safetensors(path):
        return None
    with opened_tensors(Path(path)) as tensors:
        ends = (".weight.absmax", f".weight.{_STATE}{fields['bnb_4bit_quant_type']}")
        packed = {_weight_of(name) for name in tensors if name.endswith(ends)}
        if not packed:
            return None
        names = {weight: weight in packed for weight in map(_weight_of, tensors)}
        return PackedCheckpoint(path, model_config, fields, names, tensors)
