"""A parameter whose weights are in the store. An operation that needs its values borrows them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from hf_lohan.absent.weight_provider import (
    BorrowedWeights,
    WeightProvider,
    WeightView,
    gradient_refusal,
    inputs_refusal,
    no_model_refusal,
    weight_refusal,
)
from hf_lohan.compat.torch_private import take_gradients_last, tree_leaves, tree_map, without_torch_function

_VIEWS = frozenset((
    *("adjoint", "as_strided", "broadcast_to", "chunk", "conj", "detach", "diagonal", "dsplit", "expand", "expand_as"),
    *("flatten", "hsplit", "moveaxis", "movedim", "narrow", "permute", "positive", "ravel", "reshape", "reshape_as"),
    *("resolve_conj", "resolve_neg", "select", "split", "split_with_sizes", "squeeze", "swapaxes", "swapdims", "t"),
    *("tensor_split", "transpose", "unbind", "unflatten", "unfold", "unsafe_chunk", "unsafe_split", "unsqueeze"),
    *("view", "view_as", "vsplit"),
))  # fmt: skip
_VIEW_ATTRIBUTES = frozenset((".data", ".T", ".mT", ".H", ".mH", ".real"))
_CASTS = frozenset(("to", "type", "cpu", "cuda", "float", "half", "bfloat16", "double", "contiguous", "type_as"))
"""Functions that return their argument unchanged if it already has the requested dtype and device."""
_SHAPE_FUNCTIONS = frozenset((
    *("size", "stride", "numel", "nelement", "dim", "ndimension", "element_size", "storage_offset", "get_device"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "result_type", "__len__"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "_has_compatible_shallow_copy_type"),
    *("requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook", "grad"),
))  # fmt: skip
"""Functions that read a tensor's shape or type, but no values."""
_STRIDE_FUNCTIONS = frozenset(("stride", "is_contiguous", "storage_offset"))
_MEMORY = frozenset((
    *("data_ptr", "untyped_storage", "storage", "_typed_storage", "__dlpack__", "__reduce_ex__", "__deepcopy__"),
    *("share_memory_", ".imag", ".__cuda_array_interface__"),
))  # fmt: skip
"""Functions that read a tensor's memory directly, or that may copy a whole model into memory."""
_TORCH_GRAD: Any = Tensor.grad


class AbsentTensor(Tensor):
    """A view of an absent parameter, such as `.data` or `w.t()`. It has no values until an operation reads them."""

    _weight_view: WeightView | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.autograd.backward, torch.autograd.grad):
            return func(*tree_map(_gradient_edge, args), **tree_map(_gradient_edge, dict(kwargs)))
        if func is functional.embedding:
            with without_torch_function():
                embedded = _embed_rows(*args, **kwargs)
            if embedded is not None:
                return embedded
        if AbsentGradient in types:
            with without_torch_function():
                return _call_on_gradient(func, args, kwargs)
        name = _function_name(func)
        with without_torch_function():
            result = _call_without_values(name, func, args, kwargs)
        return _call_with_values(name, func, args, kwargs) if result is NotImplemented else result

    @property
    def weight_view(self) -> WeightView:
        assert self._weight_view is not None
        return self._weight_view


class AbsentGradient(AbsentTensor):
    """The `.grad` of a parameter whose gradient was moved to the host."""


