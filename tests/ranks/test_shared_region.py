"""Ranks of a node share one region of memory, and all of them get its refusals."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest
import torch
from eventually import becomes_true

from hf_lohan.ranks import Links, SharedRegion
from hf_lohan.ranks.transport import shared_region
from hf_lohan.testing.thread_ranks import rank_outcomes, run_ranks


def num_descriptors() -> int:
    """Return the number of open descriptors of regions named "test"."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # another thread has closed it
            found += "memfd:lohan-test" in os.readlink(f"/proc/self/fd/{fd}")
    return found


def test_a_region_that_is_gone_keeps_no_descriptor() -> None:
    def create(links: Links) -> bool:
        links.barrier("the start")
        before = num_descriptors()
        links.barrier("the descriptors to be counted")
        for _ in range(3):
            SharedRegion.create(links, 4096, "test")
        links.barrier("the regions")
        return becomes_true(lambda: num_descriptors() <= before)  # earlier tests may leave some to the garbage

    assert run_ranks(2, create) == [True, True]


def test_the_offset_of_a_tensor_in_the_region() -> None:
    with Links.alone() as links:
        region = SharedRegion.create(links, 8192, "test")
    assert region.bytes.count_nonzero() == 0
    assert region.offset_of(region.bytes[4096:].view(torch.float32)) == 4096
    assert region.offset_of(region.bytes[8000:8004]) == 8000
    assert region.offset_of(torch.zeros(4)) is None


def test_too_much_memory_is_refused_on_all_ranks() -> None:
    outcomes = rank_outcomes(3, lambda links: SharedRegion.create(links, 1 << 50, "weights"))
    for outcome in outcomes:
        assert "3 ranks of a node share 1 PiB of memory for weights" in str(outcome.error)
        assert "lower cpu_memory" in str(outcome.error)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), FileNotFoundError(2, "No such file")])
def test_a_rank_that_cannot_open_the_memory_is_named(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of another user, or in another container."""

    def refuse(path: str, *_: object) -> torch.Tensor:
        raise error

    monkeypatch.setattr(shared_region, "_map", refuse)
    for outcome in rank_outcomes(2, lambda links: SharedRegion.create(links, 4096, "weights")):
        assert "rank 1 cannot map the memory that its node shares for weights" in str(outcome.error)
        assert "start the ranks of one node as one user, in one container" in str(outcome.error)


def test_sizes_that_differ_are_refused() -> None:
    outcomes = rank_outcomes(2, lambda links: SharedRegion.create(links, 4096 + links.ranks.rank, "weights"))
    for outcome in outcomes:
        assert "rank 1 wants 4097 bytes" in str(outcome.error)


def test_a_region_of_zero_bytes_is_refused() -> None:
    with Links.alone() as links, pytest.raises(ValueError, match="0 bytes"):
        SharedRegion.create(links, 0, "weights")


def test_without_memory_files_a_small_container_is_told_to_set_shm_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with Links.alone() as links:
        region = SharedRegion.create(links, 4096, "weights")  # in /dev/shm, without a name
        assert region.bytes.count_nonzero() == 0
        usage = shared_region.shutil.disk_usage("/dev/shm")
        monkeypatch.setattr(shared_region.shutil, "disk_usage", lambda path: usage._replace(free=64 << 20))
        with pytest.raises(ValueError, match=r"wants 100 MiB.*/dev/shm has 64 MiB free.*--shm-size"):
            SharedRegion.create(links, 100 << 20, "weights")
