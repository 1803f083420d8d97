"""Updates records from gradients, chunk by chunk, while backward runs (LoHan's active gradient offloading)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor

from hf_lohan.device import Buffer, Event
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
    """The computing thread's interface to updates. `UpdateWorker` does the work on its own thread. `deliver` and
    `undo_guesses` may be called on any thread.

    Without clipping, a step updates in backward. With clipping, gradients are held, and updates are deferred until the
    norm is known. Or updates run in backward as drafts, on the guess that nothing is clipped. If the guess is wrong,
    the drafts are dropped, and the updates run again from the held gradients. Guesses need a store with two homes. A
    guess is never read: a reader of a guessed block (a second backward, an evaluation) first undoes all guesses.
    """

    def __init__(self, setup: UpdateSetup, exchange: GradientReduction | None = None) -> None:
        """`exchange`: sums each chunk's gradient over all ranks (see `RankGradientPipeline`)."""
        self._exchange = exchange
        self.holds_gradients = setup.holds_gradients
        self._norms = GradientNorms(setup.slices)
        self._can_guess = setup.holds_gradients and setup.schedule != "serial" and setup.store.num_homes > 1
        self._waits_for_updates = setup.schedule != "optimized"
        self._has_groups = setup.has_groups
        self._announced: set[Chunk] = set()
        self._passed: dict[Chunk, None] = {}
        """Chunks with a gradient of zero in a backward of this step. Other backwards may have given them gradients."""
        self._excluded: set[Chunk] = set()
        """Chunks without a gradient of this rank in the step. Other ranks may have updated them already."""
        self._block_of = {part: block for block in setup.blocks for part in block.slices}
        self.num_backwards = 0
        """Number of backwards of the step in progress."""
        self._gradient_buffers = [pool for pool in (setup.gradients, setup.on_device) if pool is not None]
        self._handover = Handover(setup.copies_new_weights or setup.device, setup.device)
        self._failure = FirstFailure(self._abort)
        self._thread = WorkThread("lohan-gradients", self._failure, beside_kernels=setup.device.shares_cores)
        self._worker = UpdateWorker(setup, self._norms, self._handover, self._failure.record_error, exchange)
        self._guesses = SpeculativeBlocks(self._thread)
        self._thread.start(idle=self._worker.finish_pending)

    def _abort(self, error: BaseException) -> None:
        """Wake all threads that wait for a buffer or a block, because the step cannot be finished."""
        for pool in self._gradient_buffers:
            pool.abort(error)
        self._handover.abort(error)

    def park(self, share: float) -> None:
        """From now on, let this share of the updates in backward wait for the next forward."""
        self._thread.submit(lambda: self._worker.park(share))

    # Called in backward.

    def count_backward(self) -> int:
        """Count a backward that begins. Returns its number in the step, from 1 on."""
        self.num_backwards += 1
        return self.num_backwards

    def measure_gradient(self, part: ParamSlice, gradient: Tensor) -> None:
        """Compute the norm of a gradient from backward."""
        self._norms.set_first(part, gradient)

    @property
    def updates_in_backward(self) -> bool:
        """Whether gradients of a final backward may be applied as they arrive."""
        return not self.holds_gradients or self.speculates

    def updates_chunk(self, chunk: Chunk) -> bool:
        """Return whether this rank updates the chunk."""
        return self._exchange is None or self._exchange.owns(chunk)

    def submit(self, arrived: ArrivedChunk, *, is_final: bool, borrowed: BorrowedSlot | None = None) -> None:
        """Submit an arrived chunk. `is_final`: no later backward of this step adds to it. `borrowed`: the slot with the
        block's weights, if the update copies them from the device."""
        self._announced.add(arrived.chunk)
        may_guess = is_final and self.speculates and self._can_guess
        accept = partial(self._worker.accept, arrived, is_final=is_final, may_guess=may_guess, borrowed=borrowed)
        if may_guess:
            self._guesses.order_guess(arrived.chunk.block, accept)
        else:
            self._thread.submit(accept)

    def note_passed(self, chunks: Iterable[Chunk]) -> None:
        """Record that these chunks get a gradient of zero in a backward (experts without tokens). Chunks without
        another gradient in this step are updated with zeros."""
        self._passed.update(dict.fromkeys(chunks))

    def wait_for_ranks(self) -> AbstractContextManager[None]:
        """Return a context in which the calling thread may wait for other ranks."""
        return nullcontext() if self._exchange is None else self._exchange.waiting()

    def exclude(self, blocks: Collection[Block]) -> list[Chunk]:
        """Record that the step's last backward, which begins now, reaches none of these blocks. Returns their chunks
        that have gradients of earlier backwards. The caller must call `publish_held` for these chunks, in the order in
        which their gradients arrived."""
        shared = [] if self._exchange is None else self._exchange.shared_chunks
        chunks = [chunk for chunk in shared if chunk.block in blocks]
        without = [chunk for chunk in chunks if chunk not in self._announced]
        if without:
            self._excluded.update(without)
            self._thread.submit(partial(self._worker.exclude, without))
        return [chunk for chunk in chunks if chunk in self._announced]

    def held_back(self, arrived: Set[Chunk]) -> list[Chunk]:
        """Return the chunks for which `publish_held` must be called after the step's last backward. ``arrived``: the
        chunks whose gradients arrived in this backward."""
        exchange = self._exchange
        return [] if exchange is None else [chunk for chunk in self._announced - arrived if exchange.is_shared(chunk)]

    def publish_held(self, chunk: Chunk, buffer: Buffer) -> None:
        """Publish a gradient of earlier backwards, moved to `buffer` if other ranks cannot read its current buffer."""
        self._thread.submit(partial(self._worker.publish_held, chunk, buffer))

    @property
    def has_gradients(self) -> bool:
        """Whether gradients of the step in progress have arrived."""
        return bool(self._announced)

    @property
    def has_begun_updates(self) -> bool:
        """Whether backward has updated blocks in a step that is not finished."""
        return self.has_gradients and not self.holds_gradients

    def has_begun_to_update(self, part: ParamSlice) -> bool:
        """Return whether some part of a parameter may have been updated in a step that is not finished, by this rank or
        by others."""
        if self.holds_gradients:
            return False
        chunks = self._announced | self._excluded if part.parameter.requires_grad else self._announced
        return any(piece.param_slice.parameter is part.parameter for chunk in chunks for piece in chunk.pieces)

    @property
    def is_past_undoing(self) -> bool:
        """Whether the step in progress has updates that cannot be undone. Call `wait_for_norms` first."""
        return self.has_begun_updates and self._worker.can_undo is False

    # Called at the end of a step.

    def wait_for_norms(self, max_norm: float | None = None) -> None:
        """Wait until the norms of all the step's gradients are known. With several ranks, no rank adds to the step's
        gradients afterwards. ``max_norm``: the norm to which this rank clips them. Raises RanksDisagreeError if
        another rank drops its gradients, or clips or updates differently."""
        self._thread.call(self._worker.measure_rest)

    def total_norm(self) -> Tensor:
        """Return the 2-norm over all gradients of the step, a float32 scalar on the host. Call `wait_for_norms`
        first."""
        return self._norms.total()

    def with_gradient(self) -> Set[ParamSlice]:
        """Return the parameters that have a gradient in the step, on any rank. Call `wait_for_norms` first."""
        return self._norms.with_gradient | _trained_in(self._passed)

    def announced(self) -> Set[ParamSlice]:
        """Return this rank's trained parameters that have a gradient in the step, including a gradient of zero."""
        return _trained_in((*self._announced, *self._passed))

    def first_not_finite(self) -> str | None:
        """Return the name of the first parameter, in the model's order, whose gradient has a NaN or an infinity."""
        return self._norms.first_not_finite()

    @property
    def trains_nothing(self) -> bool:
        """Whether the step had a backward, but no trained weight has a gradient on any rank. Call `wait_for_norms`
        first."""
        return self.num_backwards > 0 and not self.with_gradient()

    def finish_step(self, clip_coefficient: float, group_of: GroupOf) -> tuple[set[Block], Applied]:
        """Apply the step's gradients, scaled by `clip_coefficient`. Returns the blocks whose records change, and how
        the step was applied.

        With the optimized schedule this does not wait for updates. Held gradients are applied while the next forward
        runs, in its order, and a reader of a block waits for that block (`deliver`). `group_of` must continue to return
        the hyperparameters of this step. Call `wait_for_norms` first.
        """
        of_zeros = [chunk for chunk in self._passed if chunk not in self._announced]
        of_others = self._updated_by_others()
        changed = {chunk.block for chunk in (*self._announced, *of_zeros)}
        changed |= {self._block_of[part] for part in of_others}
        applied = self._thread.call(lambda: self._worker.decide_step(clip_coefficient, group_of, of_zeros))
        self._guesses.forget_guesses()
        self._thread.submit(lambda: self._worker.apply_held(clip_coefficient, group_of, of_others))
        # This is last, so that `abandon_step` can still abandon the step if an interrupt ends this method earlier.
        self._begin_next()
        if self._waits_for_updates:
            self.wait_for_updates()
        return changed, applied

    def _updated_by_others(self) -> Set[ParamSlice]:
        """Return the parameters that other ranks may update in this step."""
        return frozenset()

    def abandon_step(self) -> tuple[set[Block], bool]:
        """Forget the step's gradients, and undo its updates if the store can. Returns the blocks whose records changed,
        and whether updates remain in them."""
        if not self._has_told_ranks:
            self._begin_next()
            return set(), False  # without a wait for the last step's updates
        self._drop_gradients()
        self._thread.call(self._worker.abandon_step)
        self._guesses.forget_guesses()
        # This is last. If an interrupt ends this method earlier, it is called again, and must still see the step's
        # chunks.
        self._begin_next()
        return self._worker.abandoned

    @property
    def _has_told_ranks(self) -> bool:
        """Whether gradients of the step have arrived, or other ranks know that some blocks get none."""
        return bool(self._announced or self._excluded)

    def _drop_gradients(self) -> None:
        """Tell other ranks that the step's gradients are dropped."""

    def _begin_next(self) -> None:
        self._announced, self._passed, self._excluded, self.num_backwards = set(), {}, set(), 0
        self._norms.clear()

    # Called by readers of weights and of the store.

    def deliver(self, block: Block, weights: Tensor, free: Event | None = None) -> Delivery:
        """Wait until the block's parameters of the last finished step can be read from the store. Parameters that are
        not written yet are copied to `weights` [block.numel] on the device, after `free`."""
        if block in self._guesses:
            self.undo_guesses()
        return self._handover.deliver(block, weights, free)

    def settle(self, block: Block) -> None:
        """Wait until no update of the block is outstanding. If the block has a guess, undo all guesses."""
        if block in self._guesses:
            self.undo_guesses()
        self._handover.settle(block)

    def copy_new(self, block: Block, start: int, out: Tensor) -> list[tuple[int, int]] | None:
        """Copy parameters that are not written yet to the host. See `Handover.copy_new`."""
        return self._handover.copy_new(block, start, out)

    def wait_for_updates(self) -> None:
        """Wait until the store has every update of the finished steps, and no guess of the step in progress."""
        self.undo_guesses()
        self._thread.call(self._worker.wait_for_writes)

    def run_when_written(self, action: Callable[[], None]) -> None:
        """Run `action` on the worker's thread once the store has all updates for which `wait_for_updates` waits.
        Returns at once. If the action fails, the pipeline fails, and the next wait raises. Raises RuntimeError if a
        step in progress has changed the store."""
        if self.has_begun_updates:
            raise RuntimeError(
                "the step in progress has updated blocks in backward, so the store is between two steps; finish it "
                "with step(), or drop it with zero_grad(), before committing"
            )
        self.undo_guesses()
        self._thread.submit(self._worker.wait_for_writes)
        self._thread.submit(action)

    def run_between_updates(self, action: Callable[[], None]) -> None:
        """Run `action` on the worker's thread after the updates of all submitted chunks and before the updates of later
        chunks. This does not wait, and the writes of those updates may still run."""
        self._thread.submit(action)

    # Guesses.

    @property
    def speculates(self) -> bool:
        """Whether steps guess that the norm will not clip, if they can."""
        return self._guesses.are_wanted and self._has_groups()

    def set_speculation(self, is_wanted: bool) -> None:
        """Set whether later steps guess. Call this between two steps."""
        self._guesses.are_wanted = is_wanted

    def undo_guesses(self) -> set[Block]:
        """Undo the updates that the step in progress made on a guess, because a reader needs the weights without them.
        Returns the blocks whose records change back."""
        return self._guesses.undo_guesses(self._worker.undo_guesses)

    @property
    def undone_s(self) -> float:
        """Seconds spent on updates that were undone."""
        return self._worker.undone_s

    # The worker's thread.

    @property
    def failure(self) -> BaseException | None:
        """The error that broke the pipeline."""
        return self._failure.error

    def close(self) -> None:
        self._thread.close()
        self._worker.close()


