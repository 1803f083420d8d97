"""Traces of a model with two products per layer equal sums by hand."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from hf_lohan.costs import BlockProfile, SizeClass
from hf_lohan.hardware import MatrixShape
from hf_lohan.model import ModelBlocks, lay_out_block
from hf_lohan.planning.tracing import TracedModel, trace_model

BATCH_SIZE, SEQUENCE_LENGTH, WIDTH, VOCAB_SIZE = 2, 3, 8, 11
NUM_TOKENS = BATCH_SIZE * SEQUENCE_LENGTH
FLOAT_BYTES = 4


class Layer(nn.Module):
    def __init__(self, inner: int, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.up, self.down = nn.Linear(WIDTH, inner, bias=False), nn.Linear(inner, WIDTH, bias=False)
        self.runs = SimpleQueue[int]()  # a trace puts back all other state

    def forward(self, hidden: Tensor, scale: Tensor) -> Tensor:
        self.runs.put(self.layer_idx)
        return hidden + self.down(torch.relu(self.up(hidden * scale)))


class Model(nn.Module):
    """Skips layers at random, and reads the values of its positions."""

    def __init__(self, *inner: int, layerdrop: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.layers = nn.ModuleList(Layer(size, index) for index, size in enumerate(inner))
        self.head = nn.Linear(WIDTH, VOCAB_SIZE, bias=False)
        self.layerdrop = layerdrop
        self.masks = SimpleQueue[Tensor]()

    def forward(self, input_ids: Tensor, labels: Tensor, use_cache: bool) -> Tensor:
        positions = torch.arange(input_ids.shape[1])
        self.masks.put(positions[:, None] >= positions)
        hidden = self.words(input_ids)
        scale = torch.ones(WIDTH)
        for layer in self.layers:
            if torch.rand([]) < self.layerdrop:
                continue
            hidden = layer(hidden, scale)
        if positions[-1] == 0:
            raise AssertionError("positions have values")
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def trace(model: Model, *, sequence_length: int = SEQUENCE_LENGTH) -> TracedModel:
    named = [
        ("words", SizeClass.OUTER, model.words),
        *((f"layers.{index}", SizeClass.LAYER, layer) for index, layer in enumerate(model.layers)),
        ("head", SizeClass.OUTER, model.head),
    ]
    blocks = [lay_out_block(name, size_class, dict(module.named_parameters())) for name, size_class, module in named]
    needs = {module: (block,) for (_, _, module), block in zip(named, blocks, strict=True)}
    found = ModelBlocks(blocks, needs, list(model.layers))
    return trace_model(model, found, batch_size=BATCH_SIZE, sequence_length=sequence_length)


def layer_of(model: Model, index: int = 0) -> BlockProfile:
    return trace(model).profile.layers[index]


def test_a_layer_equals_its_formulas() -> None:
    layer = layer_of(Model(16))
    (up,) = layer.operations  # `down` is not recomputed, because only the sum needs it
    assert (up.name, up.module) == ("aten.mm#0", "up")
    assert up.flops == 2 * NUM_TOKENS * WIDTH * 16
    assert up.output_bytes == NUM_TOKENS * 16 * FLOAT_BYTES
    assert layer.flops == 2 * up.flops
    assert layer.input_bytes == NUM_TOKENS * WIDTH * FLOAT_BYTES
    scaled, inner = NUM_TOKENS * WIDTH * FLOAT_BYTES, NUM_TOKENS * 16 * FLOAT_BYTES
    assert layer.saved_bytes == scaled + inner, "the inputs of both products, one of which is relu's output"
    of_scale = WIDTH * FLOAT_BYTES
    assert layer.moved_bytes == (2 * scaled + of_scale) + 2 * inner + 3 * scaled
    assert layer.num_params == layer.num_trainable_params == 2 * WIDTH * 16
    assert layer.param_bytes == layer.num_params * FLOAT_BYTES


def test_operations_outside_modules_count_for_the_last_module() -> None:
    words, _, head = trace(Model(16)).profile.blocks
    assert words.flops == 0
    assert head.flops == 2 * NUM_TOKENS * WIDTH * VOCAB_SIZE
    assert head.operations == ()
    assert head.saved_bytes >= NUM_TOKENS * VOCAB_SIZE * FLOAT_BYTES, "the loss keeps log-probabilities"


def test_shapes_include_all_products() -> None:
    shapes = trace(Model(16, 16, 32)).matrix_shapes
    assert set(shapes) == {
        MatrixShape(NUM_TOKENS, WIDTH, 16, count=2),
        MatrixShape(NUM_TOKENS, 16, WIDTH, count=2),
        MatrixShape(NUM_TOKENS, WIDTH, 32),
        MatrixShape(NUM_TOKENS, 32, WIDTH),
        MatrixShape(NUM_TOKENS, WIDTH, VOCAB_SIZE),
    }
    assert [shape.count * shape.flops for shape in shapes] == sorted(
        (shape.count * shape.flops for shape in shapes), reverse=True
    )


def test_equal_layers_are_traced_once() -> None:
    model = Model(16, 16, 32, 16)
    profile = trace(model).profile
    assert [layer.runs.qsize() for layer in model.layers] == [1, 0, 1, 0]
    flops = [layer.flops for layer in profile.layers]
    assert flops == [2 * 2 * NUM_TOKENS * WIDTH * inner for inner in (16, 16, 32, 16)]


def test_a_layer_that_may_be_skipped_is_counted() -> None:
    assert [layer.flops > 0 for layer in trace(Model(16, 16, layerdrop=0.999)).profile.layers] == [True, True]


def test_frozen_weights_save_nothing_for_their_gradient() -> None:
    model = Model(16)
    model.layers[0].up.weight.requires_grad_(False)
    trained, frozen = layer_of(Model(16)), layer_of(model)
    assert frozen.saved_bytes == trained.saved_bytes - NUM_TOKENS * WIDTH * FLOAT_BYTES
    assert frozen.num_trainable_params == frozen.num_params // 2


def test_only_small_masks_are_real_tensors() -> None:
    model = Model(16)
    trace(model)
    assert not isinstance(model.masks.get(), FakeTensor)
    trace(model, sequence_length=4096)
    mask = model.masks.get()
    assert isinstance(mask, FakeTensor) and mask.shape == (4096, 4096)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tracing_does_not_change_the_model_or_the_generator(device: str) -> None:
    with torch.device(device):
        model = Model(16, 16)
    model.eval()
    model.layers[0].train()
    before: dict[str, Any] = {"rng": torch.get_rng_state(), "modes": [m.training for m in model.modules()]}
    parameters = dict(model.named_parameters())
    trace(model)
    assert torch.equal(torch.get_rng_state(), before["rng"])
    assert [module.training for module in model.modules()] == before["modes"]
    assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert all(parameter.device.type == device for parameter in model.parameters())
    assert not any("forward" in vars(module) or module._forward_pre_hooks for module in model.modules())


def test_an_error_in_the_forward_does_not_change_the_model() -> None:
    model = Model(16)
    with pytest.raises(AssertionError, match="positions have values"):
        trace(model, sequence_length=1)
    assert not any("forward" in vars(module) or module._forward_pre_hooks for module in model.modules())
    assert trace(model).profile.flops > 0
