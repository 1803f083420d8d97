"""Parts of the CUDA device that need no GPU: refused pinning, and whether allocator segments may grow."""

from __future__ import annotations

import logging

import pytest
import torch

from hf_lohan.device import cuda
from hf_lohan.device.cuda import HostPinning, grow_segments, has_virtual_memory

OUT_OF_MEMORY, NOT_REGISTERED = 2, 713
C_LIBRARY = "libc.so.6"


class Runtime:
    """cudaHostRegister and what else concerns it, where no more than ``limit_bytes`` can be pinned. As in CUDA, a call
    that fails leaves an error behind."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.pinned: dict[int, int] = {}
        self.tried: list[int] = []
        self.last_error = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.tried.append(num_bytes)
        if sum(self.pinned.values()) + num_bytes > self._limit_bytes:
            self.last_error = OUT_OF_MEMORY
            return OUT_OF_MEMORY
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if self.pinned.pop(address, None) is None:
            self.last_error = NOT_REGISTERED
            return NOT_REGISTERED
        return 0

    def take_error(self) -> None:
        self.last_error = 0


def test_after_a_refusal_what_is_smaller_is_still_pinned(caplog: pytest.LogCaptureFixture) -> None:
    runtime = Runtime(limit_bytes=100)
    pinning = HostPinning(runtime, runtime.take_error)
    with caplog.at_level(logging.WARNING):
        done = [pinning.pin(address, num_bytes) for address, num_bytes in enumerate([60, 80, 90, 80, 70, 20, 30, 20])]
    assert done == [True, False, False, False, False, True, False, True]
    assert runtime.tried == [60, 80, 70, 20, 30, 20], "what is as large as what was refused is not tried again"
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "pinning 80 bytes of host memory was refused (cudaError 2)"
    ]
    assert pinning.was_refused


def test_no_refusal_leaves_an_error_behind() -> None:
    """Whatever torch does next with the device would raise it."""
    runtime = Runtime(limit_bytes=100)
    pinning = HostPinning(runtime, runtime.take_error)
    for num_bytes in (200, 150):
        assert not pinning.pin(0, num_bytes)
        assert runtime.last_error == 0
    pinning.unpin(0)
    assert runtime.last_error == 0


def test_what_is_unpinned_makes_room() -> None:
    runtime = Runtime(limit_bytes=100)
    pinning = HostPinning(runtime, runtime.take_error)
    assert pinning.pin(0, 100) and not pinning.pin(1, 50)
    pinning.unpin(0)
    assert pinning.pin(1, 40) and runtime.pinned == {1: 40}


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The allocator's settings, the last one in force. The driver can grow segments."""
    applied = [""]
    monkeypatch.setattr(cuda, "allocator_settings", lambda: applied[-1])
    monkeypatch.setattr(cuda, "set_allocator_settings", applied.append)
    monkeypatch.setattr(cuda, "has_virtual_memory", lambda _index: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    return applied


def test_segments_grow_unless_somebody_says_otherwise(settings: list[str]) -> None:
    assert grow_segments(0)
    assert settings[1:] == ["expandable_segments:True"]


def test_what_was_set_stays_set(settings: list[str]) -> None:
    settings[0] = "max_split_size_mb:128"
    assert grow_segments(0)
    assert settings[1:] == ["max_split_size_mb:128,expandable_segments:True"]


@pytest.mark.parametrize(("said", "grows"), [("expandable_segments:False", False), ("expandable_segments: True", True)])
def test_what_the_user_says_of_segments_holds(said: str, grows: bool, settings: list[str]) -> None:
    settings[0] = said
    assert grow_segments(0) is grows
    assert settings == [said]


def test_a_driver_that_cannot_is_not_asked_to(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would call functions that are not there, and the process would die."""
    monkeypatch.setattr(cuda, "has_virtual_memory", lambda _index: False)
    assert not grow_segments(0)
    assert settings == [""]


def test_another_allocator_is_left_alone(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert not grow_segments(0)
    assert settings == [""]


@pytest.mark.parametrize(
    ("driver", "nvml"), [("libnot_there.so", C_LIBRARY), (C_LIBRARY, C_LIBRARY), (C_LIBRARY, "libnot_there.so")]
)
def test_what_is_missing_of_the_driver_is_noticed(driver: str, nvml: str) -> None:
    assert not has_virtual_memory(0, driver, nvml)
