"""Gradients that wait for the end of their step: summed over backwards, measured, in RAM or spilled to the SSD."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from hf_lohan.device import Buffer, TopPlace
from hf_lohan.model import Chunk
from hf_lohan.optim import widen_in_place
from hf_lohan.store import RecordFiles, RecordRead
from hf_lohan.threads import use_all_cores
from hf_lohan.updates.gradients import ArrivedChunk, ChunkGradient, GradientNorms
from hf_lohan.updates.setup import UpdateSetup

logger = logging.getLogger(__name__)

_Key: TypeAlias = tuple[int, int]
"""A chunk's place in the forward: its block's, and its own in it."""


class HeldGradients:
    """By chunk, in forward order. Used by one thread."""

    def __init__(self, setup: UpdateSetup, norms: GradientNorms) -> None:
        self._spill = setup.spill
        self._open_spill_of_sums = setup.open_spill_of_sums
        self._spill_of_sums: RecordFiles | None = None
        self._keeps_dtypes = setup.keeps_gradient_dtypes
        self._spilled_blocks = setup.spilled_blocks
        self._recall = setup.recall
        self._others_read_sums = setup.agreement is not None
        self._gradients = setup.gradients
        self._num_held_chunks = setup.num_held_chunks
        self._shared_ram = setup.shared_ram
        self._norms = norms
        self._blocks = setup.blocks
        self._position = {block: index for index, block in enumerate(setup.blocks)}
        self._held: dict[_Key, ChunkGradient] = {}
        self._unmeasured: set[_Key] = set()
        self._in_buffers: set[_Key] = set()
        """Of those that are held, where there is other RAM for them."""
        self._may_be_spilled: list[_Key] = []
        """A heap of the negated keys of those in buffers that have room on the SSD, and of some that are gone."""

    def add(self, arrived: ArrivedChunk) -> ChunkGradient:
        """Add an arrived chunk to what is held of it. The result is not held any more."""
        slices = {piece.param_slice for piece in arrived.pieces}
        gradient = self._take(self._key(arrived.chunk))
        if gradient is not None or arrived.dtype != arrived.held_dtype:
            use_all_cores()  # there is more to do than to hold it, and sums are to be measured as torch would
        values = arrived.wait()
        if gradient is None:
            return ChunkGradient(arrived.chunk, arrived.buffer, slices, arrived.held_dtype)
        self._bring_back_now(gradient)
        self._widen(gradient)
        for piece in arrived.pieces:
            part = slice(piece.start_in_chunk, piece.stop_in_chunk)
            if piece.param_slice in gradient.slices:
                gradient.values[part].add_(values[part])
                gradient.summed.add(piece.param_slice)
            else:
                gradient.values[part].copy_(values[part])
        gradient.slices |= slices
        gradient.is_measured = False
        self._keep_one_buffer(gradient, arrived, values)
        return gradient

    def _keep_one_buffer(self, gradient: ChunkGradient, arrived: ArrivedChunk, values: Tensor) -> None:
        """Of that with the sum and that in which the last part of it arrived. What other ranks are to read lies where
        gradients arrive: the buffers for what comes back are needed here before they have read it."""
        assert gradient.buffer is not None
        if self._others_read_sums and isinstance(gradient.buffer, Buffer) and gradient.buffer.pool is self._recall:
            values.copy_(gradient.values)
            gradient.buffer.release()
            gradient.buffer = arrived.buffer
        else:
            arrived.buffer.release()

    def measure(self, gradient: ChunkGradient) -> None:
        """Note the norms of those of its parameters that were summed; the others were measured as they arrived."""
        gradient.is_measured = True
        for piece in gradient.chunk.pieces:
            if piece.param_slice in gradient.summed:
                self._norms.set_summed(piece, gradient.values[piece.start_in_chunk : piece.stop_in_chunk])

    def measure_rest(self) -> None:
        """Measure what no final backward has announced (loops that do not say which backward is the last)."""
        for key in sorted(self._unmeasured):
            gradient = self._take(key)
            assert gradient is not None
            self._bring_back_now(gradient)
            self.measure(gradient)
            self.hold(gradient)

    def hold(self, gradient: ChunkGradient, *, is_final: bool = False) -> None:
        """Let it wait. What is spilled gives its buffer back when it is written. `is_final`: it waits for no more than
        the step's end and its update, so its place may be one that the next forward will want."""
        key = self._key(gradient.chunk)
        self._held[key] = gradient
        if gradient.is_zero:
            return
        if gradient.summed and not gradient.is_measured:
            self._unmeasured.add(key)
        block = gradient.chunk.block
        if self._keeps_dtypes and gradient.dtype != block.master.working_dtype:
            # A sum of what was to come once has no place in RAM.
            self._write(gradient, self._opened_spill_of_sums(block.master.working_dtype))
        elif self._spilled_blocks and self._shared_ram is not None and self._shared_ram.num_bytes:
            self._hold_where_there_is_room(key, is_final=is_final)
        elif block.name in self._spilled_blocks:
            self._write(gradient, self._spill)

    def _hold_where_there_is_room(self, key: _Key, *, is_final: bool) -> None:
        """In a buffer, else in what activations leave, else one is spilled: the one that is needed last. Activations
        leave more the later it is, so buffers take what comes first, and give it up for what comes later."""
        gradient = self._held[key]
        if isinstance(gradient.buffer, TopPlace):
            return
        assert gradient.buffer is not None
        may_stay = gradient.buffer.pool is self._gradients  # not one in which spilled gradients come back
        if may_stay and len(self._in_buffers) < self._num_held_chunks:
            self._stay_in_buffer(key)
        elif is_final and self._move_to_shared_ram(gradient):
            return
        elif may_stay and (last := self._last_in_buffers()) is not None and last > key:
            self._in_buffers.remove(last)
            self._write(self._held[last], self._spill)
            self._stay_in_buffer(key)
        else:
            self._write(gradient, self._spill)

    def _stay_in_buffer(self, key: _Key) -> None:
        if not self._in_buffers:
            self._may_be_spilled.clear()
        self._in_buffers.add(key)
        if self._held[key].chunk.block.name in self._spilled_blocks:
            heapq.heappush(self._may_be_spilled, (-key[0], -key[1]))

    def _last_in_buffers(self) -> _Key | None:
        """Of those that may be spilled, the one that is needed last. Others are no more than may stay, so where all
        that may stay are in buffers, and one of those others comes, there is one."""
        while self._may_be_spilled:
            position, index = self._may_be_spilled[0]
            if (-position, -index) in self._in_buffers:
                return -position, -index
            heapq.heappop(self._may_be_spilled)
        return None

    def _move_to_shared_ram(self, gradient: ChunkGradient) -> bool:
        """If there is room, and the next forward will leave it until the gradient is applied: when it comes to the
        block, it has put away what the last one had there. So it finds room in RAM whenever the last one did."""
        ram, values = self._shared_ram, gradient.values
        assert ram is not None and gradient.buffer is not None
        position = self._position[gradient.chunk.block]
        put_away = max(ram.marks.get(block.name, 0) for block in self._blocks[: position + 1])
        place = ram.push_top(values.nbytes, leave=put_away)
        if place is None:
            return False
        place.view(values.dtype, values.numel()).copy_(values)
        gradient.buffer.release()
        gradient.buffer = place
        return True

    def _write(self, gradient: ChunkGradient, spill: RecordFiles | None) -> None:
        assert spill is not None and isinstance(gradient.buffer, Buffer)
        chunk, buffer = gradient.chunk, gradient.buffer
        write = spill.write(chunk.block.name, "gradient", chunk.start, gradient.values)
        write.add_done_callback(lambda request: buffer.release())
        gradient.spill_write, gradient.spilled_to, gradient.buffer = write, spill, None

    def _opened_spill_of_sums(self, dtype: torch.dtype) -> RecordFiles:
        if self._spill_of_sums is None:
            assert self._open_spill_of_sums is not None
            logger.warning(
                "gradients of %s are summed over several backwards, but memory was taken for one backward a step, so "
                "sums wait on the SSD; where you can, say gradient_accumulation_steps before the model is offloaded",
                dtype,
            )
            self._spill_of_sums = self._open_spill_of_sums()
        return self._spill_of_sums

    def _take(self, key: _Key) -> ChunkGradient | None:
        self._unmeasured.discard(key)
        self._in_buffers.discard(key)
        return self._held.pop(key, None)

    @property
    def chunks(self) -> set[Chunk]:
        """What is held."""
        return {gradient.chunk for gradient in self._held.values()}

    def take(self, chunk: Chunk) -> ChunkGradient:
        """It is not held any more, and in its buffer. Raises RuntimeError where it is spilled."""
        key = self._key(chunk)
        if self._held[key].buffer is None:
            raise RuntimeError(
                f"the gradient of {chunk} waits on the SSD and other ranks need it, but which backward is a step's "
                "last was not said; say it by gradient_accumulation_steps or announce_backward"
            )
        gradient = self._take(key)
        assert gradient is not None
        return gradient

    def take_all(self) -> Iterator[ChunkGradient]:
        """All of them, in forward order; they are not held any more."""
        for key in sorted(self._held):
            gradient = self._take(key)
            assert gradient is not None
            yield gradient

    def forget(self, chunks: Iterable[Chunk]) -> None:
        """They are not wanted any more."""
        for chunk in chunks:
            gradient = self._take(self._key(chunk))
            assert gradient is not None
            if gradient.buffer is not None:
                gradient.buffer.release()
            elif gradient.spill_write is not None:
                gradient.spill_write.wait()

    # What was spilled.

    def can_bring_back(self, gradient: ChunkGradient) -> bool:
        """Whether `bring_back` finds a buffer free."""
        return gradient.buffer is not None or gradient.is_zero or self._recall.num_free > 0

    def bring_back(self, gradient: ChunkGradient) -> list[RecordRead]:
        """Reads that must be done, and verified, before its values are in its buffer again."""
        if gradient.buffer is not None or gradient.is_zero:
            return []
        assert gradient.spilled_to is not None and gradient.spill_write is not None
        gradient.spill_write.wait()
        gradient.buffer = self._recall.acquire()
        chunk = gradient.chunk
        return [gradient.spilled_to.read(chunk.block.name, "gradient", chunk.start, gradient.values)]

    def _widen(self, gradient: ChunkGradient) -> None:
        """To float32: where it is, if there is room, else in a buffer for what comes back. Of those it takes one, for
        a guess that is under way may keep the other."""
        if gradient.dtype == torch.float32:
            return
        values, buffer, numel = gradient.values, gradient.buffer, gradient.chunk.numel
        assert buffer is not None
        if buffer.bytes.numel() >= torch.float32.itemsize * numel:
            buffer.view(gradient.dtype, numel, start_byte=values.nbytes).copy_(values)
            widen_in_place(buffer.bytes, gradient.dtype, numel)
            gradient.dtype = torch.float32
        else:
            gradient.buffer, gradient.dtype = self._recall.acquire(), torch.float32
            gradient.values.copy_(values)
            buffer.release()

    def _bring_back_now(self, gradient: ChunkGradient) -> None:
        for read in self.bring_back(gradient):
            read.wait()

    def _key(self, chunk: Chunk) -> _Key:
        return self._position[chunk.block], chunk.index
