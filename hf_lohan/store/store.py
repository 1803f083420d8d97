"""The on-disk home of all records of one model, over one or several SSD paths."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

from torch import Tensor

from hf_lohan.files import Extent, IoEngine, IoRequest, StorePath, TornStoreError
from hf_lohan.store.commit import Commit
from hf_lohan.store.commit_sequence import CommitSequence
from hf_lohan.store.granules import Checksums
from hf_lohan.store.layout import DEFAULT_STRIPE_BYTES, RecordSpec, StoreLayout
from hf_lohan.store.manifest import ModelIdentity
from hf_lohan.store.opening import (
    Durability,
    OpenParts,
    create_parts,
    durability_of,
    open_or_create_parts,
    open_parts,
)
from hf_lohan.store.record_files import RecordFiles
from hf_lohan.store.record_read import RecordRead
from hf_lohan.store.store_files import HOME_NAMES, SCRATCH_NAME, check_room, scratch_file_name


class Store:
    """Preallocated records under a lock, until `close`; make one with `create`, `open` or `open_or_create`.

    With two homes, what is written is a draft until `commit`: a run that is killed leaves its last commit. With one
    home records are changed in place: once a committed one is, and until the next commit, the store is torn.
    """

    def __init__(self, parts: OpenParts) -> None:
        self._manifest = parts.manifest
        self._paths = parts.paths
        self._files = parts.files
        self._engine = parts.engine
        self._held = parts.held
        self._commits = CommitSequence(parts.manifest.store_id, parts.paths[0].path, parts.committed)
        self._files.before_write = self._commits.before_write
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
        num_homes: int = 1,
    ) -> Store:
        """A new store of zeros over ``paths``; one of the same model that is there is replaced.

        Raises before anything is written: ValueError and `StorageError` for unusable paths, `CapacityError`,
        `ForeignStoreError`, `StoreInUseError`. If it fails later, no records are left behind.
        """
        return cls(
            create_parts(paths, records, model=model, engine=engine, stripe_bytes=stripe_bytes, num_homes=num_homes)
        )

    @classmethod
    def open(
        cls,
        paths: Sequence[StorePath],
        *,
        model: ModelIdentity | None,
        engine: IoEngine,
        allow_torn: bool = False,
    ) -> Store:
        """The store in ``paths``, given in any order; ``model=None`` takes any model's.

        Raises ValueError and `StorageError` for unusable paths or a missing or damaged store, `CapacityError`
        if it is larger than a given capacity, `ForeignStoreError`, `StoreInUseError`, and `TornStoreError` unless
        ``allow_torn`` (for whoever writes everything anew).
        """
        return cls(open_parts(paths, model=model, engine=engine, allow_torn=allow_torn))

    @classmethod
    def open_or_create(
        cls,
        paths: Sequence[StorePath],
        records: Sequence[RecordSpec],
        *,
        model: ModelIdentity,
        engine: IoEngine,
        durability: Durability = "auto",
        scratch: Sequence[RecordSpec] = (),
    ) -> Store:
        """The model's store in ``paths``, with what is committed in it; where there is none, a new one.

        ``durability`` "step" asks for two homes, "checkpoint" for one; "auto" is "step" if both fit beside ``scratch``.
        Raises as `create` and `open`, and `ForeignStoreError` if the store there has other homes than asked for.
        """
        return cls(
            open_or_create_parts(
                paths, records, model=model, engine=engine, durability=durability, scratch=scratch
            )
        )

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

    @property
    def files(self) -> RecordFiles:
        """The records' files, below versions and commits."""
        return self._files

    @property
    def num_homes(self) -> int:
        return self._manifest.num_homes

    @property
    def durability(self) -> Literal["step", "checkpoint"]:
        """"step" with two homes, "checkpoint" with one."""
        return durability_of(self.num_homes)

    @property
    def committed(self) -> Commit | None:
        """What the last commit wrote down; None before the first."""
        return self._commits.last

    @property
    def log(self) -> bytes:
        """The lines that were appended to the log up to the last commit. Raises `StorageError` if they are lost."""
        return self._commits.log

    @property
    def has_drafts(self) -> bool:
        """Whether anything was written since the last commit."""
        return self._files.versions.has_drafts

    def has(self, block: str, kind: str) -> bool:
        return self._files.has(block, kind)

    def read(self, block: str, kind: str, start_numel: int, out: Tensor, *, is_urgent: bool = False) -> RecordRead:
        """See `RecordFiles.read`. Drafts are read where there are some."""
        return self._files.read(block, kind, start_numel, out, is_urgent=is_urgent)

    def write(
        self, block: str, kind: str, start_numel: int, source: Tensor, *, checksums: Checksums | None = None
    ) -> IoRequest:
        """See `RecordFiles.write`. A draft, until `commit`."""
        return self._files.write(block, kind, start_numel, source, checksums=checksums)

    def checksums(self, block: str, kind: str, source: Tensor) -> Checksums:
        """See `RecordFiles.checksums`."""
        return self._files.checksums(block, kind, source)

    def read_unaligned(self, block: str, kind: str, start_numel: int, out: Tensor, bounce: Tensor) -> None:
        """See `RecordFiles.read_unaligned`."""
        self._files.read_unaligned(block, kind, start_numel, out, bounce)

    def write_unaligned(
        self, block: str, kind: str, start_numel: int, source: Tensor, bounce: Tensor
    ) -> None:
        """See `RecordFiles.write_unaligned`."""
        self._files.write_unaligned(block, kind, start_numel, source, bounce)

    def extents(self, block: str, kind: str) -> list[tuple[str, Extent]] | None:
        """See `RecordFiles.extents`."""
        return self._files.extents(block, kind)

    def begin_anew(self) -> None:
        """Every record is zeros until it is written. What is committed stays so until the next commit, as long as no
        committed record that has one home is overwritten."""
        self._files.settle()
        self._files.versions.begin_anew()

    def commit(
        self,
        facts: Mapping[str, Any] | None = None,
        journal: Mapping[str, bytes] | None = None,
        log_lines: bytes = b"",
        *,
        keep_log: bool = True,
    ) -> None:
        """Make all that was written count: it is durable, and current, when this returns.

        ``facts`` (JSON's types) and ``journal`` (small files by name) are found again in `committed`; ``log_lines``
        follow the log (``keep_log=False`` begins it anew). The caller sees to it that no write is under way. Raises
        `CapacityError` or `StorageError`; what was committed before is then still so, and `commit` may be tried again.
        """
        home, checksum = self._files.draft()
        self._commits.follow(home, checksum, facts or {}, journal or {}, log_lines, keep_log=keep_log)
        self._files.versions.commit(home, checksum)

    def drop(self) -> None:
        """Forget what was written since the last commit, once no request is under way. Raises `TornStoreError` where it
        was written over what is committed."""
        self._files.settle()
        if self._files.versions.is_torn:
            raise TornStoreError(
                f"the last commit of the store in {self._paths[0].path} is gone: records that are kept in one version "
                "have been overwritten since; resume from a checkpoint, or use durability='step'"
            )
        self._files.versions.drop()

    def sync(self) -> None:
        """See `RecordFiles.sync`."""
        self._files.sync()

    def scratch(self, records: Sequence[RecordSpec], name: str = SCRATCH_NAME) -> RecordFiles:
        """More preallocated records, in ``<name>.bin`` on the same paths, deleted when closed.

        Raises ValueError for a name that is taken or no plain word, `CapacityError` if they do not fit beside
        the store's own.
        """
        scratches = self._open_scratches()
        if name in scratches or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise ValueError(f"scratch name {name!r} is taken or not a plain lower-case word: choose another")
        file_name = scratch_file_name(name)
        layout = StoreLayout(tuple(records), self._paths, self._manifest.layout.stripe_bytes)
        parts = [*self._files.home_layouts, *(files.layout for files in scratches.values()), layout]
        check_room(self._paths, parts, [*HOME_NAMES, file_name, *map(scratch_file_name, scratches)])
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
