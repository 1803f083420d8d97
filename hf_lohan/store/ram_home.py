"""The part of a store that is in RAM. Between two commits, the newest version of a granule may exist only in RAM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from hf_lohan.files import StorageError
from hf_lohan.store.layout import StoreLayout
from hf_lohan.store.resident_copies import ResidentCopy
from hf_lohan.store.versions import Home, Versions

_WRITE_BACK_BYTES = 32 << 20


class RamHome:
    """The part of a store's records in RAM. A granule that exists only in RAM has the live home `Home.RAM`."""

    def __init__(self, layout: StoreLayout, versions: Versions) -> None:
        self.copies: Mapping[tuple[str, str], ResidentCopy] = {}
        """The copies, by block and kind."""
        self.keeps_new = False
        """See `keep_new`."""
        self._layout = layout
        self._versions = versions

    def allocate_copies(self, names: Iterable[tuple[str, str]], host_empty: Callable[[int], Tensor]) -> None:
        """Allocate an empty copy of the records of these (block, kind) ``names``. May be called once. ``host_empty``
        returns a page-aligned uint8 tensor [num_bytes]."""
        assert not self.copies, "memory is already allocated"
        records = {name: self._layout.record(*name) for name in names}
        if not records:
            return
        sizes = [record.num_bytes for record in records.values()]
        parts = zip(records.items(), host_empty(sum(sizes)).split(sizes), strict=True)
        self.copies = {name: ResidentCopy(part, record.granule_bytes) for (name, record), part in parts}

    def keep_new(self, is_wanted: bool) -> None:
        """Set whether writes to these records stay only in RAM until the next commit writes them back. Call this while
        no write is in progress."""
        self.keeps_new = is_wanted

    def commit(self) -> None:
        for copy in self.copies.values():
            copy.commit()

    def drop_drafts(self) -> None:
        """Return the copies to the last commit, as the store does. No request may be in progress."""
        for copy in self.copies.values():
            copy.drop_drafts()

    def clear(self) -> None:
        """Empty all copies. The store is cleared, and its records read as zeros until they are written."""
        for copy in self.copies.values():
            copy.clear()

    def keeps_write(self, block: str, kind: str) -> bool:
        """Return whether a write to the record would go only to RAM."""
        return self.keeps_new and (block, kind) in self.copies

    def store_granules(self, block: str, kind: str, first: int, stop: int, content: Tensor) -> None:
        """Replace granules [first, stop) by ``content`` (uint8), which may be borrowed memory."""
        self._versions.begin_change(block, kind, first, stop)
        self.copies[block, kind].store(first * self._layout.record(block, kind).granule_bytes, content)
        self._versions.end_change(block, kind, first, stop)

    def borrow(self, block: str, kind: str, start_numel: int, numel: int) -> Tensor | None:
        """Return the memory [numel] of these elements, to be changed in place and then written. The elements are whole
        granules. Nobody may read them before they are written. Returns None if the elements are not in RAM, or if a
        write to them would also go to the drives.
        """
        copy = self.copies.get((block, kind)) if self.keeps_new else None
        if copy is None:
            return None
        record = self._layout.record(block, kind)
        offset = start_numel - record.first
        first, stop = offset // record.granule_numel, -(-(offset + numel) // record.granule_numel)
        memory = copy.borrow(offset * record.itemsize, numel * record.itemsize)
        if memory is None:
            return None
        self._versions.begin_change(block, kind, first, stop)
        return memory.view(getattr(torch, record.dtype))

    def read_granules(self, block: str, kind: str, first: int, out: Tensor) -> None:
        """Copy granules that exist only in RAM, from ``first`` on, to ``out`` (uint8). Raises `StorageError` if a
        failed update left them half changed."""
        record = self._layout.record(block, kind)
        if not self.copies[block, kind].try_read(first * record.granule_bytes, out):
            raise StorageError(
                f"a failed update left {kind} of {block} incomplete in RAM, from element "
                f"{first * record.granule_numel} on; the last commit is in",
                path=self._layout.paths[0].path,
                advice="resume from the last step",
            )

    def unwritten(self) -> Iterator[tuple[str, str, int, Tensor]]:
        """Yield (block, kind, offset in the record, values [numel]) of all granules that exist only in RAM. Each item
        is one write. Half-changed granules are left out and stay in flux."""
        for (block, kind), copy in self.copies.items():
            record = self._layout.record(block, kind)
            num_at_once = max(1, _WRITE_BACK_BYTES // record.granule_bytes)
            for run in self._versions.live(block, kind, 0, record.num_granules)[0]:
                for first in range(run.first, run.stop, num_at_once) if run.home is Home.RAM else ():
                    start = first * record.granule_bytes
                    stop = min(min(first + num_at_once, run.stop) * record.granule_bytes, record.num_bytes)
                    held = copy.held(start, stop - start)
                    if held is not None:
                        yield block, kind, first * record.granule_numel, held.view(getattr(torch, record.dtype))
