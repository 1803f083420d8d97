"""Adapters over a packed, streamed base equal those of transformers, bitsandbytes and PEFT in memory, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from async_device import AsyncDevice
from equal_tensors import assert_same_tensors
from interrupted_runs import InterruptAfter, interrupt
from packed_bases import take_decoded
from safetensors.torch import load_file, save_file
from short_runs import short_arguments
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    Qwen3Config,
    TrainingArguments,
)
from transformers import Trainer as StockTrainer

import hf_lohan
from hf_lohan.annexes.resharding import reshard_stores
from hf_lohan.cli.stores import verify_stores
from hf_lohan.config import OffloadConfig
from hf_lohan.costs import Quantization
from hf_lohan.engine import OffloadEngine, ParameterAccess, drain_model
from hf_lohan.engine.tiers import open_tiers
from hf_lohan.files import ForeignStoreError
from hf_lohan.huggingface.models.checkpoint_form import read_form
from hf_lohan.huggingface.models.hub import quantization_of
from hf_lohan.huggingface.models.quantized_checkpoints import quantized_as_asked
from hf_lohan.huggingface.models.weight_sink import WeightSink
from hf_lohan.model.discovery import find_layers
from hf_lohan.model.experts import find_experts
from hf_lohan.model.packed_weights import name_in_base, packed_forms
from hf_lohan.planning import lay_out
from hf_lohan.quantize import values_of
from hf_lohan.testing.models import tiny_batch, tiny_model, tiny_rows

peft = pytest.importorskip("peft")

MAX_STEPS = 3
MAX_GRAD_NORM = 0.05
BUDGETS = {"cpu_memory": "6MiB", "gpu_memory": "2MiB", "commit_every": 1}
TARGETS = {"gpt2": ["c_attn", "c_fc"], "mixtral": ["q_proj", "v_proj"]}


def base_folder(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> Path:
    """Rows are whole blocks: see `tests/quantize`."""
    if family == "qwen3":
        sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4}
        shape = {"vocab_size": 256, "num_hidden_layers": 3, "num_key_value_heads": 2, **sizes}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(Qwen3Config(**shape), dtype=torch.float32)
    else:
        model = tiny_model(family, **{"n_embd" if family == "gpt2" else "hidden_size": 64})
    model.to(dtype).save_pretrained(folder / "base")
    return folder / "base"


def lora(family: str = "llama", **settings: Any) -> Any:
    targets = TARGETS.get(family, ["q_proj", "o_proj", "up_proj"])
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **settings)


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "max_steps": MAX_STEPS,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "max_grad_norm": MAX_GRAD_NORM,
    }
    return short_arguments(folder, **{**defaults, **settings})


def rows(num_steps: int = MAX_STEPS) -> list[dict[str, Tensor]]:
    return tiny_rows(2 * num_steps)


def losses_of(trainer: StockTrainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def offloaded(
    folder: Path, base: Path, quantize: Any, peft_config: Any, num_steps: int = MAX_STEPS, **offload: Any
) -> hf_lohan.Trainer:
    torch.manual_seed(1)
    offload = {**BUDGETS, "quantize": quantize, **offload}
    model = hf_lohan.from_pretrained(
        base, offload, torch_device="cpu", default_ssd_path=folder / "store", peft_config=peft_config
    )
    return hf_lohan.Trainer(model, arguments(folder, max_steps=num_steps), train_dataset=rows(num_steps))


def stock_with_bitsandbytes(
    folder: Path, base: Path, config: Any, peft_config: Any, dtype: torch.dtype, num_steps: int = MAX_STEPS
) -> Any:
    pytest.importorskip("bitsandbytes")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, quantization_config=config, device_map="cpu")
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft_config, autocast_adapter_dtype=False)
    return StockTrainer(model, arguments(folder, max_steps=num_steps), train_dataset=rows(num_steps))


def adapters_of(model: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in peft.get_peft_model_state_dict(model).items()}


def saved_adapters(trainer: hf_lohan.Trainer, folder: Path) -> dict[str, Tensor]:
    trainer.save_model(str(folder / "saved"))
    return load_file(folder / "saved" / "adapter_model.safetensors")


LONG = [
    pytest.param(family, "nf4", double, {}, 12, marks=pytest.mark.slow)
    for family in ("llama", "qwen3", "gpt2", "mixtral")
    for double in (True, False)
]


@pytest.mark.parametrize(
    ("family", "method", "double", "settings", "num_steps"),
    [
        pytest.param("llama", "nf4", True, {}, MAX_STEPS, marks=pytest.mark.slow),
        ("llama", "fp4", False, {}, MAX_STEPS),
        pytest.param("qwen3", "nf4", False, {}, MAX_STEPS, marks=pytest.mark.slow),
        pytest.param("gpt2", "nf4", True, {}, MAX_STEPS, marks=pytest.mark.slow),
        ("mixtral", "nf4", True, {}, MAX_STEPS),
        ("llama", "nf4", True, {"use_dora": True}, MAX_STEPS),
        pytest.param("llama", "nf4", False, {"modules_to_save": ["lm_head"]}, MAX_STEPS, marks=pytest.mark.slow),
        *LONG,
    ],
)
def test_adapters_and_losses_are_those_of_bitsandbytes(
    family: str, method: str, double: bool, settings: dict[str, Any], num_steps: int, tmp_path: Path
) -> None:
    """Gradients are accumulated and clipped."""
    base = base_folder(tmp_path, family)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=method, bnb_4bit_use_double_quant=double)
    stock = stock_with_bitsandbytes(
        tmp_path / "stock", base, config, lora(family, **settings), torch.float32, num_steps
    )
    stock.train()
    setting = {"method": method, "double": double, "skip": ["experts"]}  # bitsandbytes leaves fused experts alone
    ours = offloaded(tmp_path / "ours", base, setting, lora(family, **settings), num_steps)
    ours.train()
    assert losses_of(ours) == losses_of(stock) and len(losses_of(ours)) == num_steps
    assert any(row.get("grad_norm", 0.0) > MAX_GRAD_NORM for row in stock.state.log_history), "no step was clipped"
    expected, found = adapters_of(stock.model), saved_adapters(ours, tmp_path)
    assert_same_tensors(found, expected)
    ours.offload_engine.close()


def trained(
    trainer: hf_lohan.Trainer, folder: Path, resume: str | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and adapters of a run to its end, whose engine is then closed."""
    trainer.train(resume_from_checkpoint=resume)
    outcome = losses_of(trainer), saved_adapters(trainer, folder)
    trainer.offload_engine.close()
    return outcome


