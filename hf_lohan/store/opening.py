"""How a store comes to be open: made anew, or found in its directories."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Literal

from hf_lohan.files import ForeignStoreError, IoEngine, StorePath, TornStoreError
from hf_lohan.files.directories import resolve_capacities, validate_directories
from hf_lohan.files.lock import DirectoryLock
from hf_lohan.store.commit import COMMIT_NAME, Commit, read_commit
from hf_lohan.store.home_files import HomeFiles
from hf_lohan.store.layout import DEFAULT_STRIPE_BYTES, RecordSpec, StoreLayout
from hf_lohan.store.manifest import (
    MANIFEST_NAME,
    Manifest,
    ModelIdentity,
    assemble,
    home_layouts,
    read_manifest,
    remove_manifests,
    write_manifests,
)
from hf_lohan.store.record_files import RecordFiles
from hf_lohan.store.store_files import (
    DATA_NAMES,
    HOME_NAMES,
    check_room,
    check_sizes,
    fits,
    refuse_foreign,
    remove_scratch,
    remove_store,
)
from hf_lohan.store.versions import Versions

logger = logging.getLogger(__name__)

Durability = Literal["auto", "step", "checkpoint"]


@dataclass(frozen=True)
class OpenParts:
    """What an open store is made of."""

    manifest: Manifest
    paths: tuple[StorePath, ...]
    files: RecordFiles
    engine: IoEngine
    committed: Commit | None
    held: ExitStack
    """Closes the files, then the locks."""


def create_parts(
    paths: Sequence[StorePath],
    records: Sequence[RecordSpec],
    *,
    model: ModelIdentity,
    engine: IoEngine,
    stripe_bytes: int,
    num_homes: int,
) -> OpenParts:
    """See `Store.create`."""
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
        refuse_foreign(directories, model)  # again: now nobody else can change it
        if any(os.path.lexists(os.path.join(directory, MANIFEST_NAME)) for directory in directories):
            logger.warning("replacing the store of the same model in %s", ", ".join(directories))
        remove_store(directories)
        homes: list[HomeFiles] = []
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        manifest = Manifest(uuid.uuid4().hex, created, model, layout, num_homes)
        try:
            for home_layout, name in zip(layouts, HOME_NAMES, strict=False):
                homes.append(HomeFiles.create(home_layout, directories, name, engine))
            write_manifests(manifest, directories)
        except BaseException:
            for home in homes:
                home.remove()
            remove_manifests(directories)
            raise
        files = RecordFiles(homes, versions, engine)
        held.callback(files.close)
        return OpenParts(manifest, resolved, files, engine, None, held.pop_all())


def open_parts(
    paths: Sequence[StorePath], *, model: ModelIdentity | None, engine: IoEngine, allow_torn: bool
) -> OpenParts:
    """See `Store.open`."""
    validate_directories(paths)
    assemble(paths)  # before the lock, which would leave a file where no store is
    with ExitStack() as held:
        _lock([path.path for path in paths], held)
        manifest, ordered = assemble(paths)
        directories = [path.path for path in ordered]
        if model is not None:
            manifest.refuse_other(model, directories[0])
        check_sizes(ordered, manifest.home_layouts)
        remove_scratch(directories)
        committed = committed_in(directories, manifest)
        if committed is not None and committed.is_torn and not allow_torn:
            raise TornStoreError(_torn_message(directories, committed))
        homes: list[HomeFiles] = []
        for layout, name in zip(manifest.home_layouts, HOME_NAMES, strict=False):
            homes.append(HomeFiles.open(layout, directories, name, engine))
            held.callback(homes[-1].close)
        files = RecordFiles(homes, _versions_in(directories, manifest, committed), engine)
        held.callback(files.close)
        resolved = resolve_capacities(ordered, HOME_NAMES)
        return OpenParts(manifest, resolved, files, engine, committed, held.pop_all())


def open_or_create_parts(
    paths: Sequence[StorePath],
    records: Sequence[RecordSpec],
    *,
    model: ModelIdentity,
    engine: IoEngine,
    durability: Durability,
    scratch: Sequence[RecordSpec],
) -> OpenParts:
    """See `Store.open_or_create`."""
    validate_directories(paths)
    manifests = [read_manifest(path.path) for path in paths]
    found = next((manifest for manifest in manifests if manifest is not None), None)
    if found is not None and found.model.fingerprint == model.fingerprint and not _is_half_made(paths, manifests):
        if durability != "auto" and found.num_homes != _num_homes(durability):
            raise ForeignStoreError(
                f"{paths[0].path} holds a store of this model with durability {durability_of(found.num_homes)!r}, "
                f"not {durability!r}: keep that setting, delete the store or choose another directory"
            )
        return open_parts(paths, model=model, engine=engine, allow_torn=True)
    num_homes = _num_homes(durability)
    if durability == "auto" and not fits(paths, records, num_homes, scratch):
        num_homes = 1
        logger.warning(
            "%s: no room for two versions of this model's state, so the store keeps one (durability: checkpoint): a "
            "run that dies goes on from its last checkpoint, not from its last step",
            " and ".join(path.path for path in paths),
        )
    stripe_bytes = DEFAULT_STRIPE_BYTES
    return create_parts(
        paths, records, model=model, engine=engine, stripe_bytes=stripe_bytes, num_homes=num_homes
    )


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
    return commit


def durability_of(num_homes: int) -> Literal["step", "checkpoint"]:
    """What the configuration calls so many homes."""
    return "checkpoint" if num_homes == 1 else "step"


def _num_homes(durability: Durability) -> int:
    return 1 if durability == "checkpoint" else 2


def _versions_in(directories: Sequence[str], manifest: Manifest, committed: Commit | None) -> Versions:
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


def _is_half_made(paths: Sequence[StorePath], manifests: Sequence[Manifest | None]) -> bool:
    """Whether this is what a run left that died while it made the store: there is nothing in it to lose.

    Manifests are written in the order of the paths and removed in reverse, after the commit, which lies in the first.
    """
    if None not in manifests:
        return False
    first = [path.path for path, manifest in zip(paths, manifests, strict=True) if manifest and not manifest.path_index]
    return len(first) == 1 and not os.path.lexists(os.path.join(first[0], COMMIT_NAME))


def _torn_message(directories: Sequence[str], commit: Commit) -> str:
    checkpoint = commit.facts.get("last_checkpoint")
    return (
        f"the store in {directories[0]} keeps one version (durability: checkpoint) and its run ended in the middle of "
        f"a step, so it holds no whole state: resume from {checkpoint or 'a checkpoint'}"
    )


def _lock(directories: Sequence[str], held: ExitStack) -> None:
    for directory in directories:
        held.callback(DirectoryLock(directory).close)
