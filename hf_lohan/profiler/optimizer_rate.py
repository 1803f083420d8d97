"""How many parameters a second the CPU's AdamW updates, in the beat and the formats of a run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

import torch

from hf_lohan.device import Device, KernelThreads, Lane
from hf_lohan.optim import AdamWGroup, Segment, adamw_, decode_master_, encode_master_, master_format
from hf_lohan.profiler.timing import median_s

_GROUP = AdamWGroup(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
_NUM_CHUNKS = 3
"""As many as a run's pipeline has: one after the other they come from memory, not from the cache."""
_LOAD_SIDE = 2048


def optimizer_params_per_s(device: Device, working_dtype: torch.dtype, *, numel: int, budget_s: float) -> float:
    """Parameters a second, over chunks of `numel` that are in RAM, with float32 or bfloat16 working weights.

    A device with cores of its own computes meanwhile: launching its work and its traffic cost the host something. On
    a CPU nothing else runs: there compute and optimizer take turns, and the planner adds up their times. Raises
    ValueError for a type that has no exact master.
    """
    threads = KernelThreads(torch.get_num_threads())
    chunks = cycle([_Chunk(working_dtype, numel, threads) for _ in range(_NUM_CHUNKS)])
    with _kept_busy(device):
        return numel / median_s(lambda: next(chunks).update(), lambda: None, budget_s=budget_s)


class _Chunk:
    """A chunk's records in RAM, updated as a run does it: in as many parts as there are threads."""

    def __init__(self, working_dtype: torch.dtype, numel: int, threads: KernelThreads) -> None:
        self._numel = numel
        self._threads = threads
        self._has_residual = master_format(working_dtype).has_residual
        self._working = torch.linspace(-1, 1, numel).to(working_dtype)
        num_split = numel if self._has_residual else 0
        self._residual = torch.zeros(num_split, dtype=torch.int16)
        self._masters, self._scratch = torch.zeros(num_split), torch.zeros(num_split, dtype=torch.int32)
        self._gradient = torch.linspace(-1e-3, 1e-3, numel)
        self._exp_avg, self._exp_avg_sq = torch.zeros(numel), torch.zeros(numel)

    def update(self) -> None:
        part_numel = -(-self._numel // self._threads.num_threads)
        starts = range(0, self._numel, part_numel)
        self._threads.map(self._update_part, [slice(start, min(start + part_numel, self._numel)) for start in starts])

    @torch.no_grad()
    def _update_part(self, part: slice) -> None:
        working = self._working[part]
        master = self._masters[part] if self._has_residual else working
        if self._has_residual:
            decode_master_(master, working, self._residual[part])
        segments = [Segment(0, working.numel(), _GROUP, step=10)]
        adamw_(master, self._gradient[part], self._exp_avg[part], self._exp_avg_sq[part], segments)
        if self._has_residual:
            encode_master_(master, working, self._residual[part], self._scratch[part])


@contextmanager
def _kept_busy(device: Device) -> Iterator[None]:
    """Products on the device, one after the other, until the block ends."""
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
