"""Every kind of PEFT adapter is trained, saved, merged, unmerged and unloaded as with a base in memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantized_folders
import torch
from covering import slow_but
from equal_tensors import assert_same_tensors, tensors_in
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from typer.testing import CliRunner

import hf_lohan
from hf_lohan.cli.application import app
from hf_lohan.huggingface.attachment import offload_model
from hf_lohan.huggingface.models import merging
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
    return tensors_in(folder)


@torch.no_grad()
def assert_computes_the_same(found: Any, expected: Any) -> None:
    assert torch.equal(*(model.eval()(**tiny_batch()).logits for model in (found, expected)))


QUICK = ("lora", "modules_to_save", "tokens", "experts", "vera", "prompt")


@pytest.mark.parametrize("kind", slow_but(QUICK, KINDS))
def test_adapters_equal_those_of_a_base_in_memory(kind: str, tmp_path: Path) -> None:
    stock, ours = adapted(kind), adapted(kind)
    engine = offload_model(ours, OFFLOAD, torch_device="cpu", default_ssd_path=tmp_path / "store")
    trainable = [[p for p in model.parameters() if p.requires_grad] for model in (stock, ours)]
    stock_losses = train(stock, torch.optim.AdamW(trainable[0], lr=1e-2, fused=True))
    assert train(ours, OffloadAdamW(trainable[1], lr=1e-2, engine=engine)) == stock_losses
    assert_same_tensors(saved(ours, tmp_path / "ours"), saved(stock, tmp_path / "stock"))
    if kind in CANNOT_MERGE:
        return
    for action in ("merge_adapter", "unmerge_adapter"):
        for model in (stock, ours):
            getattr(model, action)()
        assert_computes_the_same(ours, stock)
    bases = [model.merge_and_unload() for model in (ours, stock)]
    assert_computes_the_same(*bases)
    assert_same_tensors(saved(bases[0], tmp_path / "our base"), saved(bases[1], tmp_path / "stock base"))
    engine.close()


def test_a_given_state_dict_of_adapters_is_saved(tmp_path: Path) -> None:
    stock, ours = adapted("modules_to_save"), adapted("modules_to_save")
    engine = offload_model(ours, OFFLOAD, torch_device="cpu", default_ssd_path=tmp_path / "store")
    averages = {name: tensor * 0.5 for name, tensor in stock.state_dict().items()}
    kept = {name: tensor for name, tensor in stock.state_dict().items() if "lora_A" in name}
    placeholders = {name: tensor for name, tensor in ours.state_dict().items() if name in kept}
    stock.save_pretrained(tmp_path / "stock", state_dict={**averages, **kept})
    ours.save_pretrained(tmp_path / "ours", state_dict={**averages, **placeholders})
    files = [load_file(tmp_path / whose / "adapter_model.safetensors") for whose in ("ours", "stock")]
    assert_same_tensors(*files)
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
    assert_same_tensors(saved(ours, tmp_path / "ours"), saved(stock, tmp_path / "stock"))
    assert_same_tensors(saved(ours, tmp_path / "ours"), load_file(tmp_path / "stock" / "adapter_model.safetensors"))
    second = [load_file(tmp_path / whose / "second" / "adapter_model.safetensors") for whose in ("ours", "stock")]
    assert_same_tensors(*second)
    with ours.disable_adapter(), stock.disable_adapter():
        assert_computes_the_same(ours, stock)
    engine.close()


@pytest.mark.covering(0)
@pytest.mark.parametrize("kind", ["lora", "dora", "modules_to_save", "embeddings", "vera"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_streamed_base_gets_its_adapters_while_it_loads(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tiny_model("llama", num_layers=2).to(dtype).save_pretrained(tmp_path / "base")
    torch.manual_seed(1)
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


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "OLoRA", "corda", "loftq", "lora_ga"])
def test_an_initialization_that_changes_a_streamed_base_is_refused(init: str, tmp_path: Path) -> None:
    tiny_model("llama", num_layers=2).save_pretrained(tmp_path / "base")
    config = KINDS["lora"]()
    config.init_lora_weights = init
    with pytest.raises(ValueError, match=rf"^peft_config has init_lora_weights='{init}'.*make the adapters in memory"):
        hf_lohan.from_pretrained(tmp_path / "base", OFFLOAD, default_ssd_path=tmp_path / "store", peft_config=config)
    assert not (tmp_path / "store").exists()


def test_adapters_and_finish_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^peft_config and finish are both given; add the adapters in finish alone$"):
        hf_lohan.from_pretrained(tmp_path, OFFLOAD, peft_config=KINDS["lora"](), finish=lambda model: model)


def test_adapters_that_need_the_values_of_a_streamed_base_are_refused(tmp_path: Path) -> None:
    tiny_model("llama", num_layers=2).save_pretrained(tmp_path / "base")
    config = peft.BOFTConfig(boft_block_size=4, target_modules=TARGETS, **CAUSAL)
    with pytest.raises(ValueError, match=r"^the adapters of BOFTConfig cannot be made for a base that streams"):
        hf_lohan.from_pretrained(tmp_path / "base", OFFLOAD, default_ssd_path=tmp_path / "store", peft_config=config)
    assert not (tmp_path / "store").exists()


def test_projections_of_vera_that_a_model_does_not_have_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT before 0.21 makes them anew from their seed, and calls those in the file unexpected."""
    base = save_base(tmp_path / "base", "llama", torch.float32)
    adapter = save_adapter(tmp_path / "adapter", base, KINDS["vera"]())
    load_adapter = peft.PeftModel.load_adapter

    def as_before(model: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = load_adapter(model, *args, **kwargs)
        loaded.unexpected_keys[:] = ["base_model.vera_A", "base_model.vera_B"]
        if changes:
            for name, buffer in model.named_buffers():
                buffer.add_(1.0 if ".vera_B." in name else 0.0)
        return loaded

    monkeypatch.setattr(peft.PeftModel, "load_adapter", as_before)
    changes = False
    hf_lohan.merge(adapter, base, tmp_path / "merged")
    stock = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).merge_and_unload()
    assert_same_tensors(load_file(tmp_path / "merged" / "model.safetensors"), saved(stock, tmp_path / "expected"))
    changes = True
    with pytest.raises(ValueError, match=r"trained over a different model than .*: it also has base_model\.vera_B"):
        hf_lohan.merge(adapter, base, tmp_path / "other")


