"""No reader sees a guess between backward and step, or after a dropped step."""

from __future__ import annotations

import pytest
import torch
from clip_norms import CLIPS, EITHER_WAY, LETS_THROUGH, NORMS, assert_speculated, counts, train
from engines import PlannedError, TwinsFactory
from storage_doubles import SlowBackend

from hf_lohan.testing.models import tiny_batch

# Between backward and step, readers see the weights of the last step.


@pytest.mark.covering(0)
@EITHER_WAY
@pytest.mark.parametrize("gpu_memory", ["512KiB", "4MiB"], ids=["few_slots", "many_slots"])
def test_an_evaluation_between_backward_and_step_sees_no_guess(
    max_norm: float, gpu_memory: str, make_twins: TwinsFactory
) -> None:
    twins = make_twins("gpt2", _clip="speculate", gpu_memory=gpu_memory)
    for step in range(3):
        twins.backward(step)
        with torch.no_grad():
            twins.losses(50 + step)
        twins.clip(max_norm)
        twins.step()
    twins.assert_equal()


@pytest.mark.covering(0)
@EITHER_WAY
@pytest.mark.parametrize("schedule", ["optimized", "naive"])
def test_an_evaluation_right_after_a_step_sees_the_new_weights(
    max_norm: float, schedule: str, make_twins: TwinsFactory
) -> None:
    """Guesses and their second updates are still being written."""
    twins = make_twins("llama", _clip="speculate", _schedule=schedule, backend=SlowBackend(3e-3), gpu_memory="512KiB")
    for step in range(3):
        twins.train(1, first_seed=step, max_norm=max_norm)
        with torch.no_grad():
            twins.losses(50 + step)
    twins.assert_equal()
    assert_speculated(twins, [max_norm] * 3)


@EITHER_WAY
def test_a_submodule_called_between_backward_and_step_sees_no_guess(max_norm: float, make_twins: TwinsFactory) -> None:
    """The hooks of the whole model's forward, which undo guesses, do not run."""
    twins = make_twins("llama", _clip="speculate", gpu_memory="512KiB")
    for step in range(3):
        twins.backward(step)
        with torch.no_grad():
            hidden = [model.model(tiny_batch(seed=7)["input_ids"]).last_hidden_state for model in twins.models]
        assert torch.equal(hidden[0], hidden[1])
        twins.clip(max_norm)
        twins.step()
    twins.assert_equal()


@pytest.mark.covering(0)
@EITHER_WAY
@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
def test_a_second_backward_without_a_forward_sees_no_guess(
    recompute: bool, max_norm: float, make_twins: TwinsFactory
) -> None:
    twins = make_twins("llama", _clip="speculate", recompute=recompute, gpu_memory="512KiB")
    for step in range(3):
        for loss in twins.losses(step):
            loss.backward(retain_graph=True)
            loss.backward()
        twins.clip(max_norm)
        twins.step()
    twins.assert_equal()


@EITHER_WAY
def test_hyperparameters_set_between_backward_and_step_are_used(max_norm: float, make_twins: TwinsFactory) -> None:
    twins = make_twins("opt", _clip="speculate")
    for step in range(3):
        twins.backward(step)
        twins.clip(max_norm)
        for group in (*twins.stock_optimizer.param_groups, *twins.optimizer.param_groups):
            group["lr"] = 1e-3 / (step + 1)
            group["weight_decay"] += 0.1
        twins.step()
    twins.assert_equal()
    # A guess that was wrong without clipping shows that the loop changes hyperparameters, so guessing ends.
    assert counts(twins) == ((3, 3) if max_norm == CLIPS else (1, 1))


def test_weights_loaded_between_backward_and_step_stay_loaded(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", _clip="speculate")
    twins.train(1)
    twins.backward(5)
    name, loaded = "model.norm.weight", torch.full((64,), 0.5)
    twins.engine.parameters.write_parameter(name, loaded)
    twins.engine.forget_weights()
    twins.stock.get_parameter(name).data.copy_(loaded)
    twins.clip(CLIPS)
    twins.step()
    twins.assert_equal()


# Dropped steps.


def test_a_guess_that_zero_grad_drops_changes_nothing(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", _clip="speculate")
    twins.train(1, max_norm=LETS_THROUGH)
    for seed in (7, 8):
        twins.backward(seed)
        for optimizer in (twins.stock_optimizer, twins.optimizer):
            optimizer.zero_grad()
        twins.assert_equal()
    assert twins.engine.undone_update_s > 0
    train(twins, NORMS["some_steps_clip"])
    twins.assert_equal()
    assert counts(twins) == (5, 2)


@pytest.mark.covering(0)
@EITHER_WAY
@pytest.mark.parametrize("place", ["model.layers.0.mlp", "model.layers.1.self_attn.o_proj", "model.norm"])
def test_a_failed_backward_undoes_its_guesses(place: str, max_norm: float, make_twins: TwinsFactory) -> None:
    def raise_planned(_gradient: torch.Tensor) -> None:
        raise PlannedError

    twins = make_twins("llama", _clip="speculate", backend=SlowBackend(2e-4))
    twins.train(1, max_norm=max_norm)
    module = twins.model.get_submodule(place)
    for _ in range(2):
        hook = module.register_forward_hook(lambda _m, _a, output: output.register_hook(raise_planned) and None)
        loss = twins.model(**tiny_batch(seed=77)).loss
        hook.remove()
        with pytest.raises(PlannedError):
            loss.backward()
    twins.train(2, first_seed=300, max_norm=max_norm)
    twins.assert_equal()
    assert counts(twins) == (3, 3 if max_norm == CLIPS else 0)
    assert twins.engine.undone_update_s > 0
