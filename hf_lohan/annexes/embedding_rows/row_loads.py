"""Loads rows of a table of embeddings to the device. The table itself stays in the store.

With several ranks, each rank reads rows of its own shard for all ranks, in rounds on a separate thread
(`ranks.transport.rounds`). This thread waits only for the rank's drive and for updates. Updates need only gradients
that all ranks have published. So the thread does not wait for the computing thread, and a wait for rows always ends.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_lohan.costs.record_traffic import PARAM
from hf_lohan.device import Device, Event, Lane
from hf_lohan.files import StorageError
from hf_lohan.model import Block, RowIds, rows_between
from hf_lohan.planning import OffloadLayout
from hf_lohan.ranks import Links, RanksDisagreeError, Rounds, bytes_of
from hf_lohan.store import RecordRead, Store
from hf_lohan.timeline import COMPUTE_WAITS
from hf_lohan.updates import GradientPipeline
from hf_lohan.weights import RowLoads, SlotRing
from hf_lohan.weights.shared_source import StaleError, stale_error

_HEAD = struct.Struct("<qqB")
"""Number of weight changes so far (period), number of requested rows (-1 for none), and whether the rank has closed."""


def open_rows(
    layout: OffloadLayout, device: Device, store: Store, updates: GradientPipeline, links: Links, changes: SlotRing
) -> EmbeddingRows:
    """Return the `EmbeddingRows` of the layout's table. All ranks call this together. ``changes`` counts the changes of
    weights."""
    table = layout.model_blocks.table
    assert table is not None

    def buffer() -> Tensor:
        return device.host_empty(layout.plan.rows_buffer_bytes)

    own = OwnRows(table, layout.ranks.rank, store, updates, buffer())
    if not links.ranks.others:
        return EmbeddingRows(device, own, None if device.memory_is_host else buffer())
    return EmbeddingRows(device, ShardedRows(own, links, changes, buffer()), buffer())


class OwnRows:
    """Reads rows from this rank's store, which has the table or a shard of it. A row is read from an update that is not
    written yet, from the copy of the record in RAM, or from the SSD. Only granules with requested rows are read."""

    def __init__(self, table: Block, rank: int, store: Store, updates: GradientPipeline, granules: Tensor) -> None:
        """``granules``: page-aligned memory for granules that are read, uint8."""
        self.table = table
        self.rank = rank
        self._part = table.slices[0]
        self._store = store
        self._updates = updates
        self._granules = granules.view(table.master.working_dtype)
        self._reading = threading.Lock()

    @property
    def width(self) -> int:
        return self._part.shape[1]

    def elements_of(self, rank: int) -> tuple[int, int]:
        """Return the range of the table's elements [start, stop) in the shard of a rank."""
        start, stop = (min(edge, self._part.stop) for edge in self.table.rank_ranges[rank])
        return start - self._part.start, stop - self._part.start

    def settle(self) -> None:
        """Wait until no update of the table is outstanding."""
        self._updates.settle(self.table)

    def fill(self, ids: RowIds, out: Tensor) -> None:
        """Fill ``out`` with this rank's elements of the rows, row by row. Raises the store's errors, and StaleError if
        an update of these rows is outstanding."""
        first, last = self.elements_of(self.rank)
        flat, place = out.view(-1), 0
        missing: list[tuple[int, Tensor]] = []
        for begin, end in _runs(ids):
            start = max(int(ids[begin]) * self.width, first)
            stop = min((int(ids[end - 1]) + 1) * self.width, last)
            run, place = flat[place : place + stop - start], place + stop - start
            start += self._part.start
            rest = self._updates.copy_new(self.table, start, run)
            if rest is None:
                raise stale_error(self.rank, self.table)
            for low, high in rest:
                piece = run[low - start : high - start]
                if not self._store.read_from_ram(self.table.name, PARAM, low, piece):
                    missing.append((low, piece))
        with self._reading:
            batch = _GranuleBatch(self.table, self._store, self._granules)
            for low, piece in missing:
                batch.add(low, piece)
            batch.read()

    def close(self) -> None:
        """Do nothing."""


@dataclass(eq=False)
class _Request:
    """Rows that this rank's computation waits for."""

    ids: RowIds
    out: Tensor
    """[len(ids), width], in host memory."""
    period: int
    error: BaseException | None = None