# Saved adapters, merged into a checkpoint.

ADAPTERS: dict[str, tuple[str, torch.dtype, Callable[[], Any]]] = {
    **{kind: ("mixtral" if kind == "experts" else "llama", torch.float32, KINDS[kind]) for kind in KINDS},
    "bfloat16": ("llama", torch.bfloat16, KINDS["dora"]),
    "float16": ("llama", torch.float16, KINDS["lora"]),
    "rslora": (
        *("llama", torch.bfloat16),
        lambda: peft.LoraConfig(r=4, use_rslora=True, target_modules="all-linear", **CAUSAL),
    ),
    "tied Conv1D": (
        *("gpt2", torch.float32),
        lambda: peft.LoraConfig(r=4, fan_in_fan_out=True, target_modules=["c_attn", "c_fc", "wte"], **CAUSAL),
    ),
    "tied head": ("gpt2", torch.bfloat16, lambda: peft.LoraConfig(r=4, target_modules=["lm_head"], **CAUSAL)),
    "tied head, saved": (
        *("gpt2", torch.bfloat16),
        lambda: peft.LoraConfig(
            r=4, fan_in_fan_out=True, target_modules=["c_fc"], modules_to_save=["lm_head"], **CAUSAL
        ),
    ),
    "all experts": (
        *("mixtral", torch.bfloat16),
        lambda: peft.LoraConfig(
            r=4,
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            **CAUSAL,
        ),
    ),
    "biases": ("gpt2", torch.float32, lambda: peft.LoraConfig(r=4, lora_bias=True, target_modules=["c_fc"], **CAUSAL)),
}


def save_base(folder: Path, family: str, dtype: torch.dtype, *, seed: int = 0, **settings: Any) -> Path:
    model = tiny_model(family, seed=seed, num_layers=2, **settings)
    model.to(dtype).save_pretrained(folder)
    return folder


def save_adapter(folder: Path, base: Path, config: Any) -> Path:
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder)
    return folder


