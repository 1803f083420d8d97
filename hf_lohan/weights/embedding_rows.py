"""Loads rows of a table of embeddings to the device. The table itself stays in the store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_lohan.device import Device, Event, Lane
from hf_lohan.model import Block, ParamSlice
from hf_lohan.planner.record_traffic import PARAM
from hf_lohan.store import RecordRead
from hf_lohan.timeline import COMPUTE_WAITS

_RowIds = npt.NDArray[np.int64]


class RowReader(Protocol):
    """Reads parts of a record, from RAM or in whole granules."""

    def read(self, block: str, kind: str, start_numel: int, out: Tensor, *, is_urgent: bool = False) -> RecordRead: ...

    def read_from_ram(self, block: str, kind: str, start_numel: int, out: Tensor) -> bool: ...


class SettledUpdates(Protocol):
    """The updates that readers of a block wait for."""

    def settle(self, block: Block) -> None: ...

    def copy_new(self, block: Block, start: int, out: Tensor) -> list[tuple[int, int]] | None: ...


class EmbeddingRows:
    """Brings the rows of a batch's tokens to the device. A row comes from an update that is not written yet, from the
    record's copy in RAM, or from the SSD, where only the granules that have needed rows are read. The computing thread
    uses it."""

    def __init__(self, device: Device, store: RowReader, updates: SettledUpdates, buffer_bytes: int) -> None:
        """``buffer_bytes``: size of each host buffer (`PoolPlan.rows_buffer_bytes`)."""
        self._device = device
        self._store = store
        self._updates = updates
        self._granules = device.host_empty(buffer_bytes)
        self._landing = None if device.memory_is_host else device.host_empty(buffer_bytes)
        """Rows on their way to the device."""
        self._copied: Event | None = None
        """The end of the last copy from `_landing`."""
        self.num_bytes = 0
        """Bytes of rows that came to the device."""

    def embed(self, block: Block, leaf: Tensor | None, ids: Tensor, padding_idx: int | None) -> Tensor:
        """Return `F.embedding` of ``ids`` and the block's table. ``leaf`` gets the gradient, as a sparse tensor of the
        table's shape; with None there is none. Raises IndexError for ids outside the table."""
        part = block.slices[0]
        needed, inverse = torch.unique(ids, return_inverse=True)
        rows = self._load(block, part, needed.cpu().to(torch.int64).numpy())
        if leaf is None:
            return F.embedding(inverse, rows)
        padding = padding_idx if padding_idx is None or padding_idx >= 0 else part.shape[0] + padding_idx
        output: Tensor = _Embedding.apply(leaf, rows, needed, inverse, padding)  # type: ignore[no-untyped-call]
        return output

    def _load(self, block: Block, part: ParamSlice, ids: _RowIds) -> Tensor:
        """Return rows [len(ids), width] on the device. ``ids`` are sorted and differ."""
        num_rows, width = part.shape
        if len(ids) and not 0 <= ids[0] <= ids[-1] < num_rows:
            raise IndexError(
                f"index out of range in self: {part.name} has {num_rows} rows, and a token has the number "
                f"{ids[-1] if ids[0] >= 0 else ids[0]}"
            )
        device, dtype = self._device, block.master.working_dtype
        rows = torch.empty(len(ids), width, dtype=dtype, device=device.torch_device)
        with device.timeline.task(COMPUTE_WAITS, "weights", block=block.name):
            self._updates.settle(block)
            if self._landing is None:
                self._fill(block, part, ids, rows)
            else:
                device.wait(Lane.H2D, device.record(Lane.COMPUTE, rows))  # compute may still use this memory
                self._copy(block, part, ids, rows, self._landing.view(dtype))
        self.num_bytes += rows.nbytes
        return rows

    def _copy(self, block: Block, part: ParamSlice, ids: _RowIds, rows: Tensor, landing: Tensor) -> None:
        """Copy rows to the device, as many at a time as the landing has room for."""
        width = part.shape[1]
        at_once = landing.numel() // width
        for first in range(0, len(ids), at_once):
            stop = min(first + at_once, len(ids))
            if self._copied is not None:
                self._copied.synchronize()
            landed = landing[: (stop - first) * width].view(-1, width)
            self._fill(block, part, ids[first:stop], landed)
            self._device.copy(Lane.H2D, rows[first:stop], landed)
            self._copied = self._device.record(Lane.H2D)
        if self._copied is not None:
            self._device.wait(Lane.COMPUTE, self._copied)

    def _fill(self, block: Block, part: ParamSlice, ids: _RowIds, out: Tensor) -> None:
        """Fill ``out`` [len(ids), width] in host memory."""
        width = part.shape[1]
        missing: list[tuple[int, Tensor]] = []
        for first, stop in _runs(ids):
            start, flat = part.start + int(ids[first]) * width, out[first:stop].view(-1)
            rest = self._updates.copy_new(block, start, flat)
            assert rest is not None, f"{block} has outstanding updates"
            for low, high in rest:
                piece = flat[low - start : high - start]
                if not self._store.read_from_ram(block.name, PARAM, low, piece):
                    missing.append((low, piece))
        batch = _GranuleBatch(block, self._store, self._granules.view(out.dtype))
        for low, piece in missing:
            batch.add(low, piece)
        batch.read()


