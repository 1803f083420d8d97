"""Runs one chunk's optimizer step. It reads the states, updates them, hands over the new weights, and writes all
records.

A chunk is divided into one part per thread. Each thread verifies, updates and hashes its part. Smaller parts that fit a
core's cache would make hashing cheaper, but the additional calls would cost more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_lohan.device import Buffer
from hf_lohan.files import IoRequest
from hf_lohan.model import Chunk, ChunkPiece, ParamSlice, ranges, round_up
from hf_lohan.optim import TIE_CODES, Aside, MasterFormat, Segment, Steps, here, replay_, update_records_, within
from hf_lohan.store import GRANULE_NUMEL, Checksums, RecordRead
from hf_lohan.threads import KernelThreads, use_all_cores
from hf_lohan.timeline import CPU_OPTIMIZER, UPDATES_WAIT
from hf_lohan.updates.gradients import ChunkGradient
from hf_lohan.updates.handover import IN_RAM, BorrowedSlot, Handover, HoldsParams, NewParams, give_back
from hf_lohan.updates.missed_steps import GroupOf, StepCounts, StepSettings, segments_of
from hf_lohan.updates.setup import UpdateSetup

MIN_PART_NUMEL = 16 * GRANULE_NUMEL


@dataclass(eq=False)
class ChunkUpdate:
    """A chunk's update in progress."""

    gradient: ChunkGradient
    records: dict[str, Tensor]
    """Views of the chunk's elements in the buffers, by kind, and the tie codes if its masters have residuals."""
    buffer_of: dict[str, Buffer]
    """Buffers by kind. Several kinds may share a buffer. Records that are updated in place in RAM have none."""
    private: list[Buffer]
    """Scratch buffers, which are not written to the store (see `MasterFormat.num_private_buffers`)."""
    reads: list[RecordRead]
    is_guess: bool
    """Whether the update may be undone. Its gradient then stays in its buffer, and no reader gets its result."""


