"""All numbers equal torch in memory, for every place of the activations and with or without recomputing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from architectures import model_of
from async_device import AsyncDevice
from engines import TwinsFactory
from layered_model import OPERATIONS, WIDTH, Layer, LayeredModel, all_equal
from mixtures import all_in, random_mixture
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_lohan.activations import anchor_name, layer_frame
from hf_lohan.compat.torch_private import StorageWeakRef
from hf_lohan.costs import INPUT, Placement
from hf_lohan.device import CpuDevice
from hf_lohan.huggingface.attention import run_layers_in_chunks
from hf_lohan.testing.models import tiny_batch

NUM_MIXTURES = 4
DROPOUT: dict[str, dict[str, float]] = {
    "opt": {"dropout": 0.1, "attention_dropout": 0.1},
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
}
ROOM = {"cpu_memory": "16MiB", "gpu_memory": "1MiB", "activations": "swap", "durability": "checkpoint"}


def with_dropout(family: str, attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    return model_of(family, attention=attention, **DROPOUT.get(family, {"attention_dropout": 0.1}))


def train(twins: Any, seed: int, **shape: int) -> None:
    """Train one step with equal random numbers. No backward may use any of them."""
    losses = twins.losses(seed, rng_seed=seed, **shape)
    for loss in losses:
        before = torch.get_rng_state()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), before)
    twins.clip(0.5)
    twins.step()


QUICK = [("llama", "sdpa"), ("mixtral", "sdpa"), ("opt", "eager")]
SLOW = [("opt", "sdpa"), ("qwen3_moe", "sdpa"), ("gpt2", "sdpa"), ("gpt2", "eager")]


@pytest.mark.parametrize(
    ("family", "attention"), [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)]
)
def test_every_place_and_random_mixtures_equal_stock(family: str, attention: str, make_twins: TwinsFactory) -> None:
    twins = make_twins(model_factory=partial(with_dropout, family, attention), recompute=True, **ROOM)
    memory, swapper = twins.engine.planned_memory, twins.engine.activations.swapper
    train(twins, 0)
    assert memory.trace.keys() == set(twins.engine.activations._layer_names.values())
    for place in Placement:
        memory.set_placements(all_in(memory.trace, place))
        before = swapper.swapped_bytes, swapper.spilled_bytes
        train(twins, 1)
        assert (swapper.swapped_bytes > before[0]) is (place in (Placement.CPU, Placement.SSD))
        assert (swapper.spilled_bytes > before[1]) is (place is Placement.SSD)
    for seed in range(NUM_MIXTURES):
        memory.set_placements(random_mixture(memory.trace, seed))
        twins.engine.activations.set_windows(fetch_ahead=1 + seed % 3, layers_leaving=2 + seed % 2)
        train(twins, 2 + seed)
    twins.assert_equal()


@pytest.mark.parametrize("mode", ["recompute", "swap", "keep", "auto"])
def test_every_mode_equals_stock(mode: str, make_twins: TwinsFactory) -> None:
    settings = {**ROOM, "activations": mode}
    twins = make_twins(model_factory=partial(with_dropout, "opt"), recompute=mode != "keep", **settings)
    for seed in range(3):
        train(twins, seed)
    twins.assert_equal()
    assert (twins.engine.activations.swapper.swapped_bytes > 0) is (mode == "swap")
    assert twins.engine.activations._device.arena._name is None, "evaluation may need the memory of a backward's block"


@pytest.mark.parametrize("make_device", [CpuDevice, AsyncDevice])
def test_what_comes_back_gets_planned_places_from_the_second_backward_on(make_device: Callable[[], Any]) -> None:
    stock = LayeredModel(lambda layer, hidden: layer.down(layer.up(hidden).relu()), lambda output, _: output)
    ours, expected, device = LayeredModel(stock.layers[0].function, stock.between), stock.gradients(), make_device()
    ours.use_tiers(Placement.CPU, device)
    assert ours.tiers is not None
    for number in range(4):
        ours.tiers.begin_forward()
        ours.zero_grad()
        assert all_equal(ours.gradients(), expected)
        # All but those of the last layer, which come back before the backward, unless a late copy used their place.
        assert 3 * number <= device.arena.num_placed <= 6 * number
        assert (device.arena.block_bytes > 0) is (number > 0)
        ours.tiers.end_backward()
        assert device.arena.block_bytes == 0
    assert getattr(device, "num_races", 0) == 0
    ours.close()


def test_blocks_of_the_arena_take_what_the_plan_counts_for_layers_that_come_back() -> None:
    """In a layer's backward these are its own tensors and those of the layer before it. The last layers swap less than
    the first, so their backward must not have the larger blocks of the first."""
    ours = LayeredModel(lambda layer, hidden: layer.down(layer.up(hidden).relu()), lambda output, _: output)
    ours.layers = nn.ModuleList(Layer(ours.layers[0].function) for _ in range(9))
    device = CpuDevice()
    ours.use_tiers(Placement.CPU, device)
    tiers, arena = ours.tiers, device.arena
    assert tiers is not None
    in_ram = dict.fromkeys(OPERATIONS, Placement.CPU)
    swapped = {str(number): in_ram if number < 5 else {INPUT: Placement.CPU} for number in range(9)}
    tiers.set_placements(swapped)
    tensor_bytes = 8 * WIDTH * 4
    planned = [tensor_bytes * len(places) for places in swapped.values()]
    memory: list[tuple[StorageWeakRef, int]] = []
    empty, place = device.empty, arena.empty

    def block_of(num_bytes: int) -> Tensor:
        block: Tensor = empty(num_bytes)
        memory.append((StorageWeakRef(block.untyped_storage()), num_bytes))
        return block

    def tensor_of(*args: Any, **form: Any) -> Tensor:
        before = arena.num_unplaced
        tensor = place(*args, **form)
        if arena.num_unplaced > before:
            memory.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))
        return tensor

    taken: list[tuple[int, int]] = []
    begin_backward = tiers.begin_backward

    def noted(frame: Any) -> None:
        begin_backward(frame)
        tiers.swapper.wait_until_idle()
        taken.append((int(frame.block_name), sum(size for storage, size in memory if not storage.expired())))

    device.empty, arena.empty, tiers.begin_backward = block_of, tensor_of, noted  # type: ignore[method-assign]
    for number in range(3):
        tiers.begin_forward()
        ours.zero_grad()
        placed = arena.num_placed
        ours.gradients()
        assert (arena.num_placed > placed) is (number > 0)
        assert {layer for layer, _ in taken} == {*range(9)}
        for layer, num_bytes in taken:
            assert num_bytes <= planned[layer] + (planned[layer - 1] if layer else 0)
        taken.clear()
        tiers.end_backward()
    ours.close()


@pytest.mark.covering(0)
@pytest.mark.parametrize(("fetch_ahead", "layers_leaving"), [(1, 2), (2, 1), (3, 3)])
def test_so_many_layers_come_back_early_and_leave_late(
    fetch_ahead: int, layers_leaving: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = LayeredModel(lambda layer, hidden: layer.down(layer.up(hidden).relu()), lambda output, _: output)
    ours = LayeredModel(stock.layers[0].function, stock.between)
    ours.use_tiers(Placement.CPU)
    assert ours.tiers is not None
    ours.tiers.set_windows(fetch_ahead=fetch_ahead, layers_leaving=layers_leaving)
    swapper, num_drained = ours.tiers.swapper, []
    drain = swapper.drain
    monkeypatch.setattr(swapper, "drain", lambda swapped: num_drained.append(len(swapped)) or drain(swapped))
    prefetched: list[str] = []
    prefetch = ours.tiers._prefetch
    monkeypatch.setattr(ours.tiers, "_prefetch", lambda frame: prefetched.append(frame.block_name) or prefetch(frame))
    expect = ours.tiers.expect_backward

    def expect_backward() -> None:
        assert not prefetched
        expect()
        assert prefetched == ["2", "1", "0"][:fetch_ahead]

    monkeypatch.setattr(ours.tiers, "expect_backward", expect_backward)
    try:
        assert all_equal(ours.gradients(), stock.gradients())
        assert len(num_drained) == max(0, len(stock.layers) - layers_leaving)
        assert {*prefetched} == {"0", "1", "2"}
    finally:
        ours.close()


class AnchorCount(TorchDispatchMode):
    """Counts matrix products and attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += anchor_name(func) is not None
        return func(*args, **(kwargs or {}))


