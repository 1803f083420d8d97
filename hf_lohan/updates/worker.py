"""What the worker's thread does with a step's gradients: hold them, apply them at once, or apply them on a guess; and
the queue of updates, in which reads, updates and writes of successive chunks overlap.

A step may guess that the norm does not clip (speculate): its updates run in backward, into a draft, and are undone and
run again if the norm clips. `Guess` is what one step guesses, `SpeculativeBlocks` keeps readers from seeing a guess.
"""

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
from hf_lohan.updates.gradient_reduction import GradientReduction
from hf_lohan.updates.gradients import ArrivedChunk, ChunkGradient, GradientNorms, HeldGradients
from hf_lohan.updates.handover import BorrowedSlot, Handover, give_back
from hf_lohan.updates.missed_steps import GroupOf
from hf_lohan.updates.setup import UpdateSetup

Applied = Literal["in_backward", "deferred", "accepted", "redone"]
"""How a step was applied: its updates ran in backward; or waited for the norm; or ran in backward on the guess that the
norm does not clip and that the hyperparameters stay, which was right (accepted) or wrong (redone)."""


class UpdateWorker:
    """Its methods run on one thread, in the order in which the pipeline submits them. Other threads read what is
    public."""

    def __init__(
        self,
        setup: UpdateSetup,
        norms: GradientNorms,
        handover: Handover,
        on_failure: Callable[[BaseException], None],
        exchange: GradientReduction | None = None,
    ) -> None:
        """`on_failure` is called on I/O threads; `exchange` averages a chunk's gradient over all ranks."""
        self.undone_s = 0.0
        """Seconds spent on updates that were undone."""
        self.abandoned: tuple[set[Block], bool] = (set(), False)
        """The blocks updated by steps that were abandoned since the last gradient arrived, and whether updates remain
        in them. It may be several steps: a caller that was interrupted calls `abandon_step` again."""
        self._group_of = setup.group_of
        self._are_held = setup.holds_gradients
        self._is_optimized = setup.schedule == "optimized"
        self._store = setup.store
        self._missed = setup.missed
        self._step_counts = setup.step_counts
        self._missing: set[ParamSlice] = set()
        """Parameters that take the step in progress later."""
        self._handover = handover
        self._exchange = exchange
        self._held = HeldGradients(setup, norms)
        self._queue = UpdateQueue(setup, self._held, handover, on_failure)
        self._guess = Guess(setup.group_of)
        self.can_undo: bool | None = None
        """Whether the updates of the step's backward can be undone; None before the first."""

    def finish_pending(self) -> bool:
        """Finish the last update while no command waits. Returns whether there was one."""
        return self._queue.finish_pending()

    def wait_for_writes(self) -> None:
        """Wait until all updates are written. The caller may change the store next, so from here on readers get
        everything from it."""
        self._queue.wait_for_writes()
        self._handover.forget_written()

    # In backward.

    def accept(self, arrived: ArrivedChunk, *, is_final: bool, may_guess: bool, borrowed: BorrowedSlot | None) -> None:
        """Hold or apply an arrived chunk. `is_final`: no later backward of this step adds to it; `may_guess`: apply it
        on a guess, if the step does or may."""
        self.abandoned = (set(), False)
        if arrived.chunk in self._queue.chunks:  # a gradient of a chunk that has been updated
            if not self._are_held:
                self._queue.refuse_second(arrived)
            self.undo_guesses()
        gradient = self._held.add_arrived(arrived)
        if not is_final:
            self._held.hold(gradient)
            give_back(borrowed)
        elif self._exchange is None:
            self._apply_or_hold(gradient, may_guess=may_guess, borrowed=borrowed)
        else:
            apply = partial(self._apply_or_hold, may_guess=may_guess, borrowed=borrowed)
            self._exchange.publish_gradient(gradient, apply, partial(give_back, borrowed))

    def apply_unexpected(self, gradient: ChunkGradient) -> None:
        """Hold or apply an averaged gradient of which this rank has none."""
        self._apply_or_hold(gradient, may_guess=False, borrowed=None)

    def _apply_or_hold(self, gradient: ChunkGradient, *, may_guess: bool, borrowed: BorrowedSlot | None) -> None:
        """The gradient is complete, on all ranks."""
        try:
            self._held.measure(gradient)
            if not self._are_held:
                if not self._begin_updates():
                    gradient.refuse_not_finite()
                self._handover.announce([gradient.chunk])
                self._queue.update(gradient, self._group_of, borrowed=borrowed)
            elif self._guess.decide(may_guess and self._begin_updates()):
                self._queue.update(gradient, self._guess.group_of, borrowed=borrowed, is_guess=True)
            else:
                self._held.hold(gradient, is_final=True)
        finally:
            give_back(borrowed)

    def _begin_updates(self) -> bool:
        """Called before each update in backward. Returns whether the step can be undone: the store has drafts, and none
        from before."""
        if self.can_undo is None:
            self.can_undo = self._store.num_homes > 1 and not self._store.has_drafts
        return self.can_undo

    def measure_rest(self) -> None:
        """Measure all gradients that have arrived and are not measured."""
        self._held.measure_rest()

    def publish_rest(self) -> None:
        """Publish to other ranks the gradients that no final backward announced."""
        assert self._exchange is not None
        for chunk in self._held.chunks - self._exchange.published:
            gradient = self._held.pop_gradient(chunk)
            self._exchange.publish_gradient(gradient, self.apply_unexpected, lambda: None)

    def undo_guesses(self) -> None:
        """Undo what the step has updated on a guess, and hold the rest of its gradients."""
        if self._guess.is_on:
            self._undo()
            self._guess.stop()

    def _undo(self) -> None:
        """Back to the last commit. Gradients that were held again stay."""
        self.wait_for_writes()
        self.undone_s += self._queue.forget_updates()
        self._store.drop_drafts()
        self._missed.undo()

    # At the step's end.

    def decide_step(self, clip_coefficient: float, group_of: GroupOf, of_zeros: Iterable[Chunk] = ()) -> Applied:
        """Decide how the step is applied; `apply_held` must follow. From here on, readers of a block wait for the
        update of its held gradients. `of_zeros`: chunks without a gradient in this step, which are updated with
        zeros."""
        applied = self._judge(clip_coefficient, group_of)
        others = self._held.chunks | self._queue.chunks
        eager, late, self._missing = self._missed.decide_step(of_zeros, others, group_of, self._step_counts)
        self._queue.wait_for_writes_of(self._missed.added)  # from here on, readers of these blocks read all records
        for chunk in eager:
            self._held.hold(ChunkGradient.of_zeros(chunk))
        for chunk in late:
            self._held.hold(ChunkGradient.of_nothing(chunk))
        if self._is_optimized:
            self._handover.announce(self._held.chunks)
        return applied

    def _judge(self, clip_coefficient: float, group_of: GroupOf) -> Applied:
        """Accept or undo guesses. Gradients that are still held are to be applied. After a right guess, these are the
        ones without a contribution in the last backward."""
        if not self._are_held:
            self._queue.finish_pending()  # before a scheduler changes its hyperparameters
            return "in_backward"
        if not self._guess.is_on:
            return "deferred"
        self.wait_for_writes()
        if self._guess.was_right(clip_coefficient, group_of):
            self._guess.stop()
            self._held.forget_gradients(self._queue.chunks)
            for chunk in self._queue.chunks:
                self._missed.catch_up(chunk)
            return "accepted"
        self.undo_guesses()
        return "redone"

    def apply_held(self, clip_coefficient: float, group_of: GroupOf, of_others: Collection[ParamSlice] = ()) -> None:
        """Apply the held gradients, scaled, in forward order, because the next forward needs the first blocks first.
        Ends the step, also for parameters `of_others`, which other ranks update."""
        for gradient in self._held.pop_all():
            if not self._are_held and self.can_undo is False:
                gradient.refuse_not_finite()
            self._queue.update(gradient, group_of, clip_coefficient=clip_coefficient, may_borrow=True)
        self._end_step({*of_others, *self._missing})

    def abandon_step(self) -> None:
        """Forget the whole step, and undo its updates if the store can. `abandoned` says what was done."""
        updated = {chunk.block for chunk in self._queue.chunks}
        if updated and self.can_undo:
            self._undo()
        self._held.forget_gradients(self._held.chunks)
        self._missed.abandon_step()
        if self._queue.chunks:  # these updates stay, so the rest of their blocks catches up
            rest = {chunk for block in updated for chunk in self._missed.chunks(block)} - self._queue.chunks
            for chunk in rest:
                if self._missed.is_behind(chunk):
                    self._queue.update(ChunkGradient.of_nothing(chunk), self._group_of)
        touched, remains = self.abandoned
        self.abandoned = touched | updated, remains or bool(self._queue.chunks)
        self._end_step()
        self.wait_for_writes()
        self._handover.call_off()

    def _end_step(self, of_others: Collection[ParamSlice] = ()) -> None:
        self._queue.end_step(of_others)
        self._guess.end_step()
        self._missed.end_step()
        self._missing = set()
        self.can_undo = None


