"""`save_pretrained` writes the same files from the store as from RAM."""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from equal_tensors import assert_same_tensors, tensors_in
from stored_weights import assert_stored
from transformers import AutoModelForCausalLM

from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.models import saving
from hf_lohan.huggingface.models.saving import StoredModel, StoredWeights, save_from_store
from hf_lohan.testing.models import FAMILIES, tiny_model

Offload = Callable[..., OffloadEngine]


@pytest.mark.parametrize("shard_size", ["1GB", "100KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_tensors_equal_those_from_memory(family: str, shard_size: str, offload: Offload, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_shard_size": shard_size}
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "stock", **options)
    offload(model)
    model.save_pretrained(tmp_path / "ours", **options)
    stock, ours = tensors_in(tmp_path / "stock"), tensors_in(tmp_path / "ours")
    assert_same_tensors(ours, stock)
    assert {name: tensor.dtype for name, tensor in ours.items()} == {name: t.dtype for name, t in stock.items()}
    num_shards = len(list((tmp_path / "ours").glob("*.safetensors")))
    assert num_shards > 3 if shard_size == "100KB" else num_shards == 1
    for name in ("config.json", "generation_config.json"):
        files = [json.loads((tmp_path / folder / name).read_text()) for folder in ("stock", "ours")]
        assert files[0] == files[1]


