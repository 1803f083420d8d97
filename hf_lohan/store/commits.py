"""What is committed: the file whose replacement is the commit, the log and the model's files that belong to it, and the
commits of an open store, one after the other."""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from threading import Lock
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load, save

from hf_lohan.files import StorageError, replace_durably
from hf_lohan.files.durable_file import AppendedLog, read_whole, remove_durably, remove_folder, write_folder
from hf_lohan.store.versions import Checksums, Homes

logger = logging.getLogger(__name__)

COMMIT_NAME = "commit.safetensors"
PREVIOUS_NAME = "commit-previous.safetensors"
"""The commit before, as long as some rank may not have the last one."""
LOG_NAME = "log.jsonl"
MODEL_NAMES = ("model-0", "model-1")
"""Folders of the model's files: the one that is committed, and the one for the next."""
_JOURNAL = "journal/"
_ARRAYS = ("home", "checksum", "journal")
_MAX_BYTES = 1 << 30
"""No commit is larger: it has 9 bytes for a granule of 32 KiB or more, and small files."""
_ADVICE = "check the drive; the store must be made anew, from a checkpoint"
_MODEL_ADVICE = "check the drive; put the right file back, or train a step and use that commit"


@dataclass(frozen=True, eq=False)
class Commit:
    """What one commit wrote down: the version of every granule, and what its writer wants to find again."""

    store_id: str
    number: int
    """Commits of this store are counted from 1."""
    home: npt.NDArray[np.uint8]
    checksum: Checksums
    facts: Mapping[str, Any] = field(default_factory=dict)
    """In JSON's types."""
    journal: Mapping[str, bytes] = field(default_factory=dict)
    """Small files, by name."""
    log_start_byte: int = 0
    log_stop_byte: int = 0
    """The part of the store's log file that belongs to this commit."""
    log_crc32: int = 0
    """Of that part: unlike a hash, it can be carried on."""
    is_torn: bool = False
    """Whether records are being changed in place, so that they are of no step."""
    model_folder: str = ""
    """Where the model's files lie, beside the commit."""
    model_files: Mapping[str, str] = field(default_factory=dict)
    """Their xxh3, by name in that folder."""
    group_id: str = ""
    """Of the ranks that commit together, and number their commits alike."""
    layout_id: str = ""
    """Of the manifest that says where its records are; "" where an older version of this library made the store."""

    def check_model_files(self, directory: str) -> str:
        """The folder of the model's files in the store's first ``directory``. Raises `StorageError` where one is not as
        it was committed."""
        folder = os.path.join(directory, self.model_folder)
        for name, digest in self.model_files.items():
            file = os.path.join(folder, name)
            try:
                is_right = xxhash.xxh3_64_hexdigest(read_whole(file)) == digest
            except FileNotFoundError:
                raise StorageError("missing is", path=file, advice=_MODEL_ADVICE) from None
            if not is_right:
                raise StorageError("the checksum is wrong of", path=file, advice=_MODEL_ADVICE)
        return folder

    def read_log(self, directory: str) -> bytes:
        """The lines that belong to it. Raises `StorageError` if they are not there, or not as they were written."""
        log = AppendedLog(os.path.join(directory, LOG_NAME))
        lines = log.read(self.log_start_byte, self.log_stop_byte)
        if zlib.crc32(lines) != self.log_crc32:
            advice = "check the drive; resume from a checkpoint"
            raise StorageError("the checksum is wrong of", path=log.path, advice=advice)
        return lines


def write_commit(commit: Commit, directory: str, *, keep_previous: bool = False) -> None:
    """Put it in place of the last one, whole or not at all, and keep that one beside it if wanted. See
    `replace_durably`."""
    arrays: dict[str, npt.NDArray[Any]] = {"home": commit.home, "checksum": commit.checksum}
    arrays |= {_JOURNAL + name: np.frombuffer(content, np.uint8) for name, content in commit.journal.items()}
    head = {part.name: getattr(commit, part.name) for part in fields(commit) if part.name not in _ARRAYS}
    if not commit.layout_id:  # so that the version that made the store still reads it
        del head["layout_id"]
    text = json.dumps(head)
    metadata = {"commit": text, "xxh3": _digest(text, arrays)}
    kept_as = os.path.join(directory, PREVIOUS_NAME) if keep_previous else None
    replace_durably(os.path.join(directory, COMMIT_NAME), save(arrays, metadata), kept_as=kept_as)