class ShardedRows(Rounds):
    """Reads rows together with all other ranks, if each rank has a shard of the table. In a round each rank sends its
    number of requested rows. Then requests are served in rank order: the requesting rank sends the indices of its rows,
    and each rank sends back the elements in its own shard."""

    def __init__(self, own: OwnRows, links: Links, changes: SlotRing, sent: Tensor) -> None:
        """All ranks create this together. ``sent``: memory for rows that are sent, uint8."""
        super().__init__(links, links.open("rows", carries="tokens"), beside_kernels=False)
        self._own = own
        self._changes = changes
        self._sent = sent
        self._request: _Request | None = None
        self.start()

    def settle(self) -> None:
        self._own.settle()

    def fill(self, ids: RowIds, out: Tensor) -> None:
        """Fill ``out`` [len(ids), width]."""
        with self._links.watch.waiting(self._lane.name), self.lock:
            # After an interrupt, an earlier request may still be writing to its memory.
            self.changed.wait_for(lambda: self._request is None or self._error is not None)
            request = self._request = _Request(ids, out, self._changes.num_changes)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self._request is not request or self._error is not None)
            self.raise_if_broken()
        if request.error is not None:
            raise request.error

    # Rounds.

    def advance(self) -> None:
        """Do nothing, because rows are read only on request."""

    def head(self) -> bytes:
        request = self._request
        period = self._changes.num_changes if request is None else request.period
        return _HEAD.pack(period, -1 if request is None else len(request.ids), self.is_closed)

    def is_waiting(self) -> bool:
        return True  # serving other ranks does not delay this rank

    def is_between_passes(self) -> bool:
        return True

    def carry_out(self, heads: Sequence[bytes]) -> bool:
        told = [_HEAD.unpack(head) for head in heads]
        first = min((period for period, _, is_closed in told if not is_closed), default=0)
        for rank, (period, num_ids, _) in enumerate(told):
            if num_ids >= 0 and period <= first:
                self._serve(rank, num_ids, period)
        return not all(is_closed for *_, is_closed in told)

    def break_off(self, error: BaseException) -> None:
        """Make `fill` raise ``error``."""

    def _serve(self, rank: int, num_ids: int, period: int) -> None:
        """Send rows of this rank's shard to rank ``rank``, which may be this rank itself."""
        own, lane, request = self._own, self._lane, self._request if rank == self._own.rank else None
        what, itemsize = f"rows of {own.table.name}", own.table.master.working_dtype.itemsize
        ids = torch.empty(num_ids, dtype=torch.int64)
        if request is not None:
            ids.copy_(torch.from_numpy(request.ids))
        if num_ids:
            lane.send_to_all(ids, rank, what)
        sizes = [self._numel_of(ids.numpy(), owner) * itemsize for owner in lane.members]
        rows = self._room(sizes[own.rank])
        error: BaseException | None = None
        try:
            self._fill(ids.numpy(), rows.view(own.table.master.working_dtype), period)
        except (StorageError, StaleError) as of_this_rank:
            error = of_this_rank
        text = "" if error is None else f"{error}" or repr(error)
        texts = [told.decode() for told in lane.agree(f"whether {what} are there", text.encode())]
        if any(texts):
            if request is not None:
                self._end(request, error or RanksDisagreeError(next(filter(None, texts))))
            return
        received, of_ranks = torch.empty(0, dtype=torch.uint8), [0] * len(sizes)
        if request is not None:
            received, of_ranks = bytes_of(request.out), sizes
        to_ranks = [sizes[own.rank] if other == rank else 0 for other in lane.members]
        lane.exchange(rows, to_ranks, received, of_ranks, what)
        if request is not None:
            self._end(request, None)

    def _end(self, request: _Request, error: BaseException | None) -> None:
        with self.lock:
            request.error, self._request = error, None
            self.changed.notify_all()

    def _numel_of(self, ids: RowIds, rank: int) -> int:
        _, elements = rows_between(ids, self._own.width, *self._own.elements_of(rank))
        return int(elements.stop - elements.start)

    def _room(self, num_bytes: int) -> Tensor:
        return self._sent[:num_bytes] if num_bytes <= self._sent.numel() else torch.empty(num_bytes, dtype=torch.uint8)

    def _fill(self, ids: RowIds, rows: Tensor, period: int) -> None:
        """Fill ``rows`` with the weights as they are after ``period`` changes. A failed read is repeated once, because
        an update may have written meanwhile."""
        own = self._own
        of_shard, _ = rows_between(ids, own.width, *own.elements_of(own.rank))
        self._refuse_stale(period)  # before `settle`, because updates of the first step wait for a commit of all ranks
        for is_last in (False, True):
            try:
                self.settle()
                own.fill(ids[of_shard], rows)
                break
            except StorageError:
                if is_last:
                    raise
        self._refuse_stale(period)

    def _refuse_stale(self, period: int) -> None:
        if not self._changes.is_unchanged_since(self._own.table, period):
            raise stale_error(self._own.rank, self._own.table)


