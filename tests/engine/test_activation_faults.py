"""Whatever happens between a forward and its backward: places come back, memory is freed, the next step is right."""

from __future__ import annotations

import errno
import gc
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from mixtures import all_in, random_mixture
from torch import Tensor

from hf_lohan.activations.layer_frame import LayerFrame
from hf_lohan.activations.swapped_tensor import SwappedTensor
from hf_lohan.files import CorruptionError, FileBackend, StorageError
from hf_lohan.planner import Placement
from hf_lohan.testing.models import tiny_batch, tiny_model
from hf_lohan.testing.storage_doubles import SlowBackend

TwinsFactory = Callable[..., Any]
ROOM = {"cpu_memory": "16MiB", "gpu_memory": "1MiB", "activations": "swap", "durability": "checkpoint"}
SWAPPED = pytest.mark.parametrize("place", [Placement.CPU, Placement.SSD, Placement.GPU])
KEPT_BY_NOBODY = (LayerFrame, SwappedTensor)


@pytest.fixture
def make_swapping(make_twins: TwinsFactory) -> TwinsFactory:
    """Twins after one step, whose activations all go to one place; None mixes places at random."""

    def make(place: Placement | None, **settings: Any) -> Any:
        twins = make_twins(settings.pop("family", "llama"), recompute=True, **{**ROOM, **settings})
        twins.train(1)
        memory = twins.engine.planned_memory
        memory.set_placements(random_mixture(memory.trace, 1) if place is None else all_in(memory.trace, place))
        return twins

    return make


def places_in_use(engine: Any) -> int:
    swapper = engine.activations.swapper
    swapper.wait_until_idle()
    on_ssd = swapper._spill
    return int(swapper._ram.bytes_in_use + (on_ssd.intervals.in_use if on_ssd is not None else 0))


def left_behind() -> list[Any]:
    """What should have gone with the graph, without the collector's help."""
    return [thing for thing in gc.get_objects() if type(thing) in KEPT_BY_NOBODY]


def is_plain(thing: Any) -> bool:
    return type(thing) is Tensor and thing.layout is torch.strided


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Reference counts must do."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@SWAPPED
def test_a_loss_that_is_never_backwarded(place: Placement, make_swapping: TwinsFactory, no_collector: None) -> None:
    twins = make_swapping(place)
    for seed in range(3):
        loss = twins.model(**tiny_batch(seed=seed)).loss
        assert (places_in_use(twins.engine) > 0) is (place is not Placement.GPU)
        assert left_behind()
        del loss
        assert places_in_use(twins.engine) == 0
        assert left_behind() == []
    twins.train(2, first_seed=300, max_norm=0.5)
    twins.assert_equal()


def test_thirty_steps_leave_nothing(make_swapping: TwinsFactory, no_collector: None) -> None:
    twins = make_swapping(None, family="qwen3_moe")
    memory = twins.engine.planned_memory
    held_bytes: list[int] = []
    for number in range(30):
        memory.set_placements(random_mixture(memory.trace, number % 3))
        twins.model(**tiny_batch(seed=number)).loss.backward()
        assert places_in_use(twins.engine) == 0
        if number % 6 == 5:  # looking at all objects takes its time
            assert left_behind() == []
        twins.optimizer.step()
        twins.optimizer.zero_grad()
        if number % 6 == 5:
            twins.engine.wait_for_updates()
            held_bytes.append(sum(thing.nbytes for thing in gc.get_objects() if is_plain(thing)))
    # Reads ahead are under way at any time. A leak would be of 24 steps.
    bytes_of_a_step = sum(sum(layer.sizes().values()) for layer in memory.trace.values())
    assert held_bytes[-1] - held_bytes[0] < 3 * bytes_of_a_step


@pytest.mark.parametrize("place", [Placement.SSD, None])
def test_two_forwards_and_one_backward(place: Placement | None, make_swapping: TwinsFactory) -> None:
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
def test_a_graph_that_is_walked_twice(place: Placement | None, make_swapping: TwinsFactory) -> None:
    twins = make_swapping(place)
    for loss in twins.losses(5):
        loss.backward(retain_graph=True)
        loss.backward()
    twins.clip(0.5)
    twins.step()
    twins.assert_equal()


class PlannedError(Exception):
    """Raised on purpose."""


@pytest.mark.parametrize("error", [PlannedError, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["forward", "backward", "recomputation"])
def test_a_step_that_breaks_in_the_middle(when: str, error: type[BaseException], make_swapping: TwinsFactory) -> None:
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
    gc.collect()  # an exception holds the frames that it went through
    assert places_in_use(twins.engine) == 0
    assert left_behind() == []


def test_evaluation_between_steps(make_swapping: TwinsFactory) -> None:
    """In evaluation mode, in training mode without gradients, and between a forward and its backward."""
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
    """Under no_grad, or with a loss that is dropped, there is nothing to decide by."""
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
    """While armed, what is read from or written to the activations' file fails, or has a bit flipped."""

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


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("call", "fault"), [("write", "eio"), ("read", "eio"), ("read", "flip")])
@pytest.mark.parametrize("hold_gradients", [True, False])
def test_a_drive_that_fails_under_the_activations(
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


def test_a_slow_drive(make_swapping: TwinsFactory) -> None:
    twins = make_swapping(Placement.SSD, backend=SlowBackend(2e-3))
    twins.train(2, first_seed=300, max_norm=0.5)
    twins.assert_equal()


def test_few_layers_have_activations_on_the_device(make_twins: TwinsFactory) -> None:
    """However slow the drive: two that leave and one that computes; and in backward one, and the one below it."""
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


def test_after_the_end(make_swapping: TwinsFactory, caplog: pytest.LogCaptureFixture) -> None:
    """A backward over a closed engine says so; it does not wait for a thread that is gone."""
    twins = make_swapping(Placement.CPU)
    loss = twins.model(**tiny_batch()).loss
    with caplog.at_level(logging.ERROR):
        twins.engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            loss.backward()
    assert not caplog.records
