"""Makes a tiny model of any causal-LM class of transformers, by shrinking the sizes in its config."""

from __future__ import annotations

import importlib
from typing import Any

import transformers
from transformers import PretrainedConfig

VOCAB_SIZE = 320
NUM_LAYERS = 4

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "dim_model", "emb_dim"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "input_embedding_size", "attention_hidden_size", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "dff", "ffn_hidden_size", "dim_ff"), 64),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "feed_forward_size", "intermediate_size_mlp"), 64),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers"), NUM_LAYERS),
    **dict.fromkeys(("num_decoder_layers", "num_blocks"), NUM_LAYERS),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "d_kv", "attention_head_dim", "swa_head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "swa_v_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_layer_start_index", "num_dense_layers"), 1),
    **dict.fromkeys(("linear_head_dim", "index_head_dim", "index_topk"), 8),
    **dict.fromkeys(("linear_num_heads", "index_n_heads"), 2),
    **dict.fromkeys(("mamba_d_state", "state_size", "mamba_d_head", "mamba_head_dim", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size", "chunk_size"), 8),
    "mamba_chunk_size": 8,
    "hidden_size_per_layer_input": 8,
    "image_size": 16,
    "patch_size": 8,
}
"""Sizes by their names in configs. A config gets those that it has."""

SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

_HYBRID = {
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MOE = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}

OF_CLASS: dict[str, dict[str, Any]] = {
    "BailingHybridForCausalLM": {"head_dim": 8},
    "BambaForCausalLM": {"mamba_n_heads": 8, "attn_layer_indices": [1, 3]},
    "BltForCausalLM": {
        "vocab_size": 320,
        "encoder_hash_byte_group_vocab": 64,
        "encoder_hash_byte_group_size": [3, 4],
        "patch_size": 4,
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
    },
    "CohereCompassForCausalLM": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "DbrxForCausalLM": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "DeepseekV2ForCausalLM": _MOE,
    "Dots1ForCausalLM": _MOE,
    "Dots3NoteForCausalLM": {"use_sliding_window": False, "layer_types": ["indexed_attention"] * 4},
    "Gemma3nForCausalLM": {"intermediate_size": 64, "num_kv_shared_layers": 2, "laurel_rank": 8, "altup_num_inputs": 2},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 2]]},
    "GraniteMoeHybridForCausalLM": {"mamba_n_heads": 8},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "LongcatFlashForCausalLM": {"head_dim": 4},
    "Mamba2ForCausalLM": {"num_heads": 8},
    "Qwen4ExpForCausalLM": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
        "ple_embed_dim": 32,
        "ple_layer_ids": [1],
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 100,
        "split_ngram_parts": 1,
    },
    "ReformerModelWithLMHead": {
        "is_decoder": True,
        "axial_pos_shape": (4, 4),
        "axial_pos_embds_dim": (16, 16),
        "attention_head_size": 8,
        "attn_layers": ("local", "lsh") * 2,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "XmodForCausalLM": {"default_language": "en_XX"},
    "ZambaForCausalLM": _HYBRID,
    "Zamba2ForCausalLM": {**_HYBRID, "kv_channels": 8, "num_query_groups": 4, "mamba_headdim": 8, "adapter_rank": 4},
    "ZayaForCausalLM": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
"""Further sizes by model class, where those above do not fit."""
_OR_NONE = frozenset(("head_dim", "num_key_value_heads"))
"""Sizes that may be None in a config."""
_KINDS = ("layer_types", "mlp_layer_types")
"""Config entries that list the kind of each layer."""


def model_class_of(name: str) -> Any:
    return getattr(transformers, name)


def tiny_config(model_class: Any) -> PretrainedConfig:
    """A small config of the class; sub-configs are made small alike."""
    return _tiny(model_class.config_class, OF_CLASS.get(model_class.__name__, {}))


def _tiny(config_class: type[PretrainedConfig], own: dict[str, Any]) -> PretrainedConfig:
    settings = vars(config_class())
    chosen: dict[str, Any] = {name: value for name, value in SIZES.items() if _is_size(name, settings)}
    if "qk_rope_head_dim" in settings:
        chosen.pop("head_dim", None)  # it follows
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]
    chosen.update({name: value for name, value in SPECIAL_TOKENS.items() if name in settings})
    for name in _KINDS:
        if isinstance(settings.get(name), list | tuple) and settings[name]:
            kinds = list(dict.fromkeys(settings[name]))
            chosen[name] = (kinds * NUM_LAYERS)[:NUM_LAYERS]
    for name, value in settings.items():
        if isinstance(value, PretrainedConfig):
            chosen[name] = _tiny(type(value), own.get(name, {}))
    chosen.update({name: value for name, value in own.items() if not isinstance(chosen.get(name), PretrainedConfig)})
    return config_class(**chosen)


def _is_size(name: str, settings: dict[str, Any]) -> bool:
    value = settings.get(name)
    known = isinstance(value, int) and not isinstance(value, bool)
    return known or (value is None and name in settings and name in _OR_NONE)


def tiny_model_of(name: str, *, seed: int = 0) -> Any:
    """A randomly initialised model of the class in float32, in training; equal seeds give equal weights."""
    import torch

    model_class = model_class_of(name)
    config = tiny_config(model_class)
    config.use_cache = False
    torch.manual_seed(seed)
    importlib.invalidate_caches()
    return model_class._from_config(config, dtype=torch.float32).train()


def more_inputs(name: str, model: Any, batch: dict[str, Any], generator: Any) -> dict[str, Any]:
    """The batch with the class's further inputs, or its inputs in place of token ids."""
    import torch

    size, length = batch["input_ids"].shape
    if name == "GitForCausalLM":
        pixels = torch.rand(size, 3, model.config.vision_config.image_size, 16, generator=generator)
        return {**batch, "pixel_values": pixels}
    if name.startswith("Musicgen"):
        num = model.config.num_codebooks
        codes = torch.randint(5, model.config.vocab_size - 20, (size, length, num), generator=generator)
        ids = codes.transpose(1, 2).reshape(size * num, length)
        return {"input_ids": ids, "labels": codes, "attention_mask": batch["attention_mask"]}
    return batch