def assert_equal(found: tuple[list[float], dict[str, Tensor]], expected: tuple[list[float], dict[str, Tensor]]) -> None:
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], tensor) for name, tensor in expected[1].items())


def test_bfloat16_weights_compute_as_those_that_bitsandbytes_decodes(tmp_path: Path) -> None:
    """Its own product of bfloat16 and 4 bits rounds in another order on some CPUs, so the weights are compared."""
    functional = pytest.importorskip("bitsandbytes.functional")
    base = base_folder(tmp_path, "llama", torch.bfloat16)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    packed = AutoModelForCausalLM.from_pretrained(base, quantization_config=config, device_map="cpu")
    stock = AutoModelForCausalLM.from_pretrained(base)
    for name, weight in packed.named_parameters():
        if hasattr(weight, "quant_state"):
            stock.get_parameter(name).data = functional.dequantize_4bit(weight.data, weight.quant_state)
    ours = offloaded(tmp_path, base, "nf4", lora())
    with torch.no_grad():
        assert torch.equal(ours.model(**tiny_batch()).logits, stock(**tiny_batch()).logits)
    ours.offload_engine.close()


@pytest.mark.covering(0)
@pytest.mark.parametrize("double", [True, False])
def test_float32_adapters_over_bfloat16_compute_as_over_decoded_weights(double: bool, tmp_path: Path) -> None:
    """The decoded weights are in memory, in ordinary linear modules, with PEFT and the stock Trainer."""
    base = base_folder(tmp_path, "llama", torch.bfloat16)
    ours = offloaded(tmp_path / "ours", base, {"method": "nf4", "double": double}, lora())
    decode_to(tmp_path / "decoded", AutoModelForCausalLM.from_pretrained(base), ours)
    torch.manual_seed(1)
    stock = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "decoded"), lora())
    stock_trainer = StockTrainer(stock, arguments(tmp_path / "stock"), train_dataset=rows())
    stock_trainer.train()
    assert stock.model.dtype == torch.bfloat16
    assert_equal(trained(ours, tmp_path), (losses_of(stock_trainer), adapters_of(stock)))


