"""Gradients in, updated records out, chunk by chunk, while backward goes on (LoHan's active gradient offloading)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from functools import partial

from torch import Tensor

from hf_lohan.device import Event
from hf_lohan.model import Block, Chunk, ParamSlice
from hf_lohan.ranks import StepAgreement
from hf_lohan.threads import FirstFailure, WorkThread
from hf_lohan.updates.gradient_reduction import GradientReduction
from hf_lohan.updates.gradients import ArrivedChunk, GradientNorms
from hf_lohan.updates.handover import BorrowedSlot, Delivery, Handover
from hf_lohan.updates.missed_steps import GroupOf
from hf_lohan.updates.setup import UpdateSetup
from hf_lohan.updates.worker import Applied, SpeculativeBlocks, UpdateWorker


class GradientPipeline:
    """What the computing thread talks to. The work runs on a thread of its own, by `UpdateWorker`.
    `deliver` and `undo_guesses` may be called on any thread.

    A step updates in backward where nothing has to be known first. Where the norm decides about clipping, gradients are
    held. Updates are then deferred until the norm is known. Or they run in backward on a guess, into a draft; if the
    norm clips, the draft is dropped and the updates run again from the held gradients. A store without drafts allows no
    guess. Nobody ever reads a guess: a reader of a block that holds one (a second backward, an evaluation) first undoes
    all guesses.
    """

    def __init__(self, setup: UpdateSetup, exchange: GradientReduction | None = None) -> None:
        """`exchange`: sums each chunk's gradient over all ranks (see `RankGradientPipeline`)."""
        self.holds_gradients = setup.holds_gradients
        self._norms = GradientNorms(setup.slices)
        """Of the step in progress."""
        self._can_guess = setup.holds_gradients and setup.schedule != "serial" and setup.store.num_homes > 1
        self._waits_for_updates = setup.schedule != "optimized"
        self._has_groups = setup.has_groups
        self._announced: set[Chunk] = set()
        self._passed: dict[Chunk, None] = {}
        """Chunks that the step's backwards passed, with or without a gradient."""
        self._block_of = {part: block for block in setup.blocks for part in block.slices}
        self._gradient_buffers = setup.gradients
        self._handover = Handover(setup.copies_new_weights or setup.device)
        self._failure = FirstFailure(self._abort)
        self._thread = WorkThread("lohan-gradients", self._failure, beside_kernels=setup.device.shares_cores)
        self._worker = UpdateWorker(setup, self._norms, self._handover, self._failure.record_error, exchange)
        self._guesses = SpeculativeBlocks(self._thread)
        self._thread.start(idle=self._worker.finish_pending)

    def _abort(self, error: BaseException) -> None:
        """The step cannot be finished: wake everyone who waits for a buffer or a block."""
        self._gradient_buffers.abort(error)
        self._handover.abort(error)

    # In backward.

    def measure_gradient(self, part: ParamSlice, gradient: Tensor) -> None:
        """Note the norm of a gradient as backward made it."""
        self._norms.set_first(part, gradient)

    @property
    def updates_in_backward(self) -> bool:
        """Whether gradients of a final backward may be applied as they arrive."""
        return not self.holds_gradients or self.speculates

    def updates_chunk(self, chunk: Chunk) -> bool:
        """Whether this rank updates the chunk."""
        return True

    def submit(self, arrived: ArrivedChunk, *, is_final: bool, borrowed: BorrowedSlot | None = None) -> None:
        """Take over an arrived chunk. `is_final`: no later backward of this step adds to it; `borrowed`: the slot with
        the block's weights, if the update is to copy them from the device."""
        self._announced.add(arrived.chunk)
        may_guess = is_final and self.speculates and self._can_guess
        accept = partial(self._worker.accept, arrived, is_final=is_final, may_guess=may_guess, borrowed=borrowed)
        if may_guess:
            self._guesses.order_guess(arrived.chunk.block, accept)
        else:
            self._thread.submit(accept)

    def note_passed(self, chunks: Iterable[Chunk]) -> None:
        """A backward passed these chunks. Those that get no gradient in this step (experts without tokens) are updated
        with zeros. Not with several ranks."""
        self._passed.update(dict.fromkeys(chunks))

    def check_while_waiting(self, since_s: float) -> None:
        """Called now and then while a gradient waits for a buffer, with the time at which the wait began. Raises if the
        wait is in vain."""

    @property
    def has_gradients(self) -> bool:
        """Whether gradients of the step in progress have arrived."""
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
        """Wait until the norms of all gradients of the step so far are known. With several ranks, none adds to the
        step's gradients from here on. Raises RanksDisagreeError if one drops them."""
        self._thread.call(self._worker.measure_rest)

    def total_norm(self) -> Tensor:
        """The 2-norm over all gradients of the step: a float32 scalar on the host. Call `wait_for_norms` before."""
        return self._norms.total()

    def first_not_finite(self) -> str | None:
        """The name of the first parameter, in the model's order, whose gradient has a NaN or an infinity."""
        return self._norms.first_not_finite()

    def finish_step(self, clip_coefficient: float, group_of: GroupOf) -> tuple[set[Block], Applied]:
        """Apply the step's gradients, scaled by `clip_coefficient`. Returns the blocks whose records change, and how
        the step was applied.

        Under the optimized schedule this does not wait for updates: held gradients are applied while the next forward
        runs, in its order, and a reader of a block waits for that block (`deliver`). `group_of` must keep giving the
        hyperparameters of this step. Call `wait_for_norms` before.
        """
        of_zeros = [chunk for chunk in self._passed if chunk not in self._announced]
        of_others = self._updated_by_others()
        changed = {chunk.block for chunk in (*self._announced, *of_zeros)}
        changed |= {self._block_of[part] for part in of_others}
        applied = self._thread.call(lambda: self._worker.decide_step(clip_coefficient, group_of, of_zeros))
        self._guesses.forget_guesses()
        self._thread.submit(lambda: self._worker.apply_held(clip_coefficient, group_of, of_others))
        # Only now: if an interrupt ends this method before, `abandon_step` still finds what there is to abandon.
        self._begin_next()
        if self._waits_for_updates:
            self.wait_for_updates()
        return changed, applied

    def _updated_by_others(self) -> Set[ParamSlice]:
        """Parameters that other ranks may update in this step."""
        return frozenset()

    def abandon_step(self) -> tuple[set[Block], bool]:
        """Forget the step's gradients, and undo its updates if the store can. Returns the blocks whose records were
        touched, and whether updates remain in them."""
        if not self._announced:
            self._begin_next()
            return set(), False  # and do not wait for the last step's updates
        self._drop_gradients()
        self._thread.call(self._worker.abandon_step)
        self._guesses.forget_guesses()
        # Only now: if an interrupt ends this method before, it is called again, and finds nothing held any more.
        self._begin_next()
        return self._worker.abandoned

    def _drop_gradients(self) -> None:
        """Tell other ranks that the step's gradients are dropped."""

    def _begin_next(self) -> None:
        self._announced, self._passed = set(), {}
        self._norms.clear()

    # For readers of weights and of the store.

    def deliver(self, block: Block, weights: Tensor, free: Event | None = None) -> Delivery:
        """Wait until the block's parameters can be read as the last finished step leaves them, except for those that
        come from its updates: they are put into `weights` [block.numel], which is on the device, after `free`."""
        if block in self._guesses:
            self.undo_guesses()
        return self._handover.deliver(block, weights, free)

    def wait_for_updates(self) -> None:
        """Wait until the store holds every update of the finished steps, and no guess about the one in progress."""
        self.undo_guesses()
        self._thread.call(self._worker.wait_for_writes)

    def run_when_written(self, action: Callable[[], None]) -> None:
        """Run `action` on the worker's thread when all is as after `wait_for_updates`, without waiting here. If it
        fails, the pipeline fails: the next wait raises. Raises RuntimeError if a step in progress has changed the
        store."""
        if self.has_begun_updates:
            raise RuntimeError(
                "the step in progress has updated blocks in backward, so the store is between two steps; finish it "
                "with step(), or drop it with zero_grad(), before committing"
            )
        self.undo_guesses()
        self._thread.submit(self._worker.wait_for_writes)
        self._thread.submit(action)

    def run_between_updates(self, action: Callable[[], None]) -> None:
        """Run `action` on the worker's thread: after the updates of all chunks submitted so far, before those of later
        ones. Does not wait, and the writes of those updates may still run."""
        self._thread.submit(action)

    # Guesses.

    @property
    def speculates(self) -> bool:
        """Whether steps guess, if they can."""
        return self._guesses.are_wanted and self._has_groups()

    def set_speculation(self, is_wanted: bool) -> None:
        """Whether the steps from now on are to guess. To be called between two steps."""
        self._guesses.want_guesses(is_wanted)

    def undo_guesses(self) -> set[Block]:
        """Undo what the step in progress has updated on a guess: its weights are needed as they were. Returns the
        blocks whose records go back."""
        return self._guesses.undo_guesses(self._worker.undo_guesses)

    @property
    def undone_s(self) -> float:
        """Seconds spent on updates that were undone."""
        return self._worker.undone_s

    # The thread.

    @property
    def failure(self) -> BaseException | None:
        """What broke the pipeline."""
        return self._failure.error

    def close(self) -> None:
        self._thread.close()


