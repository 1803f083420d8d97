"""Moves of whole stores to other folders. Notes on disk say what is moved, so that a killed move can be finished."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

from hf_lohan.files import StorageError, StoreInUseError
from hf_lohan.files.directories import make_directory, sync_directory
from hf_lohan.files.durable_file import read_whole, remove_durably, remove_folder, replace_durably
from hf_lohan.files.lock import LOCK_NAME, DirectoryLock
from hf_lohan.ranks import Links, one_rank_at_a_time
from hf_lohan.store.manifest import MANIFEST_NAME
from hf_lohan.store.rank_folders import shared_directory, stores_under
from hf_lohan.store.store_folders import names_in
from hf_lohan.wording import exact_bytes

logger = logging.getLogger(__name__)

OLD = "old-store-of"
"""Begin of the name of a folder with complete stores that a run has resharded."""
NEW = "new-store-of"
"""Begin of the name of a folder with new stores, until they take the places of others of the same number of ranks."""
LOST = "lost-store-of"
"""Begin of the name of a folder with what is left of stores of which a part is gone."""
_UNUSED_FOLDER = re.compile(rf"({OLD}|{NEW})-\d+(-\d+)?")
_ASIDE_FOLDER = re.compile(rf"({OLD}|{LOST})-\d+(-\d+)?")
_SINGLE = "store"
"""Name of the part that is a single rank's store."""
_NOTE = re.compile(r"moving-(store|rank-\d+-of-\d+)\.json")
"""Name of a file beside a store that is being set aside, until all stores of its move are."""


@dataclass(frozen=True)
class Move:
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
    together: Mapping[str, int] = field(default_factory=dict)
    """How many parts of each name are moved together, on all paths of all machines; empty in a note of an older
    version."""

    @property
    def part_name(self) -> str:
        return self._name or _SINGLE

    @property
    def _name(self) -> str:
        """The folder's name in the target; "" for a single rank's files."""
        return os.path.basename(self.folder) if shared_directory(self.folder) != self.folder else ""

    @property
    def note_path(self) -> str:
        return os.path.join(self.target, f"moving-{self.part_name}.json")

    def note(self) -> None:
        """Note durably what will be moved."""
        content = {
            "move": self.move_id,
            "manifest": digest_of_manifest(self.folder),
            "new": os.path.basename(os.path.dirname(self.successor)),
            "together": dict(self.together),
        }
        try:
            make_directory(self.target)
            sync_directory(os.path.dirname(self.target))
        except OSError as error:
            raise self._failure(error) from error
        replace_durably(self.note_path, json.dumps(content).encode())

    @property
    def is_unfinished(self) -> bool:
        """Whether the noted part is still, or partly, in its place, or its successor is not. Its manifest is moved
        last."""
        return self._is_in_place or os.path.isdir(self.successor)

    @property
    def is_outdated(self) -> bool:
        """Whether a run has made another store in the place of the old one, so that the successor has no place."""
        return os.path.isdir(self.successor) and bool(names_in(self.folder)) and not self._is_in_place

    @property
    def _is_in_place(self) -> bool:
        return bool(names_in(self.folder)) and digest_of_manifest(self.folder) == self.digest

    @property
    def has_begun(self) -> bool:
        if self.is_outdated:
            return False
        return not self._is_in_place or (not self._name and bool(names_in(self.target)))

    def lock(self) -> DirectoryLock | None:
        """Lock the store where it is now, or its successor. None if neither exists."""
        folders = (self.folder, self.successor, os.path.join(self.target, self._name))
        folder = next(filter(os.path.isdir, folders), None)
        return None if folder is None else DirectoryLock(folder)

    def finish(self) -> None:
        try:
            if self._name and (self._is_in_place or self.digest is None):
                os.rename(self.folder, os.path.join(self.target, self._name))
            elif not self._name:
                for file in sorted(names_in(self.folder), key=lambda name: name == MANIFEST_NAME):
                    if file == MANIFEST_NAME:
                        sync_directory(self.target)
                    os.rename(os.path.join(self.folder, file), os.path.join(self.target, file))
            sync_directory(self.target)  # so that a folder never has files of the old store and of its successor
            if os.path.isdir(self.successor):
                os.rename(self.successor, self.folder)
            sync_directory(os.path.dirname(self.target))
        except OSError as error:
            raise self._failure(error) from error

    def forget(self) -> None:
        """Remove the note, and the target if it is empty."""
        remove_durably(self.note_path)
        for folder in (self.target, os.path.dirname(self.successor)):
            with suppress(OSError):
                os.rmdir(folder)

    def _failure(self, error: OSError) -> StorageError:
        if isinstance(error, StorageError):
            return error
        advice = "check that its directory is writable"
        return StorageError("cannot rename", path=self.folder, errno=error.errno, advice=advice)