class RankGradientPipeline(GradientPipeline):
    """The pipeline of one of several ranks. Each chunk is summed over all ranks and updated by its owner. All ranks
    agree on each step's norms before they apply the step."""

    _exchange: GradientReduction

    def __init__(self, setup: UpdateSetup, exchange: GradientReduction, agreement: StepAgreement) -> None:
        self._agreement = agreement
        self._is_agreed = False
        """Whether all ranks know the norms of the step in progress, and apply it."""
        self._passed_elsewhere: set[Chunk] = set()
        """Chunks of other ranks' experts with a zero gradient in a backward on this rank. Their owners update them."""
        super().__init__(setup, exchange)
        exchange.start(self._thread.submit, self._failure.record_error, self._worker.apply_unexpected)

    def _abort(self, error: BaseException) -> None:
        super()._abort(error)
        self._exchange.fail(error)

    def measure_gradient(self, part: ParamSlice, gradient: Tensor) -> None:
        """Do nothing, because the sums over all ranks are measured instead."""

    def note_passed(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            assert not self._exchange.is_shared(chunk), "other ranks may have a gradient of this chunk"
            if self._exchange.owns(chunk):
                super().note_passed([chunk])
            else:
                self._passed_elsewhere.add(chunk)

    def wait_for_norms(self, max_norm: float | None = None) -> None:
        if self._is_agreed:
            return
        self._thread.call(self._worker.publish_rest)
        self._exchange.wait_for_sums()
        self._thread.call(self._worker.measure_rest)
        self._norms.replace_with(self._agreement.apply_gradients(self._norms.measured(), max_norm))
        self._is_agreed = True

    def _updated_by_others(self) -> Set[ParamSlice]:
        return self._norms.with_gradient | _trained_in(self._passed_elsewhere)

    def with_gradient(self) -> Set[ParamSlice]:
        return super().with_gradient() | _trained_in(self._passed_elsewhere)

    def abandon_step(self) -> tuple[set[Block], bool]:
        has_told_ranks = self._has_told_ranks
        touched, remains = super().abandon_step()
        if has_told_ranks:  # ranks have updated different chunks, and all must load the same blocks again
            touched = {block for block in self._block_of.values() if block.state_numel}
        return touched, remains

    def _drop_gradients(self) -> None:
        if not self._is_agreed:
            self._thread.call(self._worker.publish_rest)
            self._exchange.drop_step()
            self._agreement.drop_gradients()

    def _begin_next(self) -> None:
        super()._begin_next()
        self._passed_elsewhere.clear()
        self._exchange.end_step()
        self._is_agreed = False

    def close(self) -> None:
        super().close()
        self._exchange.close()


def _trained_in(chunks: Iterable[Chunk]) -> set[ParamSlice]:
    parts = (piece.param_slice for chunk in chunks for piece in chunk.pieces)
    return {part for part in parts if part.parameter.requires_grad}
