"""Tiny models with experts, one for each format of experts in transformers' checkpoints."""

from __future__ import annotations

from typing import Any

import torch

NUM_EXPERTS = 16
HIDDEN, INNER = 64, 96
_COMMON: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "use_cache": False, "tie_word_embeddings": False,
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "MixtralConfig": {"intermediate_size": INNER, "num_local_experts": NUM_EXPERTS},
    "Qwen2MoeConfig": {
        "moe_intermediate_size": INNER, "shared_expert_intermediate_size": 32, "intermediate_size": 96,
        "num_experts": NUM_EXPERTS, "num_experts_per_tok": 2,
    },
    "Qwen3MoeConfig": {"moe_intermediate_size": INNER, "intermediate_size": 96, "num_experts": NUM_EXPERTS},
    "DeepseekV3Config": {
        "moe_intermediate_size": INNER, "intermediate_size": 96, "n_routed_experts": NUM_EXPERTS,
        "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
        "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 16, "head_dim": 8,
    },
    "OlmoeConfig": {"intermediate_size": INNER, "num_experts": NUM_EXPERTS, "num_experts_per_tok": 2},
    "GptOssConfig": {
        "intermediate_size": INNER,
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "GraniteMoeConfig": {"intermediate_size": INNER, "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2},
    "JambaConfig": {
        "intermediate_size": INNER, "num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "expert_layer_period": 2,
        "expert_layer_offset": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False,
        "mamba_d_state": 4, "mamba_dt_rank": 4,
    },
    "PhimoeConfig": {"intermediate_size": INNER, "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2},
    "Ernie4_5_MoeConfig": {
        "intermediate_size": 96, "moe_intermediate_size": INNER, "moe_num_experts": NUM_EXPERTS, "moe_k": 2,
        "moe_layer_start_index": 1, "moe_num_shared_experts": 1,
    },
    "HunYuanMoEV1Config": {
        "intermediate_size": INNER, "num_experts": NUM_EXPERTS, "moe_topk": 2, "num_shared_expert": 1,
        "pad_token_id": 0,
    },
    "Lfm2MoeConfig": {
        "intermediate_size": 96, "moe_intermediate_size": INNER, "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"],
    },
    "Glm4MoeConfig": {
        "moe_intermediate_size": INNER, "intermediate_size": 96, "n_routed_experts": NUM_EXPERTS,
        "first_k_dense_replace": 1, "num_experts_per_tok": 2,
    },
    "MiniMaxM2Config": {"intermediate_size": INNER, "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2},
}  # fmt: skip
FAMILIES = tuple(_OWN)
FUSED_IN_FILES = frozenset({"GptOssConfig", "GraniteMoeConfig"})
"""Families whose checkpoints have one tensor for all experts of a layer."""
FLOAT32_ROUTERS = frozenset({"Ernie4_5_MoeConfig", "HunYuanMoEV1Config"})
"""Families whose routers stay float32 if the model is loaded in bfloat16."""


def tiny_experts(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """Return a random causal LM. Equal seeds give equal weights."""
    import transformers

    config = getattr(transformers, family)(**{**_COMMON, **_OWN[family], **overrides})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any() or (parameter == 1).all():
                parameter.add_(torch.randn(parameter.shape) * 0.02)  # zeros and ones would hide mistakes
    return model