@pytest.mark.covering(0)
@pytest.mark.parametrize("double", [True, False])
def test_bfloat16_adapters_compute_as_over_decoded_weights(double: bool, tmp_path: Path) -> None:
    """The reference is a plain loop: bfloat16 in memory, and AdamW on float32 masters of the adapters."""
    base = base_folder(tmp_path, "llama", torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(base)
    model = peft.get_peft_model(model, lora(init_lora_weights=False), autocast_adapter_dtype=False)
    model.save_pretrained(tmp_path / "adapter")
    settings = {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1, "weight_decay": 0.0}
    args = arguments(tmp_path / "ours", lr_scheduler_type="constant", **settings)
    quantize = {"method": "nf4", "double": double}
    packed = offloaded(tmp_path / "packed", base, quantize, lora())
    decode_to(tmp_path / "decoded", AutoModelForCausalLM.from_pretrained(base), packed)
    packed.offload_engine.close()
    ours = hf_lohan.Trainer(model, args, train_dataset=rows(), offload={**BUDGETS, "quantize": quantize})
    ours.train()
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "decoded")
    reference = peft.PeftModel.from_pretrained(
        reference, tmp_path / "adapter", is_trainable=True, autocast_adapter_dtype=False
    ).train()
    adapters = {name: parameter for name, parameter in reference.named_parameters() if parameter.requires_grad}
    masters = {name: parameter.detach().float() for name, parameter in adapters.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2, weight_decay=0.0, fused=True)
    losses = []
    for index in [int(i) for i in order_of(args, rows())]:
        loss = reference(**{name: value[None] for name, value in rows()[index].items()}).loss
        losses.append(loss.item())
        loss.backward()
        for name, parameter in adapters.items():
            assert parameter.dtype == torch.bfloat16
            masters[name].grad = parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        for name, parameter in adapters.items():
            parameter.data.copy_(masters[name])
    assert losses_of(ours) == losses
    access = ours.offload_engine.parameters
    for name, parameter in adapters.items():
        assert torch.equal(access.read_parameter(name), parameter), name
    ours.offload_engine.close()


def order_of(args: TrainingArguments, dataset: list[dict[str, Tensor]]) -> list[int]:
    """The order in which a Trainer with these arguments takes the rows."""
    trainer = StockTrainer(tiny_model("llama"), args, train_dataset=list(range(len(dataset))), data_collator=list)
    return [row for batch in trainer.get_train_dataloader() for row in batch][: args.max_steps]


@pytest.mark.covering(0)
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_trl_over_a_packed_base_equals_trl_over_bitsandbytes(kind: str, tmp_path: Path) -> None:
    """TRL casts adapters over bitsandbytes to bfloat16, so their first values are of bfloat16, and are cast back. The
    reference of DPO is the model without adapters."""
    pytest.importorskip("bitsandbytes")
    trl = pytest.importorskip("trl")
    trl_runs = pytest.importorskip("trl_runs")
    base = trl_runs.save_checkpoint(tmp_path / "base", hidden_size=64)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora(init_lora_weights=False))
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter.copy_(parameter.bfloat16() if parameter.requires_grad else parameter)
    adapted.save_pretrained(tmp_path / "adapter")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    stock = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, quantization_config=config, device_map="cpu"
    )
    stock = peft.PeftModel.from_pretrained(stock, tmp_path / "adapter", is_trainable=True)
    data = trl_runs.texts() if kind == "SFT" else trl_runs.preferences()
    tokenizer = AutoTokenizer.from_pretrained(base)
    runs = []
    for name, model, offload in (("stock", stock, None), ("ours", adapted, {**trl_runs.BUDGETS, "quantize": "nf4"})):
        args = trl_runs.arguments(kind, tmp_path / name, learning_rate=1e-2)
        options = {"model": model, "train_dataset": data, "processing_class": tokenizer, "args": args}
        if offload is None:
            trainer = getattr(trl, f"{kind}Trainer")(**options)
            for parameter in trainer.model.parameters():
                parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
        else:
            trainer = getattr(hf_lohan.trl, f"{kind}Trainer")(offload=offload, **options)
        trainer.train()
        weights = {n: w for n, w in trl_runs.weights_of(trainer.model).items() if "lora_" in n}
        runs.append(trl_runs.Run(trainer, trl_runs.comparable(trainer.state.log_history), weights))
    trl_runs.assert_same(runs[1], runs[0])
    trl_runs.close(runs[1])


