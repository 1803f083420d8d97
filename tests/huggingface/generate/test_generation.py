"""A model that generates from the store gives the tokens that it gives in memory, and its weights are stored once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import model_of
from covering import slow_but
from python_runs import TWO_RANKS, run_python
from torch import Tensor
from training_ranks import rank_engine
from transformers import AutoConfig, AutoModelForCausalLM

import hf_lohan
from hf_lohan import engine_of
from hf_lohan.costs import SizeClass, cuts
from hf_lohan.device import num_gpus
from hf_lohan.experts.expert_schedule import Trust
from hf_lohan.huggingface.generate import generation, text_generation
from hf_lohan.huggingface.models import recipe
from hf_lohan.huggingface.models.recipe import ModelRecipe, weightless_model
from hf_lohan.huggingface.ranks import generate_together
from hf_lohan.planning import bytes_per_token
from hf_lohan.ranks import Links, RanksDisagreeError
from hf_lohan.testing.models import tiny_batch, tiny_model
from hf_lohan.testing.thread_ranks import rank_outcomes, run_ranks
from hf_lohan.timeline import SSD_READ

NUM_LAYERS = 6
PROMPT = torch.arange(3, 13).view(2, 5)
GREEDY = {"do_sample": False, "max_new_tokens": 9}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "max_new_tokens": 9}
BEAMS = {"do_sample": False, "num_beams": 3, "max_new_tokens": 9}
DEPTH = {"gpt2": "n_layer"}
BUDGETS = {
    "llama": "330KiB",
    "opt": "850KiB",
    "gpt2": "470KiB",
    "qwen2_tied": "290KiB",
    "mixtral": "840KiB",
    "qwen3_moe": "330KiB",
}
"""Memory for keys and values, the modules outside the layers and four of six layers."""


@pytest.fixture
def checkpoint_of(tmp_path: Path) -> Callable[[str], Path]:
    def make(architecture: str) -> Path:
        torch.manual_seed(0)
        folder = tmp_path / architecture
        model_of(architecture, **{DEPTH.get(architecture, "num_hidden_layers"): NUM_LAYERS}).save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    models = []

    def open_model(checkpoint: Path, **options: Any) -> Any:
        settings = {
            "cpu_memory": "4MiB",
            "gpu_memory": BUDGETS[checkpoint.name],
            "ssd": str(tmp_path / "store"),
            "cpu_threads": torch.get_num_threads(),  # other thread counts change the order of sums
            **options.pop("settings", {}),
        }
        model = hf_lohan.load_for_generation(
            checkpoint, settings, torch_device="cpu", **{"max_length": 14, "num_sequences": 6, **options}
        )
        models.append(model)
        return model

    yield open_model
    for model in models:
        engine_of(model).close()


def generated(model: Any, settings: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    return model.generate(
        PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        pad_token_id=0,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
        **settings,
    )


@pytest.mark.parametrize("architecture", slow_but(("llama", "gpt2", "mixtral"), BUDGETS))
def test_tokens_and_logits_equal_those_in_memory(
    architecture: str, checkpoint_of: Callable[[str], Path], load: Callable[..., Any]
) -> None:
    checkpoint = checkpoint_of(architecture)
    stock = AutoModelForCausalLM.from_pretrained(checkpoint)
    for ways in ((GREEDY, BEAMS), (SAMPLED,)):  # the second load uses the store and not the checkpoint
        model = load(checkpoint, settings={"_resident_records": "none"})
        engine = engine_of(model)
        assert len(engine.layout.kept_layers) == 1 and bytes_per_token(engine.layout) > 0
        for settings in ways:
            ours, stocks = generated(model, settings), generated(stock, settings)
            assert torch.equal(ours.sequences, stocks.sequences)
            for mine, others in zip(ours.logits, stocks.logits, strict=True):
                assert torch.equal(mine, others)
        engine.close()


def test_rows_of_embeddings_generate_the_same(checkpoint_of: Callable[[str], Path], load: Callable[..., Any]) -> None:
    checkpoint = checkpoint_of("llama")
    expected = generated(AutoModelForCausalLM.from_pretrained(checkpoint), GREEDY).sequences
    engine = engine_of(model := load(checkpoint, settings={"embedding": "rows", "_resident_records": "none"}))
    assert torch.equal(generated(model, GREEDY).sequences, expected)
    assert engine.embedding_rows is not None
    of_prompt, of_token = 10, 2
    assert engine.embedding_rows.num_bytes <= (of_prompt + 8 * of_token) * model.config.hidden_size * 4


def test_the_store_is_used_again_if_the_checkpoint_is_unchanged(
    checkpoint_of: Callable[[str], Path], load: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoint_of("llama")
    streamed: list[ModelRecipe] = []
    stream = ModelRecipe.stream

    def noted(of_checkpoint: ModelRecipe, *args: Any, **kwargs: Any) -> Any:
        streamed.append(of_checkpoint)
        return stream(of_checkpoint, *args, **kwargs)

    monkeypatch.setattr(ModelRecipe, "stream", noted)
    first = load(checkpoint)
    records = (tmp_path / "store").glob("*.bin")
    param_bytes = sum(block.param_bytes for block in engine_of(first).layout.blocks)
    assert sum(file.stat().st_size for file in records) == param_bytes
    expected = generated(first, GREEDY).sequences
    engine_of(first).close()
    again = load(checkpoint, settings={"gpu_memory": "400KiB"})  # other budgets, same store
    assert torch.equal(generated(again, GREEDY).sequences, expected)
    assert len(streamed) == 1
    engine_of(again).close()

    torch.manual_seed(7)
    model_of("llama", num_hidden_layers=NUM_LAYERS).save_pretrained(checkpoint)
    other = load(checkpoint)
    assert len(streamed) == 2
    stock = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert torch.equal(generated(other, GREEDY).sequences, generated(stock, GREEDY).sequences)


def test_an_interrupted_load_is_repeated(
    checkpoint_of: Callable[[str], Path], load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoint_of("llama")
    expected = generated(AutoModelForCausalLM.from_pretrained(checkpoint), GREEDY).sequences
    for _ in range(2):  # without a store, and with a store of changed files
        with monkeypatch.context() as patch:
            patch.setattr(recipe, "store_the_rest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                load(checkpoint)
        model = load(checkpoint)
        assert torch.equal(generated(model, GREEDY).sequences, expected)
        engine_of(model).close()
        (checkpoint / "model.safetensors").touch()


def test_records_in_ram_are_read_once(checkpoint_of: Callable[[str], Path], load: Callable[..., Any]) -> None:
    model = load(checkpoint_of("llama"))
    engine = engine_of(model)
    assert engine.layout.resident_records and bytes_per_token(engine.layout) == 0

    def read_bytes() -> int:
        return engine.timeline.totals()[SSD_READ].num_bytes

    before = read_bytes()
    generated(model, GREEDY)
    param_bytes = sum(block.param_bytes for block in engine.layout.blocks)
    after = read_bytes()
    assert after - before == param_bytes
    generated(model, GREEDY)
    assert read_bytes() == after


@pytest.mark.covering(0)
@pytest.mark.parametrize("kept", [0, 1, 3, 6])
def test_a_token_reads_only_layers_that_do_not_stay(
    kept: int, checkpoint_of: Callable[[str], Path], load: Callable[..., Any]
) -> None:
    layer_kib = 40
    gpu_memory = f"{330 + (kept - 1) * layer_kib}KiB"
    model = load(checkpoint_of("llama"), settings={"_resident_records": "none", "gpu_memory": gpu_memory})
    engine = engine_of(model)
    num_streamed = 0 if kept >= NUM_LAYERS - 3 else NUM_LAYERS - kept
    assert bytes_per_token(engine.layout) == num_streamed * layer_kib * 1024
    generated(model, GREEDY)
    before = engine.timeline.totals()[SSD_READ].num_bytes
    num_tokens = 40
    for _ in range(4):
        generated(model, GREEDY | {"max_new_tokens": 9 + 1})
    per_token = (engine.timeline.totals()[SSD_READ].num_bytes - before) / num_tokens
    # The last prefetch may add reads. If loads are late, the ring may still have two layers.
    more_layers = (per_token - bytes_per_token(engine.layout)) / (layer_kib * 1024)
    assert -2 <= more_layers <= 3 / num_tokens and (num_streamed or not per_token)
    assert engine.peak_gpu_pool_bytes <= engine.config.gpu_memory


def test_a_forward_with_gradients_is_refused(checkpoint_of: Callable[[str], Path], load: Callable[..., Any]) -> None:
    model = load(checkpoint_of("llama"))
    with pytest.raises(RuntimeError, match=r"torch\.no_grad\(\), or load it with hf_lohan\.from_pretrained to train"):
        model(input_ids=PROMPT)
    with torch.no_grad():
        assert model(input_ids=PROMPT).logits.shape == (2, 5, 300)


def test_more_tokens_than_fit_are_refused_before_they_are_generated(
    checkpoint_of: Callable[[str], Path], load: Callable[..., Any]
) -> None:
    model = load(checkpoint_of("llama"), num_sequences=2)
    refused = r"2 sequences of 15 tokens, and gpu_memory has room for 2 of 14; .*max_length=15, num_sequences=2"
    with pytest.raises(RuntimeError, match=refused):
        generated(model, GREEDY | {"max_new_tokens": 11})
    with pytest.raises(RuntimeError, match=r"num_sequences=8\)$"):
        generated(model, BEAMS | {"num_beams": 4})
    assert generated(model, GREEDY).sequences.shape == (2, 14)
    with torch.no_grad():  # without a cache nothing is kept
        assert model(PROMPT.repeat(4, 5), use_cache=False).logits.shape == (8, 25, 300)


def test_keys_and_values_that_do_not_fit_are_refused_with_numbers(
    checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = checkpoint_of("llama")
    settings = {"cpu_memory": "4MiB", "gpu_memory": "1MiB", "ssd": str(tmp_path / "store")}
    with pytest.raises(ValueError, match=r"keys and values of 2 sequences of 5,000 tokens \(.* MiB\); set gpu_memory"):
        hf_lohan.load_for_generation(checkpoint, settings, max_length=5000, num_sequences=2, torch_device="cpu")
    assert not (tmp_path / "store").exists()


def test_a_model_whose_forward_reads_its_token_ids_generates(tmp_path: Path) -> None:
    """With a pad token GPT-2 looks for it in the ids, to warn of a missing mask."""
    torch.manual_seed(0)
    stock = tiny_model("gpt2", pad_token_id=0)
    stock.save_pretrained(tmp_path / "model")
    settings = {"cpu_memory": "24MiB", "gpu_memory": "16MiB", "ssd": str(tmp_path / "store")}
    model = hf_lohan.load_for_generation(
        tmp_path / "model", settings, max_length=20, num_sequences=2, torch_device="cpu"
    )
    assert torch.equal(model.generate(PROMPT, **GREEDY), stock.eval().generate(PROMPT, **GREEDY))
    engine_of(model).close()


def test_entries_of_the_config_are_overridden(tmp_path: Path) -> None:
    """Also when a later call finds the weights in the store."""
    torch.manual_seed(0)
    tiny_model("llama").save_pretrained(tmp_path / "model")
    overrides = {"rms_norm_eps": 0.1, "attn_implementation": "eager", "max_position_embeddings": 32}
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **overrides)
    settings = {"cpu_memory": "24MiB", "gpu_memory": "16MiB", "ssd": str(tmp_path / "store")}
    for _ in range(2):
        model = hf_lohan.load_for_generation(
            tmp_path / "model", settings, max_length=20, num_sequences=2, torch_device="cpu", **overrides
        )
        assert model.config._attn_implementation == "eager" and model.config.max_position_embeddings == 32
        assert torch.equal(model.generate(PROMPT, **GREEDY), stock.generate(PROMPT, **GREEDY))
        engine_of(model).close()


@pytest.mark.parametrize("kind", ["biogpt", "gpt2", "mistral", "openai-gpt"])
def test_keys_and_values_are_those_of_a_real_forward(kind: str) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {**heads, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    config = AutoConfig.for_model(kind, **sizes, vocab_size=64, pad_token_id=0)
    counted = generation.keys_and_values(partial(weightless_model, config, torch.float32), torch.float32, 2, 9)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        cache = model(torch.zeros(2, 9, dtype=torch.long), use_cache=True).get("past_key_values")
    layers = [2 * layer.keys.nbytes for layer in cache.layers] if cache is not None else [0]
    assert counted.num_bytes >= sum(layers) + layers[0]
    assert counted.num_bytes <= sum(layers) + layers[0] + 100


@pytest.mark.covering(1)
@pytest.mark.parametrize("believes_routers", [False, True])
@pytest.mark.parametrize(("architecture", "gpu_memory"), [("mixtral", "600KiB"), ("qwen3_moe", "330KiB")])
def test_streamed_experts_give_the_same_tokens(
    architecture: str,
    gpu_memory: str,
    believes_routers: bool,
    checkpoint_of: Callable[[str], Path],
    load: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Trust, "is_in_router", believes_routers)
    checkpoint = checkpoint_of(architecture)
    stock = AutoModelForCausalLM.from_pretrained(checkpoint)
    model = load(checkpoint, settings={"_resident_records": "none", "experts": "streamed", "gpu_memory": gpu_memory})
    engine = engine_of(model)
    num_experts = sum(block.size_class is SizeClass.EXPERT for block in engine.layout.blocks)
    assert engine.layout.plan.num_slots[SizeClass.EXPERT] < num_experts == 4 * NUM_LAYERS
    for settings in (GREEDY, SAMPLED, BEAMS):
        ours, stocks = generated(model, settings), generated(stock, settings)
        assert torch.equal(ours.sequences, stocks.sequences)
        for mine, others in zip(ours.logits, stocks.logits, strict=True):
            assert torch.equal(mine, others)


@pytest.mark.parametrize(("num_sequences", "streams"), [(1, True), (2, False)])
def test_experts_stream_if_a_pass_uses_at_most_half_of_them(
    num_sequences: int, streams: bool, checkpoint_of: Callable[[str], Path], load: Callable[..., Any]
) -> None:
    checkpoint = checkpoint_of("mixtral")
    model = load(checkpoint, num_sequences=num_sequences, settings={"gpu_memory": "2MiB"})
    experts = [block for block in engine_of(model).layout.blocks if block.size_class is SizeClass.EXPERT]
    assert bool(experts) == streams
    prompt = PROMPT[:num_sequences]
    stock = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokens = [
        each.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, eos_token_id=None, **GREEDY)
        for each in (model, stock)
    ]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("policy", slow_but(["auto", "off"], ["auto", "lru", "off"]))
def test_experts_in_ram_are_not_read(
    policy: str, checkpoint_of: Callable[[str], Path], load: Callable[..., Any]
) -> None:
    checkpoint = checkpoint_of("mixtral")
    stock = AutoModelForCausalLM.from_pretrained(checkpoint)
    settings = {"experts": "streamed", "gpu_memory": "600KiB", "cpu_memory": "600KiB", "experts.cache": policy}
    model = load(checkpoint, settings=settings)
    engine = engine_of(model)
    layout, experts = engine.layout, [b for b in engine.layout.blocks if b.size_class is SizeClass.EXPERT]
    in_ram = {record.block for record in layout.resident_records}
    assert bool(in_ram & {block.name for block in experts}) == (policy == "off")
    assert (layout.expert_cache is None) == (policy == "off")
    if layout.expert_cache is not None:
        assert 2 < layout.expert_cache.num_experts < len(experts)
    assert layout.cpu_bytes <= engine.config.cpu_memory
    assert torch.equal(generated(model, GREEDY).sequences, generated(stock, GREEDY).sequences)
    settle(engine)
    read_before, before = engine.timeline.totals()[SSD_READ].num_bytes, engine.expert_loader.figures
    for way in (GREEDY, SAMPLED, BEAMS):
        ours, stocks = generated(model, way), generated(stock, way)
        assert torch.equal(ours.sequences, stocks.sequences)
        for mine, others in zip(ours.logits, stocks.logits, strict=True):
            assert torch.equal(mine, others)
    settle(engine)
    after = engine.expert_loader.figures
    num_loads, num_from_ram = after.num_loads - before.num_loads, after.num_from_ram - before.num_from_ram
    assert 0 < num_from_ram < num_loads
    read_bytes = engine.timeline.totals()[SSD_READ].num_bytes - read_before
    assert read_bytes == (num_loads - num_from_ram) * experts[0].param_bytes  # all other blocks are in RAM or in slots
    assert bytes_per_token(layout) > 0


def settle(engine: Any) -> None:
    """Wait until no load of experts runs or can begin."""
    loader, ring = engine.expert_loader, engine._ring
    with ring.lock:
        assert ring.changed.wait_for(
            lambda: not any(slot.is_loading for slot in ring.slots[SizeClass.EXPERT]) and loader.find_load() is None,
            timeout=60,
        )


def generated_by_rank(model: Any, rank: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the tokens and logits of this rank's own prompts."""
    prompt = PROMPT + rank
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        pad_token_id=0,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
        **GREEDY,
    )
    return out.sequences, list(out.logits)


