"""Stores of other numbers of ranks: what a rank sees of them, and how all ranks set them aside. Nothing is removed."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from hf_lohan.checkpoint.resume_point import is_resumable
from hf_lohan.files import ForeignStoreError, StorageError
from hf_lohan.files.directories import make_directory, sync_directory
from hf_lohan.files.durable_file import read_whole, remove_durably, replace_durably
from hf_lohan.files.lock import LOCK_NAME, DirectoryLock
from hf_lohan.planning.run_plan import RUN_ID
from hf_lohan.ranks import Links, one_rank_at_a_time
from hf_lohan.store import Commit, kept_commits
from hf_lohan.store.commits import read_commit
from hf_lohan.store.manifest import MANIFEST_NAME, read_manifest
from hf_lohan.store.rank_folders import rank_folder, shared_directory, stores_under
from hf_lohan.store.store_folders import names_in
from hf_lohan.wording import exact_bytes, times

logger = logging.getLogger(__name__)

RESHARDED_FROM = "cut_from"
"""Name of a fact in the commit of a store that was resharded, as in the first version: the number of ranks
before."""
RESHARDED_STORES = "cut_from_stores"
"""Name of a fact beside it: for each old rank, the id of its store and the number of its newest commit."""
OLD = "old-store-of"
"""Begin of the name of a folder with complete stores that a run has resharded."""
NEW = "new-store-of"
"""Begin of the name of a folder with new stores, until they take the places of others of the same number of ranks."""
LOST = "lost-store-of"
"""Begin of the name of a folder with what is left of stores of which a part is gone."""
_LOST_FOLDER = re.compile(rf"{LOST}-\d+(-\d+)?")
_OLD_FOLDER = re.compile(rf"{OLD}-\d+(-\d+)?")
_ASIDE_FOLDER = re.compile(rf"({OLD}|{LOST})-\d+(-\d+)?")
_NOTE = re.compile(r"moving-(store|rank-\d+-of-\d+)\.json")
"""Name of a file beside a store that is being set aside, until all stores of its move are."""


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
        beside = {shared_directory(folder) for _, folders in mine for folder in folders}
        proposal = [uuid.uuid4().hex, [name for folder in beside for name in _used_names(folder)]]
        proposals = [
            json.loads(of_rank)
            for of_rank in links.all_gather("the folders beside the old stores", json.dumps(proposal).encode())
        ]
        used, move_id = {name for _, names in proposals for name in names}, str(proposals[0][0])
        moves = [
            _Move(os.path.join(shared_directory(folder), _unused(f"{prefix}-{num_ranks}", used)), folder, move_id)
            for num_ranks, folders in mine
            for folder in folders
        ]
        for move in moves:
            move.note()
        links.barrier("the moves of the old stores to be noted")
        for move in moves:
            move.finish()
        links.barrier("the old stores to be set aside")
        for move in moves:
            move.forget()
    return list(dict.fromkeys(move.target for move in moves))


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
        pairs = [pair for seen, new in stores for pair in zip(seen.directories, new, strict=True)]
        beside = {shared_directory(folder) for folder, _ in pairs}
        name = _unused(f"{OLD}-{len(stores)}", {name for folder in beside for name in _used_names(folder)})
        moves = [
            _Move(os.path.join(shared_directory(folder), name), folder, move_id, _digest_of_manifest(folder), new)
            for folder, new in pairs
        ]
        for move in moves:
            move.note()
        for move in moves:
            move.finish()
        for move in moves:
            move.forget()
    return list(dict.fromkeys(move.target for move in moves))


def _used_names(directory: str) -> list[str]:
    """Return the names of what earlier runs have set aside there, without the empty folders that a killed run has left.
    Other folders, such as a drive's `lost+found`, may be unreadable."""
    return [
        entry.name
        for entry in os.scandir(directory)
        if _ASIDE_FOLDER.fullmatch(entry.name)
        and (not entry.is_dir() or any(not name.endswith(".new") for name in os.listdir(entry.path)))
    ]


def _unused(wanted: str, used: Set[str]) -> str:
    return next(
        name for number in itertools.count(1) if (name := wanted if number == 1 else f"{wanted}-{number}") not in used
    )


