"""Rows are counted in one fetch, and counts are used again only for unchanged ids."""

from __future__ import annotations

import pytest
import torch
from async_device import AsyncDevice
from torch import Tensor

from hf_lohan.device import Event
from hf_lohan.experts.routing import HostNumbers, KnownCounts, Routing

NUM_EXPERTS = 5


class CountingDevice(AsyncDevice):
    """A fetched tensor has NaN bytes before the wait."""

    num_fetches = 0

    def fetch(self, dst: Tensor, src: Tensor) -> Event:
        self.num_fetches += 1
        return super().fetch(dst, src)


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


@pytest.fixture
def device() -> CountingDevice:
    return CountingDevice()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_are_counted_in_one_fetch(device: CountingDevice, dtype: torch.dtype) -> None:
    chosen = ids([3, 1], [1, 4], [3, 3]).to(dtype)
    expected_ends = torch.tensor([0, 2, 2, 6])
    routing = Routing(chosen, NUM_EXPERTS, HostNumbers(device), KnownCounts(), expected_ends)
    routing.wait_for_counts()
    assert (routing.experts, routing.num_rows, routing.expected) == ([1, 3, 4], [2, 3, 1], [0, 2, 0, 4])
    assert device.num_fetches == 1
    sorted_ids = chosen.reshape(-1)[routing.order]
    assert sorted_ids.tolist() == [1, 1, 3, 3, 3, 4]
    assert (list(routing.counts), routing.ends) == ([0, 2, 0, 3, 1], [0, 0, 2, 2, 5, 6])
    assert torch.equal(sorted_ids[routing.place], chosen.reshape(-1))


def test_no_rows_are_counted_as_none(device: CountingDevice) -> None:
    routing = Routing(torch.empty(0, 2, dtype=torch.long), NUM_EXPERTS, HostNumbers(device), KnownCounts())
    routing.wait_for_counts()
    assert routing.experts == routing.num_rows == []


@pytest.mark.parametrize("stranger", [-1, NUM_EXPERTS, NUM_EXPERTS + 3])
def test_an_expert_out_of_range_is_refused(device: CountingDevice, stranger: int) -> None:
    routing = Routing(ids([0, stranger], [2, 1]), NUM_EXPERTS, HostNumbers(device), KnownCounts())
    with pytest.raises(ValueError, match=f"a router chose expert {stranger} of 5"):
        routing.wait_for_counts()


def test_counts_are_used_again_while_the_ids_live_unchanged(device: CountingDevice) -> None:
    host, known = HostNumbers(device), KnownCounts()

    def count(chosen: Tensor) -> list[int]:
        routing = Routing(chosen, NUM_EXPERTS, host, known)
        routing.wait_for_counts()
        return routing.experts

    chosen = ids([0, 1], [1, 2])
    assert count(chosen) == count(chosen) == count(chosen.detach()) == [0, 1, 2]
    assert device.num_fetches == 1, "a backward uses the ids of its forward"
    assert count(chosen[:1]) == [0, 1], "a part of the ids has other counts"
    chosen.fill_(4)
    assert count(chosen) == [4], "changed ids have other counts"
    num_fetches = device.num_fetches
    for expert in range(NUM_EXPERTS):  # each tensor probably has the address of the previous one
        assert count(torch.full((2, 2), expert)) == [expert]
    assert device.num_fetches == num_fetches + NUM_EXPERTS
    assert len(known._of_ids) <= 2, "counts of freed ids are forgotten"


def test_ids_of_inference_are_counted_each_time(device: CountingDevice) -> None:
    with torch.inference_mode():
        chosen = ids([0, 1])
        for _ in range(2):
            routing = Routing(chosen, NUM_EXPERTS, HostNumbers(device), KnownCounts())
            routing.wait_for_counts()
            assert routing.experts == [0, 1]
