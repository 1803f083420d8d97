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

from hf_lohan.model import ranges, round_up
from hf_lohan.optim import MasterFormat, Segment, update_records_, within
from hf_lohan.store import GRANULE_NUMEL, Checksums, RecordRead
from hf_lohan.threads import KernelThreads

MIN_PART_NUMEL = 16 * GRANULE_NUMEL


@dataclass(frozen=True)
class SplitUpdate:
    """The update of one chunk whose inputs have arrived, all [numel] but for records of which an element goes with many
    parameters."""

    form: MasterFormat
    records: Mapping[str, Tensor]
    """By kind; they are updated in place."""
    gradient: Tensor
    """float32; it is scaled in place."""
    position: int
    """Of the chunk in its block's records."""
    reads: Sequence[RecordRead]
    """What filled these, not verified yet."""
    segments: Sequence[Segment]
    clip_coefficient: float
    private: Sequence[Tensor]
    """`MasterFormat.num_private_buffers`, each with 4 * numel bytes, or more: uint8."""
    checksums_of: Callable[[str, Tensor], Checksums]
    granule_numel: int = GRANULE_NUMEL
    """Parameters that go with a granule."""

    @property
    def numel(self) -> int:
        """Parameters of the chunk."""
        return self.records["param"].numel()

    def run(self, threads: KernelThreads) -> dict[str, Checksums]:
        """Update the records. Returns checksums of their granules by kind. Raises CorruptionError; what the records
        hold then is of no use."""
        part_numel = max(MIN_PART_NUMEL, round_up(-(-self.numel // threads.num_threads), self.granule_numel))
        found = threads.map(lambda part: self._update(*part), list(ranges(self.numel, part_numel)))
        assert all(read.is_verified for read in self.reads)
        return {kind: np.concatenate([of_part[kind] for of_part in found]) for kind in self.records}

    @torch.no_grad()
    def _update(self, start: int, stop: int) -> dict[str, Checksums]:
        granules = start // self.granule_numel, -(-stop // self.granule_numel)
        for read in self.reads:
            read.verify(*granules)
        gradient = self.gradient[start:stop]
        if self.clip_coefficient != 1.0:  # also where it is NaN, as torch does
            gradient.mul_(self.clip_coefficient)
        is_last = stop == self.numel  # what is left of the buffers is its
        records = self._records(start, stop)
        update_records_(
            records,
            gradient,
            within(self.segments, start, stop),
            self.form,
            position=self.position + start,
            private=[buffer[4 * start : None if is_last else 4 * stop] for buffer in self.private],
        )
        return {kind: self.checksums_of(kind, record) for kind, record in records.items()}

    def _records(self, start: int, stop: int) -> dict[str, Tensor]:
        """What goes with these parameters."""
        return {kind: record[slice(*self.form.elements(kind, start, stop))] for kind, record in self.records.items()}