def test_a_run_resumes_over_a_packed_base(tmp_path: Path) -> None:
    """Its store was resharded for two ranks and back. The adapters stay float32, and rank 1 has all of them."""
    base = base_folder(tmp_path, "llama", torch.bfloat16)
    whole = trained(offloaded(tmp_path / "whole", base, "nf4", lora()), tmp_path)
    broken = offloaded(tmp_path / "run", base, "nf4", lora())
    broken.add_callback(InterruptAfter(2))
    interrupt(broken)
    for num_ranks in (2, 1):
        reshard_stores([str(tmp_path / "run")], num_ranks, removes_old=True)
        assert verify_stores([str(tmp_path / "run")])
    assert_equal(trained(offloaded(tmp_path / "run", base, "nf4", lora()), tmp_path / "again", "last_step"), whole)
    with pytest.raises(ForeignStoreError, match="holds a store with quantize: nf4, this run has none"):
        offloaded(tmp_path / "run", base, "none", lora())
    tiny_model("llama", seed=1, hidden_size=64).bfloat16().save_pretrained(tmp_path / "other")
    with pytest.raises(ForeignStoreError, match="holds the steps of a run over another base"):
        offloaded(tmp_path / "run", tmp_path / "other", "nf4", lora())


def decode_to(folder: Path, model: Any, trainer: hf_lohan.Trainer) -> int:
    """Save the model with the decoded weights of a packed store. Returns how many of its weights they change."""
    changed = take_decoded(model, trainer.offload_engine.parameters)
    model.save_pretrained(folder)
    return changed


@pytest.mark.covering(0)
@pytest.mark.parametrize("experts", ["with_layer", "streamed"])
def test_adapters_over_packed_experts_equal_those_over_decoded_ones(experts: str, tmp_path: Path) -> None:
    """The decoded weights are those of the packed store, in a checkpoint of their own."""
    model = tiny_model("mixtral", hidden_size=64)
    model.save_pretrained(tmp_path / "base")
    packed = offloaded(tmp_path / "packed", tmp_path / "base", "nf4", lora("mixtral"), experts=experts)
    assert decode_to(tmp_path / "decoded", model, packed) == 3 * (4 + 2), "attention and fused experts of each layer"
    expected = trained(offloaded(tmp_path / "plain", tmp_path / "decoded", "none", lora("mixtral")), tmp_path)
    assert_equal(trained(packed, tmp_path / "packed_run"), expected)


def test_late_copies_and_decodings_change_no_bit(tmp_path: Path) -> None:
    """On a device with memory of its own, codes cross the link and are decoded there."""
    model = tiny_model("llama", hidden_size=64).requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.requires_grad_(True)
    folder = str(tmp_path / "store")
    config = OffloadConfig.load({**BUDGETS, "ssd": folder, "quantize": "nf4", "prefetch_blocks": 1}).resolve(
        host_memory_bytes=1 << 30, device_memory_bytes=1 << 30, num_cpus=2, default_ssd_path=folder
    )
    device = AsyncDevice(0, max_delay_s=5e-4)
    layout = lay_out(model, config, working_dtype=torch.float32, hold_gradients=False)
    tiers = open_tiers(layout, config, device)
    drain_model(layout.blocks, ParameterAccess(tiers.store, layout.blocks, tiers.states, packs=True))
    engine = OffloadEngine(model, layout, tiers, config)
    logits = [model(**tiny_batch()).logits.detach() for _ in range(2)]
    in_memory = tiny_model("llama", hidden_size=64)
    with torch.no_grad():
        for name, parameter in in_memory.named_parameters():
            parameter.copy_(engine.parameters.read_parameter(name))
    assert all(torch.equal(ours, in_memory(**tiny_batch()).logits) for ours in logits)
    assert device.num_races == 0
    engine.close()


