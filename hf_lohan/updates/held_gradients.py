"""Gradients that wait for the end of their step: summed over backwards, measured, parked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from hf_lohan.model import Block, Chunk
from hf_lohan.threads import use_all_cores
from hf_lohan.updates.gradient_arrival import ArrivedChunk
from hf_lohan.updates.gradient_home import GradientHome
from hf_lohan.updates.gradient_norms import GradientNorms
from hf_lohan.updates.state_update import ChunkGradient


class HeldGradients:
    """By chunk, in forward order. Used by one thread."""

    def __init__(self, home: GradientHome, norms: GradientNorms, block_order: Iterable[Block]) -> None:
        self._home = home
        self._norms = norms
        self._position = {block: index for index, block in enumerate(block_order)}
        self._held: dict[tuple[int, int], ChunkGradient] = {}
        self._unmeasured: set[tuple[int, int]] = set()

    def add(self, arrived: ArrivedChunk) -> ChunkGradient:
        """Add an arrived chunk to what is held of it. The result is not held any more."""
        slices = {piece.param_slice for piece in arrived.pieces}
        key = self._key(arrived.chunk)
        gradient = self._held.pop(key, None)
        self._unmeasured.discard(key)
        if gradient is not None or arrived.dtype != torch.float32:
            use_all_cores()  # there is more to do than to hold it, and sums are to be measured as torch would
        values = arrived.wait()
        if gradient is None:
            return ChunkGradient(arrived.chunk, arrived.buffer, slices)
        self._bring_back(gradient)
        for piece in arrived.pieces:
            part = slice(piece.start_in_chunk, piece.stop_in_chunk)
            if piece.param_slice in gradient.slices:
                gradient.values[part].add_(values[part])
                gradient.summed.add(piece.param_slice)
            else:
                gradient.values[part].copy_(values[part])
        gradient.slices |= slices
        gradient.is_measured = False
        arrived.buffer.release()
        return gradient

    def measure(self, gradient: ChunkGradient) -> None:
        """Note the norms of those of its parameters that were summed; the others were measured as they arrived."""
        gradient.is_measured = True
        for piece in gradient.chunk.pieces:
            if piece.param_slice in gradient.summed:
                self._norms.set_summed(piece, gradient.values[piece.start_in_chunk : piece.stop_in_chunk])

    def measure_rest(self) -> None:
        """Measure what no final backward has announced (loops that do not say which backward is the last)."""
        for key in sorted(self._unmeasured):
            gradient = self._held.pop(key)
            self._bring_back(gradient)
            self.measure(gradient)
            self.hold(gradient)
        self._unmeasured.clear()

    def hold(self, gradient: ChunkGradient) -> None:
        """Let it wait."""
        key = self._key(gradient.chunk)
        self._held[key] = gradient
        if gradient.summed and not gradient.is_measured:
            self._unmeasured.add(key)
        self._home.park(gradient)

    @property
    def chunks(self) -> set[Chunk]:
        """What is held."""
        return {gradient.chunk for gradient in self._held.values()}

    def take_all(self) -> Iterator[ChunkGradient]:
        """All of them, in forward order; they are not held any more."""
        for key in sorted(self._held):
            yield self._held.pop(key)
        self._unmeasured.clear()

    def forget(self, chunks: Iterable[Chunk]) -> None:
        """They are not wanted any more."""
        for chunk in chunks:
            key = self._key(chunk)
            self._home.forget(self._held.pop(key))
            self._unmeasured.discard(key)

    def _bring_back(self, gradient: ChunkGradient) -> None:
        for request in self._home.bring_back(gradient):
            request.wait()

    def _key(self, chunk: Chunk) -> tuple[int, int]:
        return self._position[chunk.block], chunk.index
