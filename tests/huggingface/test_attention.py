"""Layers in chunks give the numbers of whole layers, for every kind of attention that they cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from hf_lohan.activations import ActivationTiers
from hf_lohan.activations.chunked_layers import ChunkedLayers
from hf_lohan.device import CpuDevice
from hf_lohan.huggingface.attention import run_layers_in_chunks
from hf_lohan.timeline import Timeline

ROWS, TOKENS, CHUNK = 2, 48, 10
IDS = torch.randint(3, 64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))

COMMON: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "use_cache": False, "pad_token_id": 0, "sliding_window": 16,
}  # fmt: skip
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
GROUPS = {"n_group": 1, "topk_group": 1, "n_routed_experts": 4, "num_key_value_heads": 4, "head_dim": 4}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "causal": ("llama", {}),
    "packed": ("llama", {}),
    "padded": ("llama", {}),
    "window": ("mistral", {}),
    "packed window": ("mistral", {}),
    "soft cap": ("gemma2", {"query_pre_attn_scalar": 8}),
    "sinks": ("gpt_oss", {"num_local_experts": 4, **MIXTURE}),
    "latent": ("deepseek_v3", {**GROUPS, **LATENT, **MIXTURE, "first_k_dense_replace": 1}),
    "experts": ("qwen3_moe", {"num_experts": 4, **MIXTURE}),
    "layer_past": ("gpt_neox", {"num_key_value_heads": 4}),
}


def model_and_batch(case: str) -> tuple[Any, dict[str, Any]]:
    family, settings = CASES[case]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**COMMON, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config).float().train()
    batch = {"input_ids": IDS, "labels": IDS}
    if "packed" in case:
        batch["position_ids"] = torch.stack([torch.arange(TOKENS) % 13, torch.arange(TOKENS) % 24])
    if case == "padded":
        batch["attention_mask"] = (torch.arange(TOKENS) < torch.tensor([[TOKENS], [31]])).long()
    return model, batch


def step(model: Any, batch: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    loss = model(**batch).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients


def layers_of(model: Any) -> Any:
    return model.base_model.layers


def in_chunks(model: Any, chunk_tokens: int) -> ChunkedLayers:
    names = {layer: f"layers.{number}" for number, layer in enumerate(layers_of(model))}
    chunked = run_layers_in_chunks(model, ActivationTiers(CpuDevice(Timeline()), names), names)
    chunked.cut(chunk_tokens)
    return chunked


@pytest.mark.parametrize("case", CASES)
def test_layers_in_chunks_equal_whole_layers(case: str) -> None:
    model, batch = model_and_batch(case)
    whole = copy.deepcopy(model)
    loss, gradients = step(whole, batch)
    shapes: list[int] = []
    mlp = layers_of(model)[0].mlp
    mlp.register_forward_pre_hook(lambda _module, args: shapes.append(args[0].shape[1]))
    in_chunks(model, CHUNK)
    chunked_loss, chunked = step(model, batch)
    assert max(shapes) == CHUNK, "the layer ran whole"
    assert chunked_loss == pytest.approx(loss, abs=2e-6)
    assert chunked.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (chunked[name] - gradient).norm() <= 2e-5 * gradient.norm() + 1e-8, name


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padding_before_tokens(implementation: str) -> None:
    model, batch = model_and_batch("causal")
    model.config._attn_implementation = implementation
    batch["attention_mask"] = (torch.arange(TOKENS) >= torch.tensor([[0], [25]])).long()
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    loss, gradients = step(copy.deepcopy(model), batch)
    in_chunks(model, CHUNK)
    chunked_loss, chunked = step(model, batch)
    assert chunked_loss == pytest.approx(loss, abs=2e-6)
    for name, gradient in gradients.items():
        assert (chunked[name] - gradient).norm() <= 2e-5 * gradient.norm() + 1e-8, name


def test_frozen_weights_get_no_gradient() -> None:
    model, batch = model_and_batch("causal")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    whole = copy.deepcopy(model)
    _, gradients = step(whole, batch)
    in_chunks(model, CHUNK)
    _, chunked = step(model, batch)
    assert chunked.keys() == gradients.keys() != set()
    for name, gradient in gradients.items():
        assert torch.allclose(chunked[name], gradient, rtol=1e-4, atol=1e-7), name


def test_no_mask_of_all_pairs_is_made() -> None:
    model, batch = model_and_batch("packed window")
    in_chunks(model, CHUNK)
    sizes: list[int] = []

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            if isinstance(output, torch.Tensor) and output.shape[-2:] == (TOKENS, TOKENS):
                sizes.append(output.untyped_storage().nbytes())
            return output

    with Watching():
        model(**batch).loss.backward()
    assert max(sizes, default=0) < TOKENS * TOKENS, "a mask of all pairs takes memory"


def test_unused_weights_get_no_gradient() -> None:
    """A decoder without an encoder does not use its cross attention."""
    config = transformers.BartConfig(
        vocab_size=64, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48, use_cache=False
    )
    config.dropout = 0.0
    torch.manual_seed(0)
    model = transformers.BartForCausalLM(config).train()
    _, gradients = step(copy.deepcopy(model), {"input_ids": IDS, "labels": IDS})
    names = {layer: f"layers.{number}" for number, layer in enumerate(model.model.decoder.layers)}
    chunked = run_layers_in_chunks(model, ActivationTiers(CpuDevice(Timeline()), names), names)
    chunked.cut(CHUNK)
    _, found = step(model, {"input_ids": IDS, "labels": IDS})
    assert chunked.has_cut and found.keys() == gradients.keys()
    assert not [name for name in found if "encoder_attn" in name]


@pytest.mark.parametrize(("has_mask", "num_warnings"), [(True, 1), (False, 0)])
def test_documents_that_a_mask_hides_are_warned_of(
    has_mask: bool, num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = model_and_batch("packed")
    if has_mask:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    loss, _ = step(copy.deepcopy(model), batch)
    in_chunks(model, CHUNK)
    for _ in range(2):
        chunked_loss, _ = step(model, batch)
        assert chunked_loss == pytest.approx(loss, abs=2e-6)
        model.zero_grad()
    assert caplog.text.count("leave out attention_mask to keep the documents apart") == num_warnings
