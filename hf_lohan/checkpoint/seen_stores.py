"""Finds the stores of other numbers of ranks that a rank sees, and sets them aside. Nothing is removed."""

from __future__ import annotations

import json
import logging
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from hf_lohan.checkpoint.moves import (
    LOST,
    OLD,
    Move,
    digest_of_manifest,
    identity_of,
    move_together,
    unused_name,
    used_names,
    with_bytes,
)
from hf_lohan.checkpoint.resume_point import is_resumable
from hf_lohan.files import ForeignStoreError, StorageError
from hf_lohan.files.lock import DirectoryLock
from hf_lohan.planning.run_plan import RUN_ID
from hf_lohan.ranks import Links
from hf_lohan.store import Commit, kept_commits
from hf_lohan.store.commits import read_commit
from hf_lohan.store.manifest import MANIFEST_NAME, read_manifest
from hf_lohan.store.rank_folders import rank_folder, shared_directory, stores_under
from hf_lohan.store.store_folders import names_in
from hf_lohan.wording import times

logger = logging.getLogger(__name__)

RESHARDED_FROM = "cut_from"
"""Name of a fact in the commit of a store that was resharded, as in the first version: the number of ranks
before."""
RESHARDED_STORES = "cut_from_stores"
"""Name of a fact beside it: for each old rank, the id of its store and the number of its newest commit."""
_LOST_FOLDER = re.compile(rf"{LOST}-\d+(-\d+)?")


@dataclass(frozen=True)
class Kept:
    """What a rank tells the others about a commit of a store."""

    group_id: str
    number: int
    step: int
    is_resumable: bool
    resharded_from: int | None
    """The number of ranks before, if the store was resharded and has no own step yet."""
    resharded_stores: tuple[tuple[str, int], ...]
    launch_id: str | None
    last_checkpoint: str | None
    output_dir: str
    run_id: str | None
    """The same for runs that continue one another; None in commits of older versions."""

    @classmethod
    def of(cls, commit: Commit, num_ranks: int) -> Kept:
        facts, step = commit.facts, commit.facts.get("global_step")
        resharded_from = facts.get(RESHARDED_FROM)
        return cls(
            commit.group_id,
            commit.number,
            step if type(step) is int else 0,
            is_resumable(commit),
            None
            if resharded_from == num_ranks
            else resharded_from,  # as an older version of `lohan reshard` may copy it
            tuple((str(store_id), int(number)) for store_id, number in facts.get(RESHARDED_STORES, ())),
            facts.get("launch_id"),
            facts.get("last_checkpoint"),
            str(facts.get("output_dir")),
            facts.get(RUN_ID),
        )

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Kept:
        return cls(
            **{
                **fields,
                "resharded_stores": tuple((store_id, number) for store_id, number in fields["resharded_stores"]),
            }
        )

    @property
    def key(self) -> tuple[str, int]:
        return self.group_id, self.number


@dataclass(frozen=True)
class SeenStore:
    """The store of one rank, as a rank of this run sees it."""

    seen_by: int
    num_ranks: int
    rank: int
    directories: tuple[str, ...]
    store_id: str
    created: str
    fingerprint: str
    commits: tuple[Kept, ...]
    damage: str = ""
    """The error of its commits, if they cannot be read."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> SeenStore:
        commits = tuple(map(Kept.from_json, fields["commits"]))
        return cls(**{**fields, "directories": tuple(fields["directories"]), "commits": commits})

    @property
    def newest(self) -> int:
        """The number of the newest commit; 0 without commits."""
        return max((commit.number for commit in self.commits), default=0)

    def is_unchanged(self) -> bool:
        """Whether the store is still there as it was reported."""
        try:
            manifest = read_manifest(self.directories[0])
            if manifest is None or manifest.store_id != self.store_id:
                return False
            now = tuple(Kept.of(commit, self.num_ranks) for commit in kept_commits(self.directories))
        except (StorageError, ForeignStoreError):
            return False
        return now == self.commits


def own_store(folders: Sequence[str], rank: int, num_ranks: int) -> SeenStore | None:
    """Return this rank's own store. Raises the errors of `kept_commits`."""
    commits = tuple(Kept.of(commit, num_ranks) for commit in kept_commits(folders))
    manifest = next(filter(None, map(read_manifest, folders)), None)
    if manifest is None:
        return None
    store_id, fingerprint = manifest.store_id, manifest.model.fingerprint
    return SeenStore(rank, num_ranks, rank, tuple(folders), store_id, manifest.created, fingerprint, commits)


def own_stores(folders: Sequence[Sequence[str]]) -> list[SeenStore]:
    """Return the stores of all ranks, whose folders these are. Raises the errors of `own_store`, and `StorageError` if
    one has gone."""
    found = []
    for rank, of_rank in enumerate(folders):
        store = own_store(of_rank, rank, len(folders))
        if store is None:
            raise StorageError("the store has been removed from", path=of_rank[0], advice="restore it")
        found.append(store)
    return found


