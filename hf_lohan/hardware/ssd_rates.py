"""Measures the drives' bandwidth for writes, reads, and both alternately, with the files of a run."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from hf_lohan.device import Device
from hf_lohan.files import (
    SECTOR_BYTES,
    CapacityError,
    IoEngine,
    IoRequest,
    Shortfall,
    StorePath,
    write_failure,
)
from hf_lohan.files.directories import free_bytes
from hf_lohan.files.io_engine import Verb
from hf_lohan.hardware.paths import existing_directory
from hf_lohan.store import GRANULE_NUMEL, Checksums, RecordFiles, RecordRead, RecordSpec, StoreLayout, granules_of

NUM_BUFFERS = 4
"""Number of requests in progress at once."""
_MIN_CHUNKS = NUM_BUFFERS + 2
"""Minimum number of chunks, which is more than the number of requests, so that no two requests use the same bytes."""
_CHUNK_BYTES = 16 << 20
"""Size of the largest chunk in a run."""
_GRANULE_BYTES = 4 * GRANULE_NUMEL
_MAX_ROUNDS = 2
"""Maximum number of passes over the file in each measurement, because drives wear."""
_FREE_SPACE_SHARE = 4
_FILE_NAME = "scratch.bin"
_BLOCK = ("measured", "param")


@dataclass(frozen=True, kw_only=True, slots=True)
class SsdRates:
    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_bytes_per_s: float
    """Sum of reads and writes when they take turns."""


def measure_ssds(
    paths: Sequence[StorePath],
    device: Device,
    make_io: Callable[..., IoEngine],
    *,
    scratch_bytes: int,
    buffer_bytes: int,
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[SsdRates], SsdRates]:
    """Measure each of `paths` alone, and all of them together with striping. Their capacities must be known.
    ``make_io(max_inflight_bytes=...)`` returns an `IoEngine` with the run's settings.

    A path's scratch file takes at most `scratch_bytes`, a quarter of the free space, and the path's capacity. The file
    has no name, so that it disappears with this process. Buffers take `buffer_bytes` in total. If a path does not
    exist, its nearest existing parent is measured. Takes about `budget_s`. Raises CapacityError for too little space,
    and StorageError.
    """
    sizes = [_file_bytes(path, scratch_bytes, num_paths=len(paths)) for path in paths]
    num_measured = len(paths) + (len(paths) > 1)
    each_s = budget_s / num_measured

    def rates(measured: Sequence[StorePath], num_bytes: int) -> SsdRates:
        with _scratch(measured, num_bytes, make_io) as files:
            return _Traffic(files, device, buffer_bytes, clock).rates(each_s)

    alone = [rates([path], num_bytes) for path, num_bytes in zip(paths, sizes, strict=True)]
    together = rates(paths, _striped_bytes(paths, sizes)) if len(paths) > 1 else alone[0]
    return alone, together


class _Traffic:
    """Requests on scratch files. Each buffer has one request in progress."""

    def __init__(self, files: RecordFiles, device: Device, buffer_bytes: int, clock: Callable[[], float]) -> None:
        self._files = files
        self._clock = clock
        file_numel = files.layout.record(*_BLOCK).numel
        granules = min(_CHUNK_BYTES, buffer_bytes // NUM_BUFFERS, 4 * file_numel // _MIN_CHUNKS) // _GRANULE_BYTES
        self._chunk_numel = max(1, granules) * GRANULE_NUMEL
        self._num_chunks = file_numel // self._chunk_numel
        memory = device.host_empty(NUM_BUFFERS * 4 * self._chunk_numel)
        # Drives cannot compress random bytes. The generator does not change the run's random numbers.
        memory.view(torch.int64).random_(generator=torch.Generator().manual_seed(0))
        self._buffers: Sequence[Tensor] = memory.view(torch.float32).split(self._chunk_numel)

    def rates(self, budget_s: float) -> SsdRates:
        phase_s = budget_s / 4
        # The first write is not measured, because the file system allocates space in it.
        self._num_chunks = self._run(("write",), phase_s, min_chunks=_MIN_CHUNKS, max_chunks=self._num_chunks)[0]
        chunk_bytes = 4 * self._chunk_numel

        def bytes_per_s(*verbs: Verb) -> float:
            max_chunks = _MAX_ROUNDS * self._num_chunks
            num_chunks, duration_s = self._run(verbs, phase_s, min_chunks=len(verbs), max_chunks=max_chunks)
            return num_chunks * chunk_bytes / duration_s

        return SsdRates(
            write_bytes_per_s=bytes_per_s("write"),
            read_bytes_per_s=bytes_per_s("read"),
            mixed_bytes_per_s=bytes_per_s("read", "write"),
        )

    def _run(self, verbs: Sequence[Verb], budget_s: float, *, min_chunks: int, max_chunks: int) -> tuple[int, float]:
        """Read or write one chunk after the other, in several passes over the file, for ``budget_s``. Returns the
        number of chunks and the seconds."""
        under_way: list[RecordRead | IoRequest | None] = [None] * NUM_BUFFERS
        start_s = self._clock()
        num_moved = 0
        try:
            for number in count():
                is_late = self._clock() - start_s >= budget_s and number >= min_chunks
                if is_late or number == max_chunks:
                    break
                slot = number % NUM_BUFFERS
                if (earlier := under_way[slot]) is not None:
                    earlier.wait()
                under_way[slot] = self._start(verbs[number % len(verbs)], number % self._num_chunks, slot)
                num_moved += 1
            for request in under_way:
                if request is not None:
                    request.wait()
        finally:
            self._files.wait_until_idle()  # after this, no thread uses the buffers
        if "write" in verbs:
            self._files.sync()
        return num_moved, self._clock() - start_s

    def _start(self, verb: Verb, chunk: int, slot: int) -> RecordRead | IoRequest:
        arguments = (*_BLOCK, chunk * self._chunk_numel, self._buffers[slot])
        return self._files.read(*arguments) if verb == "read" else self._files.write(*arguments)


@contextmanager
def _scratch(paths: Sequence[StorePath], num_bytes: int, make_io: Callable[..., IoEngine]) -> Iterator[RecordFiles]:
    """Yield files without a name, striped over `paths`, with `num_bytes` in total."""
    layout = StoreLayout((RecordSpec(*_BLOCK, "float32", num_bytes // 4),), tuple(paths))
    engine = make_io(max_inflight_bytes=num_bytes)
    directories: list[str] = []
    try:
        for path in paths:
            directories.append(_new_directory(existing_directory(path.path)))
        # Nothing is hashed, because the CPU's time is measured separately.
        with RecordFiles.create_files(layout, directories, _FILE_NAME, engine, hash_granules=_no_checksums) as files:
            for directory in directories:
                os.unlink(os.path.join(directory, _FILE_NAME))
                os.rmdir(directory)
            yield files
    finally:
        engine.close()
        for directory in filter(os.path.isdir, directories):
            os.rmdir(directory)


def _no_checksums(source: Tensor, granule_bytes: int) -> Checksums:
    return np.zeros(granules_of(source.nbytes, granule_bytes), dtype=np.uint64)


def _new_directory(parent: str) -> str:
    """Make a directory, so that files in it cannot collide with other files, for example with files of another path."""
    try:
        return tempfile.mkdtemp(prefix=".lohan-measured-", dir=parent)
    except OSError as error:
        raise write_failure(parent, SECTOR_BYTES, error) from error


def _file_bytes(path: StorePath, wanted_bytes: int, *, num_paths: int) -> int:
    """Return the size of a path's scratch file, in whole granules. All paths may be on one file system."""
    free = free_bytes(path.path)
    room = min(wanted_bytes, free // (_FREE_SPACE_SHARE * num_paths))
    limit, available = "free space", free
    if path.capacity_bytes is not None and path.capacity_bytes < room:
        room, limit, available = path.capacity_bytes, "capacity", path.capacity_bytes
    least_bytes = _MIN_CHUNKS * _GRANULE_BYTES
    if room < least_bytes:
        needed = least_bytes * (1 if limit == "capacity" else _FREE_SPACE_SHARE * num_paths)
        raise CapacityError([Shortfall(path.path, needed, available, limit)])
    return room // _GRANULE_BYTES * _GRANULE_BYTES


def _striped_bytes(paths: Sequence[StorePath], sizes: Sequence[int]) -> int:
    """Return how many bytes can be striped over the paths by capacity, with at most `sizes` bytes on each."""
    capacities = [path.capacity_bytes or 0 for path in paths]  # never 0, because its file has space
    total = sum(capacities)
    striped = min(size * total // capacity for size, capacity in zip(sizes, capacities, strict=True))
    return max(_MIN_CHUNKS, striped // _GRANULE_BYTES) * _GRANULE_BYTES
