"""Adapters of an offloaded base train as in memory. Only they change, and they are saved as by PEFT."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer as StockTrainer
from transformers import TrainingArguments

import hf_lohan
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.attachment import offload_model
from hf_lohan.huggingface.models.adapters import adding_adapters, finished
from hf_lohan.optim import OffloadAdamW
from hf_lohan.ranks import Links
from hf_lohan.store import GRANULE_NUMEL
from hf_lohan.testing.models import tiny_batch, tiny_model
from hf_lohan.testing.thread_ranks import rank_outcomes

peft = pytest.importorskip("peft")

MAX_STEPS = 4


def adapted() -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(tiny_model("llama"), config)


def rows() -> list[dict[str, Tensor]]:
    return [{name: value[0] for name, value in tiny_batch(seed=seed).items()} for seed in range(2 * MAX_STEPS)]


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "use_cpu": True,
        "max_steps": MAX_STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder), **{**defaults, **settings})


def offloaded_trainer(folder: Path, **settings: Any) -> hf_lohan.Trainer:
    offload = {"cpu_memory": "3MiB", "gpu_memory": "1MiB"}
    return hf_lohan.Trainer(adapted(), arguments(folder, **settings), train_dataset=rows(), offload=offload)


def engine_of(trainer: hf_lohan.Trainer) -> OffloadEngine:
    engine = trainer.offload_engine
    assert engine is not None
    return engine


def weights_of(trainer: hf_lohan.Trainer) -> dict[str, Tensor]:
    access = engine_of(trainer).parameters
    return {name: access.read_parameter(name) for name, _ in trainer.model.named_parameters()}


@pytest.fixture
def stock(tmp_path: Path) -> StockTrainer:
    trainer = StockTrainer(adapted(), arguments(tmp_path / "stock"), train_dataset=rows())
    trainer.train()
    return trainer


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_adapters_train_as_with_the_stock_trainer(max_grad_norm: float, tmp_path: Path) -> None:
    stock = StockTrainer(adapted(), arguments(tmp_path / "stock", max_grad_norm=max_grad_norm), train_dataset=rows())
    stock.train()
    ours = offloaded_trainer(tmp_path / "ours", max_grad_norm=max_grad_norm)
    ours.train()
    losses = [[row["loss"] for row in t.state.log_history if "loss" in row] for t in (stock, ours)]
    assert losses[0] == losses[1]
    found, before = weights_of(ours), dict(adapted().named_parameters())
    for name, parameter in stock.model.named_parameters():
        assert torch.equal(found[name], parameter), name
        assert torch.equal(found[name], before[name]) == (not parameter.requires_grad), name
    engine_of(ours).close()


def test_only_adapters_have_states(tmp_path: Path) -> None:
    trainer = offloaded_trainer(tmp_path)
    trainer.train()
    engine = engine_of(trainer)
    trainable_numel = sum(part.numel for part in engine.parameter_slices if part.trainable)
    state_numel = sum(spec.numel for spec in engine.layout.records if spec.kind == "exp_avg")
    assert all(("lora_" in part.name) == part.trainable for part in engine.parameter_slices)
    num_trained_blocks = sum(block.state_numel > 0 for block in engine.layout.blocks)
    # Rounded up to a granule per block, because frozen and trained weights share no granule.
    assert trainable_numel <= state_numel < trainable_numel + num_trained_blocks * GRANULE_NUMEL
    assert set(engine.step_counts.values()) == {0, MAX_STEPS}
    engine.close()


@pytest.mark.parametrize("save", ["save_pretrained", "save_model"])
def test_adapters_are_saved_as_by_peft(save: str, stock: StockTrainer, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    ours = offloaded_trainer(tmp_path / "ours")
    ours.train()
    stock.model.save_pretrained(tmp_path / "stock_adapters")
    if save == "save_pretrained":
        ours.model.save_pretrained(tmp_path / "adapters")
    else:
        ours.save_model(str(tmp_path / "adapters"))
    engine_of(ours).close()
    expected, found = (
        load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("stock_adapters", "adapters")
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    loaded = peft.PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "adapters").eval()
    with torch.no_grad():
        assert torch.equal(loaded(**tiny_batch()).logits, stock.model.eval()(**tiny_batch()).logits)


def test_a_run_with_adapters_resumes(stock: StockTrainer, tmp_path: Path) -> None:
    first = offloaded_trainer(tmp_path / "ours", save_strategy="steps", save_steps=2)
    first.train()
    engine_of(first).close()
    second = offloaded_trainer(tmp_path / "ours")
    second.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    found = weights_of(second)
    for name, parameter in stock.model.named_parameters():
        assert torch.equal(found[name], parameter), name
    engine_of(second).close()


def loss_of(model: Any, part: str = "", seed: int = 0) -> Tensor:
    """Return an ordinary loss, or one in which no trained weight has a part."""
    output = model(**tiny_batch(seed=seed), output_hidden_states=True)
    hidden = output.hidden_states[1]
    return {"detached": hidden.detach(), "a constant": torch.ones(())}.get(part, output.loss).mean()


def offloaded_adapters(folder: Path, **settings: Any) -> tuple[Any, OffloadAdamW, OffloadEngine]:
    model, config = adapted().train(), hf_lohan.OffloadConfig.load({"cpu_memory": "3MiB", "gpu_memory": "1MiB"})
    engine = offload_model(model, config, torch_device="cpu", default_ssd_path=folder, **settings)
    return model, OffloadAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, engine=engine), engine


SWITCHES = {
    "merged": ("merge_adapter", "unmerge_adapter"),
    "off": ("disable_adapter_layers", "enable_adapter_layers"),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("hold_gradients", [True, False], ids=["held", "active"])
@pytest.mark.parametrize("part", [*SWITCHES, "detached", "a constant"])
def test_a_step_that_trains_nothing_is_refused_as_by_torch(part: str, hold_gradients: bool, tmp_path: Path) -> None:
    stock, (ours, optimizer, engine) = adapted(), offloaded_adapters(tmp_path, hold_gradients=hold_gradients)
    off, on = SWITCHES.get(part, ("eval", "train"))
    for model in (stock, ours):
        getattr(model.base_model, off)()
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss_of(stock, part).backward()
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss_of(ours, part).backward()
        optimizer.step()
    optimizer.zero_grad()
    getattr(ours.base_model, on)()
    loss_of(ours).backward()
    optimizer.step()
    engine.wait_for_updates()
    assert set(engine.step_counts.values()) == {0, 1}  # nothing is left of the refused step
    engine.close()


@pytest.mark.parametrize("without", [0, 1])
def test_one_of_two_micro_batches_may_train_nothing(without: int, tmp_path: Path) -> None:
    """Torch allows it if inputs require a gradient, as TRL has it."""
    stock, (ours, optimizer, engine) = adapted().train(), offloaded_adapters(tmp_path)
    stock.enable_input_require_grads()
    in_memory = torch.optim.AdamW([p for p in stock.parameters() if p.requires_grad], lr=1e-2, fused=True)
    for step in range(2):
        for number in range(2):
            engine.announce_backward(is_final=number == 1)
            for model in (stock, ours):
                with model.disable_adapter() if number == without else contextlib.nullcontext():
                    loss_of(model, seed=2 * step + number).backward()
        for each in (in_memory, optimizer):
            each.step()
            each.zero_grad()
    for name, parameter in stock.named_parameters():
        assert torch.equal(engine.parameters.read_parameter(name), parameter), name
    engine.close()


@pytest.mark.parametrize("seeds", [(1, 1), (1, 2)])
def test_adapters_that_ranks_draw_differently_are_refused(seeds: Sequence[int]) -> None:
    """They are drawn after the base has streamed, when each rank has its own random state."""

    class Written:
        def __init__(self) -> None:
            self.names: list[str] = []

        def write_parameter(self, name: str, _parameter: Tensor) -> None:
            self.names.append(name)

    written = [Written(), Written()]

    def load(links: Links) -> None:
        rank = links.ranks.rank

        def add(model: Any) -> Any:
            with one_generator:
                torch.manual_seed(seeds[rank])
                return adding_adapters(peft.LoraConfig(r=2, target_modules=["q_proj"]))(model)

        with one_generator:
            base = tiny_model("llama", num_layers=1)
        finished(base, add, written[rank], {}, links)  # type: ignore[arg-type]

    one_generator = threading.Lock()
    outcomes = rank_outcomes(2, load)
    if seeds[0] == seeds[1]:
        assert [outcome.error for outcome in outcomes] == [None, None]
        assert any("lora_A" in name for name in written[1].names)
        return
    assert not written[0].names
    assert any(re.search(r"lora_A.* differs between rank 1 and rank 0", str(outcome.error)) for outcome in outcomes)
