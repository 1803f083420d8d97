"""With streamed experts, losses and weights equal those of the stock Trainer bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import slow_but
from expert_models import ALL_SLOTS, FAMILIES, expert_model, least_gpu_memory
from torch import Tensor
from trajectories import arguments, assert_same_bits, dataset, finish, train_stock
from transformers import Trainer as StockTrainer

import hf_lohan
from hf_lohan.costs import SizeClass
from hf_lohan.engine import OffloadEngine

NUM_STEPS = 3
UNCLIPPED: dict[str, Any] = {"max_steps": NUM_STEPS, "max_grad_norm": 0.0, "weight_decay": 0.1}
QUICK_FAMILIES = ("gpt_oss", "qwen2_moe", "deepseek_v3", "phimoe")
"""One family for each kind: transposed and interleaved weights with biases, shared experts, a router with groups, and a
router that draws random numbers.
"""


@pytest.mark.covering(1)
@pytest.mark.parametrize("slots", ["two", "all"])
@pytest.mark.parametrize("activations", ["recompute", "swap", "keep", "auto"])
@pytest.mark.parametrize("family", slow_but(QUICK_FAMILIES, FAMILIES))
def test_every_family_trains_as_stock(family: str, activations: str, slots: str, tmp_path: Path) -> None:
    model = expert_model(family)
    gpu_memory = least_gpu_memory(model, activations=activations) if slots == "two" else ALL_SLOTS
    trainer = hf_lohan.Trainer(
        model,
        arguments(tmp_path / "ours", **UNCLIPPED),
        train_dataset=dataset(),
        offload={
            "gpu_memory": gpu_memory, "cpu_memory": "6MiB", "prefetch_blocks": 1, "experts": "streamed",
            "activations": activations,
        },
    )  # fmt: skip
    ours = finish(trainer)
    engine: OffloadEngine = trainer.offload_engine
    num_blocks = sum(block.size_class is SizeClass.EXPERT for block in engine.layout.blocks)
    assert engine.layout.plan.num_slots[SizeClass.EXPERT] == (2 if slots == "two" else num_blocks)
    stock = train_stock(family, tmp_path / "stock", {}, make_model=expert_model, **UNCLIPPED)
    assert_same_bits(ours, stock, norms=False)


@pytest.mark.parametrize("clip", ["defer", "speculate"])
def test_the_stock_trainer_equals_ours_if_it_clips_by_our_norms(clip: str, tmp_path: Path) -> None:
    """The first norm equals the stock norm up to rounding. Later weights would differ, so stock clips by our norms."""
    settings: dict[str, Any] = {"max_steps": NUM_STEPS, "max_grad_norm": 1.0, "gradient_accumulation_steps": 2}
    trainer = hf_lohan.Trainer(
        expert_model("mixtral"),
        arguments(tmp_path / "ours", **settings),
        train_dataset=dataset(),
        offload={"gpu_memory": "512KiB", "cpu_memory": "6MiB", "experts": "streamed", "_clip": clip},
    )
    ours = finish(trainer)
    assert any(norm > 1.0 for norm in ours.norms)
    args = arguments(tmp_path / "given", **settings)
    given: Any = StockTrainer(expert_model("mixtral"), args, train_dataset=dataset())
    norms = iter(ours.norms)

    def clip_by_ours(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        norm = torch.tensor(next(norms))
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    given.accelerator.clip_grad_norm_ = clip_by_ours
    assert_same_bits(ours, finish(given), norms=False)
    assert next(norms, None) is None
    stock = train_stock("mixtral", tmp_path / "stock", {}, make_model=expert_model, **settings)
    assert ours.norms[0] == pytest.approx(stock.norms[0], rel=1e-5)
