"""Bytes of fused operations: a kernel reads each tensor once, and writes what others read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_lohan.compat.torch_private import FakeTensorMode
from hf_lohan.planning.tracing.operations import BlockTrace, FakeOperations

SIZE = 64


class Traced(FakeOperations):
    """Counts the operations of real tensors."""

    def __init__(self) -> None:
        super().__init__(FakeTensorMode(allow_non_fake_inputs=True))
        self.trace = BlockTrace()

    def note_call(self, func: object, args: object, kwargs: object, output: object) -> None:
        self.trace.add(func, args, kwargs, output)  # type: ignore[arg-type]


def gate_of_two(x: Tensor, w: Tensor) -> Tensor:
    return (torch.nn.functional.silu(x @ w) * (x @ w)) @ w  # reads 2, writes 1


def gate_of_one(x: Tensor, w: Tensor) -> Tensor:
    both = x @ torch.cat([w, w], dim=1)
    gate, up = both.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up) @ w


def in_place(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y += x  # reads 2, writes 1
    return y @ w


def chain(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).relu().sigmoid().tanh()) @ w  # reads 1, writes 1


def residual(x: Tensor, w: Tensor) -> Tensor:
    y = x + x @ w  # reads 2, and is written for the sum at the end
    return y + (y.relu() @ w)  # the product reads 1; then reads 2, writes 1


@pytest.mark.parametrize(
    ("function", "times"), [(gate_of_two, 3), (gate_of_one, 3), (in_place, 3), (chain, 2), (residual, 7)]
)
def test_bytes_of_fused_operations(function: Callable[[Tensor, Tensor], Tensor], times: int) -> None:
    x, w = torch.ones(SIZE, SIZE), torch.ones(SIZE, SIZE)
    joined = 3 * w.nbytes if function is gate_of_one else 0  # the weight is read, and written twice
    with torch.no_grad(), Traced() as traced:
        output = function(x, w)
    fused = traced.trace.fused["compile"]
    fused.end(output)
    assert fused.num_bytes == times * x.nbytes + joined
