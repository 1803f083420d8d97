"""Logits that are not computed unless an operation other than cross entropy needs them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_lohan.compat.torch_private import tree_map_only, without_torch_function

LogitsOperation: TypeAlias = Callable[[Tensor], Tensor]
"""An elementwise operation without weights."""


class LogitsSource(Protocol):
    """Computes logits from hidden states."""

    @property
    def is_in_forward(self) -> bool:
        """Whether a training forward with labels runs on this thread."""

    def compute_logits(self, pending: Pending) -> Tensor:
        """Compute whole logits. Raises RuntimeError if this is no longer possible."""

    def compute_loss(self, pending: Pending, labels: Tensor, options: dict[str, Any]) -> Tensor | None:
        """Return `F.cross_entropy` of pending logits [tokens, vocabulary], or None if ``options`` need the logits."""


@dataclass(frozen=True, slots=True)
class Pending:
    """How to compute logits: the hidden states, and operations after the head."""

    source: LogitsSource
    hidden: Tensor
    """[..., hidden]. The logits are [..., vocabulary]."""
    vocabulary: int
    version: tuple[object, ...]
    """The head's version."""
    operations: tuple[LogitsOperation, ...] = ()
    to_dtype: torch.dtype | None = None
    """The dtype of the logits, if an operation casts them."""
    is_view: bool = False

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.vocabulary))

    @property
    def dtype(self) -> torch.dtype:
        return self.to_dtype or self.hidden.dtype

    def then(self, operation: LogitsOperation, dtype: torch.dtype | None = None) -> Pending:
        operations = (*self.operations, operation)
        return replace(self, operations=operations, to_dtype=dtype or self.to_dtype, is_view=False)


class PendingLogits(Tensor):
    """A tensor with the logits' shape, dtype and device. It records the operations of models between head and loss
    (shift, flatten, cast, scale, cap). Any other operation computes the true logits. Its own memory contains NaN, so
    that code that bypasses `__torch_function__` reads no plausible number."""

    _pending: Pending
    _logits: Tensor | None
    _has_views: bool

    @classmethod
    def from_pending(cls, pending: Pending) -> PendingLogits:
        with torch.no_grad(), without_torch_function():
            nan = torch.full((1,), float("nan"), dtype=pending.dtype, device=pending.hidden.device)
            made = nan.expand(pending.shape).as_subclass(cls)
        made._pending, made._logits, made._has_views = pending, None, False
        return made

    def logits(self) -> Tensor:
        """Return the true logits. Logits with a graph are computed only once."""
        if self._logits is not None:
            return self._logits
        logits = self._pending.source.compute_logits(self._pending)
        if torch.is_grad_enabled():
            self._logits = logits
        return logits

    def refuse_writing(self) -> None:
        """Raise RuntimeError if a write would not reach views of the logits, or logits that are computed later."""
        if self._has_views or self._pending.is_view or (self._logits is None and not torch.is_grad_enabled()):
            raise RuntimeError(
                "the logits of a training forward were changed in place, through a view or without a graph; a chunked "
                "loss does not support this; set chunks.loss: false"
            )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], PendingLogits) else None
        if first is not None and first._logits is None:
            result = _record(first, func, args[1:], kwargs)
            if result is not None:
                return result
        if first is not None and _is_in_place(func):
            first.refuse_writing()
        args, kwargs = tree_map_only(PendingLogits, PendingLogits.logits, (args, kwargs))
        return func(*args, **kwargs)


_SHAPE_METHODS = frozenset(("size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device", "__len__"))
_SHAPE_ATTRIBUTES = frozenset((".shape", ".dtype", ".device", ".ndim", ".layout", ".is_cuda", ".is_cpu", ".is_meta"))
_SCALINGS = frozenset(("mul", "div", "true_divide", "multiply", "divide", "__mul__", "__rmul__", "__truediv__", "tanh"))


def _torch_function_name(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", "")
    return f".{func.__self__.__name__}" if name == "__get__" else name  # type: ignore[attr-defined]


def _is_in_place(func: Callable[..., Any]) -> bool:
    name = _torch_function_name(func)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__setitem__", "__set__") or (name.startswith("__i") and name.endswith("__"))


def _record(logits: PendingLogits, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of ``func``, or None if ``func`` needs the true logits."""
    name, pending = _torch_function_name(func), logits._pending
    if name in _SHAPE_METHODS or name in _SHAPE_ATTRIBUTES:
        with without_torch_function():
            return func(logits, *args, **kwargs)
    if name == ".requires_grad":
        return True
    if name in ("__repr__", "__format__"):
        return f"PendingLogits(shape={tuple(pending.shape)}, dtype={pending.dtype})"
    if not pending.source.is_in_forward:
        return None  # the loss will not be computed in chunks
    if func is F.cross_entropy:
        names = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
        options = {**dict(zip(("target", *names), args, strict=False)), **kwargs}
        labels = options.pop("target", None)
        return pending.source.compute_loss(pending, labels, options) if isinstance(labels, Tensor) else None
    if name == "contiguous" and not kwargs:
        return logits
    if name == "float" or (name == "to" and _is_only_dtype(args, kwargs)):
        dtype = torch.float32 if name == "float" else (*args, *kwargs.values())[0]
        return (
            logits if dtype == pending.dtype else PendingLogits.from_pending(pending.then(lambda t: t.to(dtype), dtype))
        )
    if name in _SCALINGS and not kwargs and all(isinstance(arg, int | float) for arg in args):
        return PendingLogits.from_pending(pending.then(lambda t: func(t, *args)))
    hidden = _hidden_of_view(name, logits, args) if not kwargs else None
    if hidden is None:
        return None
    logits._has_views = True
    return PendingLogits.from_pending(replace(pending, hidden=hidden, is_view=True))


def _is_only_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    values = (*args, *kwargs.values())
    return len(values) == 1 and isinstance(values[0], torch.dtype) and set(kwargs) <= {"dtype"}


def _hidden_of_view(name: str, logits: PendingLogits, args: tuple[Any, ...]) -> Tensor | None:
    """Return the hidden states of a view that consists of whole tokens, or None for other views."""
    pending = logits._pending
    if name in ("view", "reshape"):
        shape = _shape_of_view(pending.shape, args[0] if len(args) == 1 else args)
        whole = shape is not None and shape[-1] == pending.vocabulary
        return pending.hidden.reshape(*shape[:-1], pending.hidden.shape[-1]) if shape and whole else None
    if name == "flatten" and args == (0, 1) and len(pending.shape) == 3:
        return pending.hidden.flatten(0, 1)
    if name == "__getitem__" and _selects_whole_tokens(args[0], len(pending.shape)):
        index = args[0]
        return pending.hidden[index]
    return None


def _shape_of_view(shape: torch.Size, sizes: Any) -> list[int] | None:
    """Return the shape that ``sizes`` stands for. Return None if it does not fit, so that torch raises the error."""
    sizes = [sizes] if isinstance(sizes, int) else list(sizes) if isinstance(sizes, tuple | list) else []
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    known = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and known > 0:
        sizes[sizes.index(-1)] = shape.numel() // known
    return sizes if math.prod(sizes) == shape.numel() else None


def _selects_whole_tokens(index: Any, num_dims: int) -> bool:
    if isinstance(index, Tensor):
        return index.dim() < num_dims if index.dtype == torch.bool else num_dims > 1
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or isinstance(part, int | slice) for part in parts):
        return False
    reaches_last = Ellipsis in parts or len(parts) == num_dims
    return not reaches_last or parts[-1] is Ellipsis or parts[-1] == slice(None)
