"""What lies in a store's directories: which files, whether they fit, what is committed there. Needs no open store."""

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
"""What takes room."""


def last_commit(paths: Sequence[str]) -> Commit | None:
    """The last commit of the store in ``paths``; None if there is no store, or nothing committed in it.

    Takes no lock and changes nothing, so a run may go on meanwhile. Raises `StorageError` or `ForeignStoreError` where
    what is there is damaged, of several stores, or only a part of one.
    """
    found = _committed(paths)
    return None if found is None else found[0]


def kept_commits(paths: Sequence[str]) -> list[Commit]:
    """The last commit, and the one before if it was kept for other ranks. See `last_commit`."""
    found = _committed(paths)
    if found is None:
        return []
    last, directory = found
    return [commit for commit in (last, previous_commit(directory, last)) if commit is not None]


def committed_log(paths: Sequence[str], commit: Commit | None = None) -> bytes:
    """The lines that were appended to the log of the store in ``paths`` up to its last commit, or to one that is kept.
    Raises as `last_commit`, and `StorageError` if they are damaged."""
    found = _committed(paths)
    return b"" if found is None else (commit or found[0]).read_log(found[1])


def _committed(paths: Sequence[str]) -> tuple[Commit, str] | None:
    """The last commit, and the directory that holds it."""
    manifests = [read_manifest(path) for path in paths]
    given = [StorePath(path) for path in paths]
    if not any(manifests) or is_half_made(given, manifests):
        return None
    manifest, ordered = assemble(given)
    directories = [path.path for path in ordered]
    commit = committed_in(directories, manifest)
    return None if commit is None else (commit, directories[0])


def committed_in(directories: Sequence[str], manifest: Manifest) -> Commit | None:
    """The last commit of the store in ``directories`` (in the store's order), which need not be locked.

    Raises `StorageError` if it is damaged, `ForeignStoreError` if it is another store's.
    """
    commit = read_commit(directories[0])
    if commit is not None and commit.store_id != manifest.store_id:
        raise ForeignStoreError(
            f"{COMMIT_NAME} in {directories[0]} belongs to another store than its manifest: "
            "put the right one back, or delete the store and resume from a checkpoint"
        )
    if commit is not None and commit.layout_id != manifest.layout_id:
        raise ForeignStoreError(
            f"{MANIFEST_NAME} in {directories[0]} is not that of the run that wrote {COMMIT_NAME}: "
            "put the right one back, or delete the store and resume from a checkpoint"
        )
    return commit


def versions_in(directories: Sequence[str], manifest: Manifest, committed: Commit | None) -> Versions:
    """As they are committed. Raises `ForeignStoreError` where the commit is of other records."""
    versions = Versions(manifest.layout.records, num_homes=manifest.num_homes)
    if committed is not None:
        try:
            versions.restore(committed.home, committed.checksum, is_torn=committed.is_torn)
        except ValueError as error:
            raise ForeignStoreError(
                f"{COMMIT_NAME} in {directories[0]} does not fit its manifest ({error}): "
                "delete the store and resume from a checkpoint"
            ) from error
    return versions


def is_half_made(paths: Sequence[StorePath], manifests: Sequence[Manifest | None]) -> bool:
    """Whether this is what a run left that died while it made the store: there is nothing in it to lose.

    Manifests are written in the order of the paths and removed in reverse, after the commit, which lies in the first.
    """
    if None not in manifests:
        return False
    first = [path.path for path, manifest in zip(paths, manifests, strict=True) if manifest and not manifest.path_index]
    return len(first) == 1 and not os.path.lexists(os.path.join(first[0], COMMIT_NAME))


def check_sizes(paths: Sequence[StorePath], layouts: Sequence[StoreLayout]) -> None:
    """Raise `CapacityError` naming every path whose capacity files of these ``layouts`` exceed."""
    shortfalls = [
        Shortfall(path.path, needed, path.capacity_bytes, "capacity")
        for path, needed in zip(paths, _sum_over_files(layouts), strict=True)
        if path.capacity_bytes is not None and needed > path.capacity_bytes
    ]
    if shortfalls:
        raise CapacityError(shortfalls)


def check_room(paths: Sequence[StorePath], layouts: Sequence[StoreLayout], names: Sequence[str] = DATA_NAMES) -> None:
    """Raise `CapacityError` also if a file system lacks room for them, in place of those of these ``names``."""
    check_sizes(paths, layouts)
    check_free_space(paths, _sum_over_files(layouts), names)


def fits(
    paths: Sequence[StorePath], records: Sequence[RecordSpec], num_homes: int, scratch: Sequence[RecordSpec]
) -> bool:
    """Whether a new store of these ``records`` has room beside ``scratch``."""
    resolved = resolve_capacities(paths, DATA_NAMES)
    layouts = home_layouts(StoreLayout(tuple(records), resolved), num_homes)
    with suppress(CapacityError):
        check_room(resolved, [*layouts, StoreLayout(tuple(scratch), resolved)])
        return True
    return False


def names_in(directory: str) -> list[str]:
    """Of the files and folders there that belong to a store."""
    names = (MANIFEST_NAME, COMMIT_NAME, PREVIOUS_NAME, LOG_NAME, *DATA_NAMES, *MODEL_NAMES)
    return [name for name in names if os.path.lexists(os.path.join(directory, name))]


def remove_store(directories: Sequence[str]) -> None:
    """Remove all but the locks. Only called where lock and model are ours. Raises `StorageError`.

    The commit goes first, then the manifests: whatever is left if this is cut short has nothing in it to lose.
    """
    for directory in directories:
        remove_durably(os.path.join(directory, COMMIT_NAME))
    remove_manifests(directories)
    for directory in directories:
        for name in (PREVIOUS_NAME, LOG_NAME, *DATA_NAMES):
            remove_durably(os.path.join(directory, name))
        for name in MODEL_NAMES:
            remove_folder(os.path.join(directory, name))


def remove_scratch(directories: Sequence[str]) -> None:
    """Remove what a killed run could not delete. Only called where lock and model are ours. Raises `StorageError`."""
    for directory in directories:
        for name in SCRATCH_NAMES:
            remove_durably(os.path.join(directory, scratch_file_name(name)))


def refuse_foreign(directories: Sequence[str], model: ModelIdentity) -> None:
    """Raise `ForeignStoreError` where something else lives that a new store would destroy."""
    for directory in directories:
        if manifest := read_manifest(directory):
            manifest.refuse_other(model, directory)
            continue
        ours = os.path.exists(os.path.join(directory, LOCK_NAME))  # a store whose creation was cut short
        names = (*DATA_NAMES, COMMIT_NAME, PREVIOUS_NAME, LOG_NAME, *MODEL_NAMES)
        stray = [name for name in names if os.path.lexists(os.path.join(directory, name))]
        if stray and not ours:
            raise ForeignStoreError(
                f"{directory} holds {stray[0]} but no store: choose another directory or move that file away"
            )


def _sum_over_files(layouts: Sequence[StoreLayout]) -> list[int]:
    """Bytes on each path."""
    return [sum(shares) for shares in zip(*(layout.file_bytes for layout in layouts), strict=True)]
