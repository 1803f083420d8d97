"""With lazy experts, weights, checkpoints, exports and later steps equal those with eager experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted_runs import assert_same, make_trainer, outcome_of
from trajectories import assert_same_tensors

from hf_lohan.huggingface.models.export import export_model
from hf_lohan.testing.models import tiny_rows

FEW_TOKENS = tiny_rows(16, batch_size=1, sequence_length=2)
EAGER, LAZY = {"experts": "streamed", "experts.lazy": False}, {"experts": "streamed", "experts.lazy": True}


def trained(folder: Path, offload: dict[str, Any], resume: str | None = None, **settings: Any) -> Any:
    trainer = make_trainer(
        folder,
        family="qwen3_moe",
        rows=FEW_TOKENS,
        offload=offload,
        **{"max_steps": 4, "logging_steps": 1, "per_device_train_batch_size": 1, **settings},
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def is_behind(trainer: Any) -> bool:
    engine = trainer.offload_engine
    engine.wait_for_updates()
    return any(engine.records.missed.is_block_behind(block) for block in engine.layout.blocks)


@pytest.mark.slow
def test_a_checkpoint_includes_all_steps(tmp_path: Path) -> None:
    expected = outcome_of(trained(tmp_path / "eager", EAGER))
    saved = trained(tmp_path / "saved", LAZY, save_strategy="steps", save_steps=3)
    assert is_behind(saved)
    assert_same(outcome_of(saved), expected)
    for offload in (LAZY, EAGER):
        again = trained(tmp_path / "again", offload, resume=str(tmp_path / "saved" / "checkpoint-3"))
        rows, weights = outcome_of(again)
        assert rows == expected[0]
        assert all(torch.equal(weights[name], weight) for name, weight in expected[1].items())


def test_an_export_includes_all_steps(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = trained(tmp_path / "run", LAZY)
    assert is_behind(trainer)
    trainer.save_model(str(tmp_path / "saved"))
    trainer.offload_engine.close()
    assert export_model(tmp_path / "run", tmp_path / "exported") == 4
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("saved", "exported")]
    assert_same_tensors(*(dict(model.named_parameters()) for model in models))