@pytest.mark.slow
@pytest.mark.skipif(num_gpus() > 0, reason="torchrun would take the GPUs")
def test_two_ranks_generate_the_tokens_of_one_process(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Each rank has its own prompts, and its part of the weights."""
    cases = [
        "with_layer,llama",
        "with_layer,qwen2_tied",
        "streamed,mixtral",
        "with_layer,mixtral",
        "streamed,qwen3_moe",
    ]
    names = sorted({case.split(",")[1] for case in cases})
    for name in names:
        checkpoint_of(name)
    program, paths = Path(__file__).with_name("generate_on_ranks.py"), os.pathsep.join(filter(None, sys.path))
    environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    run_python(*TWO_RANKS, program, tmp_path, *cases, **environment)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in names:
            stock = AutoModelForCausalLM.from_pretrained(tmp_path / name)
            for rank in (0, 1):
                tokens, logits = generated_by_rank(stock, rank)
                for case in cases:
                    if case.endswith(f",{name}"):
                        found = torch.load(tmp_path / name / f"{case.split(',')[0]}-{rank}.pt")
                        assert torch.equal(found[0], tokens), (case, rank)
                        assert all(map(torch.equal, found[1], logits)), (case, rank)
    finally:
        torch.set_num_threads(before)


# Several ranks.


def generate_on_ranks(folder: Path, call: Callable[[Any, int], Any], embedding: str = "whole") -> list[Any]:
    """Return the outcomes of ``call(model, rank)`` on two ranks, which torch does not connect."""

    def run(links: Links) -> Any:
        rank = links.ranks.rank
        with rank_engine(links, folder, lambda: tiny_model("llama"), embedding=embedding) as engine:
            model = engine.model.eval()
            for _ in range(2):  # as for a model that is offloaded again
                generate_together(model, links, lambda: engine.is_closed)
            generated = call(model, rank)
        with pytest.raises(RuntimeError, match="engine of this model is closed"):
            generate(model, rank)
        return generated

    return rank_outcomes(2, run, timeout_s=300.0)


def test_bytes_are_those_of_all_ranks_also_if_some_miss_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of a rank may all have copies in its RAM. It measures no drive, and the others do."""
    monkeypatch.setattr(text_generation, "bytes_per_token", lambda layout: layout)
    monkeypatch.setattr(text_generation, "_drive_bytes_per_s", lambda engine: 7.0)

    def sums(links: Links) -> Any:
        engine: Any = SimpleNamespace(layout=5 * links.ranks.rank)
        return text_generation._bytes_of_all_ranks(engine, links, 1.0 + links.ranks.rank)

    assert run_ranks(3, sums) == [(6.0, 15, 14.0)] * 3


def generate(model: Any, rank: int) -> Tensor:
    prompt = torch.arange(5, 9 + rank)[None]
    tokens: Tensor = model.generate(input_ids=prompt, max_new_tokens=2 + 3 * rank, do_sample=False, pad_token_id=0)
    return tokens


@pytest.mark.parametrize("embedding", ["whole", "rows"])
def test_ranks_that_torch_does_not_connect_generate_sequences_of_different_lengths(
    embedding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuts, "SMALL_NUMEL", 0)  # each rank has a part of the table
    stock = tiny_model("llama").eval()
    for rank, outcome in enumerate(generate_on_ranks(tmp_path, generate, embedding)):
        assert outcome.error is None
        assert torch.equal(outcome.result, generate(stock, rank))


def test_a_rank_that_generates_alone_ends_all_ranks(tmp_path: Path) -> None:
    def call(model: Any, rank: int) -> Any:
        return generate(model, 0) if rank == 0 else model(**tiny_batch()).loss

    outcomes = generate_on_ranks(tmp_path, call)
    texts = [str(outcome.error) for outcome in outcomes if isinstance(outcome.error, RanksDisagreeError)]
    assert any(
        "'model.generate'" in text and "a callback or a save that only some of them run" in text for text in texts
    )
    assert all(outcome.error is not None for outcome in outcomes)
