"""Training with bfloat16 or int8 moments stays close to training with float32 moments. Its bits depend only on the
seed, the steps and the dtype. Budgets, threads, schedules, speculation, copies in RAM and interruptions change no bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted_runs import InterruptAfter, Outcome, assert_same, interrupt, make_trainer, outcome_of, train_to_end
from transformers import TrainerCallback

import hf_lohan
from hf_lohan.config import OffloadConfig
from hf_lohan.files import ForeignStoreError, IoEngine, StorePath
from hf_lohan.huggingface.attachment import offload_model
from hf_lohan.huggingface.models.export import export_model
from hf_lohan.optim import OffloadAdamW
from hf_lohan.store import Store
from hf_lohan.testing.models import tiny_batch, tiny_model

DTYPES = ("bfloat16", "int8")
SETTINGS: dict[str, Any] = {"logging_steps": 1, "max_grad_norm": 2.1, "weight_decay": 0.1}
"""Some steps clip with this `max_grad_norm`."""


def trainer_with(folder: Path, dtype: str, *callbacks: TrainerCallback, **settings: Any) -> Any:
    offload = {"optimizer_state_dtype": dtype, **settings.pop("offload", {})}
    return make_trainer(folder, *callbacks, family="llama", offload=offload, **{**SETTINGS, **settings})


def run_with(folder: Path, dtype: str, *, resume: Any = None, **settings: Any) -> Outcome:
    return train_to_end(trainer_with(folder, dtype, **settings), resume)


@pytest.fixture(scope="module")
def undisturbed_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of an undisturbed run for each dtype."""
    return {dtype: run_with(tmp_path_factory.mktemp(dtype), dtype) for dtype in DTYPES}


