"""A parameter while its weights are in the store: it knows its shape, and refuses to be read or written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from hf_lohan.compat.torch_private import without_torch_function

_ALIASES = frozenset(("detach", "expand", "narrow", "permute", "squeeze", "t", "transpose", "unsqueeze", "view"))
_ALIAS_ATTRIBUTES = frozenset((".data", ".T", ".mT", ".H", ".mH"))
_CASTS = frozenset(("to", "type", "cpu", "cuda", "float", "half", "bfloat16", "double", "contiguous"))
"""Return what they are given, if it is as they want it."""
_FORBIDDEN_ATTRIBUTES = frozenset((".imag", ".real", ".__cuda_array_interface__"))
_OF_THE_FORM = frozenset((
    *("size", "stride", "numel", "nelement", "dim", "ndimension", "element_size", "storage_offset", "get_device"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "result_type", "__len__"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "_has_compatible_shallow_copy_type"),
    *("requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook", "grad"),
))  # fmt: skip
"""Functions that look at no value."""
_TORCH_GRAD: Any = Tensor.grad


class GradientsAway:
    """Whether gradients of a step are not where torch puts them: between a backward and its step."""

    def __init__(self) -> None:
        self._is_any = False

    def __bool__(self) -> bool:
        return self._is_any

    def note(self) -> None:
        """One went."""
        self._is_any = True

    def clear(self) -> None:
        """The step has taken them, or forgotten them."""
        self._is_any = False


class AbsentTensor(Tensor):
    """A view of an absent parameter, as `.data` and `detach` give it."""

    REFUSAL: ClassVar[str] = (
        "a weight of an offloaded model is in the store, where {} cannot reach it; save the model with "
        "trainer.save_model() or model.save_pretrained(), read weights with accelerator.get_state_dict(model) or "
        "hf_lohan.engine_of(model).parameters.read_parameter(name), and change weights, dtype or device before the "
        "model is offloaded"
    )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with without_torch_function():
            return _look_at(AbsentGradient if AbsentGradient in types else AbsentTensor, func, args, kwargs or {})


class AbsentGradient(AbsentTensor):
    """Stands where torch would have a gradient."""

    REFUSAL = (
        "a gradient of an offloaded model went to the optimizer, where {} cannot reach it; clip with "
        "accelerator.clip_grad_norm_ or max_grad_norm, and scale the loss instead of gradients"
    )


class AbsentParameter(nn.Parameter):
    """What a parameter is turned into while it is absent, and back. All else of it stays: its identity, its hooks, its
    place in optimizers."""

    _gradients_away: ClassVar[GradientsAway] = GradientsAway()
    __torch_function__ = AbsentTensor.__torch_function__

    @classmethod
    def hide(cls, parameter: nn.Parameter, placeholder: Tensor, gradients_away: GradientsAway) -> None:
        """Let go of the weights. Parameters of classes of their own stay what they are, and hold the placeholder."""
        if type(parameter) is nn.Parameter:
            parameter.data = placeholder
            parameter.__class__ = cls
            assert isinstance(parameter, cls)
            parameter._gradients_away = gradients_away  # type: ignore[misc]
        elif not isinstance(parameter, cls):
            parameter.data = placeholder

    @classmethod
    def show(cls, parameter: nn.Parameter, weights: Tensor) -> None:
        """Let the parameter be these weights."""
        if isinstance(parameter, cls):
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        parameter.data = weights

    @property
    def grad(self) -> Tensor | None:
        """There is one where torch would have one: many look whether there is."""
        with without_torch_function():
            gradient: Tensor | None = _TORCH_GRAD.__get__(self)
            if gradient is None and self.requires_grad and self._gradients_away:
                return self.data.as_subclass(AbsentGradient)
            return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise RuntimeError(AbsentGradient.REFUSAL.format("setting .grad"))
        _TORCH_GRAD.__set__(self, None)


def _look_at(
    cls: type[AbsentTensor], func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """What `func` says of a placeholder, if that is true of the weights, too. Torch's hooks are off."""
    name = func.__name__
    if name == "__get__":
        name = f".{func.__self__.__name__}"  # type: ignore[attr-defined]
        if name in _ALIAS_ATTRIBUTES:
            return func(*args, **kwargs).as_subclass(cls)
        if name not in _FORBIDDEN_ATTRIBUTES:
            return func(*args, **kwargs)
    elif name == "__set__":
        name = f"setting .{func.__self__.__name__}"  # type: ignore[attr-defined]
        if name != "setting .data" or isinstance(args[1], AbsentTensor | AbsentParameter):
            return func(*args, **kwargs)
    elif name in _OF_THE_FORM or name.startswith("is_"):
        return func(*args, **kwargs)
    elif name in _ALIASES:
        return func(*args, **kwargs).as_subclass(cls)
    elif name in ("__repr__", "__format__"):
        tensor = args[0]
        return f"{type(tensor).__name__}(shape={tuple(tensor.shape)}, dtype={tensor.dtype}, in the store)"
    elif name in _CASTS:
        tensor, empty = args[0], func(args[0].new_empty(0), *args[1:], **kwargs)
        if isinstance(empty, str):
            return empty  # the name of its type
        if (empty.dtype, empty.device) == (tensor.dtype, tensor.device):
            return tensor
    raise RuntimeError(cls.REFUSAL.format(name))