class AbsentParameter(nn.Parameter):
    """The class of a parameter while it is absent. The parameter keeps its identity, hooks and place in optimizers."""

    _present_class: ClassVar[type[nn.Parameter]] = nn.Parameter
    __torch_function__ = AbsentTensor.__torch_function__

    @staticmethod
    def set_provider(parameter: nn.Parameter, provider: WeightProvider) -> None:
        """Borrow the parameter's weights from ``provider`` from now on. Keeps only a weak reference to it."""
        parameter._weight_provider = weakref.ref(provider)  # type: ignore[attr-defined]

    @classmethod
    def hide(cls, parameter: nn.Parameter, placeholder: Tensor) -> None:
        """Make the parameter absent. ``placeholder`` has the parameter's shape and becomes its data."""
        if not isinstance(parameter, cls):
            parameter.data = placeholder
            present = type(parameter)
            parameter.__class__ = _absent_class(present)
            parameter._present_class = present  # type: ignore[attr-defined]

    @classmethod
    def show(cls, parameter: nn.Parameter, weights: Tensor) -> None:
        """Make the parameter an ordinary parameter with these weights."""
        if isinstance(parameter, cls):
            parameter.__class__ = parameter._present_class  # type: ignore[assignment]
        parameter.data = weights

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        provider = _provider_of(self)
        if provider is None:
            raise RuntimeError(no_model_refusal("copy.deepcopy"))
        copy: nn.Parameter = memo.setdefault(id(self), provider.copy_parameter(self))
        return copy

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Any:
        with without_torch_function():
            handle = super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        take_gradients_last(self)
        return handle

    @property
    def grad(self) -> Tensor | None:
        """An `AbsentGradient` if torch would have a gradient, because callers compare `.grad` with None."""
        with without_torch_function():
            gradient: Tensor | None = _TORCH_GRAD.__get__(self)
            provider = _provider_of(self)
            if gradient is None and self.requires_grad and provider is not None and provider.moved_gradients:
                return self.data.as_subclass(AbsentGradient)
            return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise RuntimeError(gradient_refusal("setting .grad"))
        _TORCH_GRAD.__set__(self, None)
        provider = _provider_of(self)
        if provider is not None:
            provider.moved_gradients.forget_gradient(self)


def _gradient_edge(leaf: Any) -> Any:
    """Return the gradient edge of an absent parameter, and other values unchanged. Raises ValueError if a backward
    cannot be limited to some parameters."""
    if not isinstance(leaf, AbsentParameter):
        return leaf
    provider = _provider_of(leaf)
    if provider is not None and provider.moved_gradients.are_beside_autograd:
        raise ValueError(inputs_refusal())
    with without_torch_function():
        return get_gradient_edge(leaf)


def parameter_behind(tensor: Any) -> nn.Parameter | None:
    """Return ``tensor`` if it is an absent parameter, or the parameter of which it is a view. A view must have the same
    elements in the same order. Examples are `.data` and an entry of `state_dict()`. None for other tensors."""
    if isinstance(tensor, AbsentParameter):
        return tensor
    if not isinstance(tensor, AbsentTensor) or isinstance(tensor, AbsentGradient):
        return None
    whole, part = _on_meta(tensor.weight_view.parameter), _on_meta(tensor)
    is_whole = (part.shape, part.stride(), part.dtype) == (whole.shape, whole.stride(), whole.dtype)
    return tensor.weight_view.parameter if is_whole else None


@contextmanager
def gathered_parameters(parameters: nn.Module | nn.Parameter | Iterable[nn.Parameter]) -> Iterator[None]:
    """Make parameters of offloaded models, or all parameters of a module, ordinary tensors within this context.

    ```python
    with torch.no_grad(), hf_lohan.gathered_parameters(model.lm_head):
        model.lm_head.weight[7] = model.lm_head.weight[8]
    ```

    Changed values are stored at the end of the context, unless an exception ends it. The context does not change
    parameters that are not offloaded. All gathered parameters are in memory at once, so gather only a few at a time.
    Raises RuntimeError while the model runs.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, nn.Parameter):
        parameters = (parameters,)
    absent = [parameter for parameter in parameters if isinstance(parameter, AbsentParameter)]
    with ExitStack() as stack:
        for provider, group in _by_provider(absent, "gathered_parameters").items():
            stack.enter_context(provider.gather_parameters(group))
        yield


@cache
def _absent_class(present: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return a class for absent parameters that is a subclass of ``present``."""
    return AbsentParameter if present is nn.Parameter else type(present.__name__, (AbsentParameter, present), {})


def _function_name(func: Callable[..., Any]) -> str:
    name = func.__name__
    if name in ("__get__", "__set__"):
        attribute = func.__self__.__name__  # type: ignore[attr-defined]
        return f".{attribute}" if name == "__get__" else f"setting .{attribute}"
    return name


