"""The store, which has all records of one model on one or several SSD paths."""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from typing import Any, Literal

import torch
from torch import Tensor

from hf_lohan.device import mapped_empty
from hf_lohan.files import CorruptionError, ForeignStoreError, IoEngine, StorageError, StorePath, TornStoreError
from hf_lohan.files.directories import resolve_capacities, validate_directories
from hf_lohan.files.durable_file import read_whole
from hf_lohan.files.lock import DirectoryLock
from hf_lohan.store.commits import Agreement, Commit, CommitSequence
from hf_lohan.store.home_files import HomeFiles
from hf_lohan.store.layout import DEFAULT_STRIPE_BYTES, RecordSpec, StoreLayout
from hf_lohan.store.manifest import (
    MANIFEST_NAME,
    Manifest,
    ModelIdentity,
    assemble,
    home_layouts,
    rank_of,
    read_manifest,
    remove_manifests,
    write_manifests,
)
from hf_lohan.store.record_files import RecordFiles
from hf_lohan.store.store_folders import (
    DATA_NAMES,
    HOME_NAMES,
    SCRATCH_NAME,
    check_room,
    check_sizes,
    committed_in,
    fits,
    is_half_made,
    refuse_foreign,
    remove_scratch,
    remove_store,
    scratch_file_name,
    versions_in,
)
from hf_lohan.store.versions import Versions

logger = logging.getLogger(__name__)

_VERIFIED_AT_ONCE_BYTES = 4 << 20


