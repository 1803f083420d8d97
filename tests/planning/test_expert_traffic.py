"""Small batches read the planned bytes from the SSDs, with streamed experts and with experts in whole layers."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from short_runs import short_arguments
from torch import nn

import hf_lohan
from hf_lohan.costs import forecast
from hf_lohan.costs.step.expert_costs import MOST_STEPS_BEHIND
from hf_lohan.huggingface.offloaded_model import run_plan_of
from hf_lohan.planning import PlannedStep
from hf_lohan.testing.models import tiny_model, tiny_rows

NUM_EXPERTS, NUM_CHOSEN = 32, 6
PERIOD = MOST_STEPS_BEHIND + 1
"""Experts without tokens take their missed steps together after this many steps."""
FIRST_SETTLED = PERIOD + 2
"""Before this step, such experts have no moments to read."""
NUM_STEPS = FIRST_SETTLED + PERIOD
WITHIN = 0.05


def route_to_the_first(model: nn.Module) -> None:
    """Make every token go to the first experts."""

    def choose(router: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        *others, chosen = output
        return *others, torch.arange(NUM_CHOSEN).expand_as(chosen).clone()

    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    assert routers
    for router in routers:
        router.register_forward_hook(choose)


def read_bytes(tmp_path: Path, experts: str, gpu_memory: str) -> tuple[float, PlannedStep]:
    """Train. Return the mean bytes read by a settled step, and the plan."""
    own = tmp_path / experts
    sizes = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_CHOSEN, "moe_intermediate_size": 128}
    tiny_model("qwen3_moe", hidden_size=128, **sizes).save_pretrained(own / "checkpoint")
    rows = tiny_rows(NUM_STEPS)
    args = short_arguments(own / "run", max_steps=NUM_STEPS, per_device_train_batch_size=1, max_grad_norm=0.0)
    settings = {"experts": experts, "gpu_memory": gpu_memory, "cpu_memory": "24MiB", "ssd": str(own / "drive")}
    settings |= {"prefetch_blocks": 1, "_resident_records": "none"}
    trainer = hf_lohan.Trainer(str(own / "checkpoint"), args, train_dataset=rows, offload=settings)
    route_to_the_first(trainer.model)
    trainer.train()
    lines = [json.loads(line) for line in (own / "run" / "lohan" / "steps.jsonl").read_text().splitlines()]
    by_step = {line["step"]: line["ssd_read_bytes"] for line in lines}
    run_plan = run_plan_of(trainer.offload_engine)
    planned = run_plan.now if run_plan is not None else None
    assert planned is not None
    trainer.offload_engine.close()
    return mean(by_step[step] for step in range(1 + FIRST_SETTLED, 1 + NUM_STEPS)), planned


@pytest.mark.slow
def test_small_batches_read_the_planned_bytes(tmp_path: Path) -> None:
    with_layer, planned = read_bytes(tmp_path, "with_layer", "24MiB")
    assert planned.plan.prediction.ssd_read_bytes_per_step == pytest.approx(with_layer, rel=WITHIN)

    one_by_one, planned = read_bytes(tmp_path, "streamed", "3MiB")
    counts = [1.0] * NUM_CHOSEN + [0.0] * (NUM_EXPERTS - NUM_CHOSEN)
    layers = [block.name for block in planned.profile.blocks if block.experts]
    routed = planned.profile.routed(dict.fromkeys(layers, counts))
    expected = forecast(routed, planned.hardware, planned.setup, planned.plan)
    assert expected.ssd_read_bytes_per_step == pytest.approx(one_by_one, rel=WITHIN)
    assert expected.experts.hits_per_micro_batch == len(layers) * NUM_CHOSEN

    # With equal chances, nearly all experts would be hit.
    alike = {name: [1.0] * NUM_EXPERTS for name in layers}
    of_any = forecast(planned.profile.routed(alike), planned.hardware, planned.setup, planned.plan)
    assert of_any.ssd_read_bytes_per_step > (1 + 2 * WITHIN) * one_by_one
    assert with_layer > (1 + 2 * WITHIN) * one_by_one
