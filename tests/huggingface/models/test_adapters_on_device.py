"""All adapters stay on the device in their own dtype, and their base is only read."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from short_runs import short_arguments
from stored_weights import assert_stored
from torch import Tensor
from transformers import Trainer as StockTrainer
from transformers import TrainerCallback

import hf_lohan
from hf_lohan.costs import SizeClass
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.models.export import export_model
from hf_lohan.model import discover_blocks
from hf_lohan.store import Store
from hf_lohan.testing.models import tiny_batch, tiny_model, tiny_rows

peft = pytest.importorskip("peft")

MAX_STEPS = 4
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])


def adapted(dtype: torch.dtype) -> Any:
    """Return a model with float32 adapters, as PEFT makes them."""
    base = tiny_model("llama", num_layers=6).to(dtype)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(1)
    return peft.get_peft_model(base, config)


def trainer_of(kind: type, folder: Path, dtype: torch.dtype, *callbacks: TrainerCallback, **settings: Any) -> Any:
    offload = settings.pop("offload", {})
    defaults: dict[str, Any] = {
        "max_steps": MAX_STEPS,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.05,
    }
    rows = tiny_rows(4 * MAX_STEPS)
    ours = {"offload": {"cpu_memory": "6MiB", "gpu_memory": "1MiB", "_resident_records": "none", **offload}}
    return kind(
        adapted(dtype),
        short_arguments(folder, **{**defaults, **settings}),
        train_dataset=rows,
        callbacks=list(callbacks),
        **(ours if kind is hf_lohan.Trainer else {}),
    )


@pytest.fixture(scope="module")
def stock_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return a function that trains with the stock Trainer, once per dtype and settings."""

    @functools.cache
    def run(dtype: torch.dtype, **settings: Any) -> Any:
        trainer = trainer_of(StockTrainer, tmp_path_factory.mktemp("stock"), dtype, **settings)
        trainer.train()
        return trainer

    return run


def engine_of(trainer: Any) -> OffloadEngine:
    engine = trainer.offload_engine
    assert isinstance(engine, OffloadEngine)
    return engine


def losses_and_norms(trainer: Any) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]


class Interrupts(TrainerCallback):
    """Raises KeyboardInterrupt after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            raise KeyboardInterrupt


@pytest.mark.covering(1)
@DTYPES
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"offload": {"_clip": "speculate"}},
        {"offload": {"vertical_micro_batches": True}},
        {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1},
    ],
    ids=["deferred", "speculating", "together", "in-backward"],
)
def test_training_equals_the_stock_trainer(
    settings: dict[str, Any], dtype: torch.dtype, tmp_path: Path, stock_run: Callable[..., Any]
) -> None:
    stock_settings = {name: value for name, value in settings.items() if name != "offload"}
    stock = stock_run(dtype, **stock_settings)
    ours = trainer_of(hf_lohan.Trainer, tmp_path / "ours", dtype, **settings)
    ours.train()
    assert losses_and_norms(ours) == losses_and_norms(stock)
    assert_stored(ours.model, stock.model)
    engine_of(ours).close()


@pytest.mark.covering(0)
@DTYPES
def test_adapters_are_saved_reloaded_and_resumed(
    dtype: torch.dtype, tmp_path: Path, stock_run: Callable[..., Any]
) -> None:
    stock = stock_run(dtype)
    first = trainer_of(hf_lohan.Trainer, tmp_path / "run", dtype, Interrupts(3), save_strategy="steps", save_steps=2)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    engine_of(first).close()
    for resume in ("last_step", str(tmp_path / "run" / "checkpoint-2")):
        again = trainer_of(hf_lohan.Trainer, tmp_path / "run", dtype)
        again.train(resume_from_checkpoint=resume)
        assert_stored(again.model, stock.model)
        again.model.save_pretrained(tmp_path / "adapters")
        engine_of(again).close()
        loaded = peft.PeftModel.from_pretrained(tiny_model("llama", num_layers=6).to(dtype), tmp_path / "adapters")
        with torch.no_grad():
            assert torch.equal(loaded.eval()(**tiny_batch()).logits, stock.model.eval()(**tiny_batch()).logits)


@pytest.mark.covering(0)
@DTYPES
def test_adapters_are_exported(dtype: torch.dtype, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    ours = trainer_of(hf_lohan.Trainer, tmp_path / "run", dtype)
    ours.train()
    ours.model.save_pretrained(tmp_path / "saved")
    engine_of(ours).close()
    export_model(tmp_path / "run", tmp_path / "exported")
    saved, exported = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("saved", "exported"))
    assert saved.keys() == exported.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())


@pytest.mark.covering(0)
@DTYPES
def test_a_step_writes_only_adapters_and_reads_a_layer_twice(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: Counter[tuple[str, str, str]] = Counter()
    real_read, real_write = Store.read, Store.write

    def read(store: Store, block: str, kind: str, start: int, out: Tensor, **options: Any) -> Any:
        moved["read", block, kind] += out.nbytes
        return real_read(store, block, kind, start, out, **options)

    def write(store: Store, block: str, kind: str, start: int, source: Tensor, **options: Any) -> Any:
        moved["write", block, kind] += source.nbytes
        return real_write(store, block, kind, start, source, **options)

    settings = {"gradient_accumulation_steps": 1, "offload": {"_clip": "defer"}}  # no update is redone
    ours = trainer_of(hf_lohan.Trainer, tmp_path, dtype, **settings)
    monkeypatch.setattr(Store, "read", read)
    monkeypatch.setattr(Store, "write", write)
    ours.train()
    engine = engine_of(ours)
    engine.wait_for_updates()
    records = {(spec.block, spec.kind): spec.numel * spec.itemsize for spec in engine.layout.records}
    written = {(block, kind): n for (way, block, kind), n in moved.items() if way == "write"}
    of_adapters = {key: num_bytes for key, num_bytes in records.items() if key[0] == "adapters"}
    assert written == {key: MAX_STEPS * num_bytes for key, num_bytes in of_adapters.items()}
    layers = [block for block in engine.layout.blocks if block.size_class is SizeClass.LAYER]
    assert len(layers) == 6
    for block in layers:
        # One more read is the prefetch for the next step.
        assert 0 < moved["read", block.name, "param"] <= (2 * MAX_STEPS + 1) * block.param_bytes
    engine.close()


@DTYPES
def test_all_adapters_are_one_resident_block(dtype: torch.dtype) -> None:
    model = adapted(dtype)
    blocks = {block.name: block for block in discover_blocks(model).blocks}
    adapters = blocks.pop("adapters")
    assert adapters.size_class is SizeClass.RESIDENT and adapters.master.working_dtype == torch.float32
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {part.name for part in adapters.slices} == trainable
    assert all(block.master.working_dtype == dtype and not block.state_numel for block in blocks.values())


def test_fully_trained_layers_are_streamed() -> None:
    model = tiny_model("llama", num_layers=20)
    model.requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)
    assert "adapters" not in {block.name for block in discover_blocks(model).blocks}


def test_norms_in_float32_stay_on_the_device() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    for name, module in model.named_modules():
        if name.endswith("layernorm"):
            module.float()
    found = discover_blocks(model)
    blocks = {block.name: block for block in found.blocks}
    norms = next(block for block in found.blocks if block.master.working_dtype == torch.float32)
    assert norms.size_class is SizeClass.RESIDENT and len(norms.slices) == 6
    for number, layer in enumerate(found.layers):
        assert found.needs[layer] == (blocks[f"model.layers.{number}"], norms)
