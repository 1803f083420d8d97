"""Products and attention are measured at the model's shapes or smaller ones. Products are weighted by their FLOPs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_lohan.device import CpuDevice
from hf_lohan.hardware import AttentionShape, MatrixShape, rates
from hf_lohan.hardware.rates import attention_flops_per_s, cropped, elementwise_bytes_per_s, matmul_flops_per_s

sides = st.integers(1, 200_000)
shapes = st.builds(MatrixShape, sides, sides, sides, num_matrices=st.integers(1, 300))


@given(shapes, st.floats(1e6, 1e15), st.integers(1, 1 << 32))
def test_cropping_keeps_the_bounds_or_ends_with_short_sides(
    shape: MatrixShape, max_flops: float, max_bytes: int
) -> None:
    cut = cropped(shape, max_flops=max_flops, max_bytes=max_bytes, itemsize=2)
    is_within = cut.flops <= max_flops and cut.operand_bytes(2) <= max_bytes
    assert is_within or (cut.num_matrices == 1 and max(cut.num_rows, cut.inner, cut.num_columns) < 256)
    for whole, part in zip(sides_of(shape), sides_of(cut), strict=True):
        assert min(whole, 128) <= part <= whole


def sides_of(shape: MatrixShape) -> tuple[int, int, int]:
    return shape.num_rows, shape.inner, shape.num_columns


@pytest.mark.parametrize(
    ("shape", "max_flops", "max_bytes", "expected"),
    [
        (MatrixShape(4096, 512, 1024), 1e20, 1 << 40, MatrixShape(4096, 512, 1024)),
        (MatrixShape(4096, 512, 1024), 2.0 * 1024 * 512 * 1024, 1 << 40, MatrixShape(1024, 512, 1024)),
        (MatrixShape(256, 512, 4096), 2.0 * 128 * 512 * 2048, 1 << 40, MatrixShape(128, 512, 2048)),
        (
            MatrixShape(128, 512, 1024, num_matrices=8),
            4.0 * 128 * 512 * 1024,
            1 << 40,
            MatrixShape(128, 512, 1024, 1, 2),
        ),
        (MatrixShape(256, 256, 65536), 1e20, 8 << 20, MatrixShape(256, 256, 4096)),
    ],
)
def test_the_order_of_cuts(shape: MatrixShape, max_flops: float, max_bytes: int, expected: MatrixShape) -> None:
    assert cropped(shape, max_flops=max_flops, max_bytes=max_bytes, itemsize=2) == expected


def test_shapes_are_weighted_by_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = MatrixShape(10, 10, 10, count=3), MatrixShape(10, 10, 20, count=2)
    flops_per_s = {fast: 1000.0, slow: 500.0}

    def measured(device: Any, shape: MatrixShape, dtype: torch.dtype, **bounds: float) -> float:
        assert bounds == {"budget_s": 2.0, "max_bytes": 7}
        return flops_per_s[shape]

    monkeypatch.setattr(rates, "_shape_flops_per_s", measured)
    rate = matmul_flops_per_s(CpuDevice(), [fast, slow], torch.float32, budget_s=4.0, max_bytes=7)
    assert rate == pytest.approx((3 * 2000 + 2 * 4000) / (3 * 2000 / 1000 + 2 * 4000 / 500))


def test_the_shapes_with_the_most_flops_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[MatrixShape] = []
    monkeypatch.setattr(
        rates, "_shape_flops_per_s", lambda device, shape, dtype, **bounds: measured.append(shape) or 10.0
    )
    many = [MatrixShape(size, 1, 1, count=2) for size in range(1, 30)]
    heavy = MatrixShape(2, 1, 1, count=1000)
    assert matmul_flops_per_s(CpuDevice(), [*many, heavy], torch.float32, budget_s=1.0, max_bytes=1) == 10.0
    assert measured == [heavy, *many[:-6:-1]]


@pytest.mark.parametrize("num_matrices", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_and_both_its_gradients_are_run(
    dtype: torch.dtype, num_matrices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[tuple[tuple[int, ...], torch.dtype]] = []

    def once(run: Any, synchronize: Any, *, budget_s: float) -> float:
        product = run()
        results.append((tuple(product.shape[-2:]), product.dtype))
        return 1.0

    monkeypatch.setattr(rates, "median_s", once)
    shape = MatrixShape(2, 3, 4, num_matrices=num_matrices)
    rate = matmul_flops_per_s(CpuDevice(), [shape], dtype, budget_s=1.0, max_bytes=1 << 20)
    assert results == [((2, 4), dtype), ((2, 3), dtype), ((4, 3), dtype)]
    assert rate == 3 * shape.flops / 3.0


def test_trials_grow_until_they_fill_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device of 1e12 FLOP/s, 1.2 s are four runs of a product and its gradients of 1e11 FLOPs each."""
    measured: list[float] = []

    def times(device: Any, shape: MatrixShape, dtype: Any, *, budget_s: float, num_products: int = 3) -> list[float]:
        measured.append(shape.flops)
        return [shape.flops / 1e12] * num_products

    monkeypatch.setattr(rates, "_product_times_s", times)
    shape = MatrixShape(1 << 20, 1024, 1024)
    rate = matmul_flops_per_s(CpuDevice(), [shape], torch.float32, budget_s=1.2, max_bytes=1 << 40)
    assert rate == pytest.approx(1e12)
    assert measured[0] <= 1e8
    assert 0.25e11 < measured[-1] <= 1e11


