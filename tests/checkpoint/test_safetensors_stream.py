"""Files written piece by piece can be read by the safetensors library."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from hf_lohan.checkpoint.safetensors_stream import TensorSpec, write_safetensors
from hf_lohan.files import StorageError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.int8)


def spec(name: str, values: Tensor, *sizes: int) -> TensorSpec:
    return TensorSpec(name, values.dtype, values.numel(), values.split(list(sizes)) if sizes else [values])


def test_every_dtype_and_odd_sizes_are_read_back(tmp_path: Path) -> None:
    values = {
        f"{dtype}.{numel}": torch.randint(-128, 128, (numel,)).to(dtype) for dtype in DTYPES for numel in (1, 3, 1000)
    }
    path = tmp_path / "file.safetensors"
    write_safetensors(path, [spec(name, tensor) for name, tensor in values.items()])
    loaded = load_file(path)
    assert loaded.keys() == values.keys()
    for name, tensor in values.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


@pytest.mark.parametrize("sizes", [(10,), (1, 9), (3, 3, 4), (0, 10), (1,) * 10])
def test_pieces_are_joined_in_order(sizes: tuple[int, ...], tmp_path: Path) -> None:
    values = torch.arange(10.0)
    path = tmp_path / "file.safetensors"
    write_safetensors(path, [spec("first", values + 5), spec("pieces", values, *sizes), spec("last", values - 5)])
    loaded = load_file(path)
    assert torch.equal(loaded["pieces"], values)
    assert torch.equal(loaded["first"], values + 5) and torch.equal(loaded["last"], values - 5)


def test_pieces_are_read_lazily(tmp_path: Path) -> None:
    """All pieces share one buffer, as in the store's reader."""
    buffer = torch.empty(4)
    alive: list[str] = []

    def pieces(name: str, start: float) -> Iterator[Tensor]:
        alive.append(name)
        for number in range(3):
            yield buffer.fill_(start + number)

    path = tmp_path / "file.safetensors"
    specs = [TensorSpec(name, torch.float32, 12, pieces(name, start)) for name, start in (("a", 0.0), ("b", 10.0))]
    write_safetensors(path, iter(specs))
    assert alive == ["a", "b"]
    expected = [value for value in (0.0, 1.0, 2.0) for _ in range(4)]
    loaded = load_file(path)
    assert loaded["a"].tolist() == expected
    assert loaded["b"].tolist() == [10 + value for value in expected]


def test_a_strided_tensor_is_written(tmp_path: Path) -> None:
    values = torch.arange(20.0)[::2]
    path = tmp_path / "file.safetensors"
    write_safetensors(path, [spec("strided", values)])
    assert torch.equal(load_file(path)["strided"], values)


def test_the_header_is_aligned_and_readable(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    write_safetensors(path, [spec('näme with "quotes"', torch.ones(5))])
    header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
    assert (8 + header_bytes) % 4096 == 0  # data are aligned to file system blocks
    assert path.stat().st_size == 8 + header_bytes + 20
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert list(file.keys()) == ['näme with "quotes"']
        assert file.get_slice('näme with "quotes"')[2:4].tolist() == [1.0, 1.0]


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    write_safetensors(path, [])
    assert load_file(path) == {}


# Cloning.


def test_a_clone_replaces_the_pieces(tmp_path: Path) -> None:
    """Clones lie between written tensors, and may extend the file."""
    path = tmp_path / "file.safetensors"
    values = torch.arange(3000.0)
    places: list[int] = []

    def clone(fd: int, offset: int) -> bool:
        places.append(offset)
        os.pwrite(fd, values.numpy().tobytes(), offset)
        return True

    def never_read() -> Iterator[Tensor]:
        raise AssertionError("the pieces of a cloned tensor were read")
        yield

    cloned = [TensorSpec(name, torch.float32, 3000, never_read(), clone) for name in ("second", "last")]
    write_safetensors(path, [spec("first", values + 1), cloned[0], spec("third", values + 3), cloned[1]])
    loaded = load_file(path)
    assert places == [4096 + 12_000, 4096 + 36_000]
    for name, difference in (("first", 1), ("second", 0), ("third", 3), ("last", 0)):
        assert torch.equal(loaded[name], values + difference)


def test_pieces_overwrite_an_incomplete_clone(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    values = torch.arange(3000.0)

    def clone(fd: int, offset: int) -> bool:
        os.pwrite(fd, b"x" * 12_000, offset)
        return False

    write_safetensors(path, [spec("first", values), TensorSpec("last", torch.float32, 3000, values.split(1000), clone)])
    assert torch.equal(load_file(path)["last"], values)


# Failures.


@pytest.mark.parametrize("numel", [9, 11])
def test_pieces_that_do_not_add_up_are_refused(numel: int, tmp_path: Path) -> None:
    wrong = TensorSpec("wrong", torch.float32, numel, [torch.ones(5), torch.ones(5)])
    with pytest.raises(ValueError, match=f"wrong have 40 bytes, and its header gives {4 * numel}"):
        write_safetensors(tmp_path / "file.safetensors", [wrong, spec("next", torch.ones(3))])


def test_a_full_disk_is_named_with_bytes(tmp_path: Path) -> None:
    def pieces() -> Iterator[Tensor]:
        yield torch.ones(5)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "file.safetensors"
    message = rf"cannot write {path} \(No space left on device\): the file needs 4,136 bytes and [\d,]+ are left"
    with pytest.raises(StorageError, match=message):
        write_safetensors(path, [TensorSpec("full", torch.float32, 10, pieces())])
