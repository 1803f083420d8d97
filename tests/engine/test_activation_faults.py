"""After any fault between a forward and its backward, all memory and SSD space is free and the next step is right."""

from __future__ import annotations

import errno
import gc
import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from engines import PlannedError, TwinsFactory
from mixtures import all_in, random_mixture
from storage_doubles import SlowBackend
from torch import Tensor

from hf_lohan.activations.layer_frame import LayerFrame
from hf_lohan.activations.swapped_tensor import SwappedTensor
from hf_lohan.costs import Placement
from hf_lohan.files import CorruptionError, FileBackend, StorageError
from hf_lohan.testing.models import tiny_batch, tiny_model

ROOM = {"cpu_memory": "16MiB", "gpu_memory": "1MiB", "activations": "swap", "durability": "checkpoint"}
SWAPPED = pytest.mark.parametrize("place", [Placement.CPU, Placement.SSD, Placement.GPU])
FREED_WITH_GRAPH = (LayerFrame, SwappedTensor)


@pytest.fixture
def make_swapping(make_twins: TwinsFactory) -> TwinsFactory:
    """Make twins, train one step and put all activations in one place. None mixes places at random."""

    def make(place: Placement | None, **settings: Any) -> Any:
        twins = make_twins(settings.pop("family", "llama"), recompute=True, **{**ROOM, **settings})
        twins.train(1)
        memory = twins.engine.planned_memory
        memory.set_placements(random_mixture(memory.trace, 1) if place is None else all_in(memory.trace, place))
        return twins

    return make


def bytes_in_use(engine: Any) -> int:
    swapper = engine.activations.swapper
    swapper.wait_until_idle()
    on_ssd = swapper._spill
    return int(swapper._ram.bytes_in_use + (on_ssd.intervals.in_use if on_ssd is not None else 0))


def leaked() -> list[Any]:
    """Return objects that should have been freed with the graph, without the garbage collector."""
    return [thing for thing in gc.get_objects() if type(thing) in FREED_WITH_GRAPH]


def is_plain(thing: Any) -> bool:
    return type(thing) is Tensor and thing.layout is torch.strided


@SWAPPED
def test_a_loss_without_a_backward_leaks_nothing(
    place: Placement, make_swapping: TwinsFactory, no_collector: None
) -> None:
    twins = make_swapping(place)
    for seed in range(3):
        loss = twins.model(**tiny_batch(seed=seed)).loss
        assert (bytes_in_use(twins.engine) > 0) is (place is not Placement.GPU)
        assert leaked()
        del loss
        assert bytes_in_use(twins.engine) == 0
        assert leaked() == []
    twins.train(2, first_seed=300, max_norm=0.5)
    twins.assert_equal()


def test_thirty_steps_leak_nothing(make_swapping: TwinsFactory, no_collector: None) -> None:
    twins = make_swapping(None, family="qwen3_moe")
    memory = twins.engine.planned_memory
    held_bytes: list[int] = []
    for number in range(30):
        memory.set_placements(random_mixture(memory.trace, number % 3))
        twins.model(**tiny_batch(seed=number)).loss.backward()
        assert bytes_in_use(twins.engine) == 0
        if number % 6 == 5:  # listing all objects is slow
            assert leaked() == []
        twins.optimizer.step()
        twins.optimizer.zero_grad()
        if number % 6 == 5:
            twins.engine.wait_for_updates()
            held_bytes.append(sum(thing.nbytes for thing in gc.get_objects() if is_plain(thing)))
    # Prefetched blocks may differ between the two samples. A leak would be of 24 steps.
    bytes_of_a_step = sum(sum(layer.sizes().values()) for layer in memory.trace.values())
    assert held_bytes[-1] - held_bytes[0] < 3 * bytes_of_a_step


@pytest.mark.parametrize("place", [Placement.SSD, None])
def test_two_forwards_and_one_backward_equal_stock(place: Placement | None, make_swapping: TwinsFactory) -> None:
    twins = make_swapping(place)
    first, second = twins.losses(5), twins.losses(6)
    for one, other in zip(first, second, strict=True):
        (one + 2 * other).backward()
    twins.step()
    forgotten = twins.losses(7)
    for loss in twins.losses(8):
        loss.backward()
    twins.step()
    del forgotten
    twins.assert_equal()


@pytest.mark.parametrize("place", [Placement.GPU, Placement.SSD, None])
def test_two_backwards_through_one_graph_equal_stock(place: Placement | None, make_swapping: TwinsFactory) -> None:
    twins = make_swapping(place)
    for loss in twins.losses(5):
        loss.backward(retain_graph=True)
        loss.backward()
    twins.clip(0.5)
    twins.step()
    twins.assert_equal()


