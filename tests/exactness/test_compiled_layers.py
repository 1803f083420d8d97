"""Compiled layers train with the bits of torch's own compiled layers in memory, and each kind is compiled once."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.utils import TorchDynamoPlugin, compile_regions
from interrupted_runs import COMMIT_EACH_STEP, InterruptAfter, interrupt
from packed_bases import packed_and_decoded
from peft import LoraConfig, get_peft_model
from short_runs import short_arguments
from stored_weights import assert_stored
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import cpp_builder
from transformers import AutoConfig, AutoModelForCausalLM

import hf_lohan
from hf_lohan.config import OffloadConfig
from hf_lohan.costs import Placement, Quantization, SizeClass
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.attachment import offload_model
from hf_lohan.huggingface.compiling import check_compiling, compile_model
from hf_lohan.huggingface.offloaded_model import engine_of, run_plan_of
from hf_lohan.model.discovery import find_layers
from hf_lohan.model.packed_weights import packed_forms
from hf_lohan.optim import OffloadAdamW
from hf_lohan.testing.models import tiny_batch, tiny_model, tiny_rows

SMALL = {"cpu_memory": "64MiB", "gpu_memory": "16MiB"}
NUM_LAYERS = 3


@pytest.fixture(autouse=True)
def compiling_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget graphs of other tests, and what `TrainingArguments` tell accelerate by the environment."""
    for name in ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE"):
        monkeypatch.setenv(name, "no" if name.endswith("BACKEND") else "default")
    limit = torch._dynamo.config.recompile_limit
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = limit


def compiled_in_memory(model: nn.Module) -> nn.Module:
    """Compile a model by accelerate, except for embeddings and the head, whose compiled sums have no fixed order."""
    compiled = compile_regions(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or name.endswith("lm_head"):
            parent, _, own = name.rpartition(".")
            setattr(compiled.get_submodule(parent), own, module)
    return compiled


def model_of(family: str) -> Any:
    if family in ("llama", "gpt2", "mixtral", "qwen3_moe"):
        return tiny_model(family, num_layers=NUM_LAYERS)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": NUM_LAYERS, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8}
    tokens = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **heads, **tokens))


class MasterAdamW:
    """AdamW of torch over float32 copies of a model's weights."""

    def __init__(self, model: nn.Module) -> None:
        self._own = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._masters = [nn.Parameter(parameter.detach().float()) for parameter in self._own]
        self._adamw = torch.optim.AdamW(self._masters, lr=1e-3, fused=True)

    def step(self, max_norm: float) -> Tensor:
        for own, master in zip(self._own, self._masters, strict=True):
            master.grad, own.grad = None if own.grad is None else own.grad.float(), None
        norm = nn.utils.clip_grad_norm_(self._masters, max_norm)
        self._adamw.step()
        with torch.no_grad():
            for own, master in zip(self._own, self._masters, strict=True):
                own.copy_(master)
        return norm


def offload(model: Any, folder: Path, **settings: Any) -> OffloadEngine:
    config = OffloadConfig.load({"ssd": str(folder), **SMALL, **settings})
    engine = offload_model(model, config, torch_device="cpu", default_ssd_path=folder)
    compile_model(engine, run_plan_of(engine), TorchDynamoPlugin(backend="inductor"))
    return engine


def train(model: Any, step: Callable[[], Tensor], num_steps: int, lengths: list[int]) -> list[tuple[float, float]]:
    """Return loss and norm by step."""
    outcomes = []
    for number in range(num_steps):
        batch = tiny_batch(seed=number, sequence_length=lengths[number % len(lengths)])
        loss = model(**batch).loss
        loss.backward()
        outcomes.append((loss.item(), step().item()))
    return outcomes


