"""Ranks that were seeded differently are told so, by the weight that differs."""

from __future__ import annotations

import pytest
import torch

from hf_lohan.engine import refuse_other_weights
from hf_lohan.ranks import Links, RanksDisagreeError
from hf_lohan.testing.models import tiny_model
from hf_lohan.testing.thread_ranks import run_ranks


def test_equal_models_are_fine() -> None:
    models = [tiny_model("llama") for _ in range(3)]
    models[0].to(torch.float32)
    run_ranks(3, lambda links: refuse_other_weights(models[links.ranks.rank].named_parameters(), links))
    refuse_other_weights(models[0].named_parameters(), Links.alone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_of_one_weight_is_found(dtype: torch.dtype) -> None:
    models = [tiny_model("llama").to(dtype) for _ in range(3)]
    name = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        weight = dict(models[2].named_parameters())[name]
        weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(torch.inf, dtype=dtype))
    with pytest.raises(RanksDisagreeError, match=rf"{name} is another one on rank 2 than on rank 0; set the same seed"):
        run_ranks(3, lambda links: refuse_other_weights(models[links.ranks.rank].named_parameters(), links))


def test_another_model_is_told() -> None:
    models = [tiny_model("llama"), tiny_model("gpt2")]
    with pytest.raises(RanksDisagreeError, match=r"rank 0 has \d+ weights and rank 1 \d+; build the same model"):
        run_ranks(2, lambda links: refuse_other_weights(models[links.ranks.rank].named_parameters(), links))
