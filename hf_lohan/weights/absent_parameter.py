"""A parameter while its weights are in the store: it knows its shape, and whoever reads it gets the true numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_lohan.compat.torch_private import tree_leaves, tree_map, without_torch_function
from hf_lohan.weights.absence import Absence, Brought, ViewOf, gone, gradient_refusal, refusal

_VIEWS = frozenset((
    *("adjoint", "as_strided", "broadcast_to", "chunk", "conj", "detach", "diagonal", "dsplit", "expand", "expand_as"),
    *("flatten", "hsplit", "moveaxis", "movedim", "narrow", "permute", "positive", "ravel", "reshape", "reshape_as"),
    *("resolve_conj", "resolve_neg", "select", "split", "split_with_sizes", "squeeze", "swapaxes", "swapdims", "t"),
    *("tensor_split", "transpose", "unbind", "unflatten", "unfold", "unsafe_chunk", "unsafe_split", "unsqueeze"),
    *("view", "view_as", "vsplit"),
))  # fmt: skip
_VIEW_ATTRIBUTES = frozenset((".data", ".T", ".mT", ".H", ".mH", ".real"))
_CASTS = frozenset(("to", "type", "cpu", "cuda", "float", "half", "bfloat16", "double", "contiguous", "type_as"))
"""Return what they are given, if it is as they want it."""
_OF_THE_FORM = frozenset((
    *("size", "stride", "numel", "nelement", "dim", "ndimension", "element_size", "storage_offset", "get_device"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "result_type", "__len__"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "_has_compatible_shallow_copy_type"),
    *("requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook", "grad"),
))  # fmt: skip
"""Functions that look at no value."""
_OF_THE_STRIDES = frozenset(("stride", "is_contiguous", "storage_offset"))
_MEMORY = frozenset((
    *("data_ptr", "untyped_storage", "storage", "_typed_storage", "__dlpack__", "__reduce_ex__", "__deepcopy__"),
    *("share_memory_", ".imag", ".__cuda_array_interface__"),
))  # fmt: skip
"""Look at the memory itself, or would hold all of a model at once."""
_TORCH_GRAD: Any = Tensor.grad


class AbsentTensor(Tensor):
    """A view of an absent parameter, as `.data`, `detach` or `w.t()` give it: made of the weights when it is read."""

    _view_of: ViewOf | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if AbsentGradient in types:
            with without_torch_function():
                return _look_at_gradient(func, args, kwargs)
        name = _name_of(func)
        with without_torch_function():
            seen = _look_at(name, func, args, kwargs)
        return _read(name, func, args, kwargs) if seen is NotImplemented else seen

    @property
    def view_of(self) -> ViewOf:
        assert self._view_of is not None
        return self._view_of


class AbsentGradient(AbsentTensor):
    """Stands where torch would have a gradient."""


class AbsentParameter(nn.Parameter):
    """What a parameter is turned into while it is absent, and back. All else of it stays: its identity, its hooks, its
    place in optimizers."""

    _present_class: ClassVar[type[nn.Parameter]] = nn.Parameter
    __torch_function__ = AbsentTensor.__torch_function__

    @staticmethod
    def belong_to(parameter: nn.Parameter, absence: Absence) -> None:
        """Ask ``absence`` for the weights from now on."""
        parameter._absence = weakref.ref(absence)  # type: ignore[attr-defined]

    @classmethod
    def hide(cls, parameter: nn.Parameter, placeholder: Tensor) -> None:
        """Let go of the weights."""
        if not isinstance(parameter, cls):
            parameter.data = placeholder
            present = type(parameter)
            parameter.__class__ = _absent_class(present)
            parameter._present_class = present  # type: ignore[attr-defined]

    @classmethod
    def show(cls, parameter: nn.Parameter, weights: Tensor) -> None:
        """Let the parameter be these weights."""
        if isinstance(parameter, cls):
            parameter.__class__ = parameter._present_class  # type: ignore[assignment]
        parameter.data = weights

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        absence = _absence_of(self)
        if absence is None:
            raise RuntimeError(gone("copy.deepcopy"))
        copied: nn.Parameter = memo.setdefault(id(self), absence.copied(self))
        return copied

    @property
    def grad(self) -> Tensor | None:
        """There is one where torch would have one: many look whether there is."""
        with without_torch_function():
            gradient: Tensor | None = _TORCH_GRAD.__get__(self)
            absence = _absence_of(self)
            if gradient is None and self.requires_grad and absence is not None and absence.gradients_away:
                return self.data.as_subclass(AbsentGradient)
            return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise RuntimeError(gradient_refusal("setting .grad"))
        _TORCH_GRAD.__set__(self, None)
        absence = _absence_of(self)
        if absence is not None:
            absence.gradients_away.forget(self)


@contextmanager
def gathered_parameters(parameters: nn.Module | nn.Parameter | Iterable[nn.Parameter]) -> Iterator[None]:
    """Parameters of offloaded models, or all of a module's, as ordinary ones in memory: to look at, or to change.

    ```python
    with torch.no_grad(), hf_lohan.gathered_parameters(model.lm_head):
        model.lm_head.weight[7] = model.lm_head.weight[8]
    ```

    What is changed is stored at the end; if an exception ends it, nothing is. Parameters that are not offloaded are
    left alone. They stand in memory all at once, so gather a few. Raises RuntimeError while the model runs.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, nn.Parameter):
        parameters = (parameters,)
    absent = [parameter for parameter in parameters if isinstance(parameter, AbsentParameter)]
    with ExitStack() as stack:
        for absence in dict.fromkeys(_absence_of(parameter) for parameter in absent):
            if absence is None:
                raise RuntimeError(gone("gathered_parameters"))
            stack.enter_context(absence.gathered([p for p in absent if _absence_of(p) is absence]))
        yield


