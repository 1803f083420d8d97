"""A model that generates from the store says what it says in memory, to the token, and its weights are stored once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import model_of
from transformers import AutoModelForCausalLM

import hf_lohan
from hf_lohan.huggingface import engine_of
from hf_lohan.planning import bytes_per_token
from hf_lohan.timeline import SSD_READ

NUM_LAYERS = 6
PROMPT = torch.arange(3, 13).view(2, 5)
GREEDY = {"do_sample": False, "max_new_tokens": 9}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "max_new_tokens": 9}
BEAMS = {"do_sample": False, "num_beams": 3, "max_new_tokens": 9}
DEPTH = {"gpt2": "n_layer"}
BUDGETS = {
    "llama": "330KiB",
    "opt": "850KiB",
    "gpt2": "470KiB",
    "qwen2_tied": "290KiB",
    "mixtral": "840KiB",
    "qwen3_moe": "330KiB",
}
"""For keys and values, the modules outside the layers and four of six layers."""


@pytest.fixture
def checkpoint_of(tmp_path: Path) -> Callable[[str], Path]:
    def make(architecture: str) -> Path:
        torch.manual_seed(0)
        folder = tmp_path / architecture
        model_of(architecture, **{DEPTH.get(architecture, "num_hidden_layers"): NUM_LAYERS}).save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    models = []

    def open_model(checkpoint: Path, **options: Any) -> Any:
        settings = {
            **{"cpu_memory": "4MiB", "gpu_memory": BUDGETS[checkpoint.name], "ssd": str(tmp_path / "store")},
            **{"cpu_threads": torch.get_num_threads()},  # else sums have another order
            **options.pop("settings", {}),
        }
        model = hf_lohan.load_for_generation(
            checkpoint, settings, max_length=14, num_sequences=6, torch_device="cpu", **options
        )
        models.append(model)
        return model

    yield open_model
    for model in models:
        engine_of(model).close()


def generated(model: Any, settings: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    return model.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), pad_token_id=0, eos_token_id=None, output_logits=True,
        return_dict_in_generate=True, **settings,
    )


@pytest.mark.parametrize("architecture", BUDGETS)
def test_tokens_and_logits_are_those_in_memory(
    architecture: str, checkpoint_of: Callable[[str], Path], load: Callable[..., Any]
) -> None:
    checkpoint = checkpoint_of(architecture)
    stock = AutoModelForCausalLM.from_pretrained(checkpoint)
    expected = [generated(stock, settings) for settings in (GREEDY, SAMPLED, BEAMS)]
    for _ in range(2):  # the second time without the checkpoint's weights
        model = load(checkpoint, settings={"resident_records": "none"})
        engine = engine_of(model)
        assert engine is not None
        assert len(engine.layout.kept_layers) == 1 and bytes_per_token(engine.layout) > 0
        for settings, stocks in zip((GREEDY, SAMPLED, BEAMS), expected, strict=True):
            ours = generated(model, settings)
            assert torch.equal(ours.sequences, stocks.sequences)
            for mine, others in zip(ours.logits, stocks.logits, strict=True):
                assert torch.equal(mine, others)
        engine.close()
