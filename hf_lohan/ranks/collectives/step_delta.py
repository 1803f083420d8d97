"""Encodes a step's changes to 16-bit weights without loss, for receivers that have the weights before the step.

A step of fine-tuning changes a few percent of bfloat16 weights, and nearly all changes are one ulp. So a payload has
one bit for each weight (changed or not), and two bits for each change. A change is up or down by one in the bit
pattern, or by a difference that follows in 8 or 16 bits. Differences are between bit patterns, modulo 2^16, so NaN,
infinities and signs need no special case.

Weights are encoded in chunks. An unchanged chunk takes 12 bytes. A chunk whose code would be longer than its weights is
sent uncoded. A payload begins with a table [num_chunks, 3] int32, with the numbers of changed weights (or `_RAW`), of
8-bit differences, and of 16-bit differences. Then each changed chunk has a bit for each weight; a bit for each change,
which is set if its difference follows; a bit for each change, which is set for "down" or "16 bits"; the int8
differences; and the int16 differences. The code runs on the CPU in numpy, which packs bits faster than a drive reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_Patterns: TypeAlias = NDArray[np.int16]
_Bytes: TypeAlias = NDArray[np.uint8]

_RAW = -1
_NUM_COLUMNS = 3
_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class StepDelta:
    """Encodes the difference between weights [numel] before and after a step, and applies it to the weights before the
    step."""

    chunk_numel: int = 64 * 1024

    def max_bytes(self, numel: int) -> int:
        """Return the largest payload of ``numel`` weights, in bytes."""
        return self._table_bytes(numel) + 2 * numel

    def encode(self, old: Tensor, new: Tensor, out: Tensor) -> int:
        """Write the changes from ``old`` to ``new`` to ``out``, uint8 of at least `max_bytes`. Returns the number of
        bytes written."""
        before, after = _patterns_of(old), _patterns_of(new)
        if old.dtype != new.dtype or before.shape != after.shape:
            raise ValueError(
                f"weights are {old.dtype} {list(old.shape)} before the step and {new.dtype} {list(new.shape)} after "
                "it; pass the same weights"
            )
        message, numel = _bytes_of(out), len(before)
        if len(message) < self.max_bytes(numel):
            raise ValueError(
                f"{len(message)} bytes are too few for the changes of {numel} weights; allocate max_bytes({numel}) = "
                f"{self.max_bytes(numel)}"
            )
        table = self._table_of(message, numel)
        end = self._table_bytes(numel)
        for k, start in enumerate(range(0, numel, self.chunk_numel)):
            stop = min(start + self.chunk_numel, numel)
            end += _encode_chunk(before[start:stop], after[start:stop], table[k], message[end:])
        return end

    def apply_(self, old: Tensor, message: Tensor) -> None:
        """Apply the changes in ``message`` to ``old``. Raises ValueError for a payload of other weights. Nothing is
        changed then, unless the error is in the bits of a chunk."""
        weights, content = _patterns_of(old), _bytes_of(message)
        numel = len(weights)
        if len(content) < self._table_bytes(numel):
            raise _damaged(numel, f"has {len(content)} bytes, but its table alone has {self._table_bytes(numel)}")
        table = self._table_of(content, numel).tolist()
        sizes = [min(self.chunk_numel, numel - start) for start in range(0, numel, self.chunk_numel)]
        ends = [self._table_bytes(numel)]
        for size, (changed, small, wide) in zip(sizes, table, strict=True):
            if not _RAW <= changed <= size or min(small, wide) < 0 or small + wide > max(changed, 0):
                raise _damaged(numel, f"counts {changed}, {small} and {wide} changes among {size} weights")
            ends.append(ends[-1] + _chunk_bytes(size, changed, small, wide))
        if ends[-1] != len(content):
            raise _damaged(numel, f"has {len(content)} bytes, but its table says {ends[-1]}")
        start = 0
        for size, row, begin, end in zip(sizes, table, ends[:-1], ends[1:], strict=True):
            if not _apply_chunk(weights[start : start + size], row, content[begin:end]):
                raise _damaged(numel, f"contradicts its table on weights {start} to {start + size}")
            start += size

    def _table_bytes(self, numel: int) -> int:
        return -(-numel // self.chunk_numel) * _NUM_COLUMNS * np.dtype(np.int32).itemsize

    def _table_of(self, message: _Bytes, numel: int) -> NDArray[np.int32]:
        return message[: self._table_bytes(numel)].view(np.int32).reshape(-1, _NUM_COLUMNS)


def _chunk_bytes(numel: int, changed: int, small: int, wide: int) -> int:
    if changed == _RAW:
        return 2 * numel
    return (-(-numel // 8) + 2 * -(-changed // 8) + small + 2 * wide) if changed else 0


def _encode_chunk(old: _Patterns, new: _Patterns, row: NDArray[np.int32], out: _Bytes) -> int:
    """Write a chunk and its row of the table. Returns the chunk's bytes."""
    is_changed = old != new
    places = np.flatnonzero(is_changed)
    differences = new[places] - old[places]
    follows = np.abs(differences) != 1
    following = differences[follows]
    small = following.astype(np.int8)
    is_wide = small != following
    wide = following[is_wide]
    num_bytes = _chunk_bytes(len(old), len(places), len(small) - len(wide), len(wide))
    if num_bytes >= 2 * len(old):
        row[:] = _RAW, 0, 0
        out[: 2 * len(old)] = new.view(np.uint8)
        return 2 * len(old)
    row[:] = len(places), len(small) - len(wide), len(wide)
    if len(places):
        second = differences < 0
        second[follows] = is_wide
        sections = (np.packbits(is_changed), np.packbits(follows), np.packbits(second), small[~is_wide], wide)
        np.concatenate([section.view(np.uint8) for section in sections], out=out[:num_bytes])
    return num_bytes


