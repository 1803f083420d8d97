"""Gives tensors addresses in one piece of memory. Tensors overlap only if they exist at different times.

As in MEMO, addresses are planned for a known step. Best fit by size replaces MEMO's mixed integer program,
because in all traced steps it needs no more memory than the tensors that exist at one time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

ALIGN_BYTES = 512
"""Addresses and sizes are multiples of this, as in PyTorch's allocator."""
_PART = 32
"""Length of a range of times. Only tensors that exist in the same range are compared."""


class Life(NamedTuple):
    """A tensor that exists from time ``born`` to time ``died`` (exclusive)."""

    num_bytes: int
    born: int
    died: int


@dataclass(frozen=True, slots=True)
class AddressPlan:
    """Offsets of tensors in one piece of memory. Tensors that exist at the same time do not overlap."""

    offsets: tuple[int, ...]
    """Offset of each tensor in bytes."""
    num_bytes: int
    """Bytes of the memory."""


def aligned(num_bytes: int) -> int:
    """Return the bytes that a tensor takes, at least one unit."""
    return max(ALIGN_BYTES, -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES)


def live_bytes(tensors: Sequence[Life]) -> int:
    """Return the largest number of bytes that exist at one time."""
    changes = np.zeros(max((tensor.died for tensor in tensors), default=0) + 1, dtype=np.int64)
    for tensor in tensors:
        changes[tensor.born] += aligned(tensor.num_bytes)
        changes[tensor.died] -= aligned(tensor.num_bytes)
    return int(np.cumsum(changes).max(initial=0))


def plan_addresses(tensors: Sequence[Life]) -> AddressPlan:
    """Return addresses that need hardly more memory than the tensors that exist at one time.

    Tensors are placed one after the other, each into the smallest gap that is free during its life. The largest are
    placed first. If that needs more than `live_bytes`, other orders are tried too, and the best is returned.
    """
    least_bytes, lives = live_bytes(tensors), [Life(aligned(one.num_bytes), one.born, one.died) for one in tensors]
    best = AddressPlan((0,) * len(lives), 1 + sum(num_bytes for num_bytes, _, _ in lives))
    for order in _ORDERS:
        best = _place(lives, order, below_bytes=best.num_bytes) or best
        if best.num_bytes <= least_bytes:
            break
    return best


_ORDERS: tuple[Callable[[int, int, int], tuple[int, ...]], ...] = (
    lambda num_bytes, born, died: (-num_bytes, born),
    lambda num_bytes, born, died: (-num_bytes * (died - born), born),
    lambda num_bytes, born, died: (born - died, -num_bytes),
    lambda num_bytes, born, died: (born, -num_bytes),
)
"""Sort keys: by size, by size times life, by life, by birth."""


def _place(
    lives: Sequence[Life], order: Callable[[int, int, int], tuple[int, ...]], below_bytes: int
) -> AddressPlan | None:
    """Place tensors in an order, each at the best fit. Returns None if that needs at least ``below_bytes``."""
    offsets, num_bytes = [0] * len(lives), 0
    placed: list[list[tuple[int, int, int, int]]] = [
        [] for _ in range(max((d for *_, d in lives), default=0) // _PART + 1)
    ]
    """For each range of `_PART` times, (start, stop, born, died) of the tensors that exist in it. A tensor is compared
    only with tensors of the ranges in which it exists."""
    for number in sorted(range(len(lives)), key=lambda n: order(*lives[n])):
        size, born, died = lives[number]
        first, last = born // _PART, max(born, died - 1) // _PART
        beside = [other for other in placed[first] if other[2] < died and other[3] > born]
        for part in range(first + 1, last + 1):
            start = part * _PART
            beside += [other for other in placed[part] if start <= other[2] < died]
        offset = _best_fit(beside, size)
        if offset + size >= below_bytes:
            return None
        life = (offset, offset + size, born, died)
        for part in range(first, last + 1):
            placed[part].append(life)
        offsets[number], num_bytes = offset, max(num_bytes, offset + size)
    return AddressPlan(tuple(offsets), num_bytes)


def _best_fit(beside: list[tuple[int, int, int, int]], num_bytes: int) -> int:
    """Return the start of the smallest gap between intervals (start, stop, ...) that has ``num_bytes``, or the end of
    all intervals."""
    beside.sort()
    reached, best, least = 0, -1, 0
    for start, stop, _, _ in beside:
        gap = start - reached
        if gap >= num_bytes and (best < 0 or gap < least):
            best, least = reached, gap
        if stop > reached:
            reached = stop
    return best if best >= 0 else reached
