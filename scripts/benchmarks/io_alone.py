"""Measures the rate of an engine's I/O alone, on the run's files, in its chunks, with its share of reads.

Data that is read is written back, so training can continue.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from hf_lohan.engine import OffloadEngine


def moved_bytes(engine: OffloadEngine) -> tuple[int, int]:
    io = engine.tiers.io
    return io.read_bytes, io.write_bytes


def moments_of(engine: OffloadEngine) -> Iterator[tuple[str, str, int, int]]:
    """Yield (block, kind, start, numel) of all moments, chunk by chunk, endlessly."""
    while True:
        for chunk in engine.layout.chunks():
            for kind in ("exp_avg", "exp_avg_sq"):
                yield chunk.block.name, kind, chunk.start, chunk.numel


def alone_bytes_per_s(
    engine: OffloadEngine, where: Iterator[tuple[str, str, int, int]], write_share: float, *, num_bytes: int
) -> float:
    """Return the rate at which the I/O engine moves `num_bytes`, and writes back `write_share` of its reads."""
    engine.wait_for_updates()
    store, pool = engine.tiers.store, engine.tiers.states
    reading: deque[tuple[Any, tuple[str, str, int], Any, torch.Tensor]] = deque()
    writing: deque[tuple[Any, Any]] = deque()
    free = [pool.acquire() for _ in range(pool.num_buffers)]
    num_buffers, owed, before = pool.num_buffers, 0.0, sum(moved_bytes(engine))
    began_s = time.perf_counter()

    def free_one() -> None:
        request, buffer = writing.popleft()
        request.wait()
        free.append(buffer)

    def land_one() -> None:
        nonlocal owed
        read, place, buffer, view = reading.popleft()
        read.wait()
        owed += write_share
        if owed >= 1:
            owed -= 1
            writing.append((store.write(*place, view), buffer))
        else:
            free.append(buffer)

    while sum(moved_bytes(engine)) - before < num_bytes:
        while not free:
            free_one() if writing else land_one()
        block, kind, start, numel = next(where)
        buffer = free.pop()
        view = buffer.view(torch.float32, numel)
        reading.append((store.read(block, kind, start, view), (block, kind, start), buffer, view))
        if len(reading) > num_buffers // 2:
            land_one()
    while reading:
        land_one()
    while writing:
        free_one()
    seconds = time.perf_counter() - began_s
    for buffer in free:
        buffer.release()
    return (sum(moved_bytes(engine)) - before) / seconds
