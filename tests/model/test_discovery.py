"""The layers of every causal LM are found, and every parameter lies in exactly one block."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, NUM_LAYERS, model_of
from torch import nn

from hf_lohan.costs import SizeClass
from hf_lohan.model import DiscoveryError, discover_blocks
from hf_lohan.model.discovery import find_layers
from hf_lohan.testing.models import tiny_model


def on_meta(architecture: str) -> Any:
    with torch.device("meta"):
        return model_of(architecture)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_parameter_is_in_exactly_one_block(architecture: str) -> None:
    model = on_meta(architecture)
    blocks = discover_blocks(model).blocks
    placed = Counter(part.parameter for block in blocks for part in block.slices)
    assert set(placed.values()) == {1}
    assert set(placed) == set(model.parameters())  # tied weights count as one parameter
    assert {part.name for block in blocks for part in block.slices} == {name for name, _ in model.named_parameters()}
    assert len({block.name for block in blocks}) == len(blocks)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_decoder_layers_are_the_layer_blocks(architecture: str) -> None:
    model = on_meta(architecture)
    found = discover_blocks(model)
    layers = [block for block in found.blocks if block.size_class is SizeClass.LAYER]
    assert len(layers) == len(found.layers) == NUM_LAYERS
    modules = dict(model.named_modules())
    for block in layers:
        assert {part.parameter for part in block.slices} == set(modules[block.name].parameters())
    position = {parameter: index for index, parameter in enumerate(model.parameters())}
    starts = [position[block.slices[0].parameter] for block in layers]
    assert starts == sorted(starts)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_module_needs_the_blocks_of_all_its_parameters(architecture: str) -> None:
    model = on_meta(architecture)
    found = discover_blocks(model)
    inside = {module for layer in found.layers for module in layer.modules()}
    for module in model.modules():
        is_layer = module in found.layers
        owned = set(module.parameters(recurse=is_layer)) if is_layer or module not in inside else set()
        brought = {part.parameter for block in found.needs.get(module, ()) for part in block.slices}
        assert owned <= brought


@pytest.mark.parametrize("architecture", ["gpt2", "opt", "bloom", "falcon", "qwen2_tied"])
def test_tied_weights_are_one_block_for_both_modules(architecture: str) -> None:
    model = on_meta(architecture)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert embedding.weight is head.weight
    found = discover_blocks(model)
    assert found.needs[embedding] == found.needs[head]
    assert len(found.needs[head]) == 1


def test_embeddings_have_slots_and_small_norms_stay_on_the_device() -> None:
    by_class = {
        size_class: [
            part.name
            for block in discover_blocks(on_meta("llama")).blocks
            if block.size_class is size_class
            for part in block.slices
        ]
        for size_class in SizeClass
    }
    assert by_class[SizeClass.OUTER] == ["model.embed_tokens.weight", "lm_head.weight"]
    assert by_class[SizeClass.RESIDENT] == ["model.norm.weight"]


class Part(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8, dtype=dtype)


class Whole(nn.Module):
    def __init__(self, no_split: list[str] | None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if no_split is not None:
            self._no_split_modules = no_split
        self.parts = nn.ModuleList([Part(dtype), Part(dtype)])


def test_layers_are_found_by_no_split_modules() -> None:
    assert list(find_layers(Whole(["Part"]))) == ["parts.0", "parts.1"]


def test_the_outermost_of_nested_candidates_is_a_layer() -> None:
    assert list(find_layers(Whole(["Part", "Linear"]))) == ["parts.0", "parts.1"]


def test_weights_shared_by_layers_are_in_one_resident_block() -> None:
    model = Whole(["Part"])
    model.parts[1].second = model.parts[0].second
    found = discover_blocks(model)
    (shared,) = found.shared
    assert shared.size_class is SizeClass.RESIDENT
    assert {part.name for part in shared.slices} == {"parts.0.second.weight", "parts.0.second.bias"}
    assert all(shared in found.needs[layer] for layer in found.layers)
    model.parts[1].first = model.parts[0].first
    with pytest.raises(DiscoveryError, match=r"^the layers of Whole .* no separate weights"):
        discover_blocks(model)


class Called(Part):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(hidden))


def test_without_a_layer_class_the_longest_lists_of_modules_are_the_layers() -> None:
    model = nn.Module()
    model.attentions = nn.ModuleList([Called(), Called()])
    model.norms = nn.ModuleList([nn.LayerNorm(4), nn.LayerNorm(4)])
    model.feed_forwards = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    assert list(find_layers(model)) == ["attentions.0", "attentions.1", "feed_forwards.0", "feed_forwards.1"]


@pytest.mark.parametrize("no_split", [None, [], ["Elsewhere"]])
def test_a_model_without_layers_is_refused_by_name(no_split: list[str] | None) -> None:
    with pytest.raises(DiscoveryError, match=r"^Whole has no"):
        discover_blocks(Whole(no_split))


def test_layers_missing_in_no_split_modules_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = on_meta("llama")
    model._no_split_modules = ["Elsewhere"]
    for module in model.modules():
        module._no_split_modules = ["Elsewhere"]
    with caplog.at_level(logging.WARNING):
        assert len(find_layers(model)) == NUM_LAYERS
    assert "LlamaDecoderLayer" in caplog.text and "Elsewhere" in caplog.text


def test_a_block_has_one_dtype() -> None:
    model = Whole(["Part"], torch.bfloat16)
    blocks = discover_blocks(model).blocks
    for block in blocks:
        assert {part.parameter.dtype for part in block.slices} == {block.master.working_dtype}
    assert len({block.master.working_dtype for block in blocks}) == 2
    assert {block.master.working_dtype for block in discover_blocks(model, torch.bfloat16).blocks} == {torch.bfloat16}


def tied_by_data(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.data)


def transposed(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.down_proj.weight = nn.Parameter(mlp.up_proj.weight.data.t())


def with_a_frozen_one(model: Any) -> None:
    tied_by_data(model)
    model.lm_head.requires_grad_(False)


def overlapping_views(model: Any) -> None:
    attention, flat = model.model.layers[0].self_attn, torch.zeros(2 * 64 * 64)
    attention.q_proj.weight = nn.Parameter(flat[: 64 * 64].view(64, 64))
    attention.o_proj.weight = nn.Parameter(flat[64 * 64 - 1 : -1].view(64, 64))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("change", "names"),
    [
        (tied_by_data, r"model.embed_tokens.weight and lm_head.weight"),
        (with_a_frozen_one, r"model.embed_tokens.weight and lm_head.weight"),
        (transposed, r"layers.1.mlp.up_proj.weight and model.layers.1.mlp.down_proj.weight"),
        (overlapping_views, r"layers.0.self_attn.q_proj.weight and model.layers.0.self_attn.o_proj.weight"),
    ],
)
def test_trained_parameters_in_one_memory_are_refused(change: Any, names: str, device: str) -> None:
    with torch.device(device):
        model = tiny_model("llama")
        change(model)
    with pytest.raises(ValueError, match=f"{names} are two parameters in the same memory"):
        discover_blocks(model)


def view_as_attribute(model: Any) -> None:
    model.model.layers[1].head = model.lm_head.weight.t()


def view_as_buffer(model: Any) -> None:
    model.model.layers[1].register_buffer("head", model.lm_head.weight.detach())


def views_in_a_list(model: Any) -> None:
    model.model.layers[1].heads = [torch.zeros(3), {"all": [model.lm_head.weight.data[3:]]}]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("change", [view_as_attribute, view_as_buffer, views_in_a_list])
def test_a_kept_view_of_a_trained_weight_is_refused(change: Any, device: str) -> None:
    with torch.device(device):
        model = tiny_model("llama")
        change(model)
        model.model.layers[0].mlp.up_proj = nn.utils.spectral_norm(model.model.layers[0].mlp.up_proj)  # keeps one too
    with pytest.raises(ValueError, match=r"^model.layers.1 keeps a tensor in the memory of lm_head.weight, which"):
        discover_blocks(model)
    model.lm_head.requires_grad_(False)
    discover_blocks(model)


def test_adapters_that_peft_ties_by_memory_are_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True)
    model = peft.get_peft_model(tiny_model("llama", tie_word_embeddings=True), config)
    with pytest.raises(
        ValueError, match=r"embed_tokens\.lora_embedding_A.* and .*lm_head\.lora_B.*ensure_weight_tying"
    ):
        discover_blocks(model)


def test_parameters_that_divide_one_memory_are_accepted() -> None:
    """Rows or columns of a fused matrix train apart, and frozen parameters may be equal."""
    model = tiny_model("llama")
    for layer, cut in (
        (model.model.layers[0], lambda w, n: w[n * 64 :][:64]),
        (model.model.layers[1], lambda w, n: w.t()[:, n * 64 :][:, :64]),
    ):
        fused = torch.randn(2 * 64, 64)
        layer.self_attn.q_proj.weight = nn.Parameter(cut(fused, 0))
        layer.self_attn.o_proj.weight = nn.Parameter(cut(fused, 1))
    tied_by_data(model)
    model.lm_head.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    assert len(discover_blocks(model).layers) == 3