def finish_moves(directories: Sequence[Sequence[str]], links: Links) -> None:
    """Finish what a killed run has begun to set aside below these directories, on all ssd paths, or drop it if no store
    has been moved. All ranks call this together, first of all. Raises `StoreInUseError` and `StorageError`."""
    paths = sorted({os.path.abspath(path) for of_store in directories for path in of_store})
    begun = [(move.move_id, move.has_begun) for path in paths for move in _noted_moves(path)]
    packed = links.all_gather("the moves that a killed run has begun", json.dumps(begun).encode())
    every = [(str(move_id), has_begun) for of_rank in packed for move_id, has_begun in json.loads(of_rank)]
    if not every:
        return
    has_begun = {move_id for move_id, has_begun in every if has_begun}  # notes are complete on all paths
    # Nodes may share an ssd path.
    with one_rank_at_a_time(links, "a move that a killed run has begun", of_all_nodes=True):
        for move in (move for path in paths for move in _noted_moves(path)):
            if move.move_id in has_begun and move.is_unfinished:
                # Without the old store, its successor is still to be moved.
                lock = DirectoryLock(move.folder if os.path.isdir(move.folder) else move.successor)
                try:
                    if move.is_unfinished:
                        move.finish()
                        logger.warning(
                            "a run that was killed had begun to move the store in %s, and the rest of it is now in %s",
                            move.folder,
                            move.target,
                        )
                finally:
                    lock.close()
            move.forget()


@dataclass(frozen=True)
class _Move:
    """The move of one path's part of a store."""

    target: str
    """The folder in which a single rank's files, or the folder of one of several ranks, are afterwards."""
    folder: str
    move_id: str
    """The same for all stores and paths that are moved together."""
    digest: str | None = None
    """Of the manifest, in a move that was noted before."""
    successor: str = ""
    """The folder of a new store that takes the place of a rank's folder."""

    @property
    def _name(self) -> str:
        """The folder's name in the target; "" for a single rank's files."""
        return os.path.basename(self.folder) if shared_directory(self.folder) != self.folder else ""

    @property
    def _note(self) -> str:
        return os.path.join(self.target, f"moving-{self._name or 'store'}.json")

    def note(self) -> None:
        """Note durably what will be moved."""
        content = {
            "move": self.move_id,
            "manifest": _digest_of_manifest(self.folder),
            "new": os.path.basename(os.path.dirname(self.successor)),
        }
        try:
            make_directory(self.target)
            sync_directory(os.path.dirname(self.target))
        except OSError as error:
            raise self._failure(error) from error
        replace_durably(self._note, json.dumps(content).encode())

    @property
    def is_unfinished(self) -> bool:
        """Whether the noted part is still, or partly, in its place, or its successor is not. Its manifest is moved
        last."""
        return self._is_in_place or os.path.isdir(self.successor)

    @property
    def _is_in_place(self) -> bool:
        return bool(names_in(self.folder)) and _digest_of_manifest(self.folder) == self.digest

    @property
    def has_begun(self) -> bool:
        return not self._is_in_place or (not self._name and bool(names_in(self.target)))

    def finish(self) -> None:
        try:
            if self._name and (self._is_in_place or self.digest is None):
                os.rename(self.folder, os.path.join(self.target, self._name))
            elif not self._name:
                for file in sorted(names_in(self.folder), key=lambda name: name == MANIFEST_NAME):
                    if file == MANIFEST_NAME:
                        sync_directory(self.target)
                    os.rename(os.path.join(self.folder, file), os.path.join(self.target, file))
            sync_directory(self.target)  # of a store and its successor never both are in one place
            if os.path.isdir(self.successor):
                os.rename(self.successor, self.folder)
            sync_directory(os.path.dirname(self.target))
        except OSError as error:
            raise self._failure(error) from error

    def forget(self) -> None:
        """Remove the note, and the target if it is empty."""
        remove_durably(self._note)
        for folder in (self.target, os.path.dirname(self.successor)):
            with suppress(OSError):
                os.rmdir(folder)

    def _failure(self, error: OSError) -> StorageError:
        if isinstance(error, StorageError):
            return error
        advice = "check that its directory is writable"
        return StorageError("cannot rename", path=self.folder, errno=error.errno, advice=advice)


def _noted_moves(directory: str) -> Iterator[_Move]:
    for name in sorted(filter(_ASIDE_FOLDER.fullmatch, os.listdir(directory) if os.path.isdir(directory) else [])):
        target = os.path.join(directory, name)
        for note in sorted(filter(_NOTE.fullmatch, os.listdir(target) if os.path.isdir(target) else [])):
            match = _NOTE.fullmatch(note)
            assert match is not None, "it was filtered"
            folder = directory if match[1] == "store" else os.path.join(directory, match[1])
            file = os.path.join(target, note)
            try:
                fields = json.loads(read_whole(file))
                new = fields.get("new")
                successor = os.path.join(directory, str(new), match[1]) if new else ""
                yield _Move(target, folder, str(fields["move"]), str(fields["manifest"]), successor)
            except FileNotFoundError:
                continue  # another rank has just removed it
            except (ValueError, KeyError, TypeError) as error:
                what = "the files of the store" if match[1] == "store" else match[1]
                advice = f"move {what} to its folder if a part of it is there, and delete the note"
                raise StorageError("no valid note of a move in", path=file, advice=advice) from error


def _digest_of_manifest(folder: str) -> str:
    try:
        return hashlib.sha256(read_whole(os.path.join(folder, MANIFEST_NAME))).hexdigest()
    except FileNotFoundError:
        return ""


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
