"""Link rates: copies use the run's lanes, and only finished copies count."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import Tensor

from hf_lohan.device import CpuDevice, Event, Lane
from hf_lohan.hardware.rates import measure_links

COPY_BYTES = 1 << 14


class LazyDevice(CpuDevice):
    """Counts a copy as run once it is waited for. Each lane has its own list, because it has its own thread."""

    def __init__(self) -> None:
        self.pending: dict[Lane, list[tuple[Tensor, Tensor]]] = {Lane.H2D: [], Lane.D2H: []}
        self.num_run: Counter[Lane] = Counter()
        self.host: set[int] = set()
        self.is_host_target: set[tuple[Lane, bool]] = set()

    def host_empty(self, num_bytes: int) -> Tensor:
        memory = super().host_empty(num_bytes)
        self.host.add(memory.data_ptr())
        return memory

    def copy(self, lane: Lane, dst: Tensor, src: Tensor) -> None:
        assert dst.numel() == src.numel() == COPY_BYTES
        assert bool(src.all()), "untouched pages all map to one page of zeros"
        self.is_host_target.add((lane, dst.data_ptr() in self.host))
        self.pending[lane].append((dst, src))

    def record(self, lane: Lane, *tensors: Tensor) -> Event:
        return _LazyEvent(self, lane)


class _LazyEvent(Event):
    def __init__(self, device: LazyDevice, lane: Lane) -> None:
        self.device = device
        self.lane = lane

    def synchronize(self) -> None:
        copies = self.device.pending.get(self.lane, [])
        self.device.num_run[self.lane] += len(copies)
        copies.clear()

    def is_reached(self) -> bool:
        return not self.device.pending.get(self.lane)


def test_both_lanes_copy_between_host_and_device_and_are_waited_for() -> None:
    device = LazyDevice()
    rates = measure_links(device, copy_bytes=COPY_BYTES, budget_s=0.0)
    assert device.is_host_target == {(Lane.H2D, False), (Lane.D2H, True)}
    assert not any(device.pending.values())
    assert min(device.num_run[Lane.H2D], device.num_run[Lane.D2H]) > 0
    assert min(rates.h2d_bytes_per_s, rates.d2h_bytes_per_s, rates.duplex_bytes_per_s) > 0


def test_an_error_on_a_lane_is_raised() -> None:
    class Broken(CpuDevice):
        def copy(self, lane: Lane, dst: Tensor, src: Tensor) -> None:
            if lane is Lane.D2H:
                raise RuntimeError("the link is down")

    with pytest.raises(RuntimeError, match="the link is down"):
        measure_links(Broken(), copy_bytes=COPY_BYTES, budget_s=0.0)
