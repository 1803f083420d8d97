"""What the worker's thread does with a step's gradients: hold them, apply them at once, or apply them on a guess."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Literal

from hf_lohan.device import Buffer
from hf_lohan.files import IoRequest
from hf_lohan.model import Block, Chunk, ChunkPiece, ParamSlice
from hf_lohan.threads import Command, WorkThread
from hf_lohan.timeline import UPDATES_WAIT
from hf_lohan.updates.chunk_update import ChunkUpdate, ChunkUpdater
from hf_lohan.updates.gradient_reduction import GradientMeans
from hf_lohan.updates.gradients import ArrivedChunk, ChunkGradient, GradientNorms
from hf_lohan.updates.handover import BorrowedSlot, Handover, give_back
from hf_lohan.updates.held import HeldGradients
from hf_lohan.updates.missed_steps import GroupOf
from hf_lohan.updates.setup import UpdateSetup

Applied = Literal["in_backward", "deferred", "accepted", "redone"]
"""How a step was applied: its updates ran in backward; waited for the norm; ran in backward on the guess that the norm
does not clip and that the hyperparameters stay, which was right; or wrong."""


class UpdateWorker:
    """Its methods run on one thread, in the order in which the pipeline asks for them; others read what is public."""

    def __init__(
        self,
        setup: UpdateSetup,
        norms: GradientNorms,
        handover: Handover,
        failed: Callable[[BaseException], None],
        means: GradientMeans,
    ) -> None:
        """`failed` is called on I/O threads; `means` knows when a chunk's gradient is that of all ranks."""
        self.undone_s = 0.0
        """How long all updates took that were undone."""
        self.abandoned: tuple[set[Block], bool] = (set(), False)
        """The blocks that steps had updated that were abandoned since a gradient came, and whether updates remain in
        them. Several, for who was interrupted while it waited for `abandon_step` calls it again."""
        self._group_of = setup.group_of
        self._are_held = setup.holds_gradients
        self._is_optimized = setup.schedule == "optimized"
        self._store = setup.store
        self._missed = setup.missed
        self._step_counts = setup.step_counts
        self._missing: set[ParamSlice] = set()
        """Parameters that take the step in progress later."""
        self._handover = handover
        self._means = means
        means.when_none_was_given(partial(self._apply_or_hold, may_guess=False, loan=None))
        self._held = HeldGradients(setup, norms)
        self._queue = UpdateQueue(setup, self._held, handover, failed)
        self._guess = Guess(setup.group_of)
        self.can_undo: bool | None = None
        """Whether the updates of the step's backward can be undone; None before the first."""

    def work_off(self) -> bool:
        """Nothing to read ahead for: do not leave the last chunk lying. Says whether there was one."""
        return self._queue.finish_pending()

    def settle(self) -> None:
        """Wait until all is written. Who waits for the store may be about to change it: from here on it has what was
        in RAM."""
        self._queue.settle()
        self._handover.forget_written()

    # In backward.

    def accept(self, arrived: ArrivedChunk, *, is_final: bool, may_guess: bool, loan: BorrowedSlot | None) -> None:
        """Hold or apply what has arrived of a chunk. `is_final`: no later backward of this step adds to it;
        `may_guess`: apply it on a guess, if the step does or may."""
        self.abandoned = (set(), False)
        if arrived.chunk in self._queue.chunks:  # more gradient for what has been updated
            if not self._are_held:
                self._queue.refuse_second(arrived)
            self.undo_guesses()
        gradient = self._held.add(arrived)
        if is_final:
            apply = partial(self._apply_or_hold, may_guess=may_guess, loan=loan)
            self._means.give(gradient, apply, partial(give_back, loan))
        else:
            self._held.hold(gradient)
            give_back(loan)

    def _apply_or_hold(self, gradient: ChunkGradient, *, may_guess: bool, loan: BorrowedSlot | None) -> None:
        """The gradient is that of all ranks."""
        try:
            self._apply_or_hold_mean(gradient, may_guess, loan)
        finally:
            give_back(loan)

    def _apply_or_hold_mean(self, gradient: ChunkGradient, may_guess: bool, loan: BorrowedSlot | None) -> None:
        self._held.measure(gradient)
        if not self._are_held:
            if not self._begin_updates():
                gradient.refuse_not_finite()
            self._handover.announce([gradient.chunk])
            self._queue.update(gradient, self._group_of, loan=loan)
        elif self._guess.decide(may_guess and self._begin_updates()):
            self._queue.update(gradient, self._guess.group_of, loan=loan, is_guess=True)
        else:
            self._held.hold(gradient, is_final=True)

    def _begin_updates(self) -> bool:
        """Called before each update in backward. Returns whether the step can be undone: else other drafts would go
        with it, or there are none."""
        if self.can_undo is None:
            self.can_undo = self._store.num_homes > 1 and not self._store.has_drafts
        return self.can_undo

    def measure_rest(self) -> None:
        """From here on the norms of all that has arrived are known."""
        self._held.measure_rest()

    def give_rest(self) -> None:
        """Give to the means what no final backward has announced."""
        if not self._means.are_of_many:
            return
        for chunk in self._held.chunks - self._means.given:
            apply = partial(self._apply_or_hold, may_guess=False, loan=None)
            self._means.give(self._held.take(chunk), apply, partial(give_back, None))

    def undo_guesses(self) -> None:
        """Undo what the step has updated on a guess, and hold the rest of its gradients."""
        if self._guess.is_on:
            self._undo()
            self._guess.stop()

    def _undo(self) -> None:
        """Back to the last commit. Gradients that were held again stay."""
        self.settle()
        self.undone_s += self._queue.forget()
        self._store.drop_drafts()
        self._missed.undo()

    # At the step's end.

    def decide(self, clip_coefficient: float, group_of: GroupOf, of_zeros: Iterable[Chunk] = ()) -> Applied:
        """How the step is applied. `apply_held` is still to come: from here on, whoever reads a block waits for what
        is held of it. `of_zeros`: chunks of which no gradient came, and whose gradient is zero."""
        applied = self._judge(clip_coefficient, group_of)
        others = self._held.chunks | self._queue.chunks
        eager, late, self._missing = self._missed.decide(of_zeros, others, group_of, self._step_counts)
        self._queue.wait_for_writes_of(self._missed.added)  # who reads them reads all their records from here on
        for chunk in eager:
            self._held.hold(ChunkGradient.of_zeros(chunk))
        for chunk in late:
            self._held.hold(ChunkGradient.of_nothing(chunk))
        if self._is_optimized:
            self._handover.announce(self._held.chunks)
        return applied

    def _judge(self, clip_coefficient: float, group_of: GroupOf) -> Applied:
        """Accept or undo guesses. What is still held then is to be applied: with a right guess, those gradients that
        got none in the last backward."""
        if not self._are_held:
            self._queue.finish_pending()  # before a scheduler changes the hyperparameters that it is to have
            return "in_backward"
        if not self._guess.is_on:
            return "deferred"
        self.settle()
        if self._guess.was_right(clip_coefficient, group_of):
            self._guess.stop()
            self._held.forget(self._queue.chunks)
            for chunk in self._queue.chunks:
                self._missed.catch_up(chunk)
            return "accepted"
        self.undo_guesses()
        return "redone"

    def apply_held(self, clip_coefficient: float, group_of: GroupOf, of_others: Collection[ParamSlice] = ()) -> None:
        """What is held, scaled, in forward order: the first blocks are needed first by the next forward. The step is
        over then, also for parameters that other ranks update."""
        for gradient in self._held.take_all():
            if not self._are_held and self.can_undo is False:
                gradient.refuse_not_finite()
            self._queue.update(gradient, group_of, clip_coefficient=clip_coefficient, may_borrow=True)
        self._end_step({*of_others, *self._missing})

    def abandon_step(self) -> None:
        """Forget all of the step, and undo its updates if the store can; `abandoned` tells what was done."""
        updated = {chunk.block for chunk in self._queue.chunks}
        if updated and self.can_undo:
            self._undo()
        self._held.forget(self._held.chunks)
        self._missed.abandon()
        if self._queue.chunks:  # what stays updated takes the rest of its block with it
            rest = {chunk for block in updated for chunk in self._missed.chunks(block)} - self._queue.chunks
            for chunk in rest:
                if self._missed.is_behind(chunk):
                    self._queue.update(ChunkGradient.of_nothing(chunk), self._group_of)
        touched, remains = self.abandoned
        self.abandoned = touched | updated, remains or bool(self._queue.chunks)
        self._end_step()
        self.settle()
        self._handover.call_off()

    def _end_step(self, of_others: Collection[ParamSlice] = ()) -> None:
        self._queue.end_step(of_others)
        self._guess.end_step()
        self._missed.end_step()
        self._missing = set()
        self.can_undo = None


