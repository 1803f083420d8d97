"""A streamed load gives the store the weights that a normal load gives RAM."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from equal_tensors import assert_same_tensors
from safetensors.torch import load_file, save_file
from short_runs import short_arguments
from stored_weights import assert_stored, stored
from transformers import AutoModelForCausalLM

import hf_lohan
from hf_lohan import engine_of
from hf_lohan.compat.torch_private import without_torch_function
from hf_lohan.costs import BudgetError
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.models.reloading import reload_weights
from hf_lohan.testing.models import FAMILIES, tiny_batch, tiny_config, tiny_model
from hf_lohan.wording import format_bytes

Load = Callable[..., Any]
SHARD_SIZE = "150KB"


def checkpoint_of(family: str, folder: Path, **options: Any) -> Path:
    model = tiny_model(family, **options)
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_streamed_load_equals_a_normal_one(family: str, load_streamed: Load, tmp_path: Path) -> None:
    path = checkpoint_of(family, tmp_path / "checkpoint")
    model = load_streamed(path)
    stock = AutoModelForCausalLM.from_pretrained(path)
    assert_stored(model, stock)
    is_tied = [of.get_input_embeddings().weight is of.get_output_embeddings().weight for of in (model, stock)]
    assert is_tied[0] == is_tied[1] == (family in ("opt", "gpt2"))
    with without_torch_function():
        assert all(p.isnan().all() for p in model.parameters())  # the weights are not in RAM
        assert model.get_input_embeddings().weight.untyped_storage().nbytes() <= 4
    with torch.no_grad():
        assert torch.equal(model.eval()(**tiny_batch()).logits, stock.eval()(**tiny_batch()).logits)


@pytest.mark.parametrize("family", ["llama", "mixtral", "opt"])
def test_bfloat16_from_float32_keeps_exact_masters(family: str, load_streamed: Load, tmp_path: Path) -> None:
    path = checkpoint_of(family, tmp_path / "checkpoint")
    model = load_streamed(path, bf16=True)
    engine = engine_of(model)
    assert model.dtype == torch.bfloat16
    access = engine.parameters
    for name, weight in AutoModelForCausalLM.from_pretrained(path).named_parameters():
        assert torch.equal(access.read_parameter(name), weight.bfloat16()), name
        assert torch.equal(access.read_masters(name, 0, weight.numel()), weight.flatten()), name


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_the_dtype_is_that_of_the_checkpoint_unless_set(
    dtype: str, expected: torch.dtype, load_streamed: Load, tmp_path: Path
) -> None:
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "checkpoint")
    model = load_streamed(tmp_path / "checkpoint", dtype=dtype)
    assert_stored(model, AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=expected))


def test_weights_missing_in_the_checkpoint_are_initialized(load_streamed: Load, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    tiny_model("llama").save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    del weights["lm_head.weight"], weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    found = stored(load_streamed(path))
    for name, weight in found.items():
        assert weight.isfinite().all(), name
        if name in weights:
            assert torch.equal(weight, weights[name])
    assert found["lm_head.weight"].std() > 0.001


@pytest.mark.parametrize("name", ["nowhere", "a_file"])
def test_a_path_without_a_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "a_file").write_text("")
    with pytest.raises(ValueError, match=f"{name}' is not a checkpoint folder"):
        hf_lohan.from_pretrained(tmp_path / name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float33"}, "'float33' is not a torch dtype"),
        ({"dtype": "float16"}, r"torch\.float16, which cannot be trained under offload"),
        ({"hidden_size": "wide"}, r"config of '.*checkpoint' cannot be changed by hidden_size: .*LlamaConfig"),
    ],
)
def test_wrong_arguments_are_refused(
    options: dict[str, Any], message: str, load_streamed: Load, tmp_path: Path
) -> None:
    tiny_model("llama").half().save_pretrained(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=message):
        load_streamed(tmp_path / "checkpoint", **options)


def cut(path: Path) -> None:
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-1000])


def point_to_lfs(path: Path) -> None:
    """Write what `git clone` without git-lfs leaves."""
    (path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def remove_a_shard(path: Path) -> None:
    shutil.rmtree(path)
    checkpoint_of("llama", path)
    min(path.glob("model-*.safetensors")).unlink()


@pytest.mark.parametrize("damage", [cut, point_to_lfs, remove_a_shard])
def test_a_damaged_file_is_named_before_weights_are_read(
    damage: Callable[[Path], None], load_streamed: Load, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint"
    tiny_model("llama").save_pretrained(path)
    damage(path)
    with pytest.raises(ValueError, match=r"checkpoint/model.*\.safetensors' is missing or damaged \(.*\); download"):
        load_streamed(path)
    assert not list(tmp_path.rglob("manifest*"))


def test_a_failed_load_releases_the_store(load_streamed: Load, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    tiny_model("llama").save_pretrained(path)
    whole = (path / "model.safetensors").read_bytes()
    save_file({"another": torch.ones(4)}, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="has no weight of LlamaForCausalLM, only others such as another"):
        load_streamed(path)
    (path / "model.safetensors").write_bytes(whole)
    with pytest.raises(BudgetError):
        load_streamed(path, settings={"gpu_memory": "64KiB"})
    assert_stored(load_streamed(path), AutoModelForCausalLM.from_pretrained(path))


@pytest.mark.parametrize("family", FAMILIES)
def test_reloading_replaces_all_weights(family: str, offload: Callable[..., OffloadEngine], tmp_path: Path) -> None:
    other = checkpoint_of(family, tmp_path / "other", seed=7)
    model = tiny_model(family)
    engine = offload(model)
    with torch.no_grad():
        model.eval()(**tiny_batch())  # now the slots have old weights
    reload_weights(engine, model, other)
    stock = AutoModelForCausalLM.from_pretrained(other).eval()
    assert_stored(model, stock)
    with torch.no_grad():
        assert torch.equal(model(**tiny_batch()).logits, stock(**tiny_batch()).logits)


def test_reloading_from_another_model_is_refused(offload: Callable[..., OffloadEngine], tmp_path: Path) -> None:
    fewer_layers = tmp_path / "fewer"
    tiny_model("llama", num_layers=2).save_pretrained(fewer_layers)
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=r"fewer' has no weights for \d+ parameters .*such as model\.layers\.2"):
        reload_weights(offload(model), model, fewer_layers)
    assert tiny_config("llama").num_hidden_layers == 3


def tiny_qwen35() -> Any:
    """A vision-language model with a text model of another class."""
    text = {
        "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "full_attention_interval": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    }  # fmt: skip
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32}
    config = transformers.Qwen3_5Config(text_config=text, vision_config={**vision, "patch_size": 8})
    torch.manual_seed(0)
    return transformers.Qwen3_5ForConditionalGeneration(config)


def test_a_vision_language_model_trains_on_text_and_keeps_all_tensors(tmp_path: Path) -> None:
    tiny_qwen35().save_pretrained(tmp_path / "checkpoint")
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 300, (8, 16))]
    saved, losses = {}, {}
    for name, options in {
        "in memory": {"model": transformers.Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path / "checkpoint")},
        "streamed": {"model": tmp_path / "checkpoint", "offload": {"gpu_memory": "8MiB", "cpu_memory": "16MiB"}},
    }.items():
        args = short_arguments(tmp_path / name, max_steps=3, weight_decay=0.1)
        trainer = hf_lohan.Trainer(args=args, train_dataset=rows, **options)
        trainer.train()
        trainer.save_model(str(tmp_path / name))
        saved[name] = load_file(tmp_path / name / "model.safetensors")
        losses[name] = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    before = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert losses["streamed"] == losses["in memory"]
    assert saved["streamed"].keys() == before.keys()
    changed = {name for name, weight in before.items() if not torch.equal(weight, saved["streamed"][name])}
    assert changed and not any("visual" in name for name in changed)
    assert_same_tensors(saved["streamed"], saved["in memory"])


def test_tensors_without_a_weight_are_named(
    load_streamed: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_qwen35()
    model.save_pretrained(tmp_path / "checkpoint")
    loaded = load_streamed(tmp_path / "checkpoint", model_class=AutoModelForCausalLM)
    assert type(loaded) is transformers.Qwen3_5ForCausalLM
    lost = {name: p for name, p in model.named_parameters() if ".visual." in name}
    size = format_bytes(sum(p.nbytes for p in lost.values()))
    expected = rf"{len(lost)} tensors of .*checkpoint \({size}\) .* not weights of Qwen3_5ForCausalLM .* {min(lost)};"
    assert [bool(re.search(expected, message)) for message in caplog.messages if "tensors of" in message] == [True]


def test_computed_tensors_are_not_reported_as_missing(
    load_streamed: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Older checkpoints contain such tensors."""
    path = tmp_path / "checkpoint"
    tiny_model("llama").save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    load_streamed(path)
    assert not [message for message in caplog.messages if "tensor" in message]


