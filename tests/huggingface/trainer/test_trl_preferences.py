"""Learning from preferences with TRL's trainers equals training in memory, including the reference model."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import slow_but

from hf_lohan import engine_of
from hf_lohan.testing.models import tiny_model

pytest.importorskip("trl")
import trl_runs
from tiny_tokenizer import tiny_tokenizer
from trl_runs import arguments, both, judgements, preferences, run


def another_model() -> Any:
    return tiny_model("llama", seed=7, eos_token_id=tiny_tokenizer().eos_token_id)


def dataset_for(kind: str) -> Any:
    return preferences() if kind == "DPO" else judgements()


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_a_reference_of_the_same_checkpoint_equals_memory(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    ours, stock = both(kind, tmp_path, {}, lambda: {"model": str(checkpoint), "train_dataset": dataset_for(kind)})
    trl_runs.assert_same(ours, stock)
    policy, reference = engine_of(ours.trainer.model), engine_of(ours.trainer.ref_model)
    assert policy is not None and reference is not None
    assert reference.tiers.store.paths[0].path == f"{policy.tiers.store.paths[0].path}/ref"
    # Both fit in the budgets of one, and the reference has no states.
    gpu_bytes = policy.layout.plan.gpu_pool_bytes + reference.layout.plan.gpu_pool_bytes
    cpu_bytes = policy.layout.cpu_bytes + reference.layout.cpu_bytes
    assert gpu_bytes <= 2 << 20 and cpu_bytes <= 8 << 20
    assert {record.kind for record in reference.layout.records} == {"param"}


def test_models_from_memory_with_another_reference_equal_memory(checkpoint: Path, tmp_path: Path) -> None:
    ours, stock = both(
        "DPO",
        tmp_path,
        {"gradient_accumulation_steps": 2, "max_steps": 2},
        lambda: {
            "model": tiny_model("llama", eos_token_id=tiny_tokenizer().eos_token_id),
            "ref_model": another_model(),
            "train_dataset": preferences(),
            "processing_class": tiny_tokenizer(),
        },
    )
    trl_runs.assert_same(ours, stock)


@pytest.mark.parametrize(("kind", "is_streamed"), [("DPO", True), ("KTO", False)], ids=["DPO", "KTO-in_memory"])
def test_precomputed_log_probs_of_the_reference_equal_memory(
    kind: str, is_streamed: bool, checkpoint: Path, tmp_path: Path
) -> None:
    runs = itertools.count()

    def given() -> dict[str, Any]:
        model = str(checkpoint) if is_streamed else tiny_model("llama", eos_token_id=tiny_tokenizer().eos_token_id)
        dataset = dataset_for(kind)
        # Another dataset has no cached log probs, so they are computed again.
        dataset = dataset.add_column("run", [next(runs)] * len(dataset))
        return {"model": model, "train_dataset": dataset, "processing_class": tiny_tokenizer()}

    ours, stock = both(kind, tmp_path, {"precompute_ref_log_probs": True}, given)
    trl_runs.assert_same(ours, stock)
    assert ours.trainer.ref_model is None
    files = [found.trainer.train_dataset.cache_files for found in (ours, stock)]
    assert files[0] != files[1], "the log probs came from a cache"


@pytest.mark.parametrize(("kind", "activations"), [("DPO", "auto"), ("KTO", "keep")])
def test_adapters_switched_off_for_the_reference_equal_memory(
    kind: str, activations: str, checkpoint: Path, tmp_path: Path
) -> None:
    ours, stock = both(
        kind,
        tmp_path,
        {},
        lambda: {"model": str(checkpoint), "train_dataset": dataset_for(kind), "peft_config": trl_runs.lora()},
        activations=activations,
    )
    trl_runs.assert_same(ours, stock)
    assert ours.trainer.ref_model is None


@pytest.mark.parametrize("how", slow_but(("reference",), ["reference", "precomputed", "adapters"]))
def test_policy_and_reference_are_equal_at_first_in_bfloat16(how: str, checkpoint: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"bf16": True, "max_steps": 2, "precompute_ref_log_probs": how == "precomputed"}
    done = run(
        "DPO",
        arguments("DPO", tmp_path, **settings),
        offload=trl_runs.BUDGETS,
        model=str(checkpoint),
        train_dataset=preferences(),
        peft_config=trl_runs.lora() if how == "adapters" else None,
    )
    # A TRL that computes log-probs in bfloat16 rounds the loss, and the small change that adapters make in one step.
    tolerance = 2**-8 if trl_runs.IS_BEFORE_1_15 else 1e-6
    assert done.logs[0]["rewards/margins"] == 0.0 and done.logs[0]["loss"] == pytest.approx(math.log(2), rel=tolerance)
    assert done.logs[1]["rewards/margins"] != 0.0 or (trl_runs.IS_BEFORE_1_15 and how == "adapters")
    assert {weight.dtype for weight in done.weights.values()} == {torch.bfloat16}
    trl_runs.close(done)
