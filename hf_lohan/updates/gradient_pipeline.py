"""Gradients in, updated records out, chunk by chunk, while backward goes on (LoHan's active gradient offloading)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from hf_lohan.device import BufferPool, Device
from hf_lohan.model import Block, Chunk
from hf_lohan.threads import WorkThread
from hf_lohan.updates.blocks_in_update import BlocksInUpdate, Delivery
from hf_lohan.updates.gradient_arrival import ArrivedChunk
from hf_lohan.updates.gradient_home import GradientHome
from hf_lohan.updates.gradient_norms import GradientNorms
from hf_lohan.updates.guessed_blocks import GuessedBlocks
from hf_lohan.updates.param_groups import GroupOf
from hf_lohan.updates.state_update import Drafts, StateUpdater
from hf_lohan.updates.step_gradients import Outcome, StepGradients
from hf_lohan.updates.update_pipeline import Schedule


class FinishedStep(NamedTuple):
    """How a step was applied."""

    changed: set[Block]
    """Whose records are others than before, or will be."""
    outcome: Outcome


class GradientPipeline:
    """A thread that sums, holds and applies gradients, as those see it who wait for it: the compute thread, but for
    `deliver` and `stop_speculating`, which any may call. What the thread does stands in `StepGradients`.

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
    ) -> None:
        self.holds_gradients = hold_gradients
        self._can_speculate = (
            hold_gradients and schedule != "serial" and drafts is not None and drafts.num_homes > 1
        )
        self._waits_for_updates = schedule != "optimized"
        self._arrival_pool = arrival_pool
        self._announced: set[Chunk] = set()
        self._applying = BlocksInUpdate(device)
        self._thread = WorkThread(
            "lohan-gradients",
            idle=lambda: self._gradients.work_off(),
            failed=self._on_failure,
            beside_kernels=device.shares_cores,
        )
        self._guesses = GuessedBlocks(self._thread)
        self._gradients = StepGradients(
            updater,
            home,
            block_order,
            group_of,
            norms,
            self._applying,
            schedule=schedule,
            are_held=hold_gradients,
            drafts=drafts,
            failed=self._thread.fail,
        )
        self._thread.start()

    def submit(self, arrived: ArrivedChunk, *, is_final: bool) -> None:
        """Take over an arrived chunk. `is_final`: no later backward of this step adds to it."""
        self._announced.add(arrived.chunk)
        speculate = is_final and self._guesses.are_wanted and self._can_speculate
        accept = partial(self._gradients.accept, arrived, is_final=is_final, speculate=speculate)
        if speculate:
            self._guesses.order(arrived.chunk.block, accept)
        else:
            self._thread.put(accept)

    def measure(self) -> None:
        """Wait until the norms of all gradients of the step so far are known."""
        self._thread.call(self._gradients.measure_rest)

    def finish_step(self, clip_coefficient: float, group_of: GroupOf) -> FinishedStep:
        """Apply the step's gradients, scaled by `clip_coefficient`.

        Under the optimized schedule nobody waits for updates but those who read their block (`deliver`): held gradients
        are applied while the next forward runs, block by block in its order. `group_of` must give the hyperparameters
        of this step also then. Call `measure` before.
        """
        outcome = self._thread.call(lambda: self._gradients.decide(clip_coefficient, group_of))
        self._guesses.forget()
        self._thread.put(lambda: self._gradients.apply_held(clip_coefficient, group_of))
        # Only now: if an interrupt ends this method before, `drop` still finds what there is to drop.
        chunks, self._announced = self._announced, set()
        if self._waits_for_updates:
            self.settle()
        return FinishedStep({chunk.block for chunk in chunks}, outcome)

    def settle(self) -> None:
        """Wait until every update of the finished steps is in the store, and no guess about the one in progress."""
        self.stop_speculating()
        self._thread.call(self._gradients.settle)

    def when_written(self, action: Callable[[], None]) -> None:
        """Run `action` on the pipeline's thread when all is as after `settle`, without waiting. Its failure is the
        pipeline's: whoever waits next is told. Raises RuntimeError where a step in progress has changed the store."""
        if self.has_begun_updates:
            raise RuntimeError(
                "the step in progress has updated blocks in backward, so the store is of no step; finish it with "
                "step(), or drop it with zero_grad(), before committing"
            )
        self.stop_speculating()
        self._thread.put(self._gradients.settle)
        self._thread.put(action)

    def deliver(self, block: Block, weights: Tensor) -> Delivery:
        """Wait until the block's parameters can be read as the last finished step leaves them, except for those that
        come from its updates: they are put into `weights` [block.numel], which is on the device."""
        if block in self._guesses:
            self.stop_speculating()
        return self._applying.order(block, weights)

    @property
    def last_update_s(self) -> float:
        """How long the last step's updates took."""
        return self._gradients.last_update_s

    @property
    def undone_s(self) -> float:
        """How long all updates took that were undone."""
        return self._gradients.undone_s

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
        return self.has_begun_updates and self._gradients.can_undo is False

    def stop_speculating(self) -> set[Block]:
        """Undo what the step in progress has updated on a guess: its weights are needed as they were. Returns the
        blocks whose records go back."""
        return self._guesses.undo(self._gradients.stop_speculating)

    def drop(self) -> tuple[set[Block], bool]:
        """Forget the step's gradients, and undo its updates if the store can. Returns the blocks whose records were
        touched, and whether updates remain in them."""
        if not self._announced:
            return set(), False  # and do not wait for the last step's updates
        self._thread.call(self._gradients.drop)
        self._guesses.forget()
        dropped = self._gradients.dropped
        # Only now, and all in one statement: if an interrupt ends this method before, it is called again, and finds
        # nothing held any more.
        self._announced, self._gradients.dropped = set(), (set(), False)
        return dropped

    def close(self) -> None:
        self._thread.close()

    def _on_failure(self, error: BaseException) -> None:
        """The step cannot be finished: whoever waits for a buffer or a block is told."""
        self._arrival_pool.abort(error)
        self._applying.abort(error)
