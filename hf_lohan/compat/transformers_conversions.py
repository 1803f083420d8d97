"""Runs transformers' conversions between checkpoints and weights on a few rows at a time.

The stock converters stack all experts of a layer into one tensor, and split it to save it. This takes three times the
largest weight in RAM. Most of their operations do not mix rows, so they can run on a few rows at a time.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import patch_environment
from torch import Tensor
from transformers import core_model_loading, modeling_utils
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    Interleave,
    MergeModulelist,
    SplitModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
)

from hf_lohan.compat.patches import replaced

_IN_ORDER = {"HF_DEACTIVATE_ASYNC_LOAD": "1"}
"""Environment in which transformers reads tensors when it needs them, without threads."""

TakeRows = Callable[[str, torch.Size, int, Tensor], bool]
"""Takes (name, whole shape, first row, rows) of a weight. Returns False to refuse the weight."""
WriteFile = Callable[[Mapping[str, Tensor], str, dict[str, str]], None]
"""Writes tensors by name to a safetensors file with metadata."""


# Loading.


@contextlib.contextmanager
def loaded_in_rows(take: TakeRows, most_bytes: int) -> Iterator[dict[str, int]]:
    """Have `from_pretrained` pass weights larger than ``most_bytes`` to ``take`` in parts, and keep a meta tensor of
    each. A part has at most ``most_bytes``, or one row. Nothing is read ahead.

    Rows are slices of the first dimension, such as experts. A weight is loaded whole if ``take`` refuses it or if its
    conversion mixes rows. Yields a dict that gets the name and the bytes of each tensor of the checkpoint that the
    model does not use. Transformers reports only some of these tensors.
    """

    def convert(stock: Any, self: Any, layer_name: str, *args: Any, **kwargs: Any) -> Any:
        stored = [tensor for tensors in self.collected_tensors.values() for tensor in tensors]
        if stored and all(isinstance(tensor, _Unread) and tensor.is_stored for tensor in stored):
            forms = stock(self, layer_name, *args, **kwargs)
            for name, tensor in forms.items():
                assert take(name, _first(tensor).shape, 0, _first(tensor)), f"{name} is not in the store"
            return forms
        source = _source_of(self)
        # Rows that are not decoded are views of a mapped file. Decoded rows take memory, together with the next rows.
        most = most_bytes // 4 if source is not None and source.is_decoded else most_bytes
        if source is not None and source.num_bytes > most:
            rows_at_once = max(1, int(most * source.num_rows // source.num_bytes))
            collected = dict(self.collected_tensors)
            forms = _given_in_rows(
                source, rows_at_once, take, lambda tensors: _run(self, stock, tensors, layer_name, *args, **kwargs)
            )
            if forms is not None:
                return forms
            self.collected_tensors.update(collected)
        return stock(self, layer_name, *args, **kwargs)

    with _converted_by(convert) as unused:
        yield unused


class UnreadWeight:
    """A weight that is only in the checkpoint. A call reads and converts it. `rows` reads some of its rows."""

    def __init__(
        self, form: Tensor, source: _Source | None, read: Callable[[dict[str, list[Any]] | None], Tensor]
    ) -> None:
        """``form``: the weight on meta. ``read`` converts some rows of ``source``, or everything for None."""
        self.form = form
        self._source = source
        self._read = read

    def __call__(self) -> Tensor:
        return self._read(None)

    @property
    def has_rows(self) -> bool:
        """Whether the rows of the weight can be read one by one."""
        return self._source is not None and self.form.dim() > 0 and self._source.num_rows == self.form.shape[0]

    def rows(self, first: int, last: int) -> Tensor:
        assert self._source is not None
        return self._read(self._source.rows(first, last))


@contextlib.contextmanager
def loaded_unread(weights: dict[str, UnreadWeight]) -> Iterator[dict[str, int]]:
    """Have `from_pretrained` read no weight. Each parameter stays on meta, and ``weights`` gets its name and its
    `UnreadWeight`. Buffers are read. Yields the dict of unused tensors of `loaded_in_rows`."""

    def convert(stock: Any, self: Any, layer_name: str, *args: Any, **kwargs: Any) -> Any:
        collected = dict(self.collected_tensors)
        model = kwargs["model"] if "model" in kwargs else args[0]
        if all(isinstance(tensor, _Unread) for tensors in collected.values() for tensor in tensors):
            source = _source_of(self)
            forms = {pattern: [tensor.form() for tensor in tensors] for pattern, tensors in collected.items()}
            results = _run(self, stock, forms, layer_name, *args, **kwargs)
            if all(_is_parameter(model, name) for name in results):

                def read(name: str, rows: dict[str, list[Any]] | None) -> Tensor:
                    result = _run(self, stock, rows or collected, layer_name, *args, **kwargs)[name]
                    return _first(result)

                for name, result in results.items():
                    weights[name] = UnreadWeight(_first(result), source, functools.partial(read, name))
                return results
        self.collected_tensors.clear()
        self.collected_tensors.update(collected)
        return stock(self, layer_name, *args, **kwargs)

    with _converted_by(convert) as unused:
        yield unused


def _first(result: Any) -> Tensor:
    """Return the tensor of a conversion's result."""
    tensor: Tensor = result[0] if isinstance(result, list) else result
    return tensor


