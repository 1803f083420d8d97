"""A step whose gradients are not finite changes nothing. Too many in a row end the run and name the parameter."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clip_norms import CLIPS, LETS_THROUGH
from engines import TwinsFactory

from hf_lohan.device import Buffer
from hf_lohan.testing.models import tiny_batch
from hf_lohan.updates import NonFiniteGradientError

NAN, INF = float("nan"), float("inf")
EARLY, LATE = "model.layers.0.mlp.up_proj.weight", "model.layers.2.self_attn.q_proj.weight"
WAYS = {
    "defer": {"hold_gradients": True, "_clip": "defer"},
    "speculate": {"hold_gradients": True, "_clip": "speculate"},
    "in_backward": {"hold_gradients": False},
}
WAY = pytest.mark.parametrize("way", WAYS)


@contextmanager
def spoiled(model: Any, value: float, *names: str) -> Iterator[None]:
    """Set one element of the gradient of each named parameter to `value`."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        spoiled_gradient = gradient.clone()
        spoiled_gradient.view(-1)[-1] = value
        return spoiled_gradient

    hooks = [model.get_parameter(name).register_hook(spoil) for name in names]
    yield
    for hook in hooks:
        hook.remove()


def take_bad_step(twins: Any, value: float, *names: str, max_norm: float = CLIPS) -> None:
    """Take a step only with the engine. It must still equal its twin, which does not take the step."""
    with spoiled(twins.model, value, *names):
        twins.model(**tiny_batch(seed=77)).loss.backward()
    if twins.engine.layout.holds_gradients:
        assert not twins.engine.clip_grad_norm(max_norm).isfinite()
    twins.optimizer.step()
    twins.optimizer.zero_grad()


def train(twins: Any, num_steps: int, *, first_seed: int) -> None:
    twins.train(num_steps, first_seed=first_seed, max_norm=CLIPS if twins.engine.layout.holds_gradients else 0.0)


