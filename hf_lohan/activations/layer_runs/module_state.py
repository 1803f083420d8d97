"""The state that a forward reads and changes, other than arguments, weights and torch's random numbers: attributes of
modules, the objects and containers that they refer to, and generators.

A layer that runs again reads its `ModuleState`, which is quick to record. `state_kept` undoes all changes of a trace or
a trial, even in global names of the model's code and in all other objects.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import functools
import operator
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from hf_lohan.compat.torch_private import (
    attention_kernels,
    checkpoint_errors_as,
    children_of,
    own_parameters,
    put_parameter,
    table_of_parameters,
    using_attention_kernels,
    version_of,
)

_MOST_KEPT_BYTES = 1 << 20
"""Copies of larger tensors are kept only if the forward has changed the tensor."""
_CONTAINERS = frozenset((dict, OrderedDict, defaultdict, Counter, list, deque, set))
_PLAIN: set[type] = {bool, int, float, str, type(None)}
"""Known types. Only a reference to their objects is recorded."""
_GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: (
        lambda own: own.bit_generator.state,
        lambda own, state: setattr(own.bit_generator, "state", state),
    ),
    np.random.BitGenerator: (lambda own: own.state, lambda own, state: setattr(own, "state", state)),
}
"""Maps a type of random generator to functions that read and write its state."""
_MOST_OBJECTS = 1_000_000
"""Maximum number of objects that are visited, nearest to the model first. A module may refer to a whole data set."""
_MOST_COPIED_BYTES = 256 << 20
"""Maximum size of the copies of tensors and arrays. Tensors beyond it are not restored."""
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_OPAQUE = frozenset({"hf_lohan", "numpy", "torch", *sys.stdlib_module_names} - {"argparse", "collections", "types"})
"""Packages whose objects are not visited."""
_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of libraries. Functions in them are not visited, because libraries keep no state of a model."""
_LRU_CACHE: Any = type(functools.lru_cache(lambda: None))
_MISSING = object()


class _Noted(enum.Enum):
    """The part of a value that is recorded, in addition to a reference to the value."""

    CONTENTS = enum.auto()
    ATTRIBUTES = enum.auto()
    """The attributes of an object with settings, such as a model's config."""
    ELEMENTS = enum.auto()
    """The elements of a tensor that is not a parameter and has no graph."""
    RANDOM_STATE = enum.auto()


def _noted_of(kind: type) -> _Noted | None:
    if kind in _CONTAINERS:
        return _Noted.CONTENTS
    if issubclass(kind, Tensor):
        return None if issubclass(kind, nn.Parameter) else _Noted.ELEMENTS
    if issubclass(kind, tuple(_GENERATORS)):
        return _Noted.RANDOM_STATE
    has_settings = dataclasses.is_dataclass(kind) or issubclass(kind, SimpleNamespace) or hasattr(kind, "to_dict")
    has_attributes = getattr(kind, "__dictoffset__", 0) != 0 and not issubclass(kind, nn.Module)
    return _Noted.ATTRIBUTES if has_settings and has_attributes else None


