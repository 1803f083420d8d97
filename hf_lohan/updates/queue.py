"""Chunk after chunk through the optimizer: which read, update and write overlap."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Set
from contextlib import contextmanager

from hf_lohan.device import Buffer
from hf_lohan.files import IoRequest
from hf_lohan.model import Block, Chunk, ChunkPiece, ParamSlice
from hf_lohan.timeline import UPDATES_WAIT
from hf_lohan.updates.chunk_gradient import ArrivedChunk, ChunkGradient
from hf_lohan.updates.chunk_update import ChunkUpdate, ChunkUpdater
from hf_lohan.updates.handover import Handover
from hf_lohan.updates.held import HeldGradients
from hf_lohan.updates.loan import WeightLoan
from hf_lohan.updates.setup import GroupOf, UpdateSetup


class UpdateQueue:
    """Applies gradients, and knows what of the present step it has applied. Used by one thread.

    Schedules (LoHan, Fig. 3): `optimized` issues the reads of chunk j+1 before it updates chunk j and issues its
    writes, so SSD and CPU are both busy, and those of more chunks where it may borrow buffers; `naive` reads, updates
    and writes one chunk after another; `serial` does what naive does, but only after backward.
    """

    def __init__(
        self, setup: UpdateSetup, held: HeldGradients, handover: Handover, failed: Callable[[BaseException], None]
    ) -> None:
        """`held`: where gradients come back from, and where those of guesses go again."""
        self._updater = ChunkUpdater(setup, handover, failed)
        self._held = held
        self._is_optimized = setup.schedule == "optimized"
        self._step_counts = setup.step_counts
        self._timeline = setup.device.timeline
        self._pending: deque[tuple[ChunkUpdate, GroupOf, float]] = deque()
        self._writes: deque[tuple[Chunk, IoRequest]] = deque()
        self._pieces: set[ChunkPiece] = set()
        self.chunks: set[Chunk] = set()
        """What the step has updated some of."""
        self._busy_s = 0.0

    def update(
        self,
        gradient: ChunkGradient,
        group_of: GroupOf,
        *,
        clip_coefficient: float = 1.0,
        loan: WeightLoan | None = None,
        is_guess: bool = False,
        may_borrow: bool = False,
    ) -> None:
        """Apply a chunk's gradient, scaled. `loan`: of the block's weights as they were in backward; `is_guess`: it is
        held again, and nobody is handed the result; `may_borrow`: the step's backward is over, so the buffers of
        gradients that have been applied serve to read further ahead, and to wait in for the drive."""
        self.chunks.add(gradient.chunk)
        self._pieces.update(piece for piece in gradient.chunk.pieces if piece.param_slice in gradient.slices)
        with self._timed():
            buffers = self._make_room(gradient, may_borrow)
            with self._timeline.task(UPDATES_WAIT, "spilled gradients", block=gradient.chunk.block.name):
                reads = self._held.bring_back(gradient)
            self._wait_for_writes_of(gradient.chunk)
            update = self._updater.begin(gradient, reads, loan=loan, is_guess=is_guess, buffers=buffers)
            if not may_borrow:
                self._finish_all()
            self._pending.append((update, group_of, clip_coefficient))
            if not self._is_optimized:
                self._finish_all()
                self._wait_for_writes()

    def _make_room(self, gradient: ChunkGradient, may_borrow: bool) -> list[Buffer] | None:
        """Buffers for one more update, of those that are free now. Two are under way together with the buffers that
        there are for it, sooner or later, so None is returned if they have to be waited for; more only with borrowed
        ones, or the first of them is finished."""
        while len(self._pending) > 1:
            can_begin = may_borrow and self._held.can_bring_back(gradient)
            buffers = self._updater.borrowed_buffers(gradient.chunk) if can_begin else None
            if buffers is not None:
                return buffers
            self._finish_first()
        chunk = gradient.chunk
        return self._updater.free_buffers(chunk) or (self._updater.borrowed_buffers(chunk) if may_borrow else None)

    def finish_pending(self) -> bool:
        """Finish the updates that wait for the next one's reads to be issued. Says whether there were any."""
        had_one = bool(self._pending)
        with self._timed():
            self._finish_all()
        return had_one

    def wait_for_writes_of(self, blocks: Set[Block]) -> None:
        """Of what was updated of these: from here on, reads find it."""
        for chunk, write in self._writes:
            if chunk.block in blocks:
                write.wait()

    def settle(self) -> None:
        """Wait until all is written."""
        with self._timed():
            self._finish_all()
            self._wait_for_writes()

    def refuse_second(self, arrived: ArrivedChunk) -> None:
        """Raises RuntimeError if a gradient arrived of what has been updated with another."""
        for piece in arrived.pieces:
            if piece in self._pieces:
                raise RuntimeError(
                    f"a second gradient of {piece.param_slice.name} arrived after the first had been applied; "
                    "backward runs more than once a step here, so set max_grad_norm > 0 or announce the accumulation"
                )

    def forget(self) -> float:
        """The step's updates were undone. Returns how long they had taken."""
        self._pieces.clear()
        self.chunks.clear()
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    def end_step(self, of_others: Collection[ParamSlice] = ()) -> None:
        """What was updated counts as one step more, and so does what other ranks update."""
        self.finish_pending()
        for part in {piece.param_slice for piece in self._pieces} | set(of_others):
            self._step_counts[part] += 1
        self.forget()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self._busy_s += time.perf_counter() - began_s

    def _finish_all(self) -> None:
        while self._pending:
            self._finish_first()

    def _finish_first(self) -> None:
        update, group_of, clip_coefficient = self._pending.popleft()
        writes = self._updater.finish(update, group_of, clip_coefficient)
        self._writes.extend((update.gradient.chunk, write) for write in writes)
        if update.is_guess:
            self._held.hold(update.gradient, is_final=True)
        while self._writes and self._writes[0][1].done():
            self._writes.popleft()[1].wait()

    def _wait_for_writes_of(self, chunk: Chunk) -> None:
        """Of its last update: reads go before writes, and would find what was there before it."""
        for written, write in self._writes:
            if written is chunk:
                with self._timeline.task(UPDATES_WAIT, "writes", block=chunk.block.name):
                    write.wait()

    def _wait_for_writes(self) -> None:
        with self._timeline.task(UPDATES_WAIT, "writes"):
            while self._writes:
                self._writes.popleft()[1].wait()
