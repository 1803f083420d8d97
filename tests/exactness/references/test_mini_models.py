"""The mini models of Liger Kernel's convergence tests, an eighth as wide, train on text as with the stock Trainer: in
32 steps at a learning rate of 1e-4 losses and weights are the same, to the bit.
"""

from __future__ import annotations

import re
from pathlib import Path
from pydoc_data.topics import topics  # the Python language reference, which is a part of every Python
from typing import Any

import pytest
import torch
import transformers
from covering import slow_but
from datasets import Dataset
from trajectories import arguments, assert_same_bits, finish

import hf_lohan

NUM_STEPS = 32
ROWS, ROW_TOKENS = 64, 32
VOCAB_SIZE = 2000  # a sixteenth of Liger's
NUM_SPECIAL = 16
NARROWER = 8
WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "intermediate_size_mlp",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "head_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "sliding_window",
)
COMMON: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "use_cache": False,
}
WIDE = {"hidden_size": 896, "intermediate_size": 4864}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
GEMMA = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True}
LINEAR = {
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
}
TEXT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("Llama", {}),
    "qwen2": ("Qwen2", {**WIDE, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {**WIDE, "num_key_value_heads": 8, "attn_implementation": "eager"}),
    "mistral": ("Mistral", {"sliding_window": 4096}),
    "mixtral": ("Mixtral", {"hidden_size": 512, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "gemma1": ("Gemma", {**GEMMA, "hidden_act": "gelu"}),
    "gemma1.1": ("Gemma", {**GEMMA, "hidden_activation": "gelu_pytorch_tanh"}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_implementation": "eager"}),
    "gemma3_text": ("Gemma3Text", {**GEMMA, "num_key_value_heads": 1, "attn_implementation": "eager"}),
    "ministral": ("Ministral", {"head_dim": 128, "sliding_window": 4096}),
    "llama4": ("Llama4Text", {"attention_bias": True, "head_dim": 128, "intermediate_size_mlp": 16384}),
    "qwen3": ("Qwen3", {**WIDE, "head_dim": 128, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", {**WIDE, **EXPERTS, "head_dim": 128}),
    "gpt_oss": (
        "GptOss",
        {
            **WIDE,
            "intermediate_size": 896,
            "head_dim": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
        },
    ),
    "mllama": ("MllamaText", {"cross_attention_layers": []}),
    "granite3": ("Granite", {"attention_dropout": 0.1}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {}),
    "glm4": ("Glm4", {"partial_rotary_factor": 0.5, "attention_bias": True, "head_dim": 128}),
    "smollm3": ("SmolLM3", {}),
    "falcon_h1": (
        "FalconH1",
        {
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_attention_heads": 4,
            "mamba_d_ssm": 128,
            "mamba_n_heads": 16,
            "mamba_d_state": 32,
            "mamba_d_conv": 2,
        },
    ),
    "qwen3_next": ("Qwen3Next", {**WIDE, **EXPERTS, **LINEAR, "head_dim": 128, "shared_expert_intermediate_size": 512}),
    "qwen3_5": ("Qwen3_5Text", {**WIDE, **LINEAR, "head_dim": 128}),
    "qwen3_5_moe": (
        "Qwen3_5MoeText",
        {**WIDE, **EXPERTS, **LINEAR, "head_dim": 128, "shared_expert_intermediate_size": 768},
    ),
    "hunyuan_v1": ("HunYuanDenseV1", {**WIDE, "head_dim": 112, "tie_word_embeddings": True}),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        {**WIDE, "head_dim": 112, "num_experts": 8, "moe_topk": 2, "tie_word_embeddings": True},
    ),
    "deepseek_v4": (
        "DeepseekV4",
        {
            "hidden_size": 32 * NARROWER,
            "moe_intermediate_size": 64 * NARROWER,
            "head_dim": 16 * NARROWER,
            "sliding_window": 8 * NARROWER,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "q_lora_rank": 8,
            "num_experts_per_tok": 2,
            "n_routed_experts": 4,
            "hc_mult": 2,
            "o_groups": 2,
            "o_lora_rank": 8,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_topk": 4,
            "layer_types": [
                "heavily_compressed_attention",
                "compressed_sparse_attention",
                "sliding_attention",
                "sliding_attention",
            ],
            "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
        },
    ),
    "exaone4": ("Exaone4", {**WIDE, "tie_word_embeddings": True}),
    "nemotron": ("Nemotron", {"hidden_act": "relu2"}),
}
QWEN_VISION = {"depth": 4, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN_TEXT = {"hidden_size": 1536, "intermediate_size": 4864, "num_attention_heads": 12}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}}
GLM_VISION = {**QWEN_VISION, "hidden_size": 128, "intermediate_size": 256, "num_heads": 16, "out_hidden_size": 128}
HALF_SECTIONS = {**SECTIONS["rope_parameters"], "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
GLM_TEXT = {"attention_bias": True, "rope_parameters": HALF_SECTIONS}
VISION_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2VL",
        {**QWEN_TEXT, **SECTIONS},
        {**QWEN_VISION, "embed_dim": 1280 // NARROWER, "mlp_ratio": 4, "num_heads": 4, "hidden_size": 1536 // NARROWER},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {**QWEN_TEXT, **SECTIONS},
        {**GLM_VISION, "out_hidden_size": 1536 // NARROWER, "window_size": 112, "fullatt_block_indexes": [7, 15, 23]},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {**QWEN_TEXT, "head_dim": 128 * NARROWER},
        {**GLM_VISION, "num_heads": 8, "num_position_embeddings": 256, "deepstack_visual_indexes": []},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {
            **QWEN_TEXT,
            "head_dim": 128 * NARROWER,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 3072,
        },
        {**GLM_VISION, "num_heads": 8, "num_position_embeddings": 256, "deepstack_visual_indexes": [1, 2, 3]},
    ),
    "glm4v": ("Glm4v", GLM_TEXT, GLM_VISION),
    "glm4v_moe": (
        "Glm4vMoe",
        {
            **GLM_TEXT,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_routed_experts": 8,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        GLM_VISION,
    ),
    "llava": (
        "Llava",
        {"model_type": "llama"},
        {
            "model_type": "clip_vision_model",
            "hidden_size": 1024 // NARROWER,
            "intermediate_size": 2048 // NARROWER,
            "image_size": 336,
            "patch_size": 14,
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "projection_dim": 768 // NARROWER,
        },
    ),
    "internvl": (
        "InternVL",
        {"model_type": "qwen2", "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4},
        {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4},
    ),
}
"""Trained on text alone, as far as images are concerned: the tower of images gets no gradient."""


def narrow(settings: dict[str, Any]) -> dict[str, Any]:
    settings = {**COMMON, "vocab_size": VOCAB_SIZE, **settings}
    return {name: value // NARROWER if name in WIDTHS else value for name, value in settings.items()}


def mini_model(name: str) -> Any:
    torch.manual_seed(42)
    if name in TEXT_MODELS:
        family, settings = TEXT_MODELS[name]
        config = getattr(transformers, f"{family}Config")(**narrow(settings))
        model_class = f"{family.removesuffix('Text')}ForCausalLM"
    else:
        family, text, vision = VISION_MODELS[name]
        sizes = {"vision_config": vision, "tie_word_embeddings": False}
        config = getattr(transformers, f"{family}Config")(text_config=narrow(text), **sizes)
        model_class = f"{family}ForConditionalGeneration"
    return getattr(transformers, model_class)(config).float()


def text_rows() -> Dataset:
    """Rows of words and signs. Ids are given in the order of the alphabet, and occur several times."""
    words = re.findall(r"\w+|[^\w\s]", "\n".join(topics[name] for name in sorted(topics)))
    ids = {word: NUM_SPECIAL + i % (VOCAB_SIZE - NUM_SPECIAL) for i, word in enumerate(sorted(set(words)))}
    tokens = torch.tensor([ids[word] for word in words[: ROWS * ROW_TOKENS]]).view(ROWS, ROW_TOKENS).tolist()
    return Dataset.from_dict({"input_ids": tokens, "labels": tokens})


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", slow_but(("mistral",), (*TEXT_MODELS, *VISION_MODELS)))
def test_a_mini_model_trains_as_with_the_stock_trainer(name: str, tmp_path: Path) -> None:
    settings = {
        "max_steps": NUM_STEPS,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "weight_decay": 0.01,
    }
    rows = text_rows()
    args = arguments(tmp_path / "stock", **settings)
    stock = finish(transformers.Trainer(mini_model(name), args, train_dataset=rows))
    budgets = {"gpu_memory": "16MiB", "cpu_memory": "64MiB", "chunks.loss": False}
    ours = hf_lohan.Trainer(
        mini_model(name), arguments(tmp_path / "ours", **settings), train_dataset=rows, offload=budgets
    )
    assert_same_bits(finish(ours), stock, norms=False)
    assert len(stock.losses) == NUM_STEPS and stock.losses[-1] < stock.losses[0]