class ModuleState:
    """The state of a module and its children. It has attributes (including training flags, hooks and children), the
    contents of lists, dicts and configs in them, buffers, the `requires_grad` of parameters, tensors that
    `functional_call` uses in place of parameters, context variables, and the attention kernels that are allowed."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._modules: list[nn.Module] = []
        self._contents: list[tuple[Any, Any]] = []
        """Containers and copies of them."""
        self._empty: list[Any] = []
        """Empty containers."""
        self._tensors: dict[int, tuple[Tensor, int, Tensor | None]] = {}
        """Maps the id of a tensor to (tensor, its version, a copy or None)."""
        self._placed: dict[int, Tensor] = {}
        """Maps the id of a tensor to the tensor that replaces it within `restored`."""
        self._random_states: list[tuple[Callable[[Any], object], Callable[[], Any], Any]] = []
        """Functions that write and read the state of a generator, and the state."""
        with torch.no_grad():
            self._find_state()
        self._trained = self._read_trained()
        self._in_place = [
            (module, name, tensor)
            for module in self._modules
            for name, tensor in own_parameters(module)
            if type(tensor) is Tensor
        ]
        self._variables = [
            (variable, value)
            for variable, value in contextvars.copy_context().items()
            if _noted_of(type(value)) is not _Noted.CONTENTS  # a model may collect outputs in such a variable
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
                        read, write = _access_of(value)
                        self._random_states.append((partial(write, value), partial(read, value), read(value)))
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
        """Have modules read the recorded state within this context. Their changes are undone afterwards. Raises
        ValueError if a large tensor, which the forward had not changed, was changed later."""
        with torch.no_grad():
            self._placed = {key: self._as_noted(key) for key in self._tensors}
        contents_now = [(container, container.copy()) for container, _ in self._contents]
        trained_now = self._read_trained()
        parameters_now = [(module, name, table_of_parameters(module)[name]) for module, name, _ in self._in_place]
        random_states_now = [(write, read()) for write, read, _ in self._random_states]
        tokens: list[tuple[contextvars.ContextVar[Any], Any]] = []
        contents_now += [(container, container.copy()) for container in self._empty if container]
        try:
            _fill_all(self._contents, self._placed)
            self._clear_empty()
            for module, name, tensor in self._in_place:
                put_parameter(module, name, tensor)
            self._write_trained(self._trained)
            for write, _, state in self._random_states:
                write(state)
            for variable, value in self._variables:
                tokens.append((variable, variable.set(value)))
            with using_attention_kernels(self._kernels):
                yield
        finally:
            for variable, token in tokens:
                variable.reset(token)
            for write, state in random_states_now:
                write(state)
            for module, name, parameter in parameters_now:
                put_parameter(module, name, parameter)
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
        """Return the name of a buffer or another tensor that was changed within `restored`, or None."""
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
    """Restore the contents of containers. ``tensors`` maps the id of a tensor to the tensor that replaces it."""
    for container, contents in all_contents:
        values = contents.values() if isinstance(contents, dict) else contents
        if tensors and not tensors.keys().isdisjoint(map(id, values)):
            placed = [tensors.get(id(value), value) for value in values]
            contents = dict(zip(contents, placed, strict=True)) if isinstance(contents, dict) else placed
        _fill(container, contents)


def _fill(container: Any, contents: Any) -> None:
    """Restore the contents of a container if they have changed."""
    now, before = (c.values() if isinstance(c, dict) else c for c in (container, contents))
    are_same = len(now) == len(before) and all(map(operator.is_, now, before))
    if are_same and (not isinstance(container, dict) or list(container) == list(contents)):
        return
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(contents)


def _access_of(generator: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], object]]:
    return next(access for kind, access in _GENERATORS.items() if isinstance(generator, kind))


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
    """Return a function for torch's `checkpoint`. Its first call is the forward of a layer. Later calls read the state
    before that forward."""
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
        "reads values that are neither arguments nor attributes of its modules, and these have changed; change them "
        "after the backward has run, or set activations: keep"
    )


@contextlib.contextmanager
def state_kept(
    model: nn.Module, device: torch.device | None = None, *, spared: Iterable[Tensor] = ()
) -> Iterator[None]:
    """Undo the changes of the model's forwards at the end of the context. These are changes of attributes of modules,
    of the contents of containers, objects, tensors and random generators that they refer to, and of the global names
    and class attributes that the model's own code uses.

    Parameters and ``spared`` tensors are not restored. ``device``: its default random generator is restored too.
    Iterators, and state in other libraries, stay as the forwards left them.
    """
    with contextlib.ExitStack() as stack:
        has_generator = device is not None and device.type not in ("cpu", "meta") and torch.accelerator.is_available()
        devices, kind = ([device], device.type) if device is not None and has_generator else ([], "cuda")
        stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        _Keeper(stack, spared).keep(model)
        yield


class _Keeper:
    """Records the state of objects. ``stack`` restores it at its end."""

    def __init__(self, stack: contextlib.ExitStack, spared: Iterable[Tensor]) -> None:
        self._stack = stack
        self._seen: dict[int, object] = {id(tensor): tensor for tensor in spared}  # keeps the ids unique
        self._bytes_left = _MOST_COPIED_BYTES

    def keep(self, first: object) -> None:
        """Record the state of an object and of all objects to which it refers."""
        pending = deque([first])
        while pending and len(self._seen) < _MOST_OBJECTS:
            value = pending.popleft()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                pending.extend(found for found in self._note(value) if not isinstance(found, _ATOMS))

    def _note(self, value: Any) -> Iterable[object]:
        """Record an object's own state. Returns the objects to which it refers."""
        match value:
            case dict():
                before = dict(value)
                self._stack.callback(_fill, value, before)
                return before.values()
            case list() | set() | deque():
                elements = list(value)
                self._stack.callback(_fill, value, elements)
                return elements
            case tuple() | frozenset():
                return value
            case Tensor():
                return self._note_tensor(value)
            case np.ndarray():
                if self._may_copy(value.nbytes) and value.flags.writeable:
                    self._stack.callback(np.copyto, value, value.copy())
                return ()
            case _ if isinstance(value, tuple(_GENERATORS)):
                read, write = _access_of(value)
                self._stack.callback(write, value, read(value))
            case CellType():
                try:
                    content = value.cell_contents
                except ValueError:  # it is empty
                    return ()
                self._stack.callback(setattr, value, "cell_contents", content)
                return (content,)
            case MethodType():
                return () if _is_opaque(value.__self__) else (value.__self__, value.__func__)
            case functools.partial():
                return () if _is_opaque(value.func) else (value.func, value.args, value.keywords)
            case _LRU_CACHE():
                self._stack.callback(_drop_new_results, value, value.cache_info())
                return (value.__wrapped__,)
            case FunctionType():
                return self._note_function(value) if _is_own_code(value.__module__) else ()
            case type():
                return self._note_class(value) if _is_own_code(value.__module__) else ()
            case staticmethod() | classmethod():
                return (value.__func__,)
            case property():
                return (value.fget,)
            case ModuleType():
                return ()
            case nn.Module():
                return (vars(value), type(value))
            case _ if not _is_opaque(value):
                return (*self._note_attributes(value), type(value))
        return ()

    def _note_tensor(self, tensor: Tensor) -> Iterable[object]:
        # Values of parameters and subclasses are elsewhere, and a tensor of a graph is not written to.
        has_own_values = type(tensor) is Tensor and tensor.device.type != "meta" and not tensor.is_inference()
        if has_own_values and not tensor.requires_grad and self._may_copy(tensor.nbytes):
            self._stack.callback(_put_back_values, tensor, version_of(tensor), tensor.clone())
        return ()

    def _may_copy(self, num_bytes: int) -> bool:
        self._bytes_left -= num_bytes
        return self._bytes_left >= 0

    def _note_function(self, function: FunctionType) -> Iterable[object]:
        names = set(_names_in(function.__code__))
        scopes, found = [function.__globals__], list[object]()
        while scopes:
            scope = scopes.pop()
            for name in names:
                value = scope.get(name, _MISSING)
                self._stack.callback(_put_back_name, scope, name, value)
                if isinstance(value, ModuleType) and scope is function.__globals__ and _is_own_code(value.__name__):
                    scopes.append(vars(value))
                elif value is not _MISSING:
                    found.append(value)
        return (*found, function.__defaults__, function.__kwdefaults__, *(function.__closure__ or ()), vars(function))

    def _note_class(self, owner: type) -> Iterable[object]:
        before = {name: value for name, value in vars(owner).items() if not name.startswith("__")}
        self._stack.callback(_put_back_attributes, owner, before)
        return (*before.values(), *owner.__bases__)

    def _note_attributes(self, value: object) -> Iterable[object]:
        slots = [name for owner in type(value).__mro__ for name in _slots_of(owner) if hasattr(value, name)]
        if slots:
            before = {name: getattr(value, name) for name in slots}
            for name, content in before.items():
                self._stack.callback(object.__setattr__, value, name, content)
            yield from before.values()
        if hasattr(value, "__dict__"):
            yield vars(value)


