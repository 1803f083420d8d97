"""Ranks begin a step with the buffers of rank 0, as under DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equal_tensors import same_bits
from torch import nn

from hf_lohan.engine.ranks import RankBatches
from hf_lohan.planning import StepShape
from hf_lohan.ranks import Links, RanksDisagreeError
from hf_lohan.testing.thread_ranks import run_ranks

SHAPE = StepShape(2, 16)
VALUES = {
    "mean": torch.tensor([0.25, -0.0, float("nan")]),
    "count": torch.tensor(3),
    "mask": torch.tensor([[True, False]]),
    "rounded": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
    "empty": torch.empty(0),
}


def model_with_buffers() -> nn.Module:
    model = nn.Linear(2, 2)
    for name, value in VALUES.items():
        model.register_buffer(name, value.clone(), persistent=name != "mask")
    return model


def change(model: Any, rank: int) -> None:
    """Change all buffers, each rank in its own way, and some as `.data`, which counts no version."""
    model.mean.data += rank + 1
    model.count += rank + 1
    model.mask.data.fill_(rank == 1)
    model.rounded *= rank + 2


def begin_by_ranks(begin: Callable[[RankBatches, nn.Module, int], object]) -> tuple[list[Any], list[list[str]]]:
    """Run `begin` on two ranks. Return their models, and the tags of their exchanges."""
    tags: list[list[str]] = [[], []]

    def on_rank(links: Links) -> nn.Module:
        rank, gather = links.ranks.rank, links.all_gather

        def noted(tag: str, payload: bytes = b"") -> list[bytes]:
            tags[rank].append(tag)
            return gather(tag, payload)

        links.all_gather = noted  # type: ignore[method-assign]
        model = model_with_buffers()
        begin(RankBatches(model, links), model, rank)
        return model

    return run_ranks(2, on_rank), tags


def assert_same_buffers(ours: nn.Module, expected: nn.Module) -> None:
    assert all(map(same_bits, ours.buffers(), expected.buffers()))


def changed_model(rank: int) -> nn.Module:
    model = model_with_buffers()
    change(model, rank)
    return model


def test_a_step_begins_with_the_buffers_of_rank_0() -> None:
    def begin(batches: RankBatches, model: nn.Module, rank: int) -> None:
        change(model, rank)
        assert batches.begin_forward(SHAPE, True) == SHAPE

    for model in begin_by_ranks(begin)[0]:
        assert_same_buffers(model, changed_model(0))


@pytest.mark.parametrize("begins", [(False, False), (True, False)])
def test_other_forwards_keep_what_a_rank_has(begins: tuple[bool, bool]) -> None:
    """A forward is no step's first if any rank says so."""

    def begin(batches: RankBatches, model: nn.Module, rank: int) -> None:
        change(model, rank)
        batches.begin_forward(SHAPE, begins[rank])

    for rank, model in enumerate(begin_by_ranks(begin)[0]):
        assert_same_buffers(model, changed_model(rank))


def test_own_buffers_follow_rank_0_once() -> None:
    def begin(batches: RankBatches, model: nn.Module, rank: int) -> None:
        batches.keep_own_buffers()
        model.mean.fill_(7 * rank)
        batches.begin_forward(SHAPE, True)
        assert torch.equal(model.mean, torch.zeros(3))
        change(model, rank)
        batches.begin_forward(SHAPE, True)

    for rank, model in enumerate(begin_by_ranks(begin)[0]):
        assert torch.equal(model.mean, torch.full((3,), rank + 1.0))


def test_equal_buffers_are_not_sent() -> None:
    def begin(batches: RankBatches, model: nn.Module, rank: int) -> None:
        batches.begin_forward(SHAPE, True)
        batches.begin_forward(None, True)

    assert begin_by_ranks(begin)[1] == [["the lengths of batches of a forward"] * 2] * 2


def test_buffers_that_replace_others_follow_rank_0() -> None:
    def begin(batches: RankBatches, model: nn.Module, rank: int) -> None:
        batches.begin_forward(SHAPE, True)
        model.mean = torch.full((3,), float(rank + 5))  # as rotary frequencies that depend on the length
        batches.begin_forward(None, True)

    assert [model.mean.tolist() for model in begin_by_ranks(begin)[0]] == [[5.0] * 3] * 2


def test_the_copy_counts_as_no_write() -> None:
    """Otherwise ranks other than 0 would refuse micro-batches that run together, and backwards of earlier forwards."""
    versions: list[list[int]] = [[], []]

    def begin(batches: RankBatches, model: nn.Module, rank: int) -> None:
        change(model, rank)
        before = [buffer._version for buffer in model.buffers()]
        batches.begin_forward(SHAPE, True)
        versions[rank] = [buffer._version - number for buffer, number in zip(model.buffers(), before, strict=True)]

    for model in begin_by_ranks(begin)[0]:
        assert_same_buffers(model, changed_model(0))
    assert versions == [[0] * len(VALUES)] * 2


@pytest.mark.parametrize(
    ("replacement", "text"),
    [(torch.zeros(4), r"float32 \[4\]"), (torch.zeros(3, dtype=torch.int), r"int32 \[3\]"), (None, "missing")],
)
def test_a_buffer_of_another_form_on_a_rank_is_refused(replacement: torch.Tensor | None, text: str) -> None:
    def begin(batches: RankBatches, model: nn.Module, rank: int) -> None:
        if rank:
            model.mean = replacement
        batches.begin_forward(SHAPE, True)

    with pytest.raises(RanksDisagreeError, match=rf'mean is "float32 \[3\]" on rank 0 and "?{text}"? on rank 1'):
        begin_by_ranks(begin)
