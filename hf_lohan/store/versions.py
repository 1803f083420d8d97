"""The version of every granule, and the tie codes of the residuals of masters. A version is a home and a checksum. Both
have a committed value, and a live value after the current step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import accumulate, pairwise
from threading import Lock
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hf_lohan.store.layout import GRANULE_NUMEL, RecordSpec, granules_of

Checksums = npt.NDArray[np.uint64]
Homes = npt.NDArray[np.uint8]
TieCodes = npt.NDArray[np.int16]
"""The tie code of each run of `GRANULE_NUMEL` elements of the `master_residual` records (see `optim/precision`)."""
_NO_TIES = np.int16(-0x8000)


class Home(IntEnum):
    """The location of a granule's current bytes. FIRST and SECOND are the two copies of the record files."""

    FIRST = 0
    SECOND = 1
    NOWHERE = 2
    """Never written. The granule reads as zeros without I/O."""
    RAM = 3
    """The newest version is only in RAM. No commit contains this value."""


_FIRST, _SECOND, _NOWHERE, _RAM = map(np.uint8, Home)
"""The values in arrays, because Enum lookups are too slow for every request."""


class HomeRun(NamedTuple):
    """Consecutive granules [first, stop) of a record with the same home."""

    home: Home
    first: int
    stop: int


