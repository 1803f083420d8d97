"""One chunk's optimizer step: read its states, update them, write them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from hf_lohan.device import Buffer, BufferPool, Event
from hf_lohan.files import IoRequest
from hf_lohan.model import Chunk, ChunkPiece, ParamSlice
from hf_lohan.optim import MasterFormat, Segment
from hf_lohan.store import Checksums, RecordRead
from hf_lohan.threads import KernelThreads
from hf_lohan.timeline import CPU_OPTIMIZER, UPDATES_WAIT, Timeline
from hf_lohan.updates.non_finite import NonFiniteGradientError
from hf_lohan.updates.param_groups import GroupOf
from hf_lohan.updates.split_update import SplitUpdate
from hf_lohan.updates.until_written import UntilWritten
from hf_lohan.updates.weight_loan import WeightLoan


class Drafts(Protocol):
    """What makes updates undoable: a store that keeps its last commit until the next."""

    @property
    def num_homes(self) -> int: ...

    @property
    def has_drafts(self) -> bool: ...

    def drop(self) -> None: ...


class RecordStore(Protocol):
    """Reads and writes parts of records."""

    def read(self, block: str, kind: str, start_numel: int, out: Tensor) -> RecordRead: ...

    def write(
        self, block: str, kind: str, start_numel: int, source: Tensor, *, checksums: Checksums | None = None
    ) -> IoRequest: ...

    def checksums(self, block: str, kind: str, source: Tensor) -> Checksums: ...


HandOver = Callable[[Chunk, Tensor, UntilWritten], Event | None]
"""See `BlocksInUpdate.hand_over`."""


@dataclass(eq=False)
class ChunkGradient:
    """The gradient of one chunk, summed over a step's backwards: in a buffer, or spilled to the SSD."""

    chunk: Chunk
    buffer: Buffer | None
    slices: set[ParamSlice]
    """Parameters that have a gradient in it."""
    summed: set[ParamSlice] = field(default_factory=set)
    """Those of them to which more than one backward contributed."""
    is_measured: bool = False
    """Whether the norms of those that were summed are known."""
    spill_write: IoRequest | None = None

    @property
    def values(self) -> Tensor:
        """float32 [chunk.numel], in its buffer."""
        assert self.buffer is not None
        return self.buffer.view(torch.float32, self.chunk.numel)

    def of(self, piece: ChunkPiece) -> Tensor:
        """float32 [piece.numel] of one that has a gradient."""
        return self.values[piece.start_in_chunk : piece.stop_in_chunk]

    def refuse_not_finite(self) -> None:
        """Raises NonFiniteGradientError, for where an update cannot be undone."""
        for piece in self.chunk.pieces:
            has_gradient = piece.param_slice in self.slices  # else the buffer holds anything there
            if has_gradient and not torch.isfinite(self.of(piece)).all():
                raise NonFiniteGradientError(
                    f"the gradient of {piece.param_slice.name} is not finite, and other blocks have been updated in "
                    "place in this step already; resume from a checkpoint, with durability='step' or max_grad_norm > "
                    "0, under which such steps are skipped"
                )


@dataclass(eq=False)
class ChunkUpdate:
    """A chunk's update on its way: `records` are views by kind into `buffers`, of the chunk's elements."""

    gradient: ChunkGradient
    records: dict[str, Tensor]
    buffers: list[Buffer]
    reads: list[RecordRead]
    keeps_gradient: bool = False
    """The update may have to be done over: its gradient stays in its buffer."""
    private: list[Buffer] = field(default_factory=list)
    """Buffers that hold nothing that is written (see `MasterFormat.num_private_buffers`)."""


