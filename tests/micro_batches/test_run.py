"""Micro-batches of one step that run together: numbers, what moves, and what is left if one fails."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_lohan.micro_batches.heads import MicroBatchHeads
from hf_lohan.testing.async_device import AsyncDevice
from hf_lohan.testing.models import tiny_batch, tiny_model

TwinsFactory = Callable[..., Any]
NUM_MICRO_BATCHES = 4


def micro_batches(twins: Any, step: int, num: int = NUM_MICRO_BATCHES, **shape: int) -> list[Callable[[], Tensor]]:
    def forward_and_backward(seed: int) -> Tensor:
        loss: Tensor = twins.model(**tiny_batch(seed=seed, **shape)).loss / num
        assert twins.engine.defer_backward(loss)
        return loss.detach()

    return [partial(forward_and_backward, 100 * step + number) for number in range(num)]


def train(twins: Any, step: int, *, max_norm: float = 0.5) -> None:
    """One step with both: stock accumulation, and all micro-batches together."""
    stock = [twins.stock(**tiny_batch(seed=100 * step + n)).loss / NUM_MICRO_BATCHES for n in range(NUM_MICRO_BATCHES)]
    for loss in stock:
        loss.backward()
    losses = twins.engine.run_micro_batches(micro_batches(twins, step))
    assert losses == [loss.detach() for loss in stock]
    if max_norm:
        twins.clip(max_norm)
    twins.step()


def read_bytes(twins: Any, work: Callable[[], object]) -> int:
    """By one step, with the updates that it leaves."""
    twins.engine.settle()
    before = twins.engine.tiers.io.read_bytes
    work()
    twins.engine.settle()
    return int(twins.engine.tiers.io.read_bytes - before)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_weights_are_read_as_for_one_micro_batch(family: str, make_twins: TwinsFactory) -> None:
    """GPT-2 has two blocks outside its layers that use the same slot one after the other."""
    model_factory = partial(tiny_model, family, num_layers=6)
    twins = make_twins(model_factory=model_factory, recompute=True, resident_records="none", activations="recompute")

    def alone() -> None:
        twins.backward(7)
        twins.clip(0.5)
        twins.step()

    def in_turn() -> None:
        for number in range(NUM_MICRO_BATCHES):
            twins.backward(number)
        twins.clip(0.5)
        twins.step()

    for step in range(2):
        train(twins, step)
    together = read_bytes(twins, partial(train, twins, 2))
    alone()
    one = read_bytes(twins, alone)
    in_turn()
    many = read_bytes(twins, in_turn)
    weight_bytes = sum(p.numel() * p.element_size() for p in twins.stock.parameters())
    assert together == one < many - (NUM_MICRO_BATCHES - 1) * weight_bytes
    twins.assert_equal()


def test_a_gradient_moves_to_the_host_once(make_twins: TwinsFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = make_twins("opt", recompute=True)
    train(twins, 0)
    sent: list[str] = []
    arrivals = twins.engine._hooks._arrivals
    send = arrivals.send
    monkeypatch.setattr(arrivals, "send", lambda part, gradient: (sent.append(part.name), send(part, gradient)))
    train(twins, 1)
    assert sorted(sent) == sorted(name for name, _ in twins.stock.named_parameters())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "settings",
    [{"hold_gradients": False}, {"activations": "swap", "cpu_memory": "16MiB"}, {"clip": "speculate"}],
    ids=["in_backward", "swap", "speculate"],
)
def test_on_a_device_whose_copies_run_late(settings: dict[str, Any], seed: int, make_twins: TwinsFactory) -> None:
    family = ("llama", "opt")[seed]
    device = AsyncDevice(seed, max_delay_s=5e-4)
    twins = make_twins(family, recompute=True, device=device, **settings)
    for step in range(3):
        train(twins, step, max_norm=0.5 if twins.engine.layout.holds_gradients else 0.0)
    twins.assert_equal()
    assert device.num_races == 0


def test_swapped_activations_of_all_micro_batches_have_room(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", recompute=True, activations="swap", cpu_memory="64MiB")
    swapper = twins.engine.activations.swapper
    train(twins, 0)
    train(twins, 1)
    layers = twins.engine.activation_memory.trace.values()
    assert swapper.swapped_bytes == NUM_MICRO_BATCHES * sum(sum(layer.sizes().values()) for layer in layers)
    train(twins, 2)
    twins.assert_equal()


def test_a_step_of_more_micro_batches_than_the_first_is_decided_for_anew(make_twins: TwinsFactory) -> None:
    """A resumed run may begin with the last batch of an epoch."""
    twins = make_twins("llama", recompute=True, activations="swap", cpu_memory="64MiB")
    memory, decided_for = twins.engine.activation_memory, []
    memory.plan = lambda trace: decided_for.append(memory.num_together) or {}
    twins.train(2)
    train(twins, 0)
    train(twins, 1)
    assert decided_for == [1, NUM_MICRO_BATCHES]
    twins.assert_equal()


HEADS_IN_TURN = [(what, number) for number in range(NUM_MICRO_BATCHES) for what in ("forward", "backward")]
HEADS_TOGETHER = [("forward", n) for n in (3, 2, 1, 0)] + [("backward", n) for n in range(NUM_MICRO_BATCHES)]


@pytest.mark.parametrize(
    ("family", "overrides", "order"),
    [
        ("llama", {}, HEADS_IN_TURN),
        ("opt", {}, HEADS_IN_TURN),
        ("mixtral", {"output_router_logits": True}, HEADS_TOGETHER),
    ],
)
def test_logits_of_one_micro_batch_at_a_time(
    family: str, overrides: dict[str, Any], order: list[tuple[str, int]], make_twins: TwinsFactory
) -> None:
    """But for a loss that leads into the layers otherwise than through the head: then all backwards come last."""
    twins = make_twins(model_factory=partial(tiny_model, family, **overrides), recompute=True)
    train(twins, 0)  # finds out
    events: list[tuple[str, int]] = []
    number_of: ContextVar[int] = ContextVar("number_of")

    def watch(_module: nn.Module, _args: Any, logits: Tensor) -> None:
        number = number_of.get()
        events.append(("forward", number))
        logits.register_hook(lambda _gradient: events.append(("backward", number)))

    def numbered(number: int, run: Callable[[], Tensor]) -> None:
        number_of.set(number)
        run()

    handle = twins.model.lm_head.register_forward_hook(watch)
    twins.engine.run_micro_batches([partial(numbered, n, run) for n, run in enumerate(micro_batches(twins, 1))])
    handle.remove()
    assert events == order
    twins.optimizer.zero_grad()
    train(twins, 2)
    twins.assert_equal()


def test_an_interrupt_between_heads_and_layers_drops_the_step(
    make_twins: TwinsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's gradients are complete by then, and under way."""
    twins = make_twins("llama", recompute=True, hold_gradients=False)
    train(twins, 0, max_norm=0.0)

    def interrupt(_heads: MicroBatchHeads) -> None:
        raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(MicroBatchHeads, "backward", interrupt)
        with pytest.raises(Interrupted):
            twins.engine.run_micro_batches(micro_batches(twins, 1))
    for step in range(1, 3):
        train(twins, step, max_norm=0.0)
    twins.assert_equal()


