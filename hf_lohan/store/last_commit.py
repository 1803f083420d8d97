"""Look at a store's last commit without taking the store."""

from __future__ import annotations

from collections.abc import Sequence

from hf_lohan.files import StorePath
from hf_lohan.store.commit import Commit
from hf_lohan.store.commit_sequence import read_log
from hf_lohan.store.manifest import assemble, read_manifest
from hf_lohan.store.opening import committed_in


def last_commit(paths: Sequence[str]) -> Commit | None:
    """The last commit of the store in ``paths``; None if there is no store, or nothing committed in it.

    Takes no lock and changes nothing, so a run may go on meanwhile. Raises `StorageError` or `ForeignStoreError` where
    what is there is damaged, or of several stores.
    """
    if not paths or any(read_manifest(path) is None for path in paths):
        return None
    manifest, ordered = assemble([StorePath(path) for path in paths])
    return committed_in([path.path for path in ordered], manifest)


def committed_log(paths: Sequence[str]) -> bytes:
    """The lines that were appended to the log of the store in ``paths`` up to its last commit. Raises as `last_commit`,
    and `StorageError` if they are damaged."""
    commit = last_commit(paths)
    if commit is None:
        return b""
    _, ordered = assemble([StorePath(path) for path in paths])
    return read_log(ordered[0].path, commit)
