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
from hf_lohan.huggingface import engine_of

OFFLOAD = {"cpu_memory": "16MiB", "gpu_memory": "16MiB"}


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


def test_bfloat16_equals_training_from_dequantized_float32_files(tmp_path: Path) -> None:
    path = KINDS["mixtral-fp8"][0](tmp_path / "quantized")
    dequantized(path, "mixtral-fp8").save_pretrained(tmp_path / "products")
    runs = [
        finish(
            hf_lohan.Trainer(
                str(folder),
                arguments(tmp_path / f"{folder.name}_run", max_steps=3, max_grad_norm=0.5, bf16=True),
                train_dataset=dataset(),
                offload=OFFLOAD,
            )
        )
        for folder in (path, tmp_path / "products")
    ]
    assert {weight.dtype for weight in runs[0].weights.values()} == {torch.bfloat16}
    assert_same_bits(*runs)


def test_adapters_of_a_quantized_base_equal_stock(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    path = KINDS["llama-fp8"][0](tmp_path / "quantized")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    settings: dict[str, Any] = {"max_steps": 3, "max_grad_norm": 0.1, "learning_rate": 1e-2}
    torch.manual_seed(1)
    model = peft.get_peft_model(dequantized(path, "llama-fp8"), lora)
    stock = finish(transformers.Trainer(model, arguments(tmp_path / "stock", **settings), train_dataset=dataset()))
    torch.manual_seed(1)
    streamed = hf_lohan.from_pretrained(path, {**OFFLOAD, "ssd": str(tmp_path / "store")}, peft_config=lora)
    trainer = hf_lohan.Trainer(streamed, arguments(tmp_path / "ours", **settings), train_dataset=dataset())
    assert engine_of(streamed) is not None
    assert_same_bits(finish(trainer), stock)
