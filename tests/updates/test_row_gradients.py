"""Rows of a gradient have their places and their norm."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from hf_lohan.costs import SizeClass
from hf_lohan.model import Block, Chunk, ChunkPiece, ParamSlice
from hf_lohan.updates.row_gradients import RowGradient


def sparse(ids: torch.Tensor, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(len(ids), width).to(dtype)
    return torch.sparse_coo_tensor(ids[None], values, (num_rows, width), check_invariants=True)


@pytest.mark.parametrize("width", [64, 40, 7])
@pytest.mark.parametrize("num_tokens", [0, 1, 30, 400])
def test_rows_get_to_their_places(width: int, num_tokens: int) -> None:
    torch.manual_seed(width + num_tokens)
    num_rows = 300
    gradient = sparse(torch.randint(0, num_rows, (num_tokens,)).unique(), num_rows, width, torch.float32)
    dense, rows = gradient.to_dense().view(-1), RowGradient(gradient)
    parameter = torch.nn.Parameter(torch.zeros(num_rows, width))
    part = ParamSlice("table", parameter, parameter.shape, 0, True)
    chunk = Chunk(Block("table", SizeClass.ROWS, [part]), 0, 0, dense.numel())
    edges = [0, *sorted(np.random.default_rng(3).integers(1, dense.numel(), 5).tolist()), dense.numel()]
    for start, stop in pairwise(edges):
        source, of_piece = rows.part(ChunkPiece(chunk, part, start, start, stop - start))
        memory = torch.full((stop - start,), float("nan"))
        memory[: source.numel()] = source
        of_piece.spread(memory)
        assert torch.equal(memory, dense[start:stop])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 100, 7])
def test_the_norm_is_that_of_the_whole_gradient(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    for num_rows, num_tokens in ((3000, 500), (999, 998), (50, 1), (10, 0)):
        gradient = sparse(torch.randint(0, num_rows, (num_tokens,)).unique(), num_rows, width, dtype)
        expected = torch.linalg.vector_norm(gradient.to_dense().view(-1), dtype=torch.float32)
        found = torch.linalg.vector_norm(RowGradient(gradient).to_measure(), dtype=torch.float32)
        assert torch.equal(found, expected)
