"""The engine refuses calls that would train on other numbers than the loop intends, and gives the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import HELD_OR_ACTIVE, EngineFactory, TwinsFactory
from torch import Tensor

from hf_lohan.optim import OffloadAdamW
from hf_lohan.testing.models import tiny_batch, tiny_model


def test_a_layer_called_outside_its_model_is_refused(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama")
    ids = tiny_batch()["input_ids"]
    with pytest.raises(RuntimeError, match="outside its model's forward"):
        twins.model.model(ids)
    with torch.no_grad():  # nothing is saved for backward
        hidden = [model.model(ids).last_hidden_state for model in twins.models]
    assert torch.equal(hidden[0], hidden[1])
    twins.train(2)
    twins.assert_equal()


@pytest.mark.parametrize("mode", ["jit", "jit_without_gradients", "module"])
def test_tracing_by_torch_is_refused(mode: str, make_twins: TwinsFactory) -> None:
    twins = make_twins("llama")
    ids, trace = tiny_batch()["input_ids"], torch.jit.trace_module if mode == "module" else torch.jit.trace
    inputs = {"forward": ids} if mode == "module" else ids
    with torch.set_grad_enabled(mode == "jit"), pytest.raises(RuntimeError, match=r"in torch.jit.trace.*in memory"):
        trace(twins.model, inputs, strict=False)
    twins.train(1)
    twins.assert_equal()


def test_a_second_forward_is_refused_after_the_first_gradient_was_applied(build_engine: EngineFactory) -> None:
    model = tiny_model("llama").train()
    engine = build_engine(model, hold_gradients=False)
    OffloadAdamW(model.parameters(), engine=engine)
    model(**tiny_batch(seed=1)).loss.backward()
    with pytest.raises(RuntimeError, match=r"between backward and step\(\).*max_grad_norm > 0"):
        model(**tiny_batch(seed=2))


def test_a_second_backward_is_refused_after_the_first_gradient_was_applied(build_engine: EngineFactory) -> None:
    model = tiny_model("llama").train()
    engine = build_engine(model, hold_gradients=False)
    OffloadAdamW(model.parameters(), engine=engine)
    loss = model(**tiny_batch(seed=1)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"second gradient of .* arrived.*max_grad_norm > 0"):
        loss.backward()
        engine.step()
        engine.wait_for_updates()


def test_accumulation_is_refused_if_gradients_are_not_held(build_engine: EngineFactory) -> None:
    """Backward would fill all gradient buffers and wait forever."""
    model = tiny_model("llama").train()
    engine = build_engine(model, hold_gradients=False)
    optimizer = OffloadAdamW(model.parameters(), engine=engine)
    engine.announce_backward(is_final=False)
    with pytest.raises(RuntimeError, match=r"accumulated, .* gradient_accumulation_steps .*max_grad_norm > 0"):
        model(**tiny_batch(seed=1)).loss.backward()
    engine.announce_backward(is_final=True)
    model(**tiny_batch(seed=2)).loss.backward()
    optimizer.step()
    engine.wait_for_updates()  # the pipeline's thread counts the steps
    assert engine.step_counts[engine.parameter_slices[0]] == 1


@HELD_OR_ACTIVE
def test_a_gradient_without_a_group_is_refused(hold_gradients: bool, build_engine: EngineFactory) -> None:
    model = tiny_model("llama").train()
    engine = build_engine(model, hold_gradients=hold_gradients)
    left_out = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=f"{left_out} requires a gradient but is in no param group"):
        OffloadAdamW([p for name, p in model.named_parameters() if name != left_out], engine=engine)


def test_parameters_that_are_not_in_the_store_are_refused(build_engine: EngineFactory) -> None:
    model = tiny_model("llama")
    engine = build_engine(model)
    foreign = torch.nn.Parameter(torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"shape \(3, 4\) is not in the store"):
        OffloadAdamW([*model.parameters(), foreign], engine=engine)


def test_a_parameter_that_was_frozen_when_offloaded_cannot_be_thawed(build_engine: EngineFactory) -> None:
    """It may be in a param group as in torch, but has no states."""
    model = tiny_model("llama").train()
    model.lm_head.requires_grad_(False)
    engine = build_engine(model)
    optimizer = OffloadAdamW(model.parameters(), engine=engine)
    model.lm_head.requires_grad_(True)
    thawed = r"lm_head\.weight was frozen .* freeze it afterwards with requires_grad_\(False\)"
    with pytest.raises(ValueError, match=thawed):
        model(**tiny_batch())
    with torch.no_grad():
        model(**tiny_batch())
    with pytest.raises(ValueError, match=thawed):
        OffloadAdamW(model.parameters(), engine=engine)
    model.lm_head.requires_grad_(False)
    model(**tiny_batch()).loss.backward()
    optimizer.step()


def test_adding_a_group_of_parameters_without_states_is_refused(build_engine: EngineFactory) -> None:
    model = tiny_model("llama").train()
    model.lm_head.requires_grad_(False)
    optimizer = OffloadAdamW([p for p in model.parameters() if p.requires_grad], engine=build_engine(model))
    model.lm_head.requires_grad_(True)
    with pytest.raises(ValueError, match=r"lm_head\.weight was frozen"):
        optimizer.add_param_group({"params": model.lm_head.weight})
    assert len(optimizer.param_groups) == 1


def test_a_parameter_removed_from_its_group_is_refused_unless_frozen(build_engine: EngineFactory) -> None:
    model = tiny_model("llama").train()
    optimizer = OffloadAdamW(model.parameters(), engine=build_engine(model))
    model(**tiny_batch()).loss.backward()
    dropped = optimizer.param_groups[0]["params"].pop()
    message = "requires a gradient but is in no param group .*add_param_group, or freeze it"
    for call in (optimizer.step, lambda: model(**tiny_batch())):
        with pytest.raises(ValueError, match=message):
            call()
    optimizer.zero_grad()
    dropped.requires_grad_(False)
    model(**tiny_batch()).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("change", [{"maximize": True}, {"amsgrad": True}])
def test_unsupported_settings_are_refused_in_step_and_load_state_dict(
    change: dict[str, bool], build_engine: EngineFactory
) -> None:
    model = tiny_model("llama").train()
    optimizer = OffloadAdamW(model.parameters(), engine=build_engine(model))
    state = optimizer.state_dict()
    state["param_groups"][0].update(change)
    name = next(iter(change))
    with pytest.raises(ValueError, match=f"AdamW with {name}=True is not supported under offload"):
        optimizer.load_state_dict(state)
    model(**tiny_batch()).loss.backward()
    optimizer.param_groups[0].update(change)
    with pytest.raises(ValueError, match=f"AdamW with {name}=True"):
        optimizer.step()
    optimizer.param_groups[0][name] = False
    optimizer.step()


def test_hyperparameters_that_change_after_updates_in_backward_are_refused(build_engine: EngineFactory) -> None:
    model = tiny_model("llama").train()
    optimizer = OffloadAdamW(model.parameters(), engine=build_engine(model, hold_gradients=False))
    model(**tiny_batch()).loss.backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ValueError, match=r"changed between backward and step\(\).*max_grad_norm > 0"):
        optimizer.step()


def test_hyperparameters_may_change_between_forward_and_backward(build_engine: EngineFactory) -> None:
    """Updates in backward use the new values, as torch does in `step()`."""
    model = tiny_model("llama").train()
    optimizer = OffloadAdamW(model.parameters(), engine=build_engine(model, hold_gradients=False))
    loss = model(**tiny_batch()).loss
    optimizer.param_groups[0]["lr"] = 0.5
    loss.backward()
    optimizer.step()


@HELD_OR_ACTIVE
def test_a_second_step_with_the_same_gradients_is_refused(hold_gradients: bool, build_engine: EngineFactory) -> None:
    """Torch would apply the same gradients again."""
    model = tiny_model("llama").train()
    engine = build_engine(model, hold_gradients=hold_gradients)
    optimizer = OffloadAdamW(model.parameters(), engine=engine)
    optimizer.step()
    model(**tiny_batch()).loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"a second time with the same gradients.*once for each backward"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_ was called after step\(\)"):
        engine.clip_grad_norm(1.0)
    with pytest.raises(RuntimeError, match=r"backward\(\) was called after step\(\) without zero_grad\(\)"):
        model(**tiny_batch()).loss.backward()
    optimizer.zero_grad()
    optimizer.step()
    assert float(engine.clip_grad_norm(float("inf"))) == 0.0
    engine.wait_for_updates()
    assert set(engine.step_counts.values()) == {1}


def loss_without_head(model: Any) -> Tensor:
    return model(**tiny_batch(seed=1), output_hidden_states=True).hidden_states[-1].sum()


@HELD_OR_ACTIVE
def test_gradients_of_zeros_that_torch_would_apply_are_refused(
    hold_gradients: bool, build_engine: EngineFactory
) -> None:
    """After `zero_grad(set_to_none=False)` torch moves a weight without a gradient by momentum and decay."""
    model, stock = tiny_model("llama").train(), tiny_model("llama").train()
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, engine=build_engine(model, hold_gradients=hold_gradients))
    pairs = ((stock, torch.optim.AdamW(stock.parameters(), lr=1e-2, fused=True)), (model, optimizer))
    refused = pytest.raises(ValueError, match=r"^lm_head\.weight \(1 of \d+ parameters\).*call zero_grad\(\)")
    for each, own in pairs:
        loss_without_head(each).backward()
        own.step()
        own.zero_grad(set_to_none=False)
        loss_without_head(each).backward()  # the head never had a gradient
        own.step()
        own.zero_grad(set_to_none=False)
        each(**tiny_batch(seed=2)).loss.backward()
        own.step()
        own.zero_grad()
        loss_without_head(each).backward()  # its gradient is None
        own.step()
        own.zero_grad(set_to_none=False)
    for name, parameter in stock.named_parameters():
        assert torch.equal(model.get_parameter(name).clone(), parameter), name
    model(**tiny_batch(seed=3)).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    loss_without_head(model).backward()
    with refused:
        optimizer.step()


def test_a_step_after_its_gradients_were_set_to_zeros_is_refused(build_engine: EngineFactory) -> None:
    model = tiny_model("llama").train()
    optimizer = OffloadAdamW(model.parameters(), engine=build_engine(model))
    model(**tiny_batch(seed=1)).loss.backward()
    optimizer.zero_grad(set_to_none=False)
    with pytest.raises(ValueError, match=r"has no gradient in this step"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    model(**tiny_batch(seed=1)).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    model.lm_head.requires_grad_(False)
    model(**tiny_batch(seed=2)).loss.backward()
    with pytest.raises(ValueError, match=r"^lm_head\.weight "):  # torch would go on moving it
        optimizer.step()


@HELD_OR_ACTIVE
def test_a_loop_may_drop_gradients_by_setting_them_to_none(hold_gradients: bool, build_engine: EngineFactory) -> None:
    model = tiny_model("llama").train()
    engine = build_engine(model, hold_gradients=hold_gradients)
    optimizer = OffloadAdamW(model.parameters(), engine=engine)
    for takes_step in (True, False, True) if hold_gradients else (True, True):
        model(**tiny_batch()).loss.backward()
        norm = float(engine.clip_grad_norm(float("inf")))
        if takes_step:
            optimizer.step()
        else:
            skipped = norm
        for parameter in model.parameters():
            parameter.grad = None
    if hold_gradients:
        assert norm == skipped  # the norm of one backward, not of two
    engine.wait_for_updates()
    assert set(engine.step_counts.values()) == {2}


def test_a_step_without_some_of_its_gradients_is_refused(build_engine: EngineFactory) -> None:
    model = tiny_model("llama").train()
    optimizer = OffloadAdamW(model.parameters(), engine=build_engine(model))
    model(**tiny_batch()).loss.backward()
    model.lm_head.weight.grad = None
    with pytest.raises(RuntimeError, match=r"\.grad was set to None for some parameters and not for .*zero_grad\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()


def test_a_backward_after_clipping_is_refused(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama")
    twins.backward(1)
    twins.clip(float("inf"))  # only measures the norm
    twins.backward(2)
    twins.clip(0.5)
    with pytest.raises(RuntimeError, match=r"after clip_grad_norm_ to 0\.5 .* `if accelerator\.sync_gradients:`\)"):
        twins.model(**tiny_batch(seed=3)).loss.backward()
    twins.step()
    twins.train(1, max_norm=0.5)
    twins.assert_equal()


def test_clipping_again_is_refused_for_a_smaller_norm_and_ignored_for_a_larger_one(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama")
    twins.backward(1)
    twins.clip(0.05)
    for smaller in (0.05, 0.01):
        with pytest.raises(ValueError, match=f"clipped to 0.05 before, and clipping them to {smaller}"):
            twins.engine.clip_grad_norm(smaller)
    for larger in (0.5, float("inf")):
        expected = torch.nn.utils.clip_grad_norm_(twins.stock.parameters(), larger)
        assert float(twins.engine.clip_grad_norm(larger)) == pytest.approx(float(expected), rel=1e-5)
    twins.step()
    twins.assert_equal()


def test_clipping_after_updates_in_backward_is_refused(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", hold_gradients=False)
    twins.backward(1)
    with pytest.raises(ValueError, match=r"max_norm=0\.5, .*max_grad_norm=0"):
        twins.engine.clip_grad_norm(0.5)


def test_other_norms_are_refused(build_engine: EngineFactory) -> None:
    engine = build_engine(tiny_model("llama"))
    with pytest.raises(ValueError, match="norm_type=1"):
        engine.clip_grad_norm(1.0, norm_type=1.0)