MERGED_QUICKLY = ("lora", "dora", "experts", "rslora", "tied Conv1D", "tied head, saved", "all experts", "biases")
"""Low rank, experts, tied and saved heads, types and biases, one of each. PEFT merges the layers of the others."""


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    "kind", slow_but(MERGED_QUICKLY, [kind for kind in ADAPTERS if kind not in (*CANNOT_MERGE, "pissa")])
)
def test_a_saved_adapter_is_merged_into_another_base(kind: str, tmp_path: Path) -> None:
    family, dtype, make_config = ADAPTERS[kind]
    adapter = save_adapter(tmp_path / "adapter", save_base(tmp_path / "trained", family, dtype), make_config())
    base = save_base(tmp_path / "base", family, dtype, seed=1)
    stock = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).merge_and_unload()
    expected = saved(stock, tmp_path / "expected")
    hf_lohan.merge(adapter, base, tmp_path / "merged")
    files = sorted((tmp_path / "expected").iterdir())
    assert [file.name for file in sorted((tmp_path / "merged").iterdir())] == [file.name for file in files]
    for file in files:
        if file.suffix == ".json":
            assert (tmp_path / "merged" / file.name).read_text() == file.read_text()
    assert_same_tensors(load_file(tmp_path / "merged" / "model.safetensors"), expected)
    before = load_file(base / "model.safetensors")
    assert any(not torch.equal(before[name], tensor) for name, tensor in expected.items() if name in before)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama-fp8", torch.float32), ("llama-fp8", torch.bfloat16), ("gpt_oss-mxfp4", torch.float32)]
)
def test_an_adapter_is_merged_into_a_quantized_original(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The base is decoded, a weight at a time, and the saved model is plain, in the dtype of the base's config."""
    base = quantized_folders.KINDS[kind][0](tmp_path / "base")
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**settings, "dtype": str(dtype).removeprefix("torch.")}))
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **CAUSAL)
    stock = peft.get_peft_model(quantized_folders.dequantized(base, kind, dtype), config)
    stock.save_pretrained(tmp_path / "adapter")
    stock = peft.PeftModel.from_pretrained(quantized_folders.dequantized(base, kind, dtype), tmp_path / "adapter")
    expected = stock.merge_and_unload().state_dict()
    hf_lohan.merge(tmp_path / "adapter", base, tmp_path / "merged")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert not hasattr(found.config, "quantization_config") and found.dtype == dtype
    assert_same_tensors(found.state_dict(), expected)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LoRA over the base of `save_base("llama")`, with the files of a tokenizer."""
    folder = tmp_path_factory.mktemp("adapters")
    save_adapter(folder / "adapter", save_base(folder / "base", "llama", torch.float32), KINDS["lora"]())
    (folder / "adapter" / "tokenizer_config.json").write_text("{}")
    return folder / "adapter"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"hidden_size": 48, "num_attention_heads": 4},
            "whose shapes differ from .*: size mismatch for .*q_proj.lora_A",
        ),
        ({"num_hidden_layers": 1}, "over a different model than .*: it also has .*layers.1"),
        ({"num_hidden_layers": 3}, "over a different model than .*: it does not have .*layers.2"),
    ],
)
def test_a_base_of_other_shapes_is_refused(settings: Any, message: str, adapter: Path, tmp_path: Path) -> None:
    config = {"num_layers": 2, **settings}
    config.update({"num_layers": config.pop("num_hidden_layers")} if "num_hidden_layers" in config else {})
    tiny_model("llama", **config).save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match=message):
        hf_lohan.merge(adapter, tmp_path / "base", tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_damaged_files_of_adapter_and_base_are_named(adapter: Path, tmp_path: Path) -> None:
    for folder, name in ((adapter, "adapter_model.safetensors"), (adapter.parent / "base", "model.safetensors")):
        damaged = shutil.copytree(folder, tmp_path / folder.name)
        (damaged / name).write_bytes((folder / name).read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"weights of the adapter '.*adapter' are damaged \(.*\); save or download it"):
        hf_lohan.merge(tmp_path / "adapter", adapter.parent / "base", tmp_path / "merged")
    with pytest.raises(ValueError, match=r"base/model.safetensors' is missing or damaged \(.*\); download it again"):
        hf_lohan.merge(adapter, tmp_path / "base", tmp_path / "merged")


def test_what_cannot_be_merged_is_refused(adapter: Path, tmp_path: Path) -> None:
    base = adapter.parent / "base"
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        hf_lohan.merge(adapter, base, base)
    with pytest.raises(ValueError, match="quantization_config=BitsAndBytesConfig was given"):
        hf_lohan.merge(adapter, base, tmp_path / "merged", quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    for placement in ({"device_map": "auto"}, {"max_memory": {0: "1GiB"}}):
        with pytest.raises(ValueError, match=rf"^{next(iter(placement))}=.* one weight at a time; leave it out$"):
            hf_lohan.merge(adapter, base, tmp_path / "merged", **placement)
    with pytest.raises(ValueError, match=r"has no adapter_config\.json"):
        hf_lohan.merge(base, base, tmp_path / "merged")
    with pytest.raises(ValueError, match="is not a checkpoint folder"):
        hf_lohan.merge(adapter, tmp_path / "no" / "base", tmp_path / "merged")
    with pytest.raises(ValueError, match="is not a folder with an adapter"):
        hf_lohan.merge(tmp_path / "no" / "adapter", base, tmp_path / "merged")
    save_adapter(tmp_path / "prompt", base, KINDS["prompt"]())
    with pytest.raises(ValueError, match="is of type PROMPT_TUNING, which has no weights to merge"):
        hf_lohan.merge(tmp_path / "prompt", base, tmp_path / "merged")
    save_adapter(tmp_path / "pissa", base, KINDS["pissa"]())
    with pytest.raises(ValueError, match=r"changes its base when it is loaded \(init_lora_weights='pissa'\)"):
        hf_lohan.merge(tmp_path / "pissa", base, tmp_path / "merged")
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    shutil.copytree(base, tmp_path / "packed")
    file = tmp_path / "packed" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    with pytest.raises(ValueError, match="bitsandbytes"):
        hf_lohan.merge(adapter, tmp_path / "packed", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_failed_merge_leaves_nothing(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: Any) -> None:
        raise OSError("a full disk")

    monkeypatch.setattr(merging, "_copy_tokenizer", fail)
    with pytest.raises(OSError, match="a full disk"):
        hf_lohan.merge(adapter, adapter.parent / "base", tmp_path / "merged")
    assert not list(tmp_path.iterdir())


def test_the_command_merges(adapter: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["merge", str(adapter), str(adapter.parent / "base"), str(tmp_path / "merged")])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == f"wrote {tmp_path / 'merged'}"
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json"}
