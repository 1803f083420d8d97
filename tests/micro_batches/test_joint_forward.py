"""Joint forwards support models that evaluate first, skip layers or draw random numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engines import TwinsFactory
from joint_steps import NUM_MICRO_BATCHES, assert_close, micro_batches
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_lohan.testing.models import tiny_batch, tiny_model


def test_a_micro_batch_may_evaluate_first(make_twins: TwinsFactory) -> None:
    """Trainers do this to run a reference model or to generate."""
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


SKIPPED: ContextVar[set[int]] = ContextVar("SKIPPED", default=set())  # noqa: B039 - the default is never changed


def model_that_skips() -> Any:
    """Return a model that skips the layers in `SKIPPED`, as OPT does at random."""
    model = tiny_model("opt")

    class Skippable(type(model.model.decoder.layers[0])):  # type: ignore[misc]
        def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            return hidden if self.index in SKIPPED.get() else super().__call__(hidden, *args, **kwargs)

    for index, layer in enumerate(model.model.decoder.layers):
        layer.__class__, layer.index = Skippable, index
    return model


def test_layers_may_be_skipped(make_twins: TwinsFactory) -> None:
    """A layer gets no gradient from a micro-batch that skips it, and no update if all skip it."""
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
    assert_close(twins)  # micro-batches of unequal depth reach the head in another order
    num_updates = {part.name: count for part, count in twins.engine.step_counts.items()}
    for name, parameter in twins.stock.named_parameters():
        assert num_updates[name] == int(twins.stock_optimizer.state[parameter]["step"]) == (2 if ".1." in name else 3)


def model_whose_hooks_run_within_checkpoints() -> Any:
    """Return a model like those of transformers before 5.23."""
    model = tiny_model("opt", dropout=0.1, attention_dropout=0.1)

    class Checkpointed(type(model.model.decoder.layers[0])):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(partial(super().__call__, **kwargs), *args, use_reentrant=False)

    for layer in model.model.decoder.layers:
        layer.__class__ = Checkpointed
    return model


def test_dropout_is_the_same_if_hooks_run_within_checkpoints(make_twins: TwinsFactory, tmp_path: Path) -> None:
    """Recomputed layers draw the same random numbers, although other micro-batches have drawn since."""
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
            twins.optimizer.zero_grad()
        access = twins.engine.parameters
        outcomes.append({name: access.read_parameter(name) for name, _ in twins.stock.named_parameters()})
    assert all(torch.equal(outcomes[1][name], weight) for name, weight in outcomes[0].items())
