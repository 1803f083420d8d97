"""Averages a chunk's gradient over several ranks, at the rank that updates the chunk."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial

from torch import Tensor

from hf_lohan.costs import SizeClass
from hf_lohan.device import Buffer, BufferPool, Device, Lane
from hf_lohan.model import Chunk
from hf_lohan.ranks import (
    CodedValues,
    CompleteGradient,
    DeviceSums,
    GradientExchange,
    Links,
    MeasuredCodec,
    SharedRegion,
    TableRows,
)
from hf_lohan.ranks.collectives.rank_order_sum import memory_of
from hf_lohan.threads import Command, use_all_cores
from hf_lohan.updates.gradients import ChunkGradient
from hf_lohan.wording import format_bytes

logger = logging.getLogger(__name__)

Apply = Callable[[ChunkGradient], object]


class GradientReduction:
    """Averages gradients over all ranks. Chunks may arrive in any order. A gradient goes unchanged to the owner of its
    chunk, and its buffer is free when the owner has added it. Sums are float32, in the order of ranks. They are bitwise
    equal to the sums of the same backwards in one process if the number of ranks is a power of two."""

    def __init__(
        self,
        links: Links,
        device: Device,
        buffers: BufferPool,
        memory: SharedRegion,
        chunks: Sequence[Chunk],
        coded: MeasuredCodec | None,
        sums: DeviceSums | None = None,
    ) -> None:
        """``buffers``: arrival buffers of gradients, in ``memory``. ``chunks``: all chunks, in the same order on all
        ranks. ``coded``: the codec between nodes. ``sums``: adds gradients that are published on devices."""
        self._links = links
        self._rank = links.ranks.rank
        self._device = device
        self._buffers = buffers
        self._memory = memory
        self._chunks = chunks
        self._coded = coded
        self._sums = sums
        self._key_of = {chunk: key for key, chunk in enumerate(chunks)}
        self._waiting: dict[Chunk, tuple[ChunkGradient, Apply, Callable[[], object]]] = {}
        """Chunks of this rank whose averaged gradients have not arrived."""
        self._lock = threading.Lock()
        """Ensures that no chunk begins to wait after its step was dropped."""

    def start(
        self, put: Callable[[Command], None], on_failure: Callable[[BaseException], None], apply_unexpected: Apply
    ) -> None:
        """Start to exchange gradients. All ranks call this together. ``put`` runs a command on the worker's thread.
        ``on_failure`` is called if another rank fails. ``apply_unexpected`` is called with the averaged gradient of a
        chunk if this rank published no gradient of it."""
        self._put, self._on_failure, self._apply_unexpected = put, on_failure, apply_unexpected
        this = weakref.ref(self)  # the links live longer than this object

        def note_failure(error: BaseException) -> None:
            if (reduction := this()) is not None:
                reduction._on_failure(error)

        self._exchange = GradientExchange(
            self._links,
            {key: chunk.owner for key, chunk in enumerate(self._chunks) if self.is_shared(chunk)},
            self._memory,
            completed=lambda complete: put(partial(self._apply_mean, complete)),
            release=_release_buffer,
            place=self._place_for,
            failed=note_failure,
            coded=self._coded,
            rows={
                key: _rows_of(chunk)
                for key, chunk in enumerate(self._chunks)
                if chunk.block.size_class is SizeClass.ROWS
            },
            sums=self._sums,
            gaps_of=lambda key: self._chunks[key].gaps,
        )
        self._links.add_failure_callback(note_failure)

    @property
    def shared_chunks(self) -> list[Chunk]:
        return list(filter(self.is_shared, self._chunks))

    @staticmethod
    def is_shared(chunk: Chunk) -> bool:
        """Return whether each rank has a gradient of the chunk. If not, its owner has the average already."""
        return chunk.block.owner is None

    def owns(self, chunk: Chunk) -> bool:
        """Return whether this rank updates the chunk."""
        return chunk.owner == self._rank

    def is_awaited(self, chunk: Chunk) -> bool:
        """Return whether other ranks may still get a gradient of the chunk from this rank in this step."""
        return self.is_shared(chunk) and not self._exchange.has_told(self._key_of[chunk])

    def exclude(self, chunks: Collection[Chunk]) -> None:
        """Tell other ranks that this rank will have no gradient of these chunks in the step. Without this call,
        gradients of other ranks would fill buffers until the end of the backward. Called on the worker's thread."""
        self._exchange.exclude([self._key_of[chunk] for chunk in chunks])

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context in which the calling thread waits for buffers that other ranks read."""
        return self._exchange.waiting()

    def publish_gradient(self, gradient: ChunkGradient, apply: Apply, on_unwanted: Callable[[], object]) -> None:
        """Publish a gradient, once for each chunk and step. Called on the worker's thread. If this rank owns the chunk,
        ``apply`` is later called on the same thread with the mean. If the step is dropped, ``on_unwanted`` is
        called."""
        chunk = gradient.chunk
        if not self.is_awaited(chunk):
            raise RuntimeError(
                f"a gradient of {chunk} arrived after this rank had sent the chunk's gradient to other ranks; run all "
                "backwards of a step but the last within accelerator.no_sync(model), or set gradient_accumulation_steps"
            )
        codec, gradient.codec = gradient.codec, None  # its mean is not coded
        values, sent_buffer, key = gradient.published_values, gradient.on_device or gradient.buffer, self._key_of[chunk]
        for piece in chunk.pieces if codec is None or gradient.on_device else ():
            if piece.param_slice not in gradient.slices:  # this part was not initialized
                start, stop = piece.start_in_chunk, piece.stop_in_chunk
                part = values[start:stop] if codec is None else CodedValues.in_place_of(values, codec).part(start, stop)
                self._zero(part, is_on_device=bool(gradient.on_device))
        if self.owns(chunk):  # the mean will be written to its buffer on the host
            sent_buffer = gradient.on_device
            self._waiting[chunk] = gradient, apply, on_unwanted
        else:
            on_unwanted()
        is_on_device = gradient.leave_device()
        self._exchange.publish(key, values, _slice_bits(gradient), sent_buffer, codec, is_on_device=is_on_device)

    def _zero(self, values: Tensor | CodedValues, *, is_on_device: bool) -> None:
        if is_on_device:  # in the lane of the gradients, so that a later gradient in this buffer comes after the zeros
            work, memory = partial(_fill_with_zeros, values), memory_of(values)
            self._device.run(Lane.D2H, work, fills=memory[0], reads=memory, name="zero")
            self._device.record(Lane.D2H).synchronize()  # another lane sends the zeros
        else:
            _fill_with_zeros(values)

    def _place_for(self, step: int, key: int) -> ChunkGradient | None:
        """Return the gradient that the average replaces, or None if the step was dropped. Its buffer is kept until the
        average is applied. Called on the thread of the exchange."""
        chunk = self._chunks[key]
        with self._lock:
            if not self._exchange.is_wanted(step):
                return None
            if chunk not in self._waiting:
                gradient = ChunkGradient(chunk, self._new_buffer(chunk), set())
                self._waiting[chunk] = gradient, self._apply_unexpected, lambda: None
            gradient = self._waiting[chunk][0]
            assert isinstance(gradient.buffer, Buffer)
            gradient.buffer.retain()
            return gradient

    def _apply_mean(self, complete: CompleteGradient) -> None:
        """Apply the mean of one of this rank's chunks after all ranks have published their gradients. Called on the
        worker's thread."""
        gradient = complete.place
        if gradient is None:
            return
        assert isinstance(gradient, ChunkGradient) and gradient.buffer is not None
        gradient.buffer.release()
        if not self._exchange.is_wanted(complete.step):
            return
        chunk = gradient.chunk
        _, apply, _ = self._waiting.pop(chunk)
        bits = complete.slice_bits
        gradient.slices = {piece.param_slice for index, piece in enumerate(chunk.pieces) if bits >> index & 1}
        gradient.summed = set(gradient.slices)
        gradient.is_measured = False
        use_all_cores()  # torch would measure the gradient on all cores
        apply(gradient)

    def _new_buffer(self, chunk: Chunk) -> Buffer:
        """Return a buffer for a gradient that only other ranks have. The pool is large enough, because this rank could
        have had a gradient of the chunk too. But a wait for the pool may never end, because all its buffers may be held
        by work that waits for this gradient."""
        if (free := self._buffers.try_acquire()) is not None:
            return free[0]
        logger.info(
            "this rank updates %s, of which only other ranks have a gradient, and all buffers are in use; this "
            "gradient takes %s of RAM that cpu_memory does not count",
            chunk,
            format_bytes(self._buffers.buffer_bytes),
        )
        return BufferPool(
            self._device, name="gradients of others", num_buffers=1, buffer_bytes=self._buffers.buffer_bytes
        ).acquire()

    def wait_for_sums(self) -> None:
        """End the step's gradients. Waits until the averages of all chunks of this rank are queued on the worker's
        thread, or another rank has dropped the step. Called on the computing thread."""
        self._exchange.end_backward()
        self._exchange.wait_until_complete()

    def drop_step(self) -> None:
        """Drop the step's gradients. Called on the computing thread."""
        with self._lock:
            self._exchange.abandon()
        self._put(self._forget_waiting)

    def _forget_waiting(self) -> None:
        """Forget the gradients whose averages will not arrive."""
        while self._waiting:
            _, (gradient, _, on_unwanted) = self._waiting.popitem()
            assert gradient.buffer is not None
            gradient.buffer.release()
            on_unwanted()

    def end_step(self) -> None:
        """End the step. Gradients that are published later belong to the next step."""
        self._exchange.begin_next()

    def fail(self, error: BaseException) -> None:
        """Tell other ranks that this rank cannot continue. Any thread may call this."""
        self._links.fail(error)

    def close(self) -> None:
        """Exchange no more gradients."""
        self._exchange.close()


def _fill_with_zeros(values: Tensor | CodedValues) -> None:
    values.zero_()


def _rows_of(chunk: Chunk) -> TableRows:
    """Return the rows in a chunk of a table, which is alone in its block."""
    (part,) = chunk.block.slices
    width = part.shape[1]
    return TableRows(width, (chunk.start - part.start) % width)


def _release_buffer(buffer: object) -> None:
    if isinstance(buffer, Buffer):
        buffer.release()


def _slice_bits(gradient: ChunkGradient) -> int:
    """Return a bit for each piece of the chunk, which is set if the piece has a gradient."""
    pieces = enumerate(gradient.chunk.pieces)
    return sum(1 << index for index, piece in pieces if piece.param_slice in gradient.slices)
