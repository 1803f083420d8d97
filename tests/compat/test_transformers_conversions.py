"""The parts of transformers' loading and saving that row-wise conversion relies on."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import core_model_loading, modeling_utils
from transformers.core_model_loading import Chunk, Concatenate, Interleave, MergeModulelist, SplitModulelist, Transpose

from hf_lohan.compat import transformers_conversions as conversions
from hf_lohan.model import kept_in_float32
from hf_lohan.testing.models import tiny_model


def test_reading_ahead_can_be_disabled() -> None:
    source = inspect.getsource(core_model_loading.convert_and_load_state_dict_in_model)
    assert "HF_DEACTIVATE_ASYNC_LOAD" in source, "a streamed load would have the whole checkpoint in RAM"
    assert "spawn_materialize(" in source, "another function reads checkpoints, so no tensor comes in rows"
    with conversions.loaded_in_rows(lambda *_: False, 1):
        assert os.environ["HF_DEACTIVATE_ASYNC_LOAD"] == "1"
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ


def test_weights_are_loaded_in_rows(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path)
    rows: dict[str, list[Tensor]] = {}

    def take(name: str, shape: torch.Size, first: int, some: Tensor) -> bool:
        assert shape == model.get_parameter(name).shape
        assert first == sum(part.shape[0] for part in rows.get(name, []))
        rows.setdefault(name, []).append(some.clone())
        return True

    with conversions.loaded_in_rows(take, 3000):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    large = {name for name, p in model.named_parameters() if p.nbytes > 3000}
    assert rows.keys() == large, "another function runs transformers' conversions, so weights are loaded whole"
    for name, parameter in loaded.named_parameters():
        assert (parameter.device.type == "meta") == (name in large)
        assert torch.equal(torch.cat(rows[name]) if name in large else parameter, model.get_parameter(name)), name
    assert len(rows["model.layers.0.mlp.experts.gate_up_proj"]) == 4


def test_refused_weights_are_loaded_whole(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path)
    with conversions.loaded_in_rows(lambda *_: False, 1):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


def test_our_function_writes_the_files(tmp_path: Path) -> None:
    model: Any = tiny_model("mixtral")
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    forms = {name: torch.empty_like(tensor, device="meta") for name, tensor in weights.items()}
    values = {id(form): weights[name] for name, form in forms.items()}

    def value_of(tensor: Tensor) -> Tensor:
        if id(tensor) in values:
            return values[id(tensor)]
        saved = made[id(tensor)]
        assert saved.conversion.num_rows == 4 and saved.conversion.is_split, "experts are not split row by row"
        kind, row = divmod(saved.index, 4)
        return saved.conversion.results(lambda form: values[id(form)][row : row + 1])[kind]

    def write(tensors: Mapping[str, Tensor], path: str, metadata: dict[str, str]) -> None:
        save_file({name: value_of(tensor).clone() for name, tensor in tensors.items()}, path, metadata=metadata)

    with conversions.saved_by(model, write) as made:
        model.save_pretrained(tmp_path, state_dict=forms, max_shard_size="100KB")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, weights[name]), "save_pretrained writes files or splits experts differently"
    assert made, "another function splits fused experts, so the weights of a file's tensors are unknown"


def test_patches_are_removed(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    before = [core_model_loading.spawn_materialize, modeling_utils.safe_save_file]
    before += [core_model_loading.WeightConverter.convert, core_model_loading.WeightRenaming.convert]
    with (
        pytest.raises(OSError),
        conversions.loaded_in_rows(lambda *_: False, 1),
        conversions.saved_by(model, lambda *_: None),
    ):
        raise OSError
    after = [core_model_loading.spawn_materialize, modeling_utils.safe_save_file]
    assert before == [*after, core_model_loading.WeightConverter.convert, core_model_loading.WeightRenaming.convert]


@pytest.mark.parametrize(
    "operation", [Concatenate(dim=1), Chunk(dim=1), Interleave(dim=1), Transpose(1, 2), Interleave(dim=2, inverse=True)]
)
def test_row_wise_operations_can_run_on_rows(operation: Any) -> None:
    assert conversions._leaves_rows_alone(operation)
    whole = torch.randn(6, 8, 4)
    targets = ["a", "b"] if isinstance(operation, Chunk) else ["a"]

    def run(part: slice) -> dict[str, Tensor]:
        sources = {"x": whole[part], "y": whole[part] + 1} if isinstance(operation, Concatenate) else {"x": whole[part]}
        found: dict[str, Tensor] = operation.convert(
            dict(sources), source_patterns=list(sources), target_patterns=targets, full_layer_name="x", model=None
        )
        return found

    some, all_rows = run(slice(2, 4)), run(slice(0, 6))
    for name, rows in some.items():
        assert torch.equal(rows, all_rows[name][2:4])


@pytest.mark.parametrize(
    "operation",
    [Concatenate(dim=0), Chunk(dim=0), Interleave(dim=0), Transpose(0, 1), Transpose(1, 2, check_dims=True)],
)
def test_other_operations_are_not_row_wise(operation: Any) -> None:
    assert not conversions._leaves_rows_alone(operation)
    assert not conversions._merges_rows(MergeModulelist(dim=1))
    assert not conversions._splits_rows(SplitModulelist(dim=1))


def test_modules_kept_in_float32_are_known() -> None:
    config = transformers.Ernie4_5_MoeConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        moe_num_experts=4, moe_intermediate_size=32, vocab_size=256, moe_layer_start_index=1,
    )  # fmt: skip
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    plan = model._get_dtype_plan(torch.bfloat16)
    assert plan and set(plan.values()) == {torch.float32}, "_keep_in_fp32_modules_strict moved"
    search, _, _ = core_model_loading.build_glob_alternation(list(plan))
    expected = {name for name, _ in model.named_parameters() if search.search(name)}
    assert expected and kept_in_float32(model) == expected
