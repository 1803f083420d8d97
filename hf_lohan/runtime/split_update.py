"""A chunk's update in as many parts as there are threads: each verifies, updates and hashes its own.

Parts are large. Smaller ones, that fit a core's cache, make the second look at what was updated cheap, but their calls
cost more than that saves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_lohan.device import KernelThreads
from hf_lohan.optim import (
    MasterFormat,
    Segment,
    adamw_,
    adamw_in_tiles_,
    decode_master_,
    encode_master_,
    within,
)
from hf_lohan.runtime.block import ranges, round_up
from hf_lohan.storage import GRANULE_NUMEL, Checksums, RecordRead

MIN_PART_NUMEL = 16 * GRANULE_NUMEL
_CACHE_LINE_BYTES = 64


@dataclass(frozen=True)
class SplitUpdate:
    """The update of one chunk whose inputs have arrived, all [numel] but for records of which an element goes with many
    parameters."""

    form: MasterFormat
    records: Mapping[str, Tensor]
    """By kind; they are updated in place."""
    gradient: Tensor
    """float32 [numel]; it is scaled in place."""
    position: int
    """Of the chunk in its block's records."""
    reads: Sequence[RecordRead]
    """What filled these, not verified yet."""
    segments: Sequence[Segment]
    clip_coefficient: float
    private: Sequence[Tensor]
    """`MasterFormat.num_private_buffers`, each with as many bytes as the gradient has, or more: uint8."""
    checksums_of: Callable[[str, Tensor], Checksums]

    def run(self, threads: KernelThreads) -> dict[str, Checksums]:
        """Update the records. Returns checksums of their granules by kind. Raises CorruptionError; what the records
        hold then is of no use."""
        numel = self.gradient.numel()
        part_numel = max(MIN_PART_NUMEL, round_up(-(-numel // threads.num_threads), GRANULE_NUMEL))
        parts = list(ranges(numel, part_numel))
        found = threads.map(lambda index: self._update(*parts[index], index, len(parts)), range(len(parts)))
        assert all(read.is_verified for read in self.reads)
        return {kind: np.concatenate([of_part[kind] for of_part in found]) for kind in self.records}

    @torch.no_grad()
    def _update(self, start: int, stop: int, index: int, num_parts: int) -> dict[str, Checksums]:
        granules = start // GRANULE_NUMEL, -(-stop // GRANULE_NUMEL)
        for read in self.reads:
            read.verify(*granules)
        gradient = self.gradient[start:stop]
        if self.clip_coefficient != 1.0:  # also where it is NaN, as torch does
            gradient.mul_(self.clip_coefficient)
        records = {
            kind: record[slice(*self.form.elements(kind, start, stop))] for kind, record in self.records.items()
        }
        segments = within(self.segments, start, stop)
        if self.form.moment_codec is not None:
            adamw_in_tiles_(
                records,
                gradient,
                segments,
                self.form,
                position=self.position + start,
                workspace=_share(self.private[0], index, num_parts),
            )
        elif self.form.has_residual:
            master = self.private[0].view(torch.float32)[start:stop]
            scratch = self.private[1].view(torch.int32)[start:stop]
            decode_master_(master, records["param"], records["master_residual"])
            adamw_(master, gradient, records["exp_avg"], records["exp_avg_sq"], segments)
            encode_master_(master, records["param"], records["master_residual"], scratch)
        else:
            adamw_(records["param"], gradient, records["exp_avg"], records["exp_avg_sq"], segments)
        return {kind: self.checksums_of(kind, record) for kind, record in records.items()}


def _share(buffer: Tensor, index: int, num_parts: int) -> Tensor:
    """One of equal parts of a buffer, each of whole cache lines."""
    num_bytes = buffer.numel() // num_parts // _CACHE_LINE_BYTES * _CACHE_LINE_BYTES
    return buffer[index * num_bytes : (index + 1) * num_bytes]
