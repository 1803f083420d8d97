"""The traced step has the operations, tensors, births and deaths of a real step on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from covering import slow_but
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Gemma2Config, GemmaConfig

from hf_lohan.activations import ChunkedLoss
from hf_lohan.activations.tiers import ActivationTiers
from hf_lohan.annexes.studies.allocators import compare_addresses
from hf_lohan.annexes.studies.lifetimes import TensorLifetime
from hf_lohan.annexes.studies.step_trace import trace_step
from hf_lohan.device import CpuDevice
from hf_lohan.huggingface.attention import run_layers_in_chunks
from hf_lohan.model import discover_blocks
from hf_lohan.testing.models import FAMILIES, tiny_config

BATCH_SIZE, SEQUENCE_LENGTH, NUM_LAYERS = 2, 16, 7
GEMMA = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
CONFIGS: dict[str, Any] = {
    **{family: tiny_config(family, num_layers=NUM_LAYERS, hidden_size=32) for family in FAMILIES},
    "gemma": GemmaConfig(**GEMMA),
    "gemma2": Gemma2Config(**GEMMA, sliding_window=8),  # every other layer has a window
}


class Storages(TorchDispatchMode):
    """Notes all operations, and when each storage is born and dies."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.operations: list[str] = []
        self.born: list[tuple[int, int]] = []
        self.died: dict[int, int] = {}
        self._alive: dict[int, tuple[int, Any]] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}

    def look(self) -> None:
        for key in [key for key, (_, ref) in self._alive.items() if ref.expired()]:
            self.died[self._alive.pop(key)[0]] = len(self.operations)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.look()
        output = func(*args, **(kwargs or {}))
        inputs = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if torch.is_tensor(one)}
        for tensor in (one for one in tree_leaves(output) if torch.is_tensor(one)):
            storage = tensor.untyped_storage()
            if storage._cdata not in {*self._alive, *self._known, *inputs}:
                self._alive[storage._cdata] = len(self.born), StorageWeakRef(storage)
                self.born.append((len(self.operations), storage.nbytes()))
        self.operations.append(str(func))
        return output


def peak_bytes(born: list[tuple[int, int]], died: list[int]) -> int:
    deaths = [(at, 0, -size) for at, (_, size) in zip(died, born, strict=True)]
    changes = sorted([(at, 1, size) for at, size in born] + deaths)
    total = peak = 0
    for _, _, size in changes:
        total += size
        peak = max(peak, total)
    return peak


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", CONFIGS)
def test_births_and_deaths_equal_those_of_a_real_step(name: str) -> None:
    config = CONFIGS[name]
    model = AutoModelForCausalLM.from_config(config).train()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    ids = torch.randint(5, 200, (BATCH_SIZE, SEQUENCE_LENGTH))
    with Storages(model) as real:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        del loss
    real.look()
    with torch.device("meta"):
        weightless = AutoModelForCausalLM.from_config(config)
    traced = trace_step(weightless, discover_blocks(weightless), batch_size=BATCH_SIZE, sequence_length=SEQUENCE_LENGTH)
    assert [operation.name for operation in traced.operations] == real.operations
    born = [(tensor.born, tensor.num_bytes) for tensor in traced.tensors]
    assert born == real.born
    died = [tensor.died for tensor in traced.tensors]
    assert died == [real.died[number] for number in range(len(real.born))]
    assert peak_bytes(born, died) == peak_bytes(real.born, [real.died[number] for number in range(len(real.born))])
    addresses = compare_addresses(traced.tensors)
    assert addresses.live_bytes <= addresses.planned_bytes <= 1.01 * addresses.live_bytes
    gradients = {tensor.name: tensor.num_bytes for tensor in traced.tensors if tensor.kind == "gradient"}
    assert gradients == {name: parameter.nbytes for name, parameter in model.named_parameters()}
    assert set(traced.weight_uses) >= set(gradients)
    hidden_bytes = BATCH_SIZE * SEQUENCE_LENGTH * 32 * 4
    inputs = [tensor for tensor in traced.tensors if tensor.kind == "activation" and tensor.num_bytes == hidden_bytes]
    assert len(inputs) >= NUM_LAYERS


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", slow_but(("gpt2", "qwen3_moe"), CONFIGS))
def test_addresses_of_a_real_step_in_chunks(name: str) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    names = {layer: f"layers.{number}" for number, layer in enumerate(discover_blocks(model).layers)}
    chunked = run_layers_in_chunks(model, ActivationTiers(CpuDevice(), names), names)
    chunked.cut(SEQUENCE_LENGTH // 4)
    ids = torch.randint(5, 200, (BATCH_SIZE, SEQUENCE_LENGTH))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)  # finds out whether layers can be cut
    with Storages(model) as real:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert chunked.has_cut
    model.zero_grad()
    real.look()
    tensors = [
        TensorLifetime("", "", "intermediate", size, born, real.died.get(number, len(real.operations)))
        for number, (born, size) in enumerate(real.born)
    ]
    addresses = compare_addresses(tensors)
    # So small tensors are rounded up to a large part of the memory.
    assert addresses.live_bytes <= addresses.planned_bytes <= 1.02 * addresses.live_bytes


