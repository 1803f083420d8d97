"""Gradients in, updated records out, chunk by chunk, while backward goes on (LoHan's active gradient offloading)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from torch import Tensor

from hf_lohan.blocks import Block, Chunk
from hf_lohan.device import BufferPool, Device, WorkThread
from hf_lohan.updates.blocks_in_update import BlocksInUpdate, Delivery
from hf_lohan.updates.gradient_arrival import ArrivedChunk
from hf_lohan.updates.gradient_home import GradientHome
from hf_lohan.updates.gradient_norms import GradientNorms
from hf_lohan.updates.guessed_blocks import GuessedBlocks
from hf_lohan.updates.held_gradients import HeldGradients
from hf_lohan.updates.param_groups import GroupOf
from hf_lohan.updates.renewal import Renewal, Renewals
from hf_lohan.updates.speculation import Speculation
from hf_lohan.updates.state_update import Drafts, StateUpdater
from hf_lohan.updates.update_pipeline import Schedule, UpdatePipeline

Outcome = Literal["in_backward", "deferred", "accepted", "redone"]
"""How a step was applied: its updates ran in backward; waited for the norm; ran in backward on the guess that the norm
does not clip and that the hyperparameters stay, which was right; or wrong."""


class FinishedStep(NamedTuple):
    """How a step was applied."""

    changed: set[Block]
    """Whose records are others than before, or will be."""
    renewed: set[Block]
    """Those of them whose slots keep them, and get their new weights."""
    outcome: Outcome


class GradientPipeline:
    """A thread that sums, holds and applies gradients.

    A step updates in backward where nothing has to be known first. Where the norm decides about clipping, gradients are
    held; updates are then deferred until the norm is known, or speculate: they run in backward, into a draft, and are
    dropped and done over from the held gradients if the norm clips. Without drafts to drop, nothing speculates. Nobody
    ever reads a guess: whoever needs a block that holds one (a second backward, an evaluation) has all undone first.
    """

    def __init__(
        self,
        updater: StateUpdater,
        home: GradientHome,
        block_order: Iterable[Block],
        group_of: GroupOf,
        norms: GradientNorms,
        arrival_pool: BufferPool,
        *,
        device: Device,
        schedule: Schedule,
        hold_gradients: bool,
        drafts: Drafts | None = None,
        renew: Callable[[Block], Renewal | None] = lambda _block: None,
    ) -> None:
        """`renew`: see `Renewals`; called on this pipeline's thread."""
        self.holds_gradients = hold_gradients
        self.last_update_s = 0.0
        """How long the last step's updates took."""
        self.undone_s = 0.0
        """How long all updates took that were undone."""
        self._can_speculate = (
            hold_gradients and schedule != "serial" and drafts is not None and drafts.num_homes > 1
        )
        self._schedule = schedule
        self._group_of = group_of
        self._arrival_pool = arrival_pool
        self._speculation = Speculation(group_of, drafts)
        self._held = HeldGradients(home, norms, block_order)
        self._applying = BlocksInUpdate(device)
        self._renewals = Renewals(device, self._applying, renew)
        self._announced: set[Chunk] = set()
        self._touched_by_dropped: set[Block] = set()
        self._dropped_remains = False
        self._thread = WorkThread("lohan-gradients", idle=self._work_off, failed=self._on_failure)
        self._guesses = GuessedBlocks(self._thread)
        self._updates = UpdatePipeline(
            updater,
            home,
            schedule,
            hand_over=self._applying.hand_over,
            written=self._applying.discard,
            failed=self._thread.fail,
            kept=self._held.hold,
        )
        self._thread.start()

    # The other threads' side: the compute thread's, but for `deliver` and `stop_speculating`.

    def submit(self, arrived: ArrivedChunk, *, is_final: bool) -> None:
        """Take over an arrived chunk. `is_final`: no later backward of this step adds to it."""
        self._announced.add(arrived.chunk)
        speculate = is_final and self._guesses.are_wanted and self._can_speculate
        if speculate:
            self._guesses.order(arrived.chunk.block, lambda: self._accept(arrived, is_final, speculate))
        else:
            self._thread.put(lambda: self._accept(arrived, is_final, speculate))

    def measure(self) -> None:
        """Wait until the norms of all gradients of the step so far are known."""
        self._thread.call(self._held.measure_rest)

    def finish_step(self, clip_coefficient: float, group_of: GroupOf) -> FinishedStep:
        """Apply the step's gradients, scaled by `clip_coefficient`.

        Under the optimized schedule nobody waits for updates but those who read their block (`deliver`): held gradients
        are applied while the next forward runs, block by block in its order. `group_of` must give the hyperparameters
        of this step also then. Call `measure` before.
        """
        outcome, renewed = self._thread.call(lambda: self._decide(clip_coefficient, group_of))
        self._guesses.forget()
        self._thread.put(lambda: self._apply_held(clip_coefficient, group_of))
        # Only now: if an interrupt ends this method before, `drop` still finds what there is to drop.
        chunks, self._announced = self._announced, set()
        if self._schedule != "optimized":
            self.settle()
        return FinishedStep({chunk.block for chunk in chunks}, renewed, outcome)

    def settle(self) -> None:
        """Wait until every update of the finished steps is in the store, and no guess about the one in progress."""
        self.stop_speculating()
        self._thread.call(self._settle)

    def when_written(self, action: Callable[[], None]) -> None:
        """Run `action` on the pipeline's thread when all is as after `settle`, without waiting. Its failure is the
        pipeline's: whoever waits next is told. Raises RuntimeError where a step in progress has changed the store."""
        if self.has_begun_updates:
            raise RuntimeError(
                "the step in progress has updated blocks in backward, so the store is of no step; finish it with "
                "step(), or drop it with zero_grad(), before committing"
            )
        self.stop_speculating()
        self._thread.put(self._settle)
        self._thread.put(action)

    def deliver(self, block: Block, weights: Tensor) -> Delivery:
        """Wait until the block's parameters can be read as the last finished step leaves them, except for those that
        come from its updates: they are put into `weights` [block.numel], which is on the device."""
        if block in self._guesses:
            self.stop_speculating()
        return self._applying.order(block, weights)

    @property
    def speculates(self) -> bool:
        """Whether the steps from the next one on are to speculate, if they can."""
        return self._guesses.are_wanted

    @speculates.setter
    def speculates(self, is_wanted: bool) -> None:
        self._guesses.are_wanted = is_wanted

    @property
    def failure(self) -> BaseException | None:
        """What broke the pipeline."""
        return self._thread.failure

    @property
    def has_begun_updates(self) -> bool:
        """Whether backward has updated blocks in a step that is not finished."""
        return bool(self._announced) and not self.holds_gradients

    @property
    def is_past_undoing(self) -> bool:
        """Whether the step in progress has updated blocks for good. Call `measure` before."""
        return self.has_begun_updates and self._speculation.can_undo is False

    def stop_speculating(self) -> set[Block]:
        """Undo what the step in progress has updated on a guess: its weights are needed as they were. Returns the
        blocks whose records go back."""
        return self._guesses.undo(self._stop_speculating)

    def drop(self) -> tuple[set[Block], bool]:
        """Forget the step's gradients, and undo its updates if the store can. Returns the blocks whose records were
        touched, and whether updates remain in them."""
        if not self._announced:
            return set(), False  # and do not wait for the last step's updates
        self._thread.call(self._drop_held)
        self._guesses.forget()
        # Only now: if an interrupt ends this method before, it is called again, and finds nothing held any more.
        touched, remains = self._touched_by_dropped, self._dropped_remains
        self._announced, self._touched_by_dropped, self._dropped_remains = set(), set(), False
        return touched, remains

    def close(self) -> None:
        self._thread.close()

    # The pipeline thread's side.

    def _work_off(self) -> bool:
        """Nothing to read ahead for: do not leave the last chunk lying."""
        return self._updates.finish_pending()

    def _on_failure(self, error: BaseException) -> None:
        """The step cannot be finished: whoever waits for a buffer or a block is told."""
        self._arrival_pool.abort(error)
        self._applying.abort(error)

    def _settle(self) -> None:
        """Who waits for the store may be about to change it: from here on it has what was in RAM."""
        self._updates.settle()
        self._applying.forget_unwritten()

    def _accept(self, arrived: ArrivedChunk, is_final: bool, speculate: bool) -> None:
        try:
            self._apply_or_hold(arrived, is_final, speculate)
        finally:
            if arrived.loan is not None:
                arrived.loan.give_back()

    def _apply_or_hold(self, arrived: ArrivedChunk, is_final: bool, speculate: bool) -> None:
        if arrived.chunk in self._updates.chunks:
            self._take_back(arrived)
        gradient = self._held.add(arrived, may_stay=is_final and not self.holds_gradients)
        if not is_final:
            self._held.hold(gradient)
            return
        self._held.measure(gradient)
        if not self.holds_gradients:
            if not self._speculation.begin_updates():
                gradient.refuse_not_finite()
            self._applying.add([gradient.chunk])
            self._updates.update(gradient, self._group_of, loan=arrived.loan)
        elif self._speculation.decide(is_wanted=speculate):
            self._updates.update(gradient, self._speculation.guess_group_of, loan=arrived.loan, keep_gradient=True)
        else:
            self._held.hold(gradient)

    def _take_back(self, arrived: ArrivedChunk) -> None:
        """More gradient arrives for a chunk that has been updated."""
        if self.holds_gradients:
            self._stop_speculating()
        else:
            self._updates.refuse_second(arrived)

    def _stop_speculating(self) -> None:
        if self._speculation.is_on:
            self._undo()
            self._speculation.stop()

    def _undo(self) -> None:
        """Back to the last commit. Gradients that were kept stay."""
        self._settle()
        self.undone_s += self._updates.forget()
        self._speculation.undo()

    def _decide(self, clip_coefficient: float, group_of: GroupOf) -> tuple[Outcome, set[Block]]:
        """What becomes of the step, and the blocks that are renewed."""
        outcome = self._judge(clip_coefficient, group_of)
        return outcome, self._foretell_held() if self._schedule == "optimized" else set()

    def _judge(self, clip_coefficient: float, group_of: GroupOf) -> Outcome:
        """Accept or undo guesses. What is still held then is to be applied: with a right guess, those gradients that
        got none in the last backward."""
        if not self.holds_gradients:
            self._updates.finish_pending()  # before a scheduler changes the hyperparameters that it is to have
        if not self._speculation.is_on:
            return "deferred" if self.holds_gradients else "in_backward"
        self._speculation.stop()
        self._settle()
        if self._speculation.was_right(clip_coefficient, group_of):
            self._held.forget(self._updates.chunks)
            return "accepted"
        self._undo()
        return "redone"

    def _foretell_held(self) -> set[Block]:
        """From here on, whoever reads a block waits for what is held of it. Returns the blocks that are renewed: what
        else a slot holds is out of date."""
        waiting = self._held.chunks
        self._applying.add(waiting)
        return self._renewals.begin(
            {chunk.block for chunk in waiting} - {chunk.block for chunk in self._updates.chunks}
        )

    def _apply_held(self, clip_coefficient: float, group_of: GroupOf) -> None:
        """In forward order: the first blocks are needed first by the next forward."""
        for gradient in self._held.take_all():
            if not self.holds_gradients and self._speculation.can_undo is False:
                gradient.refuse_not_finite()
            loan = self._renewals.loan_of(gradient.chunk.block)
            self._updates.update(gradient, group_of, clip_coefficient=clip_coefficient, loan=loan, may_borrow=True)
        self._renewals.end_step()
        self.last_update_s = self._updates.end_step()
        self._speculation.end_step()

    def _drop_held(self) -> None:
        """And note which blocks had been updated, and whether any remains so."""
        updated = {chunk.block for chunk in self._updates.chunks}
        if updated and self._speculation.can_undo:
            self._undo()
        self._held.forget(self._held.chunks)
        self._renewals.end_step()
        self._touched_by_dropped |= updated
        self._dropped_remains |= bool(self._updates.chunks)
        self._updates.end_step()
        self._settle()
        self._applying.clear()
        self._speculation.end_step()
