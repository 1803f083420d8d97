"""The step in progress: what is forgotten when it is dropped, and how to start clean after an interrupt."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hf_lohan.model import Block
from hf_lohan.updates import GradientPipeline, StepTransaction
from hf_lohan.weights import SlotRing

logger = logging.getLogger(__name__)


class StepInProgress:
    """From its first gradient to the end of `step()`."""

    def __init__(
        self,
        transaction: StepTransaction,
        pipeline: GradientPipeline,
        ring: SlotRing,
        blocks: Sequence[Block],
    ) -> None:
        self._transaction = transaction
        self._pipeline = pipeline
        self._ring = ring
        self._blocks = blocks
        self._is_ending = False
        self._leaves_updates = False

    def begin_finish(self) -> None:
        """From here until `finished` the step is neither here nor there: an interrupt leaves it to `recover`."""
        self._is_ending = True

    def finished(self) -> None:
        """The step counts, or was skipped."""
        self._is_ending = self._leaves_updates = False

    def recover(self) -> None:
        """If an exception ended `step()`, or one of the methods here, drop what is left of the step."""
        if self._is_ending:
            # The pipeline takes a step whole or not at all, but who knows how far we got in telling it.
            self._pipeline.settle()
            self._drop()
            self._is_ending = True
            self._ring.forget(self._blocks)
            self._is_ending = False

    def drop(self) -> None:
        """Forget its gradients, and undo its updates if the store can."""
        touched, remains = self._drop()
        if remains:
            logger.warning("gradients were dropped after backward had updated %d blocks with them", len(touched))

    def drop_broken(self) -> None:
        """Its backward ended with an exception."""
        touched, remains = self._drop()
        logger.warning(
            "the last backward did not finish; its step's gradients are dropped%s",
            f", but {len(touched)} blocks had been updated in it already" if remains else "",
        )

    def _drop(self) -> tuple[set[Block], bool]:
        """Returns the blocks that it had touched, and whether updates remain in them."""
        self._is_ending = True
        touched, remains = self._transaction.drop()
        self._leaves_updates = self._leaves_updates or remains
        self._ring.forget(touched)
        self._is_ending = False
        return touched, remains

    @property
    def is_half_applied(self) -> bool:
        """Whether the store holds updates of a step that did not count, for good or for all that is known."""
        return self._is_ending or self._leaves_updates or self._pipeline.has_begun_updates
