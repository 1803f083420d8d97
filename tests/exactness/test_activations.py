"""Losses, norms and weights equal those of the stock Trainer bit for bit, wherever activations are stored."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trajectories import Trajectory, arguments, assert_same_bits, dataset, finish
from transformers import Trainer as StockTrainer
from transformers import TrainerCallback

import hf_lohan
from hf_lohan.costs import Placement
from hf_lohan.testing.models import FAMILIES, tiny_model

NUM_STEPS = 3
ROOM = {"cpu_memory": "6MiB", "gpu_memory": "2MiB", "durability": "checkpoint", "_resident_records": "none"}
DROPOUT: dict[str, dict[str, float]] = {
    "opt": {"dropout": 0.1, "attention_dropout": 0.1},
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
}
CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
SETTINGS: dict[str, dict[str, Any]] = {
    "clipped": {"max_grad_norm": 0.3, **CHECKPOINTING},
    "updates_in_backward": {"max_grad_norm": 0.0},
    "accumulated": {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2, **CHECKPOINTING},
}


def model_of(family: str) -> Any:
    return tiny_model(family, **DROPOUT.get(family, {"attention_dropout": 0.1}))


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Make batches of different lengths. The longest is not the first."""
    length = 7 + rows[0]["input_ids"][0] % 25
    return {key: torch.tensor([row[key][:length] for row in rows]) for key in rows[0]}


class Mixes(TrainerCallback):
    """Draws a new placement for each operation of each layer after each step."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.draw = random.Random(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        memory = self.trainer.offload_engine.planned_memory
        choices = list(Placement)
        memory.set_placements(
            {
                name: {what: self.draw.choice(choices) for what in operations}
                for name, operations in memory.sizes.items()
            }
        )


def data() -> dict[str, Any]:
    return {"train_dataset": dataset(48, 32), "eval_dataset": dataset(4, 32), "data_collator": collate}


def train_stock(model: Any, folder: Path, **settings: Any) -> Trajectory:
    return finish(StockTrainer(model, arguments(folder, max_steps=NUM_STEPS, **settings), **data()))


def train_offloaded(model: Any, folder: Path, mode: str, **settings: Any) -> tuple[Trajectory, int]:
    """Return the trajectory and the number of bytes of activations that were swapped."""
    args = arguments(folder, max_steps=NUM_STEPS, **settings)
    mixes = Mixes()
    offload = {**ROOM, "activations": "swap" if mode == "mixed" else mode}
    trainer = hf_lohan.Trainer(model, args, offload=offload, callbacks=[mixes] if mode == "mixed" else [], **data())
    mixes.trainer = trainer
    trajectory = finish(trainer)
    return trajectory, trainer.offload_engine.activations.swapper.swapped_bytes


@pytest.mark.covering(0)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_mode_trains_as_stock(family: str, setting: str, tmp_path: Path) -> None:
    stock = train_stock(model_of(family), tmp_path / "stock", **SETTINGS[setting])
    for mode in ("swap", "mixed", "keep") if setting == "accumulated" else ("mixed",):
        ours, swapped_bytes = train_offloaded(model_of(family), tmp_path / mode, mode, **SETTINGS[setting])
        assert_same_bits(ours, stock)
        assert (swapped_bytes > 0) is (mode in ("swap", "mixed"))


@pytest.mark.covering(0)
@pytest.mark.parametrize("checkpointing", [{}, CHECKPOINTING], ids=["engine_recomputes", "trainer_checkpoints"])
def test_a_streamed_model_trains_as_stock(checkpointing: dict[str, Any], tmp_path: Path) -> None:
    """The engine exists before Trainer enables checkpointing."""
    model_of("llama").save_pretrained(tmp_path / "checkpoint")
    stock = train_stock(model_of("llama").from_pretrained(tmp_path / "checkpoint"), tmp_path / "stock", **checkpointing)
    ours, swapped_bytes = train_offloaded(tmp_path / "checkpoint", tmp_path / "ours", "swap", **checkpointing)
    assert_same_bits(ours, stock)
    assert swapped_bytes > 0


def test_adapters_train_as_stock(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"
        )
        return peft.get_peft_model(model_of("llama"), config)

    stock = train_stock(adapted(), tmp_path / "stock", **CHECKPOINTING)
    ours, swapped_bytes = train_offloaded(adapted(), tmp_path / "ours", "mixed", **CHECKPOINTING)
    assert_same_bits(ours, stock)
    assert swapped_bytes > 0


def adapters(peft: Any) -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model_of("llama"), config, adapter_name="first")
    model.add_adapter("second", config)
    use_adapters(model, "first", "second")
    return model


def use_adapters(model: Any, *names: str) -> None:
    model.base_model.set_adapter(list(names))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def of_two_adapters(model: Any, inputs: Any) -> Any:
    losses = []
    for name in ("first", "second"):
        use_adapters(model, name)
        losses.append(model(**inputs).loss)
    return losses[0] + 2 * losses[1]


def test_layers_are_recomputed_with_the_adapters_of_their_forward(tmp_path: Path) -> None:
    """Adapters change between a forward and its backward. `engine/test_activation_state.py` has other changes."""
    peft = pytest.importorskip("peft")
    outcomes = []
    for base in (StockTrainer, hf_lohan.Trainer):

        class OwnLoss(base):  # type: ignore[misc, valid-type]
            def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
                return of_two_adapters(model, inputs)

        offload = {} if base is StockTrainer else {"offload": {**ROOM, "activations": "recompute"}}
        args = arguments(tmp_path / base.__module__, max_steps=3, remove_unused_columns=False)
        trainer = OwnLoss(adapters(peft), args, train_dataset=dataset(24, 12), **offload)
        outcomes.append(finish(trainer))
    assert_same_bits(outcomes[1], outcomes[0])