class SpeculativeBlocks:
    """The blocks that the step in progress updates on a guess, from when that is ordered of the worker's thread.
    Whoever sees a block here, on whatever thread, has the guess undone by an order that comes behind that one."""

    def __init__(self, thread: WorkThread) -> None:
        self.are_wanted = False
        """Whether the steps from the next one on are to guess, if they can."""
        self._thread = thread
        self._blocks: set[Block] = set()
        self._lock = Lock()

    def want(self, are_wanted: bool) -> None:
        self.are_wanted = are_wanted

    def __contains__(self, block: Block) -> bool:
        return block in self._blocks

    def order(self, block: Block, command: Command) -> None:
        """Have the thread run `command`, which may guess about the block."""
        with self._lock:
            self._blocks.add(block)
            self._thread.submit(command)

    def undo(self, command: Command) -> set[Block]:
        """If there are any, have the thread run `command`, which undoes them all, and wait for it. Returns them. The
        step does not guess again."""
        with self._lock:
            blocks = set(self._blocks)
            if not blocks:
                return blocks
            self.are_wanted = False
            self._thread.submit(command)
        self._thread.barrier()
        with self._lock:  # not before: whoever else reads these blocks has to wait as well
            self._blocks -= blocks
        return blocks

    def forget(self) -> None:
        """They are no guesses any more."""
        with self._lock:
            self._blocks = set()


