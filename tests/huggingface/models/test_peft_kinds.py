"""Every kind of PEFT adapter is trained, saved, merged, unmerged and unloaded as with a base in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import hf_lohan
from hf_lohan.huggingface.attachment import offload_model
from hf_lohan.optim import OffloadAdamW
from hf_lohan.testing.models import tiny_batch, tiny_model

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CAUSAL: dict[str, Any] = {"task_type": "CAUSAL_LM"}
TARGETS = ["q_proj", "up_proj"]
KINDS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, **CAUSAL),
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules=TARGETS, **CAUSAL),
    "pissa": lambda: peft.LoraConfig(r=4, init_lora_weights="pissa", target_modules=TARGETS, **CAUSAL),
    "embeddings": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], **CAUSAL),
    "head": lambda: peft.LoraConfig(r=4, target_modules=["lm_head"], **CAUSAL),
    "modules_to_save": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["lm_head"], **CAUSAL),
    "tokens": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, trainable_token_indices=[3, 7], **CAUSAL),
    "experts": lambda: peft.LoraConfig(r=4, target_parameters=["mlp.experts.gate_up_proj"], **CAUSAL),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **CAUSAL),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=TARGETS, **CAUSAL),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=8, target_modules=TARGETS, **CAUSAL),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["up_proj", "gate_proj"], **CAUSAL),
    "vblora": lambda: peft.VBLoRAConfig(
        r=4, num_vectors=16, vector_length=8, topk=2, target_modules=["q_proj"], **CAUSAL
    ),
    "layer norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"], **CAUSAL),
    "miss": lambda: peft.MissConfig(r=4, target_modules=TARGETS, **CAUSAL),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, **CAUSAL),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, **CAUSAL),
}
CANNOT_MERGE = ("prefix", "prompt")
OFFLOAD = hf_lohan.OffloadConfig.load({"cpu_memory": "5MiB", "gpu_memory": "1MiB"})


def adapted(kind: str) -> Any:
    torch.manual_seed(1)
    model = tiny_model("mixtral" if kind == "experts" else "llama", num_layers=2)
    return peft.get_peft_model(model, KINDS[kind]()).train()


def train(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    losses = []
    for seed in range(2):
        losses.append(model(**tiny_batch(seed=seed)).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach() for loss in losses]


def saved(model: Any, folder: Path) -> dict[str, Tensor]:
    model.save_pretrained(folder)
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@torch.no_grad()
def assert_computes_the_same(found: Any, expected: Any) -> None:
    assert torch.equal(*(model.eval()(**tiny_batch()).logits for model in (found, expected)))


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_equal_those_of_a_base_in_memory(kind: str, tmp_path: Path) -> None:
    stock, ours = adapted(kind), adapted(kind)
    engine = offload_model(ours, OFFLOAD, torch_device="cpu", default_ssd_path=tmp_path / "store")
    trainable = [[p for p in model.parameters() if p.requires_grad] for model in (stock, ours)]
    stock_losses = train(stock, torch.optim.AdamW(trainable[0], lr=1e-2, fused=True))
    assert train(ours, OffloadAdamW(trainable[1], lr=1e-2, engine=engine)) == stock_losses
    assert_same(saved(ours, tmp_path / "ours"), saved(stock, tmp_path / "stock"))
    if kind in CANNOT_MERGE:
        return
    for action in ("merge_adapter", "unmerge_adapter"):
        for model in (stock, ours):
            getattr(model, action)()
        assert_computes_the_same(ours, stock)
    bases = [model.merge_and_unload() for model in (ours, stock)]
    assert_computes_the_same(*bases)
    assert_same(saved(bases[0], tmp_path / "our base"), saved(bases[1], tmp_path / "stock base"))
    engine.close()


def test_several_adapters_train_one_by_one_and_are_saved(tmp_path: Path) -> None:
    def two() -> Any:
        model = adapted("lora")
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj"], **CAUSAL))
        model.set_adapter("second")
        return model

    stock, ours = two(), two()
    engine = offload_model(ours, OFFLOAD, torch_device="cpu", default_ssd_path=tmp_path / "store")
    trainable = [[p for p in model.parameters() if p.requires_grad] for model in (stock, ours)]
    losses = train(stock, torch.optim.AdamW(trainable[0], lr=1e-2, fused=True))
    assert train(ours, OffloadAdamW(trainable[1], lr=1e-2, engine=engine)) == losses
    assert_same(saved(ours, tmp_path / "ours"), saved(stock, tmp_path / "stock"))
    assert_same(saved(ours, tmp_path / "ours"), load_file(tmp_path / "stock" / "adapter_model.safetensors"))
    second = [load_file(tmp_path / whose / "second" / "adapter_model.safetensors") for whose in ("ours", "stock")]
    assert_same(*second)
    with ours.disable_adapter(), stock.disable_adapter():
        assert_computes_the_same(ours, stock)
    engine.close()


@pytest.mark.parametrize("kind", ["lora", "dora", "modules_to_save", "embeddings", "vera"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_streamed_base_gets_its_adapters_while_it_loads(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tiny_model("llama", num_layers=2).to(dtype).save_pretrained(tmp_path / "base")
    torch.manual_seed(1)
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto")
    torch.manual_seed(7)
    stock = peft.get_peft_model(stock, KINDS[kind]()).train()
    torch.manual_seed(7)
    ours = hf_lohan.from_pretrained(
        tmp_path / "base", OFFLOAD, torch_device="cpu", default_ssd_path=tmp_path / "store", peft_config=KINDS[kind]()
    ).train()
    engine = hf_lohan.engine_of(ours)
    assert engine is not None
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in stock.named_parameters()]
    for name, parameter in stock.named_parameters():
        assert torch.equal(ours.get_parameter(name).clone(), parameter), name
        assert ours.get_parameter(name).requires_grad == parameter.requires_grad
    trainable = [[p for p in model.parameters() if p.requires_grad] for model in (stock, ours)]
    losses = train(stock, torch.optim.AdamW(trainable[0], lr=1e-2, fused=True))
    assert train(ours, OffloadAdamW(trainable[1], lr=1e-2, engine=engine)) == losses
    engine.close()


def test_an_initialization_that_changes_a_streamed_base_is_refused(tmp_path: Path) -> None:
    tiny_model("llama", num_layers=2).save_pretrained(tmp_path / "base")
    with pytest.raises(RuntimeError, match="before the model is offloaded"):
        hf_lohan.from_pretrained(
            tmp_path / "base", OFFLOAD, default_ssd_path=tmp_path / "store", peft_config=KINDS["pissa"]()
        )