def move_together(moves: Sequence[Move], links: Links) -> list[str]:
    """Note the moves of all ranks, move the stores, and remove the notes. Returns this rank's targets. All ranks call
    this together, and hold the locks of the folders. Raises `StorageError`; if it was raised before a store was moved,
    no note of this rank is left."""
    names = json.dumps([move.part_name for move in moves]).encode()
    together = Counter(
        name for of_rank in links.all_gather("the stores that move", names) for name in json.loads(of_rank)
    )
    moves = [replace(move, together=together) for move in moves]
    try:
        for move in moves:
            move.note()
    except BaseException:
        for move in moves:  # no rank passes the barrier, so no store is moved
            with suppress(OSError):
                move.forget()
        raise
    links.barrier("the moves of the old stores to be noted")
    for move in moves:
        move.finish()
    links.barrier("the old stores to be set aside")
    for move in moves:
        move.forget()
    return list(dict.fromkeys(move.target for move in moves))


def finish_moves(directories: Sequence[Sequence[str]], links: Links) -> None:
    """Finish what a killed run has begun to set aside below these directories, on all ssd paths, or drop it if no store
    has been moved. If the ranks see only a part of the stores and none of these has been moved, the notes stay, because
    others may have been. All ranks call this together, first of all. Raises `StoreInUseError` and `StorageError`."""
    paths = sorted({os.path.abspath(path) for of_store in directories for path in of_store})
    noted = [(move.move_id, move.has_begun, dict(move.together)) for path in paths for move in noted_moves(path)]
    seen = json.dumps([noted, [*_parts_in(paths)]]).encode()
    packed = [json.loads(of_rank) for of_rank in links.all_gather("the moves that a killed run has begun", seen)]
    every = [of_note for notes, _ in packed for of_note in notes]
    if not every:
        return
    has_begun = {move_id for move_id, has_begun, _ in every if has_begun}  # notes are complete on all paths
    # Nodes may share an ssd path.
    present = Counter(name for name, _ in {(name, identity) for _, parts in packed for name, identity in parts})
    known = has_begun | {move_id for move_id, _, together in every if not Counter(together) - present}
    # Nodes may share an ssd path.
    with one_rank_at_a_time(links, "a move that a killed run has begun", of_all_nodes=True):
        for move in (move for path in paths for move in noted_moves(path)):
            if move.move_id in known:
                _finish_or_drop(move, finishes=move.move_id in has_begun)
            else:
                logger.warning(
                    "%s says that a process was about to move stores, and some of these are not here: %s; give all ssd "
                    "paths of all machines, or delete this file if the stores are gone",
                    move.note_path,
                    ", ".join(sorted(Counter(move.together) - present)),
                )