class _GranuleBatch:
    """Granules that are read together for the rows in them."""

    def __init__(self, block: Block, store: RowReader, memory: Tensor) -> None:
        """``memory``: page-aligned, in the block's dtype."""
        self._block = block
        self._store = store
        self._memory = memory
        self._room = memory.numel() // block.granule_numel
        self._granules: list[int] = []
        self._parts: list[tuple[int, Tensor]] = []
        """First element in the memory, and where it goes."""

    def add(self, start: int, out: Tensor) -> None:
        """Read the record's elements from ``start`` on to ``out``, now or later. Calls come in the record's order."""
        granule_numel, done = self._block.granule_numel, 0
        while done < out.numel():
            granule, within = divmod(start + done, granule_numel)
            if not self._granules or self._granules[-1] != granule:
                if len(self._granules) == self._room:
                    self.read()
                self._granules.append(granule)
            numel = min(out.numel() - done, granule_numel - within)
            place = (len(self._granules) - 1) * granule_numel + within
            self._parts.append((place, out[done : done + numel]))
            done += numel

    def read(self) -> None:
        """Read and verify the granules, and copy what was asked for."""
        granule_numel, reads = self._block.granule_numel, list[RecordRead]()
        try:
            for first, stop in _runs(np.array(self._granules, np.int64)):
                start = self._granules[first] * granule_numel
                numel = min((stop - first) * granule_numel, self._block.stored_numel - start)
                memory = self._memory[first * granule_numel : first * granule_numel + numel]
                reads.append(self._store.read(self._block.name, PARAM, start, memory, is_urgent=True))
            for read in reads:
                read.wait()
        except BaseException:
            for read in reads:  # other reads still write to the memory
                with contextlib.suppress(Exception):
                    read.wait_for_bytes()
            raise
        for place, out in self._parts:
            out.copy_(self._memory[place : place + out.numel()])
        self._granules, self._parts = [], []


def _runs(numbers: _RowIds) -> Iterator[tuple[int, int]]:
    """Yield the [start, stop) indices of runs of consecutive numbers."""
    edges = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
    for start, stop in pairwise(edges):
        if start < stop:
            yield start, stop


class _Embedding(torch.autograd.Function):
    """`F.embedding` of rows, whose gradient is that of the table."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor, ids: Tensor, inverse: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids, inverse)
        ctx.table_shape, ctx.padding_idx = table.shape, padding_idx
        return F.embedding(inverse, rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ids, inverse = ctx.saved_tensors
        num_rows, padding = len(ids), -1
        if ctx.padding_idx is not None:
            # Without a row for padding, an index beyond all rows has torch take the same kernel as with one.
            found = (ids == ctx.padding_idx).nonzero()
            padding = int(found[0]) if len(found) else num_rows
        of_rows = torch.ops.aten.embedding_dense_backward(gradient, inverse, num_rows, padding, False)
        of_table = torch.sparse_coo_tensor(
            ids.to(torch.int64)[None], of_rows, ctx.table_shape, is_coalesced=True, check_invariants=False
        )
        return of_table, None, None, None, None
