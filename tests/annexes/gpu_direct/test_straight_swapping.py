"""Activations go straight from the device to the SSD and back with the same bits, through a double of libcufile."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from async_device import AsyncDevice
from cufile_double import FakeCuFile
from swapper_bench import GRANULE_BYTES, SwapperBench
from torch import Tensor

from hf_lohan.annexes.gpu_direct.cufile import CuFileBackend, CuFileLibrary
from hf_lohan.annexes.gpu_direct.xxh3 import Xxh3Hasher
from hf_lohan.costs import Placement
from hf_lohan.device import CpuDevice, Device
from hf_lohan.files import CorruptionError, StorageError


class HostIsDevice(Xxh3Hasher):
    """All memory but the staging buffers counts as the device's."""

    def __init__(self, device: Device, staging: Tensor) -> None:
        super().__init__(device)
        self._staging = staging.untyped_storage().data_ptr()

    def covers(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() != self._staging


class StraightBench(SwapperBench):
    def __init__(self, folder: Path, library: FakeCuFile, device: Device | None = None) -> None:
        self.backend = CuFileBackend(CuFileLibrary(library))
        super().__init__(folder, ssd_granules=400, backend=self.backend, device=device, num_buffers=1)
        assert self.staging is not None and self._files is not None
        buffer = self.staging.acquire()
        hasher = HostIsDevice(self.device, buffer.bytes)
        buffer.release()
        self._files.use_device(hasher)
        self.swapper.use_ssd(self._files, self.staging, 400 * GRANULE_BYTES, hasher)

    def close(self) -> None:
        super().close()
        self.backend.close_library()


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[..., StraightBench]]:
    benches: list[StraightBench] = []

    def make(library: FakeCuFile, **settings: Any) -> StraightBench:
        benches.append(StraightBench(tmp_path, library, **settings))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


def noise(num_bytes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


SIZES = [GRANULE_BYTES, 1, 3 * GRANULE_BYTES + 1, 5 * GRANULE_BYTES + 4096, 2 * GRANULE_BYTES - 1, 7 * GRANULE_BYTES]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", [CpuDevice, AsyncDevice])
def test_unaligned_ends_short_calls_and_delays_change_no_bit(
    make_bench: Callable[..., StraightBench], kind: type[Device], seed: int
) -> None:
    library = FakeCuFile(short=[4096, 9000, -1, 20000] * 6, max_delay_s=2e-3, seed=seed)
    bench = make_bench(library, device=kind())
    tensors = [noise(size, seed=size) for size in SIZES]
    swapped = [bench.swapper.swap_out(tensor, Placement.SSD) for tensor in tensors]
    bench.swapper.drain([one for one in swapped if one is not None])
    for tensor, one in zip(reversed(tensors), reversed(swapped), strict=True):
        assert one is not None
        bench.swapper.prefetch(one)
        assert torch.equal(bench.swapper.swap_in(one), tensor)
    whole = sum(size // GRANULE_BYTES * GRANULE_BYTES for size in SIZES)
    assert library.moved_bytes["cuFileWrite"] >= whole and library.moved_bytes["cuFileRead"] >= whole
    assert (bench.backend.direct_write_bytes, bench.backend.direct_read_bytes) == (whole, whole)
    del swapped, one
    assert bench.is_empty()


def test_memory_that_is_not_aligned_to_words_goes_through_a_buffer(make_bench: Callable[..., StraightBench]) -> None:
    bench = make_bench(library := FakeCuFile())
    tensor = noise(2 * GRANULE_BYTES + 3, seed=1)[3:]
    swapped = bench.swapper.swap_out(tensor, Placement.SSD)
    assert swapped is not None and torch.equal(bench.swapper.swap_in(swapped), tensor)
    assert not library.moved_bytes


def test_the_original_stays_until_it_is_written(make_bench: Callable[..., StraightBench]) -> None:
    bench = make_bench(FakeCuFile(max_delay_s=0.05, seed=3))
    tensor = noise(8 * GRANULE_BYTES, seed=2)
    expected = tensor.clone()
    swapped = bench.swapper.swap_out(tensor, Placement.SSD)
    assert swapped is not None
    bench.swapper.wait_until_stored(swapped)
    assert swapped.writes[0].done()
    tensor.zero_()
    assert torch.equal(bench.swapper.swap_in(swapped), expected)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("cuFileHandleRegister", 5008),
        *((call, code) for call in ("cuFileWrite", "cuFileRead") for code in (errno.EIO, 5036)),
    ],
)
def test_errors_come_out_of_swap_in(make_bench: Callable[..., StraightBench], call: str, code: int) -> None:
    bench = make_bench(FakeCuFile(errors={(call, 1): code}))
    tensor = noise(3 * GRANULE_BYTES + 5, seed=4)
    swapped = bench.swapper.swap_out(tensor, Placement.SSD)
    assert swapped is not None
    with pytest.raises(StorageError, match=f"{call} failed"):
        bench.swapper.swap_in(swapped)
    again = bench.swapper.swap_out(tensor, Placement.SSD)
    assert again is not None and torch.equal(bench.swapper.swap_in(again), tensor)


def test_a_flipped_bit_is_found(make_bench: Callable[..., StraightBench]) -> None:
    bench = make_bench(FakeCuFile())
    tensor = noise(4 * GRANULE_BYTES, seed=5)
    swapped = bench.swapper.swap_out(tensor, Placement.SSD)
    assert swapped is not None
    bench.swapper.drain([swapped])
    assert bench._files is not None
    path = bench._files._homes[0]._files[0].path
    with open(path, "r+b") as file:
        file.seek(2 * GRANULE_BYTES + 77)
        byte = file.read(1)[0]
        file.seek(2 * GRANULE_BYTES + 77)
        file.write(bytes([byte ^ 8]))
    with pytest.raises(CorruptionError, match=f"from element {2 * GRANULE_BYTES} on"):
        bench.swapper.swap_in(swapped)