def _parts_in(paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the identity of each part of a store in these directories."""
    for path in paths:
        for _, folder in itertools.chain(*stores_under(path).values()):
            name = os.path.basename(folder) if shared_directory(folder) != folder else _SINGLE
            yield name, identity_of(folder) or os.path.realpath(folder)


def _finish_or_drop(move: Move, *, finishes: bool) -> None:
    with ExitStack() as locks:
        if (lock := move.lock()) is not None:  # the process that has noted the move may be alive
            locks.callback(lock.close)
        if move.is_outdated:
            logger.warning(
                "%s holds another store than the one that was to be replaced by %s, so this is not needed; you may "
                "delete it",
                move.folder,
                move.successor,
            )
        elif finishes and move.is_unfinished:
            move.finish()
            logger.warning(
                "a run that was killed had begun to move the store in %s, and the rest of it is now in %s",
                move.folder,
                move.target,
            )
        elif not finishes and os.path.isdir(move.successor):  # a copy of the store that stays
            remove_folder(move.successor)
        move.forget()


def unfinished_move(directories: Sequence[str]) -> str:
    """Return the folder from which a killed run has begun to move stores of which others are still to be moved; "" if
    there is none."""
    moves = [move for path in directories for move in noted_moves(os.path.abspath(path))]
    has_begun = {move.move_id for move in moves if move.has_begun}
    return next((move.folder for move in moves if move.move_id in has_begun and move.is_unfinished), "")


def refuse_unfinished_move(directories: Sequence[str]) -> None:
    """Raise ValueError if a killed run has moved a part of the stores in these directories."""
    if folder := unfinished_move(directories):
        raise ValueError(
            f"the stores in {shared_directory(folder)} are being moved, or a process was killed while it moved them, "
            "so some are not in their places; the next run with these stores, or lohan reshard, finishes the move"
        )


def noted_moves(directory: str) -> Iterator[Move]:
    for name in sorted(filter(_ASIDE_FOLDER.fullmatch, os.listdir(directory) if os.path.isdir(directory) else [])):
        target = os.path.join(directory, name)
        for note in sorted(filter(_NOTE.fullmatch, os.listdir(target) if os.path.isdir(target) else [])):
            match = _NOTE.fullmatch(note)
            assert match is not None, "it was filtered"
            folder = directory if match[1] == _SINGLE else os.path.join(directory, match[1])
            file = os.path.join(target, note)
            try:
                fields = json.loads(read_whole(file))
                new = fields.get("new")
                successor = os.path.join(directory, str(new), match[1]) if new else ""
                move_id, digest, together = fields["move"], fields["manifest"], {**fields.get("together", {})}
                yield Move(target, folder, str(move_id), str(digest), successor, together)
            except FileNotFoundError:
                continue  # another rank has just removed it
            except (ValueError, KeyError, TypeError) as error:
                what = "the files of the store" if match[1] == _SINGLE else match[1]
                advice = f"move {what} from {target} to {directory} if a part is in {target}, and delete the note"
                raise StorageError("no valid note of a move in", path=file, advice=advice) from error


def digest_of_manifest(folder: str) -> str:
    try:
        return hashlib.sha256(read_whole(os.path.join(folder, MANIFEST_NAME))).hexdigest()
    except FileNotFoundError:
        return ""


def remove_unmoved(new_paths: Sequence[str], paths: Sequence[str]) -> None:
    """Remove new stores in ``new_paths`` that were to take the places of stores in ``paths``, unless a move of these
    was noted."""
    with ExitStack() as locks, suppress(StoreInUseError):
        for path in new_paths:
            for stores in stores_under(path).values():
                for _, folder in stores:  # another process may have made its own meanwhile
                    locks.callback(DirectoryLock(folder).close)
        if not any(True for path in paths for _ in noted_moves(path)):
            for path in new_paths:
                remove_folder(path)


def unused_name(wanted: str, used: Set[str]) -> str:
    return next(
        name for number in itertools.count(1) if (name := wanted if number == 1 else f"{wanted}-{number}") not in used
    )


def used_names(directory: str) -> list[str]:
    """Return the names of what earlier runs have set aside there, without the empty folders that a killed run has left.
    Other folders, such as a drive's `lost+found`, may be unreadable."""
    return [
        entry.name
        for entry in os.scandir(directory)
        if _ASIDE_FOLDER.fullmatch(entry.name)
        and (not entry.is_dir() or any(not name.endswith(".new") for name in os.listdir(entry.path)))
    ]


def aside_of(directories: Sequence[str]) -> str:
    """Return the folders beside these stores that no run needs, with their bytes; "" if there are none. What is left of
    lost stores is not among them: a run needs it if the missing part comes back."""
    folders = []
    for directory in filter(os.path.isdir, dict.fromkeys(map(shared_directory, directories))):
        needed = {
            folder for move in noted_moves(directory) for folder in (move.target, os.path.dirname(move.successor))
        }
        names = sorted(filter(_UNUSED_FOLDER.fullmatch, os.listdir(directory)))
        folders += [path for name in names if (path := os.path.join(directory, name)) not in needed]
    return with_bytes(folders)


def with_bytes(folders: Sequence[str]) -> str:
    return " and ".join(f"{folder} ({exact_bytes(_bytes_in(folder))})" for folder in folders)


def _bytes_in(folder: str) -> int:
    files = (os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return sum(os.lstat(file).st_size for file in files)


def identity_of(folder: str) -> str:
    """Describe the lock of a folder. Each holder writes to it, so folders of two machines differ in the time."""
    try:
        status = os.stat(os.path.join(folder, LOCK_NAME))
    except OSError:
        return ""
    return f"{os.path.realpath(folder)} {status.st_ino} {status.st_mtime_ns}"
