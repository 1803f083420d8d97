"""With `offload="auto"`, a run that fits the device uses the stock Trainer, and any other run is offloaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from architectures import model_with_a_tower
from datasets import Dataset
from peft import LoraConfig
from quantized_folders import fp8_folder
from short_runs import short_arguments
from stored_weights import assert_stored
from tiny_tokenizer import tiny_tokenizer
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, TrainingArguments

import hf_lohan
from hf_lohan import ConfigError
from hf_lohan.huggingface.trainer import in_memory
from hf_lohan.testing.models import tiny_batch, tiny_model
from hf_lohan.wording import format_bytes

ROWS = [{name: value[0].tolist() for name, value in tiny_batch(seed=seed).items()} for seed in range(8)]
NUM_TOKENS = len(ROWS[0]["input_ids"])


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    return short_arguments(folder, **{"max_steps": 2, "learning_rate": 1e-2, **more})


def trainer(folder: Path, model: Any = None, **more: Any) -> Any:
    rows = Dataset.from_list(ROWS)
    model = tiny_model("llama") if model is None else model
    return hf_lohan.Trainer(model, arguments(folder, **more), train_dataset=rows, offload="auto")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the free device memory that `offload="auto"` reads."""

    def set_bytes(number: int) -> None:
        device = SimpleNamespace(
            torch_device=torch.device("cpu"), memory_is_host=True, total_memory_bytes=lambda: number
        )
        monkeypatch.setattr(in_memory, "device_for", lambda _: device)

    return set_bytes


def losses(trained: Any) -> list[float]:
    return [row["loss"] for row in trained.state.log_history if "loss" in row]


def test_a_model_that_changes_its_weights_trains_in_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("llama")
    embedding = model.get_input_embeddings()
    embedding.max_norm = 0.1
    ours = trainer(tmp_path, model)
    assert "because it cannot be offloaded: model.embed_tokens.weight is changed" in capsys.readouterr().out
    ours.train()
    assert ours.offload_engine is None and embedding.weight.norm(dim=1).min() < 0.11


@pytest.mark.parametrize("source", ["model", "path"])
def test_a_run_that_fits_uses_the_stock_trainer(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    stock = transformers.Trainer(
        tiny_model("llama"), arguments(tmp_path / "stock"), train_dataset=Dataset.from_list(ROWS)
    )
    stock.train()
    capsys.readouterr()
    ours = trainer(tmp_path / "ours", str(tmp_path / "model") if source == "path" else None)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("offload='auto'")]
    assert line.startswith("offload='auto' trains this run in memory, with the stock Trainer: it needs ")
    assert line.endswith(f" for 2 x {NUM_TOKENS} tokens")
    ours.train()
    assert ours.offload_engine is None and not (tmp_path / "ours" / "_lohan").exists()
    assert losses(ours) == losses(stock)
    for name, weight in stock.model.named_parameters():
        assert torch.equal(ours.model.get_parameter(name), weight)
    with pytest.raises(ValueError, match=r"needs a store, and offload='auto' trains this run in memory"):
        ours.train(resume_from_checkpoint="last_step")