def check_against_memory(
    stock: Any, ours: Any, folder: Path, lengths: tuple[int, ...] = (48,), num_steps: int = 8, **settings: Any
) -> OffloadEngine:
    masters = MasterAdamW(stock)
    expected = train(compiled_in_memory(stock), lambda: masters.step(1.0), num_steps, list(lengths))
    torch.compiler.reset()
    counters.clear()
    engine = offload(ours, folder, **settings)
    optimizer = OffloadAdamW([p for p in ours.parameters() if p.requires_grad], lr=1e-3, engine=engine)

    def step() -> Tensor:
        norm = engine.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    assert train(ours, step, num_steps, list(lengths)) == expected
    for name, parameter in stock.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(engine.parameters.read_parameter(name).to(parameter.dtype), parameter), name
    assert not counters["graph_break"]
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "mixtral", "qwen3_moe"])
def test_families_train_as_compiled_in_memory(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    models = [model_of(family).to(dtype).train() for _ in range(2)]
    settings = {"experts": "with_layer"} if family in ("mixtral", "qwen3_moe") else {}
    engine = check_against_memory(*models, tmp_path, **settings)
    # A layer, a norm, and positions that are computed; of GPT-2 a layer, a norm and dropout.
    print(f"{counters['stats']['unique_graphs']} graphs")
    assert counters["stats"]["unique_graphs"] <= 3
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_inputs_are_swapped(family: str, tmp_path: Path) -> None:
    models = [model_of(family).train() for _ in range(2)]
    engine = check_against_memory(*models, tmp_path, gpu_memory="520KiB", lengths=(120,))
    plan = run_plan_of(engine)
    assert plan is not None and plan.plan is not None
    placed = {of_layer["input"].value for of_layer in plan.plan.activations.values()}
    assert "cpu" in placed
    engine.close()


KEPT, SWAPPED, SPILLED, AGAIN = Placement.GPU, Placement.CPU, Placement.SSD, Placement.RECOMPUTE


def placed(engine: OffloadEngine, *places: Placement) -> None:
    """Place what each layer's graph saves, in place of the plan."""
    names = [block.name for block in engine.layout.blocks if block.size_class is SizeClass.LAYER]
    of_layers = {
        name: {"input": SWAPPED if place is AGAIN else place, "graph": place}
        for name, place in zip(names, places, strict=True)
    }
    follow = engine.activations.set_placements
    engine.activations.set_placements = lambda _planned: follow(of_layers)  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3_moe"])
def test_tensors_that_graphs_save_are_swapped(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """GPT-2 saves three views of one tensor."""
    models = [model_of(family).to(dtype).train() for _ in range(2)]
    settings = {"experts": "with_layer"} if family == "qwen3_moe" else {}
    engine = check_against_memory(*models, tmp_path, activations="swap", **settings)
    plan = run_plan_of(engine)
    assert plan is not None and plan.plan is not None
    assert all(of_layer["graph"] in (SWAPPED, SPILLED) for of_layer in plan.plan.activations.values())
    of_step = sum(engine.activations.graph_bytes.values())
    assert of_step > 0 and engine.activations.swapper.swapped_bytes > 8 * 0.95 * of_step
    assert counters["stats"]["unique_graphs"] <= 3
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_layers_have_places_of_their_own(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer is recomputed, one goes to the SSD, and one stays on the device. Batches have several lengths."""
    models = [model_of(family).train() for _ in range(2)]
    made = offload

    def offload_and_place(*args: Any, **settings: Any) -> OffloadEngine:
        engine = made(*args, **settings)
        placed(engine, AGAIN, SPILLED, KEPT)
        return engine

    monkeypatch.setitem(globals(), "offload", offload_and_place)
    engine = check_against_memory(*models, tmp_path, activations="swap", lengths=(16, 24, 40, 32, 20))
    assert len(engine.activations.graph_bytes) == 2
    assert engine.activations.swapper.swapped_bytes and counters["stats"]["unique_graphs"] <= 6
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["auto", "keep"])
def test_many_shapes_and_caches_are_compiled(activations: str, tmp_path: Path) -> None:
    """Lengths, rows, padding and evaluation count as other graphs, more than dynamo keeps by default. A config may ask
    for a cache in each forward."""
    models = [model_of("llama").train() for _ in range(2)]
    for model in models:
        model.config.use_cache = True
    stock, ours = models
    compiled = compiled_in_memory(stock)
    torch._dynamo.config.recompile_limit = 64
    engine = offload(ours, tmp_path, activations=activations)
    cases = [(2, 16), (2, 24), (0, 24), (1, 24), (4, 24), (1, 40), (0, 16)]
    for is_padded in (False, True):
        for rows, length in cases:
            batch = tiny_batch(batch_size=rows or 3, sequence_length=length)
            if is_padded:
                batch["attention_mask"][0, : length // 4] = 0
            with torch.set_grad_enabled(rows > 0):
                losses = [model(**batch, use_cache=use).loss for model, use in ((compiled, False), (ours, None))]
            assert torch.equal(*losses), (rows, length, is_padded)
            if rows:
                losses[1].backward()
                engine.drop_gradients()
    assert not counters["graph_break"]
    engine.close()


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("with_adapters", [False, True], ids=["plain", "adapters"])
def test_a_cache_by_default_is_not_taken_for_none(with_adapters: bool, activations: str, tmp_path: Path) -> None:
    """The next forward would train other numbers without the cache."""
    ours = tiny_model("llama", use_cache=True)
    if with_adapters:
        ours = get_peft_model(ours, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    engine = offload_model(
        ours.train(),
        OffloadConfig.load({"ssd": str(tmp_path), **SMALL, "activations": activations}),
        torch_device="cpu",
        default_ssd_path=tmp_path,
    )
    compile_model(engine, run_plan_of(engine), TorchDynamoPlugin(backend="eager"))
    ids = tiny_batch()["input_ids"]
    first = ours(input_ids=ids[:, :8])
    with pytest.raises(ValueError, match=r"no key-value cache.*with use_cache=True"):
        ours(input_ids=ids[:, 8:], past_key_values=first.past_key_values)
    asked = ours(input_ids=ids[:, :8], use_cache=True)
    assert asked.past_key_values.get_seq_length() == 8
    assert ours(input_ids=ids[:, :8], use_cache=False).past_key_values is None
    engine.close()


@pytest.mark.slow
def test_generation_is_eager(tmp_path: Path) -> None:
    """GPT-2 gets its cache by position."""
    ours = tiny_model("gpt2", num_layers=10)
    engine = offload(ours, tmp_path)
    ours.eval().generate(tiny_batch()["input_ids"], max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert counters["stats"]["unique_graphs"] <= 6  # the norm and dropout outside the layers, for three kinds of length
    engine.close()


@pytest.mark.slow
def test_adapters_over_a_packed_base(tmp_path: Path) -> None:
    def make() -> Any:
        torch.manual_seed(7)
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
        return get_peft_model(model_of("llama"), lora).train()

    stock, ours = make(), make()
    for parameter, form in packed_forms(stock, find_layers(stock), Quantization(method="nf4")).items():
        parameter.data = packed_and_decoded(parameter.detach(), form)
    engine = check_against_memory(stock, ours, tmp_path, quantize="nf4")
    engine.close()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_trainer_compiles_and_evaluates_as_the_stock_trainer(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both backends have the same graphs. The slow one also generates and compiles C++."""
    settings = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "torch_compile_backend": backend}
    data = {"train_dataset": tiny_rows(8), "eval_dataset": tiny_rows(4)}
    stock_model = tiny_model("llama", num_layers=2)
    ours = copy.deepcopy(stock_model)
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "1")
    args = short_arguments(tmp_path / "stock", **settings)
    stock = transformers.Trainer(stock_model, args, **data)
    stock.train()
    args = short_arguments(tmp_path / "ours", **settings)
    trainer = hf_lohan.Trainer(ours, args, offload=SMALL, **data)
    trainer.train()
    names = ("loss", "grad_norm", "eval_loss")
    logs = [[{name: row.get(name) for name in names} for row in t.state.log_history] for t in (stock, trainer)]
    assert logs[0] == logs[1]
    engine = engine_of(ours)
    assert engine is not None and len(engine.activations.compiled) == 2
    assert_stored(ours, stock_model)
    engine.close()


@pytest.mark.slow
def test_swapped_graphs_train_on_after_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches a step, and clipping. The interrupt comes between the micro-batches of the third step."""
    settings = {"max_steps": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "torch_compile": True}
    data = {"train_dataset": tiny_rows(16)}
    stock_model = tiny_model("gpt2", num_layers=2)
    models = [copy.deepcopy(stock_model) for _ in range(2)]
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "1")
    stock = transformers.Trainer(stock_model, short_arguments(tmp_path / "stock", **settings), **data)
    stock.train()
    folder, offload = tmp_path / "ours", {**COMMIT_EACH_STEP, "activations": "swap"}
    callbacks = [InterruptAfter(2)]
    first = hf_lohan.Trainer(
        models[0], short_arguments(folder, **settings), offload=offload, callbacks=callbacks, **data
    )
    interrupt(first)
    torch.compiler.reset()
    second = hf_lohan.Trainer(models[1], short_arguments(folder, **settings), offload=offload, **data)
    second.train(resume_from_checkpoint=True)
    engine = second.offload_engine
    logs = [[(row["loss"], row["grad_norm"]) for row in t.state.log_history if "loss" in row] for t in (stock, second)]
    assert logs[0] == logs[1]
    assert len(engine.activations.graph_bytes) == 2 and engine.activations.swapper.swapped_bytes
    assert_stored(second.model, stock_model)
    engine.close()


def test_a_run_that_continues_without_compiling_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = run_plan_of(offload(tiny_model("llama", num_layers=1), tmp_path / "a"))
    assert plan is not None
    config = OffloadConfig.load({"ssd": str(tmp_path / "b"), **SMALL})
    ours = tiny_model("llama", num_layers=1)
    engine = offload_model(ours, config, torch_device="cpu", default_ssd_path=tmp_path)
    eager = run_plan_of(engine)
    assert eager is not None
    eager.resume(plan.facts)
    ours(**tiny_batch())
    assert "this run continues a run with compiled layers" in caplog.text
    engine.close()


def test_experts_one_by_one_stay_eager(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hf_lohan.huggingface.compiling"):
        engine = offload(model_of("mixtral"), tmp_path, experts={"load": "streamed"})
    assert "torch.compile leaves 3 of 3 layers eager, because their experts run one by one" in caplog.text
    assert not engine.activations.compiled
    engine.close()


@pytest.mark.parametrize(
    ("plugin", "settings", "words"),
    [
        ({"backend": "inductor", "mode": "reduce-overhead"}, {}, "mode 'reduce-overhead' records CUDA graphs"),
        ({"backend": "inductor", "options": {"triton.cudagraphs": True}}, {}, "records CUDA graphs"),
        ({"backend": "tensorrt"}, {}, "torch.compile has no backend 'tensorrt' on this machine; use 'inductor'"),
        ({"backend": "inductor"}, {"chunks": {"layers": 64}}, "chunks.layers: 64 cuts layers .* set chunks.layers to"),
        ({"backend": "inductor"}, {"ranks": {"per_row": 2}}, "ranks.per_row: 2 divides the tokens of a layer"),
    ],
)
def test_what_cannot_be_compiled_is_refused(plugin: Any, settings: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_compiling(OffloadConfig.load(settings), torch.device("cpu"), TorchDynamoPlugin(**plugin))


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cpp_builder.cpp_compiler_search.cache_clear()
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    with pytest.raises(ValueError, match=r"a C\+\+ compiler is missing, and torch.compile needs it for"):
        check_compiling(OffloadConfig(), torch.device("cpu"), TorchDynamoPlugin(backend="inductor"))
