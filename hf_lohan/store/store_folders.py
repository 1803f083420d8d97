"""Names, sizes and commits of the files in a store's directories. This module opens no store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from hf_lohan.files import CapacityError, ForeignStoreError, Shortfall, StorePath
from hf_lohan.files.directories import check_free_space, resolve_capacities
from hf_lohan.files.durable_file import remove_durably, remove_folder
from hf_lohan.files.lock import LOCK_NAME
from hf_lohan.store.commits import (
    COMMIT_NAME,
    LOG_NAME,
    MODEL_NAMES,
    PREVIOUS_NAME,
    Commit,
    previous_commit,
    read_commit,
)
from hf_lohan.store.layout import RecordSpec, StoreLayout
from hf_lohan.store.manifest import (
    MANIFEST_NAME,
    Manifest,
    ModelIdentity,
    assemble,
    home_layouts,
    read_manifest,
    remove_manifests,
)
from hf_lohan.store.versions import Versions

HOME_NAMES = ("records-0.bin", "records-1.bin")
SCRATCH_NAME = "gradients"
SCRATCH_NAMES = (SCRATCH_NAME, "gradient_sums", "activations", "kept_weights")


def scratch_file_name(name: str) -> str:
    return f"{name}.bin"


DATA_NAMES = (*HOME_NAMES, *map(scratch_file_name, SCRATCH_NAMES))
"""Names of the large files."""


def last_commit(paths: Sequence[str]) -> Commit | None:
    """Return the last commit of the store in ``paths``; None if no store or no commit exists. This takes no lock and
    changes nothing, so a run may continue meanwhile. Raises `StorageError` or `ForeignStoreError` if the files are
    damaged, belong to several stores, or are only a part of a store."""
    committed = _committed(paths)
    return None if committed is None else committed[0]


def kept_commits(paths: Sequence[str]) -> list[Commit]:
    """Return the last commit, and the commit before it if it was kept for other ranks. Raises the errors of
    `last_commit`."""
    committed = _committed(paths)
    if committed is None:
        return []
    last, directory = committed
    return [commit for commit in (last, previous_commit(directory, last)) if commit is not None]


def committed_log(paths: Sequence[str], commit: Commit | None = None) -> bytes:
    """Return the log of the store in ``paths`` up to its last commit, or up to ``commit``. Raises the errors of
    `last_commit`, and `StorageError` if the log is damaged."""
    committed = _committed(paths)
    return b"" if committed is None else (commit or committed[0]).read_log(committed[1])


def _committed(paths: Sequence[str]) -> tuple[Commit, str] | None:
    manifests = [read_manifest(path) for path in paths]
    store_paths = [StorePath(path) for path in paths]
    if not any(manifests) or is_half_made(store_paths, manifests):
        return None
    manifest, ordered = assemble(store_paths)
    directories = [path.path for path in ordered]
    commit = committed_in(directories, manifest)
    return None if commit is None else (commit, directories[0])


def committed_in(directories: Sequence[str], manifest: Manifest) -> Commit | None:
    """Return the last commit of the store in ``directories`` (in store order). They need not be locked. Raises
    `StorageError` if the commit is damaged, and `ForeignStoreError` if it belongs to another store."""
    commit = read_commit(directories[0])
    if commit is not None and commit.store_id != manifest.store_id:
        raise ForeignStoreError(
            f"{COMMIT_NAME} in {directories[0]} belongs to another store than the manifest there; restore the right "
            "file, or delete the store and resume from a checkpoint"
        )
    if commit is not None and commit.layout_id != manifest.layout_id:
        raise ForeignStoreError(
            f"{MANIFEST_NAME} in {directories[0]} does not belong to {COMMIT_NAME}; restore the right file, or delete "
            "the store and resume from a checkpoint"
        )
    return commit


def versions_in(directories: Sequence[str], manifest: Manifest, committed: Commit | None) -> Versions:
    """Return the versions of the last commit. Raises `ForeignStoreError` if the commit has other records."""
    versions = Versions(manifest.layout.records, num_homes=manifest.num_homes)
    if committed is not None:
        try:
            versions.restore(committed.home, committed.checksum, committed.ties, is_torn=committed.is_torn)
        except ValueError as error:
            raise ForeignStoreError(
                f"{COMMIT_NAME} in {directories[0]} does not fit its manifest ({error}); delete the store and resume "
                "from a checkpoint"
            ) from error
    return versions


def is_half_made(paths: Sequence[StorePath], manifests: Sequence[Manifest | None]) -> bool:
    """Return whether a run died while it created this store, so that the store has no state. Manifests are written in
    path order. They are removed in reverse order, after the commit, which is on the first path."""
    if None not in manifests:
        return False
    first = [path.path for path, manifest in zip(paths, manifests, strict=True) if manifest and not manifest.path_index]
    return len(first) == 1 and not os.path.lexists(os.path.join(first[0], COMMIT_NAME))


def check_sizes(paths: Sequence[StorePath], layouts: Sequence[StoreLayout]) -> None:
    """Raise `CapacityError` if the files of ``layouts`` exceed the capacities of paths. The error names these paths."""
    shortfalls = [
        Shortfall(path.path, needed, path.capacity_bytes, "capacity")
        for path, needed in zip(paths, _sum_over_files(layouts), strict=True)
        if path.capacity_bytes is not None and needed > path.capacity_bytes
    ]
    if shortfalls:
        raise CapacityError(shortfalls)


def check_room(paths: Sequence[StorePath], layouts: Sequence[StoreLayout], names: Sequence[str] = DATA_NAMES) -> None:
    """Same as `check_sizes`, but also raise `CapacityError` if a file system lacks space for the files. The space of
    the files ``names`` counts as free."""
    check_sizes(paths, layouts)
    check_free_space(paths, _sum_over_files(layouts), names)


def bytes_of_new_store(paths: Sequence[StorePath], records: Sequence[RecordSpec], num_homes: int) -> list[int]:
    """Return the bytes on each path of a new store of ``records``."""
    resolved = resolve_capacities(paths, DATA_NAMES)
    return _sum_over_files(home_layouts(StoreLayout(tuple(records), resolved), num_homes))


def fits(
    paths: Sequence[StorePath], records: Sequence[RecordSpec], num_homes: int, scratch: Sequence[RecordSpec]
) -> bool:
    """Return whether a new store of ``records`` fits beside ``scratch``."""
    resolved = resolve_capacities(paths, DATA_NAMES)
    layouts = home_layouts(StoreLayout(tuple(records), resolved), num_homes)
    with suppress(CapacityError):
        check_room(resolved, [*layouts, StoreLayout(tuple(scratch), resolved)])
        return True
    return False


def names_in(directory: str) -> list[str]:
    """Return the names of the store's files and folders that exist in the directory."""
    names = (MANIFEST_NAME, COMMIT_NAME, PREVIOUS_NAME, LOG_NAME, *DATA_NAMES, *MODEL_NAMES)
    return [name for name in names if os.path.lexists(os.path.join(directory, name))]


