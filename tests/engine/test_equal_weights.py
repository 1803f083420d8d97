"""Ranks that build different models are refused with the name of the first weight that differs."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from hf_lohan.engine import check_equal_weights
from hf_lohan.ranks import Links, RanksDisagreeError
from hf_lohan.testing.models import tiny_model
from hf_lohan.testing.thread_ranks import run_ranks


def check_by_ranks(*models: nn.Module) -> None:
    """Let each rank check its model."""
    run_ranks(len(models), lambda links: check_equal_weights(models[links.ranks.rank].named_parameters(), links))


def test_equal_models_pass_and_weights_of_every_kind_are_compared() -> None:
    models = [tiny_model("llama", num_layers=1) for _ in range(3)]
    check_by_ranks(*models)
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"):
        weight = models[1].get_parameter(name)
        before = weight.detach().clone()
        with torch.no_grad():
            weight.view(-1)[-1] += 1
        with pytest.raises(RanksDisagreeError, match=rf"{re.escape(name)} differs between rank 1 and rank 0"):
            check_by_ranks(*models[:2])
        with torch.no_grad():
            weight.copy_(before)
    check_by_ranks(*models)


def test_a_single_rank_reads_no_weights() -> None:
    def weights() -> Iterator[tuple[str, Tensor]]:
        pytest.fail("a weight was read")
        yield "", torch.empty(0)

    check_equal_weights(weights(), Links.alone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_of_one_weight_is_found(dtype: torch.dtype) -> None:
    models = [tiny_model("llama").to(dtype) for _ in range(3)]
    name = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        weight = dict(models[2].named_parameters())[name]
        weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(torch.inf, dtype=dtype))
    with pytest.raises(RanksDisagreeError, match=rf"{name} differs between rank 2 and rank 0; set the same seed"):
        check_by_ranks(*models)


def test_another_model_is_refused() -> None:
    with pytest.raises(RanksDisagreeError, match=r"rank 0 has \d+ weights and rank 1 has \d+; build the same model"):
        check_by_ranks(tiny_model("llama"), tiny_model("gpt2"))
