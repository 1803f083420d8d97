"""Ordinary calls on an offloaded model work, or are refused in a sentence that names the right call."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from hf_lohan.engine import OffloadEngine
from hf_lohan.model import WrittenWeightError
from hf_lohan.optim import OffloadAdamW
from hf_lohan.testing.models import tiny_batch, tiny_model

Offload = Callable[..., OffloadEngine]
NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def model(offload: Offload) -> Any:
    """An offloaded model between a backward and its step."""
    model = tiny_model("llama")
    OffloadAdamW(model.parameters(), engine=offload(model))
    model(**tiny_batch()).loss.backward()
    return model


def weight_of(model: nn.Module) -> nn.Parameter:
    return model.get_parameter(NAME)


def add_to(model: Any) -> None:
    weight_of(model).data += 1.0


def set_one(model: Any) -> None:
    weight_of(model).data[2, 3] = 1.0


def set_to_zero(model: Any) -> None:
    weight_of(model).data = torch.zeros(weight_of(model).shape)


REFUSED_WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "torch.save": lambda model: torch.save(model.state_dict(), io.BytesIO()),
    "torch.save of the model": lambda model: torch.save(weight_of(model), io.BytesIO()),
    "pickle": lambda model: pickle.dumps(weight_of(model)),
    "safetensors": lambda model: save_file(dict(model.state_dict()), "never_written"),
    "AveragedModel": lambda model: torch.optim.swa_utils.AveragedModel(nn.ModuleList([model.lm_head])),
    "deepcopy": lambda model: copy.deepcopy(model.lm_head),
    "deepcopy of the model": copy.deepcopy,
    "pickle of the model": pickle.dumps,
    "pickle of a layer": lambda model: pickle.dumps(model.model.layers[0]),
    "torch.save of a whole model": lambda model: torch.save(model, io.BytesIO()),
    "AveragedModel of the model": torch.optim.swa_utils.AveragedModel,
    "memory": lambda model: weight_of(model).data_ptr(),
    "data.zero_()": lambda model: weight_of(model).data.zero_(),
    "data +=": add_to,
    "data =": set_to_zero,
    "a row of it": lambda model: weight_of(model).data[3].fill_(1.0),
    "an element of it": set_one,
    "out=": lambda model: torch.add(torch.zeros(()), 1.0, out=weight_of(model).data),
    "foreach": lambda model: torch._foreach_mul_([weight_of(model).data], 2.0),
    "init": lambda model: nn.init.zeros_(weight_of(model)),
    "copy_": lambda model: weight_of(model).data.copy_(torch.zeros(())),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "to(dtype)": lambda model: model.to(torch.bfloat16),
    "double": lambda model: model.double(),
}


@pytest.mark.parametrize("call", REFUSED_WEIGHTS.values(), ids=REFUSED_WEIGHTS)
def test_writing_or_copying_an_absent_weight_is_refused(
    call: Callable[[Any], Any], model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match=r"in the store.*trainer\.save_model.*accelerator\.get_state_dict") as caught:
        call(model)
    assert "__reduce_ex__" not in str(caught.value)
    assert torch.equal(weight_of(model).clone(), weight_of(tiny_model("llama")))


def move(weight: nn.Parameter, scale: float = 1.0) -> None:
    weight.data = weight.data * scale


class Changing(nn.Linear):
    """Calls `change` with its weight in its forward."""

    change: Callable[[Any], Any]

    def forward(self, hidden: Tensor) -> Tensor:
        self.change(self.weight)
        return super().forward(hidden)


def change_in_forward(model: Any, name: str, change: Callable[[nn.Parameter], Any]) -> Any:
    layer = model.get_submodule(NAME.rpartition(".")[0])
    layer.__class__, layer.change = type(name, (Changing,), {}), change  # models of equal names are traced once
    return layer


FORWARD_WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "no_grad": torch.no_grad()(lambda weight: weight.clamp_(-0.01, 0.01)),
    "a row": lambda weight: weight.detach()[3].zero_(),
    "data =": lambda weight: move(weight, 0.5),
    "max_norm": lambda weight: functional.embedding(torch.tensor([3]), weight, max_norm=0.01),
    "data": lambda weight: weight.data.mul_(0.5),  # only the trace sees it, because `.data` counts no versions
}


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("name", FORWARD_WRITES)
def test_a_forward_that_changes_a_weight_is_refused(name: str, is_training: bool, offload: Offload) -> None:
    if name == "data" and not is_training:
        pytest.skip("an evaluation is not traced")
    model, stock = tiny_model("llama"), tiny_model("llama")
    offload(model)
    layer = change_in_forward(model, name, FORWARD_WRITES[name])
    with torch.set_grad_enabled(is_training), pytest.raises(WrittenWeightError, match=rf"^{NAME} is changed while"):
        model(**tiny_batch())
    layer.change = lambda _weight: None
    assert torch.equal(model(**tiny_batch()).loss, stock(**tiny_batch()).loss), "the store has the change"


def test_a_weight_that_moves_in_a_forward_trains_as_stock(offload: Offload) -> None:
    """As `flatten_parameters` of an RNN moves weights on a GPU."""
    losses = []
    for model, is_ours in ((tiny_model("llama"), True), (tiny_model("llama"), False)):
        change_in_forward(model, "moves", move)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        if is_ours:
            optimizer = OffloadAdamW(model.parameters(), lr=1e-2, engine=offload(model))
        for seed in range(3):
            loss = model(**tiny_batch(seed=seed)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]


def scale_gradients(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def set_gradient(model: Any) -> None:
    weight_of(model).grad = torch.zeros(weight_of(model).shape)


REFUSED_GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "scaled": scale_gradients,
    "set": set_gradient,
    "another optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).step(),
}


@pytest.mark.parametrize("call", REFUSED_GRADIENTS.values(), ids=REFUSED_GRADIENTS)
def test_a_collected_gradient_cannot_be_read_or_written(call: Callable[[Any], Any], model: Any) -> None:
    with pytest.raises(RuntimeError, match=r"gradient.*accelerator\.clip_grad_norm_.*scale the loss"):
        call(model)


def test_gradients_are_none_before_a_backward_and_after_zero_grad(offload: Offload) -> None:
    model = tiny_model("llama")
    OffloadAdamW(model.parameters(), engine=offload(model))
    assert weight_of(model).grad is None
    model(**tiny_batch()).loss.backward()
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_calls_that_read_no_value_work(model: Any) -> None:
    weight = weight_of(model)
    assert isinstance(weight, nn.Parameter)
    assert weight.shape == weight.data.shape == model.state_dict()[NAME].shape
    assert (weight.dtype, weight.device, weight.requires_grad) == (torch.float32, torch.device("cpu"), True)
    assert weight.detach().t().size(0) == weight.size(1)
    assert weight.numel() == weight.data.nelement() and weight.is_floating_point() and not weight.is_sparse
    assert torch.zeros_like(weight).sum() == 0 and weight.new_zeros(3).shape == (3,)
    assert "in the store" in repr(weight) and "in the store" in f"{weight.data}"
    assert model.num_parameters() == sum(parameter.numel() for parameter in model.parameters())
    assert (model.dtype, model.device) == (torch.float32, torch.device("cpu"))
    assert weight in set(model.parameters())
    torch.optim.SGD(model.parameters(), lr=0.1)
    for same in (model.to("cpu"), model.float(), model.to(torch.float32), model.cpu(), model.eval(), model.train()):
        assert same is model
    weight.requires_grad_(False)
    assert not weight.requires_grad


def test_a_compiled_call_is_refused(model: Any) -> None:
    with pytest.raises(RuntimeError, match=r"in torch\.compile, which does not support .*; call the model without"):
        torch.compile(model, backend="eager")(**tiny_batch())
    model(**tiny_batch()).loss.backward()


def test_a_second_thread_is_refused_while_the_model_runs(offload: Offload) -> None:
    model = tiny_model("llama").train()
    optimizer = OffloadAdamW(model.parameters(), engine=offload(model))
    twin = tiny_model("llama").train()
    refused: list[Exception] = []

    def call() -> None:
        with pytest.raises(RuntimeError, match=r"on a second thread .* call it on one thread at a time") as caught:
            model(**tiny_batch())
        refused.append(caught.value)

    def meanwhile(*_: Any) -> None:
        other = threading.Thread(target=call)
        other.start()
        other.join()

    handle = model.model.layers[1].register_forward_pre_hook(meanwhile)
    loss, expected = (each(**tiny_batch()).loss for each in (model, twin))
    handle.remove()
    assert len(refused) == 1 and torch.equal(loss, expected)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    # another thread may call the model later
    other = threading.Thread(target=lambda: model(**tiny_batch()).loss.backward())
    other.start()
    other.join()
    optimizer.step()


def test_reading_a_weight_that_was_untied_is_refused(offload: Offload) -> None:
    model = tiny_model("gpt2")
    engine = offload(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(KeyError, match=r"lm_head\.weight is not in the store; .*untied before the model is offloaded"):
        engine.parameters.read_parameter("lm_head.weight")


def test_weights_are_plain_parameters_while_the_model_runs(offload: Offload) -> None:
    model = tiny_model("llama")
    expected = weight_of(model).detach().clone()
    offload(model)
    seen: list[Tensor] = []

    def look(module: Any, _args: Any) -> None:
        seen.append(module.weight.detach().clone())
        assert type(module.weight) is nn.Parameter

    model.get_submodule(NAME.rpartition(".")[0]).register_forward_pre_hook(look)
    model(**tiny_batch())
    assert torch.equal(seen[0], expected)


def test_save_pretrained_of_another_library_is_refused_with_the_right_call(offload: Offload, tmp_path: Path) -> None:
    """It would write its own state dict, as models of diffusers do."""

    class Foreign(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_model("llama")

        def forward(self, **inputs: Any) -> Any:
            return self.inner(**inputs)

        def save_pretrained(self, folder: Path, **_: Any) -> None:
            torch.save(self.state_dict(), folder / "model.bin")

    model = Foreign()
    offload(model)
    with pytest.raises(ValueError, match=r"save_pretrained of Foreign.*accelerator\.save_model"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.bin"))
