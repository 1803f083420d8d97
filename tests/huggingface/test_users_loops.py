"""Loops with hooks, caches and functional calls train as with stock accelerate, or are refused."""

from __future__ import annotations

import collections
import contextlib
import copy
import itertools
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import convert_to_fp32, send_to_device
from peft import LoraConfig, get_peft_model
from stored_weights import assert_stored
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call

import hf_lohan
from hf_lohan.testing.models import tiny_batch, tiny_model

BUDGETS = {"cpu_memory": "8MiB", "gpu_memory": "2MiB"}
Make = Callable[..., "Loop"]


class Loop:
    """A model and its optimizer, prepared by stock accelerate or by ours."""

    def __init__(self, model: Any, accelerator: Any) -> None:
        self.accelerator = accelerator
        self.given_optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        self.model, self.optimizer = accelerator.prepare(model, self.given_optimizer)

    def end_step(self, loss: Any) -> list[float]:
        """Return the loss and the norm of its gradients."""
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [float(loss.detach()), float(norm)]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Loop] = []

    def one(model: Any, *, is_stock: bool = False) -> Loop:
        if is_stock:
            return Loop(model, accelerate.Accelerator(cpu=True))
        offload = {**BUDGETS, "ssd": str(tmp_path / str(len(made)))}
        plugin = hf_lohan.LohanPlugin(offload=offload)
        made.append(Loop(model, hf_lohan.Accelerator(cpu=True, lohan_plugin=plugin)))
        return made[-1]

    yield one
    for loop in made:
        loop.accelerator.offload_engine.close()


