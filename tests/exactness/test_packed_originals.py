"""Adapters over a base that stays packed as its checkpoint has it equal those over the base decoded in memory."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from equal_tensors import assert_same_tensors
from interrupted_runs import InterruptAfter, interrupt
from packed_bases import take_decoded
from quantized_folders import KINDS, compressed_folder, dequantized, fp8_folder, is_linear
from safetensors.torch import load_file, save_file
from torch import Tensor
from trajectories import Trajectory, arguments, assert_same_bits, dataset, finish, logged, stored_weights
from transformers import AutoModelForCausalLM

import hf_lohan
from hf_lohan import engine_of
from hf_lohan.cli.plan_request import PlanRequest, plan_run
from hf_lohan.engine import OffloadEngine
from hf_lohan.files import ForeignStoreError
from hf_lohan.quantize import values_of
from hf_lohan.quantize.four_bit import encode
from hf_lohan.testing.models import tiny_batch, tiny_model

peft = pytest.importorskip("peft")

DESKTOP = Path(__file__).resolve().parents[2] / "configs" / "hardware" / "rtx4090_desktop.yaml"
BUDGETS = {"cpu_memory": "16MiB", "gpu_memory": "16MiB", "commit_every": 1}
SETTINGS: dict[str, Any] = {"max_steps": 3, "max_grad_norm": 0.1, "learning_rate": 1e-2}
INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}


def lora(targets: Sequence[str] = ("q_proj", "v_proj")) -> Any:
    return peft.LoraConfig(r=4, target_modules=list(targets), task_type="CAUSAL_LM")


def folder_of(kind: str, folder: Path) -> tuple[Path, Any]:
    """A quantized folder, and a function that makes the model decoded in memory."""
    if kind != "llama-int4":
        path = KINDS[kind][0](folder)
        return path, lambda: dequantized(path, kind)
    path, products = compressed_folder(folder, INT4, "int32")

    def decoded() -> Any:
        model = tiny_model("llama", hidden_size=72)
        with torch.no_grad():
            for name, product in products.items():
                model.get_parameter(name).copy_(product)
        return model

    return path, decoded


def offloaded(
    folder: Path, path: Path, *, targets: Sequence[str] = ("q_proj", "v_proj"), **offload: Any
) -> hf_lohan.Trainer:
    torch.manual_seed(1)
    settings = {**BUDGETS, "ssd": str(folder / "store"), **offload}
    model = hf_lohan.from_pretrained(path, settings, torch_device="cpu", peft_config=lora(targets))
    return hf_lohan.Trainer(model, arguments(folder / "run", **SETTINGS), train_dataset=dataset())


def packed_names(engine: OffloadEngine) -> set[str]:
    return {part.name for block in engine.layout.blocks for part in block.packed_slices}


def stock(folder: Path, model: Any, targets: Sequence[str] = ("q_proj", "v_proj")) -> Trajectory:
    torch.manual_seed(1)
    model = peft.get_peft_model(model, lora(targets))
    return finish(transformers.Trainer(model, arguments(folder, **SETTINGS), train_dataset=dataset()))


@pytest.mark.parametrize(
    ("kind", "num_packed", "experts"),
    [
        ("llama-fp8", 3 * 7, ["with_layer"]),
        pytest.param("llama-int4", 3 * 7, ["with_layer"], marks=pytest.mark.slow),
        pytest.param("mixtral-fp8", 3 * 6, ["with_layer", "streamed"], marks=pytest.mark.slow),
        ("gpt_oss-mxfp4", 2 * 2, ["with_layer", "streamed"]),
    ],
)
def test_adapters_equal_those_over_the_decoded_base(
    kind: str, num_packed: int, experts: list[str], tmp_path: Path
) -> None:
    path, decoded = folder_of(kind, tmp_path / "quantized")
    expected = stock(tmp_path / "stock", decoded())
    for way in experts:
        trainer = offloaded(tmp_path / way, path, experts=way)
        engine = trainer.offload_engine
        assert len(packed_names(engine)) == num_packed
        assert bool(engine.layout.model_blocks.experts) == (way == "streamed")
        assert_same_bits(finish(trainer), expected)


def test_the_store_has_the_bytes_of_the_checkpoint(tmp_path: Path) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    path = fp8_folder(tmp_path / "quantized", tiny_model("llama", **shape), block=(128, 128))
    sizes = {}
    for quantize in ("none", "auto"):
        trainer = offloaded(tmp_path / quantize, path, quantize=quantize)
        layers = [block for block in trainer.offload_engine.layout.blocks if block.size_class.value == "layer"]
        sizes[quantize] = sum(block.fetched_bytes for block in layers)
        trainer.offload_engine.close()
    assert sizes["auto"] <= 0.27 * sizes["none"]


def test_a_run_resumes_over_a_base_that_stays_packed(tmp_path: Path) -> None:
    path = KINDS["mixtral-fp8"][0](tmp_path / "quantized")
    expected = finish(offloaded(tmp_path / "whole", path))
    broken = offloaded(tmp_path / "broken", path)
    broken.add_callback(InterruptAfter(2))
    interrupt(broken)
    again = offloaded(tmp_path / "broken", path)
    again.train(resume_from_checkpoint="last_step")
    assert_same_tensors(stored_weights(again), expected.weights)
    again.offload_engine.close()
    with pytest.raises(ForeignStoreError, match=r"with quantize: fp8, this run has none; .*or leave it out"):
        offloaded(tmp_path / "broken", path, quantize="none")


@pytest.mark.covering(0)
@pytest.mark.parametrize("kind", ["llama-fp8", "gpt_oss-mxfp4"])
def test_packed_originals_generate_as_decoded_ones(kind: str, tmp_path: Path) -> None:
    path = KINDS[kind][0](tmp_path / "quantized")
    prompt = tiny_batch(batch_size=1, sequence_length=6)["input_ids"]
    expected = dequantized(path, kind).eval().generate(prompt, max_new_tokens=5, do_sample=False)
    offload = {**BUDGETS, "ssd": str(tmp_path / "store")}
    for _ in range(2):  # the second takes the weights from the store
        model = hf_lohan.load_for_generation(path, offload, max_length=16, torch_device="cpu")
        engine = engine_of(model)
        assert engine is not None and packed_names(engine)
        assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), expected)
        engine.close()


def test_a_merged_model_is_saved_as_a_plain_folder(tmp_path: Path) -> None:
    path = KINDS["llama-fp8"][0](tmp_path / "quantized")
    trainer = offloaded(tmp_path, path)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapters"))
    trainer.model.merge_and_unload().save_pretrained(tmp_path / "merged")
    trainer.offload_engine.close()
    stock = peft.PeftModel.from_pretrained(dequantized(path, "llama-fp8"), tmp_path / "adapters").merge_and_unload()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not hasattr(merged.config, "quantization_config")
    for name, weight in stock.named_parameters():
        assert torch.equal(merged.get_parameter(name), weight), name


@pytest.mark.slow
def test_another_form_may_be_asked_for(tmp_path: Path) -> None:
    """NF4 of the decoded weights, as of a checkpoint that has them."""
    path = KINDS["llama-fp8"][0](tmp_path / "quantized")
    dequantized(path, "llama-fp8").save_pretrained(tmp_path / "decoded")
    found: list[dict[str, Tensor]] = []
    for folder in (path, tmp_path / "decoded"):
        trainer = offloaded(tmp_path / f"run-{folder.name}", folder, quantize="nf4")
        access = trainer.offload_engine.parameters
        found.append({name: access.read_parameter(name) for name in packed_names(trainer.offload_engine)})
        trainer.offload_engine.close()
    assert found[0] and all(torch.equal(found[1][name], weight) for name, weight in found[0].items())


@pytest.mark.covering(0)
@pytest.mark.parametrize("kind", ["mixtral-fp8", "gpt_oss-mxfp4"])
def test_a_plan_has_the_records_of_the_run(kind: str, tmp_path: Path) -> None:
    """With the files of the checkpoint, and with its config alone."""
    path = KINDS[kind][0](tmp_path / "quantized")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    every_linear = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    offload = {**BUDGETS, "ssd": str(tmp_path / "store")}
    model = hf_lohan.from_pretrained(path, offload, torch_device="cpu", peft_config=every_linear)
    engine = engine_of(model)
    assert engine is not None
    expected, names = engine.layout.identity, packed_names(engine)
    engine.close()
    request = PlanRequest(
        model=str(path), lora_rank=4, batch_size=1, sequence_length=16, hardware=str(DESKTOP), dtype="float32"
    )
    planned = plan_run(request)
    assert planned.layout.identity == expected
    for file in path.glob("*.safetensors*"):
        file.unlink()
    blocks = plan_run(request).layout.blocks
    assert {part.name for block in blocks for part in block.packed_slices} == names
    assert sum(part.codes_stop - part.codes_start for block in blocks for part in block.packed_slices) == sum(
        part.codes_stop - part.codes_start for block in planned.layout.blocks for part in block.packed_slices
    )


@pytest.mark.parametrize(
    ("settings", "num_packed"),
    [
        ({"quant_method": "mxfp8"}, 3 * 7),
        ({"quant_method": "compressed-tensors", "config_groups": None}, 0),
        ({"quant_method": "gptq", "bits": 4}, None),
        ({"quant_method": "compressed-tensors", "config_groups": {"w4a16": ["Linear"]}}, 3 * 7),
    ],
)
def test_a_config_without_files_is_planned_or_refused(
    settings: dict[str, Any], num_packed: int | None, tmp_path: Path
) -> None:
    config = tiny_model("llama").config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    request = PlanRequest(
        model=str(tmp_path), lora_rank=4, batch_size=1, sequence_length=16, hardware=str(DESKTOP), dtype="float32"
    )
    if num_packed is not None:
        blocks = plan_run(request).layout.blocks
        assert sum(len(block.packed_slices) for block in blocks) == num_packed
        return
    for rank in (4, None):
        with pytest.raises(ValueError, match="is quantized by gptq"):
            plan_run(replace(request, lora_rank=rank))


@pytest.mark.parametrize("has_files", [False, True])
def test_a_plan_of_weights_that_train_over_four_bits_is_refused_as_the_run_is(has_files: bool, tmp_path: Path) -> None:
    path = tmp_path / "quantized"
    model = tiny_model("llama")
    model.config.quantization_config = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    model.config.save_pretrained(path)
    if has_files:
        save_file(four_bit_tensors(model), path / "model.safetensors", metadata={"format": "pt"})
    settings = {"model": str(path), "batch_size": 1, "sequence_length": 16, "hardware": str(DESKTOP)}
    assert plan_run(PlanRequest(**settings, lora_rank=4, dtype="float32")).layout.packs
    with pytest.raises(ValueError, match="quantize: nf4 is for frozen weights, and no matrix") as of_plan:
        plan_run(PlanRequest(**settings, dtype="float32"))
    for quantize in ("none", "fp4"):
        with pytest.raises(ValueError, match=f"packed .*, and quantize: {quantize} was asked for; leave quantize out"):
            plan_run(PlanRequest(**settings, dtype="float32", quantize=quantize))
    if has_files:
        with pytest.raises(ValueError, match="quantize: nf4 is for frozen weights") as of_run:
            hf_lohan.from_pretrained(path, {**BUDGETS, "ssd": str(tmp_path / "store")}, torch_device="cpu")
        assert str(of_run.value) == str(of_plan.value)


def four_bit_tensors(model: Any) -> dict[str, Tensor]:
    """The tensors of a checkpoint as bitsandbytes saves it, without double quantization."""
    tensors: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        if not is_linear(name, weight):
            tensors[name] = weight.clone()
            continue
        codes, scales = encode(weight.flatten(), "nf4", 64)
        state = {"blocksize": 64, "shape": list(weight.shape), "dtype": "float32", "quant_type": "nf4"}
        tensors |= {name: codes.view(-1, 1), f"{name}.absmax": scales, f"{name}.quant_map": values_of("nf4").clone()}
        content = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        tensors[f"{name}.quant_state.bitsandbytes__nf4"] = content
    return tensors


@pytest.mark.covering(0)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_adapters_over_int8_equal_those_over_the_decoded_base(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "base")
    targets = ["c_attn"] if family == "gpt2" else ["q_proj", "v_proj"]
    trainer = offloaded(tmp_path, tmp_path / "base", targets=targets, quantize="int8")
    names = packed_names(trainer.offload_engine)
    assert take_decoded(model, trainer.offload_engine.parameters) == len(names) >= 2 * 4
    assert_same_bits(finish(trainer), stock(tmp_path / "stock", model, targets))


def test_an_int8_checkpoint_of_bitsandbytes_stays_as_it_is(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "base")
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config, device_map="cpu")
    packed.save_pretrained(tmp_path / "packed")
    file = tmp_path / "packed" / "model.safetensors"
    saved = load_file(file)
    with torch.no_grad():
        for name in [name for name, tensor in saved.items() if tensor.dtype == torch.int8]:
            scales = saved[name.removesuffix("weight") + "SCB"]
            model.get_parameter(name).copy_(functional.int8_vectorwise_dequant(saved[name], scales))
    trainer = offloaded(tmp_path, tmp_path / "packed")
    assert len(packed_names(trainer.offload_engine)) == 3 * 7
    assert_same_bits(finish(trainer), stock(tmp_path / "stock", model))
    name = "model.layers.1.mlp.up_proj.SCB"
    for message, damaged in {
        "has no .*up_proj.SCB": None,
        "SCB has shape": saved[name][:8],
        "up_proj.SCB in .* not finite": torch.full_like(saved[name], float("nan")),
    }.items():
        tensors = {key: tensor for key, tensor in {**saved, name: damaged}.items() if tensor is not None}
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            offloaded(tmp_path / "damaged", tmp_path / "packed")
        assert not (tmp_path / "damaged").exists()
    save_file({**saved, name.replace("SCB", "weight_format"): torch.tensor(2, dtype=torch.uint8)}, file)
    with pytest.raises(ValueError, match=r"up_proj\.weight has int8 codes in an order of an early bitsandbytes"):
        offloaded(tmp_path / "damaged", tmp_path / "packed")


@pytest.mark.slow
def test_an_int8_checkpoint_of_conv1d_is_turned_round(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    model = tiny_model("gpt2", num_layers=2)
    model.save_pretrained(tmp_path / "base")
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config, device_map="cpu")
    packed.save_pretrained(tmp_path / "packed")
    saved = load_file(tmp_path / "packed" / "model.safetensors")
    turned = [name for name, tensor in saved.items() if tensor.dtype == torch.int8]
    with torch.no_grad():
        for name in turned:
            decoded = functional.int8_vectorwise_dequant(saved[name], saved[name.removesuffix("weight") + "SCB"])
            model.get_parameter(name).copy_(decoded.t())
    trainer = offloaded(tmp_path, tmp_path / "packed", targets=["c_attn"])
    assert len(packed_names(trainer.offload_engine)) == len(turned) == 2 * 4
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    ours = Trajectory(*logged(trainer), stored_weights(trainer))
    trainer.offload_engine.close()
    assert_same_bits(ours, stock(tmp_path / "stock", copy.deepcopy(model), ["c_attn"]))
    merged = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter").merge_and_unload()
    hf_lohan.merge(tmp_path / "adapter", tmp_path / "packed", tmp_path / "merged")
    trained = hf_lohan.from_pretrained(
        tmp_path / "packed", {**BUDGETS, "ssd": str(tmp_path / "full")}, torch_device="cpu"
    )
    engine = engine_of(trained)
    assert engine is not None and not packed_names(engine)
    for name, found in AutoModelForCausalLM.from_pretrained(tmp_path / "merged").named_parameters():
        assert torch.equal(found, merged.get_parameter(name)), name
        assert torch.equal(engine.parameters.read_parameter(name), model.get_parameter(name)), name
    engine.close()
    without_head = hf_lohan.from_pretrained(
        tmp_path / "packed",
        {**BUDGETS, "ssd": str(tmp_path / "without head")},
        torch_device="cpu",
        model_class=transformers.AutoModel,
    )
    engine = engine_of(without_head)
    assert engine is not None
    for name, _ in without_head.named_parameters():
        assert torch.equal(engine.parameters.read_parameter(name), model.get_parameter(f"transformer.{name}")), name
    engine.close()
