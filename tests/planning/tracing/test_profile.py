"""The profile without weights has the operations, FLOPs and saved bytes of a real forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import model_with_a_tower
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Gemma2Config, GemmaConfig

from hf_lohan.annexes.studies.step_trace import trace_step
from hf_lohan.costs import SizeClass
from hf_lohan.costs.model_profile import ModelProfile
from hf_lohan.hardware import AttentionShape
from hf_lohan.model import ModelBlocks, lay_out_block
from hf_lohan.planning import trace_blocks
from hf_lohan.planning.tracing import trace_model
from hf_lohan.testing.models import FAMILIES, tiny_config

BATCH_SIZE, SEQUENCE_LENGTH = 2, 16
GEMMA = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CONFIGS: dict[str, Any] = {
    **{family: tiny_config(family) for family in FAMILIES},
    "gemma": GemmaConfig(**GEMMA),
    "gemma2": Gemma2Config(**GEMMA, sliding_window=8),
    "gpt2_dropout": tiny_config("gpt2", attn_pdrop=0.1, resid_pdrop=0.1),
    "opt_layerdrop": tiny_config("opt", layerdrop=0.0, dropout=0.1),
}


def build(config: Any, dtype: torch.dtype, device: str) -> Any:
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == 3}
    name, layers = next(iter(lists.items()))
    return {f"{name}.{index}": layer for index, layer in enumerate(layers)}


def blocks_of(model: nn.Module) -> ModelBlocks:
    layers = layers_of(model)
    inside = {parameter for layer in layers.values() for parameter in layer.parameters()}
    outside = {name: parameter for name, parameter in model.named_parameters() if parameter not in inside}
    users = [
        module
        for name, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None and not name.startswith(tuple(layers))
    ]
    blocks = [lay_out_block(name, SizeClass.LAYER, dict(layer.named_parameters())) for name, layer in layers.items()]
    outer = lay_out_block("outside", SizeClass.OUTER, outside)
    needs = {layer: (block,) for layer, block in zip(layers.values(), blocks, strict=True)}
    return ModelBlocks([*blocks, outer], needs | dict.fromkeys(users, (outer,)), list(layers.values()))


def profile_of(model: nn.Module, **options: Any) -> ModelProfile:
    return trace_model(
        model, blocks_of(model), batch_size=BATCH_SIZE, sequence_length=SEQUENCE_LENGTH, **options
    ).profile


class Names(TorchDispatchMode):
    """Notes the names of products and attentions that run in one layer, numbered like at run time."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.output_bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        operation = func.overloadpacket.__name__
        if operation.startswith("_scaled_dot_product"):
            operation = "scaled_dot_product_attention"  # the same name for all kernels
        if operation.endswith("mm") or operation == "scaled_dot_product_attention":
            index = sum(name.partition("#")[0] == f"aten.{operation}" for name in self.seen)
            self.seen.append(f"aten.{operation}#{index}")
            outputs = output if isinstance(output, tuple) else (output,)
            self.output_bytes.append(sum(o.nbytes for o in outputs if torch.is_tensor(o)))
        return output


class Recomputed:
    """Runs a model's layers with checkpointing and notes the forward and the recomputation of each, in order."""

    def __init__(self, model: Any) -> None:
        self.forwards: list[Names] = []
        self.recomputations: list[Names] = []
        options = {"use_reentrant": False, "context_fn": self._contexts}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)

    def _contexts(self) -> tuple[Names, Names]:
        self.forwards.append(Names())
        self.recomputations.append(Names())
        return self.forwards[-1], self.recomputations[-1]


def attention(query: Any, key: Any, value: Any, dropout: float = 0.0, is_causal: bool = False, **kwargs: Any) -> int:
    """Return the FLOPs of two products per head: queries with keys, and weights with values."""
    batch, heads, queries, width = query
    num_pairs = queries * (queries + 1) // 2 if is_causal else queries * key[2]
    return 4 * batch * heads * num_pairs * width


def grouped(a: Any, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * a[0] * a[1] * b[2]


UNKNOWN_TO_TORCH = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention,
    torch.ops.aten._grouped_mm: grouped,
}


