"""Gradients in, updated records out, chunk by chunk, while backward goes on (LoHan's active gradient offloading)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor

from hf_lohan.device import Event
from hf_lohan.model import Block, Chunk, ParamSlice
from hf_lohan.threads import FirstFailure, WorkThread
from hf_lohan.updates.gradient_reduction import GradientMeans
from hf_lohan.updates.gradients import ArrivedChunk, GradientNorms
from hf_lohan.updates.handover import BorrowedSlot, Delivery, Handover
from hf_lohan.updates.missed_steps import GroupOf
from hf_lohan.updates.setup import UpdateSetup
from hf_lohan.updates.worker import Applied, SpeculativeBlocks, UpdateWorker


class GradientPipeline:
    """What the computing thread talks to; what then happens stands in `UpdateWorker`, which has a thread of its own.
    `deliver` and `undo_guesses` may be called on any thread.

    A step updates in backward where nothing has to be known first. Where the norm decides about clipping, gradients are
    held. Updates are then deferred until the norm is known; or they run in backward on a guess, into a draft, and are
    dropped and done over from the held gradients if the norm clips. Without drafts to drop, nothing is guessed. Nobody
    ever reads a guess: whoever needs a block that holds one (a second backward, an evaluation) has all undone first.
    """

    def __init__(self, setup: UpdateSetup) -> None:
        self.holds_gradients = setup.holds_gradients
        self.norms = GradientNorms(setup.slices)
        """Of the step in progress; whoever sends gradients measures them, where there is one rank."""
        self._can_guess = setup.holds_gradients and setup.schedule != "serial" and setup.store.num_homes > 1
        self._agreement = setup.agreement
        self._is_agreed = False
        """Whether all ranks know the norms of the step in progress, and apply it."""
        self._waits_for_updates = setup.schedule != "optimized"
        self._has_groups = setup.has_groups
        self._announced: set[Chunk] = set()
        self._reached: dict[Chunk, None] = {}
        """What the step's backwards came by, whether or not it got a gradient."""
        self._block_of = {part: block for block in setup.blocks for part in block.slices}
        self._handover = handover = Handover(setup.copies_new_weights or setup.device)
        made: list[GradientMeans] = []

        def cannot_finish_step(error: BaseException) -> None:
            """Whoever waits for a buffer or a block is told, and the other ranks are. Another rank may fail before
            the means are made."""
            setup.gradients.abort(error)
            handover.abort(error)
            for means in made:
                means.fail(error)

        self._failure = FirstFailure(cannot_finish_step)
        self._thread = WorkThread("lohan-gradients", self._failure, beside_kernels=setup.device.shares_cores)
        self._means = setup.means(self._thread.submit, self._failure.record_error)
        made.append(self._means)
        self._worker = UpdateWorker(setup, self.norms, handover, self._failure.record_error, self._means)
        self._guesses = SpeculativeBlocks(self._thread)
        self._thread.start(idle=self._worker.work_off)

    # In backward.

    def submit(self, arrived: ArrivedChunk, *, is_final: bool, loan: BorrowedSlot | None = None) -> None:
        """Take over an arrived chunk. `is_final`: no later backward of this step adds to it; `loan`: of the block's
        weights, if the optimizer is to have them from the device."""
        self._announced.add(arrived.chunk)
        may_guess = is_final and self.speculates and self._can_guess
        accept = partial(self._worker.accept, arrived, is_final=is_final, may_guess=may_guess, loan=loan)
        if may_guess:
            self._guesses.order(arrived.chunk.block, accept)
        else:
            self._thread.submit(accept)

    def reach(self, chunks: Iterable[Chunk]) -> None:
        """A backward has come by these. What of them gets no gradient in the whole step, as that of an expert that no
        token went to, has a gradient of zeros, and takes its step. Not with several ranks."""
        assert not self._means.are_of_many, "other ranks may have a gradient of it"
        self._reached.update(dict.fromkeys(chunks))

    @property
    def while_waiting(self) -> Callable[[float], object] | None:
        """See `GradientMeans`."""
        return self._means.while_waiting

    @property
    def has_gradients(self) -> bool:
        """Whether any of the step in progress have come."""
        return bool(self._announced)

    @property
    def has_begun_updates(self) -> bool:
        """Whether backward has updated blocks in a step that is not finished."""
        return self.has_gradients and not self.holds_gradients

    def has_begun_to_update(self, part: ParamSlice) -> bool:
        """Whether backward has updated a parameter, or some of it, in a step that is not finished."""
        pieces = (piece for chunk in self._announced for piece in chunk.pieces)
        return self.has_begun_updates and any(piece.param_slice.parameter is part.parameter for piece in pieces)

    @property
    def is_past_undoing(self) -> bool:
        """Whether the step in progress has updated blocks for good. Call `wait_for_norms` before."""
        return self.has_begun_updates and self._worker.can_undo is False

    # At the step's end.

    def wait_for_norms(self) -> None:
        """Wait until the norms of all gradients of the step so far are known. Where there are several ranks, none adds
        to the step's gradients from here on. Raises RanksDisagreeError where one drops them."""
        if self._agreement is None:
            self._thread.call(self._worker.measure_rest)
        elif not self._is_agreed:
            self._thread.call(self._worker.give_rest)
            self._means.finish()
            self._thread.call(self._worker.measure_rest)
            self.norms.take(self._agreement.apply(self.norms.measured()))
            self._is_agreed = True

    def finish_step(self, clip_coefficient: float, group_of: GroupOf) -> tuple[set[Block], Applied]:
        """Apply the step's gradients, scaled by `clip_coefficient`. Returns the blocks whose records are others than
        before, or will be, and how the step was applied.

        Under the optimized schedule nobody waits for updates but those who read their block (`deliver`): held gradients
        are applied while the next forward runs, block by block in its order. `group_of` must give the hyperparameters
        of this step also then. Call `wait_for_norms` before.
        """
        of_zeros = [chunk for chunk in self._reached if chunk not in self._announced]
        changed = {chunk.block for chunk in (*self._announced, *of_zeros)}
        of_others: set[ParamSlice] = set()
        if self._agreement is not None:
            of_others = self.norms.with_gradient
            changed |= {self._block_of[part] for part in of_others}
        applied = self._thread.call(lambda: self._worker.decide(clip_coefficient, group_of, of_zeros))
        self._guesses.forget()
        self._thread.submit(lambda: self._worker.apply_held(clip_coefficient, group_of, of_others))
        # Only now: if an interrupt ends this method before, `abandon_step` still finds what there is to abandon.
        self._begin_next()
        if self._waits_for_updates:
            self.settle()
        return changed, applied

    def abandon_step(self) -> tuple[set[Block], bool]:
        """Forget the step's gradients, and undo its updates if the store can. Returns the blocks whose records were
        touched, and whether updates remain in them."""
        if not self._announced:
            self._begin_next()
            return set(), False  # and do not wait for the last step's updates
        if self._agreement is not None and not self._is_agreed:
            self._thread.call(self._worker.give_rest)
            self._means.drop()
            self._agreement.drop()
        self._thread.call(self._worker.abandon_step)
        self._guesses.forget()
        # Only now: if an interrupt ends this method before, it is called again, and finds nothing held any more.
        self._begin_next()
        touched, remains = self._worker.abandoned
        if self._agreement is not None:  # each has updated others, and what all have to load again must not differ
            touched = {block for block in self._block_of.values() if block.state_numel}
        return touched, remains

    def _begin_next(self) -> None:
        self._announced, self._reached = set(), {}
        self._means.end_step()
        self._is_agreed = False

    # For who reads weights, or the store.

    def deliver(self, block: Block, weights: Tensor, free: Event | None = None) -> Delivery:
        """Wait until the block's parameters can be read as the last finished step leaves them, except for those that
        come from its updates: they are put into `weights` [block.numel], which is on the device, after `free`."""
        if block in self._guesses:
            self.undo_guesses()
        return self._handover.deliver(block, weights, free)

    def settle(self) -> None:
        """Wait until every update of the finished steps is in the store, and no guess about the one in progress."""
        self.undo_guesses()
        self._thread.call(self._worker.settle)

    def when_written(self, action: Callable[[], None]) -> None:
        """Run `action` on the worker's thread when all is as after `settle`, without waiting. Its failure is the
        pipeline's: whoever waits next is told. Raises RuntimeError where a step in progress has changed the store."""
        if self.has_begun_updates:
            raise RuntimeError(
                "the step in progress has updated blocks in backward, so the store is of no step; finish it with "
                "step(), or drop it with zero_grad(), before committing"
            )
        self.undo_guesses()
        self._thread.submit(self._worker.settle)
        self._thread.submit(action)

    def when_reached(self, action: Callable[[], None]) -> None:
        """Run `action` on the worker's thread: after the updates of all that was sent before, before those of what is
        sent from now on. Does not wait, nor does `action` find them written."""
        self._thread.submit(action)

    # Guesses.

    @property
    def speculates(self) -> bool:
        """Whether steps guess, if they can."""
        return self._guesses.are_wanted and self._has_groups()

    def speculate(self, is_wanted: bool) -> None:
        """Whether the steps from now on are to guess. To be called between two of them."""
        self._guesses.want(is_wanted)

    def undo_guesses(self) -> set[Block]:
        """Undo what the step in progress has updated on a guess: its weights are needed as they were. Returns the
        blocks whose records go back."""
        return self._guesses.undo(self._worker.undo_guesses)

    @property
    def undone_s(self) -> float:
        """How long all updates took that were undone."""
        return self._worker.undone_s

    # The thread.

    @property
    def failure(self) -> BaseException | None:
        """What broke the pipeline."""
        return self._failure.error

    def close(self) -> None:
        self._thread.close()
        self._means.close()
