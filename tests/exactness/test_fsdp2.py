"""bfloat16 training equals that of PyTorch's FSDP2 with bfloat16 parameters and float32 gradients, bit for bit.

The reference is `fully_shard` itself, in one process over gloo. Losses, norms and float32 masters are compared.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import slow_but
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import hf_lohan
from hf_lohan import Accelerator, LohanPlugin
from hf_lohan.testing.models import tiny_batch, tiny_config

OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 256, "use_cache": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"head_dim": 16},  # tied, with soft caps
    "olmo2": {},
    "qwen2": {"tie_word_embeddings": True},
    "opt": {},  # tied, with biases
    "gpt2": {},
    "mixtral": {},
    "qwen3_moe": {},
}
STEPS = 3


def model_of(family: str, kind: str) -> nn.Module:
    from transformers import AutoConfig

    torch.manual_seed(0)
    if family in ("llama", "opt", "gpt2", "mixtral", "qwen3_moe"):
        config = tiny_config(family, num_layers=2)
    else:
        config = AutoConfig.for_model(family, **SMALL, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if kind == "lora":
        return get_peft_model(model, LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False))
    return model


@contextmanager
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


Trained = tuple[list[float], list[float], dict[str, Tensor]]


def train_by_fsdp2(model: nn.Module, max_norm: float, num_micro_batches: int) -> Trained:
    """Return losses, norms and the trained float32 weights."""
    # OLMo 2 hands its layers float32 tables, which FSDP2 would by default round for each layer and a model does not.
    casts = model.config.model_type != "olmo2"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=casts)
    losses, norms = [], []
    with process_group():
        mesh = dist.init_device_mesh("cpu", (1,))
        layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(trained.values(), **OPTIONS)
        for step in range(STEPS):
            for number in range(num_micro_batches):
                loss = model(**tiny_batch(seed=10 * step + number)).loss / num_micro_batches
                loss.backward()
                losses.append(loss.item())
            if max_norm:
                norm = nn.utils.clip_grad_norm_(trained.values(), max_norm)
                norms.append(norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, norms, {name: p.full_tensor().detach().clone() for name, p in trained.items()}  # type: ignore[attr-defined]


def train_offloaded(model: nn.Module, max_norm: float, num_micro_batches: int, offload: dict[str, Any]) -> Trained:
    plugin = LohanPlugin(offload=offload, bf16=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_micro_batches, lohan_plugin=plugin)
    losses, norms = [], []
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **OPTIONS)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(STEPS):
        for number in range(num_micro_batches):
            with accelerator.accumulate(model):
                loss = model(**tiny_batch(seed=10 * step + number)).loss
                accelerator.backward(loss)
                losses.append((loss / num_micro_batches).item())
                if max_norm and accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), max_norm).item())
                optimizer.step()
                optimizer.zero_grad()
    engine = hf_lohan.engine_of(model)
    assert engine is not None
    access = engine.parameters
    masters = {
        name: access.read_masters(name, 0, parameter.numel()).view(parameter.shape)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    engine.close()
    return losses, norms, masters


QUICK_RUNS = [("llama", 0.5, 3, "lora"), ("mixtral", 0.0, 1, "full")]
"""Clipped sums of adapters, and experts that stream and are updated in backward."""


@pytest.mark.parametrize(
    "run",
    slow_but(QUICK_RUNS, itertools.product(FAMILIES, (0.0, 0.5), (1, 3), ("full", "lora"))),
    ids=lambda run: "-".join(map(str, run)),
)
def test_bfloat16_training_equals_fsdp2(run: tuple[str, float, int, str], tmp_path: Path) -> None:
    family, max_norm, num_micro_batches, kind = run
    model = model_of(family, kind)
    # The norm of experts that stream is summed in float64, so clipped steps are compared with experts in their layers.
    streams = kind == "full" and family in ("mixtral", "qwen3_moe") and not max_norm
    offload = {"cpu_memory": "16MiB", "gpu_memory": "8MiB", "ssd": str(tmp_path / "store")}
    offload |= {"experts": "streamed" if streams else "with_layer"}
    expected = train_by_fsdp2(copy.deepcopy(model), max_norm, num_micro_batches)
    losses, norms, masters = train_offloaded(model, max_norm, num_micro_batches, offload)
    assert losses == expected[0]
    assert norms == expected[1]
    assert masters.keys() == expected[2].keys()
    for name, master in masters.items():
        assert torch.equal(master, expected[2][name]), name