def _is_parameter(model: Any, name: str) -> bool:
    try:
        model.get_parameter(name)
    except AttributeError:
        return False
    return True


@contextlib.contextmanager
def _converted_by(convert: Callable[..., Any]) -> Iterator[dict[str, int]]:
    """Have `from_pretrained` call ``convert(stock function, *its arguments)`` for each conversion. Its tensors are not
    read yet, and nothing is read ahead. Yields the dict of unused tensors of `loaded_in_rows`."""
    stock_spawn = core_model_loading.spawn_materialize
    stock_load = modeling_utils.convert_and_load_state_dict_in_model
    used: set[int] = set()
    unused: dict[str, int] = {}

    def converting_by(stock: Any) -> Any:
        return lambda conversion, *args, **kwargs: convert(stock, conversion, *args, **kwargs)

    def spawn(thread_pool: Any, tensor: Any, device: Any = None, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        used.add(id(tensor))
        is_sharded = bool(args and args[0] is not None) or kwargs.get("sharding_op") is not None
        if thread_pool is not None or is_sharded:
            return stock_spawn(thread_pool, tensor, device, dtype, *args, **kwargs)
        return _Unread(tensor, device, dtype)

    def load(model: Any, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        used.clear()
        result = stock_load(model, state_dict, *args, **kwargs)
        computed = {_end_of(name) for name, _ in model.named_buffers()}  # older checkpoints contain them
        unused.update(
            (name, bytes_in_file(tensor))
            for name, tensor in state_dict.items()
            if id(tensor) not in used and _end_of(name) not in computed
        )
        return result

    with (
        replaced(core_model_loading, spawn_materialize=spawn),
        replaced(modeling_utils, convert_and_load_state_dict_in_model=load),
        replaced(WeightConverter, convert=converting_by(WeightConverter.convert)),
        replaced(WeightRenaming, convert=converting_by(WeightRenaming.convert)),
        patch_environment(**_IN_ORDER),
    ):
        yield unused


def _end_of(name: str) -> str:
    """Return the last two components of a tensor's name."""
    return ".".join(name.rsplit(".", 2)[-2:])


def bytes_in_file(source: Any) -> int:
    """Return the bytes of a tensor, or of an unread tensor in a safetensors file."""
    if isinstance(source, Tensor):
        return source.nbytes
    bits = re.search(r"\d+", source.get_dtype())  # such as BF16, F8_E4M3 and BOOL
    num_bits: int = math.prod(source.get_shape()) * (int(bits.group()) if bits else 8)
    return num_bits // 8


@contextlib.contextmanager
def tensors_replaced(replace: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Iterator[None]:
    """Have `from_pretrained` load the tensors that ``replace`` returns for a checkpoint's tensors, which are not read
    yet. A method ``decode(first row, last row, dtype)`` of a tensor reads it. A tensor whose ``is_stored`` is
    true is on meta. The weight that is made from the tensor is passed as a whole to ``take`` of `loaded_in_rows`."""
    stock = modeling_utils.convert_and_load_state_dict_in_model

    def load(model: Any, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return stock(model, replace(state_dict), *args, **kwargs)

    with replaced(modeling_utils, convert_and_load_state_dict_in_model=load):
        yield


SourcesOfUnits = list[list[str]]
"""For each unit of a weight (an expert, or the whole weight), the names of its matrices in the order of their rows."""


def sources_of_weights(model: Any, names: Collection[str]) -> dict[str, SourcesOfUnits]:
    """Return the sources of weights, by the weight's name. Only weights whose rows are unchanged rows of matrices are
    included. ``model`` is on meta. ``names`` has the names of all tensors of the checkpoint."""
    found: dict[str, SourcesOfUnits] = {}

    def convert(self: Any, layer_name: str, *args: Any, **kwargs: Any) -> Any:
        collected: dict[str, list[str]] = dict(self.collected_tensors)
        operations = list(getattr(self, "operations", []))
        is_merged = bool(operations) and _merges_rows(operations[0])
        joins = operations[is_merged:]
        in_order = [collected[pattern] for pattern in self.source_patterns if pattern in collected]
        are_alike = len({len(sources) for sources in in_order}) == 1 and (is_merged or len(in_order[0]) == 1)
        if are_alike and all(type(join) is Concatenate and join.dim == int(is_merged) for join in joins):
            found[layer_name] = [list(unit) for unit in zip(*in_order, strict=True)]
        raise core_model_loading.SkipParameters

    with (
        replaced(core_model_loading, tqdm=lambda each, **_: each),
        replaced(core_model_loading, spawn_materialize=lambda _pool, tensor, *_, **__: tensor),
        replaced(WeightConverter, convert=convert),
        replaced(WeightRenaming, convert=convert),
        replaced(model, _weight_conversions=None),  # set by `from_pretrained`
        patch_environment(**_IN_ORDER),
    ):
        core_model_loading.convert_and_load_state_dict_in_model(
            model,
            {name: name for name in names},
            modeling_utils.LoadStateDictConfig(weight_mapping=modeling_utils.get_model_conversion_mapping(model)),
        )
    return found


class _Unread:
    """A tensor in a checkpoint file, or some of its rows. A call reads and casts it."""

    def __init__(self, source: Any, device: Any, dtype: Any, rows: slice | None = None) -> None:
        self._source, self._device, self._dtype, self._rows = source, device, dtype, rows

    def __call__(self) -> Tensor:
        decode = getattr(self._source, "decode", None)
        if decode is not None:
            first, last, _ = (self._rows or slice(None)).indices(self.shape[0])
            decoded: Tensor = decode(first, last, self._dtype or torch.float32)
            return decoded if self.is_stored else decoded.to(self._device)
        tensor: Tensor = self._source[... if self._rows is None else self._rows]
        return tensor.to(device=self._device, dtype=self._dtype)

    @property
    def shape(self) -> torch.Size:
        get_shape = getattr(self._source, "get_shape", None)
        return torch.Size(self._source.shape if get_shape is None else get_shape())

    @property
    def is_decoded(self) -> bool:
        return hasattr(self._source, "decode")

    @property
    def is_stored(self) -> bool:
        return getattr(self._source, "is_stored", False)

    @property
    def num_bytes(self) -> int:
        """Upper bound of the size after the cast."""
        return self.shape.numel() * (self._dtype or torch.float32).itemsize

    def form(self) -> Tensor:
        """Return a meta tensor of its shape and dtype."""
        dtype = self._dtype or (self.rows(0, 0)() if self.shape else self()).dtype
        return torch.empty(self.shape, dtype=dtype, device="meta")

    def rows(self, first: int, last: int) -> _Unread:
        return _Unread(self._source, self._device, self._dtype, slice(first, last))


@dataclass(frozen=True)
class _Source:
    """The tensors of one weight, by pattern: one tensor for each row (``is_merged``), or one tensor with all rows."""

    tensors: dict[str, list[_Unread]]
    is_merged: bool
    num_rows: int
    num_bytes: int

    @property
    def is_decoded(self) -> bool:
        return any(tensor.is_decoded for tensors in self.tensors.values() for tensor in tensors)

    def rows(self, first: int, last: int) -> dict[str, list[_Unread]]:
        if self.is_merged:
            return {pattern: tensors[first:last] for pattern, tensors in self.tensors.items()}
        return {pattern: [tensors[0].rows(first, last)] for pattern, tensors in self.tensors.items()}


def _source_of(conversion: Any) -> _Source | None:
    """Return the source of a conversion by rows. None if the conversion may mix rows or the tensors differ."""
    operations = getattr(conversion, "operations", [])
    is_merged = bool(operations) and _merges_rows(operations[0])
    collected: dict[str, list[_Unread]] = dict(conversion.collected_tensors)
    every = [tensor for tensors in collected.values() for tensor in tensors]
    if (
        not every
        or conversion.quantization_operation is not None
        or not all(isinstance(tensor, _Unread) and tensor.shape for tensor in every)
        or not all(_leaves_rows_alone(operation) for operation in operations[is_merged:])
    ):
        return None
    by_pattern = list(collected.values())
    if is_merged:
        num_rows = {len(tensors) for tensors in by_pattern}
        is_alike = all(len({tensor.shape for tensor in tensors}) == 1 for tensors in by_pattern)
    else:
        num_rows = {tensors[0].shape[0] for tensors in by_pattern}
        is_alike = all(len(tensors) == 1 for tensors in by_pattern)
    if len(num_rows) != 1 or not is_alike or num_rows == {0}:
        return None
    return _Source(collected, is_merged, num_rows.pop(), sum(tensor.num_bytes for tensor in every))


def _given_in_rows(
    source: _Source, rows_at_once: int, take: TakeRows, run: Callable[[dict[str, list[Any]]], dict[str, Any]]
) -> dict[str, Tensor] | None:
    """Pass all rows to ``take`` and return meta tensors. Returns None if ``take`` refuses."""
    forms: dict[str, Tensor] = {}
    for first in range(0, source.num_rows, rows_at_once):
        last = min(first + rows_at_once, source.num_rows)
        for name, result in run(source.rows(first, last)).items():
            rows = _first(result)
            shape = torch.Size((source.num_rows, *rows.shape[1:]))
            if not take(name, shape, first, rows):
                assert first == 0, f"{name} was refused after some of its rows were taken"
                return None
            forms[name] = torch.empty(shape, dtype=rows.dtype, device="meta")
    return forms


def _run(conversion: Any, stock: Any, tensors: dict[str, list[Any]], layer_name: str, *args: Any, **kwargs: Any) -> Any:
    """Run the stock conversion on these tensors."""
    conversion.collected_tensors.clear()
    conversion.collected_tensors.update(tensors)
    return stock(conversion, layer_name, *args, **kwargs)


def _leaves_rows_alone(operation: ConversionOps) -> bool:
    """Return whether row i of the result depends only on row i of the inputs."""
    if isinstance(operation, Transpose):
        # A transpose that checks shapes needs all rows.
        return operation.dim0 > 0 and operation.dim1 > 0 and not operation.check_dims
    if type(operation) in (Chunk, Concatenate, Interleave):
        return bool(operation.dim > 0)
    return False


def _merges_rows(operation: ConversionOps) -> bool:
    return type(operation) is MergeModulelist and operation.dim == 0


def _splits_rows(operation: ConversionOps) -> bool:
    return type(operation) is SplitModulelist and operation.dim == 0


# Saving.


@dataclass(frozen=True, eq=False)
class SavedTensor:
    """The conversion that makes a tensor of a checkpoint from weights."""

    conversion: SavingConversion
    index: int
    """Index of the tensor in the results of the conversion."""


class SavingConversion:
    """A conversion that ran on meta weights and can run again on real weights, for all rows or for one."""

    def __init__(self, run: Callable[[dict[str, list[Tensor]]], list[Tensor]], inputs: dict[str, list[Tensor]]) -> None:
        self._run = run
        self._inputs = inputs
        self.num_rows: int | None = None
        """Number of rows. None if an operation mixes rows, so that it needs whole weights."""
        self.is_split = False
        """Whether each row becomes a separate tensor. The results are ordered by kind and then by row."""

    def results(self, value_of: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Convert the values that `value_of` returns for each weight, which are whole weights or one row of each."""
        return self._run({pattern: [value_of(form) for form in forms] for pattern, forms in self._inputs.items()})


@contextlib.contextmanager
def saved_by(model: Any, write_file: WriteFile) -> Iterator[dict[int, SavedTensor]]:
    """Have `save_pretrained` of a state dict with meta tensors call ``write_file`` for each shard of the checkpoint.

    Yields a mapping from the `id` of each converted meta tensor to its `SavedTensor`. The context keeps these tensors
    alive.
    """
    stock_convert, stock_save = WeightConverter.convert, modeling_utils.safe_save_file
    made: dict[int, SavedTensor] = {}
    living: list[Tensor] = []  # keeps the ids of these tensors unique

    def convert(self: Any, layer_name: str, *args: Any, **kwargs: Any) -> Any:
        inputs = {pattern: list(tensors) for pattern, tensors in self.collected_tensors.items()}
        every = [tensor for tensors in inputs.values() for tensor in tensors]
        if not any(isinstance(tensor, Tensor) and tensor.device.type == "meta" for tensor in every):
            return stock_convert(self, layer_name, *args, **kwargs)

        def run(tensors: dict[str, list[Tensor]]) -> list[Tensor]:
            results = _run(self, stock_convert, tensors, layer_name, *args, **kwargs)
            return [*map(_first, results.values())]

        shape_of = {id(tensor): tensor.to("meta") for tensor in every}  # a caller's tensors have values
        own = {id(shape_of[id(tensor)]): tensor for tensor in every}
        shapes = {pattern: [shape_of[id(tensor)] for tensor in tensors] for pattern, tensors in inputs.items()}
        converted = _run(self, stock_convert, shapes, layer_name, *args, **kwargs)
        conversion = _saving_conversion(self.operations, run, inputs, len(converted))
        forms: dict[str, Tensor] = {}
        for index, (name, tensor) in enumerate(converted.items()):
            result = _first(tensor)
            if id(result) in own:
                forms[name] = own[id(result)]  # not converted
                continue
            # This is no view, because transformers counts the bytes of a tensor's storage.
            forms[name] = torch.empty(result.shape, dtype=result.dtype, device="meta")
            made[id(forms[name])] = SavedTensor(conversion, index)
        living.extend((*every, *forms.values()))
        return forms

    def save(tensors: Mapping[str, Tensor], filename: Any, metadata: dict[str, str] | None = None) -> None:
        if any(tensor.device.type == "meta" for tensor in tensors.values()):
            write_file(tensors, os.fspath(filename), metadata or {})
        else:
            stock_save(tensors, filename, metadata=metadata)

    device_map = vars(model).pop("hf_device_map", None)  # transformers saves a dispatched model differently
    try:
        with replaced(WeightConverter, convert=convert), replaced(modeling_utils, safe_save_file=save):
            yield made
    finally:
        if device_map is not None:
            model.hf_device_map = device_map


def _saving_conversion(
    operations: list[ConversionOps],
    run: Callable[[dict[str, list[Tensor]]], list[Tensor]],
    inputs: dict[str, list[Tensor]],
    num_results: int,
) -> SavingConversion:
    conversion = SavingConversion(run, inputs)
    forms = [form for tensors in inputs.values() for form in tensors]
    is_split = _splits_rows(operations[-1])
    num_rows = {form.shape[0] if form.dim() else 0 for form in forms}
    if (
        len(num_rows) == 1
        and all(len(tensors) == 1 for tensors in inputs.values())
        and all(_leaves_rows_alone(operation) for operation in operations[: len(operations) - is_split])
    ):
        (rows,) = num_rows
        if rows and num_results == len(conversion.results(lambda form: form[:1])) * (rows if is_split else 1):
            conversion.num_rows, conversion.is_split = rows, is_split
    return conversion
