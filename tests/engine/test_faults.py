"""After any exception, training continues as if the failed step had never begun."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from engines import PlannedError, TwinsFactory
from storage_doubles import FaultyBackend
from torch import Tensor, nn

from hf_lohan.files import StorageError
from hf_lohan.testing.models import tiny_batch

NEVER = 1 << 60
RECOMPUTE = pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
PLACES = {
    "embedding": lambda model: model.model.embed_tokens,
    "in_first_layer": lambda model: model.model.layers[0].mlp,
    "in_middle_layer": lambda model: model.model.layers[1].self_attn.o_proj,
    "after_last_layer": lambda model: model.model.norm,
    "head": lambda model: model.lm_head,
}
PLACE = pytest.mark.parametrize("place", PLACES)


@contextmanager
def forward_fails_at(module: nn.Module) -> Iterator[None]:
    def raise_planned(*_: Any) -> None:
        raise PlannedError

    hook = module.register_forward_hook(raise_planned)
    with pytest.raises(PlannedError):
        yield
    hook.remove()


@contextmanager
def backward_fails_at(module: nn.Module) -> Iterator[None]:
    """Raise when the gradient of the module's output arrives."""

    def raise_planned(_gradient: Tensor) -> None:
        raise PlannedError

    def arm(_module: nn.Module, _args: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if output.requires_grad:
            output.register_hook(raise_planned)

    hook = module.register_forward_hook(arm)
    with pytest.raises(PlannedError):
        yield
    hook.remove()


@pytest.mark.covering(1)
@PLACE
@RECOMPUTE
@pytest.mark.parametrize("hold_gradients", [True, False], ids=["held", "active"])
def test_a_failed_forward_changes_nothing(
    place: str, recompute: bool, hold_gradients: bool, make_twins: TwinsFactory
) -> None:
    twins = make_twins("llama", recompute=recompute, hold_gradients=hold_gradients)
    twins.train(1)
    for _ in range(2):
        with forward_fails_at(PLACES[place](twins.model)):
            twins.model(**tiny_batch(seed=77))
    twins.train(2, first_seed=300)
    twins.assert_equal()


@PLACE
def test_a_failed_forward_keeps_earlier_gradients_of_its_step(place: str, make_twins: TwinsFactory) -> None:
    twins = make_twins("llama")
    twins.train(1)
    twins.backward(5, scale=0.5)
    with forward_fails_at(PLACES[place](twins.model)):
        twins.model(**tiny_batch(seed=77))
    twins.backward(6, scale=0.5)
    twins.clip(0.5)
    twins.step()
    twins.assert_equal()


@PLACE
def test_a_failed_evaluation_changes_nothing(place: str, make_twins: TwinsFactory) -> None:
    twins = make_twins("llama")
    twins.train(1)
    with torch.no_grad(), forward_fails_at(PLACES[place](twins.model)):
        twins.model(**tiny_batch(seed=77))
    with torch.no_grad():
        twins.losses(8)
    twins.train(1, first_seed=300)
    twins.assert_equal()


@pytest.mark.covering(0)
@RECOMPUTE
@pytest.mark.parametrize("place", [place for place in PLACES if place != "embedding"])
def test_a_failed_backward_drops_its_step(
    place: str, recompute: bool, make_twins: TwinsFactory, caplog: pytest.LogCaptureFixture
) -> None:
    twins = make_twins("llama", recompute=recompute)
    twins.train(1)
    for _ in range(2):
        with backward_fails_at(PLACES[place](twins.model)):
            twins.model(**tiny_batch(seed=77)).loss.backward()
    with caplog.at_level(logging.WARNING):
        twins.train(2, first_seed=300, max_norm=0.5)
    if place != "head":  # no gradient arrives before the head's
        assert "the gradients of its step are dropped" in caplog.text
    twins.assert_equal()


@pytest.mark.parametrize("drops", [True, False])
def test_a_failed_backward_drops_earlier_gradients_of_its_step(drops: bool, make_twins: TwinsFactory) -> None:
    """Half of a sum would be a wrong number. A careful loop calls `zero_grad` in its `except`."""
    twins = make_twins("llama")
    twins.train(1)
    twins.model(**tiny_batch(seed=5)).loss.backward()
    with backward_fails_at(twins.model.model.layers[0].mlp):
        twins.model(**tiny_batch(seed=77)).loss.backward()
    if drops:
        twins.optimizer.zero_grad()
    twins.train(2, first_seed=300, max_norm=0.5)
    twins.assert_equal()


def test_updates_in_backward_that_cannot_be_undone_are_logged(
    make_twins: TwinsFactory, caplog: pytest.LogCaptureFixture
) -> None:
    twins = make_twins("llama", hold_gradients=False, durability="checkpoint")
    twins.train(1)
    with backward_fails_at(twins.model.model.layers[0].mlp):
        twins.model(**tiny_batch(seed=77)).loss.backward()
    with caplog.at_level(logging.WARNING):
        loss = twins.model(**tiny_batch(seed=78)).loss
    assert "the step had already updated" in caplog.text
    loss.backward()
    twins.optimizer.step()
    twins.engine.wait_for_updates()
    counts = {part.name: count for part, count in twins.engine.step_counts.items()}
    assert counts["lm_head.weight"] == 3  # the update of the failed step counts
    assert counts["model.layers.0.self_attn.q_proj.weight"] == 2
    assert torch.isfinite(loss)


@pytest.mark.covering(1)
@RECOMPUTE
@pytest.mark.parametrize("schedule", ["optimized", "naive"])
@pytest.mark.parametrize("place", ["in_first_layer", "in_middle_layer", "after_last_layer"])
def test_updates_in_backward_are_undone_with_their_step(
    place: str, schedule: str, recompute: bool, make_twins: TwinsFactory, caplog: pytest.LogCaptureFixture
) -> None:
    twins = make_twins("llama", hold_gradients=False, recompute=recompute, _schedule=schedule)
    twins.train(1)
    for _ in range(2):
        with backward_fails_at(PLACES[place](twins.model)):
            twins.model(**tiny_batch(seed=77)).loss.backward()
    with caplog.at_level(logging.WARNING), torch.no_grad():
        twins.losses(8)  # the evaluation uses the weights from before the failed step
    assert "the gradients of its step are dropped" in caplog.text
    assert "the step had already updated" not in caplog.text
    assert twins.engine.undone_update_s > 0
    twins.assert_equal()
    twins.train(2, first_seed=300)
    twins.assert_equal()


@pytest.mark.covering(1)
@pytest.mark.parametrize("when", ["before_forward", "before_backward", "before_evaluation"])
@RECOMPUTE
def test_training_continues_after_reads_fail_for_a_while(when: str, recompute: bool, make_twins: TwinsFactory) -> None:
    backend = FaultyBackend("read", NEVER, errno.EIO, sticky=True)
    twins = make_twins("llama", recompute=recompute, backend=backend, gpu_memory="600KiB")
    twins.train(1)
    twins.engine.wait_for_updates()  # a failed update would stop the run
    for _ in range(2):
        with pytest.raises(StorageError) as failed, torch.set_grad_enabled(when != "before_evaluation"):
            if when == "before_backward":
                loss = twins.model(**tiny_batch(seed=77)).loss
                backend.fail_on = 1
                loss.backward()
            else:
                backend.fail_on = 1
                twins.model(**tiny_batch(seed=77))
        assert failed.value.errno == errno.EIO
        backend.fail_on = NEVER
    twins.train(2, first_seed=300, max_norm=0.5)
    twins.assert_equal()


@pytest.mark.parametrize("call", ["read", "write"])
def test_a_drive_that_fails_in_the_update_stops_the_step(call: str, make_twins: TwinsFactory) -> None:
    backend = FaultyBackend(call, NEVER, errno.EIO, sticky=True)
    # Nothing is spilled, and nothing is read from RAM.
    twins = make_twins("llama", cpu_memory="64MiB", _resident_records="none", backend=backend)
    twins.train(1)
    twins.model(**tiny_batch(seed=77)).loss.backward()
    backend.fail_on = 1
    with pytest.raises(StorageError) as failed:
        twins.optimizer.step()
        twins.engine.wait_for_updates()
    assert failed.value.errno == errno.EIO
    backend.fail_on = NEVER
    with pytest.raises(StorageError):  # after half an update the run cannot continue
        twins.model(**tiny_batch(seed=78)).loss.backward()
        twins.optimizer.step()
        twins.engine.wait_for_updates()


def test_a_block_whose_update_could_not_be_written_is_not_read(make_twins: TwinsFactory) -> None:
    """The last write of a step fails. An evaluation must not use the old weights. It may use the new ones from RAM, and
    then a read from the store raises.
    """
    backend = FaultyBackend("write", NEVER, errno.EIO)
    # Nothing is spilled or written twice, so all writes are updates and each step has the same number of writes.
    twins = make_twins("llama", cpu_memory="64MiB", _clip="defer", backend=backend)
    twins.train(1)
    twins.engine.wait_for_updates()
    before = backend.calls["write"]
    twins.train(1)
    twins.engine.wait_for_updates()
    num_writes = backend.calls["write"] - before
    twins.backward(5)
    backend.fail_on = backend.calls["write"] + num_writes
    with pytest.raises(StorageError), torch.no_grad():
        twins.step()
        twins.losses(6)  # these equal stock torch after the same step, if they are returned
        twins.engine.wait_for_updates()
