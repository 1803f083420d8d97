"""Full fine-tuning of a quantized checkpoint equals the stock Trainer on weights that transformers dequantizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quantized_folders import KINDS, dequantized
from trajectories import Trajectory, arguments, assert_same_bits, dataset, finish, logged, stored_weights
from transformers import AutoModelForCausalLM

import hf_lohan

OFFLOAD = {"cpu_memory": "16MiB", "gpu_memory": "16MiB"}


@pytest.mark.covering(0)
@pytest.mark.parametrize("kind", KINDS)
def test_training_equals_the_stock_trainer_to_the_bit(kind: str, tmp_path: Path) -> None:
    path = KINDS[kind][0](tmp_path / "quantized")
    settings: dict[str, Any] = {"max_steps": 4, "max_grad_norm": 0.5}
    model = dequantized(path, kind)
    stock = finish(transformers.Trainer(model, arguments(tmp_path / "stock", **settings), train_dataset=dataset()))
    assert max(stock.norms) > 0.5
    trainer = hf_lohan.Trainer(
        str(path), arguments(tmp_path / "ours", **settings), train_dataset=dataset(), offload=OFFLOAD
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    ours = Trajectory(*logged(trainer), stored_weights(trainer))
    trainer.offload_engine.close()
    assert_same_bits(ours, stock)
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, weight in saved.named_parameters():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, stock.weights[name]), name