def test_a_quantization_config_means_the_setting(tmp_path: Path) -> None:
    base = base_folder(tmp_path, "llama")
    expected = trained(offloaded(tmp_path / "setting", base, {"method": "nf4", "double": False}, lora()), tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    torch.manual_seed(1)
    trainer = hf_lohan.Trainer(
        str(base),
        arguments(tmp_path / "config"),
        train_dataset=rows(),
        offload=BUDGETS,
        peft_config=lora(),
        quantization_config=config,
    )
    assert_equal(trained(trainer, tmp_path / "config"), expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"load_in_8bit": True}, "load_in_8bit=True is not honoured"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"}, "differs from the dtype of the model"),
        ({"load_in_4bit": True, "llm_int8_enable_fp32_cpu_offload": True}, "llm_int8_enable_fp32_cpu_offload=True"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "give only one of them"),
    ],
)
def test_what_is_not_honoured_is_refused_by_field(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    base, config = base_folder(tmp_path, "llama"), BitsAndBytesConfig(**fields)
    with pytest.raises(ValueError, match=f"quantization_config.*{message}"):
        hf_lohan.from_pretrained(
            base, {"quantize": "nf4"} if "fp4" in fields.values() else "lohan", quantization_config=config
        )


def test_packed_weights_cannot_be_changed_and_need_frozen_weights(tmp_path: Path) -> None:
    base = base_folder(tmp_path, "llama")
    offload = {**BUDGETS, "quantize": "nf4"}
    with pytest.raises(ValueError, match="quantize: nf4 is for frozen weights, and no matrix in the layers of Llama"):
        hf_lohan.from_pretrained(base, offload, torch_device="cpu", default_ssd_path=tmp_path / "none")
    trainer = offloaded(tmp_path, base, "nf4", lora())
    trainer.train()
    with pytest.raises(
        ValueError, match=r"merge_adapter cannot change the base.*merge_and_unload\(\)\.save_pretrained"
    ):
        trainer.model.merge_adapter()
    with pytest.raises(ValueError, match=r"is packed in the store \(quantize: nf4\), so it cannot be changed"):  # noqa: SIM117
        with torch.no_grad(), hf_lohan.gathered_parameters(trainer.model.model.model.layers[0].mlp.up_proj.base_layer):
            trainer.model.model.model.layers[0].mlp.up_proj.base_layer.weight.add_(1.0)
    trainer.offload_engine.close()


@pytest.mark.covering(0)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_preparing_for_kbit_training_is_refused_with_the_right_call(dtype: torch.dtype, tmp_path: Path) -> None:
    """It would freeze the adapters, and cast weights in the store to float32."""
    trainer = offloaded(tmp_path, base_folder(tmp_path, "llama", dtype), "nf4", lora())
    with pytest.raises((ValueError, RuntimeError), match=r"peft\.prepare_model_for_kbit_training.* out"):
        peft.prepare_model_for_kbit_training(trainer.model)
        trainer.train()
    trainer.offload_engine.close()


def test_frozen_weights_that_are_all_skipped_name_skip(tmp_path: Path) -> None:
    base = base_folder(tmp_path, "llama")
    with pytest.raises(ValueError, match=r"quantize: skip: \['_proj'\] names every frozen matrix in the layers of"):
        offloaded(tmp_path, base, {"method": "nf4", "skip": ["_proj"]}, lora())


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", r"skip: '\(' is neither the end of a name nor a regular expression \(missing \)"),
        ("*", r"skip: '\*' is neither"),
        ("down_prj", r"skip: 'down_prj' names no module with weights of .*, such as 'down_proj'"),
        ("layers.1", r"skip: 'layers\.1' names no module with weights of .*, such as 'model\.layers\.1'"),
    ],
)
def test_a_pattern_of_skip_that_names_nothing_is_refused(pattern: str, message: str) -> None:
    model = tiny_model("llama").requires_grad_(False)
    with pytest.raises(ValueError, match=message):
        packed_forms(model, find_layers(model), Quantization(method="nf4", skip=(pattern,)))
    packed_forms(model, find_layers(model), Quantization(method="nf4", skip=("lm_head", r".*layers\.1", "up_proj")))


