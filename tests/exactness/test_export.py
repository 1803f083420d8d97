"""An export of the last step equals the model that the run saves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from interrupted_runs import make_trainer
from safetensors.torch import load_file
from trajectories import assert_same_tensors

from hf_lohan.testing.models import tiny_batch


@pytest.mark.parametrize(
    ("family", "offload"),
    [
        *((family, {}) for family in ("llama", "mixtral", "gpt2")),
        ("mixtral", {"experts": "streamed", "activations": "keep"}),
    ],
)
def test_an_export_equals_save_model(family: str, offload: dict[str, str], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from hf_lohan.huggingface.models.export import export_model

    trainer = make_trainer(tmp_path / "run", family=family, max_steps=2, offload=offload)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    trainer.offload_engine.close()
    assert export_model(tmp_path / "run", tmp_path / "exported") == 2
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("saved", "exported")]
    assert_same_tensors(*(dict(model.named_parameters()) for model in models))
    batch = tiny_batch(seed=1)
    assert torch.equal(models[0](**batch).loss, models[1](**batch).loss)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("saved", "exported")]
    assert configs[0] == configs[1]


def test_an_export_has_the_requested_dtype(tmp_path: Path) -> None:
    from hf_lohan.huggingface.models.export import export_model

    trainer = make_trainer(tmp_path / "run", family="llama", max_steps=2, bf16=True)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    trainer.offload_engine.close()
    for dtype in ("auto", "float32", "bfloat16"):
        export_model(tmp_path / "run", tmp_path / dtype, dtype)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    for dtype in ("auto", "float32"):
        exported = load_file(tmp_path / dtype / "model.safetensors")
        assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())
        assert json.loads((tmp_path / dtype / "config.json").read_text())["dtype"] == "float32"
    rounded = load_file(tmp_path / "bfloat16" / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in rounded.values())
    assert all((rounded[name] - tensor).abs().max() <= 2**-8 * tensor.abs().max() for name, tensor in saved.items())
    with pytest.raises(ValueError, match="dtype='float16' is not supported; give one of auto, bfloat16, float32"):
        export_model(tmp_path / "run", tmp_path / "float16", "float16")
