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
from hf_lohan.optim import Segment, adamw_, decode_master_, encode_master_, within
from hf_lohan.runtime.block import ranges, round_up
from hf_lohan.storage import GRANULE_NUMEL, Checksums, RecordRead

MIN_PART_NUMEL = 16 * GRANULE_NUMEL


@dataclass(frozen=True)
class SplitUpdate:
    """The update of one chunk whose inputs have arrived, all [numel]."""

    records: Mapping[str, Tensor]
    """By kind; they are updated in place."""
    gradient: Tensor
    """float32; it is scaled in place."""
    reads: Sequence[RecordRead]
    """What filled these, not verified yet."""
    segments: Sequence[Segment]
    clip_coefficient: float
    private: Sequence[Tensor]
    """Where masters are split, as many bytes as the gradient has for masters, and for scratch: uint8."""
    checksums_of: Callable[[Tensor], Checksums]

    def run(self, threads: KernelThreads) -> dict[str, Checksums]:
        """Update the records. Returns checksums of their granules by kind. Raises CorruptionError; what the records
        hold then is of no use."""
        numel = self.gradient.numel()
        part_numel = max(MIN_PART_NUMEL, round_up(-(-numel // threads.num_threads), GRANULE_NUMEL))
        found = threads.map(lambda part: self._update(*part), list(ranges(numel, part_numel)))
        assert all(read.is_verified for read in self.reads)
        return {kind: np.concatenate([of_part[kind] for of_part in found]) for kind in self.records}

    @torch.no_grad()
    def _update(self, start: int, stop: int) -> dict[str, Checksums]:
        for read in self.reads:
            read.verify(start, stop)
        gradient = self.gradient[start:stop]
        if self.clip_coefficient != 1.0:  # also where it is NaN, as torch does
            gradient.mul_(self.clip_coefficient)
        records = {kind: record[start:stop] for kind, record in self.records.items()}
        segments = within(self.segments, start, stop)
        if self.private:
            master = self.private[0].view(torch.float32)[start:stop]
            scratch = self.private[1].view(torch.int32)[start:stop]
            decode_master_(master, records["param"], records["master_residual"])
            adamw_(master, gradient, records["exp_avg"], records["exp_avg_sq"], segments)
            encode_master_(master, records["param"], records["master_residual"], scratch)
        else:
            adamw_(records["param"], gradient, records["exp_avg"], records["exp_avg_sq"], segments)
        return {kind: self.checksums_of(record) for kind, record in records.items()}
