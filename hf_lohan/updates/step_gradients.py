"""The gradients of the step in progress: summed and held, applied at once, or applied on a guess."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from hf_lohan.model import Block
from hf_lohan.updates.blocks_in_update import BlocksInUpdate
from hf_lohan.updates.gradient_arrival import ArrivedChunk
from hf_lohan.updates.gradient_home import GradientHome
from hf_lohan.updates.gradient_norms import GradientNorms
from hf_lohan.updates.held_gradients import HeldGradients
from hf_lohan.updates.param_groups import GroupOf
from hf_lohan.updates.speculation import Speculation
from hf_lohan.updates.state_update import Drafts, StateUpdater
from hf_lohan.updates.update_pipeline import Schedule, UpdatePipeline

Outcome = Literal["in_backward", "deferred", "accepted", "redone"]
"""How a step was applied: its updates ran in backward; waited for the norm; ran in backward on the guess that the norm
does not clip and that the hyperparameters stay, which was right; or wrong."""


class StepGradients:
    """What becomes of a step's gradients, chunk by chunk. Its methods run on one thread, the pipeline's; others read
    what is public."""

    def __init__(
        self,
        updater: StateUpdater,
        home: GradientHome,
        block_order: Iterable[Block],
        group_of: GroupOf,
        norms: GradientNorms,
        applying: BlocksInUpdate,
        *,
        schedule: Schedule,
        are_held: bool,
        drafts: Drafts | None,
        failed: Callable[[BaseException], None],
    ) -> None:
        """`are_held`: until the norm is known, unless it is guessed; `applying`: for those who read blocks meanwhile;
        `failed`: called on I/O threads."""
        self.last_update_s = 0.0
        """How long the last step's updates took."""
        self.undone_s = 0.0
        """How long all updates took that were undone."""
        self.dropped: tuple[set[Block], bool] = (set(), False)
        """The blocks that dropped steps had updated, and whether updates remain in them; for who waited for `drop`, and
        forgets it then."""
        self._group_of = group_of
        self._are_held = are_held
        self._is_lazy = schedule == "optimized"
        self._speculation = Speculation(group_of, drafts)
        self._held = HeldGradients(home, norms, block_order)
        self._applying = applying
        self._updates = UpdatePipeline(
            updater,
            home,
            schedule,
            hand_over=applying.hand_over,
            written=applying.discard,
            failed=failed,
            kept=self._held.hold,
        )

    @property
    def can_undo(self) -> bool | None:
        """Whether the updates of the step's backward can be undone; None before the first."""
        return self._speculation.can_undo

    def work_off(self) -> bool:
        """Nothing to read ahead for: do not leave the last chunk lying. Says whether there was one."""
        return self._updates.finish_pending()

    def settle(self) -> None:
        """Wait until all is written. Who waits for the store may be about to change it: from here on it has what was
        in RAM."""
        self._updates.settle()
        self._applying.forget_unwritten()

    # In backward.

    def accept(self, arrived: ArrivedChunk, *, is_final: bool, speculate: bool) -> None:
        """Hold or apply what has arrived of a chunk. `is_final`: no later backward of this step adds to it;
        `speculate`: apply it on a guess, if the step does or may."""
        try:
            self._apply_or_hold(arrived, is_final, speculate)
        finally:
            if arrived.loan is not None:
                arrived.loan.give_back()

    def _apply_or_hold(self, arrived: ArrivedChunk, is_final: bool, speculate: bool) -> None:
        if arrived.chunk in self._updates.chunks:
            self._take_back(arrived)
        gradient = self._held.add(arrived)
        if not is_final:
            self._held.hold(gradient)
            return
        self._held.measure(gradient)
        if not self._are_held:
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
        if self._are_held:
            self.stop_speculating()
        else:
            self._updates.refuse_second(arrived)

    def measure_rest(self) -> None:
        """From here on the norms of all that has arrived are known."""
        self._held.measure_rest()

    def stop_speculating(self) -> None:
        """Undo what the step has updated on a guess, and hold the rest of its gradients."""
        if self._speculation.is_on:
            self._undo()
            self._speculation.stop()

    def _undo(self) -> None:
        """Back to the last commit. Gradients that were kept stay."""
        self.settle()
        self.undone_s += self._updates.forget()
        self._speculation.undo()

    # At the step's end.

    def decide(self, clip_coefficient: float, group_of: GroupOf) -> Outcome:
        """What becomes of the step: `apply_held` is still to come. From here on, whoever reads a block waits for what
        is held of it."""
        outcome = self._judge(clip_coefficient, group_of)
        if self._is_lazy:
            self._applying.add(self._held.chunks)
        return outcome

    def _judge(self, clip_coefficient: float, group_of: GroupOf) -> Outcome:
        """Accept or undo guesses. What is still held then is to be applied: with a right guess, those gradients that
        got none in the last backward."""
        if not self._are_held:
            self._updates.finish_pending()  # before a scheduler changes the hyperparameters that it is to have
        if not self._speculation.is_on:
            return "deferred" if self._are_held else "in_backward"
        self._speculation.stop()
        self.settle()
        if self._speculation.was_right(clip_coefficient, group_of):
            self._held.forget(self._updates.chunks)
            return "accepted"
        self._undo()
        return "redone"

    def apply_held(self, clip_coefficient: float, group_of: GroupOf) -> None:
        """What is held, scaled, in forward order: the first blocks are needed first by the next forward. The step is
        over then."""
        for gradient in self._held.take_all():
            if not self._are_held and self._speculation.can_undo is False:
                gradient.refuse_not_finite()
            self._updates.update(gradient, group_of, clip_coefficient=clip_coefficient, may_borrow=True)
        self.last_update_s = self._updates.end_step()
        self._speculation.end_step()

    def drop(self) -> None:
        """Forget all of the step, and undo its updates if the store can; `dropped` tells what was done."""
        updated = {chunk.block for chunk in self._updates.chunks}
        if updated and self._speculation.can_undo:
            self._undo()
        self._held.forget(self._held.chunks)
        touched, remains = self.dropped
        self.dropped = touched | updated, remains or bool(self._updates.chunks)
        self._updates.end_step()
        self.settle()
        self._applying.clear()
        self._speculation.end_step()