def read_commit(directory: str, name: str = COMMIT_NAME) -> Commit | None:
    """The commit in a store's first directory, None if there is none yet. Raises `StorageError` if it is damaged."""
    file = os.path.join(directory, name)
    try:
        content = read_whole(file, _MAX_BYTES)
    except FileNotFoundError:
        return None
    try:
        arrays, metadata = load(content), _metadata(content)
        text = metadata["commit"]
        if _digest(text, arrays) == metadata["xxh3"]:
            return _parse(json.loads(text), arrays)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        raise StorageError("not a commit is", path=file, advice=f"{_ADVICE} ({type(error).__name__})") from error
    raise StorageError("the checksum is wrong of", path=file, advice=_ADVICE)


def previous_commit(directory: str, last: Commit | None) -> Commit | None:
    """The commit before ``last``, if it was kept for other ranks. One that is damaged counts as not kept, with a
    warning: the last one is whole without it."""
    try:
        kept = read_commit(directory, PREVIOUS_NAME)
    except StorageError as error:
        logger.warning("the commit before the last one counts as not kept: %s", error)
        return None
    if kept is None or last is None:
        return None
    is_before = (kept.store_id, kept.layout_id, kept.number) == (last.store_id, last.layout_id, last.number - 1)
    return kept if is_before else None


def _parse(head: dict[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Commit:
    for name, value in head.items():
        kind = type(getattr(_EMPTY, name))
        if not isinstance(value, kind) or (kind is int and value < 0):
            raise ValueError(f"{name} is {value!r}")
    if any(os.path.isabs(name) or ".." in name.split("/") for name in (head["model_folder"], *head["model_files"])):
        raise ValueError("the model's files lie outside the store")
    journal = {
        name.removeprefix(_JOURNAL): array.tobytes() for name, array in arrays.items() if name.startswith(_JOURNAL)
    }
    return Commit(home=arrays["home"], checksum=arrays["checksum"], journal=journal, **head)


def _metadata(content: bytes) -> dict[str, str]:
    """What the header of a safetensors file says beside its tensors."""
    header_bytes = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + header_bytes])["__metadata__"]
    assert isinstance(metadata, dict), "safetensors has checked the header before"
    return metadata