def test_stored_activations_are_not_recomputed(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", recompute=True, **ROOM)
    memory = twins.engine.planned_memory
    train(twins, 0)
    num_run_again = sum(len(layer.recomputed) for layer in memory.trace.values())
    assert num_run_again >= 3 * 6  # all but the last product of each of three layers
    counts = {}
    for place in Placement:
        memory.set_placements(all_in(memory.trace, place))
        loss = twins.model(**tiny_batch()).loss
        with AnchorCount() as anchors:
            loss.backward()
        counts[place] = anchors.count
        twins.optimizer.zero_grad()
    assert counts.pop(Placement.RECOMPUTE) - num_run_again == min(counts.values()) == max(counts.values())


def two_dropouts(layer: Layer, hidden: Tensor) -> Tensor:
    """Attention on a GPU draws its own dropout. `native_dropout` does so on every device."""
    kept, _ = torch.native_dropout(layer.up(hidden), 0.4, True)
    return hidden + layer.down(torch.nn.functional.dropout(torch.tanh(kept), 0.3))


@pytest.mark.covering(0)
@pytest.mark.parametrize("place", [Placement.RECOMPUTE, Placement.GPU, Placement.CPU])
def test_recomputation_skips_the_random_numbers_of_stored_operations(
    place: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = torch.ops.aten.native_dropout.default
    monkeypatch.setattr(
        layer_frame, "anchor_name", lambda func: "aten.native_dropout" if func is random else anchor_name(func)
    )
    outcomes = []
    for under_tiers in (False, True):
        model = LayeredModel(two_dropouts, between=lambda after, _before: after)
        if under_tiers:
            model.use_tiers(place, None, "aten.native_dropout#0")
        torch.manual_seed(5)
        outcomes.append([*model.gradients(num_backwards=2), torch.get_rng_state()])
        model.close()
    assert all_equal(*outcomes)


@pytest.mark.parametrize("activations", ["recompute", "swap"])
def test_layers_that_ran_whole_before_chunks_were_decided_run_again_whole(
    activations: str, make_twins: TwinsFactory
) -> None:
    """Two forwards share a backward, and the second one decides."""
    twins = make_twins(recompute=True, **{**ROOM, "activations": activations})
    layers = {layer: f"model.layers.{number}" for number, layer in enumerate(twins.model.model.layers)}
    chunked = run_layers_in_chunks(twins.model, twins.engine.activations, layers)
    first = twins.losses(0)
    assert not chunked.has_cut
    chunked.cut(6)
    second = [model(**tiny_batch(seed=1)).loss for model in twins.models]
    assert chunked.has_cut
    for one, other in zip(first, second, strict=True):
        (one + other).backward()
    expected = torch.nn.utils.clip_grad_norm_(twins.stock.parameters(), 0.5)
    assert float(twins.engine.clip_grad_norm(0.5)) == pytest.approx(float(expected), rel=1e-5)
