"""Parameters and their states are written and read whole through a few small buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import EngineFactory
from torch import Tensor, nn

from hf_lohan.engine import ParameterAccess
from hf_lohan.testing.models import tiny_model

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
LARGE = "model.embed_tokens.weight"  # larger than a buffer of the pool
SMALL = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def open_access(build_engine: EngineFactory) -> Callable[..., tuple[ParameterAccess, dict[str, Tensor]]]:
    """Write a model's weights to a store. Return the store's `ParameterAccess`, and the original weights by name."""

    def build(dtype: torch.dtype = torch.float32) -> tuple[ParameterAccess, dict[str, Tensor]]:
        model = tiny_model("llama", vocab_size=1500)
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        engine = build_engine(model, dtype=dtype, cpu_memory="2MiB", gpu_memory="2MiB")
        assert weights[LARGE].numel() > engine.layout.plan.chunk_numel
        return engine.parameters, weights

    return build


@DTYPES
def test_drained_weights_are_in_the_store(dtype: torch.dtype, open_access: Callable[..., Any]) -> None:
    access, weights = open_access(dtype)
    for name, weight in weights.items():
        stored = access.read_parameter(name)
        assert (stored.shape, stored.dtype) == (weight.shape, dtype)
        if dtype == torch.float32:
            assert torch.equal(stored, weight)
        else:
            assert torch.equal(stored, weight.bfloat16())
            assert torch.equal(access.read_masters(name, 0, weight.numel()), weight.flatten())


@DTYPES
@pytest.mark.parametrize("source_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_of_any_float_type_can_be_written(
    dtype: torch.dtype, source_dtype: torch.dtype, open_access: Callable[..., Any]
) -> None:
    access, weights = open_access(dtype)
    new = torch.randn(weights[LARGE].shape).to(source_dtype)
    access.write_parameter(LARGE, new)
    exact = source_dtype == dtype or dtype == torch.float32
    expected = new.to(dtype) if exact else new.float().bfloat16()
    difference = (access.read_parameter(LARGE).float() - expected.float()).abs()
    ties_rounded_up = 0.0 if exact else 2**-7 * float(expected.float().abs().max())
    assert float(difference.max()) <= ties_rounded_up


def test_writing_a_parameter_leaves_its_neighbours(open_access: Callable[..., Any]) -> None:
    access, weights = open_access()
    access.write_parameter(SMALL, torch.full_like(weights[SMALL], 5.0))
    access.write_parameter("model.layers.1.self_attn.q_proj.weight", torch.full((64, 64), 6.0))
    for name, weight in weights.items():
        if name not in (SMALL, "model.layers.1.self_attn.q_proj.weight"):
            assert torch.equal(access.read_parameter(name), weight), name
    assert bool((access.read_parameter(SMALL) == 5.0).all())


def test_a_source_need_not_be_contiguous(open_access: Callable[..., Any]) -> None:
    access, weights = open_access()
    turned = torch.randn(weights[LARGE].shape[::-1]).t()
    access.write_parameter(LARGE, turned)
    assert torch.equal(access.read_parameter(LARGE), turned)


@DTYPES
def test_states_start_at_zero_and_keep_what_is_written(dtype: torch.dtype, open_access: Callable[..., Any]) -> None:
    access, weights = open_access(dtype)
    for kind in ("exp_avg", "exp_avg_sq"):
        assert access.state_dtype(LARGE, kind) == torch.float32
        for name in (LARGE, SMALL):
            assert not access.read_flat(name, kind).any()
            state = torch.randn(weights[name].numel())
            access.write_state(name, kind, state)
            assert torch.equal(access.read_flat(name, kind), state)
    assert torch.equal(access.read_parameter(LARGE), weights[LARGE].to(dtype)) or dtype == torch.bfloat16


def test_pieces_come_in_order_and_cover_the_record(open_access: Callable[..., Any]) -> None:
    access, weights = open_access()
    pieces = [(start, piece.clone()) for start, piece in access.read_pieces(LARGE, "param")]
    assert len(pieces) > 1
    assert [start for start, _ in pieces] == [sum(p.numel() for _, p in pieces[:i]) for i in range(len(pieces))]
    assert torch.equal(torch.cat([piece for _, piece in pieces]), weights[LARGE].flatten())


@DTYPES
@pytest.mark.parametrize(("first", "last"), [(0, 7), (1000, 70000), (64 * 700, 64 * 1500), (5, 5)])
def test_some_elements_of_a_weight_are_written_and_read(
    first: int, last: int, dtype: torch.dtype, open_access: Callable[..., Any]
) -> None:
    access, weights = open_access(dtype)
    expected = access.read_parameter(LARGE).flatten()
    new = torch.randn(last - first).to(dtype)
    access.write_elements(LARGE, first, new)
    expected[first:last] = new
    assert torch.equal(access.read_parameter(LARGE).flatten(), expected)
    for start, stop in ((first, last), (0, 3), (max(first - 1, 0), last + 1 if last < 96000 else last)):
        assert torch.equal(access.read_elements(LARGE, start, stop), expected[start:stop])
    assert torch.equal(access.read_parameter(SMALL), weights[SMALL].to(dtype))


def test_elements_outside_a_weight_are_refused(open_access: Callable[..., Any]) -> None:
    access, _ = open_access()
    with pytest.raises(ValueError, match=r"embed_tokens\.weight has 96000 elements, so elements 95999 to 96001"):
        access.write_elements(LARGE, 95999, torch.zeros(2))


def test_a_reader_that_stops_returns_its_buffers(open_access: Callable[..., Any]) -> None:
    access, weights = open_access()
    for _ in range(20):  # more often than the pool has buffers
        pieces = access.read_pieces(LARGE, "param")
        next(pieces)
        pieces.close()
        with pytest.raises(ValueError, match=r"lm_head\.weight has shape \(3,\), the store expects \(1500, 64\)"):
            access.write_parameter("lm_head.weight", torch.zeros(3))
    assert torch.equal(access.read_parameter(LARGE), weights[LARGE])


def test_frozen_parameters_have_no_states(build_engine: EngineFactory) -> None:
    model: nn.Module = tiny_model("llama")
    model.get_parameter(SMALL).requires_grad_(False)
    access = build_engine(model, dtype=torch.bfloat16).parameters
    assert access.state_kinds(SMALL) == ()
    assert access.state_kinds(LARGE) == ("master_residual", "exp_avg", "exp_avg_sq")
