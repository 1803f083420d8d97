"""Puts back all that a forward changes in a model beside its parameters, so that a trace or a trial leaves no mark.

A forward may count its calls, append to a list, cache a table or a mask, or draw from a generator. It does so in
attributes of modules, in the objects and containers that they refer to, and in global names of the model's code.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_lohan.compat.torch_private import version_of

_MOST_OBJECTS = 1_000_000
"""Objects that are looked at, nearest to the model first. A module may refer to a whole data set."""
_MOST_COPIED_BYTES = 256 << 20
"""Bytes of tensors and arrays that are copied. Larger ones are not put back."""
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_OPAQUE = frozenset({"hf_lohan", "numpy", "torch", *sys.stdlib_module_names} - {"argparse", "collections", "types"})
"""Packages whose objects are not looked into."""
_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of libraries. Functions in them are not looked into, because libraries keep no state of a model."""
_LRU_CACHE: Any = type(functools.lru_cache(lambda: None))
_MISSING = object()


@contextlib.contextmanager
def state_kept(
    model: nn.Module, device: torch.device | None = None, *, spared: Iterable[Tensor] = ()
) -> Iterator[None]:
    """Put back, at the end of the context, what the model's forwards have changed: attributes of modules, the contents
    of containers, objects, tensors and random generators that they refer to, and the global names and class attributes
    that the model's own code uses.

    Parameters are not put back, nor are ``spared`` tensors. ``device``: its default random generator is put back too.
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
    """Notes the state of objects, and has ``stack`` put it back."""

    def __init__(self, stack: contextlib.ExitStack, spared: Iterable[Tensor]) -> None:
        self._stack = stack
        self._seen: dict[int, object] = {id(tensor): tensor for tensor in spared}  # keeps the ids unique
        self._bytes_left = _MOST_COPIED_BYTES

    def keep(self, first: object) -> None:
        """Note the state of an object and of all to which it refers."""
        pending = deque([first])
        while pending and len(self._seen) < _MOST_OBJECTS:
            value = pending.popleft()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                pending.extend(found for found in self._note(value) if not isinstance(found, _ATOMS))

    def _note(self, value: Any) -> Iterable[object]:
        """Note an object's own state. Returns the objects to which it refers."""
        match value:
            case dict():
                before = dict(value)
                self._stack.callback(_put_back_dict, value, before)
                return before.values()
            case list() | set() | deque():
                elements = list(value)
                self._stack.callback(_put_back_elements, value, elements)
                return elements
            case tuple() | frozenset():
                return value
            case Tensor():
                return self._note_tensor(value)
            case np.ndarray():
                if self._may_copy(value.nbytes) and value.flags.writeable:
                    self._stack.callback(np.copyto, value, value.copy())
                return ()
            case torch.Generator():
                self._stack.callback(value.set_state, value.get_state())
                return ()
            case random.Random():
                self._stack.callback(value.setstate, value.getstate())
                return ()
            case np.random.Generator():
                return (value.bit_generator,)
            case np.random.BitGenerator():
                self._stack.callback(setattr, value, "state", value.state)
                return ()
            case np.random.RandomState():
                self._stack.callback(value.set_state, value.get_state())
                return ()
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
        # Parameters and subclasses have values that are elsewhere, and a tensor of a graph is not written to.
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
    """Return whether an object or function is of a package that is not looked into."""
    owner = value if isinstance(value, FunctionType | type) else type(value)
    return not isinstance(value, nn.Module) and owner.__module__.partition(".")[0] in _OPAQUE


@functools.cache
def _is_own_code(module_name: str | None) -> bool:
    """Return whether a module has code of a user or of a checkpoint, and not of a library."""
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


def _put_back_dict(value: dict[Any, Any], before: dict[Any, Any]) -> None:
    if not _are_same(value.items(), before.items()):
        value.clear()
        value.update(before)


def _are_same(now: Iterable[tuple[Any, Any]], before: Iterable[tuple[Any, Any]]) -> bool:
    now, before = list(now), list(before)
    return len(now) == len(before) and all(a[0] is b[0] and a[1] is b[1] for a, b in zip(now, before, strict=True))


def _put_back_elements(value: Any, elements: list[Any]) -> None:
    now = list(value)
    if len(now) != len(elements) or any(a is not b for a, b in zip(now, elements, strict=True)):
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(elements)


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
    """Forget all results of a cached function that has computed some since ``before``, because they may be fake."""
    if cached.cache_info().misses != before.misses:
        cached.cache_clear()