def _digest(text: str, arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    digest = xxhash.xxh3_64(text.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


_EMPTY = Commit("", 0, np.zeros(0, np.uint8), np.zeros(0, np.uint64))


class Agreement(Protocol):
    """Between the ranks of a run, of which commits all of them have."""

    group_id: str

    def announce_commit(self, number: int) -> None:
        """This rank's commit is durable."""

    def wait_for_commit(self, number: int) -> None:
        """Return when every rank's is. Raises where one of them has failed."""


class CommitSequence:
    """Keeps the commit file, the log and the model's files of the store in ``directory``, whose lock is held: each
    commit is in place, whole, before the next may touch a byte."""

    def __init__(self, store_id: str, layout_id: str, directory: str, last: Commit | None) -> None:
        self._directory = directory
        self.last = last
        """None before the first."""
        self._none = replace(_EMPTY, store_id=store_id, layout_id=layout_id)
        self._log = AppendedLog(os.path.join(directory, LOG_NAME))
        self._is_marked_torn = last is not None and last.is_torn
        self._is_settled = True
        """Whether the commit file is certainly that of ``last``, also after a power cut."""
        self._lock = Lock()
        self._agreement: Agreement | None = None
        self._is_agreed = True
        """Whether all ranks have the last commit, so that nobody goes back to the one before."""
        self._is_read_only = False

    def agree(self, agreement: Agreement) -> None:
        """From now on each commit is one of several ranks. What it takes the place of stays until all have it."""
        self._agreement, self._is_agreed = agreement, False

    def count_from(self, number: int) -> None:
        """The first commit has this number."""
        assert self.last is None and number > 0, "there is a commit"
        self._none = replace(self._none, number=number - 1)

    def _wait_for_all(self) -> None:
        if self._agreement is not None and not self._is_agreed:
            if self.last is not None:
                self._agreement.wait_for_commit(self.last.number)
            self._is_agreed = True

    def tell_others(self) -> None:
        """The last commit is durable, and this rank will be at it."""
        if self._agreement is not None and self.last is not None:
            self._agreement.announce_commit(self.last.number)

    @property
    def previous(self) -> Commit | None:
        """The commit before the last one, if it was kept."""
        return previous_commit(self._directory, self.last)

    def look_at(self, commit: Commit) -> None:
        """Name ``commit`` as the last one, on no disk: nothing may be written from here on."""
        self.last, self._is_read_only = commit, True

    def go_back(self, commit: Commit | None) -> None:
        """Put ``commit``, the one before the last one, in its place; None: there was none. Raises `CapacityError` or
        `StorageError`."""
        with self._lock:
            self._is_settled = False
            if commit is None:
                remove_durably(os.path.join(self._directory, COMMIT_NAME))
            else:
                write_commit(commit, self._directory)
            self._is_settled, self._is_marked_torn = True, False
            self.last = commit

    def before_write(self, tears: bool) -> None:
        """Before records are written: what is on disk must not name bytes that go away, other than as torn.

        A commit that failed at its very end may be in place all the same, and a power cut may bring either: then the
        last one is put back first. What is written may go where the commit before the last one has its bytes, so all
        ranks have the last one first. Raises `CapacityError` or `StorageError` if that fails.
        """
        assert not self._is_read_only, "the disk has another commit than the one that is looked at"
        if not self._is_agreed:
            self._wait_for_all()
        if self._is_settled and (self._is_marked_torn or not tears):
            return
        with self._lock:
            marks_torn = self._is_marked_torn or tears
            if self._is_settled and marks_torn == self._is_marked_torn:
                return
            self._is_settled = False
            if self.last is None:
                remove_durably(os.path.join(self._directory, COMMIT_NAME))
            else:
                torn = replace(self.last, journal={}, log_start_byte=0, log_stop_byte=0, log_crc32=0, is_torn=True)
                write_commit(torn if marks_torn else self.last, self._directory)
                self._is_marked_torn = marks_torn
            self._is_settled = True

    def follow(
        self,
        home: Homes,
        checksum: Checksums,
        facts: Mapping[str, Any],
        journal: Mapping[str, bytes],
        log_lines: bytes,
        *,
        keep_log: bool,
        model_files: Mapping[str, bytes] | None,
    ) -> None:
        """Make these the last commit. Raises `CapacityError` or `StorageError`, and then the last one is as before."""
        assert not self._is_read_only, "the disk has another commit than the one that is looked at"
        self._wait_for_all()
        last = self.last or self._none
        log_start, crc32 = last.log_start_byte, last.log_crc32
        if not keep_log:  # behind the lines of the last commit, which count until this one does
            log_start, crc32 = last.log_stop_byte, 0
        log_stop = self._log.append(last.log_stop_byte, log_lines)
        commit = Commit(
            last.store_id,
            last.number + 1,
            home,
            checksum,
            facts,
            journal,
            log_start,
            log_stop,
            zlib.crc32(log_lines, crc32),
            model_folder=last.model_folder,
            model_files=last.model_files,
            group_id=self._agreement.group_id if self._agreement is not None else "",
            layout_id=last.layout_id,
        )
        if model_files is not None:
            self.before_write(False)  # the last commit is in place for certain, and names the other folder
            commit = self._with_model_files(commit, model_files)
        with self._lock:
            self._is_settled = False
            write_commit(commit, self._directory, keep_previous=self._agreement is not None and self.last is not None)
            self._is_settled, self._is_marked_torn = True, False
            self.last = commit
            self._is_agreed = self._agreement is None
        if self._agreement is None and commit.model_folder != last.model_folder:
            with suppress(StorageError):  # the next ones replace what is left
                remove_folder(os.path.join(self._directory, last.model_folder or MODEL_NAMES[1]))

    def _with_model_files(self, commit: Commit, files: Mapping[str, bytes]) -> Commit:
        """Write them beside those of the last commit, if they are others or not as they were written."""
        digests = {name: xxhash.xxh3_64_hexdigest(content) for name, content in files.items()}
        if commit.model_folder and commit.model_files == digests:
            with suppress(StorageError):  # they are written anew
                commit.check_model_files(self._directory)
                return commit
        folder = MODEL_NAMES[commit.model_folder == MODEL_NAMES[0]]
        write_folder(os.path.join(self._directory, folder), files)
        return replace(commit, model_folder=folder, model_files=digests)
