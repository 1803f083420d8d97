"""A run with streamed experts resumes from steps and checkpoints, with streamed experts or with whole layers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from covering import slow_but
from expert_models import ALL_SLOTS, least_gpu_memory
from interrupted_runs import SETTINGS, InterruptAfter, interrupt, make_trainer
from trajectories import arguments, assert_same_tensors, dataset, logged, stored_weights
from transformers import Trainer as StockTrainer

import hf_lohan
from hf_lohan.costs import SizeClass
from hf_lohan.files import ForeignStoreError
from hf_lohan.testing.models import tiny_model

FAMILY = "mixtral"
UNCLIPPED: dict[str, Any] = {"family": FAMILY, "max_grad_norm": 0.0, "save_strategy": "steps", "save_steps": 3}
NARROW: dict[str, Any] = {
    "gpu_memory": least_gpu_memory(tiny_model(FAMILY)),
    "cpu_memory": "6MiB",
    "prefetch_blocks": 1,
}
"""These budgets have two slots for experts."""
WIDE: dict[str, Any] = {"gpu_memory": ALL_SLOTS, "cpu_memory": "16MiB"}


def num_expert_slots(trainer: Any) -> int:
    return int(trainer.offload_engine.layout.plan.num_slots[SizeClass.EXPERT])


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Losses and weights of the stock Trainer."""
    model = tiny_model(FAMILY)
    args = arguments(tmp_path_factory.mktemp("stock"), **{**SETTINGS, "max_grad_norm": 0.0})
    trainer = StockTrainer(model, args, train_dataset=dataset())
    trainer.train()
    return logged(trainer)[0], {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def assert_as_stock(trainer: Any, stock: Any) -> None:
    assert logged(trainer)[0] == stock[0]
    assert_same_tensors(stored_weights(trainer), stock[1])
    trainer.offload_engine.close()


@pytest.mark.covering(0)
@pytest.mark.parametrize(("before", "after"), [("streamed", "with_layer"), ("with_layer", "streamed")])
def test_a_checkpoint_resumes_in_either_form(before: str, after: str, stock: Any, tmp_path: Path) -> None:
    first = make_trainer(tmp_path / "a", InterruptAfter(3), **UNCLIPPED, offload={**WIDE, "experts": before})
    interrupt(first)
    second = make_trainer(tmp_path / "b", **UNCLIPPED, offload={"gpu_memory": "1MiB", "experts": after})
    second.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert (num_expert_slots(second) > 0) is (after == "streamed")
    assert_as_stock(second, stock)


@pytest.mark.slow
def test_the_last_step_resumes_with_other_budgets(stock: Any, tmp_path: Path) -> None:
    for step, budgets in ((2, NARROW), (5, WIDE)):
        broken = make_trainer(tmp_path, InterruptAfter(step), **UNCLIPPED, offload={**budgets, "experts": "streamed"})
        with pytest.raises(KeyboardInterrupt):
            broken.train(resume_from_checkpoint="last_step" if step > 2 else None)
        assert num_expert_slots(broken) == (12 if budgets is WIDE else 2)
        broken.offload_engine.close()
        assert hf_lohan.last_step(tmp_path) == step
    last = make_trainer(tmp_path, **UNCLIPPED, offload={**NARROW, "experts": "streamed"})
    last.train(resume_from_checkpoint="last_step")
    assert_as_stock(last, stock)


@pytest.mark.slow
@pytest.mark.parametrize("stored", slow_but(["streamed"], ["streamed", "with_layer"]))
def test_auto_follows_the_store(stored: str, stock: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With these budgets a new run would choose the other form."""
    first = make_trainer(tmp_path, InterruptAfter(4), **UNCLIPPED, offload={"gpu_memory": "1MiB", "experts": stored})
    interrupt(first)
    other = "with_layer" if stored == "streamed" else "streamed"
    refused = make_trainer(tmp_path, **UNCLIPPED, offload={"gpu_memory": "1MiB", "experts": other})
    with pytest.raises(ForeignStoreError, match=f"set experts to auto or {stored} to continue from it"):
        refused.train(resume_from_checkpoint="last_step")
    budgets = WIDE if stored == "streamed" else {"gpu_memory": "1MiB"}
    caplog.set_level(logging.INFO, logger="hf_lohan")
    last = make_trainer(tmp_path, **UNCLIPPED, offload={**budgets, "experts": "auto"})
    last.train(resume_from_checkpoint="last_step")
    messages = [record.message for record in caplog.records if "as in the store in" in record.message]
    assert len(messages) == 1 and ("one by one" in messages[0]) is (stored == "streamed")
    assert (num_expert_slots(last) > 0) is (stored == "streamed")
    assert_as_stock(last, stock)
    elsewhere = make_trainer(tmp_path / "elsewhere", **UNCLIPPED, max_steps=1, offload={**budgets, "experts": "auto"})
    elsewhere.train()
    assert (num_expert_slots(elsewhere) > 0) is (stored == "with_layer")
    elsewhere.offload_engine.close()
