"""All that a forward may keep is as it was before, in the same objects."""

from __future__ import annotations

import copy
import functools
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_lohan.activations.layer_runs.module_state import state_kept

_TABLES: dict[tuple[int, ...], Tensor] = {}
_calls = 0


@dataclass(slots=True)
class Schedule:
    step: int = 0


class Counter:
    total = 0


@functools.cache
def table_of(length: int) -> Tensor:
    return torch.arange(length)


def noted(length: int, seen: list[int] = []) -> int:  # noqa: B006 - as in code that keeps state there
    seen.append(length)
    return len(seen)


def wrapped(module: nn.Module) -> Callable[[Tensor], Tensor]:
    num_calls = 0

    def forward(tensor: Tensor) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        module.reported = num_calls  # type: ignore[assignment]
        return tensor

    return forward


class Forgetful(nn.Module):
    """Keeps state in every place that a forward may use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.wrapped = nn.Identity()
        self.wrapped.forward = wrapped(self.wrapped)  # type: ignore[method-assign]
        self.register_buffer("mean", torch.zeros(2))
        self.num_calls, self.kind = 0, "one"
        self.lengths: list[int] = []
        self.nested = {"tables": [OrderedDict[int, int]()], "window": deque([1, 2], maxlen=2)}
        self.ids = {1, 2}
        self.schedules = (Schedule(), SimpleNamespace(step=0))
        self.table: Tensor | None = None
        self.memory, self.array = torch.zeros(2), np.zeros(2)
        self.generators = [torch.Generator().manual_seed(1)]
        self.python, self.numpy, self.legacy = random.Random(2), np.random.default_rng(3), np.random.RandomState(4)

    def draws(self) -> list[float]:
        """Return a draw from each generator."""
        torches = [float(torch.rand((), generator=self.generators[0])), float(torch.rand(()))]
        pythons = [self.python.random(), random.random()]
        return [*torches, *pythons, self.numpy.random(), self.legacy.rand(), np.random.rand()]

    def forward(self, tensor: Tensor) -> Tensor:
        global _calls
        _calls += 1
        Counter.total += 1
        Counter.last = tensor  # type: ignore[attr-defined]
        _TABLES[tuple(tensor.shape)] = torch.ones_like(tensor)
        self.num_calls, self.kind, self.extra = self.num_calls + 1, "another", nn.Linear(2, 2)
        self.lengths.append(len(tensor))
        self.nested["tables"][0][len(tensor)] = 1
        self.nested["window"].append(3)
        self.nested["new"] = tensor
        self.ids.clear()
        for schedule in self.schedules:
            schedule.step += 1
        self.table = torch.ones_like(tensor)
        self.memory += 1
        self.array += 1
        self.mean += 1
        self.linear = nn.Linear(2, 2)
        self.training = False
        self.register_forward_hook(lambda *_: None)
        self.draws()
        table_of(noted(len(tensor)))
        return self.wrapped(tensor)


def described(module: nn.Module) -> dict[str, Any]:
    """Return a comparable copy of what is reachable from a module, and the state of this file."""
    own = {
        name: repr(value)
        for name, value in vars(module).items()
        if name not in ("generators", "python", "numpy", "legacy")
    }
    return {
        **own,
        "file": (_calls, Counter.total, hasattr(Counter, "last"), sorted(_TABLES), copy.copy(noted.__defaults__)),
        "cells": [cell.cell_contents for cell in module.wrapped.forward.__closure__ or ()],
    }


def test_a_forward_leaves_no_mark() -> None:
    model, other = Forgetful(), Forgetful()
    for each in (model, other):
        each(torch.zeros(3, 2))  # what earlier calls left stays
        each.generators[0].manual_seed(1)
    objects = dict(vars(model))
    before, defaults = described(model), repr(noted.__defaults__)
    table_of(7)
    with state_kept(model):
        model(torch.zeros(5, 2))
        model(torch.zeros(6, 2))
        assert described(model) != before and repr(noted.__defaults__) != defaults
    assert described(model) == before and repr(noted.__defaults__) == defaults
    assert all(vars(model)[name] is value for name, value in objects.items()) and len(vars(model)) == len(objects)
    assert table_of.cache_info().currsize == 0, "a cached result of the trial stays"
    torch.manual_seed(5), random.seed(6), np.random.seed(7)
    with state_kept(model):
        draws = model.draws()
    assert model.draws() == draws


def test_what_no_forward_used_is_not_written() -> None:
    """Other threads may change objects to which a module refers."""
    model = nn.Linear(2, 2)
    model.log = [1]  # type: ignore[assignment]
    model.memory = torch.zeros(2)  # type: ignore[assignment]
    table_of(1)
    results = table_of.cache_info()
    with state_kept(model):
        model(torch.zeros(2))
    assert model.memory._version == 0 and table_of.cache_info() == results


def test_parameters_and_spared_tensors_are_not_put_back() -> None:
    model = nn.BatchNorm1d(2)
    with state_kept(model, spared=[model.running_mean]), torch.no_grad():
        model.weight += 1
        model.running_mean += 1
        model.running_var += 1
    assert model.weight[0] == 2 and model.running_mean[0] == 1 and model.running_var[0] == 1


def test_the_state_is_put_back_after_an_error() -> None:
    model = Forgetful()
    before = described(model)
    with pytest.raises(RuntimeError, match="fails"), state_kept(model):
        model(torch.zeros(3, 2))
        raise RuntimeError("it fails")
    assert described(model) == before
