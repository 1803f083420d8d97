"""Layers in chunks draw each chunk's random numbers once more in its recomputation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hf_lohan.activations import ActivationTiers
from hf_lohan.device import CpuDevice
from hf_lohan.huggingface.attention import run_layers_in_chunks
from hf_lohan.testing.models import tiny_model

DROPOUT = 0.25
CHUNK = 6
ROWS, TOKENS = 2, 16


def model_of(**settings: Any) -> Any:
    dropouts = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), DROPOUT)
    return tiny_model("gpt2", **{**dropouts, "use_cache": False, **settings}).double().train()


def in_chunks(model: Any, chunk_tokens: int) -> Any:
    names = {layer: str(number) for number, layer in enumerate(model.transformer.h)}
    chunked = run_layers_in_chunks(model, ActivationTiers(CpuDevice(), names), names)
    chunked.cut(chunk_tokens)
    return chunked


def loss_of(model: Any, seed: int = 3) -> torch.Tensor:
    ids = torch.randint(5, 60, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(seed)
    logits = model(input_ids=ids).logits  # transformers computes the loss in float32
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("chunk_tokens", [CHUNK, TOKENS], ids=["within_rows", "rows"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_gradients_equal_finite_differences(implementation: str, chunk_tokens: int) -> None:
    """The recomputation of each chunk must draw the numbers of its forward."""
    model = model_of(attn_implementation=implementation)
    copies = {sign: copy.deepcopy(model) for sign in (1e-5, -1e-5)}
    chunked = in_chunks(model, chunk_tokens)
    loss = loss_of(model)
    after = torch.get_rng_state()
    assert chunked.has_cut
    loss.backward()
    assert torch.equal(torch.get_rng_state(), after)
    generator = torch.Generator().manual_seed(1)
    parameters = list(model.transformer.h.parameters())
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
    expected = sum(float((p.grad * v).sum()) for p, v in zip(parameters, directions, strict=True))
    losses = []
    for sign, moved in copies.items():
        with torch.no_grad():
            for p, v in zip(moved.transformer.h.parameters(), directions, strict=True):
                p += sign * v
        in_chunks(moved, chunk_tokens)
        losses.append(float(loss_of(moved).detach()))
    assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(expected, rel=1e-4)
    assert float(loss_of(model, seed=4).detach()) != float(loss.detach())


class ReplayedDropout(nn.Module):
    """Draws masks, or takes those that another one has drawn for some tokens each."""

    def __init__(self, drawn: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.drawn = drawn
        self.masks: tuple[list[torch.Tensor], ...] = ([],)  # not put back, so that all chunks are seen

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.drawn is not None:
            mask = torch.cat(self.drawn, 1)
        else:
            mask = (torch.rand_like(hidden) >= DROPOUT) / (1 - DROPOUT)
            self.masks[0].append(mask)
        return hidden * mask


def test_whole_layers_with_the_same_masks_have_the_same_gradients() -> None:
    def gradients(model: Any) -> list[torch.Tensor]:
        ids = torch.randint(5, 60, (1, TOKENS), generator=torch.Generator().manual_seed(0))
        torch.manual_seed(3)
        model(input_ids=ids, labels=ids).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    chunked = model_of(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    whole = copy.deepcopy(chunked)
    cut = in_chunks(chunked, CHUNK)
    masks = []
    for layer in chunked.transformer.h:
        layer.mlp.dropout = ReplayedDropout()
        masks.append(layer.mlp.dropout.masks[0])
    # The trial draws as well, so that of a second step is compared.
    gradients(chunked)
    chunked.zero_grad()
    for of_layer in masks:
        of_layer.clear()
    ours = gradients(chunked)
    assert cut.has_cut
    num_chunks = -(-TOKENS // CHUNK)
    for layer, of_layer in zip(whole.transformer.h, masks, strict=True):
        assert [mask.shape[1] for mask in of_layer[:num_chunks]] == [6, 6, 4]
        # The backward runs the last chunk first.
        assert all(
            torch.equal(a, b) for a, b in zip(of_layer[:num_chunks], of_layer[: num_chunks - 1 : -1], strict=True)
        )
        assert not torch.equal(of_layer[0], of_layer[1])
        share = float((torch.cat(of_layer[:num_chunks], 1) == 0).double().mean())
        assert share == pytest.approx(DROPOUT, abs=0.1)
        layer.mlp.dropout = ReplayedDropout(of_layer[:num_chunks])
    for one, other in zip(ours, gradients(whole), strict=True):
        assert (one - other).norm() <= 1e-6 * other.norm()  # chunks' gradients are added in float32


class RowDropout(nn.Dropout):
    """Drops whole rows, as stochastic depth does."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * torch.empty(hidden.shape[0], 1, 1, dtype=hidden.dtype).bernoulli_(0.5)


class WrittenBuffer(nn.Dropout):
    """Keeps the largest value that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.largest = torch.maximum(self.largest, hidden.detach().max().float())
        return hidden


@pytest.mark.parametrize(
    ("dropout", "chunk_tokens", "reason"),
    [
        (RowDropout, CHUNK, "draws random numbers for more than a token"),
        (RowDropout, TOKENS, None),
        (WrittenBuffer, CHUNK, "changes mlp.dropout.largest"),
    ],
)
def test_layers_stay_whole_if_they_draw_for_rows_or_change_buffers(
    dropout: type[nn.Module], chunk_tokens: int, reason: str | None
) -> None:
    model = model_of(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    for layer in model.transformer.h:
        layer.mlp.dropout = dropout()
    chunked = in_chunks(model, chunk_tokens)
    loss_of(model).backward()
    assert chunked.reasons() == ([] if reason is None else [reason])
    assert chunked.has_cut is (reason is None)
