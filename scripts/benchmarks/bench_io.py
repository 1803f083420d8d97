"""Compares the I/O engine with a raw loop of preadv and pwritev on the same bytes and files, in one interleaved run.

    python scripts/benchmarks/bench_io.py --store /mnt/nvme --file-bytes 2GiB

The raw loop works like fio, with O_DIRECT and one call at a time, on one thread and on the engine's number of threads.
The engine moves records of a store chunk by chunk, as a run does, with and without checksums. "mixed" reads and writes
in turn at different offsets, like an optimizer's step.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from benchmarking import Options, benchmark, folder_in, in_turns, spread, table_of
from rich.console import Console
from torch import Tensor

from hf_lohan.config import parse_bytes
from hf_lohan.device import mapped_empty
from hf_lohan.files import IoEngine, StorePath
from hf_lohan.store import GRANULE_NUMEL, Checksums, RecordFiles, RecordSpec, StoreLayout, checksums

Pattern = Literal["read", "write", "mixed"]
PATTERNS: tuple[Pattern, ...] = ("read", "write", "mixed")
PLACE = ("measured", "param")
NUM_BUFFERS = 6


def moves(pattern: Pattern, num_chunks: int) -> list[tuple[str, int]]:
    """Return (verb, chunk) for all chunks, in order."""
    if pattern != "mixed":
        return [(pattern, chunk) for chunk in range(num_chunks)]
    half = num_chunks // 2
    return [move for chunk in range(half) for move in (("read", chunk), ("write", half + chunk))]


class RawLoop:
    """`num_threads` threads that each move one piece after the other."""

    def __init__(self, path: Path, file_bytes: int, piece_bytes: int, num_threads: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, file_bytes)
        self._piece_bytes = piece_bytes
        self._num_pieces = file_bytes // piece_bytes
        self._buffers = [mmap.mmap(-1, piece_bytes) for _ in range(num_threads)]
        for buffer in self._buffers:
            buffer[:] = os.urandom(piece_bytes)
        self._threads = ThreadPoolExecutor(num_threads)

    def run(self, pattern: Pattern) -> int:
        work = moves(pattern, self._num_pieces)
        num = len(self._buffers)
        list(self._threads.map(lambda row: self._move(work[row::num], self._buffers[row]), range(num)))
        return len(work) * self._piece_bytes

    def _move(self, work: Sequence[tuple[str, int]], buffer: mmap.mmap) -> None:
        for verb, piece in work:
            call = os.preadv if verb == "read" else os.pwritev
            assert call(self._file, [buffer], piece * self._piece_bytes) == self._piece_bytes

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._file)


def no_checksums(source: Tensor, granule_bytes: int) -> Checksums:
    return np.zeros(-(-source.nbytes // granule_bytes), np.uint64)


class Engine:
    """Moves records with an `IoEngine`. Each buffer has one request in progress."""

    def __init__(self, folder: Path, file_bytes: int, piece_bytes: int, num_threads: int, *, hashes: bool) -> None:
        folder.mkdir()
        chunk_numel = 4 * 1024 * 1024
        self._io = IoEngine(num_threads, piece_bytes, file_bytes)
        record = RecordSpec(*PLACE, "float32", file_bytes // 4)
        layout = StoreLayout((record,), (StorePath(str(folder), file_bytes),))
        hash_granules = checksums if hashes else no_checksums
        self._files = RecordFiles.create_files(
            layout, [str(folder)], "bench.bin", self._io, hash_granules=hash_granules
        )
        self._num_chunks = file_bytes // (4 * chunk_numel)
        self._chunk_numel = chunk_numel
        memory = mapped_empty(NUM_BUFFERS * 4 * chunk_numel)
        memory.view(torch.int64).random_()
        self._buffers: Sequence[Tensor] = memory.view(torch.float32).split(chunk_numel)
        assert chunk_numel % GRANULE_NUMEL == 0

    def run(self, pattern: Pattern) -> int:
        work = moves(pattern, self._num_chunks)
        under_way: list[Any] = [None] * NUM_BUFFERS
        for number, (verb, chunk) in enumerate(work):
            slot = number % NUM_BUFFERS
            if under_way[slot] is not None:
                under_way[slot].wait()
            move = self._files.read if verb == "read" else self._files.write
            under_way[slot] = move(*PLACE, chunk * self._chunk_numel, self._buffers[slot])
        for request in under_way:
            if request is not None:
                request.wait()
        return len(work) * 4 * self._chunk_numel

    def close(self) -> None:
        self._files.close()
        self._io.close()


def bytes_per_s(run: Callable[[Pattern], int], pattern: Pattern) -> float:
    began_s = time.perf_counter()
    num_bytes = run(pattern)
    return num_bytes / (time.perf_counter() - began_s)


def measure(folder: Path, file_bytes: int, piece_bytes: int, num_threads: int, num_turns: int) -> dict[str, Any]:
    contenders: dict[str, RawLoop | Engine] = {
        "raw, 1 thread": RawLoop(folder / "raw1.bin", file_bytes, piece_bytes, 1),
        f"raw, {num_threads} threads": RawLoop(folder / "raw2.bin", file_bytes, piece_bytes, num_threads),
        "engine": Engine(folder / "engine", file_bytes, piece_bytes, num_threads, hashes=False),
        "engine, checksums": Engine(folder / "hashing", file_bytes, piece_bytes, num_threads, hashes=True),
    }
    try:
        for contender in contenders.values():
            contender.run("write")  # the first write to an offset costs a file system more
        rates = in_turns(
            {
                f"{name}: {pattern}": partial(bytes_per_s, contender.run, pattern)
                for pattern in PATTERNS
                for name, contender in contenders.items()
            },
            num_turns,
        )
    finally:
        for contender in contenders.values():
            contender.close()
    figures = spread("bytes_per_s", rates)
    medians = figures["bytes_per_s"]
    best_raw = {
        p: max(rate for name, rate in medians.items() if name.startswith("raw") and p in name) for p in PATTERNS
    }
    return {
        "file_bytes": file_bytes,
        "piece_bytes": piece_bytes,
        "num_threads": num_threads,
        **figures,
        "engine_over_raw": {p: medians[f"engine: {p}"] / best_raw[p] for p in PATTERNS},
    }


@benchmark("io")
def main(
    options: Options,
    *,
    file_bytes: Annotated[str, typer.Option(help="of each contender's file")] = "1GiB",
    piece_bytes: Annotated[str, typer.Option(help="bytes of one call")] = "8MiB",
    num_threads: int = 2,
) -> dict[str, Any]:
    with folder_in(options.store) as folder:
        result = measure(folder, parse_bytes(file_bytes), parse_bytes(piece_bytes), num_threads, options.num_turns)
    rates = result["bytes_per_s"]
    table = table_of("GB/s (medians, interleaved)", "", *PATTERNS)
    for name in dict.fromkeys(side.rpartition(": ")[0] for side in rates):
        table.add_row(name, *(f"{rates[f'{name}: {pattern}'] / 1e9:.2f}" for pattern in PATTERNS))
    table.add_row("engine / best raw", *(f"{result['engine_over_raw'][pattern]:.2f}" for pattern in PATTERNS))
    Console().print(table)
    return result


if __name__ == "__main__":
    typer.run(main)
