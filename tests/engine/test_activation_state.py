"""A layer that runs again in backward reads what its forward read, and changes its state once, as in plain torch."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from layered_model import WIDTH, LayeredModel, all_equal
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import spectral_norm

from hf_lohan.absent import StandIns, saved_weight_hooks
from hf_lohan.activations.layer_runs.module_state import ModuleState
from hf_lohan.costs import Placement
from hf_lohan.device import CpuDevice

SCALE: ContextVar[float] = ContextVar("SCALE", default=1.0)


@dataclass
class Settings:
    scale: float = 1.0


def block(layer: Any, hidden: Tensor, scale: Any = 1.0) -> Tensor:
    return hidden + layer.down(torch.tanh(layer.up(hidden)) * scale)


class Case:
    """A layer's forward, and what happens to the layers after each forward."""

    def __init__(
        self,
        forward: Callable[[Any, Tensor], Tensor] = block,
        prepare: Callable[[Any], object] = lambda layer: None,
        after: Callable[[Any], object] = lambda layer: None,
    ) -> None:
        self.forward, self.prepare, self.after = forward, prepare, after


def averaged(layer: Any, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        layer.average.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
    return block(layer, hidden, layer.average.clone())


def averaged_in_data(layer: Any, hidden: Tensor) -> Tensor:
    layer.average.data.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
    return block(layer, hidden, layer.average.clone())


def averaged_in_a_new_buffer(layer: Any, hidden: Tensor) -> Tensor:
    layer.average = layer.average * 0.9 + hidden.detach().mean(0) * 0.1
    return block(layer, hidden, layer.average)


def averaged_without_a_buffer(layer: Any, hidden: Tensor) -> Tensor:
    layer.statistics["average"].mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
    return block(layer, hidden, layer.statistics["average"].clone())


def counted(layer: Any, hidden: Tensor) -> Tensor:
    layer.num_calls += 1
    layer.scales.append(1.0 + layer.num_calls)
    return block(layer, hidden, sum(layer.scales))


def normalized(layer: Any, hidden: Tensor) -> Tensor:
    return block(layer, layer.norm(hidden))


def cached(layer: Any, hidden: Tensor) -> Tensor:
    if layer.table is None:
        layer.table = torch.linspace(0, 1, WIDTH) * layer.up.weight.detach().norm()
    return block(layer, hidden, layer.table)


def attended(layer: Any, hidden: Tensor) -> Tensor:
    query = layer.up(hidden).view(1, 2, -1, WIDTH)
    return hidden + layer.down(F.scaled_dot_product_attention(query, query, query).reshape(hidden.shape))


def dropped(layer: Any, hidden: Tensor) -> Tensor:
    return block(layer, F.dropout(hidden, 0.5, training=layer.training))


def of_generator(layer: Any, hidden: Tensor) -> Tensor:
    return block(layer, hidden, torch.rand(WIDTH, generator=layer.generator))


def doubled(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output * 2


def with_average(layer: Any, numel: int = WIDTH) -> None:
    layer.register_buffer("average", torch.ones(numel))


CASES: dict[str, Case] = {
    "training flag": Case(dropped, after=lambda layer: layer.train(not layer.training)),
    "attribute": Case(
        lambda layer, hidden: block(layer, hidden, layer.scale),
        lambda layer: setattr(layer, "scale", 1.0),
        lambda layer: setattr(layer, "scale", layer.scale + 1),
    ),
    "new attribute": Case(
        lambda layer, hidden: block(layer, hidden, getattr(layer, "scale", 1.0)),
        after=lambda layer: setattr(layer, "scale", 3.0),
    ),
    "nested settings": Case(
        lambda layer, hidden: block(layer, hidden, layer.settings["a"]["scale"]),
        lambda layer: setattr(layer, "settings", {"a": {"scale": 1.0}}),
        lambda layer: layer.settings["a"].update(scale=3.0),
    ),
    "config": Case(
        lambda layer, hidden: block(layer, hidden, layer.config.scale),
        lambda layer: setattr(layer, "config", Settings()),
        lambda layer: setattr(layer.config, "scale", 3.0),
    ),
    "namespace": Case(
        lambda layer, hidden: block(layer, hidden, layer.config.scale),
        lambda layer: setattr(layer, "config", SimpleNamespace(scale=1.0)),
        lambda layer: setattr(layer.config, "scale", 3.0),
    ),
    "active names": Case(
        lambda layer, hidden: block(layer, hidden, len(layer.active)),
        lambda layer: setattr(layer, "active", {"a", "b"}),
        lambda layer: layer.active.discard("a"),
    ),
    "hook that comes": Case(after=lambda layer: layer.up.register_forward_hook(doubled)),
    "hook that goes": Case(
        prepare=lambda layer: setattr(layer, "handle", layer.up.register_forward_hook(doubled)),
        after=lambda layer: layer.handle.remove(),
    ),
    "another child": Case(
        prepare=lambda layer: setattr(layer, "up", nn.Sequential(layer.up, nn.Tanh())),
        after=lambda layer: setattr(layer, "up", layer.up[0]) if isinstance(layer.up, nn.Sequential) else None,
    ),
    "frozen weight": Case(
        prepare=lambda layer: layer.down.weight.requires_grad_(False),
        after=lambda layer: layer.down.weight.requires_grad_(True),
    ),
    "context variable": Case(
        lambda layer, hidden: block(layer, hidden, SCALE.get()), after=lambda layer: SCALE.set(SCALE.get() + 1)
    ),
    "counters": Case(
        counted, lambda layer: (setattr(layer, "num_calls", 0), setattr(layer, "scales", [])), lambda layer: None
    ),
    "cache": Case(cached, lambda layer: setattr(layer, "table", None)),
    "moving average": Case(averaged, with_average),
    "moving average in .data": Case(averaged_in_data, with_average),
    "new buffer": Case(averaged_in_a_new_buffer, with_average),
    "buffer in a dict": Case(
        averaged_without_a_buffer, lambda layer: setattr(layer, "statistics", {"average": torch.ones(WIDTH)})
    ),
    "buffer that is filled": Case(
        lambda layer, hidden: block(layer, hidden, layer.average.clone()),
        with_average,
        lambda layer: layer.average.fill_(3.0),
    ),
    "batch norm": Case(normalized, lambda layer: setattr(layer, "norm", nn.BatchNorm1d(WIDTH))),
    "spectral norm": Case(prepare=lambda layer: spectral_norm(layer.up)),
    "generator": Case(of_generator, lambda layer: setattr(layer, "generator", torch.Generator().manual_seed(1))),
    "generator of Python": Case(
        lambda layer, hidden: block(layer, hidden, layer.generator.random()),
        lambda layer: setattr(layer, "generator", random.Random(1)),
    ),
    "generator of numpy": Case(
        lambda layer, hidden: block(layer, hidden, float(layer.generator.random())),
        lambda layer: setattr(layer, "generator", np.random.default_rng(1)),
    ),
}


class StatefulModel(LayeredModel):
    def __init__(self, case: Case) -> None:
        super().__init__(case.forward, between=lambda after, _before: after)
        self.case = case
        for layer in self.layers:
            case.prepare(layer)

    def outcome(self) -> list[Tensor]:
        """Return losses, gradients and buffers of two forwards in one loss, twice."""
        found: list[Tensor] = []
        SCALE.set(1.0)
        for step in range(2):
            leaf = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH).requires_grad_()
            losses = []
            for _ in range(2):
                losses.append(self._loss(leaf))
                for layer in self.layers:
                    self.case.after(layer)
            total = losses[0] + 2 * losses[1]
            total.backward(retain_graph=step == 1)
            if step == 1:
                total.backward()
            found += [*losses, leaf.grad]  # type: ignore[list-item]
        return [
            *(tensor.detach() for tensor in found),
            *(parameter.grad for parameter in self.parameters() if parameter.grad is not None),
            *self.buffers(),
        ]

    def _loss(self, leaf: Tensor) -> Tensor:
        if self.tiers is None:
            return self(leaf)
        self.tiers.begin_forward()
        with saved_weight_hooks(StandIns(CpuDevice()), lambda _tensor: None, pytest.fail, self.tiers):
            loss: Tensor = self(leaf)
        return loss


def outcome_of(case: Case, place: Placement | None) -> tuple[list[Tensor], Any]:
    model = StatefulModel(case)
    if place is not None:
        model.use_tiers(place)
    torch.manual_seed(5)
    outcome = model.outcome()
    plain = [
        {name: value for name, value in vars(layer).items() if isinstance(value, int | float | list | set)}
        for layer in model.layers
    ]
    model.close()
    return outcome, plain


@pytest.mark.parametrize("place", [Placement.RECOMPUTE, Placement.CPU])
@pytest.mark.parametrize("case", CASES)
def test_a_layer_runs_again_with_the_state_of_its_forward(case: str, place: Placement) -> None:
    stock, of_stock = outcome_of(CASES[case], None)
    ours, of_ours = outcome_of(CASES[case], place)
    assert all_equal(ours, stock)
    assert of_ours == of_stock


def test_attention_runs_again_by_the_kernel_of_its_forward() -> None:
    def outcome(under_tiers: bool) -> list[Tensor]:
        model = StatefulModel(Case(attended))
        if under_tiers:
            model.use_tiers(Placement.RECOMPUTE)
        leaf = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH).requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            loss = model._loss(leaf)
        loss.backward()
        model.close()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    assert all_equal(outcome(under_tiers=True), outcome(under_tiers=False))


