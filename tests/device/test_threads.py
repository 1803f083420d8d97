"""torch gets the cores, whatever a launcher left in the environment."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import torch

from hf_lohan.device import set_compute_threads, usable_cpus


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_affinity_mask_decides() -> None:
    assert usable_cpus() == len(os.sched_getaffinity(0))


def test_threads_are_set_and_the_change_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    with caplog.at_level(logging.INFO):
        set_compute_threads(2)
    assert torch.get_num_threads() == 2
    assert "2 threads now, not 1 (OMP_NUM_THREADS=1)" in caplog.text


def test_nothing_is_said_where_nothing_changes(caplog: pytest.LogCaptureFixture) -> None:
    torch.set_num_threads(2)
    with caplog.at_level(logging.INFO):
        set_compute_threads(2)
    assert not caplog.records
