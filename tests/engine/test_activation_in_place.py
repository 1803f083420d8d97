"""If a model writes to its activations in place, training is exact or raises an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from async_device import AsyncDevice
from layered_model import WIDTH, Forward, Layer, LayeredModel, all_equal
from torch import Tensor

from hf_lohan.costs import Placement
from hf_lohan.device import Device

PLACES = pytest.mark.parametrize("place", [Placement.GPU, Placement.CPU])
SWAPPED = Placement.CPU


ModelFactory = Callable[..., LayeredModel]


@pytest.fixture
def make_model() -> Iterator[ModelFactory]:
    """Make a model of a layer function and a function between layers. With a `place`, it runs with tiers."""
    made: list[LayeredModel] = []

    def make(
        function: Forward,
        place: Placement | None,
        *,
        between: Callable[[Any, Tensor], Tensor] = lambda after, before: after,
        device: Device | None = None,
    ) -> LayeredModel:
        made.append(LayeredModel(function, between))
        if place is not None:
            made[-1].use_tiers(place, device)
        return made[-1]

    yield make
    for model in made:
        model.close()


def plain(layer: Layer, hidden: Tensor) -> Tensor:
    return hidden + layer.down(torch.tanh(layer.up(hidden)))


def output_changed(layer: Layer, hidden: Tensor) -> Tensor:
    inner = layer.up(hidden)
    inner.add_(1.0).relu_()
    return hidden + layer.down(inner)


def view_of_output_changed(layer: Layer, hidden: Tensor) -> Tensor:
    inner = layer.up(hidden)
    inner[:, : WIDTH // 2].mul_(0.5)
    inner.view(-1)[3:9].zero_()
    return hidden + layer.down(inner)


def changed_between_anchors(layer: Layer, hidden: Tensor) -> Tensor:
    """One output is stored while the other is computed, and both are changed."""
    first, second = layer.up(hidden), layer.down(hidden)
    first.add_(second.detach())
    second.add_(first.detach())
    return hidden + torch.tanh(first) * torch.tanh(second)


def changed_by_out(layer: Layer, hidden: Tensor) -> Tensor:
    inner = layer.up(hidden)
    with torch.no_grad():
        torch.add(inner, 1.0, out=inner)
    return hidden + layer.down(torch.tanh(inner))


def input_changed(layer: Layer, hidden: Tensor) -> Tensor:
    hidden = hidden.mul_(0.5)
    return layer.down(torch.tanh(layer.up(hidden)))


def returns_an_anchor(layer: Layer, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Backward needs the returned anchor, although autograd did not save it."""
    inner = layer.up(hidden)
    return inner, layer.down(torch.relu(inner))


def returns_a_view_of_an_anchor(layer: Layer, hidden: Tensor) -> tuple[Tensor, Tensor]:
    inner = layer.up(hidden)
    return inner.view(2, 4, WIDTH)[:].reshape(8, WIDTH), layer.down(torch.relu(inner))


INSIDE = (output_changed, view_of_output_changed, changed_between_anchors, changed_by_out)


@pytest.mark.parametrize("function", [plain, *INSIDE])
@PLACES
@pytest.mark.parametrize("num_backwards", [1, 2])
def test_changes_inside_a_layer_equal_stock(
    function: Forward, place: Placement, num_backwards: int, make_model: ModelFactory
) -> None:
    stock = make_model(function, None).gradients(num_backwards)
    assert all_equal(make_model(function, place).gradients(num_backwards), stock)


@pytest.mark.parametrize("function", INSIDE)
@pytest.mark.parametrize("seed", range(3))
def test_changes_inside_a_layer_during_a_copy_equal_stock(
    function: Forward, seed: int, make_model: ModelFactory
) -> None:
    device = AsyncDevice(seed, max_delay_s=5e-3)
    stock = make_model(function, None).gradients()
    assert all_equal(make_model(function, SWAPPED, device=device).gradients(), stock)
    assert device.num_races == 0


def test_a_changed_input_is_exact_if_swapped_and_refused_if_kept(make_model: ModelFactory) -> None:
    """A kept input has changed before the recomputation. A swapped input was copied before the change."""
    stock = make_model(input_changed, None).gradients()
    assert all_equal(make_model(input_changed, SWAPPED).gradients(), stock)
    with pytest.raises(RuntimeError, match="in place"):
        make_model(input_changed, Placement.GPU).gradients()


def changes_the_output(after: tuple[Tensor, Tensor], _before: Tensor) -> Tensor:
    return after[0].mul_(0.5) + after[1]


def changes_a_view_of_the_output(after: tuple[Tensor, Tensor], _before: Tensor) -> Tensor:
    after[0][1:3].mul_(0.5)
    return after[0] + after[1]


@pytest.mark.parametrize("between", [changes_the_output, changes_a_view_of_the_output])
@pytest.mark.parametrize("function", [returns_an_anchor, returns_a_view_of_an_anchor])
@pytest.mark.parametrize("device_kind", ["cpu", "async"])
def test_changes_of_a_swapped_output_equal_stock(
    function: Forward, between: Callable[..., Tensor], device_kind: str, make_model: ModelFactory
) -> None:
    stock = make_model(function, None, between=between).gradients()
    device = AsyncDevice(1, max_delay_s=5e-3) if device_kind == "async" else None
    assert all_equal(make_model(function, SWAPPED, between=between, device=device).gradients(), stock)


@pytest.mark.parametrize("between", [changes_the_output, changes_a_view_of_the_output])
def test_changes_of_a_kept_output_are_refused(between: Callable[..., Tensor], make_model: ModelFactory) -> None:
    with pytest.raises(RuntimeError, match="changed in place outside its layer"):
        make_model(returns_an_anchor, Placement.GPU, between=between).gradients()


@PLACES
def test_changes_of_the_input_after_the_layer_are_refused(place: Placement, make_model: ModelFactory) -> None:
    """Torch's checkpointing refuses this in backward, too."""

    def changes_the_input(after: Tensor, before: Tensor) -> Tensor:
        with torch.no_grad():
            before.mul_(2.0)
        return after

    with pytest.raises(RuntimeError, match="in place"):
        make_model(plain, place, between=changes_the_input).gradients()


def test_changes_of_a_saved_tensor_outside_layers_are_refused(make_model: ModelFactory) -> None:
    """Autograd does not check versions of tensors that have saved-tensor hooks, so the engine must."""

    def changes_what_exp_saved(after: Tensor, _before: Tensor) -> Tensor:
        powers = after.exp()
        with torch.no_grad():
            powers.mul_(2.0)
        return powers

    for place in (None, Placement.RECOMPUTE):
        with pytest.raises(RuntimeError, match=r"in ?place"):
            make_model(plain, place, between=changes_what_exp_saved).gradients()