@pytest.mark.covering(1)
@WAY
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("schedule", ["optimized", "naive", "serial"])
def test_a_skipped_step_changes_no_bit(schedule: str, value: float, way: str, make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", _schedule=schedule, **WAYS[way])
    take_bad_step(twins, value, EARLY)  # the very first step
    twins.assert_equal()
    train(twins, 2, first_seed=100)
    assert not twins.optimizer.step_was_skipped
    for bad in range(2):
        take_bad_step(twins, value, EARLY, max_norm=LETS_THROUGH if bad else CLIPS)
        assert twins.optimizer.step_was_skipped
        twins.assert_equal()
    train(twins, 2, first_seed=200)
    assert not twins.optimizer.step_was_skipped
    twins.assert_equal()
    assert twins.engine.skipped_steps.total == 3
    num_clipped = 4 if twins.engine.layout.holds_gradients else 0
    assert twins.engine.clip_history.clip_rate == num_clipped / 7  # skipped steps do not count as clipped


def test_a_step_is_skipped_if_only_the_sum_is_not_finite(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama")
    twins.train(1, max_norm=CLIPS)
    with spoiled(twins.model, 3e38, LATE):
        for seed in (77, 78):
            twins.model(**tiny_batch(seed=seed)).loss.backward()
    assert not twins.engine.clip_grad_norm(CLIPS).isfinite()
    twins.optimizer.step()
    twins.optimizer.zero_grad()
    assert twins.optimizer.step_was_skipped
    twins.train(1, first_seed=200, max_norm=CLIPS)
    twins.assert_equal()


@pytest.mark.parametrize("is_final_bad", [True, False])
def test_a_step_is_skipped_if_one_of_several_backwards_is_not_finite(
    is_final_bad: bool, make_twins: TwinsFactory
) -> None:
    twins = make_twins("llama", _clip="speculate")
    twins.train(1, max_norm=CLIPS)
    for number in range(2):
        twins.engine.announce_backward(is_final=number == 1)
        with spoiled(twins.model, NAN if bool(number) == is_final_bad else 0.0, EARLY):
            twins.model(**tiny_batch(seed=77 + number)).loss.backward()
    twins.engine.clip_grad_norm(CLIPS)
    twins.optimizer.step()
    twins.optimizer.zero_grad()
    assert twins.optimizer.step_was_skipped
    twins.train(1, first_seed=200, max_norm=CLIPS)
    twins.assert_equal()


@WAY
def test_too_many_skipped_steps_name_the_first_parameter_in_model_order(way: str, make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", max_skipped_steps=3, **WAYS[way])
    train(twins, 1, first_seed=100)
    for _ in range(2):
        take_bad_step(twins, NAN, LATE, EARLY)
    with pytest.raises(NonFiniteGradientError, match=rf"{EARLY} is not finite.*3 steps in a row.*max_skipped_steps=3"):
        take_bad_step(twins, NAN, LATE, EARLY)
    twins.optimizer.zero_grad()
    twins.assert_equal()  # the store has the last good step


def test_a_good_step_resets_the_count(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", max_skipped_steps=2)
    for round_number in range(3):
        take_bad_step(twins, NAN, EARLY)
        twins.train(1, first_seed=round_number, max_norm=CLIPS)
    twins.assert_equal()
    assert twins.engine.skipped_steps.total == 3
    take_bad_step(twins, NAN, LATE)
    with pytest.raises(NonFiniteGradientError, match=LATE):
        take_bad_step(twins, NAN, LATE)


def test_skipped_steps_change_nothing_in_a_store_without_versions(make_twins: TwinsFactory) -> None:
    """Held gradients can be dropped without a second version of the records."""
    twins = make_twins("llama", durability="checkpoint")
    twins.train(1, max_norm=CLIPS)
    take_bad_step(twins, NAN, EARLY)
    twins.train(1, first_seed=200, max_norm=CLIPS)
    twins.assert_equal()


@pytest.mark.parametrize("parked", [0.0, 1.0])
def test_updates_that_cannot_be_undone_refuse_gradients_that_are_not_finite(
    parked: float, make_twins: TwinsFactory, tmp_path: Path
) -> None:
    """Updates run in place, so the run ends before it writes a value that is not finite, and before the step ends."""
    settings = {"activations": "swap", "cpu_memory": "8MiB", "recompute": True, "sums_gradients": False}
    twins = make_twins("llama", hold_gradients=False, durability="checkpoint", _parked=parked, **settings)
    twins.train(1)
    twins.engine.wait_for_updates()
    with pytest.raises(NonFiniteGradientError, match=rf"{EARLY} is not finite.*durability='step'"):
        take_bad_step(twins, NAN, EARLY)
    twins.engine.close()
    written = np.fromfile(tmp_path / "store" / "records-0.bin", np.float32)
    assert np.isfinite(written).all()


@pytest.mark.covering(0)
@pytest.mark.parametrize("durability", ["step", "checkpoint"])
@WAY
def test_uninitialized_memory_in_buffers_does_not_count(
    way: str, durability: str, make_twins: TwinsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = make_twins("llama", durability=durability, **WAYS[way])
    pool = twins.engine.tiers.gradients
    acquire_within, num_dirty = pool.acquire_within, Counter[str]()

    def acquire_dirty(timeout_s: float | None, *, half: bool = False) -> Buffer | None:
        buffer = acquire_within(timeout_s, half=half)
        if buffer is not None:
            buffer.bytes.fill_(0xFF)  # NaN
            num_dirty[threading.current_thread().name] += 1
        return buffer

    monkeypatch.setattr(pool, "acquire_within", acquire_dirty)
    for model in twins.models:
        model.get_parameter("model.layers.1.input_layernorm.weight").requires_grad_(False)
    train(twins, 2, first_seed=100)
    assert num_dirty["MainThread"] > 0
    twins.assert_equal()


def test_a_norm_that_overflows_does_not_skip_a_step_applied_in_place(make_twins: TwinsFactory) -> None:
    """Each element is finite, and only the float32 norm overflows. Torch applies such a step."""
    twins = make_twins("llama", hold_gradients=False, durability="checkpoint")
    for model in twins.models:
        with spoiled(model, 1e30, EARLY):
            model(**tiny_batch(seed=77)).loss.backward()
    twins.step()
    assert not twins.optimizer.step_was_skipped
    twins.assert_equal()
