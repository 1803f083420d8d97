"""Models without weights are built from a config and have the blocks of a run. Bad inputs are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers

from hf_lohan.costs import SizeClass
from hf_lohan.huggingface.models.hub import read_model_config
from hf_lohan.huggingface.models.recipe import model_class_of, planning_dtype, weightless_model
from hf_lohan.model import discover_blocks
from hf_lohan.planning import trace_blocks
from hf_lohan.testing.models import FAMILIES, tiny_config

BATCH_SIZE, SEQUENCE_LENGTH = 2, 16


def written(config: Any, folder: Path) -> Path:
    config.save_pretrained(folder)
    return folder


def profile_of(model: Any, **options: Any) -> Any:
    sizes = {"batch_size": BATCH_SIZE, "sequence_length": SEQUENCE_LENGTH} | options
    return trace_blocks(model, **sizes).profile


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_built_from_its_config(family: str, tmp_path: Path) -> None:
    folder = written(tiny_config(family), tmp_path)
    for path in (folder, folder / "config.json"):
        model = weightless_model(read_model_config(path))
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    profile = profile_of(model)
    blocks = discover_blocks(model).blocks
    assert [block.name for block in profile.blocks] == [block.name for block in blocks]
    assert [block.size_class for block in profile.blocks] == [block.size_class for block in blocks]
    assert profile.num_params == sum(parameter.numel() for parameter in model.parameters())
    assert profile.param_bytes == 2 * profile.num_params
    assert all(layer.flops > 0 and layer.input_bytes > 0 for layer in profile.layers)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_head_tied_to_the_embedding_counts(family: str) -> None:
    """The head of OPT is tied."""
    profile = profile_of(weightless_model(tiny_config(family)))
    outside = [block for block in profile.blocks if block.size_class is not SizeClass.LAYER]
    flops, of_head = sum(block.flops for block in outside), 2 * BATCH_SIZE * SEQUENCE_LENGTH * 64 * 256
    # transformers 5.17 computes the angles of the rotary embedding as a product of matrices.
    assert of_head <= flops <= 1.001 * of_head


def test_flops_count_the_experts_of_each_token() -> None:
    flops = {}
    for num_experts, top_k in ((8, 2), (16, 2), (8, 4)):
        config = tiny_config("qwen3_moe", num_experts=num_experts, num_experts_per_tok=top_k)
        operations = profile_of(weightless_model(config)).layers[0].operations
        flops[num_experts, top_k] = [o.flops for o in operations if o.name.startswith("aten._grouped_mm")]
    tokens, hidden, inner = BATCH_SIZE * SEQUENCE_LENGTH, 64, 32
    assert flops[8, 2] == [2 * tokens * 2 * hidden * 2 * inner, 2 * tokens * 2 * inner * hidden]
    assert flops[16, 2] == flops[8, 2], "experts without tokens cost nothing"
    assert flops[8, 4] == [2 * number for number in flops[8, 2]]


def test_fused_attention_saves_no_matrix_of_pairs() -> None:
    model = weightless_model(tiny_config("gpt2", attn_pdrop=0.1))
    of_cpu, of_accelerator = profile_of(model), profile_of(model, fused_attention=True)
    assert not any("attention" in operation.name for operation in of_cpu.layers[0].operations)
    assert any("attention" in operation.name for operation in of_accelerator.layers[0].operations)
    assert of_accelerator.layers[0].saved_bytes < of_cpu.layers[0].saved_bytes


@pytest.mark.parametrize(
    ("said", "dtype", "expected"),
    [
        (None, "auto", torch.bfloat16),
        ("float16", "auto", torch.bfloat16),
        ("float32", "auto", torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
        (None, torch.float32, torch.float32),
    ],
)
def test_planning_dtypes(said: str | None, dtype: Any, expected: torch.dtype) -> None:
    assert planning_dtype(tiny_config("llama", dtype=said), dtype) is expected


@pytest.mark.parametrize("dtype", ["float16", "bf16", "Tensor"])
def test_dtypes_that_cannot_be_trained_are_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match=f"dtype='{dtype}' cannot be trained; use auto, bfloat16 or float32"):
        planning_dtype(tiny_config("llama"), dtype)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_more_tokens_than_positions_are_refused(family: str) -> None:
    model = weightless_model(tiny_config(family))
    with pytest.raises(ValueError, match=r"fewer than the sequence length of 4000; use shorter sequences"):
        profile_of(model, sequence_length=4000)


def test_rope_that_reads_positions_is_traced() -> None:
    """Its form depends on whether the positions exceed its original length."""
    config = transformers.Phi3Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=256, pad_token_id=0, original_max_position_embeddings=32, max_position_embeddings=128,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
            "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
        },
    )  # fmt: skip
    assert profile_of(weightless_model(config), sequence_length=64).flops > 0


def test_a_path_without_a_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.json").write_text("{}")
    for path, message in (
        (tmp_path / "empty", "has no config.json"),
        (tmp_path / "missing", "is not a checkpoint folder; give such a folder, or the name of a model in the Hub"),
        (tmp_path / "other.json", "has no model config"),
        ("models/nope", r"'models/nope' is not a folder here, .* run `hf download models/nope`"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            read_model_config(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "name", "chosen"),
    [
        (transformers.LlamaConfig(), "LlamaModel", "AutoModelForCausalLM"),
        (transformers.LlamaConfig(), "LlamaForCausalLM", "LlamaForCausalLM"),
        (transformers.GPT2Config(), "GPT2LMHeadModel", "GPT2LMHeadModel"),
        (transformers.Llama4Config(), "Llama4ForConditionalGeneration", "Llama4ForConditionalGeneration"),
    ],
)
def test_a_class_without_a_head_gets_one(config: Any, name: str, chosen: str) -> None:
    config.architectures = [name]
    assert model_class_of(config).__name__ == chosen
