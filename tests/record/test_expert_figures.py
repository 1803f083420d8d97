"""The record of streamed experts."""

from __future__ import annotations

import json
from pathlib import Path

from small_trainer import small_trainer

NUM_STEPS = 3


def test_each_line_counts_used_and_loaded_experts(tmp_path: Path) -> None:
    offload = {"cpu_memory": "3MiB", "gpu_memory": "288KiB", "_resident_records": "none", "experts": "streamed"}
    trainer = small_trainer(tmp_path, offload, family="mixtral", max_steps=NUM_STEPS)
    trainer.train()
    engine = trainer.offload_engine
    assert engine is not None and engine.expert_loader is not None
    block = next(iter(engine.layout.model_blocks.experts.values()))[0]
    num_experts = sum(map(len, engine.layout.model_blocks.experts.values()))
    engine.close()
    lines = [json.loads(line) for line in (tmp_path / "lohan" / "steps.jsonl").read_text().splitlines()]
    by_step = {line["step"]: line["experts"] for line in lines}
    assert len(by_step) == NUM_STEPS
    for of_step in by_step.values():
        # 32 tokens with 2 experts each use all experts, forward and backward.
        assert of_step["num_used"] == 2 * num_experts
        assert 0 < of_step["num_here"] < of_step["num_used"]
        assert of_step["num_from_ram"] == 0
        assert of_step["loaded_bytes"] == of_step["num_loads"] * block.param_bytes
        assert of_step["wrong_bytes"] == 0
    # Experts that stayed in slots between forward and backward were not loaded again.
    assert by_step[2]["num_loads"] < 2 * num_experts