def remove_store(directories: Sequence[str]) -> None:
    """Remove all files except the locks, which the caller must hold. Raises `StorageError`. The commit is removed
    first, and then the manifests, so an interrupted removal leaves a store without state."""
    for directory in directories:
        remove_durably(os.path.join(directory, COMMIT_NAME))
    remove_manifests(directories)
    for directory in directories:
        for name in (PREVIOUS_NAME, LOG_NAME, *DATA_NAMES):
            remove_durably(os.path.join(directory, name))
        for name in MODEL_NAMES:
            remove_folder(os.path.join(directory, name))


def remove_scratch(directories: Sequence[str]) -> None:
    """Remove the scratch files of a killed run. The caller holds the lock. Raises `StorageError`."""
    for directory in directories:
        for name in SCRATCH_NAMES:
            remove_durably(os.path.join(directory, scratch_file_name(name)))


def refuse_foreign(directories: Sequence[str], model: ModelIdentity) -> None:
    """Raise `ForeignStoreError` if a new store would destroy other files."""
    for directory in directories:
        if manifest := read_manifest(directory):
            manifest.refuse_other(model, directory)
            continue
        is_ours = os.path.exists(os.path.join(directory, LOCK_NAME))  # an interrupted creation leaves a lock
        names = (*DATA_NAMES, COMMIT_NAME, PREVIOUS_NAME, LOG_NAME, *MODEL_NAMES)
        stray = [name for name in names if os.path.lexists(os.path.join(directory, name))]
        if stray and not is_ours:
            raise ForeignStoreError(
                f"{directory} holds {stray[0]} but no store; choose another directory, or move that file away"
            )


def _sum_over_files(layouts: Sequence[StoreLayout]) -> list[int]:
    return [sum(shares) for shares in zip(*(layout.file_bytes for layout in layouts), strict=True)]