def test_an_addition_moves_three_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "median_s", lambda run, synchronize, *, budget_s: run().numel() / 100)
    assert elementwise_bytes_per_s(CpuDevice(), 100, torch.bfloat16, budget_s=0.0) == 600


def test_missing_or_empty_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="give at least one"):
        matmul_flops_per_s(CpuDevice(), [], torch.float32, budget_s=0.0, max_bytes=1)
    with pytest.raises(ValueError, match="at least 1"):
        MatrixShape(0, 1, 1)


ATTENTION = AttentionShape(num_heads=6, num_tokens=5000, key_dim=16, value_dim=8)


def test_no_token_attends_to_a_later_one() -> None:
    shape = AttentionShape(num_heads=2, num_tokens=3, key_dim=5, value_dim=7)
    assert shape.flops == 2 * 2 * (1 + 2 + 3) * (5 + 7)
    queries, output, value, key = 5, 7, 7, 5
    assert shape.operand_bytes(4) == 2 * (queries + output + value + key) * 2 * 3 * 4


@pytest.mark.parametrize(
    ("max_s", "max_bytes", "expected"),
    [
        (1e9, 1 << 40, (6, 4096)),
        (1e9, ATTENTION.operand_bytes(2) // 2, (6, 2048)),
        (1e9, AttentionShape(num_heads=4, num_tokens=512, key_dim=16, value_dim=8).operand_bytes(2), (4, 512)),
        (AttentionShape(num_heads=6, num_tokens=1024, key_dim=16, value_dim=8).flops / 1e9, 1 << 40, (6, 1024)),
        (0.0, 1 << 40, (1, 512)),
    ],
)
def test_long_rows_are_measured_as_rows_that_fit_time_and_memory(
    max_s: float, max_bytes: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[AttentionShape] = []

    def seconds(device: Any, shape: AttentionShape, dtype: torch.dtype, *, budget_s: float) -> float:
        measured.append(shape)
        return shape.flops / 1e9

    monkeypatch.setattr(rates, "_attention_s", seconds)
    rate = attention_flops_per_s(CpuDevice(), ATTENTION, torch.bfloat16, budget_s=4 * max_s, max_bytes=max_bytes)
    assert (measured[-1].num_heads, measured[-1].num_tokens) == expected
    assert rate == pytest.approx(3e9), "a backward counts twice the FLOPs of a forward"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward_of_attention_are_run(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    lengths: set[int] = set()
    sdpa, grad = torch.nn.functional.scaled_dot_product_attention, torch.autograd.grad

    def attend(query: Any, key: Any, value: Any, **options: Any) -> Any:
        ran.append("forward")
        tokens = query.shape[2]
        lengths.add(tokens)
        assert options == {"is_causal": True} and {query.dtype, key.dtype, value.dtype} == {dtype}
        shapes = [(1, 1, tokens, 8), (1, 1, tokens, 8), (1, 1, tokens, 4)]
        assert [tuple(tensor.shape) for tensor in (query, key, value)] == shapes
        return sdpa(query, key, value, **options)

    def backward(output: Any, inputs: Any, gradient: Any) -> Any:
        ran.append("backward")
        gradients = grad(output, inputs, gradient)
        assert all(one.abs().sum() > 0 for one in gradients)
        return gradients

    monkeypatch.setattr(rates.F, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(torch.autograd, "grad", backward)
    shape = AttentionShape(num_heads=1, num_tokens=40, key_dim=8, value_dim=4)
    with torch.no_grad():
        rate = attention_flops_per_s(CpuDevice(), shape, dtype, budget_s=0.0, max_bytes=1 << 30)
    assert rate > 0
    assert ran == ["forward", "backward"] * (len(ran) // 2)
    assert min(lengths) >= 512, "few tokens show how long it takes to start the kernel"
