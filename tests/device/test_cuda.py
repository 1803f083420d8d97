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
    """A CUDA runtime that pins at most ``limit_bytes``. A failed call sets `last_error`, as in CUDA."""

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


def test_smaller_buffers_are_still_pinned_after_a_refusal(caplog: pytest.LogCaptureFixture) -> None:
    runtime = Runtime(limit_bytes=100)
    pinning = HostPinning(runtime, runtime.take_error)
    with caplog.at_level(logging.WARNING):
        done = [pinning.pin(address, num_bytes) for address, num_bytes in enumerate([60, 80, 90, 80, 70, 20, 30, 20])]
    assert done == [True, False, False, False, False, True, False, True]
    assert runtime.tried == [60, 80, 70, 20, 30, 20], "a buffer of at least a refused size was tried"
    assert [record.getMessage() for record in caplog.records] == [
        "pinning 80 bytes of host memory was refused (cudaError 2), so copies are slower; raise the memlock limit or "
        "lower cpu_memory (WSL2 allows only part of the RAM)"
    ]
    assert pinning.was_refused


def test_a_refusal_clears_the_cuda_error() -> None:
    """torch's next operation on the device would raise it."""
    runtime = Runtime(limit_bytes=100)
    pinning = HostPinning(runtime, runtime.take_error)
    for num_bytes in (200, 150):
        assert not pinning.pin(0, num_bytes)
        assert runtime.last_error == 0
    pinning.unpin(0)
    assert runtime.last_error == 0


def test_unpinned_memory_makes_room() -> None:
    runtime = Runtime(limit_bytes=100)
    pinning = HostPinning(runtime, runtime.take_error)
    assert pinning.pin(0, 100) and not pinning.pin(1, 50)
    pinning.unpin(0)
    assert pinning.pin(1, 40) and runtime.pinned == {1: 40}


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The allocator's settings; the last one is in force. The driver can grow segments."""
    applied = [""]
    monkeypatch.setattr(cuda, "allocator_settings", lambda: applied[-1])
    monkeypatch.setattr(cuda, "set_allocator_settings", applied.append)
    monkeypatch.setattr(cuda, "has_virtual_memory", lambda _index: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    return applied


def test_segments_grow_by_default(settings: list[str]) -> None:
    assert grow_segments(0)
    assert settings[1:] == ["expandable_segments:True"]


def test_other_settings_are_kept(settings: list[str]) -> None:
    settings[0] = "max_split_size_mb:128"
    assert grow_segments(0)
    assert settings[1:] == ["max_split_size_mb:128,expandable_segments:True"]


@pytest.mark.parametrize(
    ("setting", "grows"), [("expandable_segments:False", False), ("expandable_segments: True", True)]
)
def test_the_users_setting_for_segments_is_kept(setting: str, grows: bool, settings: list[str]) -> None:
    settings[0] = setting
    assert grow_segments(0) is grows
    assert settings == [setting]


def test_segments_do_not_grow_without_driver_support(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would call missing functions, which ends the process."""
    monkeypatch.setattr(cuda, "has_virtual_memory", lambda _index: False)
    assert not grow_segments(0)
    assert settings == [""]


def test_another_allocator_is_not_changed(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert not grow_segments(0)
    assert settings == [""]


@pytest.mark.parametrize(
    ("driver", "nvml"), [("libnot_there.so", C_LIBRARY), (C_LIBRARY, C_LIBRARY), (C_LIBRARY, "libnot_there.so")]
)
def test_a_missing_driver_library_or_function_is_noticed(driver: str, nvml: str) -> None:
    assert not has_virtual_memory(0, driver, nvml)