@pytest.mark.parametrize("kind", ["adapters", "partly frozen", "two dtypes"])
@pytest.mark.parametrize("method", ["nf4", "int8"])
def test_experts_that_cannot_stream_are_packed(kind: str, method: str) -> None:
    model = tiny_model("mixtral").requires_grad_(False)
    experts = [layer.mlp.experts for layer in model.model.layers]
    if kind == "partly frozen":
        for each in experts:
            each.down_proj.requires_grad_(True)
    elif kind == "two dtypes":
        for each in experts:
            each.down_proj.data = each.down_proj.data.bfloat16()
    else:
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    assert find_experts(model) == {}
    names = {parameter: name for name, parameter in model.named_parameters()}
    packed = {
        name_in_base(names[parameter])
        for parameter in packed_forms(model, find_layers(model), Quantization(method=method))
    }
    expected = {f"model.layers.{n}.mlp.experts.{part}" for n in range(3) for part in ("gate_up_proj", "down_proj")}
    assert {name for name in packed if "experts" in name} == {
        name for name in expected if kind != "partly frozen" or "gate_up" in name
    }


def test_matrices_of_other_classes_are_named() -> None:
    class OwnLinear(nn.Linear):
        pass

    model = tiny_model("llama").requires_grad_(False)
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OwnLinear
    with pytest.raises(ValueError, match=r"are of other classes, such as OwnLinear of model\.layers\.0\."):
        packed_forms(model, find_layers(model), Quantization(method="nf4"))
    with pytest.raises(ValueError, match="no matrix in the layers of LlamaForCausalLM is frozen"):
        packed_forms(model.requires_grad_(True), find_layers(model), Quantization(method="nf4"))


def test_modules_of_the_setting_and_of_a_quantization_config_are_skipped() -> None:
    config = OffloadConfig.load({"quantize": {"method": "nf4", "double": False, "skip": ["o_proj"]}})
    asked = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["up_proj"])
    quantize = quantized_as_asked(config, asked, torch.float32).quantize
    assert quantize.method == "nf4" and set(quantize.skip) == {"o_proj", "up_proj", "experts"}


