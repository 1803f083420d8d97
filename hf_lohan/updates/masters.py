"""Reads and writes elements of float32 masters that the store splits into bfloat16 weights, residuals and tie codes.

A tie code belongs to a whole run of residuals (see `optim/precision`), so a write of a part of a run reads the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from hf_lohan.model import Block, ranges, round_up
from hf_lohan.optim.precision import (
    NO_TIES,
    TIE_RUN_NUMEL,
    close_ties_,
    decode_master_,
    encode_master_,
    open_ties_,
)
from hf_lohan.store import Store
from hf_lohan.updates.missed_steps import UpToDateRecords

_WINDOW_NUMEL = 64 * TIE_RUN_NUMEL


MasterRecords: TypeAlias = Store | UpToDateRecords


def master_pieces(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the range [start, stop), relative to ``first``, of each piece in which `read_masters` reads elements."""
    origin = first // TIE_RUN_NUMEL * TIE_RUN_NUMEL
    for start, stop in ranges(last - origin, _WINDOW_NUMEL):
        yield max(origin + start, first) - first, origin + stop - first


def read_masters(records: MasterRecords, block: Block, first: int, last: int, bounce: Tensor) -> Iterator[Tensor]:
    """Yield the masters of the block's elements [first, last), which have residuals, in the pieces of `master_pieces`.
    ``bounce`` is an aligned uint8 tensor of at least a granule."""
    for start, stop, end in _windows(records, block, first, last):
        working = torch.empty(end - start, dtype=torch.bfloat16)
        records.read_unaligned(block.name, "param", start, working, bounce)
        residual, ties, _ = _opened(records, block, start, end, bounce)
        master = torch.empty(end - start)
        decode_master_(master, working, residual, ties)
        yield master[max(start, first) - start : stop - start]


def write_masters(
    records: MasterRecords,
    block: Block,
    first: int,
    master: Tensor,
    working: Tensor,
    residual: Tensor,
    bounce: Tensor,
    *,
    may_tear: bool = True,
    is_trained: bool = True,
) -> None:
    """Write ``master`` [numel], the float32 values of the block's elements from ``first`` on. ``working`` (bfloat16)
    and ``residual`` (int16) are scratch memory of the same shape. Without ``is_trained`` the elements have no
    residuals."""
    ties = encode_master_(master, working, residual)
    records.write_unaligned(block.name, "param", first, working, bounce, may_tear=may_tear)
    if is_trained:
        _write_residuals(records, block, first, residual, ties, bounce)


def _write_residuals(
    records: MasterRecords, block: Block, first: int, residual: Tensor, ties: Tensor, bounce: Tensor
) -> None:
    last, kind = first + residual.numel(), "master_residual"
    begin = first // TIE_RUN_NUMEL * TIE_RUN_NUMEL
    end = min(round_up(last, TIE_RUN_NUMEL), _end_of(records, block))
    if not len(ties) and bool((records.tie_codes(block.name, begin, end - begin) == NO_TIES).all()):
        records.write_unaligned(block.name, kind, first, residual, bounce)
        return
    whole = (round_up(first, TIE_RUN_NUMEL), last if last == end else last // TIE_RUN_NUMEL * TIE_RUN_NUMEL)
    edges = sorted({first, last, *(edge for edge in whole if first < edge < last)})
    for low, high in pairwise(edges):
        start, stop = low // TIE_RUN_NUMEL * TIE_RUN_NUMEL, min(round_up(high, TIE_RUN_NUMEL), end)
        inside = ties[(ties >= low - first) & (ties < high - first)] + first - start
        if (low, high) == (start, stop):
            values, all_ties = residual[low - first : high - first], inside
            codes = torch.empty(-(-values.numel() // TIE_RUN_NUMEL), dtype=torch.int16)
        else:
            values, before, codes = _opened(records, block, start, stop, bounce)
            values[low - start : high - start] = residual[low - first : high - first]
            stays = before[(before < low - start) | (before >= high - start)]
            all_ties = torch.cat([stays, inside]).sort().values
        close_ties_(values, all_ties, codes)
        records.set_tie_codes(block.name, start, stop - start, codes)
        records.write_unaligned(block.name, kind, start, values, bounce)


def round_anew(records: MasterRecords, block: Block, first: int, last: int, bounce: Tensor) -> int:
    """Round the weights [first, last) of a block to the nearest values of their masters again, and return the number of
    weights that differ. An older version of this library rounded a master up if it was half way between two values."""
    num_changed = 0
    for start, stop, end in _windows(records, block, first, last):
        assert start >= first, "a rank's part of a block begins at a run"
        working = torch.empty(end - start, dtype=torch.bfloat16)
        records.read_unaligned(block.name, "param", start, working, bounce)
        residual, ties, codes = _opened(records, block, start, end, bounce)
        master, before = torch.empty(end - start), working.clone()
        decode_master_(master, working, residual, ties)
        ties = encode_master_(master, working, residual)
        changed = int((working.view(torch.int16) != before.view(torch.int16))[: stop - start].sum())
        if changed:
            close_ties_(residual, ties, codes)
            records.set_tie_codes(block.name, start, end - start, codes)
            records.write_unaligned(block.name, "param", start, working, bounce)
            records.write_unaligned(block.name, "master_residual", start, residual, bounce)
            num_changed += changed
    return num_changed


def _windows(records: MasterRecords, block: Block, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, end) of whole runs [start, end) that cover elements [first, last) of a block. The elements
    [stop, end) are not in [first, last)."""
    origin, record_end = first // TIE_RUN_NUMEL * TIE_RUN_NUMEL, _end_of(records, block)
    for start, stop in ranges(last - origin, _WINDOW_NUMEL):
        end = min(origin + round_up(stop, TIE_RUN_NUMEL), record_end)
        yield origin + start, origin + stop, end


def _end_of(records: MasterRecords, block: Block) -> int:
    record = records.layout.record(block.name, "master_residual")
    return record.first + record.numel


def _opened(
    records: MasterRecords, block: Block, start: int, end: int, bounce: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the residuals of whole runs [start, end), the positions of their ties, and memory for new tie codes."""
    residual = torch.empty(end - start, dtype=torch.int16)
    records.read_unaligned(block.name, "master_residual", start, residual, bounce)
    codes = records.tie_codes(block.name, start, end - start)
    return residual, open_ties_(residual, codes), codes