class EmbeddingRows(RowLoads):
    """Loads the rows of a batch's tokens to the device."""

    def __init__(self, device: Device, source: OwnRows | ShardedRows, landing: Tensor | None) -> None:
        """``landing``: host memory from which rows are copied to the device. None if the device uses host memory."""
        self._device = device
        self._source = source
        self._landing = landing
        self._copied: Event | None = None
        """The end of the last copy from `_landing`."""
        self.num_bytes = 0

    def embed(self, block: Block, leaf: Tensor | None, ids: Tensor, padding_idx: int | None) -> Tensor:
        part = block.slices[0]
        needed, inverse = torch.unique(ids.cpu(), return_inverse=True)  # on the host, where the rows are read
        needed = needed.to(torch.int64)
        rows, inverse = self.load(block, needed.numpy()), inverse.to(ids.device)
        if leaf is None:
            return F.embedding(inverse, rows)
        padding = -1
        if padding_idx is not None:
            # If no row is the padding row, an index beyond all rows makes torch use the same kernel as with padding.
            found = (needed == padding_idx % part.shape[0]).nonzero()
            padding = int(found[0]) if len(found) else len(needed)
        output: Tensor = _Embedding.apply(leaf, rows, needed, inverse, padding)  # type: ignore[no-untyped-call]
        return output

    def load(self, block: Block, ids: RowIds) -> Tensor:
        """Return rows [len(ids), width] on the device. Raises IndexError for ids outside the table."""
        part = block.slices[0]
        num_rows, width = part.shape
        if len(ids) and not 0 <= ids[0] <= ids[-1] < num_rows:
            raise IndexError(
                f"index out of range in self: {part.name} has {num_rows} rows, and a token has the index "
                f"{ids[-1] if ids[0] >= 0 else ids[0]}"
            )
        device, dtype = self._device, block.master.working_dtype
        rows = torch.empty(len(ids), width, dtype=dtype, device=device.torch_device)
        with device.timeline.task(COMPUTE_WAITS, "weights", block=block.name):
            self._source.settle()
            if self._landing is None:
                self._source.fill(ids, rows)
            else:
                device.wait(Lane.H2D, device.record(Lane.COMPUTE, rows))  # compute may still use this memory
                self._copy(ids, rows, self._landing.view(dtype))
        self.num_bytes += rows.nbytes
        return rows

    def _copy(self, ids: RowIds, rows: Tensor, landing: Tensor) -> None:
        """Copy rows to the device, as many at a time as fit ``landing``."""
        width = rows.shape[1]
        at_once = landing.numel() // width
        for first in range(0, len(ids), at_once):
            stop = min(first + at_once, len(ids))
            if self._copied is not None:
                self._copied.synchronize()
            landed = landing[: (stop - first) * width].view(-1, width)
            self._source.fill(ids[first:stop], landed)
            self._device.copy(Lane.H2D, rows[first:stop], landed)
            self._copied = self._device.record(Lane.H2D)
        if self._copied is not None:
            self._device.wait(Lane.COMPUTE, self._copied)

    def close(self) -> None:
        """Stop serving rows to other ranks."""
        self._source.close()


class _GranuleBatch:
    """Granules that are read together, and the rows that are copied from them."""

    def __init__(self, block: Block, store: Store, memory: Tensor) -> None:
        """``memory``: page-aligned memory for granules, in the block's dtype."""
        self._block = block
        self._store = store
        self._memory = memory
        self._room = memory.numel() // block.granule_numel
        self._granules: list[int] = []
        self._parts: list[tuple[int, Tensor]] = []
        """(index of the first element in the memory, tensor to which elements are copied)."""

    def add(self, start: int, out: Tensor) -> None:
        """Copy elements from ``start`` on to ``out``, in the next `read` at the latest. ``start`` ascends."""
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
        """Read and verify the granules, and copy the requested elements."""
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
            for read in reads:  # wait, because other reads still write to the memory
                with contextlib.suppress(Exception):
                    read.wait_for_bytes()
            raise
        for place, out in self._parts:
            out.copy_(self._memory[place : place + out.numel()])
        self._granules, self._parts = [], []


def _runs(numbers: RowIds) -> Iterator[tuple[int, int]]:
    """Yield the index ranges [start, stop) of runs of consecutive numbers."""
    edges = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
    for start, stop in pairwise(edges):
        if start < stop:
            yield start, stop


class _Embedding(torch.autograd.Function):
    """`F.embedding` over the loaded rows. Its backward returns the gradient of the table."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor, ids: Tensor, inverse: Tensor, padding: int) -> Tensor:
        """``ids``: indices of the rows in the table, on the host. ``padding``: index in ``rows`` without a gradient."""
        ctx.save_for_backward(ids, inverse)
        ctx.table_shape, ctx.padding_idx = table.shape, padding
        return F.embedding(inverse, rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ids, inverse = ctx.saved_tensors
        of_rows = torch.ops.aten.embedding_dense_backward(gradient, inverse, len(ids), ctx.padding_idx, False)
        of_table = torch.sparse_coo_tensor(
            ids[None].to(gradient.device), of_rows, ctx.table_shape, is_coalesced=True, check_invariants=False
        )
        return of_table, None, None, None, None
