"""The mean over ranks equals one process that accumulates, and DDP that sums in rank order, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_lohan.ranks import sum_in_rank_order_
from hf_lohan.ranks.collectives.rank_order_sum import SUM_TILE_NUMEL

SIZES = [1, 7, SUM_TILE_NUMEL, SUM_TILE_NUMEL + 1, 3 * SUM_TILE_NUMEL - 5]


def gradients(num_ranks: int, numel: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(numel + num_ranks)
    scales = 2.0 ** torch.randint(-20, 20, (num_ranks, numel), generator=generator)
    return list((torch.randn(num_ranks, numel, generator=generator) * scales).to(dtype))


def one_after_the_other(parts: list[Tensor], num_ranks: int) -> Tensor:
    factor = torch.tensor(1.0) / torch.tensor(float(num_ranks))
    total = parts[0].float() * factor
    for part in parts[1:]:
        total = total + part.float() * factor
    return total


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_element_is_summed_in_rank_order(dtype: torch.dtype, num_ranks: int, numel: int) -> None:
    parts = gradients(num_ranks, numel, dtype)
    out = torch.full((numel,), float("nan"))
    assert sum_in_rank_order_(out, parts, num_ranks) is out
    assert torch.equal(out.view(torch.int32), one_after_the_other(parts, num_ranks).view(torch.int32))
    if num_ranks > 2 and numel > 7:
        assert not torch.equal(out, one_after_the_other(parts[::-1], num_ranks)), "the order does not matter"


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_sum_may_overwrite_any_part(which: int, numel: int) -> None:
    parts = gradients(3, numel)
    expected = one_after_the_other(parts, 3)
    assert torch.equal(sum_in_rank_order_(parts[which], parts, 3), expected)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_sum_may_overwrite_a_part_in_the_second_half_of_its_memory(which: int, numel: int) -> None:
    """Gradients of bfloat16 weights are in the second half of a float32 buffer."""
    parts = gradients(3, numel, torch.bfloat16)
    expected = one_after_the_other(parts, 3)
    out = torch.empty(numel)
    landing = out.view(torch.bfloat16)[numel:]
    landing.copy_(parts[which])
    parts[which] = landing
    assert torch.equal(sum_in_rank_order_(out, parts, 3), expected)


def test_a_part_that_would_be_overwritten_too_early_is_refused() -> None:
    out = torch.zeros(100)
    with pytest.raises(ValueError, match="begins 0 bytes after the memory for the sum"):
        sum_in_rank_order_(out, [out.view(torch.bfloat16)[:100]], 1)
    memory = torch.zeros(101)
    with pytest.raises(ValueError, match="begins -4 bytes after the memory"):
        sum_in_rank_order_(memory[1:], [memory[:100]], 1)


def test_no_parts_and_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="no gradients to sum"):
        sum_in_rank_order_(torch.zeros(4), [], 2)
    with pytest.raises(ValueError, match=r"shape \[3\] cannot be added to \[4\]"):
        sum_in_rank_order_(torch.zeros(4), [torch.zeros(3)], 2)
