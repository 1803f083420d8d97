"""The private API of transformers that we use. A failure names what an upgrade has changed."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from short_runs import short_arguments
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from hf_lohan import OffloadTrainerMixin
from hf_lohan.compat import transformers_private as private
from hf_lohan.huggingface.offloaded_model import enable_checkpointing
from hf_lohan.huggingface.trainer.trainer import TRACKERS
from hf_lohan.testing.models import tiny_batch, tiny_config, tiny_model, tiny_rows

OVERRIDDEN = {
    "_finalize_training": "def _inner_training_loop",
    "_get_output_dir": "def _save_checkpoint",
    "_load_best_model": "def ",
    "_load_from_checkpoint": "def ",
    "_load_optimizer_and_scheduler": "def ",
    "_load_rng_state": "def _run_epoch",
    "_maybe_log_save_evaluate": "def _run_epoch",
    "_move_model_to_device": "def __init__",
    "_prepare_for_training": "def ",
    "_push_from_checkpoint": "def _save_checkpoint",
    "_run_epoch": "def ",
    "_save": "def save_model",
    "_save_checkpoint": "def _maybe_log_save_evaluate",
    "_save_optimizer_and_scheduler": "def _save_checkpoint",
    "_save_rng_state": "def _save_checkpoint",
    "_save_scaler": "def ",
    "create_accelerator_and_postprocess": "def __init__",
    "create_optimizer": "def ",
    "evaluation_loop": "def ",
    "get_batch_samples": "def _run_epoch",
    "get_total_train_batch_size": "def ",
    "get_train_dataloader": "def ",
    "training_step": "def _run_epoch",
}
"""Methods of Trainer that the mixins override or call, each with the method that calls it ("def ": any method)."""


@pytest.mark.parametrize(("name", "caller"), OVERRIDDEN.items())
def test_trainer_calls_the_overridden_methods(name: str, caller: str) -> None:
    assert hasattr(Trainer, name), f"Trainer.{name} no longer exists, so our override is never called"
    where: Any = Trainer if caller == "def " else getattr(Trainer, caller.removeprefix("def "))
    assert f"self.{name}(" in inspect.getsource(where), f"Trainer.{name} is no longer called in {caller!r}"


def test_run_epoch_gets_its_position_by_name() -> None:
    source = inspect.getsource(Trainer._inner_training_loop)
    for name in ("epoch", "epochs_trained", "steps_trained_in_current_epoch"):
        assert f" {name}={name}," in source, f"Trainer._run_epoch no longer gets {name} as a keyword"
    source = inspect.getsource(Trainer._run_epoch)
    assert source.index("self._load_rng_state(") < source.index("iter(train_dataloader)")


@pytest.mark.parametrize("name", [name for name in OVERRIDDEN if hasattr(OffloadTrainerMixin, name)])
def test_overriding_methods_have_the_arguments_of_trainer(name: str) -> None:
    ours, stock = (list(inspect.signature(getattr(owner, name)).parameters) for owner in (OffloadTrainerMixin, Trainer))
    variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in
                   inspect.signature(getattr(OffloadTrainerMixin, name)).parameters.values())  # fmt: skip
    named = [parameter for parameter in ours if parameter not in ("args", "kwargs")]
    assert stock[: len(named)] == named, f"Trainer.{name} takes {stock} now"
    assert variadic or "kwargs" in ours or ours == stock, f"Trainer.{name} takes {stock} now"


def make_trainer(folder: Path) -> Trainer:
    rows = tiny_rows(4)
    return Trainer(tiny_model("llama"), short_arguments(folder, max_steps=2, logging_steps=500), train_dataset=rows)


def test_the_loss_sums_of_trainer_can_be_read_and_restored(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.train()
    sums = private.log_sums(trainer)
    assert set(sums) == set(private.LOG_SUMS), "Trainer has renamed its loss sums: resumed runs log other losses"
    trainer._total_loss_scalar = 0.0
    private.restore_log_sums(trainer, {**sums, "_tr_loss": 2.0, "_globalstep_last_logged": 1.0})
    assert (float(trainer._tr_loss), trainer._globalstep_last_logged, trainer._total_loss_scalar) == (2.0, 1, -2.0)
    assert isinstance(trainer._globalstep_last_logged, int), "Trainer.global_step is no longer an int"


@pytest.mark.parametrize("filters", [True, False])
def test_logged_losses_are_added_as_trainer_adds_them(filters: bool, tmp_path: Path) -> None:
    losses = [0.1, float("nan"), 0.7, float("-inf"), 1e7, 0.3] if filters else [0.1, 0.7, 1e7, 0.3, float("nan")]
    trainer = make_trainer(tmp_path)
    trainer.args.logging_nan_inf_filter, trainer.args.max_steps = filters, len(losses)
    returned = iter(losses)
    trainer.training_step = lambda *_args, **_kwargs: torch.tensor(next(returned))
    ours = make_trainer(tmp_path)
    ours.args.logging_nan_inf_filter, ours._tr_loss, ours._globalstep_last_logged = filters, torch.zeros(()), 0
    trainer.train()
    for number, loss in enumerate(losses):
        ours.state.global_step = number
        private.add_logged_loss(ours, torch.tensor(loss))
    assert torch.equal(ours._tr_loss, trainer._tr_loss) or (ours._tr_loss.isnan() and trainer._tr_loss.isnan())


def test_missing_loss_sums_raise() -> None:
    with pytest.raises(AttributeError):
        private.log_sums(object())  # type: ignore[arg-type]


def test_the_number_of_gpus_can_be_limited(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    assert args.n_gpu == 0
    args._n_gpu = 4
    private.use_one_gpu(args)
    assert args.n_gpu == 1, "TrainingArguments.n_gpu no longer returns _n_gpu"


def test_the_cache_is_found_among_outputs_and_arguments() -> None:
    model: Any = tiny_model("llama").eval()
    passed: list[Any] = []
    model.register_forward_pre_hook(
        lambda _model, _args, kwargs: passed.append(private.cache_among(kwargs)), with_kwargs=True
    )
    ids = tiny_batch()["input_ids"]
    cache = private.cache_among(model(input_ids=ids, use_cache=True))
    assert cache is not None and cache.get_seq_length() == ids.shape[1], "the output's cache has another name"
    assert private.cache_among(model(input_ids=ids, use_cache=False)) is None
    model.generate(ids, max_new_tokens=2, min_new_tokens=2, do_sample=False, use_cache=True)
    assert passed[-1] is not None, "generate() passes the cache by a name that is not in CACHE_NAMES"


def test_layers_run_through_our_function() -> None:
    model: Any = tiny_model("llama").train()
    ran: list[Any] = []

    def run_layer(function: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(function)
        return function(*args, **kwargs)

    private.run_layers_by(model, run_layer)
    enable_checkpointing(model)
    model(**tiny_batch())
    assert len(ran) == model.config.num_hidden_layers, (
        "PreTrainedModel._set_gradient_checkpointing or a layer's _gradient_checkpointing_func moved: activations go "
        "where transformers puts them, not where the plan says"
    )


def test_reentrant_checkpointing_is_detected() -> None:
    model: Any = tiny_model("llama").train()
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    else:
        enable(activation_checkpointing_kwargs={"use_reentrant": True})
    reentrant = [module for module in model.modules() if private.is_reentrant(module)]
    assert reentrant, "_gradient_checkpointing_func moved"
    for module in reentrant:
        private.make_non_reentrant(module)
    model(**tiny_batch()).loss.backward()
    assert not any(private.is_reentrant(module) for module in model.modules())


def test_trainer_uploads_through_the_shared_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patterns: list[Any] = []
    api = transformers.trainer.hf_api()
    monkeypatch.setattr(api, "upload_folder", lambda **kwargs: patterns.append(kwargs["ignore_patterns"]))
    with private.uploads_without(["ours", tmp_path / "elsewhere", tmp_path / "run" / "store"], str(tmp_path / "run")):
        transformers.trainer.hf_api().upload_folder(folder_path=str(tmp_path / "run"), ignore_patterns=["_*"])
        transformers.trainer.hf_api().upload_folder(folder_path=str(tmp_path), ignore_patterns=None)
    transformers.trainer.hf_api().upload_folder(folder_path=str(tmp_path / "run"), ignore_patterns=["_*"])
    assert patterns == [["_*", "ours/*", "store/*"], None, ["_*"]]
    for name in ("push_to_hub", "_push_from_checkpoint"):
        source = inspect.getsource(getattr(Trainer, name))
        assert "hf_api().upload_folder(" in source and "folder_path=" in source, (
            f"Trainer.{name} has another way to upload"
        )


def test_models_are_built_from_configs() -> None:
    for model_class in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM):
        model = private.build_from_config(model_class, tiny_config("llama"), torch.float32)
        assert isinstance(model, transformers.LlamaForCausalLM), "PreTrainedModel._from_config moved"


def test_loaded_parameters_are_marked(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    seen: list[bool] = []
    from torch.nn.modules.module import register_module_parameter_registration_hook

    hook = register_module_parameter_registration_hook(
        lambda _module, _name, parameter: seen.append(parameter is not None and private.is_loaded(parameter))
    )
    try:
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    finally:
        hook.remove()
    assert any(seen), "parameters are registered without _is_hf_initialized, so a streamed load would take none"
    parameter = nn.Parameter(torch.zeros(1))
    private.mark_loaded(parameter)
    assert private.is_loaded(parameter)


def test_grouped_experts_are_detected() -> None:
    assert private.groups_experts(tiny_model("qwen3_moe")), "_can_set_experts_implementation moved"


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_one_expert_equals_a_group_of_one(is_transposed: bool, has_bias: bool) -> None:
    """Forward and backward with autocast, in float32, which has no grouped kernel."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).requires_grad_()

    rows, weight = draw(37, 24), draw(1, 24, 40) if is_transposed else draw(1, 40, 24)
    bias = draw(1, 40)[torch.zeros(37, dtype=torch.long)] if has_bias else None
    inputs = [rows, weight]

    def outcome(linear: Any) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            output = linear()
        return [output, *torch.autograd.grad(output.square().sum(), inputs)]

    ends = torch.tensor([37], dtype=torch.int32)
    grouped = outcome(lambda: private._grouped_linear(rows, weight, ends, bias, is_transposed))
    alone = outcome(lambda: private._one_group_linear(rows, weight.squeeze(0), bias, is_transposed=is_transposed))
    for found, expected in zip(alone, grouped, strict=True):
        assert found.dtype == torch.float32 and torch.equal(found, expected)


