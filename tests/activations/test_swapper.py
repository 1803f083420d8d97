"""Swapped tensors come back bit for bit, and their memory becomes free in every case."""

from __future__ import annotations

import errno
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from async_device import AsyncDevice
from storage_doubles import FaultyBackend, FlippingBackend, GatedBackend, SlowBackend
from swapper_bench import GRANULE_BYTES, SwapperBench
from torch import Tensor

from hf_lohan.activations.swapped_tensor import is_swappable
from hf_lohan.costs import Placement
from hf_lohan.device import Event, Lane
from hf_lohan.files import CorruptionError, StorageError
from hf_lohan.hardware import anonymous_memory_bytes
from hf_lohan.threads import keep_freed_memory

BenchFactory = Callable[..., SwapperBench]
SWAPPED = pytest.mark.parametrize("place", [Placement.CPU, Placement.SSD])
NEVER = 1 << 60


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[BenchFactory]:
    benches: list[SwapperBench] = []

    def make(**settings: Any) -> SwapperBench:
        benches.append(SwapperBench(tmp_path, **settings))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


def noise(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return random bits, including NaNs."""
    generator = torch.Generator().manual_seed(seed)
    numel = torch.Size(size).numel() * dtype.itemsize
    values = torch.randint(0, 2 if dtype is torch.bool else 256, (numel,), dtype=torch.uint8, generator=generator)
    return values.view(dtype).view(size)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def same(one: Tensor, other: Tensor) -> bool:
    forms = [(t.dtype, t.size(), t.stride(), t.device) for t in (one, other)]
    return forms[0] == forms[1] and torch.equal(bits(one), bits(other))


FORMS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: noise(4, 5, 6),
    "transposed": lambda: noise(40, 50).t(),
    "permuted": lambda: noise(3, 4, 5, 6).permute(2, 0, 3, 1),
    "channels_last": lambda: noise(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "in_the_middle_of_a_storage": lambda: noise(10, 7)[2:9],
    "a_dimension_of_size_one": lambda: noise(6, 1, 5).transpose(0, 1),
    "an_irrelevant_stride": lambda: noise(8).as_strided((1, 8, 1), (999, 1, 7)),
    "scalar": lambda: noise(1)[0],
    "bfloat16": lambda: noise(9, 9, dtype=torch.bfloat16),
    "int64": lambda: noise(9, dtype=torch.int64),
    "bool": lambda: noise(33, dtype=torch.bool),
    "requires_grad": lambda: noise(4, 4).requires_grad_(),
    "has_a_graph": lambda: noise(4, 4).requires_grad_() * 2,
    "one_granule": lambda: noise(GRANULE_BYTES // 4),
    "one_byte_more_than_a_granule": lambda: noise(GRANULE_BYTES + 1, dtype=torch.bool),
    "one_buffer": lambda: noise(2 * GRANULE_BYTES // 4),
    "four_buffers_the_last_with_one_byte": lambda: noise(6 * GRANULE_BYTES + 1, dtype=torch.bool),
    "more_than_all_buffers": lambda: noise(11 * GRANULE_BYTES // 4 + 3),
}


@pytest.mark.parametrize("form", FORMS)
@SWAPPED
def test_a_tensor_comes_back_bit_for_bit(form: str, place: Placement, make_bench: BenchFactory) -> None:
    bench = make_bench(ram_bytes=1 << 20, ssd_granules=16)
    tensor = FORMS[form]()
    assert is_swappable(tensor)
    swapped = bench.swapper.swap_out(tensor, place)
    assert swapped is not None
    for _ in range(2):  # a retained graph runs its backward again
        again = bench.swapper.swap_in(swapped)
        assert same(again, tensor)
        assert again.data_ptr() != tensor.data_ptr() and again.grad_fn is None
    assert bench.swapper.spilled_bytes == (swapped.num_bytes if place is Placement.SSD else 0)
    assert bench.swapper.swapped_bytes == swapped.num_bytes
    del swapped
    assert bench.is_empty()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0, 3),
        torch.ones(1, 4).expand(3, 4),
        torch.ones(4, 6)[:, :3],
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3, dtype=torch.complex64).conj().imag,
        torch.ones(3, 3).to_sparse(),
        torch.nn.Parameter(torch.ones(2, 2)).expand(2, 2, 2),
    ],
    ids=["empty", "expanded", "with_gaps", "complex", "negative", "sparse", "expanded_parameter"],
)
def test_tensors_without_plain_memory_are_not_swappable(tensor: Tensor) -> None:
    assert not is_swappable(tensor)


def test_many_tensors_come_back_in_any_order(make_bench: BenchFactory) -> None:
    bench = make_bench(ram_bytes=1 << 17, ssd_granules=200)
    for order in (lambda count: reversed(range(count)), range, lambda count: sorted(range(count), key=str)):
        tensors = [noise(1000 + 3000 * (seed % 4), seed=seed) for seed in range(40)]
        places = [Placement.CPU, Placement.SSD]
        swapped: list[Any] = [bench.swapper.swap_out(t, places[i % 2]) for i, t in enumerate(tensors)]
        for number in order(len(tensors)):
            assert same(bench.swapper.swap_in(swapped[number]), tensors[number])
            swapped[number] = None
        assert bench.is_empty()


def test_a_full_ram_spills_to_the_ssd_and_a_full_ssd_swaps_nothing(make_bench: BenchFactory) -> None:
    bench = make_bench(ram_bytes=8192, ssd_granules=1)
    tensor = noise(2048)
    swap = bench.swapper.swap_out
    in_ram, on_ssd = swap(tensor, Placement.CPU), swap(tensor, Placement.CPU)
    assert in_ram is not None and on_ssd is not None
    assert (in_ram.region is None, on_ssd.region is None) == (False, True)
    assert swap(tensor, Placement.CPU) is None and swap(tensor, Placement.SSD) is None
    del in_ram
    bench.settle()
    instead = swap(tensor, Placement.SSD)  # the SSD is full, but RAM is not
    assert instead is not None and instead.region is not None
    assert bench.swapper.high_water_bytes >= 8192


def test_draining_waits_only_for_the_last_copy(make_bench: BenchFactory) -> None:
    """Only the last copy needs a wait, because the lane runs copies in order."""
    device = AsyncDevice(5, max_delay_s=1e-3)
    bench = make_bench(ram_bytes=1 << 18, device=device)
    outside = [noise(5_000, seed=seed) for seed in range(6)]
    swapped = [bench.swapper.swap_out(tensor, Placement.CPU) for tensor in outside]
    assert None not in swapped
    bench.swapper.wait_until_idle()  # all events are recorded
    waited: list[int] = []
    for number, one in enumerate(swapped):
        synchronize = one.stored.synchronize
        one.stored.synchronize = lambda number=number, stock=synchronize: (waited.append(number), stock())
    bench.swapper.drain(swapped)
    assert waited == [5]
    assert all(one.stored.is_reached() for one in swapped)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_tensors_that_left_the_cpu_leave_no_holes_in_the_heap(make_bench: BenchFactory) -> None:
    """Small tensors that stay lie between those that leave, so glibc cannot join their memory."""
    keep_freed_memory()
    num_tensors, tensor_granules = 40, 256
    bench = make_bench(ssd_granules=num_tensors * tensor_granules)
    before_bytes = anonymous_memory_bytes()
    kept: list[Any] = []
    for _ in range(num_tensors):
        large = torch.ones(tensor_granules * GRANULE_BYTES, dtype=torch.uint8)
        kept += [torch.ones(40, dtype=torch.uint8) for _ in range(20)]
        kept.append(bench.swapper.swap_out(large, Placement.SSD))
        bench.swapper.drain(kept[-1:])
        del large
    grown_bytes = anonymous_memory_bytes() - before_bytes
    assert grown_bytes < 0.5 * bench.swapper.spilled_bytes


def test_without_memory_nothing_is_swapped(make_bench: BenchFactory) -> None:
    bench = make_bench()
    assert [bench.swapper.swap_out(noise(4), place) for place in (Placement.CPU, Placement.SSD)] == [None, None]


@SWAPPED
@pytest.mark.parametrize("when", ["at_once", "stored", "expected", "landed"])
def test_a_dropped_tensor_frees_its_memory(when: str, place: Placement, make_bench: BenchFactory) -> None:
    """The memory of a dropped tensor, as of a loss without a backward, becomes free once its transfers end."""
    device = AsyncDevice(3, max_delay_s=1e-3)
    bench = make_bench(ram_bytes=1 << 18, ssd_granules=8, device=device, backend=SlowBackend(1e-3))
    for seed in range(8):
        swapped = bench.swapper.swap_out(noise(20_000, seed=seed), place)
        assert swapped is not None
        if when != "at_once":
            bench.swapper.drain([swapped])
        if when in ("expected", "landed"):
            bench.swapper.prefetch(swapped)
        if when == "landed":
            bench.swapper.swap_in(swapped)
        del swapped
        after = noise(20_000, seed=100 + seed)  # uses the memory as soon as it is free
        other = bench.swapper.swap_out(after, place)
        assert other is not None and same(bench.swapper.swap_in(other), after)
        del other
    assert bench.is_empty()


@pytest.mark.timeout(60)
def test_a_tensor_dropped_while_it_is_written(make_bench: BenchFactory) -> None:
    """Its region must not be reused before the write ends."""
    backend = GatedBackend()
    bench = make_bench(ssd_granules=1, backend=backend)
    swapped = bench.swapper.swap_out(noise(1000), Placement.SSD)
    backend.arrived.acquire()
    del swapped
    gc.collect()
    assert bench.ssd_in_use
    assert bench.swapper.swap_out(noise(1000), Placement.SSD) is None
    backend.gate.set()
    assert bench.is_empty()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("call", ["write", "read"])
def test_a_failing_drive_raises_for_its_tensors_only(call: str, make_bench: BenchFactory) -> None:
    """Each request for the tensor raises. Other tensors come back, and memory and buffers become free."""
    backend = FaultyBackend(call, NEVER, errno.EIO, sticky=True)
    bench = make_bench(ram_bytes=1 << 18, ssd_granules=40, backend=backend)
    swapper = bench.swapper
    tensors = [noise(30_000, seed=seed) for seed in range(4)]
    good = swapper.swap_out(tensors[0], Placement.SSD)
    assert good is not None
    swapper.wait_until_idle()
    bench.settle()
    backend.fail_on = 1
    bad = [swapper.swap_out(tensor, Placement.SSD) for tensor in tensors[1:]]
    in_ram = swapper.swap_out(tensors[0], Placement.CPU)
    assert in_ram is not None
    for one in bad:
        assert one is not None
        for _ in range(2):
            with pytest.raises(StorageError) as failed:
                swapper.swap_in(one)
            assert failed.value.errno == errno.EIO
        del failed
    assert same(swapper.swap_in(in_ram), tensors[0])
    backend.fail_on = NEVER
    assert same(swapper.swap_in(good), tensors[0])
    del good, bad, one, in_ram
    gc.collect()  # the error and its tensor are a reference cycle
    assert bench.is_empty()
    again = swapper.swap_out(tensors[1], Placement.SSD)
    assert again is not None and same(swapper.swap_in(again), tensors[1])


@pytest.mark.parametrize("call", ["write", "read"])
def test_a_flipped_bit_is_detected(call: str, make_bench: BenchFactory) -> None:
    bench = make_bench(ssd_granules=8, backend=FlippingBackend(call, 2, 12_345))
    swapped = bench.swapper.swap_out(noise(3 * GRANULE_BYTES // 4), Placement.SSD)
    assert swapped is not None
    with pytest.raises(CorruptionError, match="activation"):
        bench.swapper.swap_in(swapped)


@pytest.mark.parametrize("num_buffers", [1, 2])
def test_tensors_come_back_with_few_buffers_and_a_slow_drive(num_buffers: int, make_bench: BenchFactory) -> None:
    bench = make_bench(ssd_granules=64, backend=SlowBackend(1e-3), num_buffers=num_buffers)
    tensors = [noise(8 * GRANULE_BYTES // 4 + 1, seed=seed) for seed in range(4)]
    swapped = [bench.swapper.swap_out(tensor, Placement.SSD) for tensor in tensors]
    for one in reversed(swapped):
        assert one is not None
        bench.swapper.prefetch(one)
    for tensor, one in zip(tensors, swapped, strict=True):
        assert one is not None and same(bench.swapper.swap_in(one), tensor)


@pytest.mark.timeout(60)
@SWAPPED
def test_swapping_in_after_close_is_refused(place: Placement, make_bench: BenchFactory) -> None:
    bench = make_bench(ram_bytes=1 << 16, ssd_granules=4)
    swapped = bench.swapper.swap_out(noise(100), place)
    assert swapped is not None
    bench.swapper.close()
    with pytest.raises(RuntimeError, match="closed"):
        bench.swapper.swap_in(swapped)


@SWAPPED
def test_compute_events_are_recorded_on_the_computing_thread(place: Placement, make_bench: BenchFactory) -> None:
    """The current CUDA stream is per thread, so another thread would record on the wrong stream."""
    threads = set()

    class RecordingDevice(AsyncDevice):
        def record(self, lane: Lane, *tensors: Tensor, **options: Any) -> Event:
            if lane is Lane.COMPUTE:
                threads.add(threading.current_thread())
            return super().record(lane, *tensors, **options)

    bench = make_bench(ram_bytes=1 << 16, ssd_granules=4, device=RecordingDevice())
    tensor = noise(1000)
    swapped = bench.swapper.swap_out(tensor, place)
    assert swapped is not None
    assert same(bench.swapper.swap_in(swapped), tensor)
    assert threads == {threading.current_thread()}