class StateUpdater:
    """Issues the reads of a chunk's records, runs AdamW on them and issues the writes."""

    def __init__(
        self,
        store: RecordStore,
        pool: BufferPool,
        master: MasterFormat,
        timeline: Timeline | None = None,
        spare: BufferPool | None = None,
        num_not_spare: int = 0,
    ) -> None:
        """``spare``: where buffers of the same size may be borrowed that nobody else needs for now, all but
        ``num_not_spare``."""
        self._store = store
        self._pool = pool
        self._spare, self._num_not_spare = spare, num_not_spare
        self._master = master
        self.timeline = timeline or Timeline()
        self._threads = KernelThreads(torch.get_num_threads())

    def own_buffers(self) -> list[Buffer] | None:
        """The buffers that an update takes, if they are free now."""
        return self._pool.try_acquire(self._master.num_state_buffers_per_chunk)

    def borrowed_buffers(self) -> list[Buffer] | None:
        """As many of those that may be borrowed, if they are free now."""
        if self._spare is None:
            return None
        return self._spare.try_acquire(self._master.num_state_buffers_per_chunk, leave=self._num_not_spare)

    def begin(
        self,
        gradient: ChunkGradient,
        reads: Sequence[RecordRead],
        *,
        loan: WeightLoan | None = None,
        keep_gradient: bool = False,
        buffers: list[Buffer] | None = None,
    ) -> ChunkUpdate:
        """Issue the reads. `reads` are those that bring the gradient back, if it was away; with a `loan` the weights
        come from the device. `buffers`: its own or borrowed ones; without them, wait for its own."""
        chunk = gradient.chunk
        if buffers is None:
            with self.timeline.task(UPDATES_WAIT, "state buffers", block=chunk.block.name):
                buffers = [self._pool.acquire() for _ in range(self._master.num_state_buffers_per_chunk)]
        num_written = len(self._master.buffer_kinds)
        written, private = buffers[:num_written], buffers[num_written:]
        views = self._views(chunk, written)
        update = ChunkUpdate(gradient, views, written, list(reads), keep_gradient, private)
        for kind, view in views.items():
            if kind == "param" and loan is not None:
                update.reads.append(loan.read(chunk.start, view))
            else:
                start, _ = self._master.elements(kind, chunk.start, chunk.stop)
                update.reads.append(self._store.read(chunk.block.name, kind, start, view))
        return update

    def _views(self, chunk: Chunk, buffers: Sequence[Buffer]) -> dict[str, Tensor]:
        """Where in the buffers the chunk's records go."""
        views = {}
        for buffer, kinds in zip(buffers, self._master.buffer_kinds, strict=True):
            start_byte = 0
            for kind in kinds:
                numel = self._master.numel(kind, chunk.numel)
                views[kind] = buffer.view(self._master.state_dtype(kind), numel, start_byte=start_byte)
                start_byte += views[kind].nbytes
        return views

    def finish(
        self,
        update: ChunkUpdate,
        *,
        clip_coefficient: float,
        group_of: GroupOf,
        hand_over: HandOver,
        written: Callable[[BaseException | None], None],
    ) -> list[IoRequest]:
        """Wait for the reads, update, `hand_over` the new parameters (if the update is no guess) and issue the writes.
        When they are done the buffers are given back and `written` is called with the first error, or None, on an I/O
        thread."""
        gradient = update.gradient
        block = gradient.chunk.block.name
        with self.timeline.task(UPDATES_WAIT, "reads", block=block):
            for read in update.reads:
                read.arrive()
        split = SplitUpdate(
            form=self._master,
            records=update.records,
            gradient=gradient.values,
            position=gradient.chunk.start,
            reads=update.reads,
            segments=merge_segments(gradient, group_of),
            clip_coefficient=clip_coefficient,
            private=[buffer.bytes for buffer in update.private],
            checksums_of=partial(self._store.checksums, block),
            granule_numel=gradient.chunk.block.granule_numel,
        )
        num_bytes = torch.float32.itemsize * gradient.chunk.numel
        with self.timeline.task(CPU_OPTIMIZER, "AdamW", block=block, num_bytes=num_bytes):
            checksums = split.run(self._threads)
        assert gradient.buffer is not None
        for buffer in update.private if update.keeps_gradient else (gradient.buffer, *update.private):
            buffer.release()
        until_written = UntilWritten(1 + len(update.records), update.buffers, written)
        copied = None
        if not update.keeps_gradient:
            copied = hand_over(gradient.chunk, update.records["param"], until_written)
        return self._write(gradient.chunk, update, checksums, copied, until_written)

    def _write(
        self,
        chunk: Chunk,
        update: ChunkUpdate,
        checksums: dict[str, Checksums],
        copied: Event | None,
        until_written: UntilWritten,
    ) -> list[IoRequest]:
        writes = []
        for kind, view in update.records.items():
            start, _ = self._master.elements(kind, chunk.start, chunk.stop)
            writes.append(self._store.write(chunk.block.name, kind, start, view, checksums=checksums[kind]))
        for request in writes:
            request.add_done_callback(lambda request: until_written.one_less(request.error))
        if copied is not None:
            copied.synchronize()
        until_written.one_less()
        return writes


def merge_segments(gradient: ChunkGradient, group_of: GroupOf) -> list[Segment]:
    """Runs of neighbouring parameters with equal hyperparameters and step. Parameters without a gradient are left out,
    as torch's AdamW leaves them out: no decay, no decay of moments, no step."""
    segments: list[Segment] = []
    joins = False
    for piece in gradient.chunk.pieces:
        if piece.param_slice not in gradient.slices:
            joins = False
            continue
        group, step = group_of(piece.param_slice), piece.param_slice.num_updates + 1
        last = segments[-1] if segments else None
        if joins and last is not None and (last.group, last.step) == (group, step):
            segments[-1] = Segment(last.start, piece.stop_in_chunk, group, step)
        else:
            segments.append(Segment(piece.start_in_chunk, piece.stop_in_chunk, group, step))
        joins = True
    return segments
