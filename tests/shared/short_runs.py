"""Arguments of a short run of a Trainer that logs every step."""

from __future__ import annotations

from typing import Any

SHORT_RUN: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "report_to": [],
    "logging_steps": 1,
    "disable_tqdm": True,
    "save_strategy": "no",
    "seed": 0,
}
