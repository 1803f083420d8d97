"""Host memory: exact sizes, alignment, shared files and the available amount."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from hf_lohan.device import (
    CpuDevice,
    available_host_memory_bytes,
    host_memory,
    host_memory_limit_bytes,
    mapped_empty,
    mapped_file,
)
from hf_lohan.hardware import anonymous_memory_bytes


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 4097, 3 * 1024**2 + 5])
def test_mappings_have_their_exact_size_and_start_at_a_page(num_bytes: int) -> None:
    memory = mapped_empty(num_bytes)
    assert (memory.numel(), memory.dtype) == (num_bytes, torch.uint8)
    assert memory.data_ptr() % mmap.PAGESIZE == 0
    memory.fill_(7)
    assert int(memory.long().sum()) == 7 * num_bytes


def test_a_mapping_lives_as_long_as_a_view_of_it() -> None:
    view = mapped_empty(1 << 20)[4096:].view(torch.float32)
    others = [mapped_empty(1 << 20).fill_(255) for _ in range(4)]
    view.fill_(1.5)
    assert bool((view == 1.5).all())
    assert all(bool((other == 255).all()) for other in others)


def test_a_pool_is_anonymous_memory_once_it_is_touched() -> None:
    before = anonymous_memory_bytes()
    memory = mapped_empty(64 << 20)
    untouched = anonymous_memory_bytes()
    memory.fill_(1)
    touched = anonymous_memory_bytes()
    assert untouched - before < 16 << 20
    assert touched - untouched > 48 << 20


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_a_size_below_one_byte_is_refused(num_bytes: int) -> None:
    with pytest.raises(ValueError, match=str(num_bytes)):
        mapped_empty(num_bytes)


@pytest.mark.parametrize("version", [1, 2])
def test_the_limits_of_all_control_groups_count(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of a cluster is in a group below the root. Cached files are freed when memory is needed."""
    former = version == 1
    own = tmp_path / ("memory/job/step" if former else "job/step")
    own.mkdir(parents=True)
    (tmp_path / "own").write_text("5:cpu:/other\n4:memory:/job/step\n0::/\n" if former else "0::/job/step\n")
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "_OWN_CGROUPS", tmp_path / "own")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if former else ("memory.max", "memory.current")

    def limit(folder: Path, num_bytes: object, used_bytes: int) -> None:
        for name, value in zip(names, (num_bytes, used_bytes), strict=True):
            (folder / name).write_text(f"{value}\n")

    assert available_host_memory_bytes() > 1 << 20  # the files do not exist yet
    limit(own, 1 << 62 if former else "max", 700)
    assert available_host_memory_bytes() > 1 << 20
    assert host_memory_limit_bytes() is None
    limit(own, 1000, 700)
    assert available_host_memory_bytes() == 300
    assert host_memory_limit_bytes() == 1000
    limit(own.parent, 1000, 900)
    assert available_host_memory_bytes() == 100
    (own.parent / "memory.stat").write_text(
        "anon 5\n" + ("total_inactive_file 50\n" if former else "inactive_file 50\n")
    )
    assert available_host_memory_bytes() == 150
    limit(own, 1000, 1200)
    assert available_host_memory_bytes() == 0
    limit(own.parent, 800, 900)
    assert host_memory_limit_bytes() == 800


def test_the_callback_runs_after_the_last_reference_is_gone() -> None:
    unmapped: list[int] = []
    host = mapped_empty(8192, before_unmap=lambda: unmapped.append(1))
    part = host[4096:].view(torch.float32)
    del host
    assert not unmapped  # a view still exists
    del part
    assert unmapped == [1]


def test_two_mappings_of_a_file_in_ram_are_the_same_memory() -> None:
    fd = os.memfd_create("lohan-test")
    os.ftruncate(fd, 3 * mmap.PAGESIZE)
    unmapped: list[int] = []
    one = mapped_file(fd, 2 * mmap.PAGESIZE + 5, before_unmap=lambda: unmapped.append(1))
    other = CpuDevice().host_shared(fd, 2 * mmap.PAGESIZE + 5)
    os.close(fd)
    assert one.data_ptr() != other.data_ptr()
    assert one.data_ptr() % mmap.PAGESIZE == other.data_ptr() % mmap.PAGESIZE == 0
    one[-1] = 7
    assert other[-1] == 7
    del one
    assert unmapped == [1]
    assert other[-1] == 7


def test_a_forked_child_does_not_map_shared_memory() -> None:
    """A data loader's worker must not keep a rank's memory allocated."""
    fd = os.memfd_create("lohan-test")
    os.ftruncate(fd, mmap.PAGESIZE)
    shared = mapped_file(fd, mmap.PAGESIZE)
    child = os.fork()
    if child == 0:
        os._exit(1 if "memfd:lohan-test" in Path("/proc/self/maps").read_text() else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert "memfd:lohan-test" in Path("/proc/self/maps").read_text()
    del shared
    os.close(fd)