class Interrupted(BaseException):
    """As `KeyboardInterrupt` is: nobody catches it by the way."""


@pytest.mark.parametrize(
    ("error", "layer", "activations"),
    [
        (ValueError("on purpose"), 0, "recompute"),
        (ValueError("on purpose"), 1, "swap"),
        (ValueError("on purpose"), 2, "keep"),
        (Interrupted(), 0, "keep"),
        (Interrupted(), 1, "recompute"),
        (Interrupted(), 2, "swap"),
    ],
)
def test_a_forward_that_fails_harms_nothing(
    error: BaseException, layer: int, activations: str, make_twins: TwinsFactory
) -> None:
    recompute = activations != "keep"
    twins = make_twins("llama", recompute=recompute, activations=activations, cpu_memory="16MiB")
    train(twins, 0)
    broken = {"calls": 0}

    def break_off(_module: nn.Module, _args: Any, _output: Any) -> None:
        broken["calls"] += 1
        if broken["calls"] == 2:
            raise error

    handle = twins.model.model.layers[layer].mlp.register_forward_hook(break_off)
    with pytest.raises(type(error)):
        twins.engine.run_micro_batches(micro_batches(twins, 1))
    handle.remove()
    assert {id(p) for p in twins.model.parameters()} == {id(part.parameter) for part in twins.engine.parameter_slices}
    for step in range(1, 3):
        train(twins, step)
    twins.assert_equal()