@pytest.mark.covering(1)
@pytest.mark.parametrize("error", [PlannedError, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["forward", "backward", "recomputation"])
def test_an_error_in_a_step_leaks_nothing(when: str, error: type[BaseException], make_swapping: TwinsFactory) -> None:
    twins = make_swapping(None)
    module = twins.model.model.layers[1].self_attn
    calls = 0

    def breaks(_module: Any, _args: Any, output: tuple[Tensor, ...]) -> None:
        nonlocal calls
        calls += 1
        if when == "forward" or (when == "recomputation" and calls == 2):
            raise error
        if when == "backward":

            def raise_planned(_gradient: Tensor) -> None:
                raise error

            output[0].register_hook(raise_planned)

    for _ in range(2):
        calls = 0
        hook = module.register_forward_hook(breaks)
        with pytest.raises(error):
            twins.model(**tiny_batch(seed=77)).loss.backward()
        hook.remove()
    twins.train(2, first_seed=300, max_norm=0.5)
    twins.assert_equal()
    gc.collect()  # an exception has references to its frames
    assert bytes_in_use(twins.engine) == 0
    assert leaked() == []


def test_evaluation_within_a_step_equals_stock(make_swapping: TwinsFactory) -> None:
    """Evaluate between a forward and its backward, in evaluation mode and in training mode without gradients."""
    twins = make_swapping(None)
    for seed in range(2):
        losses = twins.losses(seed)
        with torch.no_grad():
            twins.losses(50 + seed)
            for model in twins.models:
                model.eval()
            twins.losses(60 + seed)
            prompt = tiny_batch(seed=seed)["input_ids"][:, :4]
            settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
            texts = [model.generate(prompt, **settings) for model in twins.models]
            assert torch.equal(*texts)
            for model in twins.models:
                model.train()
        for loss in losses:
            loss.backward()
        twins.clip(0.5)
        twins.step()
    twins.assert_equal()


def test_a_first_step_without_gradients_keeps_watching(make_twins: TwinsFactory) -> None:
    """A forward under `no_grad`, or one whose loss is dropped, does not decide placements."""
    twins = make_twins("llama", recompute=True, **ROOM)
    with torch.no_grad():
        twins.losses(1)
    dropped = twins.losses(2)
    twins.step()
    del dropped
    twins.train(3)
    twins.assert_equal()
    assert twins.engine.activations.swapper.swapped_bytes > 0
    assert all(layer.candidates for layer in twins.engine.planned_memory.trace.values())


class ActivationFaults(FileBackend):
    """While armed, reads or writes of the activations' file fail, or reads have a flipped bit."""

    def __init__(self, call: str, fault: str) -> None:
        self.call, self.fault = call, fault
        self.is_armed = False
        self._fds: set[int] = set()

    def open(self, path: str, flags: int) -> int:
        fd = super().open(path, flags)
        (self._fds.add if path.endswith("activations.bin") else self._fds.discard)(fd)
        return fd

    def read(self, fd: int, offset: int, views: Sequence[memoryview]) -> int:
        self._fail("read", fd)
        num_bytes = super().read(fd, offset, views)
        if self.is_armed and fd in self._fds and self.fault == "flip":
            views[0][17] ^= 4
        return num_bytes

    def write(self, fd: int, offset: int, views: Sequence[memoryview]) -> int:
        self._fail("write", fd)
        return super().write(fd, offset, views)

    def _fail(self, call: str, fd: int) -> None:
        if self.is_armed and fd in self._fds and (call, self.fault) == (self.call, "eio"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.covering(1)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("call", "fault"), [("write", "eio"), ("read", "eio"), ("read", "flip")])
@pytest.mark.parametrize("hold_gradients", [True, False])
def test_training_continues_after_a_failure_of_the_activations_file(
    call: str, fault: str, hold_gradients: bool, make_swapping: TwinsFactory, tmp_path: Any
) -> None:
    backend = ActivationFaults(call, fault)
    settings = {"durability": "step"} if not hold_gradients else {}  # updates in backward can be undone
    twins = make_swapping(Placement.SSD, backend=backend, hold_gradients=hold_gradients, **settings)
    for _ in range(2):
        backend.is_armed = True
        with pytest.raises(CorruptionError if fault == "flip" else StorageError, match=r"activations\.bin"):
            twins.model(**tiny_batch(seed=77)).loss.backward()
        backend.is_armed = False
    twins.train(2, first_seed=300, max_norm=0.5 if hold_gradients else 0.0)
    twins.assert_equal()


def test_few_layers_have_activations_on_the_device(make_twins: TwinsFactory) -> None:
    """At most three layers have activations on the device, however slow the drive is."""
    factory = partial(tiny_model, "llama", num_layers=10)
    twins = make_twins(model_factory=factory, recompute=True, backend=SlowBackend(5e-3), **ROOM)
    twins.train(1)
    memory, activations = twins.engine.planned_memory, twins.engine.activations
    memory.set_placements(all_in(memory.trace, Placement.SSD))
    counts = {"forward": 0, "backward": 0}
    phase = "forward"

    def count(*_: Any) -> None:
        frames = [frame for frame in activations._alive() if any(_is_here(one) for one in frame.swapped)]
        counts[phase] = max(counts[phase], len(frames))

    for layer in twins.model.model.layers:
        layer.mlp.register_forward_pre_hook(count)
    loss = twins.model(**tiny_batch()).loss
    phase = "backward"
    loss.backward()
    assert 1 <= counts["forward"] <= 3, counts
    assert counts["backward"] <= 3, counts


def _is_here(swapped: SwappedTensor) -> bool:
    return swapped.source is not None or swapped.landed is not None


def test_a_backward_after_close_raises(make_swapping: TwinsFactory, caplog: pytest.LogCaptureFixture) -> None:
    """It raises at once and does not wait for an ended thread."""
    twins = make_swapping(Placement.CPU)
    loss = twins.model(**tiny_batch()).loss
    with caplog.at_level(logging.ERROR):
        twins.engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            loss.backward()
    assert not caplog.records
