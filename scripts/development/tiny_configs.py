"""Makes a tiny model of a class of transformers, by shrinking the sizes in its config."""

from __future__ import annotations

import importlib
import re
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
"""Sizes by their names in configs. A config gets the sizes that it has."""

TOWER_SIZES: dict[str, Any] = {
    **SIZES,
    **dict.fromkeys(("num_hidden_layers", "num_layers", "depth", "n_layers", "resampler_depth"), 2),
    **dict.fromkeys(("attention_heads", "resampler_n_heads", "encoder_hidden_size", "codebook_size"), 4),
    **dict.fromkeys(("embed_dim", "out_hidden_size", "projection_dim", "encoder_hidden_size", "output_dim"), 32),
    **dict.fromkeys(("text_hidden_size", "patch_embed_hidden_size", "projection_hidden_dim", "adapter_in_dim"), 32),
    **dict.fromkeys(
        ("adapter_input_size", "adapter_out_dim", "vision_output_dim", "projector_input_dim", "projector_output_dim"),
        32,
    ),
    **dict.fromkeys(("mlp_dim", "projection_intermediate_size"), 64),
    **dict.fromkeys(("num_key_value_heads", "window_size"), 4),
    **dict.fromkeys(("output_channels", "base_channels", "latent_channels"), 32),
    **dict.fromkeys(("max_position_embeddings", "num_embeddings"), 128),
    **dict.fromkeys(("resampler_n_latents", "resampler_head_dim"), 8),
    "num_position_embeddings": 16,
    "image_size": 32,
}
"""Sizes of vision towers, projectors and other encoders beside the text model."""
_TOWERS = ("vision", "audio", "qformer", "perceiver", "vq_", "sam_", "encoder_config", "adapter_config")
_PROJECTORS = (
    "projector_hidden_size",
    "projection_hidden_size",
    "vision_hidden_size",
    "projection_dim",
    "out_hidden_size",
    "alignment_intermediate_size",
)
FIRST_SPECIAL_TOKEN = VOCAB_SIZE - 20
"""Text of batches has no token from here on: these stand for images, their begin and their end."""

SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

_HYBRID = {
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MOE = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}

_MROPE = {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}}
_WINDOWS = {"vision_config": {"window_size": 32}}
_SQUARES = {"vision_config": {"image_size": [32, 32], "patch_size": [8, 8]}}
_PINPOINTS = {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]}
_DOTS3_NOTE = {"use_sliding_window": False, "layer_types": ["indexed_attention"] * 4}
_KOSMOS = {"embed_dim": 32, "layers": 4, "attention_heads": 4}
_MINICPM = {
    "image_token_id": VOCAB_SIZE - 20,
    "insert_layer_id": 1,
    "vision_config": {"insert_layer_id": 1, "num_hidden_layers": 4},
}
_QUERIES = {"image_token_index": VOCAB_SIZE - 20, "num_query_tokens": 4}

_QWEN4 = {
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
}