def losses_of_repeated_batch(folder: Path, dtype: str, working_dtype: torch.dtype) -> list[float]:
    """Train on one batch again and again; return the losses."""
    offload = {"cpu_memory": "4MiB", "gpu_memory": "2MiB", "activations": "recompute", "ssd": str(folder)}
    config = OffloadConfig.load(offload, optimizer_state_dtype=dtype)
    model = tiny_model("llama").train()
    engine = offload_model(
        model, config, torch_device="cpu", default_ssd_path=folder, working_dtype=working_dtype, hold_gradients=False
    )
    optimizer = OffloadAdamW(model.parameters(), lr=5e-3, weight_decay=0.1, engine=engine)
    losses = []
    for _ in range(30):
        loss = model(**tiny_batch(seed=1)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    engine.close()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("working_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_losses_are_close_to_those_with_float32_moments(working_dtype: torch.dtype, tmp_path: Path) -> None:
    """The loss falls from 5.5 to less than 0.2. On the way, rounding changes it by less than 0.1."""
    exact = losses_of_repeated_batch(tmp_path / "exact", "float32", working_dtype)
    assert exact[0] > 5 and exact[-1] < 0.2
    for dtype, tolerance in (("bfloat16", 0.05), ("int8", 0.1)):
        rounded = losses_of_repeated_batch(tmp_path / dtype, dtype, working_dtype)
        assert rounded[0] == exact[0] and rounded != exact
        assert max(abs(a - b) for a, b in zip(rounded, exact, strict=True)) < tolerance, dtype


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    "offload",
    [
        {"cpu_memory": "64MiB", "gpu_memory": "8MiB"},
        {"cpu_memory": "1500KiB", "gpu_memory": "1MiB", "_schedule": "serial", "durability": "checkpoint"},
        {"_clip": "speculate", "gpu_memory": "8MiB", "_resident_records": "none", "cpu_threads": 1},
    ],
    ids=["large", "small", "speculation"],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_budgets_and_schedules_change_no_bit(
    dtype: str, offload: dict[str, Any], undisturbed_runs: dict[str, Any], tmp_path: Path
) -> None:
    """Small budgets spill gradients. A wrong speculation is redone and takes weights from their slots."""
    trainer = trainer_with(tmp_path, dtype, offload=offload)
    trainer.train()
    counts = json.loads((tmp_path / "lohan" / "summary.json").read_text())
    if "speculate" in offload.values():
        assert 0 < counts["num_redone_steps"] < counts["num_speculated_steps"]
    assert (counts["scratch_bytes"] > 0) == ("serial" in offload.values())
    assert_same(outcome_of(trainer), undisturbed_runs[dtype])


@pytest.mark.parametrize(
    ("dtype", "clip"), [pytest.param("bfloat16", "speculate", marks=pytest.mark.slow), ("int8", "defer")]
)
def test_resuming_from_the_last_step_changes_no_bit(
    dtype: str, clip: str, undisturbed_runs: dict[str, Any], tmp_path: Path
) -> None:
    resume = None
    for step in (2, 5):
        trainer = trainer_with(tmp_path, dtype, InterruptAfter(step), offload={"_clip": clip})
        interrupt(trainer, resume)
        resume = "last_step"
        assert hf_lohan.last_step(tmp_path) == step
    assert_same(run_with(tmp_path, dtype, resume=resume), undisturbed_runs[dtype])


@pytest.mark.covering(0)
@pytest.mark.parametrize(("saved", "wanted"), [("float32", "int8"), ("int8", "bfloat16"), ("bfloat16", "float32")])
def test_states_of_another_dtype_are_refused(saved: str, wanted: str, tmp_path: Path) -> None:
    run_with(tmp_path / "run", saved, max_steps=2, save_strategy="steps", save_steps=2)
    with pytest.raises(
        ForeignStoreError,
        match=f"with optimizer_state_dtype: {saved}, and this run has optimizer_state_dtype: {wanted}; use the setting",
    ):
        trainer_with(tmp_path / "run", wanted).train(resume_from_checkpoint="last_step")
    trainer = trainer_with(tmp_path / "elsewhere", wanted)
    with pytest.raises(
        ValueError,
        match=f"with optimizer_state_dtype: {saved}, and this run has optimizer_state_dtype: {wanted}; use the setting",
    ):
        trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    trainer.offload_engine.close()


@pytest.mark.slow
def test_an_old_index_without_a_dtype_means_float32(tmp_path: Path) -> None:
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = run_with(tmp_path / "run", "float32", **settings)
    path = tmp_path / "run" / "checkpoint-2" / "lohan" / "optimizer_index.json"
    index = json.loads(path.read_text())
    del index["optimizer_state_dtype"]
    path.write_text(json.dumps(index))
    resumed = run_with(tmp_path / "again", "float32", resume=str(path.parents[1]), max_steps=4)
    assert_same(resumed, whole)


def frozen_and_tied(family: str) -> Any:
    """Make a model with frozen weights after the trained ones in a block, and with padded records."""
    model = tiny_model(family, hidden_size=48)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "family"), [pytest.param("bfloat16", "opt", marks=pytest.mark.slow), ("int8", "mixtral")]
)
def test_a_model_with_frozen_weights_resumes_verifies_and_exports(dtype: str, family: str, tmp_path: Path) -> None:
    def trained(folder: str, resume: Any = None, *callbacks: TrainerCallback) -> Any:
        trainer = trainer_with(tmp_path / folder, dtype, *callbacks, model=frozen_and_tied(family), max_steps=4)
        return interrupt(trainer) if callbacks else train_to_end(trainer, resume)

    whole = trained("whole")
    trained("run", None, InterruptAfter(2))
    assert_same(trained("run", "last_step"), whole)
    io = IoEngine(2, 1 << 20, 1 << 26)
    with Store.open([StorePath(str(tmp_path / "run" / "_lohan" / "store"))], model=None, engine=io) as store:
        verified = list(store.verify_records())
    io.close()
    kinds = {record.kind for record, _ in verified}
    assert kinds == {"param", "exp_avg", "exp_avg_sq", *(["moment_scales"] if dtype == "int8" else [])}
    assert not any(errors for _, errors in verified)
    assert export_model(tmp_path / "run", tmp_path / "exported") == 4
    exported = type(frozen_and_tied(family)).from_pretrained(tmp_path / "exported", dtype=torch.float32)
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter.detach().flatten().view(torch.uint8), whole[1][f"{name}.param"]), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_of_precision_is_logged_once(dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_with(tmp_path / "rounded", dtype, max_steps=1)
    (line,) = [record.getMessage() for record in caplog.records if "optimizer_state_dtype" in record.getMessage()]
    assert f"optimizer_state_dtype: {dtype}" in line and "docs/optimizers.md" in line
    assert f"{ {'bfloat16': 4, 'int8': 2.25}[dtype] } bytes a parameter" in line
    caplog.clear()
    run_with(tmp_path / "exact", "float32", max_steps=1)
    assert not [record for record in caplog.records if "optimizer_state_dtype" in record.getMessage()]