class Guess:
    """What a step guesses: that the norm does not clip, and that the hyperparameters stay as they are. Decided for the
    whole step with its first gradient that can be applied. Used by the worker's thread."""

    def __init__(self, group_of: GroupOf) -> None:
        self._present_group_of = group_of
        self._groups: dict[ParamSlice, Hashable] = {}
        self._is_on: bool | None = None

    @property
    def is_on(self) -> bool:
        """Whether the step's updates so far are guesses."""
        return self._is_on is True

    def decide(self, is_wanted: bool) -> bool:
        """Whether the step guesses: as decided before, or else as is wanted."""
        if self._is_on is None:
            self._is_on = is_wanted
        return self._is_on

    def group_of(self, part: ParamSlice) -> Hashable:
        """The present hyperparameters, noted as guessed."""
        return self._groups.setdefault(part, self._present_group_of(part))

    def was_right(self, clip_coefficient: float, group_of: GroupOf) -> bool:
        """Whether the step is to be applied as it was guessed."""
        return clip_coefficient == 1.0 and all(group_of(part) == group for part, group in self._groups.items())

    def stop(self) -> None:
        """The rest of the step is no guess."""
        self._is_on = False

    def end_step(self) -> None:
        self._groups.clear()
        self._is_on = None


class SpeculativeBlocks:
    """The blocks that the step in progress updates on a guess, from when that is ordered from the worker's thread. A
    thread that finds a block here has the guess undone by an order that follows that one."""

    def __init__(self, thread: WorkThread) -> None:
        self.are_wanted = False
        """Whether the steps from the next one on are to guess, if they can."""
        self._thread = thread
        self._blocks: set[Block] = set()
        self._lock = Lock()

    def want_guesses(self, are_wanted: bool) -> None:
        self.are_wanted = are_wanted

    def __contains__(self, block: Block) -> bool:
        return block in self._blocks

    def order_guess(self, block: Block, command: Command) -> None:
        """Have the thread run `command`, which may guess about the block."""
        with self._lock:
            self._blocks.add(block)
            self._thread.submit(command)

    def undo_guesses(self, command: Command) -> set[Block]:
        """If there are guesses, have the thread run `command`, which undoes them all, and wait for it. Returns their
        blocks. The step does not guess again."""
        with self._lock:
            blocks = set(self._blocks)
            if not blocks:
                return blocks
            self.are_wanted = False
            self._thread.submit(command)
        self._thread.barrier()
        with self._lock:  # not before: other readers of these blocks have to wait as well
            self._blocks -= blocks
        return blocks

    def forget_guesses(self) -> None:
        """The step was decided: they are no guesses any more."""
        with self._lock:
            self._blocks = set()


