"""All optimizers and arguments of torch's own tests (`optim_db`), offloaded: equal to torch bit for bit, or refused by
name.
"""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

from hf_lohan.testing.models import tiny_batch, tiny_model

pytestmark = pytest.mark.slow
NUM_STEPS = 3
NUM_EQUAL = {"Adam": 3, "AdamW": 3, "RAdam": 5, "SGD": 8, "Adagrad": 6, "RMSprop": 5, "Adafactor": 4, "Muon": 7}
"""Of torch 2.13. Later versions may have more."""
NUM_REFUSED = {
    "Adam": 2, "AdamW": 2, "RAdam": 1, "SGD": 1, "Adagrad": 1, "RMSprop": 3, "Adafactor": 1, "Adadelta": 6,
    "Adamax": 5, "ASGD": 7, "NAdam": 7, "Rprop": 5,
}  # fmt: skip
"""Optimizers without a rule, and the arguments `maximize` and `amsgrad`."""
STOCK_FAILS = {"LBFGS": 5, "SparseAdam": 4}
"""In torch itself, one needs a closure and the other sparse gradients."""
_PRINT_GRIDS = """
import pickle, sys, types, unittest

sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)  # a package that nothing here calls
from torch.testing._internal.common_optimizers import optim_db

grids = {info.optim_cls.__name__: [case.kwargs for case in info.optim_inputs_func(device="cpu")] for info in optim_db}
sys.stdout.buffer.write(pickle.dumps(grids))
"""


@pytest.fixture(scope="module")
def grids() -> dict[str, list[dict[str, Any]]]:
    """The arguments of each optimizer. Another process reads them, because the import changes torch's flags."""
    done = subprocess.run([sys.executable, "-c", _PRINT_GRIDS], stdout=subprocess.PIPE, check=True)
    found: dict[str, list[dict[str, Any]]] = pickle.loads(done.stdout)
    return found


def small_model(*, only_matrices: bool) -> Any:
    model = tiny_model("llama", num_layers=2, hidden_size=32)
    if only_matrices:
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dim() == 2)
    return model


def runs_in_torch(model: Any, optimizer: Any) -> bool:
    model(**tiny_batch()).loss.backward()
    try:
        optimizer.step()
    except (TypeError, RuntimeError):
        return False
    return True


def outcomes(name: str, cases: list[dict[str, Any]], make_twins: Any, folder: Path) -> Iterator[str]:
    optimizer_class = getattr(torch.optim, name)
    model_factory = partial(small_model, only_matrices=name == "Muon")
    for number, arguments in enumerate(cases):
        # torch's default kernel of Adam rounds differently from the fused one.
        settings = {**arguments, "fused": True} if name in ("Adam", "AdamW") else arguments

        def make(parameters: Any, settings: dict[str, Any] = settings) -> torch.optim.Optimizer:
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            made: torch.optim.Optimizer = optimizer_class(trained, **copy.deepcopy(settings))
            return made

        model = model_factory()
        if not runs_in_torch(model, make(model.parameters())):
            yield "stock fails"
            continue
        try:
            twins = make_twins(model_factory=model_factory, optimizer=make, ssd=str(folder / str(number)))
        except ValueError as refusal:
            assert re.match(rf"{name} (cannot be offloaded|with (maximize|amsgrad)=True)", str(refusal)), arguments
            yield "refused"
            continue
        schedulers = [ExponentialLR(optimizer, 0.9) for optimizer in (twins.stock_optimizer, twins.optimizer)]
        for step in range(NUM_STEPS):
            twins.backward(step)
            twins.step()
            for scheduler in schedulers:
                scheduler.step()
        weights = twins.engine.parameters
        for weight, parameter in twins.stock.named_parameters():
            assert torch.equal(weights.read_parameter(weight), parameter), (arguments, weight)
        twins.engine.close()
        yield "equal"


ALL = (*dict.fromkeys((*NUM_EQUAL, *NUM_REFUSED, *STOCK_FAILS)),)


def test_every_optimizer_of_torch_is_known_here(grids: dict[str, list[dict[str, Any]]]) -> None:
    assert grids.keys() == set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_an_optimizer_equals_torch_or_is_refused(
    name: str, grids: dict[str, list[dict[str, Any]]], make_twins: Any, ram_folder: Path
) -> None:
    cases = grids[name]
    found = list(outcomes(name, cases, make_twins, ram_folder))
    assert len(found) == len(cases) >= NUM_EQUAL.get(name, 0) + NUM_REFUSED.get(name, 0) + STOCK_FAILS.get(name, 0)
    for arguments, outcome in zip(cases, found, strict=True):
        if name in STOCK_FAILS:
            assert outcome == "stock fails", arguments
        elif name not in NUM_EQUAL or arguments.keys() & {"maximize", "amsgrad"}:
            assert outcome == "refused", arguments
        else:
            assert outcome == "equal", arguments
    assert found.count("equal") >= NUM_EQUAL.get(name, 0)
    assert found.count("refused") >= NUM_REFUSED.get(name, 0)
