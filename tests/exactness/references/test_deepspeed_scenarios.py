"""Scenarios of DeepSpeed's tests of offloading, against torch in memory: several backwards for a step, the norm of
summed gradients, clipping, and checkpoints of a state on SSD.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trajectories import arguments, assert_same_bits, assert_same_tensors, dataset, finish, stored_weights
from transformers import Trainer as StockTrainer

import hf_lohan
from hf_lohan.testing.models import tiny_batch, tiny_model

pytestmark = pytest.mark.slow
ACCUMULATED = 4


@pytest.mark.parametrize("is_announced", [True, False], ids=["announced", "unannounced"])
@pytest.mark.parametrize(("num_backwards", "num_steps"), [(1, 1), (4, 1), (3, 3)], ids=["1x1", "4x1", "3x3"])
def test_several_backwards_for_a_step(num_backwards: int, num_steps: int, is_announced: bool, make_twins: Any) -> None:
    twins = make_twins(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3, fused=True))
    for step in range(num_steps):
        for number in range(num_backwards):
            if is_announced:
                twins.engine.announce_backward(is_final=number == num_backwards - 1)
            twins.backward(num_backwards * step + number)
        twins.step()
    twins.assert_equal()


@pytest.mark.parametrize("cpu_memory", ["3MiB", "64MiB"], ids=["spilled", "in RAM"])
def test_the_norm_grows_with_each_summed_backward(cpu_memory: str, make_twins: Any) -> None:
    """An offloaded sum that ignores all backwards but the first has the norm of the first."""
    twins = make_twins(cpu_memory=cpu_memory)
    norms = []
    for num_backwards in range(1, ACCUMULATED + 1):
        for number in range(num_backwards):
            twins.engine.announce_backward(is_final=number == num_backwards - 1)
            twins.backward(number)
        norms.append(float(torch.nn.utils.clip_grad_norm_(twins.stock.parameters(), float("inf"))))
        twins.clip(float("inf"))
        twins.step()
    twins.assert_equal()
    assert norms == sorted(set(norms)) and len(norms) == ACCUMULATED


@pytest.mark.parametrize("max_norm", [1.0, 0.5, 0.05])
@pytest.mark.parametrize("clip", ["defer", "speculate"])
def test_gradients_are_clipped_by_their_norm(clip: str, max_norm: float, make_twins: Any) -> None:
    twins = make_twins(_clip=clip)
    twins.train(4, max_norm=max_norm)
    twins.assert_equal()


def test_clipping_by_value_is_refused(tmp_path: Path) -> None:
    plugin = hf_lohan.LohanPlugin(offload={"cpu_memory": "4MiB", "gpu_memory": "2MiB", "ssd": str(tmp_path)})
    accelerator = hf_lohan.Accelerator(cpu=True, lohan_plugin=plugin)
    model: Any = tiny_model("llama").train()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(**tiny_batch()).loss)
    with pytest.raises(ValueError, match="clip_grad_value_ is not supported under offload; use clip_grad_norm_"):
        accelerator.clip_grad_value_(model.parameters(), 0.5)
    optimizer.zero_grad()
    hf_lohan.engine_of(model).close()


PLACES: dict[str, dict[str, Any]] = {
    "weights on device, states on SSD": {"gpu_memory": "64MiB", "cpu_memory": "4MiB"},
    "weights in RAM, states on SSD": {"gpu_memory": "2MiB", "cpu_memory": "7MiB"},
    "states in RAM": {"gpu_memory": "64MiB", "cpu_memory": "64MiB"},
    "all in RAM": {"gpu_memory": "2MiB", "cpu_memory": "64MiB"},
    "all on SSD": {"gpu_memory": "2MiB", "cpu_memory": "4MiB"},
}


@pytest.mark.parametrize("place", PLACES)
def test_a_checkpoint_continues_with_the_same_numbers(place: str, tmp_path: Path) -> None:
    """Two steps, a checkpoint, two steps; then the two last steps again, by another model in another folder."""
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1.5e-4}

    def trainer(folder: str, seed: int) -> Any:
        model = tiny_model("llama", num_layers=2, seed=seed)
        args = arguments(tmp_path / folder, **settings)
        return hf_lohan.Trainer(model, args, train_dataset=dataset(), eval_dataset=dataset(4), offload=PLACES[place])

    stock = StockTrainer(
        tiny_model("llama", num_layers=2, seed=123),
        arguments(tmp_path / "stock", **{**settings, "save_strategy": "no"}),
        train_dataset=dataset(),
        eval_dataset=dataset(4),
    )
    expected = finish(stock)
    first, second = trainer("first", 123), trainer("second", 9)
    whole = finish(first)
    second.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
    assert second.evaluate()["eval_loss"] == stock.evaluate()["eval_loss"]
    assert_same_tensors(stored_weights(second), whole.weights)
    second.offload_engine.close()
    assert_same_bits(whole, expected, norms=False)
