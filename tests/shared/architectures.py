"""Tiny causal LMs of many families, made from their config classes."""

from __future__ import annotations

from typing import Any

import transformers

NUM_LAYERS = 3
COMMON: dict[str, Any] = {"vocab_size": 300}
SIZES: dict[str, Any] = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPT = {**COMMON, "n_embd": 32, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 64}
MOE = {**GROUPED, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GROUPED), "mistral": ("MistralConfig", GROUPED),
    "gemma": ("GemmaConfig", {**GROUPED, "head_dim": 8}), "gemma2": ("Gemma2Config", {**GROUPED, "head_dim": 8}),
    "gemma3_text": ("Gemma3TextConfig", {**GROUPED, "head_dim": 8}), "qwen2": ("Qwen2Config", GROUPED),
    "qwen3": ("Qwen3Config", {**GROUPED, "head_dim": 8}),
    "qwen2_tied": ("Qwen2Config", {**GROUPED, "tie_word_embeddings": True}),
    "qwen2_moe": ("Qwen2MoeConfig", {**MOE, "shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", MOE), "mixtral": ("MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "olmo2": ("Olmo2Config", GROUPED),
    "olmoe": ("OlmoeConfig", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "starcoder2": ("Starcoder2Config", GROUPED), "granite": ("GraniteConfig", GROUPED),
    "cohere": ("CohereConfig", GROUPED), "stablelm": ("StableLmConfig", GROUPED), "phi": ("PhiConfig", SIZES),
    "phi3": ("Phi3Config", {**GROUPED, "pad_token_id": 0}), "falcon": ("FalconConfig", SIZES),
    "bloom": ("BloomConfig", {**COMMON, "hidden_size": 32, "n_layer": NUM_LAYERS, "n_head": 4}),
    "gpt_neox": ("GPTNeoXConfig", SIZES), "gptj": ("GPTJConfig", {**GPT, "rotary_dim": 8}),
    "gpt2": ("GPT2Config", GPT), "gpt_bigcode": ("GPTBigCodeConfig", GPT),
    "ctrl": ("CTRLConfig", {**GPT, "dff": 64}),  # has no layer class, only a list of modules
    "granite_swa": ("GraniteSWAConfig", GROUPED),  # vectors of four elements
    "mpt": ("MptConfig", {**COMMON, "d_model": 32, "n_layers": NUM_LAYERS, "n_heads": 4}),
    "opt": ("OPTConfig", {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "opt_projected": ("OPTConfig", {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 16}),
}  # fmt: skip


def model_of(architecture: str, *, attention: str | None = None, **overrides: Any) -> Any:
    """Return a random model on the default device with the default dtype. `overrides` are settings of its config."""
    config_class, settings = ARCHITECTURES[architecture]
    config = getattr(transformers, config_class)(**{**settings, **overrides})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def model_with_a_tower(**text: Any) -> Any:
    """LLaVA with two layers of CLIP for images of 16 x 16, in five positions. ``text`` are settings of its Llama."""
    tower = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8
    )
    config = transformers.LlavaConfig(
        vision_config=tower, text_config=transformers.LlamaConfig(**{**GROUPED, **text}), image_token_index=299
    )
    return transformers.LlavaForConditionalGeneration(config)
