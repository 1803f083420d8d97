"""What a forward reads beside arguments, weights and torch's random numbers. A layer that runs again reads the same."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from hf_lohan.compat.torch_private import (
    attention_kernels,
    checkpoint_errors_as,
    children_of,
    own_parameters,
    table_of_parameters,
    using_attention_kernels,
    version_of,
)

_MOST_KEPT_BYTES = 1 << 20
"""Copies of larger tensors are kept only if the forward has changed the tensor."""
_CONTAINERS = frozenset((dict, OrderedDict, defaultdict, Counter, list, deque, set))
_PLAIN: set[type] = {bool, int, float, str, type(None)}
"""Types of which a reference is enough, as far as they are known."""


class _Noted(enum.Enum):
    """What is noted of a value beside a reference to it."""

    CONTENTS = enum.auto()
    ATTRIBUTES = enum.auto()
    """Of an object with settings, such as a model's config."""
    ELEMENTS = enum.auto()
    """Of a tensor that is no parameter and has no graph."""
    RANDOM_STATE = enum.auto()


def _noted_of(kind: type) -> _Noted | None:
    if kind in _CONTAINERS:
        return _Noted.CONTENTS
    if issubclass(kind, Tensor):
        return None if issubclass(kind, nn.Parameter) else _Noted.ELEMENTS
    if issubclass(kind, torch.Generator):
        return _Noted.RANDOM_STATE
    has_settings = dataclasses.is_dataclass(kind) or issubclass(kind, SimpleNamespace) or hasattr(kind, "to_dict")
    has_attributes = getattr(kind, "__dictoffset__", 0) != 0 and not issubclass(kind, nn.Module)
    return _Noted.ATTRIBUTES if has_settings and has_attributes else None


