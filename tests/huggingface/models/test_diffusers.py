"""Diffusion transformers in a loop with Accelerate equal torch bit for bit and are saved as diffusers loads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_lohan

diffusers = pytest.importorskip("diffusers")

HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4}
MODELS: dict[str, Callable[[], Any]] = {
    "dit": lambda: diffusers.DiTTransformer2DModel(
        **HEADS, out_channels=4, num_layers=4, sample_size=8, num_embeds_ada_norm=100
    ),
    "pixart": lambda: diffusers.PixArtTransformer2DModel(
        **HEADS,
        out_channels=4,
        num_layers=4,
        sample_size=8,
        cross_attention_dim=32,
        caption_channels=16,
        use_additional_conditions=False,
    ),
    "sd3": lambda: diffusers.SD3Transformer2DModel(
        **HEADS,
        out_channels=4,
        num_layers=4,
        sample_size=8,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
    ),
    "flux": lambda: diffusers.FluxTransformer2DModel(
        **HEADS,
        num_layers=2,
        num_single_layers=3,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ),
}


def batch_for(kind: str, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    steps = torch.randint(0, 99, (2,), generator=generator)
    of_kind: dict[str, Any] = {
        "dit": {"class_labels": steps.clone()},
        "pixart": {
            "encoder_hidden_states": noise(2, 5, 16),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
        "sd3": {"encoder_hidden_states": noise(2, 5, 32), "pooled_projections": noise(2, 32)},
        "flux": {
            "encoder_hidden_states": noise(2, 5, 32),
            "pooled_projections": noise(2, 32),
            "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(5, 3),
        },
    }[kind]
    latents = noise(2, 16, 4) if kind == "flux" else noise(2, 4, 8, 8)
    return {"hidden_states": latents, "timestep": steps / 100 if kind == "flux" else steps, **of_kind}


def train(kind: str, accelerator: Any) -> tuple[Any, list[float]]:
    torch.manual_seed(0)
    model = MODELS[kind]().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for seed in range(3):
        torch.manual_seed(seed)
        loss = model(**batch_for(kind, seed), return_dict=False)[0].square().mean()
        if accelerator is None:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("activations", ["auto", "swap"])
def test_a_diffusion_transformer_trains_as_in_memory_and_is_saved(kind: str, activations: str, tmp_path: Path) -> None:
    offload = {"cpu_memory": "12MiB", "gpu_memory": "2MiB", "activations": activations}
    plugin = hf_lohan.LohanPlugin(offload=offload, ssd_path=tmp_path / "store")
    stock, losses = train(kind, None)
    ours, found = train(kind, hf_lohan.Accelerator(cpu=True, lohan_plugin=plugin))
    assert found == losses
    shards = {} if activations == "auto" else {"max_shard_size": "100KB"}
    ours.save_pretrained(tmp_path / "saved", **shards)
    stock.save_pretrained(tmp_path / "stock", **shards)
    names = [{file.name for file in (tmp_path / whose).iterdir()} for whose in ("saved", "stock")]
    assert names[0] == names[1]
    loaded = type(stock).from_pretrained(tmp_path / "saved")
    for name, tensor in stock.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    with pytest.raises(ValueError, match="does not support push_to_hub"):
        ours.save_pretrained(tmp_path / "pushed", push_to_hub=True)
    with pytest.raises(ValueError, match="does not support safe_serialization=False"):
        ours.save_pretrained(tmp_path / "pickled", True, None, False)
    engine = hf_lohan.engine_of(ours)
    engine.close()