@pytest.mark.slow
def test_equal_layers_have_equal_operations_and_equal_chunks_of_the_loss_are_traced_once() -> None:
    def trace(num_layers: int, tokens: int) -> Any:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny_config("llama", num_layers=num_layers, hidden_size=32))
        loss = ChunkedLoss(over_bytes=0, chunk_bytes=256 * 4 * 8)  # 8 tokens
        return trace_step(model, discover_blocks(model), batch_size=1, sequence_length=tokens, chunked_loss=loss)

    few, many = (len(trace(num_layers, 100).operations) for num_layers in (3, 12))
    each_layer = len(trace(4, 100).operations) - few
    assert many == few + 9 * each_layer
    short, long = (trace(1, tokens).operations for tokens in (200, 400))
    of_short, of_long = (sum(one.flops for one in step if one.block == "lm_head") for step in (short, long))
    assert of_long == 2 * of_short
    assert len(short) == len(long)


def test_a_layer_that_runs_twice_is_refused() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama", num_layers=2, hidden_size=32))
    layers = model.model.layers
    blocks = discover_blocks(model)
    forward = layers[1].forward
    layers[1].forward = lambda hidden, **kwargs: layers[0](forward(hidden, **kwargs), **kwargs)
    with pytest.raises(ValueError, match="does not run exactly once in a forward"):
        trace_step(model, blocks, batch_size=1, sequence_length=8)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_that_stream_one_by_one_are_an_operation_each(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(name, num_layers=NUM_LAYERS, hidden_size=32))
    sizes = {"batch_size": BATCH_SIZE, "sequence_length": SEQUENCE_LENGTH}
    blocks = discover_blocks(model, streams_experts=True)
    streamed, whole = trace_step(model, blocks, **sizes), trace_step(model, discover_blocks(model), **sizes)
    experts = [expert.name for own in blocks.experts.values() for expert in own]
    assert len(experts) > NUM_LAYERS
    for expert in experts:
        forward, again, backward = (streamed.operations[use] for use in streamed.weight_uses[expert])
        assert forward.flops == again.flops == backward.flops / 3 > 0
        assert expert.startswith(f"{forward.block}.") and forward.block == again.block == backward.block
    # An expert's forward runs again in its backward, beside the one of the layer's checkpoint.
    flops = {
        kind: sum(operation.flops for operation in step.operations)
        for kind, step in (("streamed", streamed), ("whole", whole))
    }
    of_experts = sum(operation.flops for operation in streamed.operations if operation.name == "lohan.experts")
    assert flops["streamed"] - of_experts / 5 == pytest.approx(flops["whole"], rel=1e-6)
    rows_bytes = 4 * 32 * BATCH_SIZE * SEQUENCE_LENGTH * 2  # two experts for each token
    at = streamed.weight_uses[experts[0]][0]
    assert sum(tensor.num_bytes == rows_bytes and tensor.born < at < tensor.died for tensor in streamed.tensors) >= 3