def test_a_class_missing_in_transformers_is_named(
    load_streamed: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "checkpoint"
    model = tiny_model("llama")
    model.save_pretrained(path)
    (path / "config.json").write_text((path / "config.json").read_text().replace("LlamaForCausalLM", "MyLlama"))
    assert type(load_streamed(path)) is type(model)
    assert "names the class MyLlama, which transformers" in caplog.text


@pytest.mark.parametrize("bf16", [False, True])
def test_float16_is_loaded_exactly(bf16: bool, load_streamed: Load, tmp_path: Path) -> None:
    half = tiny_model("llama").half()
    half.save_pretrained(tmp_path / "checkpoint")
    model = load_streamed(tmp_path / "checkpoint", bf16=bf16)
    assert model.dtype == (torch.bfloat16 if bf16 else torch.float32)
    access = engine_of(model).parameters  # type: ignore[union-attr]
    for name, weight in half.named_parameters():
        assert torch.equal(access.read_masters(name, 0, weight.numel()), weight.flatten().float()), name
    model.save_pretrained(tmp_path / "saved")
    assert {w.dtype for w in load_file(tmp_path / "saved" / "model.safetensors").values()} == {model.dtype}


def test_a_checkpoint_with_the_head_of_another_task_keeps_it(load_streamed: Load, tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, num_labels=3
    )
    stock = transformers.BertForSequenceClassification(config)
    stock.save_pretrained(tmp_path / "checkpoint")
    model = load_streamed(tmp_path / "checkpoint")
    assert type(model) is type(stock)
    assert_stored(model, stock)


def test_the_former_name_of_dtype_is_taken(tmp_path: Path) -> None:
    path = checkpoint_of("llama", tmp_path / "checkpoint")
    model = hf_lohan.from_pretrained(path, offload={"ssd": str(tmp_path / "store")}, torch_dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    engine_of(model).close()
    with pytest.raises(ValueError, match="torch_dtype='bfloat16' are both given and differ"):
        hf_lohan.from_pretrained(path, offload={"ssd": str(tmp_path / "b")}, dtype="float32", torch_dtype="bfloat16")


OVERRIDES: dict[str, dict[str, Any]] = {
    "dropout": {"attention_dropout": 0.1, "use_cache": True, "pad_token_id": 3},
    "positions": {
        "max_position_embeddings": 64,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
    },
    "attention": {"attn_implementation": "eager", "rms_norm_eps": 0.1},
    "labels": {"num_labels": 5, "problem_type": "multi_label_classification"},
    "names": {"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}},
    "sizes": {"num_hidden_layers": 2, "hidden_act": "relu"},
}
CLASSIFIES = {"labels", "names"}


@pytest.mark.parametrize("case", OVERRIDES)
def test_entries_of_the_config_are_overridden_as_with_stock(case: str, load_streamed: Load, tmp_path: Path) -> None:
    path, config = tmp_path / "checkpoint", tiny_config("llama", pad_token_id=0)
    torch.manual_seed(0)
    kind: Any = transformers.LlamaForSequenceClassification if case in CLASSIFIES else transformers.LlamaForCausalLM
    kind(config).save_pretrained(path)
    overrides = {**OVERRIDES[case], "ignore_mismatched_sizes": True}
    torch.manual_seed(1)
    model = load_streamed(path, **overrides)
    torch.manual_seed(1)
    stock = kind.from_pretrained(path, **overrides)
    assert model.config.to_dict() == stock.config.to_dict()
    assert model.config._attn_implementation == stock.config._attn_implementation
    assert_stored(model, stock)
    inputs = {"input_ids": tiny_batch()["input_ids"]}
    with torch.no_grad():
        assert torch.equal(model.eval()(**inputs).logits, stock.eval()(**inputs).logits)


def tied_checkpoint(folder: Path, head: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """Save a model that ties its head, with a head in the file too."""
    config = tiny_config("llama", tie_word_embeddings=True)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = head(tensors["model.embed_tokens.weight"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


HEADS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "equal": torch.Tensor.clone,
    "in another dtype": lambda weight: weight.double(),
    "different": lambda weight: weight + 0.01,
}


@pytest.mark.parametrize("head", HEADS)
def test_a_tied_model_whose_file_has_the_head_too(head: str, load_streamed: Load, tmp_path: Path) -> None:
    path = tied_checkpoint(tmp_path / "checkpoint", HEADS[head])
    model, stock = load_streamed(path), AutoModelForCausalLM.from_pretrained(path)
    is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert is_tied == (head != "different") == (stock.lm_head.weight is stock.model.embed_tokens.weight)
    assert_stored(model, stock)
    with torch.no_grad():
        assert torch.equal(model.eval()(**tiny_batch()).logits, stock.eval()(**tiny_batch()).logits)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same_tensors(dict(again.named_parameters()), dict(stock.named_parameters()))


def test_a_tied_model_whose_file_has_the_head_alone(load_streamed: Load, tmp_path: Path) -> None:
    path = tied_checkpoint(tmp_path / "checkpoint", torch.Tensor.clone)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert_stored(load_streamed(path), AutoModelForCausalLM.from_pretrained(path))
