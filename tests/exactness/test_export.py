"""What is exported of a run's last step is the model that it would have saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from broken_runs import a_trainer

from hf_lohan.testing.models import tiny_batch


@pytest.mark.parametrize(
    ("family", "offload"),
    [
        *((family, {}) for family in ("llama", "mixtral", "gpt2")),
        ("mixtral", {"experts": "streamed", "activations": "keep"}),
    ],
)
def test_export_is_what_save_model_writes(family: str, offload: dict[str, str], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from hf_lohan.huggingface.export import export

    trainer = a_trainer(tmp_path / "run", family=family, max_steps=2, offload=offload)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    trainer.offload_engine.close()
    assert export(tmp_path / "run", tmp_path / "exported") == 2
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("saved", "exported")]
    for (name, saved), exported in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(saved, exported), name
    batch = tiny_batch(seed=1)
    assert torch.equal(models[0](**batch).loss, models[1](**batch).loss)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("saved", "exported")]
    assert configs[0] == configs[1]
