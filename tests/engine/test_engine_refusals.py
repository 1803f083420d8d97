"""What the engine refuses, and says why: what would train on other numbers than the loop means."""

from __future__ import annotations

import pytest
import torch
from engines import EngineFactory, TwinsFactory

from hf_lohan.optim import OffloadAdamW
from hf_lohan.testing.models import tiny_batch, tiny_model

HELD_OR_ACTIVE = pytest.mark.parametrize("hold_gradients", [True, False], ids=["held", "active"])


def test_a_layer_called_outside_its_model_is_refused(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama")
    ids = tiny_batch()["input_ids"]
    with pytest.raises(RuntimeError, match="outside its model's forward"):
        twins.model.model(ids)
    with torch.no_grad():  # nothing is saved then
        hidden = [model.model(ids).last_hidden_state for model in twins.models]
    assert torch.equal(hidden[0], hidden[1])
    twins.train(2)
    twins.assert_equal()


def test_a_second_gradient_is_refused_where_the_first_has_been_applied(build_engine: EngineFactory) -> None:
    model = tiny_model("llama").train()
    engine = build_engine(model, hold_gradients=False)
    OffloadAdamW(model.parameters(), engine=engine)
    model(**tiny_batch(seed=1)).loss.backward()
    with pytest.raises(RuntimeError, match=r"between backward and step\(\).*max_grad_norm > 0"):
        model(**tiny_batch(seed=2))


def test_a_second_backward_is_refused_where_the_first_has_been_applied(build_engine: EngineFactory) -> None:
    model = tiny_model("llama").train()
    engine = build_engine(model, hold_gradients=False)
    OffloadAdamW(model.parameters(), engine=engine)
    loss = model(**tiny_batch(seed=1)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"second gradient of .* arrived.*max_grad_norm > 0"):
        loss.backward()
        engine.step()
        engine.settle()


def test_accumulation_is_refused_where_no_gradient_is_kept(build_engine: EngineFactory) -> None:
    """All buffers in which gradients arrive would be taken before backward is over, and it would wait for ever."""
    model = tiny_model("llama").train()
    engine = build_engine(model, hold_gradients=False)
    optimizer = OffloadAdamW(model.parameters(), engine=engine)
    engine.announce_backward(is_final=False)
    with pytest.raises(RuntimeError, match=r"accumulated, .* gradient_accumulation_steps .*max_grad_norm > 0"):
        model(**tiny_batch(seed=1)).loss.backward()
    engine.announce_backward(is_final=True)
    model(**tiny_batch(seed=2)).loss.backward()
    optimizer.step()
    engine.settle()  # the pipeline's thread counts
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


def test_parameters_that_were_frozen_may_be_in_a_group_and_are_refused_when_they_no_longer_are(
    build_engine: EngineFactory,
) -> None:
    model = tiny_model("llama")
    model.lm_head.requires_grad_(False)
    engine = build_engine(model)
    OffloadAdamW(model.parameters(), engine=engine)
    model.lm_head.requires_grad_(True)
    with pytest.raises(ValueError, match=r"lm_head\.weight was frozen"):
        OffloadAdamW(model.parameters(), engine=engine)


def test_clipping_that_came_too_late_is_refused(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", hold_gradients=False)
    twins.backward(1)
    with pytest.raises(ValueError, match=r"clipping to 0\.5 .*max_grad_norm=0"):
        twins.engine.clip_grad_norm(0.5)


def test_other_norms_are_refused(build_engine: EngineFactory) -> None:
    engine = build_engine(tiny_model("llama"))
    with pytest.raises(ValueError, match="norm_type=1"):
        engine.clip_grad_norm(1.0, norm_type=1.0)