EXPERTS_OF: dict[str, Any] = {
    "HunYuanMoEV1": {"intermediate_size": 608, "moe_topk": 1, "num_experts": 2},
    "GptOss": {"intermediate_size": 608, "num_local_experts": 2},
    "NemotronH": {"moe_intermediate_size": 608, "mlp_hidden_act": "silu", "n_routed_experts": 2},
}


@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize("family", EXPERTS_OF)
def test_one_expert_equals_its_rows_among_those_of_all_experts(family: str, num_threads: int) -> None:
    """Threads that end within a vector have another last bit. For the rows of all experts they end at vectors."""
    config = getattr(transformers, f"{family}Config")(hidden_size=64, **EXPERTS_OF[family])
    modeling = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    module = getattr(modeling, f"{family}Experts")(config)
    for parameter in module.parameters():
        parameter.data = draw(*parameter.shape) / 4
    rows, gradient = draw(288, 64), draw(288, 64)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for num_first in (121, 143, 187):
            index = (torch.arange(288) >= num_first).long().unsqueeze(1)
            module.zero_grad()
            output = private.grouped_experts(module, rows, index, torch.ones(288, 1))
            output.backward(gradient)
            for expert, part in enumerate(index.flatten().sort().indices.tensor_split([num_first])):
                own = {name: p.detach()[expert : expert + 1].requires_grad_() for name, p in module.named_parameters()}
                alone = private.one_expert(module, rows[part], own)
                alone.backward(gradient[part])
                assert torch.equal(alone, output[part])
                for name in own.keys() - {"gate_up_proj_bias", "down_proj_bias"}:  # stock adds these in any order
                    assert torch.equal(own[name].grad[0], module.get_parameter(name).grad[expert]), name
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [2, 3, 7, 48])
@pytest.mark.parametrize("width", [608, 768, 14336])
def test_rows_are_divided_at_whole_vectors(width: int, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    for most in (1, 2, 55, 333, 4099):
        rows = private.rows_in_whole_vectors(most, width, 4)
        assert 0 < rows <= most < rows + 32 * num_threads
        of_a_thread = -(-rows * width // min(num_threads, -(-rows * width // 32768)))
        assert of_a_thread % 32 == 0


def test_layers_have_the_expected_base_class() -> None:
    model: Any = tiny_model("llama")
    names = {base.__name__ for base in type(model.model.layers[0]).__mro__}
    assert "GradientCheckpointingLayer" in names, "model.discovery finds layers by this base class"
    assert "LlamaDecoderLayer" in set(model.model._no_split_modules or model._no_split_modules)


def test_trackers_have_the_expected_names() -> None:
    assert INTEGRATION_TO_CALLBACK.keys() >= set(TRACKERS) - {"trackio"}, "some trackers get no lohan/ metrics"
