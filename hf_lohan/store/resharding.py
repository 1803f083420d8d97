"""Records of a run's ranks, cut anew for another number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hf_lohan.device import mapped_empty
from hf_lohan.files import StorageError
from hf_lohan.store.layout import RecordSpec
from hf_lohan.store.store import Store

_PIECE_BYTES = 8 << 20


class NumberedAgreement:
    """Between stores of ranks that are not running: all have what each has."""

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id

    def announce_commit(self, number: int) -> None:
        """Nobody has to be told."""

    def wait_for_commit(self, number: int) -> None:
        """Nobody has to be waited for."""


def copy_records(old: Sequence[Store], new: Store) -> Iterator[int]:
    """Write all records of ``new`` as the ``old`` stores have them, each a part; yields the bytes of each piece. Reads
    are verified. Raises `CorruptionError`, `StorageError` and `CapacityError`; `StorageError` also where an element is
    in no store."""
    memory = mapped_empty(_PIECE_BYTES)
    for record in new.records:
        element = record.first
        while element < record.first + record.numel:
            store, stop = _who_has(old, record, element)
            stop = min(stop, record.first + record.numel, element + _piece_numel(record))
            piece = memory[: (stop - element) * record.itemsize].view(getattr(torch, record.dtype))
            store.read(record.block, record.kind, element, piece).wait()
            new.write(record.block, record.kind, element, piece).wait()
            element = stop
            yield piece.nbytes


def _who_has(old: Sequence[Store], record: RecordSpec, element: int) -> tuple[Store, int]:
    """The store with an element of the record's block, and where its part ends."""
    for store in old:
        if store.has(record.block, record.kind):
            part = store.layout.record(record.block, record.kind)
            if part.first <= element < part.first + part.numel:
                return store, part.first + part.numel
    raise StorageError(
        f"no element {element} of {record.kind} of {record.block} is in",
        path=" or ".join(store.paths[0].path for store in old),
        advice="give the stores of all ranks of the run",
    )


def _piece_numel(record: RecordSpec) -> int:
    return _PIECE_BYTES // record.granule_bytes * record.granule_numel