def test_a_backward_that_fails_drops_the_step(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", recompute=True)
    train(twins, 0)

    def fail(_gradient: Tensor) -> None:
        raise ValueError("on purpose")

    def forward_and_backward(seed: int) -> None:
        loss = twins.model(**tiny_batch(seed=seed)).loss
        if seed == 1:
            loss.register_hook(fail)
        twins.engine.defer_backward(loss)

    with pytest.raises(ValueError, match="on purpose"):
        twins.engine.run_micro_batches([partial(forward_and_backward, seed) for seed in range(3)])
    for step in range(1, 3):
        train(twins, step)
    twins.assert_equal()


def test_without_a_loss(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", recompute=True)
    with pytest.raises(RuntimeError, match="no micro-batch gave its loss"):
        twins.engine.run_micro_batches([lambda: twins.model(**tiny_batch()).loss.detach()] * 2)
    train(twins, 0)
    twins.assert_equal()


def test_a_micro_batch_that_evaluates_first(make_twins: TwinsFactory) -> None:
    """As trainers do that ask a reference for its opinion, or generate."""
    twins = make_twins("opt", recompute=True)
    for step in range(2):
        plain = micro_batches(twins, step)

        def evaluates(run: Callable[[], Tensor], times: int) -> Tensor:
            with torch.no_grad():
                for _ in range(times):
                    twins.model(**tiny_batch(seed=5))
            return run()

        for number in range(NUM_MICRO_BATCHES):
            (twins.stock(**tiny_batch(seed=100 * step + number)).loss / NUM_MICRO_BATCHES).backward()
        twins.engine.run_micro_batches([partial(evaluates, run, 1 + n) for n, run in enumerate(plain)])
        twins.step()
    twins.assert_equal()


def assert_close(twins: Any) -> None:
    """As good as equal: the contributions to a sum came in another order."""
    for name, weight in twins.stock.named_parameters():
        assert torch.allclose(twins.engine.parameters.read_parameter(name), weight, rtol=0, atol=2e-5), name


SKIPPED: ContextVar[set[int]] = ContextVar("SKIPPED", default=set())  # noqa: B039 - nobody writes to it


def model_that_skips() -> Any:
    """Its layers are left out where `SKIPPED` says so, as OPT does at random."""
    model = tiny_model("opt")

    class Skippable(type(model.model.decoder.layers[0])):  # type: ignore[misc]
        def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            return hidden if self.index in SKIPPED.get() else super().__call__(hidden, *args, **kwargs)

    for index, layer in enumerate(model.model.decoder.layers):
        layer.__class__, layer.index = Skippable, index
    return model


def test_skipped_layers(make_twins: TwinsFactory) -> None:
    """A layer that a micro-batch skips gets nothing from it, and no step of its own if all skip it."""
    twins = make_twins(model_factory=model_that_skips, recompute=True)
    for skips in ([{1}, {0, 2}, {0, 1, 2}, {0}], [{1}, {1, 2}, set(), {1}], [{1}, {1}, {1}, {1}]):

        def loss(model: Any, number: int, skips: list[set[int]] = skips) -> Tensor:
            SKIPPED.set(skips[number])
            return model(**tiny_batch(seed=number)).loss / NUM_MICRO_BATCHES

        for number in range(NUM_MICRO_BATCHES):
            loss(twins.stock, number).backward()
        together = [
            lambda number=number, loss=loss: twins.engine.defer_backward(loss(twins.model, number))
            for number in range(NUM_MICRO_BATCHES)
        ]
        twins.engine.run_micro_batches(together)
        twins.step()
    assert_close(twins)  # micro-batches of unequal depth do not reach the head in the order of their numbers
    num_updates = {part.name: part.num_updates for part in twins.engine.parameter_slices}
    for name, parameter in twins.stock.named_parameters():
        assert num_updates[name] == int(twins.stock_optimizer.state[parameter]["step"]) == (2 if ".1." in name else 3)


def model_whose_hooks_run_within_checkpoints() -> Any:
    """As before transformers 5.23."""
    model = tiny_model("opt", dropout=0.1, attention_dropout=0.1)

    class Checkpointed(type(model.model.decoder.layers[0])):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(partial(super().__call__, **kwargs), *args, use_reentrant=False)

    for layer in model.model.decoder.layers:
        layer.__class__ = Checkpointed
    return model


def test_dropout_where_hooks_run_within_checkpoints(make_twins: TwinsFactory, tmp_path: Path) -> None:
    """What is made again draws what it drew, though other micro-batches have drawn since."""
    outcomes = []
    factories = (
        model_whose_hooks_run_within_checkpoints,
        partial(tiny_model, "opt", dropout=0.1, attention_dropout=0.1),
    )
    for index, factory in enumerate(factories):
        twins = make_twins(model_factory=factory, activations="keep", ssd=str(tmp_path / str(index)))
        torch.manual_seed(7)
        for step in range(2):
            twins.engine.run_micro_batches(micro_batches(twins, step))
            twins.engine.clip_grad_norm(0.5)
            twins.optimizer.step()
        access = twins.engine.parameters
        outcomes.append({name: access.read_parameter(name) for name, _ in twins.stock.named_parameters()})
    assert all(torch.equal(outcomes[1][name], weight) for name, weight in outcomes[0].items())


def test_several_losses_and_forwards_in_a_micro_batch(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", recompute=True)

    def losses(model: Any, number: int) -> list[Tensor]:
        return [model(**tiny_batch(seed=10 * number + offset)).loss for offset in range(2)]

    def forward_and_backward(number: int) -> None:
        for loss in losses(twins.model, number):
            twins.engine.defer_backward(loss)

    for _ in range(2):
        for number in range(3):
            torch.autograd.backward(losses(twins.stock, number))
        twins.engine.run_micro_batches([partial(forward_and_backward, number) for number in range(3)])
        twins.step()
    assert_close(twins)


def test_evaluation_and_single_micro_batches_between(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", recompute=True)
    for step in range(3):
        train(twins, step)
        with torch.no_grad():
            twins.losses(50 + step)
        twins.train(1, first_seed=60 + step, max_norm=0.5)
    twins.assert_equal()