def test_a_large_buffer_is_copied_only_if_the_forward_changes_it() -> None:
    numel = (1 << 18) + 1

    def forward(layer: Any, hidden: Tensor) -> Tensor:
        if layer.writes:
            layer.average.mul_(0.5)
        return block(layer, hidden, layer.average[:WIDTH].clone())

    def prepare(layer: Any) -> None:
        with_average(layer, numel)
        layer.writes = True

    written = Case(forward, prepare)
    assert all_equal(outcome_of(written, Placement.RECOMPUTE)[0], outcome_of(written, None)[0])

    def only_read(layer: Any) -> None:
        prepare(layer)
        layer.writes = False

    changed = Case(forward, only_read, lambda layer: layer.average.add_(1))
    with pytest.raises(ValueError, match=r"Layer.average was changed in place .* set activations: keep"):
        outcome_of(changed, Placement.RECOMPUTE)


GLOBAL = [1]


@pytest.mark.parametrize("place", [Placement.RECOMPUTE, Placement.CPU])
@pytest.mark.parametrize("other", [0, 2], ids=["fewer", "other"])
def test_state_that_is_not_noted_has_a_sentence(other: int, place: Placement) -> None:
    def forward(layer: Any, hidden: Tensor) -> Tensor:
        return hidden.sin() if GLOBAL[0] == 0 else block(layer, hidden[: 8 // GLOBAL[0]])

    GLOBAL[0] = 1
    model = StatefulModel(Case(forward))
    model.use_tiers(place)
    leaf = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH).requires_grad_()
    loss = model._loss(leaf)
    GLOBAL[0] = other
    with pytest.raises(ValueError, match=r"^2 computed something else when it ran again .* set activations: keep"):
        loss.backward()
    model.close()


def test_an_error_in_a_layer_that_runs_again_puts_the_state_back() -> None:
    layer: Any = nn.Module()
    layer.number, layer.names = 1, ["a"]
    state = ModuleState(layer)
    layer.number, layer.names = 2, [*layer.names, "b"]
    with pytest.raises(RuntimeError, match="broken"), state.restored():
        assert (layer.number, layer.names) == (1, ["a"])
        raise RuntimeError("broken")
    assert (layer.number, layer.names) == (2, ["a", "b"])


def test_the_state_dies_with_its_graph() -> None:
    gc.collect()
    model = StatefulModel(CASES["moving average"])
    model.use_tiers(Placement.RECOMPUTE)
    loss = model._loss(torch.ones(8, WIDTH, requires_grad=True))
    states = [weakref.ref(found) for found in gc.get_objects() if isinstance(found, ModuleState)]
    assert len(states) == len(model.layers)
    gc.disable()
    try:
        loss.backward()
        del loss
        assert not any(state() for state in states)
    finally:
        gc.enable()
    model.close()


def test_a_copied_layer_has_its_own_state() -> None:
    """Attributes are put back into the object itself, so references to it stay valid."""
    layer: Any = nn.Linear(2, 2)
    layer.settings = {"scale": 1}
    settings, other = layer.settings, copy.deepcopy(layer)
    state = ModuleState(layer)
    settings["scale"] = 2
    with state.restored():
        assert settings["scale"] == 1 and other.settings["scale"] == 1
    assert settings["scale"] == 2
