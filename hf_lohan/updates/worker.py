"""The worker, whose thread holds a step's gradients, applies them at once, or applies them on a guess. In its queue of
updates, the reads, updates and writes of successive chunks overlap.

A step may guess that the norm does not clip (speculate). Its updates then run in backward, into a draft, and are undone
and repeated if the norm clips. `Guess` is the guess of one step. `SpeculativeBlocks` keeps readers from seeing a guess.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Literal

from hf_lohan.costs.parking import spread_share
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
"""How a step was applied. Its updates ran in backward, or waited for the norm (deferred), or ran in backward on the
guess that the norm does not clip and the hyperparameters do not change. This guess was right (accepted) or wrong
(redone)."""


class UpdateWorker:
    """The methods run on one thread, in the order in which the pipeline submits them. Other threads may read public
    attributes."""

    def __init__(
        self,
        setup: UpdateSetup,
        norms: GradientNorms,
        handover: Handover,
        on_failure: Callable[[BaseException], None],
        exchange: GradientReduction | None = None,
    ) -> None:
        """`on_failure` is called on I/O threads. `exchange` averages a chunk's gradient over all ranks."""
        self.undone_s = 0.0
        """Seconds spent on updates that were undone."""
        self.abandoned: tuple[set[Block], bool] = (set(), False)
        """The blocks that were updated by steps abandoned after the last gradient arrived, and whether updates remain
        in them. Several steps are possible, because an interrupted caller calls `abandon_step` again."""
        self._setup = setup
        self._missed = setup.missed
        self._missing: set[ParamSlice] = set()
        """Parameters that take the step in progress at a later time."""
        self._handover = handover
        self._exchange = exchange
        self._held = HeldGradients(setup, norms)
        self._queue = UpdateQueue(setup, self._held, handover, on_failure)
        self._guess = Guess(setup.group_of)
        self._waiting: set[Chunk] = set()
        """Chunks of the step that are parked although gradients need not be held."""
        self.park(setup.parked_share)
        self.can_undo: bool | None = None
        """Whether the updates of the step's backward can be undone; None before the first update."""

    def close(self) -> None:
        """End the threads that update. Call this after the last update."""
        self._queue.updater.threads.close()

    def finish_pending(self) -> bool:
        """Finish the last update while no command waits. Returns False if no update was pending."""
        return self._queue.finish_pending()

    def wait_for_writes(self) -> None:
        """Wait until all updates are written. The caller may then change the store, so readers read everything from the
        store afterwards."""
        self._queue.wait_for_writes()
        self._handover.forget_written()

    def park(self, share: float) -> None:
        """Hold this share of the gradients for the next forward. Their updates then run like deferred updates."""
        parked = spread_share([chunk.numel for chunk in self._setup.chunks], share)
        self._parked = {chunk for chunk, is_parked in zip(self._setup.chunks, parked, strict=True) if is_parked}

    # Called in backward.

    def accept(self, arrived: ArrivedChunk, *, is_final: bool, may_guess: bool, borrowed: BorrowedSlot | None) -> None:
        """Hold or apply an arrived chunk. `is_final`: no later backward of this step adds to it. `may_guess`: apply it
        on a guess if the step guesses or may guess."""
        self.abandoned = (set(), False)
        is_waiting = arrived.chunk in self._waiting
        if is_waiting or arrived.chunk in self._queue.chunks:  # the chunk has already been updated, or will be
            if not self._setup.holds_gradients:
                waiting = self._held.slices_of(arrived.chunk) if is_waiting else set()
                self._queue.refuse_second(arrived, waiting)
            self.undo_guesses()
        is_shared = self._exchange is not None and self._exchange.is_shared(arrived.chunk)
        gradient = self._held.add_arrived(arrived, may_stay_coded=is_final and is_shared)
        if self._exchange is not None and not is_shared:
            gradient.measure_again()
        if not is_final:
            self._held.hold(gradient)
            give_back(borrowed)
        elif self._exchange is None or not is_shared:
            self._apply_or_hold(gradient, may_guess=may_guess, borrowed=borrowed)
        else:
            apply = partial(self._apply_or_hold, may_guess=may_guess, borrowed=borrowed)
            self._exchange.publish_gradient(gradient, apply, partial(give_back, borrowed))

    def apply_unexpected(self, gradient: ChunkGradient) -> None:
        """Hold or apply an averaged gradient to which this rank contributed nothing."""
        self._apply_or_hold(gradient, may_guess=False, borrowed=None)

    def _apply_or_hold(self, gradient: ChunkGradient, *, may_guess: bool, borrowed: BorrowedSlot | None) -> None:
        """Hold or apply a gradient that is complete on all ranks."""
        try:
            self._held.measure(gradient)
            is_parked = gradient.chunk in self._parked
            if not self._setup.holds_gradients:
                if not self._begin_updates():
                    gradient.refuse_not_finite()
                if is_parked and self._held.hold_in_shared_ram(gradient):
                    self._waiting.add(gradient.chunk)
                    return
                self._waiting.discard(gradient.chunk)
                self._handover.announce([gradient.chunk])
                self._queue.update(gradient, self._setup.group_of, borrowed=borrowed)
            elif not is_parked and self._guess.decide(may_guess and self._begin_updates()):
                self._queue.update(gradient, self._guess.group_of, borrowed=borrowed, is_guess=True)
            else:
                self._held.hold(gradient, is_final=True)
        finally:
            give_back(borrowed)

    def _begin_updates(self) -> bool:
        """Prepare the store before each update in backward. Returns whether the step can be undone, which needs a store
        with drafts, and no drafts of an earlier step."""
        if self.can_undo is None:
            self.can_undo = self._setup.store.num_homes > 1 and not self._setup.store.has_drafts
        return self.can_undo

    def measure_rest(self) -> None:
        """Measure all arrived gradients that are not measured."""
        self._held.measure_rest()

    def publish_rest(self) -> None:
        """Publish to other ranks the gradients that no final backward announced."""
        assert self._exchange is not None
        for chunk in filter(self._exchange.is_awaited, self._held.chunks):
            gradient = self._held.pop_gradient(chunk)
            self._exchange.publish_gradient(gradient, self.apply_unexpected, lambda: None)

    def publish_held(self, chunk: Chunk, buffer: Buffer) -> None:
        """Publish a gradient of earlier backwards, to which the last backward adds nothing. The gradient is moved to
        `buffer` if other ranks cannot read its current buffer."""
        assert self._exchange is not None
        gradient = self._held.pop_into(chunk, buffer)
        self._exchange.publish_gradient(gradient, self.apply_unexpected, lambda: None)

    def exclude(self, chunks: Collection[Chunk]) -> None:
        """Tell other ranks that this rank has no gradient of these chunks in the step."""
        assert self._exchange is not None
        self.abandoned = (set(), False)
        self._exchange.exclude(chunks)

    def undo_guesses(self) -> None:
        """Undo the step's updates on a guess, and hold the rest of its gradients."""
        if self._guess.is_on:
            self._undo()
            self._guess.stop()

    def _undo(self) -> None:
        """Return the store to the last commit. Held gradients stay."""
        self.wait_for_writes()
        self.undone_s += self._queue.forget_updates()
        self._setup.store.drop_drafts()
        self._missed.undo()

    # Called at the end of a step.

    def decide_step(self, clip_coefficient: float, group_of: GroupOf, of_zeros: Iterable[Chunk] = ()) -> Applied:
        """Decide how the step is applied. `apply_held` must follow. Readers of a block now wait for the update with its
        held gradients. `of_zeros`: chunks without a gradient in this step, which are updated with zeros."""
        applied = self._judge(clip_coefficient, group_of)
        others = self._held.chunks | self._queue.chunks
        eager, late, self._missing = self._missed.decide_step(of_zeros, others, group_of, self._setup.step_counts)
        self._queue.wait_for_writes_of(self._missed.added)  # readers of these blocks read all records afterwards
        for chunk in eager:
            self._held.hold(ChunkGradient.of_zeros(chunk))
        for chunk in late:
            self._held.hold(ChunkGradient.of_nothing(chunk))
        if self._setup.schedule == "optimized":
            self._handover.announce(self._held.chunks)
        return applied

    def _judge(self, clip_coefficient: float, group_of: GroupOf) -> Applied:
        """Accept or undo guesses. `apply_held` applies the gradients that are then still held. After a right guess,
        these are parked gradients, and gradients to which the last backward added nothing."""
        if not self._setup.holds_gradients:
            self._queue.finish_pending()  # must precede a scheduler's change of hyperparameters
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
        Then end the step, including the parameters `of_others`, which other ranks update."""
        self._waiting.clear()
        for gradient in self._held.pop_all():
            self._queue.update(gradient, group_of, clip_coefficient=clip_coefficient, may_borrow=True)
        self._end_step({*of_others, *self._missing})

    def abandon_step(self) -> None:
        """Forget the whole step, and undo its updates if the store can. `abandoned` has the result."""
        updated = {chunk.block for chunk in self._queue.chunks}
        if updated and self.can_undo:
            self._undo()
        self._held.forget_gradients(self._held.chunks)
        self._waiting.clear()
        self._missed.abandon_step()
        if self._queue.chunks:  # these updates stay, so the rest of their blocks must catch up
            rest = {chunk for block in updated for chunk in self._missed.chunks(block)} - self._queue.chunks
            for chunk in rest:
                if self._missed.is_behind(chunk):
                    self._queue.update(ChunkGradient.of_nothing(chunk), self._setup.group_of)
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
    """A step's guess that the norm does not clip and the hyperparameters do not change. The first gradient that can be
    applied fixes the guess for the whole step. Used by the worker's thread."""

    def __init__(self, group_of: GroupOf) -> None:
        self._present_group_of = group_of
        self._groups: dict[ParamSlice, Hashable] = {}
        self._is_on: bool | None = None

    @property
    def is_on(self) -> bool:
        """Whether the step guesses."""
        return self._is_on is True

    def decide(self, is_wanted: bool) -> bool:
        """Decide whether the step guesses, unless it is already decided, and return the decision."""
        if self._is_on is None:
            self._is_on = is_wanted
        return self._is_on

    def group_of(self, part: ParamSlice) -> Hashable:
        """Return a parameter's current hyperparameters, and record them as guessed."""
        return self._groups.setdefault(part, self._present_group_of(part))

    def was_right(self, clip_coefficient: float, group_of: GroupOf) -> bool:
        """Return whether the step can be applied as it was guessed."""
        return clip_coefficient == 1.0 and all(group_of(part) == group for part, group in self._groups.items())

    def stop(self) -> None:
        """End guessing for the rest of the step."""
        self._is_on = False

    def end_step(self) -> None:
        self._groups.clear()
        self._is_on = None