def seen_stores(directories: Sequence[Sequence[str]], seen_by: int, own_num_ranks: int) -> Iterator[SeenStore]:
    """Yield the stores of other numbers of ranks of which a rank sees a part."""
    for paths in directories:
        parts = {
            (num_ranks, rank)
            for path in paths
            for num_ranks, stores in stores_under(path).items()
            for rank, _ in stores
            if num_ranks != own_num_ranks
        }
        for num_ranks, rank in sorted(parts):
            folders = tuple(rank_folder(path, rank, num_ranks) for path in paths)
            store_id = created = fingerprint = damage = ""
            commits: tuple[Kept, ...] = ()
            try:
                manifest = next(filter(None, map(read_manifest, folders)), None)
                if manifest is None:  # a run has removed or moved it just now
                    continue
                store_id, created, fingerprint = manifest.store_id, manifest.created, manifest.model.fingerprint
                commits = tuple(Kept.of(commit, num_ranks) for commit in kept_commits(folders))
            except (StorageError, ForeignStoreError) as error:
                damage = str(error)
            yield SeenStore(seen_by, num_ranks, rank, folders, store_id, created, fingerprint, commits, damage)


def lost_commits(directories: Sequence[Sequence[str]]) -> Iterator[Kept]:
    """Yield the commits of stores that were set aside because a part was gone. A damaged one is logged."""
    for path in {path for paths in directories for path in paths if os.path.isdir(path)}:
        for name in filter(_LOST_FOLDER.fullmatch, os.listdir(path)):
            for folder, _, names in os.walk(os.path.join(path, name)):
                try:
                    commit = read_commit(folder) if MANIFEST_NAME in names else None
                except StorageError as error:
                    logger.warning("a store that was set aside is ignored: %s", error)
                    continue
                if commit is not None:
                    yield Kept.of(commit, 0)


def set_aside(stores: Sequence[tuple[SeenStore | None, int, Sequence[str]]], prefix: str, links: Links) -> list[str]:
    """Move stores to new folders ``<prefix>-<number of ranks>`` beside them, with a counter if some exist, and return
    these. All ranks call this together.

    ``stores`` are those that this rank sees: the store as it was reported (None: there is no report), its number of
    ranks, and its folders. All ranks hold the locks of all folders, and have noted what they move, before the first one
    is moved, so that `finish_moves` can finish it. A reported store that has changed meanwhile is left alone. Raises
    `StoreInUseError` and `StorageError`.
    """
    taken: set[str] = set()
    with ExitStack() as locks:
        mine: list[tuple[int, list[str]]] = []
        for rank in range(links.ranks.num_ranks):
            locked: list[str] = []
            for reported, num_ranks, directories in stores if rank == links.ranks.rank else ():
                folders = _locked(directories, taken | {*locked}, locks)
                locked += map(identity_of, folders)
                if folders and (reported is None or reported.is_unchanged()):
                    mine.append((num_ranks, folders))
                elif folders:
                    logger.warning(
                        "%s is left as it is, because it no longer is the store that this run has found there",
                        " and ".join(folders),
                    )
            for of_rank in links.all_gather("the old stores that each rank locks", json.dumps(locked).encode()):
                taken |= {*json.loads(of_rank)}
        beside = {shared_directory(folder) for _, folders in mine for folder in folders}
        proposal = [uuid.uuid4().hex, [name for folder in beside for name in used_names(folder)]]
        proposals = [
            json.loads(of_rank)
            for of_rank in links.all_gather("the folders beside the old stores", json.dumps(proposal).encode())
        ]
        used, move_id = {name for _, names in proposals for name in names}, str(proposals[0][0])
        moves = [
            Move(os.path.join(shared_directory(folder), unused_name(f"{prefix}-{num_ranks}", used)), folder, move_id)
            for num_ranks, folders in mine
            for folder in folders
        ]
        return move_together(moves, links)


def replace_stores(stores: Sequence[tuple[SeenStore, Sequence[str]]]) -> list[str]:
    """Move stores to new folders ``old-store-of-<number of ranks>`` beside them, as `set_aside` does, and move the
    folders of new stores into their places. Returns the folders of the old stores.

    ``stores`` are pairs of an old store and its successor's folders, one for each ssd path. If this process is killed,
    all old stores are in place, or `finish_moves` puts all new ones there. Raises `StoreInUseError`, and `StorageError`
    if an old store has changed.
    """
    move_id = uuid.uuid4().hex
    with ExitStack() as locks:
        for seen, successors in stores:
            for folder in (*seen.directories, *successors):
                locks.callback(DirectoryLock(folder).close)
            if not seen.is_unchanged():
                advice = "start again when no other run uses the store"
                raise StorageError("another step was committed meanwhile in", path=seen.directories[0], advice=advice)
            if not kept_commits(successors):
                raise StorageError("no new store is in", path=successors[0], advice="start again")
        pairs = [pair for seen, new in stores for pair in zip(seen.directories, new, strict=True)]
        beside = {shared_directory(folder) for folder, _ in pairs}
        name = unused_name(f"{OLD}-{len(stores)}", {name for folder in beside for name in used_names(folder)})
        moves = [
            Move(os.path.join(shared_directory(folder), name), folder, move_id, digest_of_manifest(folder), new)
            for folder, new in pairs
        ]
        return move_together(moves, Links.alone())


def log_aside(folders: Sequence[str], num_ranks: int) -> None:
    """Log where the old stores are, and that the user may delete them."""
    if folders:
        logger.warning(
            "the stores that this run, of %s, no longer needs are set aside in %s; you may delete these folders",
            times(num_ranks, "rank"),
            with_bytes(folders),
        )


def _locked(directories: Sequence[str], taken: Set[str], locks: ExitStack) -> list[str]:
    """Lock the folders that have files of a store, unless another rank of this run has locked them."""
    folders = [folder for folder in directories if os.path.isdir(folder) and names_in(folder)]
    if any(identity_of(folder) in taken for folder in folders):
        return []
    for folder in folders:
        locks.callback(DirectoryLock(folder).close)
    return folders