def run(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(0)
    ids = torch.randint(5, 256, (BATCH_SIZE, SEQUENCE_LENGTH))
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_operations_and_flops_equal_a_real_step(name: str, dtype: torch.dtype) -> None:
    real = build(CONFIGS[name], dtype, "cpu")
    profile = profile_of(build(CONFIGS[name], dtype, "meta"))
    seen, counter = Recomputed(real), FlopCounterMode(display=False, custom_mapping=UNKNOWN_TO_TORCH)
    with counter:
        loss = run(real)
    loss.backward()
    assert profile.flops == counter.get_total_flops()
    assert [block.name for block in profile.layers] == list(layers_of(real))
    assert len(seen.forwards) == len(profile.layers)
    for block, forward, recomputation in zip(profile.layers, seen.forwards, seen.recomputations, strict=True):
        names = [operation.name for operation in block.operations]
        assert names == recomputation.seen
        assert names == forward.seen[: len(names)]
        assert [operation.output_bytes for operation in block.operations] == forward.output_bytes[: len(names)]
        assert all(operation.flops > 0 for operation in block.operations)
        assert block.input_bytes == BATCH_SIZE * SEQUENCE_LENGTH * 64 * dtype.itemsize


@pytest.mark.parametrize(("implementation", "is_fused"), [("sdpa", True), ("eager", False)])
def test_the_device_is_measured_with_the_models_fused_attention(implementation: str, is_fused: bool) -> None:
    config = GemmaConfig(**GEMMA, attn_implementation=implementation)
    model = build(config, torch.float32, "meta")
    traced = trace_model(model, blocks_of(model), batch_size=BATCH_SIZE, sequence_length=SEQUENCE_LENGTH)
    num_heads = BATCH_SIZE * GEMMA["num_attention_heads"]
    shape = AttentionShape(num_heads=num_heads, num_tokens=SEQUENCE_LENGTH, key_dim=16, value_dim=16)
    assert traced.attention == (shape if is_fused else None)
    assert [layer.attention_flops for layer in traced.profile.layers] == [shape.flops if is_fused else 0] * 3


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_bytes_equal_a_real_forward(name: str) -> None:
    real = build(CONFIGS[name], torch.float32, "cpu")
    profile = profile_of(build(CONFIGS[name], torch.float32, "meta"))
    layer_name, layer = list(layers_of(real).items())[1]
    outside: dict[int, torch.Tensor] = {p.untyped_storage().data_ptr(): p for p in real.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hooks = saved_tensors_hooks(keep, lambda tensor: tensor)

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        outside.update((leaf.untyped_storage().data_ptr(), leaf) for leaf in leaves if torch.is_tensor(leaf))
        hooks.__enter__()

    layer.register_forward_pre_hook(enter, with_kwargs=True)
    layer.register_forward_hook(lambda *_: hooks.__exit__())
    run(real)
    expected = sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in outside)
    block = next(block for block in profile.layers if block.name == layer_name)
    assert block.saved_bytes == expected > 0


def test_a_compiled_layer_saves_the_inputs_and_outputs_of_products() -> None:
    """In float32: inputs of q, k, v, of the output projection (also the output of attention), of gate and up, and of
    down; q and k before and after positions, v once; outputs of the output projection, gate and up; sums of attention
    for each head."""
    config = tiny_config("llama")
    traced = trace_blocks(build(config, torch.float32, "meta"), batch_size=2, sequence_length=SEQUENCE_LENGTH)
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    keys = config.num_key_value_heads * config.hidden_size // heads
    widths = (hidden, hidden, inner, hidden, hidden, hidden, 2 * keys, keys, hidden, 2 * inner, heads)
    for layer in traced.profile.layers:
        assert layer.graph_bytes == 4 * 2 * SEQUENCE_LENGTH * sum(widths)
    for block in traced.profile.blocks:
        assert bool(block.graph_bytes) == (block in traced.profile.layers)


def test_the_positions_of_a_tower_do_not_limit_the_text() -> None:
    """The tower has 5 positions. A plan counts the work of the text model, and only the bytes of the tower."""
    with torch.device("meta"):
        model = model_with_a_tower()
    layers = trace_blocks(model, batch_size=1, sequence_length=SEQUENCE_LENGTH).profile.layers
    of_tower = [layer for layer in layers if "vision_tower" in layer.name]
    assert len(of_tower) == 2 and len(layers) == 5
    assert all((layer.flops > 0) == (layer not in of_tower) and layer.param_bytes for layer in layers)


def test_a_forward_that_needs_images_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        raise TypeError("missing 'pixel_values'")

    model = build(tiny_config("llama"), torch.float32, "meta")
    monkeypatch.setattr(model.model.norm, "forward", forward)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM fails on token ids alone, .*TypeError: missing 'pixel_val"):
        trace_blocks(model, batch_size=1, sequence_length=7)


def test_a_forward_that_reads_values_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(tiny_config("llama"), torch.float32, "cpu")
    norm = model.model.layers[0].input_layernorm
    stock = norm.forward
    monkeypatch.setattr(norm, "forward", lambda hidden: stock(hidden) * float(hidden.amax()))
    with pytest.raises(ValueError, match=r"^the forward of LlamaForCausalLM reads values of tensors, and a trace "):
        trace_blocks(model, batch_size=1, sequence_length=7)


class Cached(nn.Module):
    """Keeps its largest output, as models do with tables of positions and with masks."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own, self.outputs, self.last = own, list[torch.Tensor](), {"output": torch.zeros(1)}

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.own(hidden)
        self.outputs.append(output)
        self.last["output"] = self.largest = output
        return output


@pytest.mark.parametrize("trace", [trace_blocks, lambda model, **shape: trace_step(model, blocks_of(model), **shape)])
def test_a_trace_leaves_no_mark_in_the_model(trace: Any) -> None:
    model = build(tiny_config("llama"), torch.float32, "cpu").eval()
    for layer in model.model.layers:
        layer.mlp = Cached(layer.mlp)
    model.model.norm = Cached(model.model.norm)
    before = {module: dict(vars(module)) for module in model.modules()}
    trace(model, batch_size=2, sequence_length=9)
    for module, own in before.items():
        assert vars(module).keys() == own.keys() and all(vars(module)[name] is value for name, value in own.items())
        if isinstance(module, Cached):
            assert not module.outputs and type(module.last["output"]) is torch.Tensor
