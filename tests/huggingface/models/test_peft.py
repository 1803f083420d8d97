"""Adapters of an offloaded base train as in memory. Only they change, and they are saved as by PEFT."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from covering import slow_but
from equal_tensors import assert_same_tensors
from safetensors.torch import load_file
from short_runs import short_arguments
from stored_weights import assert_stored
from torch import Tensor
from transformers import Trainer as StockTrainer
from transformers import TrainingArguments

import hf_lohan
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.attachment import offload_model
from hf_lohan.huggingface.models.adapters import adding_adapters, finished
from hf_lohan.optim import OffloadAdamW
from hf_lohan.ranks import Links
from hf_lohan.testing.models import tiny_batch, tiny_model, tiny_rows
from hf_lohan.testing.thread_ranks import rank_outcomes

peft = pytest.importorskip("peft")

MAX_STEPS = 4


def adapted() -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(tiny_model("llama"), config)


def rows() -> list[dict[str, Tensor]]:
    return tiny_rows(2 * MAX_STEPS)


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    return short_arguments(folder, **{"max_steps": MAX_STEPS, "learning_rate": 1e-2, **settings})


def engine_of(trainer: hf_lohan.Trainer) -> OffloadEngine:
    engine = trainer.offload_engine
    assert engine is not None
    return engine


@pytest.fixture
def stock(tmp_path: Path) -> StockTrainer:
    trainer = StockTrainer(adapted(), arguments(tmp_path / "stock"), train_dataset=rows())
    trainer.train()
    return trainer


def loss_of(model: Any, part: str = "", seed: int = 0) -> Tensor:
    """Return an ordinary loss, or one in which no trained weight has a part."""
    output = model(**tiny_batch(seed=seed), output_hidden_states=True)
    hidden = output.hidden_states[1]
    return {"detached": hidden.detach(), "a constant": torch.ones(())}.get(part, output.loss).mean()


def offloaded_adapters(folder: Path, **settings: Any) -> tuple[Any, OffloadAdamW, OffloadEngine]:
    model, config = adapted().train(), hf_lohan.OffloadConfig.load({"cpu_memory": "3MiB", "gpu_memory": "1MiB"})
    engine = offload_model(model, config, torch_device="cpu", default_ssd_path=folder, **settings)
    return model, OffloadAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, engine=engine), engine


SWITCHES = {"merged": ("merge_adapter", "unmerge_adapter"), "off": ("disable_adapter_layers", "enable_adapter_layers")}


@pytest.mark.covering(0)
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
    assert_stored(ours, stock)
    engine.close()


CAUSAL = {"task_type": "CAUSAL_LM"}
SAVED: dict[str, Callable[[], Any]] = {
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, **CAUSAL),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=8, **CAUSAL),
    "p-tuning by LSTM": lambda: peft.PromptEncoderConfig(
        num_virtual_tokens=4, encoder_hidden_size=8, encoder_reparameterization_type="LSTM", **CAUSAL
    ),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, **CAUSAL),
    "cartridge": lambda: peft.CartridgeConfig(num_virtual_tokens=4, num_frozen_tokens=1, **CAUSAL),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["up_proj", "gate_proj"], **CAUSAL),
    "vblora": lambda: peft.VBLoRAConfig(
        r=4, num_vectors=16, vector_length=8, topk=2, target_modules=["q_proj"], **CAUSAL
    ),
    "tinylora": lambda: peft.TinyLoraConfig(target_modules=["q_proj"], **CAUSAL),
    "unilora": lambda: peft.UniLoraConfig(target_modules=["q_proj"], **CAUSAL),
}
"""Adapters whose saved tensors are computed, are shared by layers, or are buffers."""


def trained_with(kind: str, folder: Path, *, resumes: bool, **ours: Any) -> Any:
    """Return a Trainer that has loaded its worst checkpoint at the end, or has resumed from one."""

    def trainer() -> Any:
        torch.manual_seed(1)
        model = peft.get_peft_model(tiny_model("llama"), SAVED[kind]())
        best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "greater_is_better": True}
        settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, **({} if resumes else best)}
        trainer_class = hf_lohan.Trainer if ours else StockTrainer
        args = arguments(folder, **settings)
        return trainer_class(model, args, train_dataset=rows(), eval_dataset=rows()[:2], **ours)

    trained = trainer()
    trained.train()
    if resumes:
        trained = trainer()
        trained.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    return trained


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", slow_but(("prompt", "vera"), SAVED))
@pytest.mark.parametrize("resumes", [True, False])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_of_every_kind_are_loaded_as_with_the_stock_trainer(resumes: bool, kind: str, tmp_path: Path) -> None:
    offload = {"cpu_memory": "16MiB", "gpu_memory": "4MiB"}
    stock = trained_with(kind, tmp_path / "stock", resumes=resumes)
    ours = trained_with(kind, tmp_path / "ours", resumes=resumes, offload=offload)
    assert [row.get("loss") for row in ours.state.log_history] == [row.get("loss") for row in stock.state.log_history]
    assert_stored(ours.model, stock.model)
    for name, buffer in stock.model.named_buffers():
        assert torch.equal(ours.model.get_buffer(name), buffer), name
    engine_of(ours).close()


@pytest.mark.parametrize("trains_adapters", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_mixture_of_saved_adapters_trains_as_with_the_stock_trainer(trains_adapters: bool, tmp_path: Path) -> None:
    """X-LoRA calls its model twice in a forward, first without adapters."""
    folders = {name: str(tmp_path / name) for name in "01"}  # PEFT finds adapters of other names in no config
    for seed, folder in enumerate(folders.values()):
        torch.manual_seed(seed)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, **CAUSAL)
        peft.get_peft_model(tiny_model("llama"), lora).save_pretrained(folder)

    def trained(trainer_class: Any, **ours: Any) -> Any:
        model = tiny_model("llama")
        model.config.use_cache = False
        config = peft.XLoraConfig(
            hidden_size=model.config.hidden_size,
            xlora_depth=1,
            adapters=folders,
            use_trainable_adapters=trains_adapters,
            **CAUSAL,
        )
        torch.manual_seed(1)
        args = arguments(tmp_path / trainer_class.__module__, max_steps=3)
        trainer = trainer_class(peft.get_peft_model(model, config), args, train_dataset=rows(), **ours)
        trainer.train()
        return trainer

    stock = trained(StockTrainer)
    ours = trained(hf_lohan.Trainer, offload={"cpu_memory": "16MiB", "gpu_memory": "4MiB"})
    assert [row.get("loss") for row in ours.state.log_history] == [row.get("loss") for row in stock.state.log_history]
    assert_stored(ours.model, stock.model)
    engine_of(ours).close()


def test_a_base_may_be_called_in_place_of_its_model(tmp_path: Path) -> None:
    """With gradients enabled, before and after its adapters are unloaded."""
    models = [adapted(), adapted()]
    ours = hf_lohan.Trainer(models[0], arguments(tmp_path), offload={"cpu_memory": "3MiB", "gpu_memory": "1MiB"})
    ours.evaluate(rows()[:2])
    for call in (
        lambda model: model.base_model(**tiny_batch()).loss,
        lambda model: model.base_model.model(**tiny_batch()).loss,
        lambda model: model.get_base_model()(**tiny_batch()).loss,
        lambda model: model(**tiny_batch()).loss,
    ):
        losses = [call(model.train()) for model in models]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in models[1].parameters() if p.grad is not None])
    assert torch.equal(engine_of(ours).clip_grad_norm(float("inf")), norm)
    models[0].zero_grad()
    bases = [model.merge_and_unload() for model in models]
    assert torch.equal(*(base.eval()(**tiny_batch()).loss for base in bases))
    engine_of(ours).close()


def with_adapters(kind: str) -> Any:
    torch.manual_seed(1)
    model, lora = tiny_model("llama"), peft.LoraConfig(r=4, target_modules=["q_proj"])
    if kind == "of transformers":
        model.add_adapter(lora)
        return model
    if kind == "injected":
        return peft.inject_adapter_in_model(lora, model)
    mixed = peft.get_peft_model(model, lora, adapter_name="one", mixed=True)
    mixed.add_adapter("two", peft.LoHaConfig(r=2, target_modules=["k_proj"]))
    mixed.set_adapter(["one", "two"])
    return mixed


@pytest.mark.covering(0)
@pytest.mark.parametrize("kind", ["mixed", "of transformers", "injected"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_without_a_peft_model_train_save_and_resume(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        transformers.integrations.peft, "check_peft_version", lambda **_: None
    )  # it may ask for a newer
    settings = {"save_strategy": "steps", "save_steps": 2}
    stock = StockTrainer(with_adapters(kind), arguments(tmp_path / "stock", **settings), train_dataset=rows())
    offload = {"cpu_memory": "4MiB", "gpu_memory": "1MiB"}
    first = hf_lohan.Trainer(
        with_adapters(kind), arguments(tmp_path / "ours", **settings), train_dataset=rows(), offload=offload
    )
    for trainer in (stock, first):
        trainer.train()
    losses = [[row.get("loss") for row in trainer.state.log_history] for trainer in (stock, first)]
    assert losses[0] == losses[1]
    files = [[*(tmp_path / whose / "checkpoint-4").glob("*.safetensors")] for whose in ("ours", "stock")]
    assert [file.name for file in files[0]] == [file.name for file in files[1]]
    found, expected = (load_file(file) for (file,) in files)
    assert_same_tensors(found, expected)
    engine_of(first).close()
    again = hf_lohan.Trainer(with_adapters(kind), arguments(tmp_path / "ours"), train_dataset=rows(), offload=offload)
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert_stored(again.model, stock.model)
    engine_of(again).close()


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


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_arguments_of_pefts_save_pretrained_mean_the_same(offload: Any, tmp_path: Path) -> None:
    """The adapters were made with PiSSA, which changes the base. A conversion needs the adapters before training."""
    model = peft.get_peft_model(
        tiny_model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa")
    )
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj"]))
    initial, converted = tmp_path / "initial", {"path_initial_model_for_weight_conversion": str(tmp_path / "initial")}
    model.save_pretrained(str(initial), selected_adapters=["default"])
    config = json.loads((initial / "adapter_config.json").read_text())
    (initial / "adapter_config.json").write_text(json.dumps({**config, "init_lora_weights": True}))
    options: dict[str, tuple[Any, dict[str, Any]]] = {
        "selected": ((), {"selected_adapters": ["second"]}),
        "pickled": ((False,), {}),
        "embeddings": ((True, None, True), {}),
        "elsewhere": ((), {"is_main_process": False}),
    }

    def files(whose: str) -> dict[str, Any]:
        return {
            str(file.relative_to(tmp_path / whose)): load_file(file) if file.suffix == ".safetensors" else None
            for file in sorted((tmp_path / whose).rglob("*.*"))
        }

    for name, (given, named) in options.items():
        model.save_pretrained(str(tmp_path / f"stock-{name}"), *given, **named)
    model.save_pretrained(str(tmp_path / "stock-converted"), selected_adapters=["default"], **converted)
    offload(model)
    for name, (given, named) in options.items():
        model.save_pretrained(str(tmp_path / f"ours-{name}"), *given, **named)
        stock, ours = files(f"stock-{name}"), files(f"ours-{name}")
        assert ours.keys() == stock.keys()
        for file, tensors in stock.items():
            assert tensors is None or all(torch.equal(ours[file][key], value) for key, value in tensors.items())
    with pytest.raises(ValueError, match="invalid `selected_adapters`"):
        model.save_pretrained(str(tmp_path / "none"), selected_adapters=["third"])
    with pytest.raises(ValueError, match=r"is not supported under offload; .* load the base and the saved adapters"):
        model.save_pretrained(str(tmp_path / "none"), **converted)
    # the other way that the message names
    model.save_pretrained(str(tmp_path / "saved"), selected_adapters=["default"])
    in_memory = peft.PeftModel.from_pretrained(tiny_model("llama"), str(tmp_path / "saved"))
    in_memory.save_pretrained(str(tmp_path / "ours-converted"), **converted)
    assert not (tmp_path / "none").exists()
    stock, ours = (files(f"{whose}-converted")["adapter_model.safetensors"] for whose in ("stock", "ours"))
    assert_same_tensors(ours, stock)


def test_an_adapter_of_transformers_may_be_saved_with_its_own_names(
    offload: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.integrations.peft, "check_peft_version", lambda **_: None)
    model = with_adapters("of transformers")
    model.save_pretrained(tmp_path / "stock", save_peft_format=False)
    offload(model)
    model.save_pretrained(tmp_path / "ours", save_peft_format=False)
    stock, ours = (load_file(tmp_path / whose / "adapter_model.safetensors") for whose in ("stock", "ours"))
    assert_same_tensors(ours, stock)