class ModuleState:
    """The state of a module and its children: attributes (also training flags, hooks and children), the contents of
    lists, dicts and configs among them, buffers, and which parameters train. Also context variables and the attention
    kernels that are allowed."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._modules: list[nn.Module] = []
        self._contents: list[tuple[Any, Any]] = []
        """Containers and copies of them."""
        self._empty: list[Any] = []
        """Empty containers."""
        self._tensors: dict[int, tuple[Tensor, int, Tensor | None]] = {}
        """By id, a tensor, its version, and a copy."""
        self._placed: dict[int, Tensor] = {}
        """By id, what is in a tensor's place within `restored`."""
        self._generators: list[torch.Generator] = []
        with torch.no_grad():
            self._find_state()
        self._trained = self._read_trained()
        self._random_states = [generator.get_state() for generator in self._generators]
        self._variables = [
            (variable, value)
            for variable, value in contextvars.copy_context().items()
            if _noted_of(type(value)) is not _Noted.CONTENTS  # a model may collect its outputs there
        ]
        self._kernels = attention_kernels()

    def _find_state(self) -> None:
        seen: set[int] = set()
        waiting: list[Any] = []
        modules = [self._root]
        add_empty = self._empty.append
        for module in modules:
            if id(module) not in seen:
                # The engine replaces parameters between a forward and its backward.
                seen |= {id(module), id(table_of_parameters(module))}
                self._modules.append(module)
                waiting.append(vars(module))
                modules += children_of(module)
        for container in waiting:
            contents = container.copy()
            self._contents.append((container, contents))
            for value in contents.values() if isinstance(contents, dict) else contents:
                kind = type(value)
                if kind in _PLAIN:
                    continue
                if kind in _CONTAINERS and not value:
                    add_empty(value)
                    continue
                noted = _noted_of(kind)
                if noted is None:
                    _PLAIN.add(kind)
                elif id(value) not in seen:
                    seen.add(id(value))
                    if noted is _Noted.CONTENTS:
                        waiting.append(value)
                    elif noted is _Noted.ATTRIBUTES:
                        waiting.append(vars(value))
                    elif noted is _Noted.RANDOM_STATE:
                        self._generators.append(value)
                    elif not value.requires_grad:
                        self._tensors[id(value)] = value, version_of(value), value.clone()

    def _clear_empty(self) -> None:
        for container in filter(None, self._empty):
            container.clear()

    def _read_trained(self) -> list[list[tuple[str, bool]]]:
        return [[(name, p.requires_grad) for name, p in own_parameters(module)] for module in self._modules]

    def _write_trained(self, trained: list[list[tuple[str, bool]]]) -> None:
        for module, of_module in zip(self._modules, trained, strict=True):
            parameters = table_of_parameters(module)
            for name, is_trained in of_module:
                parameter = parameters.get(name)
                if parameter is not None and parameter.requires_grad is not is_trained:
                    parameter.requires_grad_(is_trained)

    def end_forward(self) -> None:
        """Drop large copies of tensors that the forward has not changed."""
        for key, (tensor, version, copy) in self._tensors.items():
            if copy is not None and copy.nbytes > _MOST_KEPT_BYTES and version_of(tensor) == version:
                self._tensors[key] = tensor, version, None

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Have modules read the noted state within this context. What they change in it is put back afterwards. Raises
        ValueError if a large tensor was changed that the forward had not changed."""
        with torch.no_grad():
            self._placed = {key: self._as_noted(key) for key in self._tensors}
        contents_now = [(container, container.copy()) for container, _ in self._contents]
        trained_now = self._read_trained()
        random_states_now = [generator.get_state() for generator in self._generators]
        tokens: list[tuple[contextvars.ContextVar[Any], Any]] = []
        contents_now += [(container, container.copy()) for container in self._empty if container]
        try:
            _fill_all(self._contents, self._placed)
            self._clear_empty()
            self._write_trained(self._trained)
            for generator, state in zip(self._generators, self._random_states, strict=True):
                generator.set_state(state)
            for variable, value in self._variables:
                tokens.append((variable, variable.set(value)))
            with using_attention_kernels(self._kernels):
                yield
        finally:
            for variable, token in tokens:
                variable.reset(token)
            for generator, state in zip(self._generators, random_states_now, strict=True):
                generator.set_state(state)
            self._write_trained(trained_now)
            self._clear_empty()
            _fill_all(contents_now, {})
            self._placed = {}

    def _as_noted(self, key: int) -> Tensor:
        tensor, version, copy = self._tensors[key]
        if copy is not None:
            return copy.clone()  # the forward may write to it
        if version_of(tensor) != version:
            raise ValueError(
                f"{self._name_of(tensor)} was changed in place between a layer's forward and its backward, which runs "
                "the layer again with the values of the forward; change it after the backward, or set activations: keep"
            )
        return tensor

    def changed_tensor(self) -> str | None:
        """Return the name of a buffer that was changed within `restored`, or of another tensor. None if none was."""
        placed = {id(own): own for own in self._placed.values()}
        for name, buffer in self._root.named_buffers():
            if placed.pop(id(buffer), None) is None or self._is_changed(buffer):
                return name
        return next((self._name_of(own) for own in placed.values() if self._is_changed(own)), None)

    def _is_changed(self, own: Tensor) -> bool:
        noted = next(self._tensors[key][0] for key, placed in self._placed.items() if placed is own)
        return not torch.equal(own, noted)

    def _name_of(self, tensor: Tensor) -> str:
        names = (name for name, buffer in self._root.named_buffers(remove_duplicate=False) if buffer is tensor)
        return f"{type(self._root).__name__}.{next(names, 'a tensor')}"


def _fill_all(all_contents: list[tuple[Any, Any]], tensors: Mapping[int, Tensor]) -> None:
    """Have containers contain what they did. ``tensors``: by id of a tensor, the one to put in its place."""
    for container, contents in all_contents:
        if isinstance(container, dict):
            if tensors and not tensors.keys().isdisjoint(map(id, contents.values())):
                contents = {name: tensors.get(id(value), value) for name, value in contents.items()}
            elif _is_same(container, contents):
                continue
            container.clear()
            container.update(contents)
        else:
            container.clear()
            if isinstance(container, set):
                container.update(contents)
            else:
                container.extend(tensors.get(id(value), value) for value in contents)


def _is_same(container: dict[Any, Any], contents: dict[Any, Any]) -> bool:
    return (
        len(container) == len(contents)
        and all(map(operator.is_, container.values(), contents.values()))
        and list(container) == list(contents)
    )


class RandomNumbers:
    """The states of the default generators of the CPU and of a tensor's device."""

    def __init__(self, tensor: Tensor) -> None:
        self._cpu = torch.get_rng_state()
        self._devices, self._states = get_device_states(tensor)
        self._kind = tensor.device.type if self._devices else "cuda"

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draw the numbers that followed these states within this context. The generators do not advance."""
        with torch.random.fork_rng(self._devices, device_type=self._kind):
            torch.set_rng_state(self._cpu)
            set_device_states(self._devices, self._states, device_type=self._kind)
            yield


def repeatable(function: Callable[..., Any], layer: nn.Module | None, name: str) -> Callable[..., Any]:
    """Return a function for torch's `checkpoint`. Its first call is the forward of a layer, and its later calls read
    the state before it."""
    state = None if layer is None else ModuleState(layer)
    has_run = False

    def run(*args: Any) -> Any:
        nonlocal has_run
        if has_run:
            with contextlib.nullcontext() if state is None else state.restored():
                return function(*args)
        has_run = True
        with checkpoint_errors_as(partial(_other_computation, name)):
            output = function(*args)
        if state is not None:
            state.end_forward()
        return output

    return run


def _other_computation(name: str, reason: str) -> ValueError:
    return ValueError(
        f"{name} computed something else when it ran again in backward than in its forward ({reason}), because it "
        "reads something beside its arguments and the attributes of its modules that has changed; keep that until the "
        "backward has run, or set activations: keep"
    )
