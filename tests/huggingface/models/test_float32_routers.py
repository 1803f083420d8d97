"""Routers that stay float32 in a bfloat16 model are loaded, trained and saved in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_weights import assert_stored
from tiny_experts import FLOAT32_ROUTERS, tiny_experts
from torch import Tensor
from transformers import AutoModelForCausalLM

import hf_lohan
from hf_lohan import engine_of
from hf_lohan.engine import OffloadEngine
from hf_lohan.testing.models import tiny_batch

NUM_STEPS = 3
OPTIONS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
SETTINGS = {"cpu_memory": "16MiB", "gpu_memory": "8MiB"}


def train_in_memory(model: Any, masters: dict[str, Tensor]) -> list[float]:
    """Train a stock bfloat16 model with AdamW on float32 masters. A float32 parameter is its own master."""
    optimizer = torch.optim.AdamW(masters.values(), fused=True, **OPTIONS)
    losses = []
    for step in range(NUM_STEPS):
        loss = model(**tiny_batch(seed=step)).loss
        loss.backward()
        losses.append(loss.item())
        for name, parameter in model.named_parameters():
            masters[name].grad = None if parameter.grad is None else parameter.grad.float()
        optimizer.step()
        model.zero_grad()
        for name, parameter in model.named_parameters():
            is_float32 = parameter.dtype == torch.float32
            parameter.data.copy_(masters[name] if is_float32 else masters[name].bfloat16())
    return losses


def train_offloaded(model: Any) -> list[float]:
    optimizer = hf_lohan.OffloadAdamW(model.parameters(), engine=engine_of(model), **OPTIONS)
    losses = []
    for step in range(NUM_STEPS):
        loss = model(**tiny_batch(seed=step)).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def stored_dtypes(engine: OffloadEngine) -> dict[str, torch.dtype]:
    return {name: parts[0][0].master.working_dtype for name, parts in engine.parameters.parts.items()}


@pytest.mark.covering(0)
@pytest.mark.parametrize(("experts", "activations"), [("with_layer", "auto"), ("streamed", "auto")])
@pytest.mark.parametrize(
    ("family", "checkpoint_dtype"),
    [*((family, torch.bfloat16) for family in sorted(FLOAT32_ROUTERS)), ("Ernie4_5_MoeConfig", torch.float32)],
)
def test_routers_train_as_in_memory_to_the_bit(
    family: str,
    checkpoint_dtype: torch.dtype,
    experts: str,
    activations: str,
    load_streamed: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """With `bf16`, masters are the weights of a float32 checkpoint. Otherwise they are the loaded bfloat16 weights."""
    path, is_float32 = tmp_path / "checkpoint", checkpoint_dtype == torch.float32
    tiny_experts(family, dtype=checkpoint_dtype).save_pretrained(path)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).train()
    kept = {name for name, p in reference.named_parameters() if p.dtype == torch.float32}
    assert kept and len(kept) < 6
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=checkpoint_dtype)
    masters = {name: p.detach().float().clone() for name, p in whole.named_parameters()}
    if is_float32:
        for name, parameter in reference.named_parameters():
            parameter.data.copy_(masters[name] if name in kept else masters[name].bfloat16())
    expected = train_in_memory(reference, masters)

    settings = {**SETTINGS, "experts": experts, "activations": activations, "save_dtype": "bfloat16"}
    model = load_streamed(path, settings=settings, bf16=is_float32).train()
    engine = engine_of(model)
    assert engine is not None
    assert {name for name, dtype in stored_dtypes(engine).items() if dtype == torch.float32} == kept
    assert train_offloaded(model) == expected
    assert_stored(model, reference)

    model.save_pretrained(tmp_path / "saved")
    for name, parameter in AutoModelForCausalLM.from_pretrained(tmp_path / "saved").named_parameters():
        assert parameter.dtype == reference.get_parameter(name).dtype
        assert torch.equal(parameter, reference.get_parameter(name)), name


def test_a_model_from_memory_keeps_its_float32_routers(offload: Callable[..., Any]) -> None:
    model = tiny_experts("Ernie4_5_MoeConfig")
    engine = offload(model, dtype=torch.bfloat16, **SETTINGS)
    dtypes = stored_dtypes(engine)
    kept = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert kept == {name for name in dtypes if "mlp.gate.weight" in name or "moe_statics" in name}
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    assert torch.isfinite(torch.tensor(train_offloaded(model.train()))).all()