class Versions:
    """Home and checksum of every granule of the records, committed and live. A write goes to the home that is not
    committed, and becomes live. `commit` makes all live versions the committed ones, and `drop_drafts` returns to the
    committed versions. Elements with one home (all after `RecordSpec.versioned_numel`) are written in place. After they
    change committed bytes (`mark_torn`), the commit cannot be restored."""

    def __init__(self, records: Sequence[RecordSpec], *, num_homes: int) -> None:
        """Raise ValueError if only a part of a granule would have a second home."""
        self.num_homes = num_homes
        starts = list(accumulate((record.num_granules for record in records), initial=0))
        self._names = [(record.block, record.kind) for record in records]
        self._first = dict(zip(self._names, starts, strict=False))
        self._live_home: Homes = np.full(starts[-1], _NOWHERE)
        self._live_checksum: Checksums = np.zeros(starts[-1], np.uint64)
        runs = [
            (record, granules_of(record.numel, GRANULE_NUMEL)) for record in records if record.kind == "master_residual"
        ]
        first_runs = list(accumulate((num_runs for _, num_runs in runs), initial=0))
        self._first_run = {record.block: first for (record, _), first in zip(runs, first_runs, strict=False)}
        self._live_ties: TieCodes = np.full(first_runs[-1], _NO_TIES)
        # These three arrays are replaced and never changed, because a `Commit` refers to them too.
        self._committed_home, self._committed_checksum = self._live_home.copy(), self._live_checksum.copy()
        self._committed_ties = self._live_ties.copy()
        self._has_second = np.zeros(starts[-1], bool)
        self._is_in_flux = np.zeros(starts[-1], bool)
        """Granules in flux: a write is in progress, or a failed write left them half written."""
        self._is_frozen = np.ones(starts[-1], bool)
        has_two = (record for record in records if num_homes > 1 and record.versioned_numel == record.numel)
        self._is_always_beside = {(record.block, record.kind) for record in has_two}
        """Records whose writes never overwrite committed bytes."""
        for record, start in zip(records, starts, strict=False):
            if num_homes > 1:
                _refuse_half_versioned_granule(record)
            trained = slice(start, start + granules_of(record.versioned_numel, record.granule_numel))
            self._has_second[trained] = num_homes > 1
            self._is_frozen[trained] = False
        self.has_drafts = False
        """Whether anything was written after the last commit."""
        self.is_torn = False
        """Whether committed bytes were changed, so that the commit cannot be restored."""
        self._lock = Lock()

    def live(self, block: str, kind: str, first: int, stop: int) -> tuple[list[HomeRun], Checksums]:
        """Return the homes from which to read granules [first, stop) of a record, and the granules' checksums."""
        part = self._part(block, kind, first, stop)
        with self._lock:
            return _runs(self._live_home[part], first), self._live_checksum[part].copy()

    def tie_codes(self, block: str, first: int, stop: int) -> TieCodes:
        """Return the tie codes of runs [first, stop) of the residuals of a block's masters."""
        start = self._first_run[block]
        with self._lock:
            return self._live_ties[start + first : start + stop].copy()

    def set_tie_codes(self, block: str, first: int, codes: TieCodes) -> None:
        """Replace the tie codes from run ``first`` on, because the residuals are about to be written."""
        start = self._first_run[block] + first
        with self._lock:
            self._live_ties[start : start + len(codes)] = codes

    def is_written(self, block: str, kind: str, first: int, stop: int) -> bool:
        """Return whether all granules [first, stop) are on disk: written, not in flux, and not only in RAM."""
        part = self._part(block, kind, first, stop)
        with self._lock:
            return not ((self._live_home[part] >= _NOWHERE).any() or self._is_in_flux[part].any())

    def overwrites(self, block: str, kind: str, first: int, stop: int) -> bool:
        """Return whether a write to granules [first, stop) overwrites bytes of a commit that is not torn yet."""
        if (block, kind) in self._is_always_beside:
            return False
        part = self._part(block, kind, first, stop)
        with self._lock:
            return not self.is_torn and bool(self._is_in_place(part).any())

    def tears(self, block: str, kind: str, first: int, checksums: Checksums) -> bool:
        """Return whether writing granules with these ``checksums`` from ``first`` on changes committed bytes."""
        part = self._part(block, kind, first, first + len(checksums))
        with self._lock:
            return bool((self._is_in_place(part) & (self._committed_checksum[part] != checksums)).any())

    def mark_torn(self) -> None:
        """Record that committed bytes are about to change."""
        self.is_torn = True

    def begin_write(self, block: str, kind: str, first: int, stop: int) -> list[HomeRun]:
        """Return the homes to which to write granules [first, stop) of a record. If there is a second home, committed
        bytes are not overwritten. The granules are in flux until `end_write`."""
        part = self._part(block, kind, first, stop)
        with self._lock:
            self.has_drafts = True
            self._is_in_flux[part] = True
            to_second = (self._committed_home[part] == _FIRST) & self._has_second[part]
        return _runs(np.where(to_second, _SECOND, _FIRST), first)

    def end_write(self, block: str, kind: str, first: int, targets: Sequence[HomeRun], checksums: Checksums) -> None:
        """Record that the granules from ``first`` on are written to ``targets``."""
        part = self._part(block, kind, first, first + len(checksums))
        with self._lock:
            for run in targets:
                self._live_home[self._part(block, kind, run.first, run.stop)] = run.home
            self._live_checksum[part] = checksums
            self._is_in_flux[part] = False

    def begin_change(self, block: str, kind: str, first: int, stop: int) -> None:
        """Record that granules [first, stop) are changed in RAM. They are in flux until `end_change`."""
        part = self._part(block, kind, first, stop)
        with self._lock:
            self.has_drafts = True
            self._is_in_flux[part] = True

    def end_change(self, block: str, kind: str, first: int, stop: int) -> None:
        """Record that the granules are new, and only in RAM."""
        part = self._part(block, kind, first, stop)
        with self._lock:
            self._live_home[part] = _RAM
            self._is_in_flux[part] = False

    def clear(self) -> None:
        """Make all records except frozen parts read as zeros until they are written. The committed versions stay. No
        write may be in progress.

        Frozen parts keep their committed version. Small parameters share granules and are loaded one after the other. A
        load must not overwrite the only version of a granule's other parameters with zeros.
        """
        with self._lock:
            stays = self._is_frozen & (self._committed_home == _FIRST) & (not self.is_torn)
            self._live_home[:] = np.where(stays, self._committed_home, _NOWHERE)
            self._live_checksum[:] = np.where(stays, self._committed_checksum, np.uint64(0))
            self._live_ties[:] = _NO_TIES
            self._is_in_flux[:] = False
            self.has_drafts = True

    def drop_drafts(self) -> None:
        """Return to the committed versions. The commit must not be torn, and no write may be in progress."""
        assert not self.is_torn, "the commit has been overwritten"
        with self._lock:
            self._live_home[:] = self._committed_home
            self._live_checksum[:] = self._committed_checksum
            self._live_ties[:] = self._committed_ties
            self._is_in_flux[:] = False
            self.has_drafts = False

    def first_in_flux(self) -> tuple[str, str, int] | None:
        """Return the block, kind and number of the first granule in flux, or None."""
        with self._lock:
            in_flux = np.flatnonzero(self._is_in_flux)
        if not len(in_flux):
            return None
        index = int(in_flux[0])
        block, kind = max((name for name in self._names if self._first[name] <= index), key=self._first.__getitem__)
        return block, kind, index - self._first[block, kind]

    def draft(self) -> tuple[Homes, Checksums, TieCodes]:
        """Return the current home and checksum of all granules, and all tie codes. The caller writes them to a commit
        file, and then passes them to `commit`."""
        with self._lock:
            assert not (self._live_home == _RAM).any(), "RAM must be written back before a commit"
            return self._live_home.copy(), self._live_checksum.copy(), self._live_ties.copy()

    def commit(self, home: Homes, checksum: Checksums, ties: TieCodes | None) -> None:
        """Make the result of `draft` the committed versions. If ``ties`` is None, there are no ties. No write may have
        begun after `draft`."""
        with self._lock:
            self._committed_home, self._committed_checksum = home, checksum
            self._committed_ties = np.full_like(self._live_ties, _NO_TIES) if ties is None else ties
            self.has_drafts = self.is_torn = False

    def restore(self, home: Homes, checksum: Checksums, ties: TieCodes | None, *, is_torn: bool = False) -> None:
        """Adopt the versions of a commit, as in `commit`. Raises ValueError if they belong to other records.

        If the commit ``is_torn``, granules with one home are in flux, because their content is unknown.
        """
        if home.shape != self._live_home.shape or checksum.shape != self._live_checksum.shape:
            raise ValueError(f"versions of {home.size} granules, not of {self._live_home.size}")
        if home.dtype != np.dtype(np.uint8) or checksum.dtype != np.dtype(np.uint64):
            raise ValueError(f"versions of types {home.dtype} and {checksum.dtype}")
        if ties is not None and (ties.shape != self._live_ties.shape or ties.dtype != np.dtype(np.int16)):
            raise ValueError(f"{ties.size} tie codes of type {ties.dtype}, not {self._live_ties.size} of int16")
        if (home > _NOWHERE).any() or ((home == _SECOND) & ~self._has_second).any():
            raise ValueError("versions in homes that do not exist")
        self.commit(home, checksum, ties)
        self.drop_drafts()
        self.is_torn = is_torn
        self._is_in_flux[:] = is_torn & self._is_in_place(slice(None))

    def _is_in_place(self, part: slice) -> npt.NDArray[np.bool_]:
        """Return a mask of the granules in which a write would overwrite committed bytes."""
        in_place: npt.NDArray[np.bool_] = (self._committed_home[part] == _FIRST) & ~self._has_second[part]
        return in_place

    def _part(self, block: str, kind: str, first: int, stop: int) -> slice:
        start = self._first[block, kind]
        return slice(start + first, start + stop)


def _refuse_half_versioned_granule(record: RecordSpec) -> None:
    if record.versioned_numel % record.granule_numel and record.versioned_numel != record.numel:
        raise ValueError(
            f"record {record.block!r} has versioned_numel {record.versioned_numel} of {record.numel}; round it to a "
            f"multiple of {record.granule_numel}, so that no granule is partly versioned"
        )


def _runs(homes: Homes, first: int) -> list[HomeRun]:
    return [HomeRun(Home(home), first + start, first + stop) for home, start, stop in runs(homes)]


def runs(values: npt.NDArray[np.uint8]) -> Iterator[tuple[int, int, int]]:
    """Yield (value, start, stop) of each run of equal values."""
    content = values.tobytes()
    if content and content.count(content[0]) == len(content):  # the common case, which is much cheaper
        yield content[0], 0, len(content)
        return
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    for start, stop in pairwise(edges):
        if start < stop:
            yield int(values[start]), start, stop