def test_the_config_of_a_packed_checkpoint_is_honoured_and_stays(tmp_path: Path) -> None:
    fields = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [64, 64], "dtype": "bfloat16"}
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors = {
        name: torch.zeros(2048, 1, dtype=torch.uint8),
        f"{name}.absmax": torch.ones(64),
        f"{name}.quant_map": values_of("nf4"),
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        "lm_head.weight": torch.zeros(64, 64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    model_config = LlamaConfig(quantization_config=BitsAndBytesConfig(**fields).to_dict())
    packed = read_form(tmp_path, model_config, quantization_of(model_config))
    assert hasattr(model_config, "quantization_config") and not hasattr(packed.model_config, "quantization_config")
    skip = {"method": "nf4", "double": False, "skip": ["experts", "lm_head"]}
    quantize = packed.settings(OffloadConfig.load({"quantize": skip}), torch.bfloat16, []).quantize
    assert quantize.skip == ("lm_head", "experts")
    sink = Mock(WeightSink, shape_of=lambda _name: torch.Size((64, 64)))
    found = packed.replace_tensors(cast("Any", tensors), sink)
    (of_codes, of_scales) = (call.args for call in sink.store_bytes.call_args_list)
    assert of_codes[:3] == (name, "codes", 0) and of_codes[3].numel() == 2048
    assert of_scales[:3] == (name, "scales", 0) and of_scales[3].view(torch.float32).tolist() == [1.0] * 64
    assert found["lm_head.weight"] is tensors["lm_head.weight"] and found[name].shape == (64, 64) and len(found) == 2
    with pytest.raises(ValueError, match=r"of '.*': bnb_4bit_compute_dtype=bfloat16 differs from the dtype of the mod"):
        packed.settings(OffloadConfig.load({}), torch.float32, [])
    other = OffloadConfig.load({"quantize": {**skip, "skip": ["o_proj"]}})
    with pytest.raises(ValueError, match=r"skip: 'o_proj' was asked for, and model\.layers\.0\.self_attn\.o_proj of"):
        packed.settings(other, torch.bfloat16, [])


@pytest.mark.covering(0)
@pytest.mark.parametrize("double", [True, False])
def test_a_checkpoint_of_bitsandbytes_goes_into_the_store_as_it_is(double: bool, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    base = base_folder(tmp_path, "llama")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=config, device_map="cpu")
    model.save_pretrained(tmp_path / "packed")
    expected = trained(offloaded(tmp_path / "base_run", base, {"method": "nf4", "double": double}, lora()), tmp_path)
    assert_equal(trained(offloaded(tmp_path / "run", tmp_path / "packed", "auto", lora()), tmp_path), expected)
    with pytest.raises(ValueError, match=r"is packed as .*, and quantize: fp4 was asked for"):
        offloaded(tmp_path / "other", tmp_path / "packed", "fp4", lora())
    saved = load_file(tmp_path / "packed" / "model.safetensors")
    scales = sorted(name for name in saved if name.endswith(".nested_absmax" if double else ".absmax"))[-1]
    codes = scales.replace(".nested_absmax", "").replace(".absmax", "")
    damages = {
        "cut short, or not finite": (scales, torch.full_like(saved[scales], float("nan"))),
        f"has no {scales.rpartition('.')[2]}": (scales, None),
        "bytes for .* codes": (codes, saved[codes][: len(saved[codes]) // 2]),
        "has no codes": (codes, None),
    }
    key = next(name for name in saved if name.startswith(codes) and "quant_state" in name)
    state = json.loads(bytes(saved[key].tolist()))
    changes = [
        ("is not packed as", {"quant_type": "fp4"}),
        ("is packed with the shape", {"shape": [state["shape"][0] // 2, 2 * state["shape"][1]]}),
    ]
    changes += [("is damaged", change) for change in ({"shape": [64, 0.5]}, {"dtype": None}, {"blocksize": "64"})]
    if double:
        changes += [("a finite nested_offset", {"nested_offset": bad}) for bad in (float("nan"), "0.1", None)]
    told = [(message, json.dumps({**state, **change}).encode()) for message, change in changes]
    told += [("is damaged", text) for text in (bytes(20), b"[1]", b"\xff{}")]
    of_states = [(message, (key, torch.tensor(list(text), dtype=torch.uint8))) for message, text in told]
    for message, (name, damaged) in [*damages.items(), *of_states]:
        tensors = {key: tensor for key, tensor in {**saved, name: damaged}.items() if tensor is not None}
        save_file(tensors, tmp_path / "packed" / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            offloaded(tmp_path / "damaged", tmp_path / "packed", "auto", lora())
        assert not (tmp_path / "damaged" / "store").exists(), "a weight was read"
    with pytest.raises(ValueError, match="is quantized by hqq, which is not dequantized"):
        config = AutoConfig.from_pretrained(base)
        config.quantization_config = {"quant_method": "hqq"}
        config.save_pretrained(base)
        offloaded(tmp_path / "unknown", base, "auto", lora())


EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("family", "dtype", "settings"),
    [
        ("llama", torch.float32, {"use_dora": True, "modules_to_save": ["lm_head"]}),
        ("llama", torch.bfloat16, {"use_rslora": True}),
        ("gpt2", torch.float32, {"fan_in_fan_out": True}),
        ("mixtral", torch.float32, EXPERTS),
    ],
)
def test_a_merged_model_is_the_decoded_base_plus_the_adapters(
    family: str, dtype: torch.dtype, settings: dict[str, Any], tmp_path: Path
) -> None:
    base = base_folder(tmp_path, family, dtype)
    trainer = offloaded(tmp_path / "run", base, "nf4", lora(family, init_lora_weights=False, **settings))
    trainer.model.save_pretrained(tmp_path / "adapter")
    decode_to(tmp_path / "decoded", AutoModelForCausalLM.from_pretrained(base), trainer)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "decoded")
    stock = peft.PeftModel.from_pretrained(stock, tmp_path / "adapter").merge_and_unload()
    stock.save_pretrained(tmp_path / "expected")
    merged = trainer.model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("expected", "merged"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) and tensor.dtype == dtype for name, tensor in expected.items())
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not hasattr(saved.config, "quantization_config")
    assert torch.equal(saved(**tiny_batch()).logits, stock(**tiny_batch()).logits)
    for use in (lambda: merged(**tiny_batch()), lambda: next(iter(merged.model.layers.parameters())) + 1):
        if family == "llama":
            with pytest.raises(ValueError, match=r"are merged while it is saved.*call save_pretrained, and load"):
                use()
    trainer.offload_engine.close()
