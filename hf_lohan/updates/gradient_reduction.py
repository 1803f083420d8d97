"""The mean of a chunk's gradients over several ranks, at the rank that updates the chunk."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Protocol

from hf_lohan.device import Buffer, BufferPool, Device
from hf_lohan.model import Chunk
from hf_lohan.ranks import CodedLane, CompleteGradient, GradientExchange, Links, SharedRegion
from hf_lohan.ranks.step_agreement import END_OF_STEP
from hf_lohan.threads import Command, use_all_cores
from hf_lohan.updates.gradients import ChunkGradient

Apply = Callable[[ChunkGradient], object]


class GradientMeans(Protocol):
    """Takes each chunk's gradient, complete on this rank, and gives back the mean over all ranks of what is this
    rank's to update."""

    are_of_many: bool
    """Whether there are several ranks."""

    @property
    def given(self) -> Set[Chunk]:
        """What came in this step."""

    @property
    def while_waiting(self) -> Callable[[float], object] | None:
        """To be called now and then by who waits for a buffer in which gradients arrive, with when that began: raises
        where other ranks keep them in vain. None where there are no others."""

    def when_none_was_given(self, apply: Apply) -> None:
        """What is called with a mean that is this rank's to update, and of which it had no gradient itself."""

    def give(self, gradient: ChunkGradient, apply: Apply, unwanted: Callable[[], object]) -> None:
        """Take over a gradient, once for each chunk and step. On the worker's thread, on which ``apply`` is then called
        with the mean, if this rank is to have it; else ``unwanted``."""

    def finish(self) -> None:
        """No more comes of this step's gradients. Returns when all means that are this rank's have been given to the
        worker's thread, or others have dropped the step. On the computing thread."""

    def drop(self) -> None:
        """Nobody wants the step's means. On the computing thread."""

    def end_step(self) -> None:
        """What is given from now on is the next step's."""

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on. From any thread."""

    def close(self) -> None:
        """Nothing is given any more."""


class OwnGradients:
    """`GradientMeans` of one rank."""

    are_of_many = False
    given: Set[Chunk] = frozenset()
    while_waiting = None

    def __init__(self, put: Callable[[Command], None], failed: Callable[[BaseException], None]) -> None:
        """Neither is needed: nothing comes from elsewhere."""

    def when_none_was_given(self, apply: Apply) -> None:
        """There is no such mean."""

    def give(self, gradient: ChunkGradient, apply: Apply, unwanted: Callable[[], object]) -> None:
        """It is the mean."""
        apply(gradient)

    def finish(self) -> None:
        """Nobody is to be waited for."""

    def drop(self) -> None:
        """Nobody has anything of them."""

    def end_step(self) -> None:
        """Nothing to forget."""

    def fail(self, error: BaseException) -> None:
        """Nobody else is to be told."""

    def close(self) -> None:
        """Nothing to let go."""


logger = logging.getLogger(__name__)


class GradientReduction:
    """`GradientMeans` of one of several ranks. Chunks come in any order; those of others go to their owners as they
    are, and their buffers are free when these have added them up. Float32 throughout, in the order of ranks: the sum of
    as many backwards in one process, to the bit, where the number of ranks is a power of two."""

    are_of_many = True

    def __init__(
        self,
        links: Links,
        device: Device,
        buffers: BufferPool,
        memory: SharedRegion,
        chunks: Sequence[Chunk],
        coded: CodedLane | None,
        put: Callable[[Command], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """``buffers``: those in which gradients arrive, in ``memory``; ``chunks``: all, in one order on all ranks;
        ``coded``: what boxes send one another goes through it, and is rounded; ``put`` runs something on the worker's
        thread; ``failed`` is told what went wrong on another rank."""
        self._links = links
        self._rank = links.ranks.rank
        self._device = device
        self._buffer_bytes = buffers.buffer_bytes
        self._chunks = chunks
        self._key_of = {chunk: key for key, chunk in enumerate(chunks)}
        self._given: set[Chunk] = set()
        self._waiting: dict[Chunk, tuple[ChunkGradient, Apply, Callable[[], object]]] = {}
        """This rank's own, whose means have not come."""
        self._dropped_steps: set[int] = set()
        """Of the exchange's count."""
        self._put = put
        self._apply_unexpected: Apply = _refuse
        self._ended: int | None = None
        """The step in progress, by the exchange's count, once nothing more comes of it."""
        self._is_complete = False
        self._exchange = GradientExchange(
            links,
            {key: chunk.owner for key, chunk in enumerate(chunks)},
            memory,
            completed=lambda complete: put(partial(self._apply_mean, complete)),
            release=_release,
            coded=coded,
        )
        told = weakref.ref(self)  # the links outlive it
        self._failed = failed
        links.when_failed(lambda error: _tell(told(), error))

    def when_none_was_given(self, apply: Apply) -> None:
        """See `GradientMeans`."""
        self._apply_unexpected = apply

    @property
    def given(self) -> Set[Chunk]:
        """See `GradientMeans`."""
        return self._given

    def while_waiting(self, since_s: float) -> None:
        """See `GradientMeans`."""
        keepers = {chunk.owner for chunk in list(self._given)} - {self._rank}
        self._links.refuse_silence("its gradients to be added up", keepers, since_s)

    def give(self, gradient: ChunkGradient, apply: Apply, unwanted: Callable[[], object]) -> None:
        """See `GradientMeans`."""
        chunk = gradient.chunk
        if chunk in self._given or self._ended is not None:
            raise RuntimeError(
                f"a gradient of {chunk} came after this rank had sent its part of it to the others; say before a "
                "step's backwards which is the last, by gradient_accumulation_steps or announce_backward"
            )
        for piece in chunk.pieces:
            if piece.param_slice not in gradient.slices:
                gradient.values[piece.start_in_chunk : piece.stop_in_chunk].zero_()  # it held anything
        self._given.add(chunk)
        lent = gradient.buffer
        if chunk.owner == self._rank:  # the mean will lie in that
            self._waiting[chunk], lent = (gradient, apply, unwanted), None
        else:
            unwanted()
        self._exchange.publish(self._key_of[chunk], gradient.values, _bits_of(gradient), lent)

    def _apply_mean(self, complete: CompleteGradient) -> None:
        """All ranks have said what they have of a chunk that is this rank's. On the worker's thread."""
        if complete.numel == 0 or complete.step in self._dropped_steps:
            complete.release()
            return
        chunk = self._chunks[complete.key]
        if chunk in self._waiting:
            gradient, apply, _ = self._waiting.pop(chunk)
        else:
            gradient, apply = ChunkGradient(chunk, self._new_buffer(chunk), set()), self._apply_unexpected
        use_all_cores()  # it is measured as torch would
        complete.sum_into(gradient.values)
        complete.release()
        bits = complete.slice_bits
        gradient.slices = {piece.param_slice for place, piece in enumerate(chunk.pieces) if bits >> place & 1}
        gradient.summed = set(gradient.slices)
        gradient.is_measured = False
        apply(gradient)

    def _new_buffer(self, chunk: Chunk) -> Buffer:
        """For what only others have a gradient of. It is not of the pool: that one may have none free, and whoever
        would free one may wait for this."""
        logger.info("this rank has no gradient of %s, which it updates: others have", chunk)
        return BufferPool(
            self._device, name="gradients of others", num_buffers=1, buffer_bytes=self._buffer_bytes
        ).acquire()

    def finish(self) -> None:
        """See `GradientMeans`."""
        if self._ended is None:
            self._ended = self._exchange.end_backward()
        if not self._is_complete:
            self._exchange.wait_until_complete(self._ended, before=END_OF_STEP)
            self._is_complete = True

    def drop(self) -> None:
        """See `GradientMeans`."""
        if self._ended is not None:
            self._dropped_steps.add(self._ended)
        else:
            self._dropped_steps.add(self._exchange.step)
            self._exchange.abandon()
        self._put(self._forget_waiting)

    def _forget_waiting(self) -> None:
        """No mean comes for them."""
        for gradient, _, unwanted in self._waiting.values():
            assert gradient.buffer is not None
            gradient.buffer.release()
            unwanted()
        self._waiting.clear()

    def end_step(self) -> None:
        """See `GradientMeans`."""
        self._given.clear()
        self._ended, self._is_complete = None, False

    def fail(self, error: BaseException) -> None:
        """See `GradientMeans`."""
        self._links.fail(error)

    def note_failure(self, error: BaseException) -> None:
        """Another rank cannot go on."""
        self._failed(error)

    def close(self) -> None:
        """See `GradientMeans`."""
        self._exchange.close()


def _tell(means: GradientReduction | None, error: BaseException) -> None:
    if means is not None:
        means.note_failure(error)


def _release(buffer: object) -> None:
    if isinstance(buffer, Buffer):
        buffer.release()


def _bits_of(gradient: ChunkGradient) -> int:
    """A bit for each piece of the chunk: whether it has a gradient."""
    pieces = enumerate(gradient.chunk.pieces)
    return sum(1 << place for place, piece in pieces if piece.param_slice in gradient.slices)


def _refuse(gradient: ChunkGradient) -> None:
    raise AssertionError(f"nobody takes the gradient of {gradient.chunk}")
