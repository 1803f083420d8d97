"""Losses, gradient norms and weights of three offloaded steps equal those in golden_losses.json.

The other tests compare with the stock Trainer, so they miss a change that both make.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import model_of
from trajectories import SMALL_BUDGETS, arguments, dataset, logged, stored_weights

import hf_lohan
from hf_lohan.testing.models import FAMILIES, tiny_model

GOLDEN = Path(__file__).with_name("golden_losses.json")
HOW_TO_RENEW = f"LOHAN_TEST_RENEW_GOLDEN=1 python -m pytest tests/exactness/{Path(__file__).name}"
RENEW = "LOHAN_TEST_RENEW_GOLDEN" in os.environ
RELATIVE_TOLERANCE = 1e-5
"""Other CPUs and versions of MKL sum in another order."""
SETTINGS: dict[str, Any] = {
    "max_steps": 3,
    "max_grad_norm": 0.5,
    "weight_decay": 0.1,
    "adam_epsilon": 1e-6,  # the gradient of a key bias is rounding noise, and a smaller epsilon would amplify it
}


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "qwen3", "mixtral", "gemma2"])
def test_three_steps_equal_the_recorded_ones(family: str, tmp_path: Path) -> None:
    measured = train(family, tmp_path)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    if RENEW:
        others = json.loads(GOLDEN.read_text())["families"] if GOLDEN.exists() else {}
        golden = {"renew with": HOW_TO_RENEW, "versions": versions, "families": {**others, family: measured}}
        GOLDEN.write_text(json.dumps(golden, indent=2) + "\n")
    golden = json.loads(GOLDEN.read_text())
    context = f"recorded with {golden['versions']}, now {versions}; if this is intended: {HOW_TO_RENEW}"
    for name, expected in golden["families"][family].items():
        assert measured[name] == pytest.approx(expected, rel=RELATIVE_TOLERANCE), f"{name}: {context}"


def train(family: str, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = tiny_model(family) if family in FAMILIES else model_of(family)
    trainer = hf_lohan.Trainer(model, arguments(folder, **SETTINGS), train_dataset=dataset(), offload=SMALL_BUDGETS)
    trainer.train()
    losses, norms, _ = logged(trainer)
    assert min(norms) > SETTINGS["max_grad_norm"]
    weights = stored_weights(trainer)
    trainer.offload_engine.close()
    sums = [weight.to(torch.float64).abs().sum().item() for weight in weights.values()]
    return {"losses": losses, "gradient_norms": norms, "sum_of_absolute_weights": sum(sums)}