OF_CLASS: dict[str, dict[str, Any]] = {
    # Models that read images.
    "Apertus1p5ForConditionalGeneration": {
        "image_token_offset": 304,
        "audio_token_offset": 308,
        "vision_config": {"channel_multiplier": [1, 1], "num_res_blocks": 1, "attn_resolutions": [16]},
        "audio_config": {"hidden_size": 32, "codebook_dim": 32, "num_filters": 2, "decoder_hidden_size": 32},
    },
    "AriaForConditionalGeneration": {"projector_patch_to_query_dict": {16: 4}},
    "Blip2ForConditionalGeneration": _QUERIES,
    "Cosmos3EdgeForConditionalGeneration": _MROPE,
    "Exaone4_5_ForConditionalGeneration": _WINDOWS,
    "Gemma3ForConditionalGeneration": {"mm_tokens_per_image": 4},
    "Gemma4ForConditionalGeneration": {"vision_config": {"position_embedding_size": 64}},
    "Gemma4UnifiedForConditionalGeneration": {
        "vision_config": {
            "mm_embed_dim": 32,
            "output_proj_dims": 32,
            "mm_posemb_size": 64,
        }
    },
    "Glm46VForConditionalGeneration": _MROPE,
    "Glm4vForConditionalGeneration": _MROPE,
    "Glm4vMoeForConditionalGeneration": {
        "text_config": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]}}
    },
    "GlmOcrForConditionalGeneration": _MROPE,
    "HYV4VLForConditionalGeneration": {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 0]}}},
    "HunYuanVLForConditionalGeneration": {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 1, 1]}}},
    "HyperCLOVAXVisionV2ForConditionalGeneration": _WINDOWS,
    "InstructBlipForConditionalGeneration": _QUERIES,
    "InstructBlipVideoForConditionalGeneration": {**_QUERIES, "video_token_index": VOCAB_SIZE - 19},
    "Llama4ForConditionalGeneration": {"vision_config": {"intermediate_size": 128, "pixel_shuffle_ratio": 0.5}},
    "InternVLForConditionalGeneration": _SQUARES,
    "QianfanOCRForConditionalGeneration": _SQUARES,
    "LlavaNextForConditionalGeneration": _PINPOINTS,
    "LlavaNextVideoForConditionalGeneration": _PINPOINTS,
    "LlavaOnevisionForConditionalGeneration": _PINPOINTS,
    "Qwen2VLForConditionalGeneration": _MROPE,
    "Qwen4ExpForConditionalGeneration": {"text_config": _QWEN4},
    "Qwen2_5_VLForConditionalGeneration": {**_MROPE, **_WINDOWS},
    "T5Gemma2ForConditionalGeneration": {"encoder": {"mm_tokens_per_image": 4}},
    "VipLlavaForConditionalGeneration": {"vision_feature_layers": [-1, -2], "vision_feature_layer": [-1, -2]},
    "ChameleonForConditionalGeneration": {
        "vocabulary_map": {
            "<image>": VOCAB_SIZE - 20,
            **{f"IMGIMG{letter}Z": 310 + n for n, letter in enumerate("ABCDE")},
        },
        "vq_config": {"resolution": 32, "num_embeddings": 5, "channel_multiplier": [1, 1], "num_res_blocks": 1},
    },
    "CohereCompassForConditionalGeneration": {
        "text_config": {
            "rope_parameters": {
                kind: {**_ROPE, "mrope_section": [2, 1, 1]} for kind in ("full_attention", "sliding_attention")
            }
        }
    },
    "DeepseekOcr2ForConditionalGeneration": {
        "text_config": {**_MOE, "mlp_layer_types": ["dense", "sparse"] * 2},
        "vision_config": {"sam_config": {"downsample_channels": [32, 32]}},
    },
    "UnlimitedOcrForConditionalGeneration": {"vision_config": {"sam_config": {"downsample_channels": [32, 32]}}},
    "Emu3ForConditionalGeneration": {
        "vocabulary_map": {
            "<image>": VOCAB_SIZE - 20,
            "<|extra_200|>": VOCAB_SIZE - 19,
            **{f"<|visual token {number:06d}|>": 310 + number for number in range(4)},
        },
        "vq_config": {"channel_multiplier": [1, 1], "num_res_blocks": 1, "attn_resolutions": [16]},
    },
    "Ernie4_5_VLMoeForConditionalGeneration": {
        "text_config": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}
    },
    "Glm5NextForConditionalGeneration": {
        "text_config": {"index_kpool": 4, "qk_rope_head_dim": 0, "moe_intermediate_size": 32}
    },
    "Granite4VisionForConditionalGeneration": {
        **_PINPOINTS,
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [0, 1, 2, 3],
        "vision_config": {"hidden_size": 64},
    },
    "MiniCPMOcrForConditionalGeneration": _MINICPM,
    "MiniCPMV4_6ForConditionalGeneration": _MINICPM,
    "MiniCPMV4_7ForConditionalGeneration": _MINICPM,
    "MllamaForConditionalGeneration": {
        "text_config": {"cross_attention_layers": [1, 3]},
        "vision_config": {
            "num_global_layers": 1,
            "intermediate_layers_indices": [0, 1],
            "vision_output_dim": 96,
            "max_num_tiles": 2,
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        },
    },
    "Molmo2ForConditionalGeneration": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "MuseGlimmerForConditionalGeneration": {"out_hidden_size": 128},
    "MuseSparkForConditionalGeneration": {
        "out_hidden_size": 128,
        "audio_config": {"num_hidden_layers": 4, "hidden_sizes": [8, 8, 16, 32], "depths": [1, 1, 1, 1]},
    },
    "NemotronH_Omni_Reasoning_V3": {
        "vision_config": {"video_temporal_patch_size": 2, "max_img_size": 64},
        "image_token_id": VOCAB_SIZE - 20,
    },
    "Qwen2_5OmniThinkerForConditionalGeneration": {
        **_MROPE,
        **_WINDOWS,
        "vision_start_token_id": VOCAB_SIZE - 1,
        "audio_start_token_id": VOCAB_SIZE - 2,
    },
    "Qwen3OmniMoeThinkerForConditionalGeneration": {
        **_MROPE,
        "vision_start_token_id": VOCAB_SIZE - 1,
        "audio_start_token_id": VOCAB_SIZE - 2,
    },
    "PPFormulaNetForConditionalGeneration": {
        "vision_config": {
            "post_conv_in_channels": 32,
            "post_conv_mid_channels": 32,
            "post_conv_out_channels": 32,
            "decoder_hidden_size": 32,
        }
    },
    "PaddleOCRVLForConditionalGeneration": _MROPE,
    "Step3p7ForConditionalGeneration": {"text_config": {"sliding_window": 8}},
    "VisionEncoderDecoderModel": {
        "decoder": {"is_decoder": True, "add_cross_attention": True, "use_cache": False},
        "decoder_start_token_id": 1,
        "pad_token_id": 0,
    },
    "Dots3NoteForConditionalGeneration": {
        "text_config": _DOTS3_NOTE,
        "audio_config": {"downsample_hidden_size": 8},
    },
    "Florence2ForConditionalGeneration": {
        "vision_config": {
            "depths": [1, 1, 1, 1],
            "embed_dim": [16, 32, 32, 32],
            "num_heads": [2, 4, 4, 4],
            "num_groups": [2, 4, 4, 4],
        }
    },
    "Inkling2ForConditionalGeneration": {"text_config": {"unpadded_vocab_size": VOCAB_SIZE}},
    "Inkling2LoopForConditionalGeneration": {"text_config": {"unpadded_vocab_size": VOCAB_SIZE}},
    "Kosmos2ForConditionalGeneration": {"latent_query_num": 4, "text_config": _KOSMOS},
    "Kosmos2_5ForConditionalGeneration": {"latent_query_num": 4, "text_config": _KOSMOS},
    "UdopForConditionalGeneration": {"decoder_start_token_id": 0, "image_size": 32},
    # Causal LMs.
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
    "Dots3NoteForCausalLM": _DOTS3_NOTE,
    "Gemma3nForCausalLM": {"intermediate_size": 64, "num_kv_shared_layers": 2, "laurel_rank": 8, "altup_num_inputs": 2},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 2]]},
    "GraniteMoeHybridForCausalLM": {"mamba_n_heads": 8},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "LongcatFlashForCausalLM": {"head_dim": 4},
    "Mamba2ForCausalLM": {"num_heads": 8},
    "Qwen4ExpForCausalLM": _QWEN4,
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
"""Sizes by model class, if the sizes above do not fit."""
_OR_NONE = frozenset(("head_dim", "num_key_value_heads"))
"""Sizes that may be None in a config."""
_KINDS = ("layer_types", "mlp_layer_types")
"""Config entries that list the kind of each layer."""
_LAYER_INDEXES = {
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
    "global_attn_indexes": [1],
}
"""Config entries that name layers of a tower, for one of two layers."""


