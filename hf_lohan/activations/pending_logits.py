"""Logits that nobody has computed yet, and that need not be if all that becomes of them is a cross entropy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_lohan.compat.torch_private import tree_map_only, without_torch_function

Step: TypeAlias = Callable[[Tensor], Tensor]
"""Elementwise, without weights."""


class LogitsSource(Protocol):
    """Makes logits of hidden states."""

    @property
    def is_in_forward(self) -> bool:
        """Whether a training forward with labels runs in this thread."""

    def logits_of(self, pending: Pending) -> Tensor:
        """The true ones. Raises RuntimeError where they cannot be had."""

    def loss_of(self, pending: Pending, labels: Tensor, options: dict[str, Any]) -> Tensor | None:
        """`F.cross_entropy` of pending logits [tokens, vocabulary]; None for options that need the logits."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Logits, as far as they are known."""

    source: LogitsSource
    hidden: Tensor
    """[..., hidden]; the logits have its shape but for the last dimension."""
    vocabulary: int
    version: tuple[object, ...]
    """Of the head whose logits they are."""
    steps: tuple[Step, ...] = ()
    to_dtype: torch.dtype | None = None
    """What a step casts them to."""
    is_view: bool = False

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.vocabulary))

    @property
    def dtype(self) -> torch.dtype:
        return self.to_dtype or self.hidden.dtype

    def then(self, step: Step, dtype: torch.dtype | None = None) -> Pending:
        return replace(self, steps=(*self.steps, step), to_dtype=dtype or self.to_dtype, is_view=False)


class PendingLogits(Tensor):
    """Has the logits' shape, dtype and device. What models do with logits before the loss (shift, flatten, cast, scale,
    cap) is noted; anything else computes the true logits, and goes on from them as always. Whoever gets round it finds
    NaN, never a quiet wrong number."""

    _pending: Pending
    _true: Tensor | None
    _has_views: bool

    @classmethod
    def of(cls, pending: Pending) -> PendingLogits:
        with torch.no_grad(), without_torch_function():
            nan = torch.full((1,), float("nan"), dtype=pending.dtype, device=pending.hidden.device)
            made = nan.expand(pending.shape).as_subclass(cls)
        made._pending, made._true, made._has_views = pending, None, False
        return made

    def true(self) -> Tensor:
        """The logits themselves; computed once, if they have a graph, and else for this one look."""
        if self._true is not None:
            return self._true
        logits = self._pending.source.logits_of(self._pending)
        if torch.is_grad_enabled():
            self._true = logits
        return logits

    def refuse_writing(self) -> None:
        """Raises RuntimeError where a write would have to show in views that were taken before, or in what is computed
        later."""
        if self._has_views or self._pending.is_view or (self._true is None and not torch.is_grad_enabled()):
            raise RuntimeError(
                "logits of a training forward are written to in place, in views or without a graph, which a loss in "
                "chunks cannot follow; set chunked_loss: false"
            )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], PendingLogits) else None
        if first is not None and first._true is None:
            found = _noted(first, func, args[1:], kwargs)
            if found is not None:
                return found
        if first is not None and _writes(func):
            first.refuse_writing()
        args, kwargs = tree_map_only(PendingLogits, PendingLogits.true, (args, kwargs))
        return func(*args, **kwargs)


_OF_THE_FORM = frozenset(("size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device", "__len__"))
_FORM_ATTRIBUTES = frozenset((".shape", ".dtype", ".device", ".ndim", ".layout", ".is_cuda", ".is_cpu", ".is_meta"))
_SCALED = frozenset(("mul", "div", "true_divide", "multiply", "divide", "__mul__", "__rmul__", "__truediv__", "tanh"))


def _name_of(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", "")
    return f".{func.__self__.__name__}" if name == "__get__" else name  # type: ignore[attr-defined]


def _writes(func: Callable[..., Any]) -> bool:
    name = _name_of(func)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__setitem__", "__set__") or (name.startswith("__i") and name.endswith("__"))


def _noted(logits: PendingLogits, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``func`` gives, if the logits need not be computed for it."""
    name, pending = _name_of(func), logits._pending
    if name in _OF_THE_FORM or name in _FORM_ATTRIBUTES:
        with without_torch_function():
            return func(logits, *args, **kwargs)
    if name == ".requires_grad":
        return True
    if name in ("__repr__", "__format__"):
        return f"PendingLogits(shape={tuple(pending.shape)}, dtype={pending.dtype})"
    if not pending.source.is_in_forward:
        return None  # nothing will take them in chunks any more
    if func is F.cross_entropy:
        names = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
        given = {**dict(zip(("target", *names), args, strict=False)), **kwargs}
        labels = given.pop("target", None)
        return pending.source.loss_of(pending, labels, given) if isinstance(labels, Tensor) else None
    if name == "contiguous" and not kwargs:
        return logits
    if name == "float" or (name == "to" and _only_a_dtype(args, kwargs)):
        dtype = torch.float32 if name == "float" else (*args, *kwargs.values())[0]
        return logits if dtype == pending.dtype else PendingLogits.of(pending.then(lambda t: t.to(dtype), dtype))
    if name in _SCALED and not kwargs and all(isinstance(arg, int | float) for arg in args):
        return PendingLogits.of(pending.then(lambda t: func(t, *args)))
    hidden = _same_tokens(name, logits, args) if not kwargs else None
    if hidden is None:
        return None
    logits._has_views = True
    return PendingLogits.of(replace(pending, hidden=hidden, is_view=True))


def _only_a_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = (*args, *kwargs.values())
    return len(given) == 1 and isinstance(given[0], torch.dtype) and set(kwargs) <= {"dtype"}


def _same_tokens(name: str, logits: PendingLogits, args: tuple[Any, ...]) -> Tensor | None:
    """The hidden states of a view that has whole tokens."""
    pending = logits._pending
    if name in ("view", "reshape"):
        shape = _shape_of_view(pending.shape, args[0] if len(args) == 1 else args)
        whole = shape is not None and shape[-1] == pending.vocabulary
        return pending.hidden.reshape(*shape[:-1], pending.hidden.shape[-1]) if shape and whole else None
    if name == "flatten" and args == (0, 1) and len(pending.shape) == 3:
        return pending.hidden.flatten(0, 1)
    if name == "__getitem__" and _leaves_tokens_whole(args[0], len(pending.shape)):
        index = args[0]
        return pending.hidden[index]
    return None


def _shape_of_view(shape: torch.Size, sizes: Any) -> list[int] | None:
    """What ``sizes`` comes to; None if it is no shape, or one that does not fit: then torch says why."""
    sizes = [sizes] if isinstance(sizes, int) else list(sizes) if isinstance(sizes, tuple | list) else []
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    known = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and known > 0:
        sizes[sizes.index(-1)] = shape.numel() // known
    return sizes if math.prod(sizes) == shape.numel() else None


def _leaves_tokens_whole(index: Any, num_dims: int) -> bool:
    if isinstance(index, Tensor):
        return index.dim() < num_dims if index.dtype == torch.bool else num_dims > 1
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or isinstance(part, int | slice) for part in parts):
        return False
    reaches_last = Ellipsis in parts or len(parts) == num_dims
    return not reaches_last or parts[-1] is Ellipsis or parts[-1] == slice(None)
