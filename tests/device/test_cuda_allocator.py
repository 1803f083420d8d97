"""Whether torch's allocator may grow its segments: what the settings say, then what the driver can."""

from __future__ import annotations

import pytest
import torch

from hf_lohan.device import cuda_allocator
from hf_lohan.device.cuda_allocator import grow_segments, has_virtual_memory

C_LIBRARY = "libc.so.6"


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The allocator's settings, the last one in force. The driver can grow segments."""
    settings = [""]
    monkeypatch.setattr(cuda_allocator, "allocator_settings", lambda: settings[-1])
    monkeypatch.setattr(cuda_allocator, "set_allocator_settings", settings.append)
    monkeypatch.setattr(cuda_allocator, "has_virtual_memory", lambda _index: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    return settings


def test_segments_grow_unless_somebody_says_otherwise(given: list[str]) -> None:
    assert grow_segments(0)
    assert given[1:] == ["expandable_segments:True"]


def test_what_was_set_stays_set(given: list[str]) -> None:
    given[0] = "max_split_size_mb:128"
    assert grow_segments(0)
    assert given[1:] == ["max_split_size_mb:128,expandable_segments:True"]


@pytest.mark.parametrize(("said", "grows"), [("expandable_segments:False", False), ("expandable_segments: True", True)])
def test_what_the_user_says_of_segments_holds(said: str, grows: bool, given: list[str]) -> None:
    given[0] = said
    assert grow_segments(0) is grows
    assert given == [said]


def test_a_driver_that_cannot_is_not_asked_to(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would call functions that are not there, and the process would die."""
    monkeypatch.setattr(cuda_allocator, "has_virtual_memory", lambda _index: False)
    assert not grow_segments(0)
    assert given == [""]


def test_another_allocator_is_left_alone(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert not grow_segments(0)
    assert given == [""]


@pytest.mark.parametrize(
    ("driver", "nvml"), [("libnot_there.so", C_LIBRARY), (C_LIBRARY, C_LIBRARY), (C_LIBRARY, "libnot_there.so")]
)
def test_what_is_missing_of_the_driver_is_noticed(driver: str, nvml: str) -> None:
    assert not has_virtual_memory(0, driver, nvml)