def model_class_of(name: str) -> Any:
    return getattr(transformers, name)


def tiny_config(model_class: Any) -> PretrainedConfig:
    """Return a small config of the class, with small sub-configs."""
    return _tiny(model_class.config_class, OF_CLASS.get(model_class.__name__, {}))


def _tiny(config_class: type[PretrainedConfig], own: dict[str, Any], sizes: dict[str, Any] = SIZES) -> PretrainedConfig:
    settings = vars(config_class())
    chosen: dict[str, Any] = {name: value for name, value in sizes.items() if _is_size(name, settings)}
    if any(isinstance(value, PretrainedConfig) for value in settings.values()):
        chosen.update({name: 32 for name in _PROJECTORS if _is_size(name, settings)})
    if "qk_rope_head_dim" in settings:
        chosen.pop("head_dim", None)  # derived from the other sizes
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]
    chosen.update({name: value for name, value in SPECIAL_TOKENS.items() if name in settings})
    for name in _KINDS:
        if isinstance(settings.get(name), list | tuple) and settings[name]:
            kinds, num_layers = list(dict.fromkeys(settings[name])), sizes["num_hidden_layers"]
            chosen[name] = (kinds * num_layers)[:num_layers]
    chosen.update({name: indexes for name, indexes in _LAYER_INDEXES.items() if settings.get(name)})
    for name, value in settings.items():
        if value is None and name in config_class.sub_configs and name in own:
            value = getattr(config_class.sub_configs[name], "config_class", config_class.sub_configs[name])()
        if isinstance(value, PretrainedConfig):
            is_tower = sizes is TOWER_SIZES or any(part in name for part in _TOWERS)
            chosen[name] = _tiny(type(value), own.get(name, {}), TOWER_SIZES if is_tower else SIZES)
    chosen.update({name: value for name, value in own.items() if not isinstance(chosen.get(name), PretrainedConfig)})
    chosen.update(_special_tokens(settings, own))
    return config_class(**chosen)


def _special_tokens(settings: dict[str, Any], own: dict[str, Any]) -> dict[str, int]:
    """Ids within the tiny vocabulary for tokens that lie outside."""
    names = [
        name
        for name, value in settings.items()
        if re.fullmatch(r".*(_token_(id|index)|_patch_id|^im_.*_id)", name) and isinstance(value, int)
        if (value >= FIRST_SPECIAL_TOKEN or name.startswith(("image", "video", "vision")))
        and name not in own
        and name not in SPECIAL_TOKENS
    ]
    return {name: FIRST_SPECIAL_TOKEN + number for number, name in enumerate(names)}


def _is_size(name: str, settings: dict[str, Any]) -> bool:
    value = settings.get(name)
    known = isinstance(value, int) and not isinstance(value, bool)
    return known or (value is None and name in settings and name in _OR_NONE)


def tiny_model_of(name: str, *, seed: int = 0) -> Any:
    """Return a randomly initialised float32 model of the class in training mode. Equal seeds give equal weights."""
    import torch

    model_class = model_class_of(name)
    config = tiny_config(model_class)
    config.use_cache = False
    torch.manual_seed(seed)
    importlib.invalidate_caches()
    return model_class._from_config(config, dtype=torch.float32).train()


def more_inputs(name: str, model: Any, batch: dict[str, Any], generator: Any) -> dict[str, Any]:
    """Return the batch with the class's further inputs, or with its inputs instead of token ids."""
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