def _is_opaque(value: object) -> bool:
    """Return whether an object or function belongs to a package that is not visited."""
    owner = value if isinstance(value, FunctionType | type) else type(value)
    return not isinstance(value, nn.Module) and owner.__module__.partition(".")[0] in _OPAQUE


@functools.cache
def _is_own_code(module_name: str | None) -> bool:
    """Return whether a module's code comes from a user or a checkpoint, and not from a library."""
    if module_name is None or module_name.partition(".")[0] in _OPAQUE:
        return False
    file = getattr(sys.modules.get(module_name), "__file__", None)
    return file is None or _INSTALLED.isdisjoint(Path(file).parts)


def _names_in(code: CodeType) -> Iterator[str]:
    """Return the global names that a function and the functions in it may use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _slots_of(owner: type) -> tuple[str, ...]:
    slots = vars(owner).get("__slots__", ())
    return tuple(name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__"))


def _put_back_name(scope: dict[str, Any], name: str, value: object) -> None:
    if value is _MISSING:
        scope.pop(name, None)
    elif scope.get(name, _MISSING) is not value:
        scope[name] = value


def _put_back_attributes(owner: type, before: dict[str, Any]) -> None:
    for name in [name for name in vars(owner) if not name.startswith("__") and name not in before]:
        delattr(owner, name)
    for name, value in before.items():
        if vars(owner).get(name, _MISSING) is not value:
            setattr(owner, name, value)


def _put_back_values(tensor: Tensor, version: int, values: Tensor) -> None:
    if version_of(tensor) != version:
        with torch.no_grad():
            tensor.copy_(values)


def _drop_new_results(cached: Any, before: Any) -> None:
    """Clear the cache of a function that has computed results since ``before``, because they may be fake tensors."""
    if cached.cache_info().misses != before.misses:
        cached.cache_clear()
