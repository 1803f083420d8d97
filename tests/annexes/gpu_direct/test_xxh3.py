"""Hashes of device memory have the bits of xxhash, in torch and in Triton."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
import xxhash
from python_runs import run_python
from torch import Tensor

from hf_lohan.annexes.gpu_direct import xxh3

HAS_TRITON = importlib.util.find_spec("triton") is not None
in_interpreter = pytest.mark.skipif(
    not HAS_TRITON or os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton, and TRITON_INTERPRET=1"
)
SIZES = [(1024, 1024), (16384, 16384), (7 * 4096, 65536), (5 * 16384 + 4096, 16384), (3 * 524288, 524288)]


def noise(num_bytes: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_bytes)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def expected(content: Tensor, piece_bytes: int) -> list[int]:
    parts = content.split(piece_bytes)
    return [xxhash.xxh3_64_intdigest(part.numpy().data) for part in parts]


def hashes(content: Tensor, piece_bytes: int) -> list[int]:
    found = xxh3.accumulate(content, piece_bytes, xxh3.table_on(content.device))
    return [one % (1 << 64) for one in xxh3.finish(found, content.numel(), piece_bytes).tolist()]


@pytest.mark.parametrize(("num_bytes", "piece_bytes"), SIZES)
def test_hashes_have_the_bits_of_xxhash(num_bytes: int, piece_bytes: int) -> None:
    content = noise(num_bytes)
    assert hashes(content, piece_bytes) == expected(content, piece_bytes)
    content[num_bytes // 2] ^= 1
    assert hashes(content, piece_bytes) == expected(content, piece_bytes)


@pytest.mark.parametrize("fill", [0, 255])
def test_extreme_words_are_hashed_right(fill: int) -> None:
    content = torch.full((4 * 4096,), fill, dtype=torch.uint8)
    assert hashes(content, 4096) == expected(content, 4096)


def test_large_pieces_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xxh3, "_WORDS_AT_ONCE", 3 * 512)
    content = noise(10 * 4096)
    assert hashes(content, 4096) == expected(content, 4096)


@in_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("num_blocks", [1, 2, 16])
def test_the_kernel_has_the_bits_of_torch(num_blocks: int) -> None:
    table = xxh3.table_on(torch.device("cpu"))
    pieces = noise(5 * 1024 * num_blocks).view(torch.int64).view(5, -1)
    assert torch.equal(xxh3._accumulate_in_triton(pieces, table), xxh3._accumulate(pieces, table))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_the_kernel_in_the_interpreter() -> None:
    # Triton decides when it is imported, so this is another process.
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "test_the_kernel_has"]
    assert "3 passed" in run_python(*command, TRITON_INTERPRET="1").stdout
