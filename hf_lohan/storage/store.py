"""The on-disk home of all records of one model, over one or several SSD paths."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from torch import Tensor

from hf_lohan.storage.directories import check_free_space, resolve_capacities, validate_directories
from hf_lohan.storage.errors import ForeignStoreError
from hf_lohan.storage.io_engine import IoEngine
from hf_lohan.storage.layout import DEFAULT_STRIPE_BYTES, RecordSpec, StoreLayout, StorePath, check_capacities
from hf_lohan.storage.lock import LOCK_NAME, DirectoryLock
from hf_lohan.storage.manifest import (
    MANIFEST_NAME,
    Manifest,
    ModelIdentity,
    assemble,
    read_manifest,
    remove_manifests,
    write_manifests,
)
from hf_lohan.storage.record_files import RecordFiles
from hf_lohan.storage.request import IoRequest

logger = logging.getLogger(__name__)

RECORDS_NAME = "records.bin"
SCRATCH_NAME = "gradients"


class Store:
    """Preallocated records under a lock, until `close`; make one with `create` or `open`.

    A run that was killed leaves a store that opens again: the kernel takes the lock back.
    """

    def __init__(
        self,
        manifest: Manifest,
        paths: Sequence[StorePath],
        files: RecordFiles,
        engine: IoEngine,
        held: ExitStack,
    ) -> None:
        self._manifest = manifest
        self._paths = tuple(paths)
        self._files = files
        self._engine = engine
        self._held = held  # closes files, then locks
        self._scratches: dict[str, RecordFiles] = {}

    @classmethod
    def create(
        cls,
        paths: Sequence[StorePath],
        records: Sequence[RecordSpec],
        *,
        model: ModelIdentity,
        engine: IoEngine,
        stripe_bytes: int = DEFAULT_STRIPE_BYTES,
    ) -> Store:
        """A new store of zeros over ``paths``; one of the same model that is there is replaced.

        Raises before anything is written: ValueError and `StorageError` for unusable paths, `CapacityError`,
        `ForeignStoreError`, `StoreInUseError`. If it fails later, no records are left behind.
        """
        validate_directories(paths)
        ours = (RECORDS_NAME, _file_name(SCRATCH_NAME))
        resolved = resolve_capacities(paths, ours)
        layout = StoreLayout(tuple(records), resolved, stripe_bytes)
        layout.check_capacity()
        check_free_space(resolved, layout.file_bytes, ours)
        directories = [path.path for path in resolved]
        _refuse_foreign(directories, model)
        with ExitStack() as held:
            _lock(directories, held)
            _refuse_foreign(directories, model)  # again: now nobody else can change it
            if any((Path(directory) / MANIFEST_NAME).exists() for directory in directories):
                logger.warning("replacing the store of the same model in %s", ", ".join(directories))
            remove_manifests(directories)
            _remove_stale_scratch(directories)
            files = RecordFiles.create(layout, directories, RECORDS_NAME, engine)
            created = datetime.now(UTC).isoformat(timespec="seconds")
            manifest = Manifest(uuid.uuid4().hex, created, model, layout)
            try:
                write_manifests(manifest, directories)
            except BaseException:
                files.remove()
                remove_manifests(directories)
                raise
            held.callback(files.close)
            return cls(manifest, resolved, files, engine, held.pop_all())

    @classmethod
    def open(cls, paths: Sequence[StorePath], *, model: ModelIdentity | None, engine: IoEngine) -> Store:
        """The store in ``paths``, given in any order; ``model=None`` takes any model's.

        Raises ValueError and `StorageError` for unusable paths or a missing or damaged store, `CapacityError`
        if it is larger than a given capacity, `ForeignStoreError`, `StoreInUseError`.
        """
        validate_directories(paths)
        assemble(paths)  # before the lock, which would leave a file where no store is
        with ExitStack() as held:
            _lock([path.path for path in paths], held)
            manifest, ordered = assemble(paths)
            directories = [path.path for path in ordered]
            if model is not None:
                manifest.refuse_other(model, directories[0])
            check_capacities(ordered, manifest.layout.file_bytes)
            _remove_stale_scratch(directories)
            files = RecordFiles.open(manifest.layout, directories, RECORDS_NAME, engine)
            held.callback(files.close)
            resolved = resolve_capacities(ordered, [RECORDS_NAME])
            return cls(manifest, resolved, files, engine, held.pop_all())

    @property
    def records(self) -> tuple[RecordSpec, ...]:
        """All records in their order on disk."""
        return self._files.records

    @property
    def model(self) -> ModelIdentity:
        return self._manifest.model

    @property
    def paths(self) -> tuple[StorePath, ...]:
        """Its paths in their order in the store, with capacities in bytes."""
        return self._paths

    @property
    def size_bytes(self) -> int:
        """Exact size of all its data files, open scratch files included."""
        return sum(files.size_bytes for files in (self._files, *self._open_scratches().values()))

    def has(self, block: str, kind: str) -> bool:
        return self._files.has(block, kind)

    def read(self, block: str, kind: str, start_numel: int, out: Tensor) -> IoRequest:
        """See `RecordFiles.read`."""
        return self._files.read(block, kind, start_numel, out)

    def write(self, block: str, kind: str, start_numel: int, source: Tensor) -> IoRequest:
        """See `RecordFiles.write`."""
        return self._files.write(block, kind, start_numel, source)

    def read_unaligned(self, block: str, kind: str, start_numel: int, out: Tensor, bounce: Tensor) -> None:
        """See `RecordFiles.read_unaligned`."""
        self._files.read_unaligned(block, kind, start_numel, out, bounce)

    def write_unaligned(
        self, block: str, kind: str, start_numel: int, source: Tensor, bounce: Tensor
    ) -> None:
        """See `RecordFiles.write_unaligned`."""
        self._files.write_unaligned(block, kind, start_numel, source, bounce)

    def sync(self) -> None:
        """See `RecordFiles.sync`."""
        self._files.sync()

    def scratch(self, records: Sequence[RecordSpec], name: str = SCRATCH_NAME) -> RecordFiles:
        """More preallocated records, in ``<name>.bin`` on the same paths, deleted when closed.

        Raises ValueError for a name that is taken or no plain word, `CapacityError` if they do not fit beside
        the store's own.
        """
        scratches = self._open_scratches()
        file_name = _file_name(name)
        if file_name == RECORDS_NAME or name in scratches or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise ValueError(f"scratch name {name!r} is taken or not a plain lower-case word: choose another")
        layout = StoreLayout(tuple(records), self._paths, self._manifest.layout.stripe_bytes)
        parts = [self._files.layout, *(files.layout for files in scratches.values()), layout]
        needed_bytes = [sum(shares) for shares in zip(*(part.file_bytes for part in parts), strict=True)]
        check_capacities(self._paths, needed_bytes)
        ours = [RECORDS_NAME, file_name, *map(_file_name, scratches)]
        check_free_space(self._paths, needed_bytes, ours)
        directories = [path.path for path in self._paths]
        files = RecordFiles.create(layout, directories, file_name, self._engine, is_scratch=True)
        self._scratches = scratches | {name: files}
        return files

    def close(self) -> None:
        """Delete the scratch files, close the rest and let the directories go; a second time does nothing."""
        for files in self._open_scratches().values():
            files.close()
        self._held.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_scratches(self) -> dict[str, RecordFiles]:
        return {name: files for name, files in self._scratches.items() if not files.closed}


def _file_name(name: str) -> str:
    return f"{name}.bin"


def _lock(directories: Sequence[str], held: ExitStack) -> None:
    for directory in directories:
        held.callback(DirectoryLock(directory).close)


def _remove_stale_scratch(directories: Sequence[str]) -> None:
    """What a killed run could not delete. Only called where the lock and the model are ours."""
    for directory in directories:
        (Path(directory) / _file_name(SCRATCH_NAME)).unlink(missing_ok=True)


def _refuse_foreign(directories: Sequence[str], model: ModelIdentity) -> None:
    """Raise `ForeignStoreError` where something else lives that a new store would destroy."""
    for directory in directories:
        if manifest := read_manifest(directory):
            manifest.refuse_other(model, directory)
            continue
        ours = (Path(directory) / LOCK_NAME).exists()  # a store whose creation was cut short
        names = (RECORDS_NAME, _file_name(SCRATCH_NAME))
        stray = [name for name in names if (Path(directory) / name).exists()]
        if stray and not ours:
            raise ForeignStoreError(
                f"{directory} holds {stray[0]} but no store: choose another directory or move that file away"
            )
