"""Tiny mixture-of-experts models of many families, and the least device memory to train them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_lohan.config import OffloadConfig
from hf_lohan.costs import BudgetError
from hf_lohan.planning import lay_out

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "development"))

FAMILIES = {
    "mixtral": "MixtralForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM", "gpt_oss": "GptOssForCausalLM",
    "olmoe": "OlmoeForCausalLM", "granitemoe": "GraniteMoeForCausalLM", "phimoe": "PhimoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM", "ernie4_5_moe": "Ernie4_5_MoeForCausalLM", "jamba": "JambaForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
}  # fmt: skip
NUM_EXPERTS = 4
ALL_SLOTS = "8MiB"
"""Device memory that holds all experts of any of these models."""


def expert_model(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """Make a random float32 model in training mode, with ``changes`` of its config.

    Rows of expert weights are whole CPU vectors. Otherwise kernels round the last elements of a tensor differently, and
    the last elements of an expert are in the middle of the tensor of all experts.
    """
    from tiny_configs import model_class_of, tiny_config

    model_class = model_class_of(FAMILIES[family])
    config = tiny_config(model_class)
    config.use_cache = False
    if hasattr(config, "moe_intermediate_size"):
        config.moe_intermediate_size = 32
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    return model_class._from_config(config, dtype=torch.float32).train()


def least_gpu_memory(model: Any, **settings: Any) -> int:
    """Return the bytes of two slots for layers, two for experts and one for the rest of the model."""
    config = OffloadConfig.load({"gpu_memory": "4KiB", "cpu_memory": "64MiB", "experts": "streamed", **settings})
    resolved = config.resolve(
        host_memory_bytes=1 << 30, device_memory_bytes=1 << 30, num_cpus=2, default_ssd_path="nowhere"
    )
    with pytest.raises(BudgetError) as refused:
        lay_out(model, resolved, working_dtype=None, hold_gradients=True)
    match = re.search(r"set gpu_memory to at least (\d+)", str(refused.value))
    assert match is not None, refused.value
    return int(match[1])