@pytest.mark.parametrize("save_dtype", ["auto", "float32"])
def test_weights_loaded_in_float32_are_saved_as_masters(
    save_dtype: str, offload: Offload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock with autocast saves float32, too. Experts are saved apart, so masters are also read by rows. Large weights
    are read in pieces."""
    monkeypatch.setattr(saving, "_MASTERS_NUMEL", 1000)
    model = tiny_model("mixtral")
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    offload(model, dtype=torch.bfloat16, save_dtype=save_dtype)
    model.save_pretrained(tmp_path)
    assert model.config.dtype == torch.bfloat16
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, expected[name]), name


def test_weights_loaded_in_bfloat16_are_saved_in_bfloat16_or_as_masters(offload: Offload, tmp_path: Path) -> None:
    for save_dtype, dtype in (("auto", torch.bfloat16), ("float32", torch.float32)):
        model = tiny_model("llama").to(torch.bfloat16)
        offload(model, save_dtype=save_dtype)
        model.save_pretrained(tmp_path / save_dtype)
        assert {tensor.dtype for tensor in tensors_in(tmp_path / save_dtype).values()} == {dtype}


def test_rounding_float32_weights_in_checkpoints_is_refused(offload: Offload) -> None:
    with pytest.raises(ValueError, match=r"save_dtype: .* would also round .* lohan export RUN OUT --dtype bfloat16"):
        offload(tiny_model("llama"), save_dtype="bfloat16")


def test_bfloat16_weights_are_saved_without_masters_if_set(offload: Offload, tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    offload(model, dtype=torch.bfloat16, save_dtype="bfloat16")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert_stored(model, loaded)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
@pytest.mark.parametrize("given", ["all", "some", "none"])
def test_a_given_state_dict_is_saved(given: str, family: str, offload: Offload, tmp_path: Path) -> None:
    """A caller's averages, placeholders of the model, and a mixture. Experts are one tensor each in a checkpoint."""
    model = tiny_model(family)
    weights = copy.deepcopy(model).state_dict()
    averages = {
        name: tensor * 0.5 if given == "all" or (given == "some" and "layers.1" not in name) else tensor
        for name, tensor in weights.items()
    }
    model.save_pretrained(tmp_path / "stock", state_dict=dict(averages))
    offload(model)
    placeholders = model.state_dict()
    is_placeholder = {name: averages[name] is weights[name] for name in weights}
    mixed = {name: placeholders[name] if is_placeholder[name] else averages[name] for name in averages}
    model.save_pretrained(tmp_path / "ours", state_dict=mixed, max_shard_size="100KB")
    stock, ours = tensors_in(tmp_path / "stock"), tensors_in(tmp_path / "ours")
    assert_same_tensors(ours, stock)
    configs = [json.loads((tmp_path / whose / "config.json").read_text()) for whose in ("ours", "stock")]
    assert configs[0] == configs[1]


OPTIONS: dict[str, dict[str, Any]] = {
    "variant": {"variant": "new"},
    "max_shard_size": {"max_shard_size": 100_000, "variant": "new"},
    "is_main_process": {"is_main_process": False},
    "save_original_format": {"save_original_format": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_arguments_of_save_pretrained_mean_the_same(
    options: dict[str, Any], offload: Offload, tmp_path: Path
) -> None:
    model = tiny_model("llama" if "max_shard_size" in options else "mixtral")  # experts share memory in stock
    model.save_pretrained(tmp_path / "stock", **options)
    offload(model)
    model.save_pretrained(tmp_path / "ours", **options)
    names = [sorted(file.name for file in (tmp_path / whose).iterdir()) for whose in ("stock", "ours")]
    assert names[0] == names[1]
    stock, ours = tensors_in(tmp_path / "stock"), tensors_in(tmp_path / "ours")
    assert_same_tensors(ours, stock)


def test_arguments_of_save_pretrained_may_be_given_by_position(offload: Offload, tmp_path: Path) -> None:
    model = tiny_model("llama")
    offload(model)
    model.save_pretrained(tmp_path / "no", False)
    model.save_pretrained(tmp_path, True, {"lm_head.weight": torch.ones(2)})
    assert not list((tmp_path / "no").glob("*")) and tensors_in(tmp_path).keys() == {"lm_head.weight"}
    with pytest.raises(TypeError, match="by position, not 20"):
        model.save_pretrained(tmp_path, *[None] * 20)


def test_what_is_pushed_is_what_is_saved(offload: Offload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pushed = tiny_model("llama"), []
    expected = model.lm_head.weight.detach().clone()
    monkeypatch.setattr("transformers.modeling_utils.hf_api", MagicMock())
    monkeypatch.setattr("transformers.modeling_utils.create_and_tag_model_card", MagicMock())

    def upload(_: Any, folder: Any, *args: Any, **kwargs: Any) -> None:
        pushed.append((tensors_in(Path(folder))["lm_head.weight"], kwargs.get("commit_message")))

    monkeypatch.setattr(type(model), "_upload_modified_files", upload)
    offload(model)
    model.save_pretrained(tmp_path, push_to_hub=True, repo_id="me/mine", commit_message="the first")
    ((weight, message),) = pushed
    assert torch.equal(weight, expected) and message == "the first"


def test_distributed_checkpoint_is_refused_as_by_transformers(offload: Offload, tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="distributed_checkpoint"):
        model.save_pretrained(tmp_path / "stock", distributed_checkpoint=True)
    offload(model)
    with pytest.raises(ValueError, match=r"distributed_checkpoint=True\) is not supported .* leave it out"):
        model.save_pretrained(tmp_path / "ours", distributed_checkpoint=True)
    assert not (tmp_path / "ours").exists()


def test_a_placeholder_with_another_name_is_saved_under_it(offload: Offload, tmp_path: Path) -> None:
    model = tiny_model("llama")
    expected = model.lm_head.weight.detach().clone()
    offload(model)
    for tensor in (model.lm_head.weight, model.lm_head.weight.data):
        model.save_pretrained(tmp_path, state_dict={"model.embed_tokens.weight": tensor})
        assert torch.equal(tensors_in(tmp_path)["model.embed_tokens.weight"], expected)
    with pytest.raises(RuntimeError, match="in the store"):
        model.save_pretrained(tmp_path, state_dict={"model.embed_tokens.weight": model.lm_head.weight.T})


def test_placeholders_stay_alive_while_stock_saves(offload: Offload, tmp_path: Path) -> None:
    """Stock removes tied weights from the dict. A new tensor could get the `id` of a freed one."""
    model = tiny_model("mixtral", tie_word_embeddings=True)
    stored_model = StoredModel.from_engine(offload(model))

    def save(of: Any, folder: Path, *, state_dict: dict[str, torch.Tensor]) -> None:
        removed = [weakref.ref(state_dict.pop(name)) for name in [*state_dict]]
        assert len(removed) > 10 and all(form() is not None for form in removed)

    save_from_store(stored_model, save, tmp_path)


def test_saving_does_not_change_the_model(offload: Offload, tmp_path: Path) -> None:
    model = tiny_model("llama")
    offload(model)
    before = set(vars(model))
    model.save_pretrained(tmp_path / "first")
    assert set(vars(model)) == before
    with pytest.raises(TypeError):
        model.save_pretrained(None)
    assert set(vars(model)) == before
    model.save_pretrained(tmp_path / "second")
    assert tensors_in(tmp_path / "second").keys() == tensors_in(tmp_path / "first").keys()


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_aliases_of_tied_weights_are_found(family: str, offload: Offload) -> None:
    model = tiny_model(family)
    stock = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = StoredWeights(StoredModel.from_engine(offload(model)))
    assert "lm_head.weight" in weights
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert set(weights) == parameters and len(weights) == len(parameters)
    for name in parameters:
        assert torch.equal(weights[name], stock[name]), name
