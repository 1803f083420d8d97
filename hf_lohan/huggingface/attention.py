"""Splits the inputs of transformers' layers, and runs attention over the keys that a chunk of queries sees.

For a layer in chunks, the mask of all pairs of tokens is never computed. Each chunk computes its own part of the mask.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_lohan.activations import ActivationTiers
from hf_lohan.activations.chunked_layers import ChunkedLayer, ChunkedLayers
from hf_lohan.activations.chunked_norms import norms_outside
from hf_lohan.activations.layer_runs.layer_run import ChunkFrames
from hf_lohan.activations.layer_runs.shared_rows import RowMemory, RowsOfRanks
from hf_lohan.activations.token_ranges import ChunkKeys, CutRows, NotCuttableError, TokenRange
from hf_lohan.compat.torch_private import attention_after, tree_map_only, without_torch_function
from hf_lohan.compat.transformers_private import (
    CACHE_NAMES,
    MaskPattern,
    add_recorded_outputs,
    is_causal_mask_skipped,
    mask_function,
    mask_pattern,
    recorded_names,
    recording_outputs,
    replace_function,
)
from hf_lohan.engine.model_hooks import step_shape

logger = logging.getLogger(__name__)

_CUT_ATTENTION = ("sdpa", "eager")
"""Layers with these implementations of attention can be split within rows."""
_NUM_CHECKED = 8
"""Number of first training forwards of a run in which position ids are checked."""
_MOST_SEGMENTS = 64
"""A chunk with at most this many documents computes them one by one. A chunk with more documents gets a mask."""


@contextlib.contextmanager
def next_forward_of(rows: CutRows) -> Iterator[None]:
    """In this context, training forwards of this thread compute a part of ``rows``. Other ranks compute the rest."""
    _current.announced = rows
    try:
        yield
    finally:
        _current.announced = None


def computes_a_part() -> bool:
    """Return whether this thread's running forward computes only a part of the tokens of its rows."""
    return _current.rows is not None


class _Current(threading.local):
    """State of the forward of each thread."""

    are_masks_pending = False
    """Whether masks are created as `PendingMask`."""
    announced: CutRows | None = None
    """The rows of the next training forward, if several ranks share them."""
    rows: CutRows | None = None
    """The rows of the running forward, if several ranks share them."""
    attention: _SeenByChunk | None = None
    """The keys that the running chunk sees, if its attention needs no mask."""


_current = _Current()


