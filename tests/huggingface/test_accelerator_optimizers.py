"""`hf_lohan.Accelerator` takes over one or several optimizers of a loop, which exactly equals the loop in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from hf_lohan import Accelerator, LohanPlugin, engine_of, from_pretrained
from hf_lohan.model import hidden_matrices
from hf_lohan.testing.models import tiny_batch, tiny_model

MAX_NORM = 0.5


def muon_and_adamw(model: Any) -> list[torch.optim.Optimizer]:
    matrices = hidden_matrices(model)
    of_layers = [p for p in model.parameters() if p in matrices]
    rest = [p for p in model.parameters() if p not in matrices]
    return [torch.optim.Muon(of_layers, lr=0.02), torch.optim.AdamW(rest, lr=1e-3, fused=True)]


def sgd(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


def schedulers(optimizers: Sequence[torch.optim.Optimizer]) -> list[LRScheduler]:
    return [LambdaLR(optimizer, lambda step: 1 / (1 + step)) for optimizer in optimizers]


def loop(model: Any, optimizers: Any, schedulers: Any, clip: Callable[[], Any], steps: range, backward: Any) -> None:
    for step in steps:
        backward(model(**tiny_batch(seed=step)).loss)
        clip()
        for item in (*optimizers, *schedulers):
            item.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


class Prepared:
    """A model, its optimizers and schedulers as `prepare` returns them."""

    def __init__(self, model: Any, make: Callable[[Any], list[torch.optim.Optimizer]], folder: Path) -> None:
        offload = {"cpu_memory": "4MiB", "gpu_memory": "2MiB", "ssd": str(folder)}
        self.accelerator = Accelerator(cpu=True, lohan_plugin=LohanPlugin(offload=offload))
        optimizers = make(model)
        given = (model, *optimizers, *schedulers(optimizers))
        self.model, *rest = self.accelerator.prepare(*given)
        self.optimizers, self.schedulers = rest[: len(optimizers)], rest[len(optimizers) :]

    def train(self, steps: range) -> None:
        def clip() -> None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)

        loop(self.model, self.optimizers, self.schedulers, clip, steps, self.accelerator.backward)

    def weights(self) -> dict[str, torch.Tensor]:
        engine = engine_of(self.model)
        found = {name: engine.parameters.read_parameter(name) for name, _ in self.model.named_parameters()}
        engine.close()
        return found


@pytest.mark.parametrize("make", [sgd, muon_and_adamw])
def test_a_loop_and_its_resumed_state_equal_torch(
    make: Callable[[Any], list[torch.optim.Optimizer]], tmp_path: Path
) -> None:
    stock = tiny_model("llama").train()
    optimizers = make(stock)

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(stock.parameters(), MAX_NORM)

    loop(stock, optimizers, schedulers(optimizers), clip, range(5), lambda loss: loss.backward())

    ours = Prepared(tiny_model("llama").train(), make, tmp_path / "store")
    ours.train(range(2))
    ours.accelerator.save_state(str(tmp_path / "state"))
    ours.train(range(2, 5))
    weights = ours.weights()
    assert all(torch.equal(weights[name], p) for name, p in stock.named_parameters())

    again = Prepared(tiny_model("llama").train(), make, tmp_path / "elsewhere")
    again.accelerator.load_state(str(tmp_path / "state"))
    again.train(range(2, 5))
    resumed = again.weights()
    assert all(torch.equal(resumed[name], weight) for name, weight in weights.items())


def test_each_optimizer_uses_the_learning_rate_of_its_own_step(tmp_path: Path) -> None:
    """The first optimizer's scheduler has stepped before the last optimizer steps."""

    def train(model: Any, optimizers: Any, own_schedulers: Any, backward: Any) -> None:
        for step in range(3):
            backward(model(**tiny_batch(seed=step)).loss)
            for optimizer, scheduler in zip(optimizers, own_schedulers, strict=True):
                optimizer.step()
                scheduler.step()
            for optimizer in optimizers:
                optimizer.zero_grad()

    stock = tiny_model("llama").train()
    optimizers = muon_and_adamw(stock)
    train(stock, optimizers, schedulers(optimizers), lambda loss: loss.backward())
    ours = Prepared(tiny_model("llama").train(), muon_and_adamw, tmp_path / "store")
    train(ours.model, ours.optimizers, ours.schedulers, ours.accelerator.backward)
    assert [s.get_last_lr() for s in ours.schedulers] == [[0.02 / 4], [1e-3 / 4]]
    weights = ours.weights()
    assert all(torch.equal(weights[name], p) for name, p in stock.named_parameters())


def test_a_streamed_model_is_loaded_for_its_optimizer(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")

    def load(folder: str, **settings: Any) -> Any:
        offload = {"cpu_memory": "4MiB", "gpu_memory": "2MiB", "ssd": str(tmp_path / folder)}
        return from_pretrained(tmp_path / "model", offload, torch_device="cpu", **settings).train()

    weights = []
    for model in (tiny_model("llama").train(), load("told", optimizer=(torch.optim.SGD, {"momentum": 0.9}))):
        ours = Prepared(model, sgd, tmp_path / "in_memory")
        ours.train(range(3))
        weights.append(ours.weights())
    assert all(torch.equal(weights[1][name], weight) for name, weight in weights[0].items())
    default = load("default")
    with pytest.raises(ValueError, match=r"SGD were offloaded for AdamW.*pass SGD when"):
        Prepared(default, sgd, tmp_path / "unused")
    engine = engine_of(default)
    engine.close()


def test_muon_without_an_optimizer_for_the_rest_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama").train()
    with pytest.raises(ValueError, match="requires a gradient but is in no param group"):
        Prepared(model, lambda model: muon_and_adamw(model)[:1], tmp_path)
    engine = engine_of(model)
    engine.close()