class ChunkUpdater:
    """Issues the reads of a chunk's records, runs the optimizer on them, and issues the writes. Used by one thread."""

    def __init__(self, setup: UpdateSetup, handover: Handover, on_failure: Callable[[BaseException], None]) -> None:
        """``on_failure`` is called on I/O threads with the error of a write."""
        self._setup = setup
        self._store = setup.store
        self._timeline = setup.device.timeline
        self._missed = setup.missed
        self._handover = handover
        self._on_failure = on_failure
        self.threads = KernelThreads(torch.get_num_threads())

    def free_buffers(self, chunk: Chunk) -> list[Buffer] | None:
        """Return the buffers for the chunk's update if they are free now; None if not."""
        return self._setup.states.try_acquire(chunk.block.master.num_state_buffers_per_chunk)

    def borrowed_buffers(self, chunk: Chunk) -> list[Buffer] | None:
        """Return as many buffers of the pool of gradients, or None if they are not free now."""
        num_buffers = chunk.block.master.num_state_buffers_per_chunk
        return self._setup.gradients.try_acquire(num_buffers, leave=self._setup.num_arrival_buffers)

    def begin_update(
        self,
        gradient: ChunkGradient,
        reads: list[RecordRead],
        *,
        borrowed: BorrowedSlot | None,
        is_guess: bool,
        buffers: list[Buffer] | None,
    ) -> ChunkUpdate:
        """Issue the reads. `reads` bring back a spilled gradient. Weights come from the `borrowed` slot if it is set,
        unless missed steps were applied to them when they were loaded. Without `buffers`, this waits for buffers."""
        chunk = gradient.chunk
        if self._missed.is_behind(chunk):
            give_back(borrowed)
            borrowed = None
        master = chunk.block.master
        if buffers is None:
            with self._timeline.task(UPDATES_WAIT, "state buffers", block=chunk.block.name):
                buffers = [self._setup.states.acquire() for _ in range(master.num_state_buffers_per_chunk)]
        num_written = len(master.buffer_kinds)
        update = ChunkUpdate(gradient, {}, {}, buffers[num_written:], reads, is_guess)
        for buffer, kinds in zip(buffers, master.buffer_kinds, strict=False):
            start_byte = 0
            for kind in kinds:
                numel = master.numel(kind, chunk.numel)
                view = buffer.view(master.state_dtype(kind), numel, start_byte=start_byte)
                start_byte += view.nbytes
                update.records[kind], update.buffer_of[kind] = view, buffer
        for kind, view in update.records.items():
            start, stop = master.elements(kind, chunk.start, chunk.stop)
            in_ram = self._store.ram.borrow(chunk.block.name, kind, start, stop - start)
            if in_ram is not None:
                update.records[kind] = in_ram
                del update.buffer_of[kind]
            else:
                from_slot = borrowed.start_read(chunk.start, view) if kind == "param" and borrowed is not None else None
                reads.append(from_slot or self._store.read(chunk.block.name, kind, start, view))
        if master.has_residual:
            update.records[TIE_CODES] = self._store.tie_codes(chunk.block.name, chunk.start, chunk.numel)
        for buffer in buffers[:num_written]:
            if buffer not in update.buffer_of.values():
                buffer.release()
        return update

    def finish_update(self, update: ChunkUpdate, group_of: GroupOf, clip_coefficient: float) -> list[IoRequest]:
        """Wait for the reads, run the update, hand over the new parameters, and issue the writes. Each buffer is
        released after its contents are written and copied."""
        gradient, block = update.gradient, update.gradient.chunk.block.name
        form = gradient.chunk.block.master
        with self._timeline.task(UPDATES_WAIT, "reads", block=block):
            for read in update.reads:
                read.wait_for_bytes()
        num_bytes = torch.float32.itemsize * gradient.chunk.numel
        with self._timeline.task(CPU_OPTIMIZER, form.rule.name, block=block, num_bytes=num_bytes):
            checksums = update_in_parts(
                self.threads,
                form,
                update.records,
                None if gradient.is_zero else gradient.values,
                update.reads,
                merge_segments(gradient, group_of, self._setup.step_counts),
                position=gradient.chunk.start,
                clip_coefficient=clip_coefficient,
                private=[buffer.bytes for buffer in update.private],
                checksums_of=partial(self._store.checksums, block),
                unhashed=[
                    kind for kind in update.records if kind == TIE_CODES or self._store.ram.keeps_write(block, kind)
                ],
                granule_numel=gradient.chunk.block.granule_numel,
                aside=self._setup.device.compute_aside,
                missed=self._missed.steps_before(gradient.chunk),
            )
        if not update.is_guess:
            self._missed.catch_up(gradient.chunk)  # must precede any read of the new records
        if gradient.buffer is not None and not update.is_guess:
            gradient.buffer.release()
        for buffer in update.private:
            buffer.release()
        return self._write(update, checksums)

    def _write(self, update: ChunkUpdate, checksums: dict[str, Checksums]) -> list[IoRequest]:
        chunk, writes = update.gradient.chunk, []
        new, copied = None, None
        if not update.is_guess:
            holder = update.buffer_of.get("param", IN_RAM)
            new, copied = self._handover.hand_over(chunk, update.records["param"], holder)
        if (codes := update.records.pop(TIE_CODES, None)) is not None:
            self._store.set_tie_codes(chunk.block.name, chunk.start, chunk.numel, codes)
        for kind, view in update.records.items():
            start, _ = chunk.block.master.elements(kind, chunk.start, chunk.stop)
            buffer: HoldsParams = update.buffer_of.get(kind, IN_RAM)
            buffer.retain()
            request = self._store.write(chunk.block.name, kind, start, view, checksums=checksums.get(kind))
            request.add_done_callback(partial(self._on_written, buffer, new if kind == "param" else None))
            writes.append(request)
        if copied is not None:
            copied.synchronize()
        for buffer in dict.fromkeys(update.buffer_of.values()):
            buffer.release()
        return writes

    def _on_written(self, buffer: HoldsParams, new: NewParams | None, request: IoRequest) -> None:
        """Release a buffer. Called on the I/O thread that finished the write."""
        try:
            if request.error is not None:
                self._on_failure(request.error)
            elif new is not None:
                self._handover.note_written(new)
        except BaseException as error:  # the request would log the error and forget it
            self._on_failure(error)
        finally:  # a thread may wait for the buffer
            buffer.release()


