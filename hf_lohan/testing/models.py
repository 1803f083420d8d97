"""Makes tiny causal LMs with random weights from their config classes, without a network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FAMILIES = ("llama", "opt", "mixtral", "qwen3_moe", "gpt2")
VOCAB_SIZE = 256


def tiny_config(family: str, *, num_layers: int = 3, hidden_size: int = 64, **overrides: Any) -> Any:
    """Return a config of the family without dropout. OPT and GPT-2 have tied embeddings, as in their checkpoints."""
    import transformers

    common: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "use_cache": False}
    llama_like = {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }
    own: dict[str, Any]
    match family:
        case "llama":
            kind = transformers.LlamaConfig
            own = llama_like
        case "opt":
            kind = transformers.OPTConfig
            own = {
                "hidden_size": hidden_size,
                "word_embed_proj_dim": hidden_size,
                "ffn_dim": 2 * hidden_size,
                "num_hidden_layers": num_layers,
                "num_attention_heads": 4,
                "max_position_embeddings": 128,
                "dropout": 0.0,
                "attention_dropout": 0.0,
            }
        case "mixtral":
            kind = transformers.MixtralConfig
            own = {
                **llama_like,
                "intermediate_size": hidden_size,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
            }
        case "qwen3_moe":
            kind = transformers.Qwen3MoeConfig
            own = {
                **llama_like,
                "moe_intermediate_size": hidden_size // 2,
                "head_dim": 16,
                "num_experts": 8,
                "num_experts_per_tok": 2,
            }
        case "gpt2":
            kind = transformers.GPT2Config
            own = {
                "n_embd": hidden_size,
                "n_layer": num_layers,
                "n_head": 4,
                "n_positions": 128,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
            }
        case _:
            raise ValueError(f"no tiny model of family {family!r}; choose one of {', '.join(FAMILIES)}")
    return kind(**{**common, **own, **overrides})


def tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """Return a randomly initialised float32 model. Equal seeds give equal weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_config(family, **overrides), dtype=torch.float32)


def tiny_batch(*, batch_size: int = 2, sequence_length: int = 16, seed: int = 1) -> dict[str, Tensor]:
    """Return random token ids [batch_size, sequence_length], which are also the labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCAB_SIZE, (batch_size, sequence_length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def tiny_rows(num_rows: int, **shape: int) -> list[dict[str, Tensor]]:
    """Return rows of a dataset: the first row of `tiny_batch` for each seed from 0 on."""
    return [{name: values[0] for name, values in tiny_batch(seed=seed, **shape).items()} for seed in range(num_rows)]
