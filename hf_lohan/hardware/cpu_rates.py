"""Measures the CPU's part of a step: parameters per second of AdamW and bytes per second of checksums."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import cycle

import torch
from torch import Tensor

from hf_lohan.costs.quantization import round_up
from hf_lohan.device import Device, Lane
from hf_lohan.hardware.rates import median_s
from hf_lohan.optim import SCALE_BLOCK_NUMEL, AdamWGroup, MomentDtype, Segment, master_format, update_records_
from hf_lohan.optim.precision import NO_TIES, TIE_CODES, TIE_RUN_NUMEL
from hf_lohan.store import MAX_GRANULE_NUMEL, checksums
from hf_lohan.threads import KernelThreads

_GROUP = AdamWGroup(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
_NUM_CHUNKS = 3
"""Number of chunks in a run's pipeline. With this many, each chunk is read from memory and not from the cache."""
_MIN_PART_NUMEL = 1024
_LOAD_SIDE = 2048
_HASHED_GRANULE_BYTES = 2 * MAX_GRANULE_NUMEL
_TILE_BYTES = 2 * _HASHED_GRANULE_BYTES
"""Size that fits into a core's cache, because a run hashes bytes just before or after it uses them."""
_NUM_ROUNDS = 8


def optimizer_params_per_s(
    device: Device, working_dtype: torch.dtype, *, numel: int, budget_s: float, moment_dtype: MomentDtype = "float32"
) -> float:
    """Measure AdamW in parameters per second, over chunks of about `numel` parameters in RAM. Working weights have
    `working_dtype` (float32 or bfloat16), and moments have `moment_dtype`.

    A GPU computes during the measurement, because launching its work takes host time and its copies take memory
    bandwidth. A CPU device computes nothing else, because the planner adds the times of compute and optimizer. Raises
    ValueError for a dtype without an exact master.
    """
    threads = KernelThreads(torch.get_num_threads())
    chunks = [_Chunk(working_dtype, numel, threads, moment_dtype) for _ in range(_NUM_CHUNKS)]
    turns = cycle(chunks)
    with closing(threads), _kept_busy(device):
        return chunks[0].numel / median_s(lambda: next(turns).update(), lambda: None, budget_s=budget_s)


class _Chunk:
    """A chunk's records in RAM. As in a run, each thread updates a part."""

    def __init__(
        self, working_dtype: torch.dtype, numel: int, threads: KernelThreads, moment_dtype: MomentDtype = "float32"
    ) -> None:
        self._threads = threads
        self._form = form = master_format(working_dtype, moment_dtype)
        # Parts begin where tie codes and scale blocks do, as in a run.
        self._part_numel = round_up(max(_MIN_PART_NUMEL, -(-numel // threads.num_threads)), TIE_RUN_NUMEL)
        self.numel = round_up(numel, SCALE_BLOCK_NUMEL)
        self.records = {
            kind: torch.zeros(form.numel(kind, self.numel), dtype=form.state_dtype(kind)) for kind in form.state_kinds
        }
        self.records["param"] = torch.linspace(-1, 1, self.numel).to(working_dtype)
        if form.has_residual:
            num_runs = -(-self.numel // TIE_RUN_NUMEL)
            self.records[TIE_CODES] = torch.full((num_runs,), NO_TIES, dtype=torch.int16)
        self._gradient = torch.linspace(-1e-3, 1e-3, self.numel)
        private_bytes = 4 * (self.numel + self._part_numel)  # a short last part takes as much time as the others
        self._private = [torch.zeros(private_bytes, dtype=torch.uint8) for _ in range(form.num_private_buffers)]

    def update(self) -> None:
        starts = range(0, self.numel, self._part_numel)
        self._threads.map(lambda start: self._update_part(start, min(start + self._part_numel, self.numel)), starts)

    @torch.no_grad()
    def _update_part(self, start: int, stop: int) -> None:
        form, gradient = self._form, self._gradient[start:stop]
        records = {kind: record[slice(*form.elements(kind, start, stop))] for kind, record in self.records.items()}
        segments = [Segment(0, gradient.numel(), _GROUP, step=10)]
        private = [buffer[4 * start : 4 * (start + self._part_numel)] for buffer in self._private]
        update_records_(records, gradient, segments, form, position=start, private=private)


@contextmanager
def _kept_busy(device: Device) -> Iterator[None]:
    """Run matrix products on a GPU within this context."""
    if device.torch_device.type == "cpu":
        yield
        return
    ended = threading.Event()

    def compute() -> None:
        left = torch.ones(_LOAD_SIDE, _LOAD_SIDE, dtype=torch.bfloat16, device=device.torch_device)
        while not ended.is_set():
            torch.mm(left, left)
            device.record(Lane.COMPUTE).synchronize()

    thread = threading.Thread(target=compute, name="lohan-device-load", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def checksum_bytes_per_s(*, num_threads: int, budget_s: float) -> float:
    """Measure checksums in bytes per second of all `num_threads` together. Each hashes bytes in its core's cache."""
    contents = [torch.arange(_TILE_BYTES // 8).view(torch.uint8) for _ in range(num_threads)]

    def hash_several(content: Tensor) -> None:
        for _ in range(_NUM_ROUNDS):
            checksums(content, _HASHED_GRANULE_BYTES)

    with ThreadPoolExecutor(num_threads, "lohan-checksums") as threads:
        num_bytes = num_threads * _NUM_ROUNDS * _TILE_BYTES
        return num_bytes / median_s(lambda: list(threads.map(hash_several, contents)), lambda: None, budget_s=budget_s)
