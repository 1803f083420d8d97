"""The gradient of an embedding table in which only some rows have a gradient. Only these rows leave the device. The
host fills the other rows with zeros."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hf_lohan.compat.torch_private import parts_of_sparse
from hf_lohan.model import ChunkPiece, RowIds, rows_between

_ADDED_LANES = 64
"""A multiple of the number of partial sums in which a CPU adds the squares of a vector."""
_SPREAD_NUMEL = 1 << 18
"""Number of elements that are moved at a time."""


@dataclass(frozen=True, slots=True)
class RowsOfPiece:
    """Rows of one piece of a table. They are contiguous from the start of the piece's memory, until `spread` moves them
    to their places."""

    piece: ChunkPiece
    ids: RowIds
    """Indices of the rows, in ascending order. The piece may have only parts of the first and the last row."""
    width: int

    def _places(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return where in the piece each row starts and stops."""
        first = self.piece.start_in_slice
        starts = np.maximum(self.ids * self.width - first, 0)
        return starts, np.minimum((self.ids + 1) * self.width - first, self.piece.numel)

    def spread(self, memory: Tensor) -> None:
        """Move the rows to their places in ``memory`` [piece.numel], and fill the rest with zeros. Rows only move to
        higher offsets, so the last rows move first."""
        starts, stops = self._places()
        sources = np.concatenate([[0], np.cumsum(stops - starts)])
        memory[sources[-1] :].zero_()
        at_once, stop = max(1, _SPREAD_NUMEL // self.width), len(self.ids)
        while stop:
            begin = max(0, stop - at_once)
            moving = memory[sources[begin] : sources[stop]]
            values = moving.clone()
            moving.zero_()
            self._put(memory, values, starts[begin:stop], stops[begin:stop])
            stop = begin

    def _put(self, memory: Tensor, values: Tensor, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> None:
        width, offset = self.width, -self.piece.start_in_slice % self.width
        is_whole = stops - starts == width
        places = np.concatenate([[0], np.cumsum(stops - starts)])
        for index in np.flatnonzero(~is_whole):  # at most the first and the last
            memory[starts[index] : stops[index]] = values[places[index] : places[index + 1]]
        whole = np.flatnonzero(is_whole)
        if len(whole):
            of_rows = values[places[whole[0]] : places[whole[-1] + 1]].view(-1, width)
            num_rows = (memory.numel() - offset) // width
            table = memory[offset : offset + num_rows * width].view(-1, width)
            table.index_copy_(0, torch.from_numpy((starts[whole] - offset) // width), of_rows)


class RowGradient:
    """The gradient of a table's rows, on the device."""

    def __init__(self, gradient: Tensor) -> None:
        """``gradient``: a sparse tensor of the table's shape."""
        indices, values = parts_of_sparse(gradient)
        self._ids: RowIds = indices[0].cpu().numpy()
        if np.any(np.diff(self._ids) <= 0):  # the sum of several uses
            gradient = gradient.coalesce()
            self._ids, values = gradient.indices()[0].cpu().numpy(), gradient.values()
        self.values = values.contiguous().view(-1)
        self._num_rows, self._width = gradient.shape

    def part(self, piece: ChunkPiece) -> tuple[Tensor, RowsOfPiece]:
        """Return the values of the rows in a piece, and their places."""
        first = piece.start_in_slice
        rows, elements = rows_between(self._ids, self._width, first, first + piece.numel)
        return self.values[elements], RowsOfPiece(piece, self._ids[rows], self._width)

    def to_measure(self) -> Tensor:
        """Return a vector with the norm of the whole gradient. On a CPU the norm is bitwise equal. The CPU adds squares
        in several partial sums, and each value stays in its partial sum although zeros are left out."""
        numel = self._num_rows * self._width
        is_even = self._width % _ADDED_LANES == 0 and numel % _ADDED_LANES == 0
        if is_even or self.values.device.type != "cpu" or not len(self._ids):
            return self.values
        starts, width = self._ids * self._width, self._width
        edges = np.concatenate([[-width], starts, [numel]])
        places = np.cumsum(width + (np.diff(edges) - width) % _ADDED_LANES) - width
        spread = self.values.new_zeros(int(places[-1]))
        index = torch.from_numpy(places[:-1])[:, None] + torch.arange(width)
        spread[index.view(-1)] = self.values
        return spread