class Store(RecordFiles):
    """Preallocated records on locked paths, until `close`. Make it with `create`, `open` or `open_or_create`. With two
    homes, writes are drafts until `commit`, and a killed run leaves its last commit. With one home, records are changed
    in place. The store is torn from the first change of a committed record to the next commit."""

    def __init__(
        self,
        manifest: Manifest,
        paths: tuple[StorePath, ...],
        homes: Sequence[HomeFiles],
        versions: Versions,
        engine: IoEngine,
        *,
        committed: Commit | None,
        held: ExitStack,
    ) -> None:
        """``paths`` are in store order and have capacities in bytes. ``held`` closes the files, and then the locks."""
        self._commits = CommitSequence(manifest.store_id, manifest.layout_id, paths[0].path, committed)
        super().__init__(homes, versions, engine, before_write=self._commits.before_write)
        self.paths = paths
        self._manifest = manifest
        self._held = held
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
        """Create a store of zeros over ``paths``. It replaces a store of the same model.

        Raises ValueError or `StorageError` if a path cannot be used, or else `CapacityError`, `ForeignStoreError` or
        `StoreInUseError`, all before anything is written. A later failure leaves no records.
        """
        validate_directories(paths)
        resolved = resolve_capacities(paths, DATA_NAMES)
        layout = StoreLayout(tuple(records), resolved, stripe_bytes)
        layouts = home_layouts(layout, num_homes)
        check_room(resolved, layouts)
        versions = Versions(layout.records, num_homes=num_homes)
        directories = [path.path for path in resolved]
        refuse_foreign(directories, model)
        with ExitStack() as held:
            _lock(directories, held)
            refuse_foreign(directories, model)  # checked again while the lock is held
            if any(os.path.lexists(os.path.join(directory, MANIFEST_NAME)) for directory in directories):
                logger.warning("a new store replaces the store of the same model in %s", ", ".join(directories))
            remove_store(directories)
            homes: list[HomeFiles] = []
            created = datetime.now(timezone.utc).isoformat(timespec="seconds")
            rank = rank_of(directories[0])
            manifest = Manifest(uuid.uuid4().hex, created, model, layout, num_homes, rank=rank)
            try:
                for home_layout, name in zip(layouts, HOME_NAMES, strict=False):
                    homes.append(HomeFiles.create(home_layout, directories, name, engine))
                    held.callback(homes[-1].close)
                write_manifests(manifest, directories)
            except BaseException:
                for home in homes:
                    home.remove()
                remove_manifests(directories)
                raise
            return cls(manifest, resolved, homes, versions, engine, committed=None, held=held.pop_all())

    @classmethod
    def open(
        cls,
        paths: Sequence[StorePath],
        *,
        model: ModelIdentity | None,
        engine: IoEngine,
        allow_torn: bool = False,
        records: Sequence[RecordSpec] | None = None,
        is_read_only: bool = False,
    ) -> Store:
        """Open the store in ``paths``, which may be in any order. ``model=None`` accepts any model, and
        ``records=None`` any records. ``is_read_only``: the caller only reads, so the file system may be read-only.

        Raises ValueError or `StorageError` if a path cannot be used or the store is missing or damaged. Raises
        `CapacityError` if the store exceeds a capacity in ``paths``, `ForeignStoreError` for another model or other
        records, `StoreInUseError` if it is locked, and `TornStoreError` if it is torn. A caller with ``allow_torn``
        writes all records again.
        """
        validate_directories(paths, is_read_only=is_read_only)
        assemble(paths)  # first, because the lock creates a file
        with ExitStack() as held:
            _lock([path.path for path in paths], held, is_read_only=is_read_only)
            manifest, ordered = assemble(paths)
            directories = [path.path for path in ordered]
            if model is not None:
                manifest.refuse_other(model, directories[0])
            if records is not None:
                manifest.refuse_other_records(records, directories[0])
            check_sizes(ordered, manifest.home_layouts)
            if not is_read_only:
                remove_scratch(directories)
            committed = committed_in(directories, manifest)
            if committed is not None and committed.is_torn and not allow_torn:
                checkpoint = committed.facts.get("last_checkpoint") or "a checkpoint"
                raise TornStoreError(
                    f"the store in {directories[0]} keeps one version (durability: checkpoint), and its run ended "
                    f"during a step, so its state is incomplete; resume from {checkpoint}"
                )
            homes: list[HomeFiles] = []
            for layout, name in zip(manifest.home_layouts, HOME_NAMES, strict=False):
                homes.append(HomeFiles.open(layout, directories, name, engine, is_read_only=is_read_only))
                held.callback(homes[-1].close)
            versions = versions_in(directories, manifest, committed)
            resolved = resolve_capacities(ordered, HOME_NAMES)
            return cls(manifest, resolved, homes, versions, engine, committed=committed, held=held.pop_all())

    @classmethod
    def open_or_create(
        cls,
        paths: Sequence[StorePath],
        records: Sequence[RecordSpec],
        *,
        model: ModelIdentity,
        engine: IoEngine,
        durability: Literal["auto", "step", "checkpoint"] = "auto",
        scratch: Sequence[RecordSpec] = (),
    ) -> Store:
        """Open the model's store in ``paths`` with its last commit, or create a new store.

        ``durability`` "step" means two homes, and "checkpoint" one. "auto" is "step" if two homes fit beside
        ``scratch``. Raises the errors of `create` and `open`, and `ForeignStoreError` if the existing store has another
        number of homes.
        """
        validate_directories(paths)
        manifests = [read_manifest(path.path) for path in paths]
        existing = next((manifest for manifest in manifests if manifest is not None), None)
        num_homes = 1 if durability == "checkpoint" else 2
        is_ours = existing is not None and existing.model.fingerprint == model.fingerprint
        if existing is not None and is_ours and not is_half_made(paths, manifests):
            if durability != "auto" and existing.num_homes != num_homes:
                raise ForeignStoreError(
                    f"{paths[0].path} holds a store of this model with durability {_durability(existing.num_homes)!r}, "
                    f"not {durability!r}; keep that setting, delete the store, or choose another directory"
                )
            return cls.open(paths, model=model, engine=engine, allow_torn=True, records=records)
        if durability == "auto" and not fits(paths, records, num_homes, scratch):
            num_homes = 1
            logger.warning(
                "%s: two versions of this model's state do not fit, so the store keeps one (durability: checkpoint), "
                "and a run that dies resumes from its last checkpoint, not from its last step",
                " and ".join(path.path for path in paths),
            )
        return cls.create(paths, records, model=model, engine=engine, num_homes=num_homes)

    @property
    def model(self) -> ModelIdentity:
        return self._manifest.model

    @property
    def scratch_bytes(self) -> int:
        """Exact size of the open scratch files."""
        return sum(files.size_bytes for files in self._open_scratches().values())

    @property
    def num_homes(self) -> int:
        return self._manifest.num_homes

    @property
    def durability(self) -> Literal["step", "checkpoint"]:
        """The setting for this number of homes: "step" for two, "checkpoint" for one."""
        return _durability(self.num_homes)

    @property
    def committed(self) -> Commit | None:
        """The last commit; None before the first one."""
        return self._commits.last

    @property
    def kept_commits(self) -> list[Commit]:
        """The commits to which the store can return. These are the last commit, and the commit before it if it was kept
        for other ranks."""
        return [commit for commit in (self._commits.last, self._commits.previous) if commit is not None]

    def agree_on_commits(self, agreement: Agreement) -> None:
        """Commit together with other ranks from now on. A commit to which a rank may return is not overwritten before
        all ranks have the next commit. A store with one home cannot return to a commit, so it waits for nobody."""
        if self.num_homes > 1:
            self._commits.set_agreement(agreement)

    def count_commits_from(self, number: int, group_id: str | None = None) -> None:
        """Give the first commit the number ``number`` instead of 1, to continue the count of other stores. With
        ``group_id`` the commits get this group id instead of the agreement's."""
        self._commits.count_from(number, group_id)

    def restore_commit(self, commit: Commit | None) -> None:
        """Return to ``commit``, one of `kept_commits`, and forget later commits. With None the store has no commit
        afterwards. Call this before records have copies in RAM."""
        assert not self.ram.copies, "copies in RAM belong to the last commit"
        self.wait_until_idle()
        for files in self._homes:
            files.forget_failures()
        if commit is not self._commits.last:
            self._commits.restore_commit(commit)
        empty = Versions(self.layout.records, num_homes=self.num_homes)
        versions = empty.draft() if commit is None else (commit.home, commit.checksum, commit.ties)
        self.versions.restore(*versions, is_torn=commit is not None and commit.is_torn)

    def view_commit(self, commit: Commit) -> None:
        """Read the records of ``commit``, one of `kept_commits`, without changing the disk. Afterwards the store is
        read-only and must not get copies in RAM."""
        assert not self.ram.copies, "copies in RAM belong to the last commit"
        self._commits.view_commit(commit)
        self.versions.restore(commit.home, commit.checksum, commit.ties, is_torn=commit.is_torn)

    @property
    def log(self) -> bytes:
        """The log up to the last commit. Raises `StorageError` if it is missing or damaged."""
        return self.committed.read_log(self.paths[0].path) if self.committed is not None else b""

    @property
    def model_folder(self) -> str | None:
        """The folder of the last commit's model files, or None. Raises `StorageError` if they are damaged."""
        if self.committed is None or not self.committed.model_folder:
            return None
        return self.committed.check_model_files(self.paths[0].path)

    @property
    def model_files(self) -> dict[str, bytes] | None:
        """The content of the model files by name, or None. Raises the errors of `model_folder`."""
        folder = self.model_folder
        if folder is None or self.committed is None:
            return None
        return {name: read_whole(os.path.join(folder, name)) for name in self.committed.model_files}

    @property
    def has_drafts(self) -> bool:
        """Whether anything was written after the last commit."""
        return self.versions.has_drafts

    def clear_records(self) -> None:
        """Make every record read as zeros until it is written. The last commit stays valid until the next one, unless a
        write overwrites a committed record that has one home."""
        self.wait_until_idle()
        self.versions.clear()
        self.ram.clear()

    def commit(
        self,
        facts: Mapping[str, Any] | None = None,
        journal: Mapping[str, bytes] | None = None,
        log_lines: bytes = b"",
        *,
        keep_log: bool = True,
        model_files: Mapping[str, bytes] | None = None,
        rounds_half_up: bool = False,
    ) -> None:
        """Make all writes durable, and make them the committed state.

        ``facts`` (JSON types) and ``journal`` (small files by name) can be read from `committed`. ``log_lines`` are
        appended to the log, and ``keep_log=False`` starts a new log. ``model_files`` replace the model files of the
        last commit, unless they are None. ``rounds_half_up``: bfloat16 weights come from an older version's commit,
        which has no tie codes, so this commit has none. No write may be in progress. Raises `CapacityError` or
        `StorageError`. The last commit then stays, and `commit` may be called again unless the drive lost written data.
        """
        self.write_back()
        home, checksum, ties = self.draft()
        draft = (home, checksum, None if rounds_half_up else ties)
        self._commits.write_next(
            *draft, facts or {}, journal or {}, log_lines, keep_log=keep_log, model_files=model_files
        )
        self.versions.commit(*draft)
        self.ram.commit()
        self._commits.announce_last()

    def drop_drafts(self) -> None:
        """Forget all writes after the last commit. Raises `TornStoreError` if committed bytes were overwritten."""
        self.wait_until_idle()
        if self.versions.is_torn:
            raise TornStoreError(
                f"the last commit of the store in {self.paths[0].path} has been overwritten, because the store keeps "
                "one version; resume from a checkpoint, or use durability='step'"
            )
        for home in self._homes:
            home.forget_failures()
        self.versions.drop_drafts()
        self.ram.drop_drafts()

    def verify_records(self) -> Iterator[tuple[RecordSpec, list[CorruptionError]]]:
        """Read one record after the other, and yield each record with one error per damaged granule. Raises
        `StorageError` if a drive cannot be read."""
        memory = mapped_empty(_VERIFIED_AT_ONCE_BYTES)
        for record in self.records:
            errors: list[CorruptionError] = []
            granule_numel, end = record.granule_numel, record.first + record.numel
            piece_numel = _VERIFIED_AT_ONCE_BYTES // record.granule_bytes * granule_numel
            for start in range(record.first, end, piece_numel):
                stop = min(start + piece_numel, end)
                if self._damage_in(record, start, stop, memory) is not None:
                    for first in range(start, stop, granule_numel):
                        error = self._damage_in(record, first, min(first + granule_numel, stop), memory)
                        errors += [error] if error is not None else []
            yield record, errors

    def _damage_in(self, record: RecordSpec, start: int, stop: int, memory: Tensor) -> CorruptionError | None:
        out = memory[: (stop - start) * record.itemsize].view(getattr(torch, record.dtype))
        try:
            self.read(record.block, record.kind, start, out).wait()
        except CorruptionError as error:
            return error
        return None

    def verify_files(self) -> list[StorageError]:
        """Return the errors in the log and the model files of the last commit."""
        errors: list[StorageError] = []
        for read in (lambda: self.log, lambda: self.model_folder):
            try:
                read()
            except StorageError as error:
                errors.append(error)
        return errors

    def scratch(self, records: Sequence[RecordSpec], name: str = SCRATCH_NAME) -> RecordFiles:
        """Create more preallocated records in ``<name>.bin`` on the same paths. `close` deletes them.

        Raises ValueError if the name is taken or not a plain word, and `CapacityError` if the records do not fit beside
        the store.
        """
        scratches = self._open_scratches()
        if name in scratches or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise ValueError(f"scratch name {name!r} is taken or not a plain lower-case word; choose another")
        file_name = scratch_file_name(name)
        layout = StoreLayout(tuple(records), self.paths, self._manifest.layout.stripe_bytes)
        parts = [*(home.layout for home in self._homes), *(files.layout for files in scratches.values()), layout]
        check_room(self.paths, parts, [*HOME_NAMES, file_name, *map(scratch_file_name, scratches)])
        directories = [path.path for path in self.paths]
        files = RecordFiles.create_files(layout, directories, file_name, self._engine)
        self._scratches = scratches | {name: files}
        return files

    def close(self) -> None:
        """Delete the scratch files, close all other files, and release the directories. Idempotent. Does nothing in a
        forked process."""
        if self._owner.is_here:
            for files in self._open_scratches().values():
                files.close()
            super().close()
            self._held.close()

    def _open_scratches(self) -> dict[str, RecordFiles]:
        return {name: files for name, files in self._scratches.items() if not files.closed}


def _durability(num_homes: int) -> Literal["step", "checkpoint"]:
    return "checkpoint" if num_homes == 1 else "step"


def _lock(directories: Sequence[str], held: ExitStack, *, is_read_only: bool = False) -> None:
    for directory in directories:
        held.callback(DirectoryLock(directory, is_read_only=is_read_only).close)
