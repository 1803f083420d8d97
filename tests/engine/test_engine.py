"""Whatever the training loop does, the engine equals torch in memory bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from engines import HELD_OR_ACTIVE, EngineFactory, TwinsFactory
from eventually import check_buffers_return
from storage_doubles import SlowBackend

from hf_lohan.compat.torch_private import without_torch_function
from hf_lohan.testing.models import FAMILIES, tiny_batch, tiny_model


@HELD_OR_ACTIVE
def test_skipped_layers_are_not_updated(hold_gradients: bool, make_twins: TwinsFactory) -> None:
    """OPT drops whole layers at random. Their parameters have no gradient and take no step."""
    twins = make_twins(model_factory=partial(tiny_model, "opt", layerdrop=0.7), hold_gradients=hold_gradients)
    for step in range(8):
        twins.backward(batch_seed=step, rng_seed=step)
        if hold_gradients:
            twins.clip(0.5)
        twins.step()
    twins.assert_equal()
    counts = set(twins.engine.step_counts.values())
    assert len(counts) > 2


@HELD_OR_ACTIVE
def test_single_parameters_without_a_gradient_are_not_updated(hold_gradients: bool, make_twins: TwinsFactory) -> None:
    """As in torch, these parameters have no weight decay, no decay of moments and no step, although others in their
    chunk do.
    """
    twins = make_twins("llama", hold_gradients=hold_gradients)
    now_and_then = ("model.layers.1.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight")
    for step in range(5):
        for model in twins.models:
            for name in now_and_then:
                model.get_parameter(name).requires_grad_(step % 2 == 0)
        twins.backward(batch_seed=step)
        if hold_gradients:
            twins.clip(0.5)
        twins.step()
    twins.assert_equal()
    counts = {part.name: count for part, count in twins.engine.step_counts.items()}
    assert {counts.pop(name) for name in now_and_then} == {3}
    assert set(counts.values()) == {5}


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_equals_stock(family: str, make_twins: TwinsFactory) -> None:
    twins = make_twins(family)
    twins.train(1)
    generated = []
    for model in twins.models:
        model.eval()
        ids = tiny_batch(sequence_length=5)["input_ids"]
        generated.append(
            model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=True, pad_token_id=0, eos_token_id=None)
        )
    assert torch.equal(generated[0], generated[1])
    assert generated[0].shape == (2, 13)


@HELD_OR_ACTIVE
def test_evaluation_between_steps_uses_the_new_weights_and_changes_nothing(
    hold_gradients: bool, make_twins: TwinsFactory
) -> None:
    twins = make_twins("gpt2", hold_gradients=hold_gradients)
    for step in range(3):
        twins.train(1, first_seed=step)
        with torch.no_grad():
            twins.losses(50 + step)
        with torch.inference_mode():
            twins.losses(60 + step)
    twins.assert_equal()


def test_gradients_that_zero_grad_drops_change_nothing(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama")
    twins.train(1)
    twins.backward(7)
    for optimizer in (twins.stock_optimizer, twins.optimizer):
        optimizer.zero_grad()
    twins.train(2, first_seed=200, max_norm=0.5)
    twins.assert_equal()


def test_computing_the_norm_changes_nothing(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", hold_gradients=False)
    twins.backward(1)
    twins.clip(float("inf"))
    twins.step()
    twins.assert_equal()


@pytest.mark.covering(1)
@pytest.mark.parametrize("schedule", ["optimized", "naive", "serial"])
@pytest.mark.parametrize("delay_s", [0.0, 2e-3], ids=["fast", "slow"])
def test_held_updates_use_the_hyperparameters_of_their_own_step(
    delay_s: float, schedule: str, make_twins: TwinsFactory
) -> None:
    """Updates may run during the next forward, after the scheduler and `zero_grad`."""
    twins = make_twins("opt", backend=SlowBackend(delay_s), _schedule=schedule)
    for step in range(4):
        twins.backward(step)
        twins.clip(0.3)
        for optimizer in (twins.stock_optimizer, twins.optimizer):
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
                group["weight_decay"] += 0.1
            optimizer.zero_grad()
    twins.assert_equal()


@pytest.mark.covering(0)
@HELD_OR_ACTIVE
@pytest.mark.parametrize("cpu_memory", ["2MiB", "3MiB", "6MiB", "64MiB"])
def test_pools_never_exceed_the_budgets(cpu_memory: str, hold_gradients: bool, make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", cpu_memory=cpu_memory, gpu_memory="512KiB", hold_gradients=hold_gradients)
    twins.train(3, max_norm=0.5 if hold_gradients else 0.0)
    twins.assert_equal()
    engine, plan = twins.engine, twins.engine.layout.plan
    assert 0 < engine.tiers.peak_cpu_pool_bytes <= plan.cpu_pool_bytes <= engine.config.cpu_memory
    assert engine.layout.cpu_bytes + engine.layout.activation_bytes <= engine.config.cpu_memory
    assert 0 < engine.peak_gpu_pool_bytes <= plan.gpu_pool_bytes <= engine.config.gpu_memory
    engine.wait_for_updates()
    for pool in engine.tiers.pools[1:]:
        check_buffers_return(pool)


def test_weights_and_gradients_cannot_be_read_outside_the_model(build_engine: EngineFactory) -> None:
    model = tiny_model("llama").train()
    engine = build_engine(model)
    model(**tiny_batch()).loss.backward()
    for name, parameter in model.named_parameters():
        with pytest.raises(RuntimeError, match="in the store"):
            parameter.data.zero_()
        with pytest.raises(RuntimeError, match="gradient"):
            parameter.grad.sum()
        with without_torch_function():  # code that bypasses the refusal reads NaN
            assert parameter.isnan().all(), name
            assert parameter.untyped_storage().nbytes() == parameter.itemsize
            assert torch.Tensor.grad.__get__(parameter) is None
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="engine of this model is closed"):
        model(**tiny_batch())
    with pytest.raises(RuntimeError, match="closed"):
        engine.wait_for_updates()


@HELD_OR_ACTIVE
def test_frozen_weights_do_not_change_and_have_no_states(hold_gradients: bool, make_twins: TwinsFactory) -> None:
    def half_frozen() -> Any:
        model = tiny_model("llama")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" in name or "layers.0." in name)
        return model

    twins = make_twins(model_factory=half_frozen, hold_gradients=hold_gradients)
    twins.train(3, max_norm=0.5 if hold_gradients else 0.0)
    twins.assert_equal()
    stored = {(spec.block, spec.kind) for spec in twins.engine.layout.records}
    assert ("model.embed_tokens", "param") in stored and ("model.embed_tokens", "exp_avg") not in stored
