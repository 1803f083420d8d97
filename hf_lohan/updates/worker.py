"""What the worker's thread does with a step's gradients: hold them, apply them at once, or apply them on a guess."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Literal

from hf_lohan.model import Block, Chunk, ParamSlice
from hf_lohan.updates.chunk_gradient import ArrivedChunk, ChunkGradient
from hf_lohan.updates.handover import Handover
from hf_lohan.updates.held import HeldGradients
from hf_lohan.updates.loan import WeightLoan, give_back
from hf_lohan.updates.means import GradientMeans
from hf_lohan.updates.norms import GradientNorms
from hf_lohan.updates.queue import UpdateQueue
from hf_lohan.updates.setup import GroupOf, UpdateSetup
from hf_lohan.updates.speculation import Guess

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

    def accept(self, arrived: ArrivedChunk, *, is_final: bool, may_guess: bool, loan: WeightLoan | None) -> None:
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

    def _apply_or_hold(self, gradient: ChunkGradient, *, may_guess: bool, loan: WeightLoan | None) -> None:
        """The gradient is that of all ranks."""
        try:
            self._apply_or_hold_mean(gradient, may_guess, loan)
        finally:
            give_back(loan)

    def _apply_or_hold_mean(self, gradient: ChunkGradient, may_guess: bool, loan: WeightLoan | None) -> None:
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
        self._store.drop()
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