class Guess:
    """What a step guesses: that the norm does not clip, and that the hyperparameters stay as they are. Decided with the
    step's first gradient that could be updated, for all of it. Used by the worker's thread."""

    def __init__(self, group_of: GroupOf) -> None:
        self._present_group_of = group_of
        self._groups: dict[ParamSlice, Hashable] = {}
        self._is_on: bool | None = None

    @property
    def is_on(self) -> bool:
        """Whether what the step has updated are guesses."""
        return self._is_on is True

    def decide(self, is_wanted: bool) -> bool:
        """Whether the step guesses: as it does already, or, if that is open, as is wanted."""
        if self._is_on is None:
            self._is_on = is_wanted
        return self._is_on

    def group_of(self, part: ParamSlice) -> Hashable:
        """The present hyperparameters, noted as those that were guessed."""
        return self._groups.setdefault(part, self._present_group_of(part))

    def was_right(self, clip_coefficient: float, group_of: GroupOf) -> bool:
        """Whether the step is to be applied as it was guessed."""
        return clip_coefficient == 1.0 and all(group_of(part) == group for part, group in self._groups.items())

    def stop(self) -> None:
        """The rest of the step is no guess any more."""
        self._is_on = False

    def end_step(self) -> None:
        self._groups.clear()
        self._is_on = None


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
        loan: BorrowedSlot | None = None,
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