class RankGradientPipeline(GradientPipeline):
    """The pipeline of one of several ranks: each chunk is summed over all ranks and updated by its owner. All ranks
    agree on each step's norms before they apply it."""

    def __init__(self, setup: UpdateSetup, exchange: GradientReduction, agreement: StepAgreement) -> None:
        self._exchange = exchange
        self._agreement = agreement
        self._is_agreed = False
        """Whether all ranks know the norms of the step in progress, and apply it."""
        super().__init__(setup, exchange)
        exchange.start(self._thread.submit, self._failure.record_error, self._worker.apply_unexpected)

    def _abort(self, error: BaseException) -> None:
        super()._abort(error)
        self._exchange.fail(error)

    def measure_gradient(self, part: ParamSlice, gradient: Tensor) -> None:
        """Nothing: norms are of the sums over all ranks."""

    def updates_chunk(self, chunk: Chunk) -> bool:
        return self._exchange.owns(chunk)

    def note_passed(self, chunks: Iterable[Chunk]) -> None:
        raise AssertionError("other ranks may have a gradient of these chunks")

    def check_while_waiting(self, since_s: float) -> None:
        self._exchange.check_while_waiting(since_s)

    def wait_for_norms(self) -> None:
        if self._is_agreed:
            return
        self._thread.call(self._worker.publish_rest)
        self._exchange.wait_for_sums()
        self._thread.call(self._worker.measure_rest)
        self._norms.replace_with(self._agreement.apply_gradients(self._norms.measured()))
        self._is_agreed = True

    def _updated_by_others(self) -> Set[ParamSlice]:
        return self._norms.with_gradient

    def abandon_step(self) -> tuple[set[Block], bool]:
        had_gradients = self.has_gradients
        touched, remains = super().abandon_step()
        if had_gradients:  # each rank has updated other chunks, and all must load the same blocks again
            touched = {block for block in self._block_of.values() if block.state_numel}
        return touched, remains

    def _drop_gradients(self) -> None:
        if not self._is_agreed:
            self._thread.call(self._worker.publish_rest)
            self._exchange.drop_step()
            self._agreement.drop_gradients()

    def _begin_next(self) -> None:
        super()._begin_next()
        self._exchange.end_step()
        self._is_agreed = False

    def close(self) -> None:
        super().close()
        self._exchange.close()
