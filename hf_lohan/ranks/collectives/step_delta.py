"""What a step changed in weights of 16 bits, coded without loss: whoever has those before it gets the same bits.

A fine-tune's step changes a few percent of bfloat16 weights, nearly all of them by one ulp. So a message has a bit for
each weight that says whether it changed, and two bits for each that did: up or down by one in its bit pattern, or by a
difference that follows in 8 bits or in 16. Differences are of bit patterns, modulo 2^16: NaN, infinities and changes of
sign are patterns as others are.

Weights are coded in chunks. One in which nothing changed takes 12 bytes; one whose code would be longer than its
weights is sent as it is. A message is a table [num_chunks, 3] int32 (weights changed, or `_RAW`; differences in 8 bits;
in 16 bits), then for each chunk, where there is something to say: a bit a weight; a bit a change that says whether its
difference follows; a bit a change, which is set for "down" or for "16 bits"; the differences int8; the differences
int16. It runs on the CPU, in numpy, whose bits pack faster than a drive reads.
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
    """Weights [numel] before and after a step to a message, and, where those before it are, the weights after it."""

    chunk_numel: int = 64 * 1024

    def max_bytes(self, numel: int) -> int:
        """What a message of so many weights takes at the most."""
        return self._table_bytes(numel) + 2 * numel

    def encode(self, old: Tensor, new: Tensor, out: Tensor) -> int:
        """Write to ``out``, uint8 of `max_bytes` or more, what leads from ``old`` to ``new``. Returns its bytes."""
        before, after = _patterns_of(old), _patterns_of(new)
        if old.dtype != new.dtype or before.shape != after.shape:
            raise ValueError(
                f"weights before a step are {old.dtype} {list(old.shape)}, after it {new.dtype} {list(new.shape)}: "
                "give the same ones"
            )
        message, numel = _bytes_of(out), len(before)
        if len(message) < self.max_bytes(numel):
            raise ValueError(
                f"{len(message)} bytes for a message of {numel} weights; give it max_bytes({numel}), "
                f"{self.max_bytes(numel)}"
            )
        table = self._table_of(message, numel)
        end = self._table_bytes(numel)
        for k, start in enumerate(range(0, numel, self.chunk_numel)):
            stop = min(start + self.chunk_numel, numel)
            end += _encode_chunk(before[start:stop], after[start:stop], table[k], message[end:])
        return end

    def apply_(self, old: Tensor, message: Tensor) -> None:
        """Turn ``old`` into what was ``new``. A message that is not one of such weights raises ValueError, before
        anything is changed unless its bits contradict one another."""
        weights, content = _patterns_of(old), _bytes_of(message)
        numel = len(weights)
        if len(content) < self._table_bytes(numel):
            raise _damaged(numel, f"has {len(content)} bytes, its table alone {self._table_bytes(numel)}")
        table = self._table_of(content, numel).tolist()
        sizes = [min(self.chunk_numel, numel - start) for start in range(0, numel, self.chunk_numel)]
        ends = [self._table_bytes(numel)]
        for size, (changed, small, wide) in zip(sizes, table, strict=True):
            if not _RAW <= changed <= size or min(small, wide) < 0 or small + wide > max(changed, 0):
                raise _damaged(numel, f"counts {changed}, {small} and {wide} changes among {size} weights")
            ends.append(ends[-1] + _chunk_bytes(size, changed, small, wide))
        if ends[-1] != len(content):
            raise _damaged(numel, f"has {len(content)} bytes, by its table {ends[-1]}")
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
    """Whether what a chunk says agrees with its row of the table; if so, it is applied."""
    changed, num_small, num_wide = row
    if changed == _RAW:
        weights.view(np.uint8)[:] = content
        return True
    if changed == 0:
        return True
    ends = np.cumsum([-(-len(weights) // 8), -(-changed // 8), -(-changed // 8), num_small])
    bits, follow_bits, second_bits, small, wide = np.split(content, ends)
    places = np.flatnonzero(np.unpackbits(bits, count=len(weights)).view(np.bool_))  # of bytes it is slow
    follows = np.unpackbits(follow_bits, count=changed).view(np.bool_)
    second = np.unpackbits(second_bits, count=changed)
    is_wide = second[follows].view(np.bool_)
    if len(places) != changed or len(is_wide) != num_small + num_wide or np.count_nonzero(is_wide) != num_wide:
        return False
    differences = 1 - 2 * second.astype(np.int16)
    following = np.empty(len(is_wide), np.int16)
    following[~is_wide] = small.view(np.int8)
    following[is_wide] = np.frombuffer(wide.tobytes(), np.int16)  # which begin at any byte
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
            f"a step's changes are coded for {' or '.join(map(str, _DTYPES))} [numel] in one piece in RAM, not for "
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
            f"a message is torch.uint8 [num_bytes] in one piece in RAM, not {message.dtype} {list(message.shape)} on "
            f"{message.device}"
        )
    content: NDArray[Any] = message.numpy()
    return content


def _damaged(numel: int, what: str) -> ValueError:
    return ValueError(f"the message of a step's changes to {numel} weights {what}: it is damaged, or of other weights")