def run_layers_in_chunks(
    model: nn.Module,
    activations: ActivationTiers,
    layers: Mapping[nn.Module, str],
    row_memory: RowMemory | None = None,
) -> ChunkedLayers:
    """Make the layers of a model run in chunks as soon as `ChunkedLayers.cut` gets a number of tokens. ``row_memory``:
    the shared memory of the ranks that share rows in all training forwards (`ranks.per_row`)."""
    chunked = cuttable_layers(model, layers, activations)
    activations.runs_in_chunks.update(
        {layer: functools.partial(_runs_in_chunks, of_layer) for layer, of_layer in chunked.of_layer.items()}
    )
    activations.run_whole.update({layer: of_layer.run_whole for layer, of_layer in chunked.of_layer.items()})

    num_to_check = _NUM_CHECKED

    def begin(_module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal num_to_check
        if num_to_check and torch.is_grad_enabled():
            num_to_check = 0 if _warn_of_ignored_documents(kwargs) else num_to_check - 1
        if row_memory is not None and torch.is_grad_enabled():
            _current.rows = _current.announced
            if _current.rows is None:
                raise ValueError(
                    f"ranks.per_row: {row_memory.links.ranks.num_ranks} divides the rows of a Trainer's batches among "
                    "ranks, but this training forward has whole rows; train with Trainer and its own loss, or leave "
                    "ranks.per_row out"
                )
            chunked.begin_forward(RowsOfRanks(_current.rows.pieces, row_memory))
            _take_masks_and_attention()
            return
        chunked.begin_forward()
        if chunked.chunk_tokens is None:
            return
        _take_masks_and_attention()
        shape = step_shape(args, kwargs)
        num_tokens = 0 if shape is None else shape.batch_size * shape.sequence_length
        _current.are_masks_pending = num_tokens > chunked.chunk_tokens

    def end(_module: nn.Module, _args: Any, _output: Any) -> None:
        _current.are_masks_pending = False
        _current.rows = None
        chunked.end_forward()

    if row_memory is not None:
        chunked.attach()
    model.register_forward_pre_hook(begin, with_kwargs=True)
    model.register_forward_hook(end, always_call=True)
    return chunked


def _warn_of_ignored_documents(kwargs: Mapping[str, Any]) -> bool:
    """Warn if position ids restart within a row and there is a mask, because transformers then ignores the restarts.
    Returns whether it warned."""
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if not isinstance(positions, Tensor) or not isinstance(mask, Tensor) or positions.dim() != 2 or mask.dim() != 2:
        return False
    if not bool(mask.all()) or not bool((positions[:, 1:] < positions[:, :-1]).any()):
        return False
    logger.warning(
        "position_ids restart within a row, but an attention_mask of ones was passed too, so transformers lets tokens "
        "attend to earlier documents of their row; leave out attention_mask to keep the documents apart"
    )
    return True


def cuttable_layers(
    model: nn.Module, layers: Mapping[nn.Module, str], frames: ChunkFrames | None = None
) -> ChunkedLayers:
    """Return the layers of a model, to trace them or run them in chunks. ``frames`` is None if they are only traced."""
    norms = norms_outside(model, list(layers))
    return ChunkedLayers(layers, LayerCall.of, frames, _masks_pending, norms)


def _take_masks_and_attention() -> None:
    """Make transformers call this module for masks and attention. Outside of chunks it calls the stock functions."""
    for name in _CUT_ATTENTION:
        replace_function(ALL_MASK_ATTENTION_FUNCTIONS, name, _make_mask)
    replace_function(ALL_ATTENTION_FUNCTIONS, "sdpa", _attend)


@contextlib.contextmanager
def _masks_pending() -> Iterator[None]:
    """In this context, masks are created as `PendingMask`."""
    _take_masks_and_attention()
    before, _current.are_masks_pending = _current.are_masks_pending, True
    try:
        yield
    finally:
        _current.are_masks_pending = before


def _runs_in_chunks(chunked: ChunkedLayer, args: tuple[Any, ...], function: Any) -> bool:
    return chunked.applies(args, getattr(function, "keywords", {}))


# Masks.


class PendingMask(Tensor):
    """A mask whose values are computed when they are needed. Any tensor operation computes the whole mask."""

    _make: Callable[..., Tensor]
    _options: dict[str, Any]
    _whole: Tensor | None
    _pattern: MaskPattern
    _documents: list[list[int]] | None
    """For each row and token: index of the first token of its document."""
    _is_padded: bool
    is_padded_before: bool
    """Whether a row has padding before a token."""

    @classmethod
    def from_function(cls, make: Callable[..., Tensor], options: dict[str, Any], pattern: MaskPattern) -> PendingMask:
        dtype = torch.bool if options.get("dtype") is None or make.__name__ == "sdpa_mask" else options["dtype"]
        with torch.no_grad(), without_torch_function():
            none = torch.zeros(1, dtype=dtype, device=options.get("device", "cpu"))
            shape = options["batch_size"], 1, options["q_length"], options["kv_length"]
            mask = none.expand(shape).as_subclass(cls)
        mask._make, mask._options, mask._whole, mask._pattern = make, options, None, pattern
        padding = options.get("attention_mask")
        mask._is_padded = padding is not None and not bool(padding.all())
        mask.is_padded_before = False
        if padding is not None and mask._is_padded:
            is_token = padding.bool()
            mask.is_padded_before = bool((is_token[:, 1:] & ~is_token[:, :-1]).any())
        mask._documents = None if pattern.documents is None else _first_tokens(pattern.documents)
        return mask

    def whole(self) -> Tensor:
        if self._whole is None:
            self._whole = self._make(**self._options)
        return self._whole

    @property
    def is_causal(self) -> bool:
        return self._pattern.is_causal

    def part(self, tokens: TokenRange, first_key: int) -> Tensor:
        """Return the mask of a chunk's queries, for keys from ``first_key`` to the end of the chunk."""
        options, first_row = dict(self._options), tokens.first_row
        function, padding = options["mask_function"], options.get("attention_mask")

        def of_rows(row: Any, head: Any, query: Any, key: Any) -> Any:
            return function(row + first_row, head, query, key)

        options.update(
            batch_size=tokens.last_row - first_row,
            q_length=tokens.stop - tokens.start,
            q_offset=tokens.start,
            kv_length=tokens.stop - first_key,
            kv_offset=first_key,
            mask_function=of_rows if first_row else function,
            attention_mask=None if padding is None else padding[first_row : tokens.last_row],
            allow_is_causal_skip=False,
        )
        return self._make(**options)

    def first_key(self, tokens: TokenRange) -> int:
        """Return the index of the first key that any query of a chunk sees."""
        first = 0
        if self._pattern.window is not None:
            first = max(first, tokens.start - self._pattern.window + 1)
        if self._documents is not None:
            first = max(first, min(row[tokens.start] for row in self._documents[tokens.first_row : tokens.last_row]))
        return first

    def segments(self, tokens: TokenRange) -> tuple[tuple[int, int, int], ...] | None:
        """Divide a chunk into (start, stop, first key) parts. Queries of a part see all keys from the first key to
        their own position. Return None if a query sees other keys."""
        if not self._pattern.is_known or self._is_padded or not self._pattern.is_causal:
            return None
        rows = range(tokens.first_row, tokens.last_row)
        if self._documents is None:
            parts = [(tokens.start, tokens.stop, 0)]
        elif len(rows) > 1:
            if any(self._documents[row][tokens.stop - 1] for row in rows):
                return None
            parts = [(tokens.start, tokens.stop, 0)]
        else:
            parts, firsts, start = [], self._documents[rows[0]], tokens.start
            while start < tokens.stop:
                stop = start
                while stop < tokens.stop and firsts[stop] == firsts[start]:
                    stop += 1
                parts.append((start, stop, firsts[start]))
                start = stop
        window = self._pattern.window
        if window is not None and any(stop - first > window for _, stop, first in parts):
            return None
        return tuple(parts) if len(parts) <= _MOST_SEGMENTS else None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _SHAPE_METHODS or getattr(func, "__self__", None) in _SHAPE_ATTRIBUTES:
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(PendingMask, PendingMask.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


_SHAPE_METHODS = frozenset(("size", "dim", "ndimension", "numel", "stride", "__len__"))
_SHAPE_ATTRIBUTES = frozenset((Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.requires_grad))


def _first_tokens(documents: Tensor) -> list[list[int]]:
    """Return for each row and token the first token of its document. ``documents``: document indices [rows, tokens]."""
    rows: list[list[int]] = []
    for row in documents.tolist():
        firsts: list[int] = []
        for token, document in enumerate(row):
            firsts.append(firsts[-1] if token and document == row[token - 1] else token)
        rows.append(firsts)
    return rows


def _make_mask(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the stock mask, or in a forward in chunks a `PendingMask` of it."""
    if _current.rows is not None:
        return _mask_of_rows(stock, _current.rows, *args, **kwargs)
    if args or not _current.are_masks_pending or not {"q_length", "kv_length", "mask_function"} <= kwargs.keys():
        return stock(*args, **kwargs)
    offset = kwargs.get("q_offset", 0)
    if isinstance(offset, Tensor) or offset or kwargs["q_length"] != kwargs["kv_length"]:
        return stock(**kwargs)
    if stock.__name__ == "sdpa_mask" and is_causal_mask_skipped(kwargs):
        return None
    pattern = mask_pattern(kwargs["mask_function"])
    if not pattern.is_causal:  # layers with this mask are not split, and the stock function may return None
        return stock(**kwargs)
    return PendingMask.from_function(stock, kwargs, pattern)


def _mask_of_rows(stock: Callable[..., Any], rows: CutRows, *args: Any, **kwargs: Any) -> PendingMask:
    """Return the mask of whole rows, although the model asks for the mask of this rank's tokens."""
    pattern = mask_pattern(kwargs.get("mask_function", stock))
    if args or not pattern.is_causal or not pattern.is_known or kwargs.get("attention_mask") is not None:
        raise ValueError(
            "ranks.per_row needs a mask in which a token sees all earlier tokens, or the earlier tokens of a window or "
            "its document, but the mask of this model has an unsupported shape; leave ranks.per_row out"
        )
    pattern = replace(pattern, documents=rows.documents)
    length = rows.pieces.length
    options = {
        **kwargs,
        "q_length": length,
        "kv_length": length,
        "q_offset": 0,
        "kv_offset": 0,
        "attention_mask": rows.padding,
        "mask_function": mask_function(pattern),
    }
    return PendingMask.from_function(stock, options, pattern)


# Attention.


@dataclass(slots=True)
class _SeenByChunk:
    """The range of a chunk's queries, and the keys that they see (`PendingMask.segments`)."""

    start: int
    stop: int
    first_key: int
    segments: tuple[tuple[int, int, int], ...]
    was_used: bool = False


def _attend(
    stock: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> Any:
    """Run the stock attention, or the attention of a chunk that needs no mask."""
    seen = _current.attention
    if seen is None or attention_mask is not None or query.shape[2] != seen.stop - seen.start:
        return stock(module, query, key, value, attention_mask, **options)
    if key.shape[2] != seen.stop - seen.first_key:
        return stock(module, query, key, value, attention_mask, **options)
    is_causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise NotCuttableError("sees later tokens")
    seen.was_used = True
    has_bias = options.get("position_bias") is not None
    if has_bias or options.get("dropout") or not _has_kernel(query, key, value):
        return stock(module, query, key, value, _mask_of(seen, query.device), **options)
    outputs = [
        attention_after(
            query[:, :, start - seen.start : stop - seen.start],
            key[:, :, first - seen.first_key : stop - seen.first_key],
            value[:, :, first - seen.first_key : stop - seen.first_key],
            scale=options.get("scaling"),
        )
        for start, stop, first in seen.segments
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
    return output.transpose(1, 2).contiguous(), None


def _has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return (
        query.shape[-1] == key.shape[-1] == value.shape[-1]
        and query.dtype == key.dtype == value.dtype
        and query.shape[1] % key.shape[1] == 0
        and all(tensor.dim() == 4 and tensor.stride(-1) == 1 for tensor in (query, key, value))
    )


def _mask_of(seen: _SeenByChunk, device: torch.device) -> Tensor:
    """Return the bool mask [1, 1, queries, keys] of a chunk."""
    keys = torch.arange(seen.first_key, seen.stop, device=device)
    queries = torch.arange(seen.start, seen.stop, device=device)
    first = torch.empty_like(queries)
    for start, stop, first_key in seen.segments:
        first[start - seen.start : stop - seen.start] = first_key
    mask = (keys[None, :] <= queries[:, None]) & (keys[None, :] >= first[:, None])
    return mask[None, None]


# Inputs of layers.


class LayerCall:
    """The inputs of one call of a layer (`LayerInputs`)."""

    def __init__(self, layer: nn.Module, hidden: Tensor, is_named: bool, arguments: Mapping[str, Any]) -> None:
        self._layer = layer
        self._is_named = is_named
        self._arguments = arguments
        self._shape = hidden.shape
        self._recorded = recorded_names()
        self._is_shared = _current.rows is not None
        """Whether other ranks compute tokens of the same rows."""

    @classmethod
    def of(cls, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor | None, LayerCall]:
        """Return the hidden states and the other inputs of a call."""
        names = [name for name in _parameters_of(layer) if name != "self"]
        arguments = {**dict(zip(names[1:], args[1:], strict=False)), **kwargs}
        hidden = args[0] if args else arguments.pop("hidden_states", None)
        if not isinstance(hidden, Tensor) or len(args) > len(names):
            return None, cls(layer, torch.empty(0), False, {})
        return hidden, cls(layer, hidden, not args, arguments)

    def refuse(self, *, within_rows: bool) -> None:
        if "attentions" in self._recorded:
            raise ValueError(
                "output_attentions=True needs the attention of all pairs of tokens, which layers in chunks do not "
                "compute; set output_attentions to False, or chunks.layers: false"
            )
        for name, value in self._arguments.items():
            if name in CACHE_NAMES and value is not None:
                raise NotCuttableError("fills a cache")
        length = self._shape[1]
        last = TokenRange(0, 1, length - 1, length) if within_rows else TokenRange(0, 1, 0, length)
        self._cut_all(last)
        if not within_rows:
            return
        if self._cache_name() is None:
            raise NotCuttableError("takes no cache")
        implementation = _implementation_of(self._layer)
        if implementation not in _CUT_ATTENTION:
            raise NotCuttableError(f"runs attention by {implementation}, not by {' or '.join(_CUT_ATTENTION)}")
        mask = self._arguments.get("attention_mask")
        if mask is None and (implementation != "sdpa" or self._is_shared):
            raise NotCuttableError("has attention without a mask")
        if isinstance(mask, PendingMask) and mask.is_padded_before and implementation == "eager":
            # The last padding token predicts the first token. It sees no key, and eager softmax then uses all keys.
            raise NotCuttableError("runs eager attention over padding before tokens")
        if isinstance(mask, PendingMask) and not mask.is_causal:
            raise NotCuttableError("sees later tokens")

    def call(
        self,
        forward: Callable[..., Any],
        hidden: Tensor,
        tokens: TokenRange,
        cache: ChunkKeys | None,
        *,
        only_keys: bool = False,
    ) -> Any:
        arguments, first_key, seen = self._cut_all(tokens)
        context: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if cache is not None:
            name = self._cache_name()
            assert name is not None
            arguments[name] = cache
            if "use_cache" in _parameters_of(self._layer) or "use_cache" in arguments:
                arguments["use_cache"] = True
            context = cache.at(tokens.in_row, first_key, only_keys=only_keys)
        args = () if self._is_named else (hidden,)
        if self._is_named:
            arguments["hidden_states"] = hidden
        output = None
        before, _current.attention = _current.attention, seen
        try:
            with context:
                output = forward(*args, **arguments)
        finally:
            _current.attention = before
        if seen is not None and not seen.was_used and not only_keys:
            raise NotCuttableError("computes attention in its own way")
        return output

    def recording(self) -> contextlib.AbstractContextManager[list[tuple[str, Tensor]]]:
        return recording_outputs(self._recorded)

    def add_recorded(self, outputs: Sequence[tuple[str, Tensor]]) -> None:
        add_recorded_outputs(outputs)

    def _cache_name(self) -> str | None:
        known = _parameters_of(self._layer)
        return next((name for name in CACHE_NAMES[:3] if name in known or name in self._arguments), None)

    def _cut_all(self, tokens: TokenRange) -> tuple[dict[str, Any], int, _SeenByChunk | None]:
        """Return the inputs for a chunk, its first key, and the keys that it sees if it needs no mask."""
        cut = {name: self._cut(value, tokens) for name, value in self._arguments.items() if name != "attention_mask"}
        tokens, mask = tokens.in_row, self._arguments.get("attention_mask")
        first_key, seen = 0, None
        if mask is None:
            seen = self._seen(tokens, 0, ((tokens.start, tokens.stop, 0),))
        elif isinstance(mask, PendingMask):
            first_key = mask.first_key(tokens)
            if _implementation_of(self._layer) == "sdpa":
                seen = self._seen(tokens, first_key, mask.segments(tokens))
            mask = mask.part(tokens, first_key) if seen is None else None
        else:
            mask = self._cut_mask(mask, tokens)
        if "attention_mask" in self._arguments:
            cut["attention_mask"] = mask
        return cut, first_key, seen

    def _seen(
        self, tokens: TokenRange, first_key: int, segments: Sequence[tuple[int, int, int]] | None
    ) -> _SeenByChunk | None:
        if segments is None:
            return None
        is_whole = tokens.start == 0 and len(segments) == 1
        return None if is_whole else _SeenByChunk(tokens.start, tokens.stop, first_key, tuple(segments))

    def _cut_mask(self, mask: Any, tokens: TokenRange) -> Any:
        rows, length = self._shape[:2]
        if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[2:] != (length, length):
            if tokens.start == 0 and tokens.stop == length:
                return self._cut(mask, tokens)
            raise NotCuttableError("has a mask of unsupported shape")
        if mask.shape[0] == rows:
            mask = mask[tokens.first_row : tokens.last_row]
        return mask[:, :, tokens.start : tokens.stop, : tokens.stop]

    def _cut(self, value: Any, tokens: TokenRange) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(self._cut(item, tokens) for item in value)
        if isinstance(value, dict):
            return {name: self._cut(item, tokens) for name, item in value.items()}
        if not isinstance(value, Tensor):
            return value
        if value.requires_grad:
            raise NotCuttableError("has an input with a gradient besides the hidden states")
        rows, length = self._shape[:2]
        token_dim = _only_dim(value, length, preferred=1)
        row_dim = None
        if rows > 1:  # rows precede tokens, and a later dimension may have the same size
            row_dim = _only_dim(value, rows, preferred=0, before=token_dim)
        if row_dim is not None:
            value = value.narrow(row_dim, tokens.first_row, tokens.last_row - tokens.first_row)
        if token_dim is not None:
            value = value.narrow(token_dim, tokens.start, tokens.stop - tokens.start)
        return value


def _only_dim(tensor: Tensor, size: int, *, preferred: int, before: int | None = None) -> int | None:
    """Return the dimension of a tensor with ``size`` elements, or None. Dimensions from ``before`` on are ignored."""
    dims = [dim for dim, of_dim in enumerate(tensor.shape[:before]) if of_dim == size]
    if len(dims) > 1 and preferred not in dims:
        raise NotCuttableError("has an input with ambiguous dimensions")
    return None if not dims else preferred if preferred in dims else dims[0]


def _parameters_of(layer: nn.Module) -> Mapping[str, Any]:
    return inspect.signature(type(layer).forward).parameters


def _implementation_of(layer: nn.Module) -> str:
    for module in layer.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) is not None:
            return str(config._attn_implementation)  # type: ignore[union-attr]
    return "its own code"