def halve(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def add_one_hundredth(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.add_(0.01)


def with_hooks_on_sums(loop: Loop) -> list[float]:
    for parameter in loop.model.model.layers[1].parameters():
        parameter.register_post_accumulate_grad_hook(halve)
        parameter.register_post_accumulate_grad_hook(add_one_hundredth)
    return [number for seed in range(3) for number in loop.end_step(loop.model(**tiny_batch(seed=seed)).loss)]


def with_other_tensors(loop: Loop) -> list[float]:
    numbers = []
    for seed in range(3):
        halved = {name: weight * 0.5 for name, weight in loop.model.named_parameters()}
        numbers += loop.end_step(functional_call(loop.model, halved, (), tiny_batch(seed=seed)).loss)
    return numbers


def with_a_cache(loop: Loop, *, trains_first: bool, **how: Any) -> list[float]:
    numbers = []
    for seed in range(2):
        ids = tiny_batch(seed=seed)["input_ids"]
        with torch.set_grad_enabled(trains_first):
            first = loop.model(input_ids=ids[:, :8], **how)
        second = loop.model(input_ids=ids[:, 8:], past_key_values=first.past_key_values)
        numbers += loop.end_step(first.logits.square().mean() + second.logits.square().mean())
        numbers += loop.end_step(loop.model(input_ids=ids, labels=ids).loss)  # recomputes its layers again
    return numbers


def on_the_cpu(loop: Loop) -> list[float]:
    with save_on_cpu():
        return loop.end_step(loop.model(**tiny_batch()).loss)


PROGRAMS: dict[str, Callable[[Loop], list[float]]] = {
    "hooks on sums": with_hooks_on_sums,
    "functional_call": with_other_tensors,
    "a cache with a graph": partial(with_a_cache, trains_first=True, use_cache=True),
    "a cache without a graph": partial(with_a_cache, trains_first=False),
    "save_on_cpu": on_the_cpu,
}


def model_with_cache() -> Any:
    return tiny_model("llama", use_cache=True)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_it_equals_stock_accelerate(program: Callable[[Loop], list[float]], make: Make) -> None:
    stock, ours = make(model_with_cache(), is_stock=True), make(model_with_cache())
    expected, found = program(stock), program(ours)
    assert found == pytest.approx(expected, rel=1e-6, abs=0) and found[::2] == expected[::2]
    assert_stored(ours.model, stock.model)


def two_backwards(loop: Loop) -> None:
    with_hooks_on_sums(loop)
    for seed in range(2):
        loop.accelerator.backward(loop.model(**tiny_batch(seed=seed)).loss)


def together(loop: Loop) -> list[Any]:
    backward = loop.accelerator.backward
    batches = [tiny_batch(seed=seed) for seed in range(2)]
    return loop.accelerator.run_micro_batches([lambda b=batch: backward(loop.model(**b).loss) for batch in batches])


def with_a_hook_at_first(loop: Loop) -> None:
    hook = loop.model.lm_head.weight.register_hook(torch.sign)
    try:
        together(loop)
    finally:  # the refusal leaves nothing behind
        hook.remove()
        together(loop)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.end_step(loop.model(**tiny_batch()).loss)


def with_lossy_hooks(loop: Loop) -> None:
    with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        loop.model(**tiny_batch())


def zero_moments(loop: Loop) -> None:
    for state in loop.optimizer.state.values():
        state["exp_avg"].zero_()


def zero_moments_if_any(loop: Loop) -> None:
    state = loop.optimizer.state[loop.model.lm_head.weight]
    if "exp_avg" in state:
        state["exp_avg"].zero_()


def count_states(loop: Loop) -> int:
    return len(loop.optimizer.state[loop.model.lm_head.weight])


def new_states(loop: Loop) -> None:
    loop.optimizer.state = collections.defaultdict(dict)


STATES = r"the states of an offloaded optimizer are in the store.*save the model and start a new run"
REFUSED: dict[str, tuple[Callable[[Loop], Any], str]] = {
    "hooks on sums": (two_backwards, "hook of register_post_accumulate_grad_hook.*gradient_accumulation_steps=1"),
    "hooks together": (
        with_a_hook_at_first,
        r"lm_head.weight has a hook on its gradient.*\(vertical_micro_batches: false or auto",
    ),
    "a cache by default": (partial(with_a_cache, trains_first=True), "no key-value cache.*with use_cache=True"),
    "saved tensors": (with_lossy_hooks, "within torch.autograd.graph.saved_tensors_hooks.*call the model outside"),
    "states cleared": (lambda loop: loop.optimizer.state.clear(), STATES),
    "states zeroed": (zero_moments, STATES),
    "states zeroed if any": (zero_moments_if_any, STATES),
    "states counted": (count_states, STATES),
    "states replaced": (new_states, STATES),
}


@pytest.mark.parametrize(("program", "message"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused(program: Callable[[Loop], Any], message: str, make: Make) -> None:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        program(make(model_with_cache()))
    assert re.search(message, str(caught.value)), caught.value


READS: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda cache: cache.get_seq_length(),
    "a length": len,
    "an item": lambda cache: cache[0],
    "all items": list,
}


@pytest.mark.parametrize("with_adapters", [False, True], ids=["plain", "adapters"])
def test_a_cache_by_default_may_be_passed_on_but_not_read(with_adapters: bool, make: Make) -> None:
    model = model_with_cache()
    if with_adapters:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    loop = make(model.train())
    outputs = convert_to_fp32(send_to_device(loop.model(**tiny_batch()), "cpu"))
    cache = outputs.past_key_values
    assert cache and not hasattr(cache, "dtype") and isinstance(copy.deepcopy(cache), type(cache))
    for name, read in READS.items():
        with pytest.raises(ValueError, match=r"no key-value cache.*with use_cache=True"):
            pytest.fail(f"{name}: {read(cache)}")


def interrupted(loop: Loop) -> None:
    """Interrupt a forward with a cache in its last layer."""

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    hook = loop.model.model.layers[-1].register_forward_pre_hook(interrupt)
    try:
        loop.model(**tiny_batch(), use_cache=True)
    finally:
        hook.remove()


def failing_together(loop: Loop) -> None:
    """Run micro-batches with a cache, one of which fails while the others are in their forwards."""
    num_layers_run = itertools.count()

    def fail(*args: Any) -> None:
        if next(num_layers_run) == 1:
            raise ValueError("a micro-batch failed")

    hook = loop.model.model.layers[-1].register_forward_pre_hook(fail)
    backward = loop.accelerator.backward
    runs = [lambda: backward(loop.model(**tiny_batch(), use_cache=True).loss)] * 3
    try:
        loop.accelerator.run_micro_batches(runs)
    finally:
        hook.remove()


@pytest.mark.parametrize("fail", [interrupted, failing_together])
def test_layers_are_recomputed_after_a_forward_with_a_cache_has_failed(fail: Callable[[Loop], Any], make: Make) -> None:
    loop = make(model_with_cache())
    inner = loop.model.model
    with pytest.raises((KeyboardInterrupt, ValueError)):
        fail(loop)
    is_recomputing = []
    hook = inner.register_forward_pre_hook(lambda *_: is_recomputing.append(inner.gradient_checkpointing))
    loop.model(**tiny_batch(seed=1))
    hook.remove()
    assert is_recomputing == [True]


def test_hooks_on_experts_that_stream_are_refused(tmp_path: Path) -> None:
    offload = {"cpu_memory": "32MiB", "gpu_memory": "8MiB", "experts": "streamed", "ssd": str(tmp_path)}
    loop = Loop(
        tiny_model("mixtral", num_layers=2),
        hf_lohan.Accelerator(cpu=True, lohan_plugin=hf_lohan.LohanPlugin(offload=offload)),
    )
    loop.model.model.layers[0].mlp.experts.down_proj.register_hook(torch.sign)
    with pytest.raises(RuntimeError, match=r"experts\.down_proj has a hook on its gradient.*experts: with_layer"):
        loop.end_step(loop.model(**tiny_batch()).loss)
    loop.accelerator.offload_engine.close()


def test_the_optimizer_that_was_prepared_refuses_too(make: Make) -> None:
    loop = make(tiny_model("llama"))
    with pytest.raises(ValueError, match=STATES):
        loop.given_optimizer.state.clear()
    assert copy.deepcopy(loop.given_optimizer.state) == {}


def test_the_optimizer_that_was_prepared_saves_and_loads_its_settings(make: Make) -> None:
    loop = make(tiny_model("llama"))
    loop.given_optimizer.param_groups[0]["lr"] = 0.25
    saved = copy.deepcopy(loop.given_optimizer.state_dict())
    assert saved == loop.optimizer.state_dict() and not saved["state"]
    loop.given_optimizer.param_groups[0]["lr"] = 0.5
    loop.given_optimizer.load_state_dict(saved)
    assert loop.optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("is_nested", [True, False], ids=["nested", "announced"])
def test_no_sync_leaves_what_was_announced(is_nested: bool, make: Make) -> None:
    """A step has three backwards, the first two of which are not final."""
    stock, ours = make(tiny_model("llama"), is_stock=True), make(tiny_model("llama"))
    engine = ours.accelerator.offload_engine

    @contextlib.contextmanager
    def announced() -> Iterator[None]:
        engine.announce_backward(is_final=False)
        yield
        engine.announce_backward(is_final=True)

    for seed in range(2):
        stock.accelerator.backward(stock.model(**tiny_batch(seed=seed)).loss)
    with ours.accelerator.no_sync(ours.model) if is_nested else announced():
        with ours.accelerator.no_sync(ours.model):
            ours.accelerator.backward(ours.model(**tiny_batch(seed=0)).loss)
        assert not engine.announce_backward(is_final=False)
        ours.accelerator.backward(ours.model(**tiny_batch(seed=1)).loss)
    assert engine.announce_backward(is_final=True)
    found, expected = (loop.end_step(loop.model(**tiny_batch(seed=2)).loss) for loop in (ours, stock))
    assert found == pytest.approx(expected, rel=1e-6, abs=0)