def test_a_run_that_does_not_fit_is_offloaded(free: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compare the smallest memory that fits with one byte less."""
    model = tiny_model("llama")
    weights = sum(p.nbytes for p in model.parameters())
    found = in_memory.stock_fit(
        model,
        SimpleNamespace(torch_device=torch.device("cpu"), memory_is_host=True),  # type: ignore[arg-type]
        in_memory.StepShape(2, NUM_TOKENS),
        memory_bytes=0,
        bytes_per_param=16,
        recomputes=False,
    )
    assert found.needed_bytes > 4 * weights, "and the activations"
    free(found.needed_bytes - weights)
    assert trainer(tmp_path / "a", model)._offload_config is None
    free(found.needed_bytes - weights - 1)
    assert trainer(tmp_path / "b", tiny_model("llama"))._offload_config == hf_lohan.OffloadConfig()
    line = capsys.readouterr().out.splitlines()[-1]
    need = format_bytes(found.needed_bytes)
    assert line.startswith(f"offload='auto' offloads this run: it needs {need} of the free RAM's {need} for 2 x")
    free(found.needed_bytes - weights)
    assert trainer(tmp_path / "c", bf16=True)._offload_config is not None, "autocast has copies of the weights"
    assert trainer(tmp_path / "d", optim="adamw_torch")._offload_config is not None, "it is not fused"


def test_a_run_that_does_not_fit_trains_as_the_stock_trainer(free: Any, tmp_path: Path) -> None:
    stock = transformers.Trainer(
        tiny_model("llama"), arguments(tmp_path / "stock"), train_dataset=Dataset.from_list(ROWS)
    )
    stock.train()
    free(1 << 20)
    ours = trainer(tmp_path / "ours")
    ours.train()
    assert losses(ours) == losses(stock)
    assert_stored(ours.model, stock.model)
    ours.offload_engine.close()
    assert (tmp_path / "ours" / "_lohan" / "store").is_dir()


def test_adapters_need_less_memory(free: Any, tmp_path: Path) -> None:
    from trl import SFTConfig

    from hf_lohan.trl import SFTTrainer

    tiny_model("llama", num_layers=2).save_pretrained(tmp_path / "model")
    args = SFTConfig(
        str(tmp_path), use_cpu=True, report_to=[], bf16=False, max_length=16, per_device_train_batch_size=1
    )
    settings: dict[str, Any] = {
        "model": str(tmp_path / "model"),
        "args": args,
        "train_dataset": Dataset.from_list(ROWS),
    }
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    free(1)
    whole, small = (
        in_memory.choose_place(SFTTrainer, {**settings, **more}, {}, makes_models=True).sentence
        for more in ({}, {"peft_config": lora})
    )
    assert whole.endswith("for 1 x 16 tokens") and small.endswith("for 1 x 16 tokens")
    assert whole != small
    free(1 << 40)
    assert in_memory.choose_place(SFTTrainer, settings, {}, makes_models=True).in_memory


def test_images_are_offloaded_and_text_for_a_model_with_a_tower_is_not(free: Any, tmp_path: Path) -> None:
    settings = {"model": model_with_a_tower(), "args": arguments(tmp_path)}
    free(1 << 40)
    images = [{**row, "pixel_values": [[0.0]]} for row in ROWS]
    text, with_images = (
        in_memory.choose_place(hf_lohan.Trainer, {**settings, "train_dataset": rows}, {}, makes_models=False)
        for rows in (ROWS, images)
    )
    assert text.in_memory
    assert not with_images.in_memory and "inputs for 2 further layers of LlavaForCond" in with_images.sentence


def test_some_runs_are_offloaded_with_any_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def sentence(folder: str, model: Any = None, rows: Any = None) -> str:
        settings = {"model": tiny_model("llama") if model is None else model, "train_dataset": rows or ROWS}
        settings["args"] = arguments(tmp_path / folder)
        choice = in_memory.choose_place(hf_lohan.Trainer, settings, {}, makes_models=False)
        assert not choice.in_memory
        return choice.sentence

    assert "has no float32 masters for weights in bfloat16" in sentence("a", tiny_model("llama").bfloat16())
    (tmp_path / "b" / "_lohan" / "store").mkdir(parents=True)
    assert "has the store of a run that was offloaded" in sentence("b")
    assert "cannot be planned: neither the data nor the model" in sentence("c", torch.nn.Linear(2, 2), [{"text": "a"}])
    quantized = fp8_folder(tmp_path / "quantized", tiny_model("llama"))
    assert "cannot be planned: the checkpoint is quantized" in sentence("e", str(quantized))
    many = arguments(tmp_path / "f")
    many._n_gpu = 2
    settings = {"model": tiny_model("llama"), "train_dataset": ROWS, "args": many}
    choice = in_memory.choose_place(hf_lohan.Trainer, settings, {}, makes_models=False)
    assert not choice.in_memory and "the stock Trainer would use 2 GPUs at once" in choice.sentence
    made_later = hf_lohan.Trainer(
        None, arguments(tmp_path / "d"), model_init=lambda: tiny_model("llama"), offload="auto"
    )
    assert made_later._offload_config is not None and "made later, by model_init" in capsys.readouterr().out


def test_the_longest_row_is_that_of_the_padded_batch(free: Any, tmp_path: Path) -> None:
    """Rows of 5 tokens with labels of 9, or with one number as the label."""
    free(1 << 40)
    pairs = [{"input_ids": [1] * 5, "labels": [1] * 9}, {"input_ids": [1] * 4, "labels": [1]}]
    classes = [{"input_ids": [1] * 5, "labels": 1}]
    tokenizer = tiny_tokenizer()
    wide = DataCollatorForSeq2Seq(tokenizer, padding="max_length", max_length=21)
    multiple = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)
    both = DataCollatorWithPadding(tokenizer, padding="max_length", max_length=21, pad_to_multiple_of=8)
    by_evaluation = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 3}
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (pairs, None, {}, "2 x 9"),
        (classes, None, {}, "2 x 5"),
        (pairs, wide, {}, "2 x 21"),
        (pairs, multiple, {}, "2 x 16"),
        (pairs, both, {}, "2 x 24"),
        (pairs, None, by_evaluation, "3 x 9"),
        (pairs, None, by_evaluation | {"per_device_eval_batch_size": 1}, "2 x 9"),
    ]
    for rows, collator, more, expected in cases:
        for stored in (rows, Dataset.from_list(rows)):
            settings = {"model": tiny_model("llama"), "train_dataset": stored, "data_collator": collator}
            settings["args"] = arguments(tmp_path, **more)
            choice = in_memory.choose_place(hf_lohan.Trainer, settings, {}, makes_models=False)
            assert choice.in_memory and choice.sentence.endswith(f" for {expected} tokens"), (expected, choice)
    evaluated = {
        **settings,
        "args": arguments(tmp_path, **by_evaluation),
        "eval_dataset": {"long": [{"input_ids": [1] * 12}]},
    }
    choice = in_memory.choose_place(hf_lohan.Trainer, evaluated, {}, makes_models=False)
    assert choice.sentence.endswith(" for 3 x 12 tokens")


def test_trainers_with_several_forwards_are_refused(tmp_path: Path) -> None:
    from hf_lohan.trl import RewardTrainer

    with pytest.raises(ConfigError, match="does not know the memory of RewardTrainer"):
        RewardTrainer(tiny_model("llama"), train_dataset=Dataset.from_list(ROWS), offload="auto")


def test_adapters_of_a_path_are_offloaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "checkpoint")
    adapters = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    trained = hf_lohan.Trainer(
        str(tmp_path / "checkpoint"), arguments(tmp_path / "run"), peft_config=adapters, offload="auto"
    )
    assert trained.offload_engine is not None and "because peft_config is for a model that is streamed" in caplog.text
    trained.offload_engine.close()


def test_arguments_of_a_trainer_below_stay_its_own(tmp_path: Path) -> None:
    class Adapting(transformers.Trainer):
        def __init__(self, model: Any, args: TrainingArguments, peft_config: Any = None, **more: Any) -> None:
            super().__init__(model, args, **more)
            self.peft_config = peft_config

    class Mine(hf_lohan.OffloadTrainerMixin, Adapting):
        pass

    assert Mine(tiny_model("llama"), arguments(tmp_path), peft_config="mine").peft_config == "mine"


def test_what_trainer_sets_itself_is_no_loading_argument(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model_init_kwargs has 'bf16', which Trainer sets itself"):
        hf_lohan.Trainer("checkpoint", arguments(tmp_path), model_init_kwargs={"bf16": True}, offload="lohan")
    with pytest.raises(ValueError, match="TrainingArguments were passed as the first argument"):
        hf_lohan.Trainer(arguments(tmp_path), offload="auto")
    with pytest.raises(ValueError, match="was given no model to offload; pass model="):
        hf_lohan.Trainer(args=arguments(tmp_path), offload="lohan")
