"""Gradients in, updated records out, chunk by chunk, while backward goes on (LoHan's active gradient offloading)."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal

from hf_lohan.device import BufferPool
from hf_lohan.optim import AdamWGroup
from hf_lohan.runtime.block import Block, Chunk, ChunkPiece, ParamSlice
from hf_lohan.runtime.blocks_in_update import BlocksInUpdate
from hf_lohan.runtime.gradient_arrival import ArrivedChunk
from hf_lohan.runtime.gradient_home import GradientHome
from hf_lohan.runtime.gradient_norms import GradientNorms
from hf_lohan.runtime.state_update import ChunkGradient, ChunkUpdate, StateUpdater
from hf_lohan.storage import IoRequest

Schedule = Literal["optimized", "naive", "serial"]


class GradientPipeline:
    """A thread that sums, holds and applies gradients.

    Schedules (LoHan, Fig. 3): `optimized` issues the reads of chunk j+1 before it updates chunk j and issues its
    writes, so SSD and CPU are both busy; `naive` reads, updates and writes one chunk after another; `serial` does what
    naive does, but only after backward.
    """

    def __init__(
        self,
        updater: StateUpdater,
        home: GradientHome,
        block_order: Iterable[Block],
        group_of: Callable[[ParamSlice], AdamWGroup],
        norms: GradientNorms,
        arrival_pool: BufferPool,
        *,
        schedule: Schedule,
        hold_gradients: bool,
    ) -> None:
        self._updater = updater
        self._home = home
        self._position = {block: index for index, block in enumerate(block_order)}
        self._group_of = group_of
        self._schedule = schedule
        self.holds_gradients = hold_gradients
        self._held: dict[tuple[int, int], ChunkGradient] = {}
        self._norms = norms
        self._arrival_pool = arrival_pool
        self._unmeasured: set[tuple[int, int]] = set()
        self._pending: ChunkUpdate | None = None
        self._writes: deque[IoRequest] = deque()
        self._clip_coefficient = 1.0
        self._applied: set[ChunkPiece] = set()
        self._announced: set[Chunk] = set()
        self._applying = BlocksInUpdate()
        self.failure: BaseException | None = None
        self._commands: queue.SimpleQueue[Callable[[], None] | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="lohan-gradients", daemon=True)
        self._thread.start()

    # The compute thread's side.

    def submit(self, arrived: ArrivedChunk, *, is_final: bool) -> None:
        """Take over an arrived chunk. `is_final`: no later backward of this step adds to it."""
        self._announced.add(arrived.chunk)
        self._commands.put(lambda: self._accept(arrived, is_final))

    def measure(self) -> None:
        """Wait until the norms of all gradients of the step so far are known."""
        self._commands.put(self._measure_held)
        self._barrier()

    def finish_step(self, clip_coefficient: float, group_of: Callable[[ParamSlice], AdamWGroup]) -> set[Block]:
        """Apply the step's gradients, scaled by `clip_coefficient`. Returns the blocks whose records change.

        Under the optimized schedule, held gradients are applied while the next forward runs: block by block in its
        order, each before it is read (`wait_until_current`). `group_of` must give the hyperparameters of this step
        also then.
        """
        chunks, self._announced = self._announced, set()
        is_deferred = self.holds_gradients and self._schedule == "optimized"
        if is_deferred:
            self._applying.add(chunks)
        self._commands.put(lambda: self._apply_held(clip_coefficient, group_of))
        if not is_deferred:
            self.settle()
        return {chunk.block for chunk in chunks}

    def settle(self) -> None:
        """Wait until every update is in the store."""
        self._commands.put(self._settle)
        self._barrier()

    def wait_until_current(self, block: Block) -> None:
        """Wait until no update of `block` from a finished step is outstanding. Called by whoever reads its records."""
        self._applying.wait_for(block)

    @property
    def has_begun_updates(self) -> bool:
        """Whether backward has updated blocks in a step that is not finished."""
        return bool(self._announced) and not self.holds_gradients

    def drop(self) -> set[Block]:
        """Forget held gradients. Returns blocks that were updated all the same (updates in backward)."""
        if not self._announced:
            return set()  # and do not wait for the last step's updates
        chunks, self._announced = self._announced, set()
        self._commands.put(self._drop_held)
        self.settle()
        return set() if self.holds_gradients else {chunk.block for chunk in chunks}

    def _barrier(self) -> None:
        if not self._thread.is_alive():
            raise RuntimeError("the engine is closed; load the model again")
        reached = threading.Event()
        self._commands.put(reached)
        reached.wait()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join()

    # The pipeline thread's side.

    def _run(self) -> None:
        while True:
            command = self._next_command()
            if command is None:
                return
            if isinstance(command, threading.Event):
                command.set()
            elif self.failure is None:
                try:
                    command()
                except BaseException as error:
                    self._fail(error)

    def _next_command(self) -> Callable[[], None] | threading.Event | None:
        if self._commands.empty() and self._pending is not None and self.failure is None:
            # Nothing to read ahead for: do not leave the last chunk lying.
            return self._finish_pending
        return self._commands.get()

    def _accept(self, arrived: ArrivedChunk, is_final: bool) -> None:
        gradient = self._sum(arrived)
        if is_final:
            self._measure(gradient)
        if is_final and not self.holds_gradients:
            self._update(gradient)
        else:
            self._hold(gradient, is_measured=is_final)

    def _sum(self, arrived: ArrivedChunk) -> ChunkGradient:
        """Add an arrived chunk to what is held of it; the result is in a buffer."""
        values = arrived.wait()
        slices = {piece.param_slice for piece in arrived.pieces}
        gradient = self._held.pop(self._key(arrived.chunk.block, arrived.chunk.index), None)
        if gradient is None:
            self._refuse_second(arrived)
            return ChunkGradient(arrived.chunk, arrived.buffer, slices)
        for request in self._home.bring_back(gradient):
            request.wait()
        for piece in arrived.pieces:
            part = slice(piece.start_in_chunk, piece.stop_in_chunk)
            if piece.param_slice in gradient.slices:
                gradient.values[part].add_(values[part])
                gradient.summed.add(piece.param_slice)
            else:
                gradient.values[part].copy_(values[part])
        gradient.slices |= slices
        arrived.buffer.release()
        return gradient

    def _refuse_second(self, arrived: ArrivedChunk) -> None:
        for piece in arrived.pieces:
            if piece in self._applied:
                raise RuntimeError(
                    f"a second gradient of {piece.param_slice.name} arrived after the first had been applied; "
                    "backward runs more than once a step here, so set max_grad_norm > 0 or announce the accumulation"
                )

    def _key(self, block: Block, chunk_index: int) -> tuple[int, int]:
        return self._position[block], chunk_index

    def _measure(self, gradient: ChunkGradient) -> None:
        for piece in gradient.chunk.pieces:
            if piece.param_slice in gradient.summed:
                self._norms.set_summed(piece, gradient.values[piece.start_in_chunk : piece.stop_in_chunk])

    def _measure_held(self) -> None:
        """Measure what no final backward has announced (loops that do not say which backward is the last)."""
        for key in sorted(self._unmeasured):
            gradient = self._held.pop(key)
            for request in self._home.bring_back(gradient):
                request.wait()
            self._measure(gradient)
            self._hold(gradient, is_measured=True)

    def _hold(self, gradient: ChunkGradient, *, is_measured: bool) -> None:
        key = self._key(gradient.chunk.block, gradient.chunk.index)
        self._held[key] = gradient
        (self._unmeasured.discard if is_measured or not gradient.summed else self._unmeasured.add)(key)
        self._home.park(gradient)

    def _apply_held(self, clip_coefficient: float, group_of: Callable[[ParamSlice], AdamWGroup]) -> None:
        """In forward order: the first blocks are needed first by the next forward."""
        live_groups, self._group_of = self._group_of, group_of
        self._clip_coefficient = clip_coefficient
        for key in sorted(self._held):
            self._update(self._held.pop(key))
        self._finish_pending()
        self._unmeasured.clear()
        self._count_updates()
        self._group_of, self._clip_coefficient = live_groups, 1.0

    def _count_updates(self) -> None:
        for part in {piece.param_slice for piece in self._applied}:
            part.num_updates += 1
        self._applied.clear()

    def _update(self, gradient: ChunkGradient) -> None:
        self._applied.update(piece for piece in gradient.chunk.pieces if piece.param_slice in gradient.slices)
        update = self._updater.begin(gradient, self._home.bring_back(gradient))
        if self._schedule == "optimized":
            self._finish_pending()
            self._pending = update
        else:
            self._finish(update)
            self._wait_for_writes()

    def _finish_pending(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._finish(pending)

    def _finish(self, update: ChunkUpdate) -> None:
        chunk = update.gradient.chunk
        writes = self._updater.finish(
            update,
            clip_coefficient=self._clip_coefficient,
            group_of=self._group_of,
            written=lambda error: self._on_written(chunk, error),
        )
        self._writes.extend(writes)
        while self._writes and self._writes[0].done():
            self._writes.popleft().wait()

    def _on_written(self, chunk: Chunk, error: BaseException | None) -> None:
        if error is None:
            self._applying.discard(chunk)
        else:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """The step cannot be finished: whoever waits for a buffer or a block, or comes later, is told."""
        self.failure = self.failure or error
        self._arrival_pool.abort(error)
        self._applying.abort(error)

    def _wait_for_writes(self) -> None:
        while self._writes:
            self._writes.popleft().wait()

    def _settle(self) -> None:
        self._finish_pending()
        self._wait_for_writes()

    def _drop_held(self) -> None:
        for gradient in self._held.values():
            self._home.forget(gradient)
        self._held.clear()
        self._unmeasured.clear()
        self._finish_pending()
        self._count_updates()
