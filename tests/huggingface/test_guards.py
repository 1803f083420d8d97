"""Settings that cannot be honoured exactly are refused in one line with the value and what to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from stored_weights import assert_stored
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from transformers import Adafactor, Qwen2MoeConfig, Qwen2MoeForCausalLM, TrainingArguments
from transformers.optimization import AdafactorSchedule

import hf_lohan
from hf_lohan import engine_of
from hf_lohan.config import OffloadConfig
from hf_lohan.costs import Quantization
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.guards import check_arguments, check_model, check_optimizers
from hf_lohan.huggingface.models.adapters import check_peft_config, refuse_allocation
from hf_lohan.huggingface.models.quantized_checkpoints import name_unpacked
from hf_lohan.huggingface.ranks import check_batches, check_rank_model, check_rules
from hf_lohan.model import adamw_everywhere, muon_for_matrices, stored_form
from hf_lohan.ranks import SINGLE_RANK, Ranks
from hf_lohan.testing.models import tiny_batch, tiny_model

peft = pytest.importorskip("peft")


def arguments(folder: Path, **changes: Any) -> SimpleNamespace:
    """Return training arguments with values that this machine may not support."""
    args = TrainingArguments(str(folder), use_cpu=True, report_to=[])
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    assert not set(changes) - {*values, "world_size", "mixed_precision"}, "the argument does not exist"
    return SimpleNamespace(**{**values, "world_size": 1, **changes})


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as refused:
        call()
    message = str(refused.value)
    assert "\n" not in message
    assert ";" in message or "," in message, "the message does not say what to do"
    return message


def test_the_defaults_are_accepted(tmp_path: Path) -> None:
    check_arguments(TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    check_arguments(arguments(tmp_path, optim="adamw_torch_fused", bf16=True, mixed_precision="bf16"))
    check_arguments(arguments(tmp_path, enable_jit_checkpoint=True))
    check_arguments(arguments(tmp_path, gradient_checkpointing_kwargs={"use_reentrant": True}))
    kernels = {"fused_linear_cross_entropy": False, "rms_norm": True}
    check_arguments(arguments(tmp_path, use_liger_kernel=True, liger_kernel_config=kernels))
    check_model(tiny_model("llama"))
    check_optimizers(tiny_model("llama"), (None, None), None, OffloadConfig())


@pytest.mark.parametrize(
    ("optim", "optim_args"),
    [
        ("sgd", "momentum=0.9,nesterov=true"),
        ("adagrad", None),
        ("rmsprop", "alpha=0.9"),
        ("lion_32bit", None),
        ("adafactor", None),
    ],
)
def test_optimizers_with_a_rule_are_accepted(optim: str, optim_args: str | None, tmp_path: Path) -> None:
    check_arguments(arguments(tmp_path, optim=optim, optim_args=optim_args))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fp16": True}, ["fp16=True", "bf16=True"]),
        ({"fp16_full_eval": True}, ["fp16_full_eval=True"]),
        ({"bf16_full_eval": True}, ["bf16_full_eval=True"]),
        ({"optim": "lomo"}, ["optim='lomo'", "adamw_torch_fused"]),
        ({"optim": "galore_adamw"}, ["optim='galore_adamw'", "sgd"]),
        ({"optim": "lion_8bit"}, ["optim='lion_8bit'", "lion_32bit"]),
        ({"optim": "adamw_torch_4bit"}, ["optim='adamw_torch_4bit'", "set optimizer_state_dtype: int8"]),
        ({"optim_args": "betas=0.5"}, ["optim_args='betas=0.5'", "adam_beta1"]),
        ({"optim": "sgd", "optim_args": "momentum=0.9,weight_decay=0.1"}, ["would be partly ignored", "weight_decay"]),
        ({"deepspeed": {"zero_optimization": {}}}, ["DeepSpeed"]),
        ({"fsdp": ["full_shard"]}, ["FSDP"]),
        ({"world_size": 2, "auto_find_batch_size": True}, ["auto_find_batch_size=True", "per_device_train_batch_size"]),
        ({"world_size": 2, "accelerator_config": {"even_batches": False}}, ["even_batches=False", "leave it out"]),
        ({"world_size": 2, "save_on_each_node": True}, ["save_on_each_node=True", "all machines share"]),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, ["tp_size=2", "leave parallelism_config out of"]),
        ({"parallelism_config": ParallelismConfig(cp_size=2)}, ["cp_size=2", "set ranks.per_row: 2"]),
        ({"parallelism_config": ParallelismConfig(dp_shard_size=2)}, ["dp_shard_size=2"]),
        ({"use_liger_kernel": True}, ["use_liger_kernel=True", "{'fused_linear_cross_entropy': False}"]),
        ({"use_liger_kernel": True, "liger_kernel_config": {"rope": True}}, ["'fused_linear_cross_entropy': False"]),
        ({"mixed_precision": "fp16"}, ["mixed_precision='fp16'", "loss scaling", "--mixed_precision bf16 or no"]),
        ({"mixed_precision": "fp8", "bf16": True}, ["mixed_precision='fp8'", "layers of another package"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_unsupported_arguments_are_refused(changes: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    message = refusal(lambda: check_arguments(arguments(tmp_path, **changes)))
    assert all(word in message for word in words), message


def test_parallelism_of_the_environment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    check_arguments(args)
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    assert "tp_size=2 shards the model" in refusal(lambda: check_arguments(args))


@pytest.mark.parametrize("named", [{"tp_plan": "auto"}, {"device_map": "auto"}, {"distributed_config": "tp"}], ids=str)
def test_arguments_that_shard_a_model_are_refused(named: dict[str, Any], tmp_path: Path) -> None:
    message = refusal(lambda: hf_lohan.from_pretrained(tmp_path, "lohan", **named))
    assert next(iter(named)) in message and "leave it out" in message


def test_a_sharded_parameter_is_refused() -> None:
    model = tiny_model("llama")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model.lm_head.weight = torch.nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), mesh))
        assert "'lm_head.weight' is a DTensor" in refusal(lambda: check_model(model))
    finally:
        torch.distributed.destroy_process_group()


def test_launched_processes_without_a_group_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, two = arguments(tmp_path), arguments(tmp_path, world_size=2)
    monkeypatch.setenv("WORLD_SIZE", "2")  # accelerate reads this, too
    message = refusal(lambda: check_arguments(alone))
    assert "WORLD_SIZE=2" in message and "lohan launch" in message and "ACCELERATE_USE_CPU=true" in message
    check_arguments(two)


def test_a_rank_with_another_number_of_batches_is_named() -> None:
    check_batches([4, 4, 4])
    message = refusal(lambda: check_batches([4, 4, 3]))
    assert "rank 0 has 4 batches" in message and "rank 2 has 3" in message


def test_optimizers_that_need_whole_parameters_are_refused_with_several_ranks() -> None:
    blocks = stored_form(tiny_model("llama"), None, "float32", muon_for_matrices).model_blocks.blocks
    check_rules(blocks, 1)
    assert "Muon needs whole parameters" in refusal(lambda: check_rules(blocks, 2))
    adamw = stored_form(tiny_model("llama"), None, "float32", adamw_everywhere).model_blocks.blocks
    check_rules(adamw, 2)


def test_prompt_learning_is_refused_with_several_ranks() -> None:
    configs = {"default": SimpleNamespace(is_prompt_learning=False), "soft": SimpleNamespace(is_prompt_learning=True)}
    model = SimpleNamespace(peft_config=configs)
    check_rank_model(model, SINGLE_RANK)
    assert "'soft' learns prompts" in refusal(lambda: check_rank_model(model, Ranks(1, 2, 1, 2)))


def test_wrapped_quantized_and_dispatched_models_are_refused() -> None:
    assert "DataParallel" in refusal(lambda: check_model(nn.DataParallel(nn.Linear(2, 2))))
    model = tiny_model("llama")
    model.is_quantized = True
    assert "quantized" in refusal(lambda: check_model(model))
    model.is_quantized = False
    model.hf_device_map = {"": "cpu"}
    assert "device_map=" in refusal(lambda: check_model(model))


def test_adapters_that_change_weights_in_forwards_are_refused() -> None:
    adapters = peft.CPTConfig(task_type="CAUSAL_LM", cpt_token_ids=[1, 2], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 2])
    model = peft.get_peft_model(tiny_model("llama"), adapters)
    for check in (lambda: check_model(model), lambda: check_peft_config(adapters)):
        assert "CPT" in refusal(check)


@pytest.mark.parametrize("owner", ["base_model", None])
def test_changing_ranks_of_adalora_is_refused(owner: str | None) -> None:
    adapters = peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], total_step=9)
    model = peft.get_peft_model(tiny_model("llama"), adapters)
    refuse_allocation(model)
    tuner = model.base_model if owner else model
    assert "AdaLoRA" in refusal(lambda: tuner.update_and_allocate(1))


@pytest.mark.parametrize(
    ("skip", "is_named"), [((), True), (("gate_proj",), True), (("mlp.shared_expert_gate", "experts"), False)]
)
def test_what_bitsandbytes_packs_and_we_do_not_is_named(
    skip: tuple[str, ...], is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = Qwen2MoeConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=64, num_experts=2
    )
    with torch.device("meta"):
        model = Qwen2MoeForCausalLM(config)
    name_unpacked(model, Quantization(method="nf4", skip=skip))
    assert ("model.layers.0.mlp.shared_expert_gate and 1 more" in caplog.text) is is_named
    caplog.clear()
    name_unpacked(tiny_model("llama"), Quantization(method="nf4"))
    assert not caplog.text


def test_optimizers_without_a_rule_are_refused() -> None:
    model = tiny_model("llama")
    mine = torch.optim.Rprop(model.parameters())
    config = OffloadConfig()
    message = refusal(lambda: check_optimizers(model, (mine, None), None, config))
    assert "Rprop cannot be offloaded; use one of" in message
    message = refusal(lambda: check_optimizers(model, (None, None), (torch.optim.Rprop, {}), config))
    assert "Rprop cannot be offloaded" in message
    mine = torch.optim.SGD(model.parameters())
    assert "model's path" in refusal(lambda: check_optimizers("folder", (mine, None), None, config))


def test_a_lion_that_divides_its_weight_decay_is_refused() -> None:
    """The flag is not in param groups."""
    lion = pytest.importorskip("lion_pytorch")
    model = tiny_model("llama")
    settings = {"lr": 1e-3, "weight_decay": 0.1, "decoupled_weight_decay": True}
    check_optimizers(model, (lion.Lion(model.parameters(), lr=1e-3, weight_decay=0.1), None), None, OffloadConfig())
    given = lion.Lion(model.parameters(), **settings)
    for own, by_class in (((given, None), None), ((None, None), (lion.Lion, settings))):
        message = refusal(lambda own=own, by_class=by_class: check_optimizers(model, own, by_class, OffloadConfig()))
        assert "Lion with decoupled_weight_decay=True" in message and "weight_decay=100" in message


def test_a_schedule_that_reads_the_optimizers_states_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, lr=None)
    schedule = AdafactorSchedule(optimizer)
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    words = r"AdafactorSchedule reads .*relative_step=False"
    with pytest.raises(ValueError, match=words):
        hf_lohan.Trainer(model, args, optimizers=(optimizer, schedule), offload="lohan")
    with pytest.raises(ValueError, match=words):
        hf_lohan.Accelerator(cpu=True).prepare(model, optimizer, schedule)
    assert engine_of(model) is None


@pytest.mark.parametrize(
    ("arguments_changes", "trainer_options", "words"),
    [
        ({"optim": "lomo"}, {}, "optim='lomo'"),
        ({"use_liger_kernel": True}, {}, "fused_linear_cross_entropy"),
        ({}, {"optimizers": (torch.optim.Rprop([nn.Parameter(torch.zeros(1))]), None)}, "Rprop cannot be offloaded"),
        ({}, {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"amsgrad": True})}, "AdamW with amsgrad=True"),
        ({}, {"optimizers": (torch.optim.SGD([nn.Parameter(torch.zeros(1))]), None), "offload": {"optimizer": "muon"}},
         "optimizer='muon' and optimizers= are both set"),
    ],
)  # fmt: skip
def test_trainer_checks_its_arguments_first(
    arguments_changes: dict[str, Any], trainer_options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    args = TrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to=[], **arguments_changes)
    with pytest.raises(ValueError, match=words):
        hf_lohan.Trainer(tiny_model("llama"), args, **{"offload": "lohan", **trainer_options})
    assert not (tmp_path / "out" / "lohan").exists()


def test_without_offload_nothing_is_refused(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], optim="adafactor")
    assert hf_lohan.Trainer(tiny_model("llama"), args).offload_engine is None


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_reentrant_checkpointing_is_replaced_by_the_non_reentrant_kind(
    activations: str, offload: Callable[..., OffloadEngine], caplog: pytest.LogCaptureFixture
) -> None:
    models = [tiny_model("llama").train() for _ in range(2)]
    for model in models:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    stock, ours = models
    engine = offload(ours, activations=activations)
    assert caplog.text.count("use_reentrant=True") == 1
    of_stock = torch.optim.AdamW(stock.parameters(), fused=True)
    of_ours = hf_lohan.OffloadAdamW(ours.parameters(), engine=engine)
    for model, optimizer in ((stock, of_stock), (ours, of_ours)):
        model(**tiny_batch()).loss.backward()
        optimizer.step()
    assert_stored(ours, stock)