def _apply_chunk(weights: _Patterns, row: list[int], content: _Bytes) -> bool:
    """Apply the changes of a chunk. Returns False if they contradict the chunk's row of the table."""
    changed, num_small, num_wide = row
    if changed == _RAW:
        weights.view(np.uint8)[:] = content
        return True
    if changed == 0:
        return True
    ends = np.cumsum([-(-len(weights) // 8), -(-changed // 8), -(-changed // 8), num_small])
    bits, follow_bits, second_bits, small, wide = np.split(content, ends)
    places = np.flatnonzero(np.unpackbits(bits, count=len(weights)).view(np.bool_))  # bool, because bytes are slower
    follows = np.unpackbits(follow_bits, count=changed).view(np.bool_)
    second = np.unpackbits(second_bits, count=changed)
    is_wide = second[follows].view(np.bool_)
    if len(places) != changed or len(is_wide) != num_small + num_wide or np.count_nonzero(is_wide) != num_wide:
        return False
    differences = 1 - 2 * second.astype(np.int16)
    following = np.empty(len(is_wide), np.int16)
    following[~is_wide] = small.view(np.int8)
    following[is_wide] = np.frombuffer(wide.tobytes(), np.int16)  # not aligned
    differences[follows] = following
    weights[places] += differences
    return True


def _patterns_of(weights: Tensor) -> _Patterns:
    if (
        weights.dtype not in _DTYPES
        or weights.device.type != "cpu"
        or weights.dim() != 1
        or not weights.is_contiguous()
    ):
        raise ValueError(
            f"changes can be encoded for contiguous {' or '.join(map(str, _DTYPES))} [numel] on the CPU, not for "
            f"{weights.dtype} {list(weights.shape)} on {weights.device}; send other weights as they are"
        )
    patterns: NDArray[Any] = weights.detach().view(torch.int16).numpy()
    return patterns


def _bytes_of(message: Tensor) -> _Bytes:
    if (
        message.dtype != torch.uint8
        or message.device.type != "cpu"
        or message.dim() != 1
        or not message.is_contiguous()
    ):
        raise ValueError(
            f"a payload is contiguous torch.uint8 [num_bytes] on the CPU, not {message.dtype} {list(message.shape)} on "
            f"{message.device}; copy it"
        )
    content: NDArray[Any] = message.numpy()
    return content


def _damaged(numel: int, what: str) -> ValueError:
    return ValueError(f"the payload of changes to {numel} weights {what}: it is damaged or belongs to other weights")
