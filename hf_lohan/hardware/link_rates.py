"""What passes between host and device a second, each way alone and both at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from torch import Tensor

from hf_lohan.device import Device, Lane
from hf_lohan.hardware.timing import median_s

_COPIES_AT_ONCE = 4
"""Copies of each direction in one run of both: their start and end, when only one is under way, count for little."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRates:
    """Bytes a second."""

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    duplex_bytes_per_s: float
    """Of both directions, at once, added."""


def measure_links(device: Device, *, copy_bytes: int, budget_s: float) -> LinkRates:
    """Copy `copy_bytes` at a time, as chunks travel: between `Device.host_empty` and `Device.empty`, on its lanes.

    Takes about `budget_s`, twice `copy_bytes` of host memory and as much of the device's.
    """
    ends: dict[Lane, tuple[Tensor, Tensor]] = {}
    for lane in (Lane.H2D, Lane.D2H):
        # Touched: pages that were never written are all one page of zeros, which stays in the cache.
        host, remote = (empty(copy_bytes).fill_(1) for empty in (device.host_empty, device.empty))
        ends[lane] = (remote, host) if lane is Lane.H2D else (host, remote)
    device.record(Lane.COMPUTE).synchronize()

    def copy(lane: Lane) -> None:
        target, source = ends[lane]
        device.copy(lane, target, source)

    def synchronize(lane: Lane) -> None:
        device.record(lane).synchronize()

    def copy_several(lane: Lane) -> None:
        for _ in range(_COPIES_AT_ONCE):
            copy(lane)
        synchronize(lane)

    def alone_bytes_per_s(lane: Lane) -> float:
        return copy_bytes / median_s(lambda: copy(lane), lambda: synchronize(lane), budget_s=budget_s / 3)

    # Each direction has a thread of its own in a run too; on a CPU the copies themselves run in them.
    with ThreadPoolExecutor(2, "lohan-links") as threads:

        def copy_both() -> None:
            both = [threads.submit(copy_several, lane) for lane in (Lane.H2D, Lane.D2H)]
            wait(both)
            for one in both:
                one.result()

        both_s = median_s(copy_both, lambda: None, budget_s=budget_s / 3)
    return LinkRates(
        h2d_bytes_per_s=alone_bytes_per_s(Lane.H2D),
        d2h_bytes_per_s=alone_bytes_per_s(Lane.D2H),
        duplex_bytes_per_s=2 * _COPIES_AT_ONCE * copy_bytes / both_s,
    )