class UpdateQueue:
    """Applies gradients, and knows which chunks the present step has updated. Used by one thread.

    Schedules (LoHan, Fig. 3): `optimized` issues the reads of chunk j+1 before it updates chunk j and issues its
    writes, so SSD and CPU are both busy; with borrowed buffers it reads further ahead. `naive` reads, updates and
    writes one chunk after another. `serial` does the same, but only after backward.
    """

    def __init__(
        self, setup: UpdateSetup, held: HeldGradients, handover: Handover, on_failure: Callable[[BaseException], None]
    ) -> None:
        """`held`: where spilled gradients come back from, and where gradients of guesses are held again."""
        self._updater = ChunkUpdater(setup, handover, on_failure)
        self._held = held
        self._is_optimized = setup.schedule == "optimized"
        self._step_counts = setup.step_counts
        self._timeline = setup.device.timeline
        self._pending: deque[tuple[ChunkUpdate, GroupOf, float]] = deque()
        self._writes: deque[tuple[Chunk, IoRequest]] = deque()
        self._pieces: set[ChunkPiece] = set()
        self.chunks: set[Chunk] = set()
        """Chunks that the step has updated."""
        self._busy_s = 0.0

    def update(
        self,
        gradient: ChunkGradient,
        group_of: GroupOf,
        *,
        clip_coefficient: float = 1.0,
        borrowed: BorrowedSlot | None = None,
        is_guess: bool = False,
        may_borrow: bool = False,
    ) -> None:
        """Apply a chunk's gradient, scaled. `borrowed`: the slot with the block's weights as they were in backward;
        `is_guess`: the gradient is held again, and the result is handed to nobody; `may_borrow`: the step's backward is
        over, so buffers of applied gradients may serve to read further ahead, and to wait in for the drive."""
        self.chunks.add(gradient.chunk)
        self._pieces.update(piece for piece in gradient.chunk.pieces if piece.param_slice in gradient.slices)
        with self._timed():
            buffers = self._make_room(gradient, may_borrow)
            with self._timeline.task(UPDATES_WAIT, "spilled gradients", block=gradient.chunk.block.name):
                reads = self._held.bring_back(gradient)
            self._wait_for_writes_of(gradient.chunk)
            update = self._updater.begin_update(gradient, reads, borrowed=borrowed, is_guess=is_guess, buffers=buffers)
            if not may_borrow:
                self._finish_all()
            self._pending.append((update, group_of, clip_coefficient))
            if not self._is_optimized:
                self._finish_all()
                self._wait_for_all_writes()

    def _make_room(self, gradient: ChunkGradient, may_borrow: bool) -> list[Buffer] | None:
        """Buffers for one more update, if they are free now. The pool has enough for two updates at a time, so None
        means that waiting for them helps. Further updates need borrowed buffers; without these the first one is
        finished."""
        while len(self._pending) > 1:
            can_begin = may_borrow and self._held.can_bring_back(gradient)
            buffers = self._updater.borrowed_buffers(gradient.chunk) if can_begin else None
            if buffers is not None:
                return buffers
            self._finish_first()
        chunk = gradient.chunk
        return self._updater.free_buffers(chunk) or (self._updater.borrowed_buffers(chunk) if may_borrow else None)

    def finish_pending(self) -> bool:
        """Finish updates whose reads are issued. Returns whether there were any."""
        had_one = bool(self._pending)
        with self._timed():
            self._finish_all()
        return had_one

    def wait_for_writes_of(self, blocks: Set[Block]) -> None:
        """Wait until the updates of these blocks are written: from here on, reads find them."""
        for chunk, write in self._writes:
            if chunk.block in blocks:
                write.wait()

    def wait_for_writes(self) -> None:
        """Finish all updates and wait until they are written."""
        with self._timed():
            self._finish_all()
            self._wait_for_all_writes()

    def refuse_second(self, arrived: ArrivedChunk) -> None:
        """Raises RuntimeError if a gradient arrived for a parameter that has been updated in this step."""
        for piece in arrived.pieces:
            if piece in self._pieces:
                raise RuntimeError(
                    f"a second gradient of {piece.param_slice.name} arrived after the first had been applied; "
                    "backward runs more than once a step here, so set max_grad_norm > 0 or announce the accumulation"
                )

    def forget_updates(self) -> float:
        """The step's updates were undone. Returns how many seconds they had taken."""
        self._pieces.clear()
        self.chunks.clear()
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    def end_step(self, of_others: Collection[ParamSlice] = ()) -> None:
        """Count one more step for updated parameters, and for those that other ranks update."""
        self.finish_pending()
        for part in {piece.param_slice for piece in self._pieces} | set(of_others):
            self._step_counts[part] += 1
        self.forget_updates()

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
        writes = self._updater.finish_update(update, group_of, clip_coefficient)
        self._writes.extend((update.gradient.chunk, write) for write in writes)
        if update.is_guess:
            self._held.hold(update.gradient, is_final=True)
        while self._writes and self._writes[0][1].done():
            self._writes.popleft()[1].wait()

    def _wait_for_writes_of(self, chunk: Chunk) -> None:
        """Wait for the chunk's last update: reads overtake writes, and would find the records before that update."""
        for written, write in self._writes:
            if written is chunk:
                with self._timeline.task(UPDATES_WAIT, "writes", block=chunk.block.name):
                    write.wait()

    def _wait_for_all_writes(self) -> None:
        with self._timeline.task(UPDATES_WAIT, "writes"):
            while self._writes:
                self._writes.popleft()[1].wait()