@cache
def _absent_class(present: type[nn.Parameter]) -> type[nn.Parameter]:
    """Of parameters of a class of their own: absent, and still of that class."""
    return AbsentParameter if present is nn.Parameter else type(present.__name__, (AbsentParameter, present), {})


def _name_of(func: Callable[..., Any]) -> str:
    name = func.__name__
    if name in ("__get__", "__set__"):
        attribute = func.__self__.__name__  # type: ignore[attr-defined]
        return f".{attribute}" if name == "__get__" else f"setting .{attribute}"
    return name


def _look_at_gradient(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What ``func`` says of the form of a gradient that went."""
    name = _name_of(func)
    if name in _VIEW_ATTRIBUTES or name in _VIEWS:
        made = func(*args, **kwargs)
        if isinstance(made, Tensor):
            return made.as_subclass(AbsentGradient)
    seen = _set(name, func, args, kwargs)
    if seen is NotImplemented:
        seen = _form(name, func, args, kwargs)
    if seen is NotImplemented:
        raise RuntimeError(gradient_refusal(name))
    return seen


def _set(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Sets an attribute that holds no values, or what has none in place of what has none."""
    if not name.startswith("setting ."):
        return NotImplemented
    if name != "setting .data" or isinstance(args[1], AbsentTensor | AbsentParameter):
        func(*args, **kwargs)
        return None
    return NotImplemented


def _form(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What `func` says of a placeholder, if that is true of the weights, too. Torch's hooks are off."""
    if name.startswith("."):
        if name not in _MEMORY:
            return func(*args, **kwargs)
    elif name in _OF_THE_FORM or (name.startswith("is_") and name != "is_nonzero"):
        return func(*args, **kwargs)
    elif name in ("__repr__", "__format__"):
        tensor = args[0]
        return f"{type(tensor).__name__}(shape={tuple(tensor.shape)}, dtype={tensor.dtype}, in the store)"
    elif name in _CASTS and not isinstance(args[0], AbsentTensor | AbsentParameter):
        return func(*args, **kwargs)  # to the form of an absent one
    elif name in _CASTS and (True in args[1:] or kwargs.get("copy")):
        return NotImplemented  # a copy was asked for
    elif name in _CASTS:
        tensor, empty = args[0], func(args[0].new_empty(0), *args[1:], **kwargs)
        if isinstance(empty, str):
            return empty  # the name of its type
        if (empty.dtype, empty.device) == (tensor.dtype, tensor.device):
            return tensor
    return NotImplemented


def _look_at(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What needs no weights: the form, and views. Raises RuntimeError for what would write to them, or look at their
    memory. Torch's hooks are off."""
    if (seen := _set(name, func, args, kwargs)) is not NotImplemented:
        return seen
    if name == "setting .data" or name in _MEMORY or _writes(name, args, kwargs):
        raise RuntimeError(refusal(name))
    if name in _OF_THE_STRIDES:
        return func(_without_values(args[0]), *args[1:], **kwargs)
    if name in _VIEWS or name in _VIEW_ATTRIBUTES or (name == "__getitem__" and _is_basic(args[1])):
        return _view(func, args, kwargs)
    return _form(name, func, args, kwargs)


def _without_values(tensor: Tensor) -> Tensor:
    """On meta, with the strides that the weights would have."""
    view_of = tensor.view_of if isinstance(tensor, AbsentTensor) else None
    whole = view_of.parameter if view_of is not None else tensor
    weights = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
    return weights if view_of is None else view_of.of(weights)


def _writes(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an absent tensor is written to."""
    written = [kwargs.get("out")]
    if name in ("__setitem__", "set_data") or (name.startswith("__i") and name.rstrip("_")[3:] in _IN_PLACE):
        written.append(args[0])
    elif name.endswith("_") and not name.endswith("__") and name not in _OF_THE_FORM:
        fused = name.startswith("_fused_")
        written += [*args, *kwargs.values()] if fused else [*args[:1], kwargs.get("tensor"), kwargs.get("input")]
    return any(isinstance(leaf, AbsentTensor | AbsentParameter) for leaf in tree_leaves(written))


_IN_PLACE = frozenset(("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"))
_IN_PLACE |= frozenset(("lshift", "rshift", "div"))


def _is_basic(index: Any) -> bool:
    """Whether indexing by it gives a view."""
    if isinstance(index, tuple):
        return all(_is_basic(one) for one in index)
    return index is None or index is Ellipsis or isinstance(index, slice) or type(index) is int


def _view(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A view, or several, that remember how they came about."""
    found = args[0] if args else kwargs.get("input")
    if not isinstance(found, AbsentTensor | AbsentParameter):
        return func(*args, **kwargs)  # of another tensor, with the form of an absent one
    before = found.view_of if isinstance(found, AbsentTensor) else ViewOf(found, ())

    def step(weights: Tensor) -> Any:
        return func(*_put_for(found, weights, args), **_put_for(found, weights, kwargs))

    def remember(view: Tensor, *steps: Callable[[Any], Any]) -> AbsentTensor:
        remembered = view.as_subclass(AbsentTensor)
        remembered._view_of = ViewOf(before.parameter, (*before.steps, *steps))
        absence = _absence_of(before.parameter)
        if absence is not None:
            absence.note_view(remembered, remembered.view_of)
        return remembered

    made = func(*args, **kwargs)
    if isinstance(made, Tensor):
        return remember(made, step)
    return type(made)(remember(one, step, itemgetter(index)) for index, one in enumerate(made))


def _put_for(found: Any, weights: Tensor, where: Any) -> Any:
    return tree_map(lambda leaf: weights if leaf is found else leaf, where)


def _absence_of(parameter: nn.Parameter) -> Absence | None:
    absence: Callable[[], Absence | None] | None = getattr(parameter, "_absence", None)
    return absence() if absence is not None else None


def _read(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``func`` of the true weights."""
    absent = list(_parameters_in((args, kwargs)))
    with ExitStack() as stack:
        brought_for: dict[nn.Parameter, Brought] = {}
        for absence in dict.fromkeys(_absence_of(parameter) for parameter in absent):
            if absence is None:
                raise RuntimeError(gone(name))
            own = [parameter for parameter in absent if _absence_of(parameter) is absence]
            brought = stack.enter_context(absence.reading(own))
            brought_for.update(dict.fromkeys(own, brought))

        def true(leaf: Any) -> Any:
            if isinstance(leaf, AbsentTensor):
                parameter = leaf.view_of.parameter
                return leaf.view_of.of(brought_for[parameter].weight(parameter))
            # A parameter that was brought into its place is not absent any more.
            known = isinstance(leaf, nn.Parameter) and leaf in brought_for
            return brought_for[leaf].weight(leaf) if known else leaf

        output = func(*tree_map(true, args), **tree_map(true, dict(kwargs)))
        for brought in dict.fromkeys(brought_for.values()):
            output = brought.kept(output)
        return output


def _parameters_in(values: Any) -> Iterator[nn.Parameter]:
    """Absent ones, each once."""
    seen: set[nn.Parameter] = set()
    for leaf in tree_leaves(values):
        if isinstance(leaf, AbsentTensor | AbsentParameter):
            parameter = leaf.view_of.parameter if isinstance(leaf, AbsentTensor) else leaf
            # What it is a view of may be here meanwhile, as its own parameter.
            if parameter not in seen:
                seen.add(parameter)
                yield parameter
