"""A reward model learns with TRL's trainer as in memory, including its new head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
import trl_runs
from trl_runs import both, preferences


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "adapters"])
def test_a_reward_model_learns_as_in_memory(adapters: bool, checkpoint: Path, tmp_path: Path) -> None:
    def given() -> dict[str, Any]:
        lora = trl_runs.lora(task_type="SEQ_CLS", modules_to_save=["score"])
        return {"model": str(checkpoint), "train_dataset": preferences(), "peft_config": lora if adapters else None}

    ours, stock = both("Reward", tmp_path, {}, given)
    trl_runs.assert_same(ours, stock)
