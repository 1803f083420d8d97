"""`hf_lohan.Accelerator` refuses unsupported calls with the reason."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_lohan import Accelerator, LohanPlugin, engine_of
from hf_lohan.config import ConfigError
from hf_lohan.testing.models import tiny_batch, tiny_model


class AdamW8bit(torch.optim.AdamW):
    """Has the same name as the class of bitsandbytes."""


@pytest.fixture
def accelerator(tmp_path: Path) -> Accelerator:
    offload = {"cpu_memory": "4MiB", "gpu_memory": "2MiB", "ssd": str(tmp_path / "store")}
    return Accelerator(cpu=True, lohan_plugin=LohanPlugin(offload=offload))


def test_float16_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mixed_precision='fp16' needs loss scaling, .*'bf16' or 'no'"):
        Accelerator(cpu=True, mixed_precision="fp16", lohan_plugin=LohanPlugin())


def test_an_optimizer_before_its_model_is_refused(accelerator: Accelerator) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="prepare the model together with its optimizer"):
        accelerator.prepare(torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda params: torch.optim.Rprop(params), r"Rprop cannot be offloaded; use one of torch\.optim's AdamW, Adam"),
        (lambda params: AdamW8bit(params), "AdamW8bit cannot be offloaded; .* set optimizer_state_dtype: int8"),
        (lambda params: torch.optim.AdamW(params, amsgrad=True), "AdamW with amsgrad=True"),
        (lambda params: torch.optim.SGD(params, maximize=True), "SGD with maximize=True"),
    ],
    ids=["rprop", "8bit", "amsgrad", "maximize"],
)
def test_unsupported_optimizers_are_refused_before_a_weight_changes(
    make: Callable[[Any], torch.optim.Optimizer], message: str, accelerator: Accelerator
) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=message):
        accelerator.prepare(model, make(model.parameters()))
    untouched = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    if (engine := engine_of(model)) is not None:
        engine.close()
    assert untouched


def test_a_compiled_model_is_refused_before_a_weight_changes(accelerator: Accelerator) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=r"wrapped by torch\.compile .*; pass the original model"):
        accelerator.prepare(torch.compile(model), torch.optim.AdamW(model.parameters()))
    model.model.layers[1].compile()
    with pytest.raises(ValueError, match=r"with compiled modules .*; leave model\.compile\(\) out"):
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert engine_of(model) is None


def test_prepared_objects_may_be_prepared_again(accelerator: Accelerator) -> None:
    """Accelerate allows this with the same accelerator or with another one."""
    model = tiny_model("llama").train()
    first = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.5))
    for preparing in (accelerator, Accelerator(cpu=True, lohan_plugin=accelerator.lohan_plugin)):
        assert preparing.prepare(*first) == first
        assert preparing.prepare_optimizer(first[1]) is first[1]
        preparing.backward(first[0](**tiny_batch()).loss)
        first[1].step()
        first[1].zero_grad()
    engine = engine_of(model)
    engine.wait_for_updates()  # the worker counts a step after its updates
    assert set(engine.step_counts.values()) == {2}
    engine.close()


def test_clipping_of_parameters_that_are_not_in_the_store_is_refused(accelerator: Accelerator) -> None:
    model, other = tiny_model("llama").train(), torch.nn.Linear(2, 3)
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(**tiny_batch()).loss + other(torch.ones(2)).sum())
    with pytest.raises(ValueError, match=r"of shape \(3, 2\) that has a gradient but is not in the store"):
        accelerator.clip_grad_norm_([other.weight, *model.parameters()], 1.0)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    engine = engine_of(model)
    engine.close()


def test_an_optimizer_that_has_stepped_is_refused(accelerator: Accelerator) -> None:
    model = tiny_model("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    model(**tiny_batch()).loss.backward()
    optimizer.step()
    with pytest.raises(ValueError, match="and only a new optimizer"):
        accelerator.prepare(model, optimizer)
    if (engine := engine_of(model)) is not None:
        engine.close()


@pytest.mark.parametrize(
    ("offload", "message"),
    [({"gpu_memroy": "1GiB"}, "gpu_memory"), ("nowhere.yaml", r"nowhere\.yaml"), (7, "offload=7 is not allowed")],
    ids=["misspelt", "no_file", "no_config"],
)
def test_a_plugin_with_a_wrong_configuration_is_refused(offload: Any, message: str) -> None:
    accelerator = Accelerator(cpu=True, lohan_plugin=LohanPlugin(offload=offload))
    with pytest.raises(ConfigError, match=message):
        accelerator.prepare(tiny_model("llama"))


def test_a_plugin_takes_keywords_only_and_known_ones() -> None:
    with pytest.raises(TypeError):
        LohanPlugin("lohan")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        LohanPlugin(offlaod="lohan")  # type: ignore[call-arg]


def test_steps_and_arguments_within_micro_batches_are_refused(accelerator: Accelerator) -> None:
    model, optimizer = accelerator.prepare(model := tiny_model("llama"), torch.optim.AdamW(model.parameters()))

    def steps_too_early() -> None:
        accelerator.backward(model(**tiny_batch()).loss)
        optimizer.step()

    def weighs() -> None:
        accelerator.backward(model(**tiny_batch()).loss, gradient=torch.tensor(2.0))

    with pytest.raises(RuntimeError, match="after run_micro_batches"):
        accelerator.run_micro_batches([steps_too_early, steps_too_early])
    with pytest.raises(ValueError, match="not supported within run_micro_batches"):
        accelerator.run_micro_batches([weighs, weighs])

    def weighs_and_goes_on() -> None:
        with contextlib.suppress(ValueError):
            weighs()

    with pytest.raises(RuntimeError, match="loss"):  # refused micro-batches gave no loss
        accelerator.run_micro_batches([weighs_and_goes_on, weighs_and_goes_on])
    losses = accelerator.run_micro_batches([lambda: accelerator.backward(model(**tiny_batch()).loss)] * 2)
    assert losses == [None, None]
    optimizer.step()
    engine = engine_of(model)
    engine.close()


def test_arguments_that_are_not_done_are_refused(accelerator: Accelerator, tmp_path: Path) -> None:
    model = tiny_model("llama")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    folder = tmp_path / "saved"
    for save in (accelerator.save_model, lambda _, to, **how: accelerator.save_state(str(to), **how)):
        with pytest.raises(ValueError, match=r"safe_serialization=False is not supported .* safetensors files"):
            save(model, folder, safe_serialization=False)
    assert not folder.exists()
    loss = model(**tiny_batch()).loss
    for norm_type in (1, "inf"):
        with pytest.raises(ValueError, match=r"norm_type=.* is not supported"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="clip_grad_value_ is not supported under offload; use clip_grad_norm_"):
        accelerator.clip_grad_value_(model.parameters(), 0.5)
    accelerator.backward(loss)
    optimizer.step()
    stock = torch.optim.AdamW(tiny_model("llama").parameters())
    for parameter in stock.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    stock.step()
    match = (
        r"has the states of \d+ parameters, which would be lost, because this optimizer keeps its states in the store"
    )
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(stock.state_dict())
    assert accelerator.prepare_model(model, None, True) is model
    # the dict is whole, and a saved state has each weight once
    assert accelerator.get_state_dict(model, unwrap=False).keys() == model.state_dict().keys()
    accelerator.save_state(str(folder))
    accelerator.load_state(str(folder), load_kwargs={"weights_only": True}, map_location="cpu", strict=True)
    assert [file.name for file in folder.glob("model*")] == ["model.safetensors"]
    accelerator.end_training()


def test_models_in_memory_are_saved_and_trained_as_by_accelerate(tmp_path: Path) -> None:
    accelerator, layer = Accelerator(cpu=True), torch.nn.Linear(2, 2)
    accelerator.save_model(layer, tmp_path, safe_serialization=False)
    assert torch.load(tmp_path / "pytorch_model.bin").keys() == {"weight", "bias"}
    accelerator.save_state(str(tmp_path / "state"), safe_serialization=False)
    accelerator.backward(layer(torch.ones(1, 2)).sum(), inputs=[layer.weight])
    assert layer.weight.grad is not None and layer.bias.grad is None
