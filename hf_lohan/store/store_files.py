"""Which files a store has in each of its directories, and whether they fit there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hf_lohan.files import CapacityError, ForeignStoreError, StorePath
from hf_lohan.files.directories import check_free_space, resolve_capacities
from hf_lohan.files.durable_file import remove_durably
from hf_lohan.files.lock import LOCK_NAME
from hf_lohan.store.commit import COMMIT_NAME
from hf_lohan.store.commit_sequence import LOG_NAME
from hf_lohan.store.layout import RecordSpec, StoreLayout, check_capacities
from hf_lohan.store.manifest import ModelIdentity, home_layouts, read_manifest, remove_manifests

HOME_NAMES = ("records-0.bin", "records-1.bin")
SCRATCH_NAME = "gradients"
SCRATCH_NAMES = (SCRATCH_NAME, "activations")


def scratch_file_name(name: str) -> str:
    return f"{name}.bin"


DATA_NAMES = (*HOME_NAMES, *map(scratch_file_name, SCRATCH_NAMES))
"""What takes room."""


def check_sizes(paths: Sequence[StorePath], layouts: Sequence[StoreLayout]) -> None:
    """Raise `CapacityError` if files of these ``layouts`` exceed the capacity of a path."""
    check_capacities(paths, _sum_over_files(layouts))


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


def remove_store(directories: Sequence[str]) -> None:
    """Remove all but the locks. Only called where lock and model are ours. Raises `StorageError`.

    The commit goes first, then the manifests: whatever is left if this is cut short has nothing in it to lose.
    """
    for directory in directories:
        remove_durably(os.path.join(directory, COMMIT_NAME))
    remove_manifests(directories)
    for name in (LOG_NAME, *DATA_NAMES):
        for directory in directories:
            remove_durably(os.path.join(directory, name))


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
        ours = (Path(directory) / LOCK_NAME).exists()  # a store whose creation was cut short
        names = (*DATA_NAMES, COMMIT_NAME, LOG_NAME)
        stray = [name for name in names if os.path.lexists(os.path.join(directory, name))]
        if stray and not ours:
            raise ForeignStoreError(
                f"{directory} holds {stray[0]} but no store: choose another directory or move that file away"
            )


def _sum_over_files(layouts: Sequence[StoreLayout]) -> list[int]:
    """Bytes on each path."""
    return [sum(shares) for shares in zip(*(layout.file_bytes for layout in layouts), strict=True)]