def update_in_parts(
    threads: KernelThreads,
    form: MasterFormat,
    records: Mapping[str, Tensor],
    gradient: Tensor | None,
    reads: Sequence[RecordRead],
    segments: Sequence[Segment],
    *,
    position: int,
    clip_coefficient: float,
    private: Sequence[Tensor],
    checksums_of: Callable[[str, Tensor], Checksums],
    unhashed: Sequence[str] = (),
    granule_numel: int = GRANULE_NUMEL,
    aside: Aside = here,
    missed: Steps = (),
) -> dict[str, Checksums]:
    """Update a chunk's ``records``, by kind, in place with its ``gradient`` [numel], scaled by ``clip_coefficient`` as
    `update_records_` does. None is a gradient of zeros. The ``reads`` that filled the records have arrived, and are
    verified here. Returns checksums of the records' granules by kind, except for ``unhashed`` kinds.

    ``position``: the chunk's offset in its block's records. ``private``: `MasterFormat.num_private_buffers` uint8
    tensors of at least 4 * numel bytes. ``granule_numel``: parameters per granule. ``aside``: see `UpdateRule`.
    ``missed``: the segments of each earlier step that the records lack. Gradients of these steps are zeros. Raises
    CorruptionError, and then leaves the records undefined.
    """
    numel = records["param"].numel()

    def verify(part: tuple[int, int]) -> None:
        start, stop = part
        for read in reads:
            read.verify(start // granule_numel, -(-stop // granule_numel))

    def records_of(part: tuple[int, int]) -> dict[str, Tensor]:
        return {kind: record[slice(*form.elements(kind, *part))] for kind, record in records.items()}

    def hash_(part: tuple[int, int]) -> dict[str, Checksums]:
        return {kind: checksums_of(kind, record) for kind, record in records_of(part).items() if kind not in unhashed}

    def update(part: tuple[int, int]) -> dict[str, Checksums]:
        verify(part)
        start, stop = part
        part_records, inside, offset = records_of(part), within(segments, start, stop), position + start
        # The last part gets the rest of the buffers.
        scratch = [buffer[4 * start : None if stop == numel else 4 * stop] for buffer in private]
        earlier = [in_part for step in missed if (in_part := within(step, start, stop))]
        if gradient is None:
            replay_(part_records, [*earlier, inside], form, position=offset, private=scratch)
            return hash_(part)
        settings: dict[str, Any] = {"position": offset, "private": scratch, "scale": clip_coefficient}
        if earlier:
            replay_(part_records, earlier, form, gradient=gradient[start:stop], segments=inside, **settings)
        else:
            update_records_(part_records, gradient[start:stop], inside, form, **settings)
        return hash_(part)

    part_numel = max(MIN_PART_NUMEL, round_up(-(-numel // threads.num_threads), granule_numel))
    parts = list(ranges(numel, part_numel))
    if form.rule.needs_whole:  # its kernels are large enough for all threads
        assert gradient is not None, "a chunk that is updated whole has a gradient"
        threads.map(verify, parts)
        use_all_cores()
        update_records_(
            records,
            gradient,
            segments,
            form,
            position=position,
            scale=clip_coefficient,
            private=private,
            aside=aside,
        )
        checksums = threads.map(hash_, parts)
    else:
        checksums = threads.map(update, parts)
    assert all(read.is_verified for read in reads)
    return {kind: np.concatenate([by_kind[kind] for by_kind in checksums]) for kind in records if kind not in unhashed}


def merge_segments(gradient: ChunkGradient, group_of: GroupOf, step_counts: StepCounts) -> list[Segment]:
    """Return runs of neighbouring parameters with equal hyperparameters and step. Parameters without a gradient are
    left out, as in torch's optimizers, and get no weight decay, no decay of moments and no step."""
    if gradient.chunk.block.needs_whole:
        pieces = [piece for piece in gradient.chunk.pieces if piece.param_slice in gradient.slices]
        return [_whole_segment(piece, group_of, step_counts) for piece in pieces]

    def settings_of(part: ParamSlice) -> StepSettings | None:
        return (group_of(part), step_counts[part] + 1) if part in gradient.slices else None

    return segments_of(gradient.chunk, settings_of)


def _whole_segment(piece: ChunkPiece, group_of: GroupOf, step_counts: StepCounts) -> Segment:
    part = piece.param_slice
    assert piece.numel == part.shape.numel(), f"{part.name} is not in one chunk"
    return Segment(piece.start_in_chunk, piece.stop_in_chunk, group_of(part), step_counts[part] + 1, tuple(part.shape))
