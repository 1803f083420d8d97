"""The records that live in RAM: between two commits their newest version may be there alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from hf_lohan.files import StorageError
from hf_lohan.store.layout import StoreLayout
from hf_lohan.store.resident_copies import ResidentCopy, take_copies
from hf_lohan.store.versions import Home, Versions

_WRITE_BACK_BYTES = 32 << 20


class RamHome:
    """What of a store's records is in RAM. Granules that are there only are those whose live home is `Home.RAM`."""

    def __init__(self, layout: StoreLayout, versions: Versions) -> None:
        self.copies: Mapping[tuple[str, str], ResidentCopy] = {}
        """By block and kind."""
        self.keeps_new = False
        """Whether what is written to these records stays in RAM alone, until it is written back for a commit."""
        self._layout = layout
        self._versions = versions

    def take(self, names: Iterable[tuple[str, str]], host_empty: Callable[[int], Tensor]) -> None:
        """Take the memory for the records with these (block, kind) ``names``; once. See `take_copies`."""
        assert not self.copies, "memory is taken once"
        self.copies = take_copies([self._layout.record(block, kind) for block, kind in names], host_empty)

    def keep_new(self, is_wanted: bool) -> None:
        """See `keeps_new`. To be changed while no write is under way."""
        self.keeps_new = is_wanted

    def commit(self) -> None:
        """All that was written is committed."""
        for copy in self.copies.values():
            copy.commit()

    def drop(self) -> None:
        """The store has gone back to its last commit; no request is under way."""
        for copy in self.copies.values():
            copy.drop()

    def begin_anew(self) -> None:
        """The store's records are other ones from now on, and not committed."""
        for copy in self.copies.values():
            copy.begin_anew()

    def keeps(self, block: str, kind: str) -> bool:
        """Whether a write to that record would go to RAM alone."""
        return self.keeps_new and (block, kind) in self.copies

    def put(self, block: str, kind: str, first: int, stop: int, content: Tensor) -> None:
        """Granules [first, stop) are ``content`` (uint8) from now on. It may be what was `lent`."""
        self._versions.begin_change(block, kind, first, stop)
        self.copies[block, kind].put(first * self._layout.record(block, kind).granule_bytes, content)
        self._versions.end_change(block, kind, first, stop)

    def borrow(self, block: str, kind: str, start_numel: int, numel: int) -> Tensor | None:
        """Where a write would go to RAM alone: the memory of these elements [numel], whole granules, to be changed in
        place and then written, before which nobody may read them. None where they are not there."""
        copy = self.copies.get((block, kind)) if self.keeps_new else None
        if copy is None:
            return None
        record = self._layout.record(block, kind)
        place = start_numel - record.first
        first, stop = place // record.granule_numel, -(-(place + numel) // record.granule_numel)
        lent = copy.lend(place * record.itemsize, numel * record.itemsize)
        if lent is None:
            return None
        self._versions.begin_change(block, kind, first, stop)
        return lent.view(getattr(torch, record.dtype))

    def read(self, block: str, kind: str, first: int, out: Tensor) -> None:
        """Granules from ``first`` on, which are there only, into ``out`` (uint8). Raises `StorageError` if what broke
        an update left them half changed."""
        record = self._layout.record(block, kind)
        if not self.copies[block, kind].read(first * record.granule_bytes, out):
            raise StorageError(
                f"{kind} of {block}, from element {first * record.granule_numel} on, was left half changed in memory",
                path=self._layout.paths[0].path,
                advice="go on from the last commit",
            )

    def only_here(self) -> Iterator[tuple[str, str, int, Tensor]]:
        """(block, kind, place in the record, values [numel]) of what is in RAM only and whole, in parts to be written
        at once. What was left half changed stays in flux."""
        for (block, kind), copy in self.copies.items():
            record = self._layout.record(block, kind)
            at_once = max(1, _WRITE_BACK_BYTES // record.granule_bytes)
            for run in self._versions.live(block, kind, 0, record.num_granules)[0]:
                for first in range(run.first, run.stop, at_once) if run.home is Home.RAM else ():
                    start = first * record.granule_bytes
                    stop = min(min(first + at_once, run.stop) * record.granule_bytes, record.num_bytes)
                    held = copy.held(start, stop - start)
                    if held is not None:
                        yield block, kind, first * record.granule_numel, held.view(getattr(torch, record.dtype))