def _call_on_gradient(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func`` on a moved gradient, which has only a shape. Raises RuntimeError if ``func`` reads values."""
    name = _function_name(func)
    if name in _VIEW_ATTRIBUTES or name in _VIEWS:
        view = func(*args, **kwargs)
        if isinstance(view, Tensor):
            return view.as_subclass(AbsentGradient)
    result = _set_attribute(name, func, args, kwargs)
    if result is NotImplemented:
        result = _call_on_placeholder(name, func, args, kwargs)
    if result is NotImplemented:
        raise RuntimeError(gradient_refusal(name))
    return result


def _set_attribute(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Assign an attribute that does not change the weight's values, such as `requires_grad = False`."""
    if not name.startswith("setting ."):
        return NotImplemented
    if name != "setting .data" or isinstance(args[1], AbsentTensor | AbsentParameter):
        func(*args, **kwargs)
        return None
    return NotImplemented


def _call_on_placeholder(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func`` on the placeholder if the weights would give the same result."""
    if name.startswith("."):
        if name not in _MEMORY:
            return func(*args, **kwargs)
    elif name in _SHAPE_FUNCTIONS or (name.startswith("is_") and name != "is_nonzero"):
        return func(*args, **kwargs)
    elif name in ("__repr__", "__format__"):
        tensor = args[0]
        return f"{type(tensor).__name__}(shape={tuple(tensor.shape)}, dtype={tensor.dtype}, in the store)"
    elif name in _CASTS and not isinstance(args[0], AbsentTensor | AbsentParameter):
        return func(*args, **kwargs)  # cast another tensor to the dtype of an absent tensor
    elif name in _CASTS and (True in args[1:] or kwargs.get("copy")):
        return NotImplemented  # the caller asked for a copy
    elif name in _CASTS:
        tensor, empty = args[0], func(args[0].new_empty(0), *args[1:], **kwargs)
        if isinstance(empty, str):
            return empty  # `type` returns a name
        if (empty.dtype, empty.device) == (tensor.dtype, tensor.device):
            return tensor
    return NotImplemented


def _call_without_values(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function that needs only the shape, or that makes a view. Raises RuntimeError for a function that writes
    to the weights or reads their memory."""
    if (result := _set_attribute(name, func, args, kwargs)) is not NotImplemented:
        return result
    if name == "setting .data" or name in _MEMORY or _writes(name, args, kwargs):
        raise RuntimeError(weight_refusal(name))
    if name in _STRIDE_FUNCTIONS:
        return func(_on_meta(args[0]), *args[1:], **kwargs)
    if name in _VIEWS or name in _VIEW_ATTRIBUTES or (name == "__getitem__" and _is_basic(args[1])):
        return _make_view(func, args, kwargs)
    return _call_on_placeholder(name, func, args, kwargs)


def _on_meta(tensor: Tensor) -> Tensor:
    """Return a meta tensor with the strides of the weights. All strides of a placeholder are 0."""
    view = tensor.weight_view if isinstance(tensor, AbsentTensor) else None
    whole = view.parameter if view is not None else tensor
    weights = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
    return weights if view is None else view.apply_to(weights)


def _writes(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the function writes to an absent tensor, as embeddings with `max_norm` do."""
    written = [kwargs.get("out"), *(args[1:2] if kwargs.get("max_norm") is not None else ())]
    if name in ("__setitem__", "set_data") or (name.startswith("__i") and name.rstrip("_")[3:] in _IN_PLACE):
        written.append(args[0])
    elif name.endswith("_") and not name.endswith("__") and name not in _SHAPE_FUNCTIONS:
        fused = name.startswith("_fused_")
        written += [*args, *kwargs.values()] if fused else [*args[:1], kwargs.get("tensor"), kwargs.get("input")]
    return any(isinstance(leaf, AbsentTensor | AbsentParameter) for leaf in tree_leaves(written))


_IN_PLACE = frozenset(("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"))
_IN_PLACE |= frozenset(("lshift", "rshift", "div"))


def _is_basic(index: Any) -> bool:
    """Return whether indexing with ``index`` makes a view."""
    if isinstance(index, tuple):
        return all(_is_basic(one) for one in index)
    return index is None or index is Ellipsis or isinstance(index, slice) or type(index) is int


def _make_view(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function that makes one or several views. Each view refers to its parameter and the function."""
    base = args[0] if args else kwargs.get("input")
    if not isinstance(base, AbsentTensor | AbsentParameter):
        return func(*args, **kwargs)  # a view of another tensor, with the shape of an absent one
    before = base.weight_view if isinstance(base, AbsentTensor) else WeightView(base, ())

    def step(weights: Tensor) -> Any:
        return func(*_replace(base, weights, args), **_replace(base, weights, kwargs))

    def remember(view: Tensor, *steps: Callable[[Any], Any]) -> AbsentTensor:
        absent = view.as_subclass(AbsentTensor)
        absent._weight_view = WeightView(before.parameter, (*before.steps, *steps))
        provider = _provider_of(before.parameter)
        if provider is not None:
            provider.note_view(absent, absent.weight_view)
        return absent

    result = func(*args, **kwargs)
    if isinstance(result, Tensor):
        return remember(result, step)
    return type(result)(remember(view, step, itemgetter(index)) for index, view in enumerate(result))


def _replace(base: Any, weights: Tensor, values: Any) -> Any:
    return tree_map(lambda leaf: weights if leaf is base else leaf, values)


def _provider_of(parameter: nn.Parameter) -> WeightProvider | None:
    provider: Callable[[], WeightProvider | None] | None = getattr(parameter, "_weight_provider", None)
    return provider() if provider is not None else None


def _by_provider(parameters: Iterable[nn.Parameter], name: str) -> dict[WeightProvider, list[nn.Parameter]]:
    """Group absent parameters by their model's provider. Raises RuntimeError if a model was deleted. The error names
    the function ``name``."""
    groups: dict[WeightProvider, list[nn.Parameter]] = {}
    for parameter in parameters:
        provider = _provider_of(parameter)
        if provider is None:
            raise RuntimeError(no_model_refusal(name))
        groups.setdefault(provider, []).append(parameter)
    return groups


def _embed_rows(
    ids: Tensor,
    table: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    """Return `F.embedding` of an absent table if only its rows are loaded. Return None if it is loaded whole."""
    if not isinstance(table, AbsentParameter) or isinstance(ids, AbsentTensor | AbsentParameter):
        return None
    if max_norm is not None or scale_grad_by_freq or sparse:
        return None
    provider = _provider_of(table)
    return None if provider is None else provider.embed(table, ids, padding_idx)


def _call_with_values(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func`` with borrowed weights in place of absent tensors."""
    with ExitStack() as stack:
        lenders: dict[nn.Parameter, BorrowedWeights] = {}
        for provider, group in _by_provider(_parameters_in((args, kwargs)), name).items():
            borrowed = stack.enter_context(provider.borrow_weights(group))
            lenders.update(dict.fromkeys(group, borrowed))

        def with_values(leaf: Any) -> Any:
            if isinstance(leaf, AbsentTensor):
                parameter = leaf.weight_view.parameter
                return leaf.weight_view.apply_to(lenders[parameter].weight(parameter))
            # A parameter that was loaded to a slot no longer has the class of absent parameters.
            is_borrowed = isinstance(leaf, nn.Parameter) and leaf in lenders
            return lenders[leaf].weight(leaf) if is_borrowed else leaf

        output = func(*tree_map(with_values, args), **tree_map(with_values, dict(kwargs)))
        for borrowed in dict.fromkeys(lenders.values()):
            output = borrowed.copy_views(output)
        return output


def _parameters_in(values: Any) -> Iterator[nn.Parameter]:
    """Yield each absent parameter among the leaves of ``values`` once."""
    seen: set[nn.Parameter] = set()
    for leaf in tree_leaves(values):
        if isinstance(leaf, AbsentTensor | AbsentParameter):
            # A view stays absent when its parameter is loaded.
            parameter = leaf.weight_view.parameter if isinstance(leaf, AbsentTensor) else leaf
            if parameter not in seen:
                seen.add(parameter)
                yield parameter
