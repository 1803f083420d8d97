"""Stores of other numbers of ranks: what a rank sees of them, and how all ranks set them aside. Nothing is removed."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from hf_lohan.checkpoint.resume_point import is_resumable
from hf_lohan.files import ForeignStoreError, StorageError
from hf_lohan.files.directories import make_directory, sync_directory
from hf_lohan.files.durable_file import read_whole, replace_durably
from hf_lohan.files.lock import LOCK_NAME, DirectoryLock
from hf_lohan.ranks import Links
from hf_lohan.store import Commit, kept_commits
from hf_lohan.store.commits import read_commit
from hf_lohan.store.manifest import MANIFEST_NAME, read_manifest
from hf_lohan.store.rank_folders import rank_folder, shared_directory, stores_under
from hf_lohan.store.store_folders import names_in
from hf_lohan.wording import exact_bytes, times

logger = logging.getLogger(__name__)

CUT_FROM = "cut_from"
"""Name of a fact in the commit of a store that was divided again: the number of ranks before."""
CUT_STORES = "cut_from_stores"
"""Name of a fact beside it: for each old rank, the id of its store and the number of its newest commit."""
OLD = "old-store-of"
"""Begin of the name of a folder with complete stores that a run has divided again."""
LOST = "lost-store-of"
"""Begin of the name of a folder with what is left of stores of which a part is gone."""
_LOST_FOLDER = re.compile(rf"{LOST}-\d+(-\d+)?")
_OLD_FOLDER = re.compile(rf"{OLD}-\d+(-\d+)?")


@dataclass(frozen=True)
class Kept:
    """What a rank tells the others about a commit of a store."""

    group_id: str
    number: int
    step: int
    is_resumable: bool
    cut_from: int | None
    """The number of ranks before, if the store was divided again and has no own step yet."""
    cut_stores: tuple[tuple[str, int], ...]
    launch_id: str | None
    last_checkpoint: str | None
    output_dir: str

    @classmethod
    def of(cls, commit: Commit, num_ranks: int) -> Kept:
        facts, step = commit.facts, commit.facts.get("global_step")
        cut_from = facts.get(CUT_FROM)
        return cls(
            commit.group_id,
            commit.number,
            step if type(step) is int else 0,
            is_resumable(commit),
            None if cut_from == num_ranks else cut_from,  # as an older version of `lohan reshard` may copy it
            tuple((str(store_id), int(number)) for store_id, number in facts.get(CUT_STORES, ())),
            facts.get("launch_id"),
            facts.get("last_checkpoint"),
            str(facts.get("output_dir")),
        )

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Kept:
        return cls(**{**fields, "cut_stores": tuple((store_id, number) for store_id, number in fields["cut_stores"])})

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


def seen_stores(directories: Sequence[Sequence[str]], seen_by: int, own_num_ranks: int) -> Iterator[SeenStore]:
    """Yield the stores of other numbers of ranks that a rank sees."""
    for paths in directories:
        for num_ranks, stores in stores_under(paths[0]).items():
            for rank, _ in stores if num_ranks != own_num_ranks else ():
                folders = tuple(rank_folder(path, rank, num_ranks) for path in paths)
                store_id = created = fingerprint = damage = ""
                commits: tuple[Kept, ...] = ()
                try:
                    manifest = read_manifest(folders[0])
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
    """Move stores to folders ``<prefix>-<number of ranks>`` beside them, and return these. All ranks call this
    together.

    ``stores`` are those that this rank sees: the store as it was reported (None: there is no report), its number of
    ranks, and its folders. All ranks hold the locks of all folders before the first one is moved. A reported store that
    has changed meanwhile is left alone. Raises `StoreInUseError` and `StorageError`.
    """
    taken: set[str] = set()
    with ExitStack() as locks:
        mine: list[tuple[int, list[str]]] = []
        for rank in range(links.ranks.num_ranks):
            locked: list[str] = []
            for reported, num_ranks, directories in stores if rank == links.ranks.rank else ():
                folders = _locked(directories, taken | {*locked}, locks)
                locked += map(_identity, folders)
                if folders and (reported is None or reported.is_unchanged()):
                    mine.append((num_ranks, folders))
                elif folders:
                    logger.warning(
                        "%s is left as it is, because it no longer is the store that this run has found there",
                        " and ".join(folders),
                    )
            for of_rank in links.all_gather("the old stores that each rank locks", json.dumps(locked).encode()):
                taken |= {*json.loads(of_rank)}
        targets = [_moved(folder, num_ranks, prefix) for num_ranks, folders in mine for folder in folders]
        links.barrier("the old stores to be set aside")
    return list(dict.fromkeys(targets))


def log_aside(folders: Sequence[str], num_ranks: int) -> None:
    """Log where the old stores are, and that the user may delete them."""
    if folders:
        logger.warning(
            "the stores that this run, of %s, no longer needs are set aside in %s; you may delete these folders",
            times(num_ranks, "rank"),
            _with_bytes(folders),
        )


def aside_of(directories: Sequence[str]) -> str:
    """Return the folders beside these stores that no run needs, with their bytes; "" if there are none. What is left of
    lost stores is not among them: a run needs it if the missing part comes back."""
    folders = [
        os.path.join(directory, name)
        for directory in dict.fromkeys(map(shared_directory, directories))
        if os.path.isdir(directory)
        for name in sorted(filter(_OLD_FOLDER.fullmatch, os.listdir(directory)))
    ]
    return _with_bytes(folders) if folders else ""


def _with_bytes(folders: Sequence[str]) -> str:
    return " and ".join(f"{folder} ({exact_bytes(_bytes_in(folder))})" for folder in folders)


def _bytes_in(folder: str) -> int:
    files = (os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return sum(os.lstat(file).st_size for file in files)


def _locked(directories: Sequence[str], taken: Set[str], locks: ExitStack) -> list[str]:
    """Lock the folders that have files of a store, unless another rank of this run has locked them."""
    folders = [folder for folder in directories if os.path.isdir(folder) and names_in(folder)]
    if any(_identity(folder) in taken for folder in folders):
        return []
    for folder in folders:
        locks.callback(DirectoryLock(folder).close)
    return folders


def _identity(folder: str) -> str:
    """Describe the lock of a folder. Each holder writes to it, so folders of two machines differ in the time."""
    try:
        status = os.stat(os.path.join(folder, LOCK_NAME))
    except OSError:
        return ""
    return f"{os.path.realpath(folder)} {status.st_ino} {status.st_mtime_ns}"


def _moved(folder: str, num_ranks: int, prefix: str) -> str:
    """Move the files of a store to a folder of the same name below a new folder, durably, and return that."""
    directory = shared_directory(folder)
    name = "" if folder == directory else os.path.basename(folder)
    target = _target(directory, name, f"{prefix}-{num_ranks}")
    try:
        make_directory(target)
        if name:
            os.rename(folder, os.path.join(target, name))
        else:
            _move_files(directory, target)
        sync_directory(target)
        sync_directory(directory)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        advice = "check that its directory is writable"
        raise StorageError("cannot rename", path=folder, errno=error.errno, advice=advice) from error
    return target


def _move_files(directory: str, target: str) -> None:
    """Move the files of a single rank's store. Its manifest is last, so a killed move leaves a store that is not taken
    for one without state. The target gets a copy of the manifest first, so that the next run goes on with this move."""
    names = [file for file in reversed(names_in(directory)) if file != MANIFEST_NAME]
    source, copy = os.path.join(directory, MANIFEST_NAME), os.path.join(target, MANIFEST_NAME)
    has_manifest = os.path.lexists(source)
    if has_manifest:
        replace_durably(copy, read_whole(source))
    for file in names:
        os.rename(os.path.join(directory, file), os.path.join(target, file))
    sync_directory(target)
    if has_manifest:
        os.rename(source, copy)


def _target(directory: str, name: str, wanted: str) -> str:
    for number in itertools.count(1):
        target = os.path.join(directory, wanted if number == 1 else f"{wanted}-{number}")
        if not os.path.lexists(os.path.join(target, name) if name else target):
            return target
        if not name and _is_begun(directory, target):
            return target
    raise AssertionError("the numbers do not end")


def _is_begun(directory: str, target: str) -> bool:
    """Whether a killed run has moved a part of the store in ``directory`` to ``target``, or has only made that."""
    if os.path.isdir(target) and not names_in(target):
        return True
    manifests = [read_manifest(folder) for folder in (directory, target) if os.path.isdir(folder)]
    ids = {None if manifest is None else (manifest.store_id, manifest.path_index) for manifest in manifests}
    both = {*names_in(directory)} & {*names_in(target)}
    return len(manifests) == 2 and len(ids) == 1 and None not in ids and both == {MANIFEST_NAME}
