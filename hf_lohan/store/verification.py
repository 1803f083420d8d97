"""Read everything that is committed and compare it with its checksums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hf_lohan.device import mapped_empty
from hf_lohan.files import CorruptionError, ForeignStoreError, StorageError
from hf_lohan.store.layout import RecordSpec
from hf_lohan.store.store import Store

_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class VerifiedRecord:
    """A record that was read to its end, and what is wrong with it."""

    record: RecordSpec
    errors: list[CorruptionError]


def verify(store: Store) -> Iterator[VerifiedRecord]:
    """Read the records of a store one after the other. Raises `StorageError` if the drive fails to read."""
    memory = mapped_empty(_PIECE_BYTES)
    for record in store.records:
        errors: list[CorruptionError] = []
        granule_numel = record.granule_numel
        piece_numel = _PIECE_BYTES // (granule_numel * record.itemsize) * granule_numel
        end = record.first + record.numel
        for start in range(record.first, end, piece_numel):
            stop = min(start + piece_numel, end)
            if _error(store, record, start, stop, memory) is not None:
                for first in range(start, stop, granule_numel):
                    error = _error(store, record, first, min(first + granule_numel, stop), memory)
                    errors += [error] if error is not None else []
        yield VerifiedRecord(record, errors)


def refuse_other_parts(stores: Sequence[Store]) -> None:
    """Raise `ForeignStoreError` unless the stores, in the order of their ranks, are the parts of one model."""
    stops: dict[tuple[str, str], int] = {}
    for store in stores:
        for record in store.records:
            stop = stops.get((record.block, record.kind), 0)
            if record.first != stop:
                where = " and ".join(store.paths[0].path for store in stores)
                raise ForeignStoreError(
                    f"{where} are not the parts of one model, in the order of ranks: {record.kind} of {record.block} "
                    f"goes on with element {record.first} in {store.paths[0].path}, after {stop} elements before it; "
                    "bring back the folders of all ranks as the run left them"
                )
            stops[record.block, record.kind] = record.first + record.numel


def damaged_files(store: Store) -> list[StorageError]:
    """What is wrong with the files beside the records that the last commit names: its log, and its model's files."""
    errors: list[StorageError] = []
    for check in (lambda: store.log, lambda: store.model_folder):
        try:
            check()
        except StorageError as error:
            errors.append(error)
    return errors


def _error(store: Store, record: RecordSpec, start: int, stop: int, memory: torch.Tensor) -> CorruptionError | None:
    out = memory[: (stop - start) * record.itemsize].view(getattr(torch, record.dtype))
    try:
        store.read(record.block, record.kind, start, out).wait()
    except CorruptionError as error:
        return error
    return None