class SpeculativeBlocks:
    """The blocks that the step in progress updates on a guess. A block is added when its update is submitted to the
    worker's thread. A thread that finds its block here submits a command that undoes the guess."""

    def __init__(self, thread: WorkThread) -> None:
        self.are_wanted = False
        """Whether later steps guess, if they can."""
        self._thread = thread
        self._blocks: set[Block] = set()
        self._lock = Lock()

    def __contains__(self, block: Block) -> bool:
        return block in self._blocks

    def order_guess(self, block: Block, command: Command) -> None:
        """Submit `command`, which may update the block on a guess."""
        with self._lock:
            self._blocks.add(block)
            self._thread.submit(command)

    def undo_guesses(self, command: Command) -> set[Block]:
        """If guesses exist, submit `command`, which undoes all of them, and wait for it. Returns their blocks. The step
        does not guess again."""
        with self._lock:
            blocks = set(self._blocks)
            if not blocks:
                return blocks
            self.are_wanted = False
            self._thread.submit(command)
        self._thread.barrier()
        with self._lock:  # only now, because other readers of these blocks must wait too
            self._blocks -= blocks
        return blocks

    def forget_guesses(self) -> None:
        """Forget the guesses after the step is decided."""
        with self._lock:
            self._blocks = set()


class UpdateQueue:
    """Applies gradients, and knows which chunks the step in progress has updated. Used by one thread. Schedules (LoHan,
    Fig. 3): `optimized` issues the reads of chunk j+1 before it updates chunk j and issues the writes of chunk j, so
    SSD and CPU are both busy. With borrowed buffers it reads further ahead. `naive` reads, updates and writes one chunk
    after another. `serial` does the same, but only after backward."""

    def __init__(
        self, setup: UpdateSetup, held: HeldGradients, handover: Handover, on_failure: Callable[[BaseException], None]
    ) -> None:
        """`held`: brings spilled gradients back, and holds the gradients of guesses."""
        self._setup = setup
        self.updater = ChunkUpdater(setup, handover, on_failure)
        self._held = held
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
        """Apply a chunk's gradient, scaled. `borrowed`: the slot with the block's weights of the backward. `is_guess`:
        hold the gradient again, and give the result to no reader. `may_borrow`: the step's backward is over, so buffers
        of applied gradients may be used to read further ahead and to wait for writes."""
        self.chunks.add(gradient.chunk)
        self._pieces.update(piece for piece in gradient.chunk.pieces if piece.param_slice in gradient.slices)
        with self._timed():
            buffers = self._make_room(gradient, may_borrow)
            with self._timeline.task(UPDATES_WAIT, "spilled gradients", block=gradient.chunk.block.name):
                reads = self._held.bring_back(gradient)
            self._wait_for_writes_of(gradient.chunk)
            update = self.updater.begin_update(gradient, reads, borrowed=borrowed, is_guess=is_guess, buffers=buffers)
            if not may_borrow:
                self._finish_all()
            self._pending.append((update, group_of, clip_coefficient))
            if self._setup.schedule != "optimized":
                self._finish_all()
                self._wait_for_all_writes()

    def _make_room(self, gradient: ChunkGradient, may_borrow: bool) -> list[Buffer] | None:
        """Return buffers for one more update if they are free now. None means that the caller may wait for buffers,
        because the pool has enough for two updates at a time. More updates need borrowed buffers. Without these the
        first update is finished."""
        while len(self._pending) > 1:
            can_begin = may_borrow and self._held.can_bring_back(gradient)
            buffers = self.updater.borrowed_buffers(gradient.chunk) if can_begin else None
            if buffers is not None:
                return buffers
            self._finish_first()
        chunk = gradient.chunk
        return self.updater.free_buffers(chunk) or (self.updater.borrowed_buffers(chunk) if may_borrow else None)

    def finish_pending(self) -> bool:
        """Finish updates whose reads are issued. Returns False if there were none."""
        had_one = bool(self._pending)
        with self._timed():
            self._finish_all()
        return had_one

    def wait_for_writes_of(self, blocks: Set[Block]) -> None:
        """Wait until the updates of these blocks are written, so that later reads find them."""
        for chunk, write in self._writes:
            if chunk.block in blocks:
                write.wait()

    def wait_for_writes(self) -> None:
        """Finish all updates and wait until they are written."""
        with self._timed():
            self._finish_all()
            self._wait_for_all_writes()

    def refuse_second(self, arrived: ArrivedChunk, waiting: Collection[ParamSlice]) -> None:
        """Raise RuntimeError if a gradient arrived for a parameter that has already been updated in this step, or whose
        update is ``waiting``."""
        for piece in arrived.pieces:
            if piece in self._pieces or piece.param_slice in waiting:
                raise RuntimeError(
                    f"a second gradient of {piece.param_slice.name} arrived after the first had been applied, because "
                    "backward runs more than once per step; set max_grad_norm > 0 or announce the accumulation"
                )

    def forget_updates(self) -> float:
        """Forget the step's updates after they were undone. Returns the seconds that they had taken."""
        self._pieces.clear()
        self.chunks.clear()
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    def end_step(self, of_others: Collection[ParamSlice] = ()) -> None:
        """Count one more step for parameters that this rank or another rank updates."""
        self.finish_pending()
        for part in {piece.param_slice for piece in self._pieces} | set(of_others):
            self._setup.step_counts[part] += 1
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
        writes = self.updater.finish_update(update, group_of, clip_coefficient)
        self._writes.extend((update.gradient.chunk, write) for write in writes)
        if update.is_guess:
            self._held.hold(update.gradient, is_final=True)
        while self._writes and self._writes[0][1].done():
            self._writes.popleft()[1].wait()

    def _wait_for_writes_of(self, chunk: Chunk) -> None:
        """Wait until the chunk's last update is written, because reads overtake writes and would find older records."""
        for written, write in self._writes:
            if written is chunk:
                with self._timeline.task(UPDATES_WAIT, "writes", block=chunk.block.name):
                    write.wait()

    def _wait_for_all_writes(self) -> None:
        with self._timeline.task(UPDATES_WAIT, "writes"):
            while self._writes:
                self._writes.popleft()[1].wait()
