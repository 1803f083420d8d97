"""Commits of a store. A commit replaces the commit file, and refers to a range of the log and to model files."""

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
from hf_lohan.store.versions import Checksums, Homes, TieCodes

logger = logging.getLogger(__name__)

COMMIT_NAME = "commit.safetensors"
PREVIOUS_NAME = "commit-previous.safetensors"
"""The file of the commit before the last one. It exists while another rank may not have the last commit."""
LOG_NAME = "log.jsonl"
MODEL_NAMES = ("model-0", "model-1")
"""Two folders for model files. One is committed, and the other is for the next commit."""
_JOURNAL = "journal/"
_ARRAYS = ("home", "checksum", "ties", "journal")
_ROUNDING = "rounding"
"""Key in the head of a commit with tie codes. Older versions of this library do not know it and refuse the commit."""
_MAX_BYTES = 1 << 30
"""Upper bound for the size of a commit file. It has 9 bytes for each granule of at least 32 KiB, 2 for each run of
residuals, and small files."""
_ADVICE = "check the drive, delete the store and resume from a checkpoint"
_MODEL_ADVICE = "check the drive, and restore the file or train one more step"


@dataclass(frozen=True, eq=False)
class Commit:
    """The content of one commit. It has the version of every granule and the caller's data."""

    store_id: str
    number: int
    """Number of the commit, which counts from 1 in each store."""
    home: npt.NDArray[np.uint8]
    checksum: Checksums
    ties: TieCodes | None = None
    """The tie codes of the residuals of masters. None in commits of older versions of this library, which rounded
    bfloat16 weights half up."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The caller's data in JSON types."""
    journal: Mapping[str, bytes] = field(default_factory=dict)
    """The caller's small files, by name."""
    log_start_byte: int = 0
    log_stop_byte: int = 0
    """The range of the store's log file that belongs to this commit."""
    log_crc32: int = 0
    """CRC of this range. Unlike a hash, a CRC can be extended by later lines."""
    is_torn: bool = False
    """Whether records are being changed in place, so that the store contains no complete step."""
    model_folder: str = ""
    """Folder of the model files, relative to the store's first directory."""
    model_files: Mapping[str, str] = field(default_factory=dict)
    """xxh3 of each model file, by name."""
    group_id: str = ""
    """Identifies one start of the ranks that commit together and use the same commit numbers. Earlier versions of this
    library kept it over all starts of a run."""
    layout_id: str = ""
    """Identifies the manifest that describes the records; "" in stores of an older version of this library."""

    @property
    def key(self) -> tuple[str, int]:
        """The group and the number of the commit. They are equal on all ranks that commit together."""
        return self.group_id, self.number

    def check_model_files(self, directory: str) -> str:
        """Return the folder of the model files in the store's first ``directory``. Raises `StorageError` if a file
        differs from the committed file."""
        folder = os.path.join(directory, self.model_folder)
        for name, digest in self.model_files.items():
            file = os.path.join(folder, name)
            try:
                is_right = xxhash.xxh3_64_hexdigest(read_whole(file)) == digest
            except FileNotFoundError:
                raise StorageError("cannot find", path=file, advice=_MODEL_ADVICE) from None
            if not is_right:
                raise StorageError("wrong checksum in", path=file, advice=_MODEL_ADVICE)
        return folder

    def read_log(self, directory: str) -> bytes:
        """Return the log lines of this commit. Raises `StorageError` if they are missing or damaged."""
        log = AppendedLog(os.path.join(directory, LOG_NAME))
        lines = log.read(self.log_start_byte, self.log_stop_byte)
        if zlib.crc32(lines) != self.log_crc32:
            advice = "check the drive and resume from a checkpoint"
            raise StorageError("wrong checksum in", path=log.path, advice=advice)
        return lines


def write_commit(commit: Commit, directory: str, *, keep_previous: bool = False) -> None:
    """Replace the last commit atomically (see `replace_durably`). ``keep_previous``: keep the replaced commit too."""
    arrays: dict[str, npt.NDArray[Any]] = {"home": commit.home, "checksum": commit.checksum}
    arrays |= {_JOURNAL + name: np.frombuffer(content, np.uint8) for name, content in commit.journal.items()}
    head = {part.name: getattr(commit, part.name) for part in fields(commit) if part.name not in _ARRAYS}
    if commit.ties is not None:  # also where this rank has no residuals, because None means an older version
        arrays["ties"] = commit.ties
        if commit.ties.size:
            head[_ROUNDING] = "half_even"
    if not commit.layout_id:  # the older version that created the store must be able to read the commit
        del head["layout_id"]
    text = json.dumps(head)
    metadata = {"commit": text, "xxh3": _digest(text, arrays)}
    kept_as = os.path.join(directory, PREVIOUS_NAME) if keep_previous else None
    replace_durably(os.path.join(directory, COMMIT_NAME), save(arrays, metadata), kept_as=kept_as)


def read_commit(directory: str, name: str = COMMIT_NAME) -> Commit | None:
    """Return the commit in a store's first directory, or None. Raises `StorageError` if it is damaged."""
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
        raise StorageError("no valid commit in", path=file, advice=f"{_ADVICE} ({type(error).__name__})") from error
    raise StorageError("wrong checksum in", path=file, advice=_ADVICE)


def previous_commit(directory: str, last: Commit | None) -> Commit | None:
    """Return the commit before ``last`` if it was kept for other ranks. If it is damaged, warn and return None, because
    the last commit is complete without it."""
    try:
        kept = read_commit(directory, PREVIOUS_NAME)
    except StorageError as error:
        logger.warning("the commit before the last one is ignored: %s", error)
        return None
    if kept is None or last is None:
        return None
    is_before = (kept.store_id, kept.layout_id, kept.number) == (last.store_id, last.layout_id, last.number - 1)
    return kept if is_before else None


def _parse(head: dict[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Commit:
    head.pop(_ROUNDING, None)
    for name, value in head.items():
        kind = type(getattr(_EMPTY, name))
        if not isinstance(value, kind) or (kind is int and value < 0):
            raise ValueError(f"{name} is {value!r}")
    if any(os.path.isabs(name) or ".." in name.split("/") for name in (head["model_folder"], *head["model_files"])):
        raise ValueError("a model file is outside the store")
    journal = {
        name.removeprefix(_JOURNAL): array.tobytes() for name, array in arrays.items() if name.startswith(_JOURNAL)
    }
    return Commit(home=arrays["home"], checksum=arrays["checksum"], ties=arrays.get("ties"), journal=journal, **head)


def _metadata(content: bytes) -> dict[str, str]:
    header_bytes = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + header_bytes])["__metadata__"]
    assert isinstance(metadata, dict), "safetensors checks the header"
    return metadata


def _digest(text: str, arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    digest = xxhash.xxh3_64(text.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


_EMPTY = Commit("", 0, np.zeros(0, np.uint8), np.zeros(0, np.uint64))


class Agreement(Protocol):
    """Interface with which ranks agree on commits."""

    @property
    def group_id(self) -> str:
        """Identifies the ranks that commit together; "" for a single rank."""

    @property
    def keeps_previous(self) -> bool:
        """Whether a rank may have to return to the commit before its last one."""

    def announce_commit(self, number: int) -> None:
        """Tell the other ranks that this rank's commit is durable."""

    def wait_for_commit(self, number: int) -> None:
        """Wait until the commit is durable on every rank. Raises if a rank has failed."""


@dataclass(frozen=True)
class ImmediateAgreement:
    """An agreement that waits for no other rank. It serves a single rank, and stores whose ranks are not running."""

    group_id: str = ""
    keeps_previous: bool = False

    def announce_commit(self, number: int) -> None:
        pass

    def wait_for_commit(self, number: int) -> None:
        pass


class CommitSequence:
    """Writes the commit file, log and model files of the store in ``directory``. The caller holds the store's lock.
    Each commit is complete on disk before the next commit may change a byte."""

    def __init__(self, store_id: str, layout_id: str, directory: str, last: Commit | None) -> None:
        self._directory = directory
        self.last = last
        """The last commit; None before the first one."""
        self._none = replace(_EMPTY, store_id=store_id, layout_id=layout_id)
        self._log = AppendedLog(os.path.join(directory, LOG_NAME))
        self._is_marked_torn = last is not None and last.is_torn
        self._is_on_disk = True
        """Whether the commit file certainly contains ``last``, even after a power cut."""
        self._lock = Lock()
        self._agreement: Agreement = ImmediateAgreement()
        self._is_agreed = True
        """Whether all ranks have the last commit, so that no rank returns to the commit before it."""
        self._is_read_only = False
        self._group_id: str | None = None
        """Replaces the group id of the agreement if this store continues other stores."""

    def set_agreement(self, agreement: Agreement) -> None:
        """Commit together with other ranks from now on. The previous commit then stays until all ranks have the new
        commit."""
        self._agreement, self._is_agreed = agreement, not agreement.keeps_previous
        self._group_id = None

    def count_from(self, number: int, group_id: str | None = None) -> None:
        """Give the first commit this number. ``group_id`` replaces the group id of the agreement."""
        assert self.last is None and number > 0, "a commit already exists"
        self._none = replace(self._none, number=number - 1)
        self._group_id = group_id

    def _wait_for_all(self) -> None:
        if not self._is_agreed:
            if self.last is not None:
                self._agreement.wait_for_commit(self.last.number)
            self._is_agreed = True

    def announce_last(self) -> None:
        """Tell the other ranks that this rank's last commit is durable."""
        if self.last is not None:
            self._agreement.announce_commit(self.last.number)

    @property
    def previous(self) -> Commit | None:
        """The commit before the last one, if it was kept."""
        return previous_commit(self._directory, self.last)

    def view_commit(self, commit: Commit) -> None:
        """Treat ``commit`` as the last commit without changing the disk. Nothing may be written afterwards."""
        self.last, self._is_read_only = commit, True

    def restore_commit(self, commit: Commit | None) -> None:
        """Return to ``commit``, which is the commit before the last one. With None, remove the only commit. Raises
        `CapacityError` or `StorageError`."""
        with self._lock:
            self._is_on_disk = False
            if commit is None:
                remove_durably(os.path.join(self._directory, COMMIT_NAME))
            else:
                write_commit(commit, self._directory)
            self._is_on_disk, self._is_marked_torn = True, False
            self.last = commit

    def before_write(self, tears: bool) -> None:
        """Prepare the disk for a write of records. ``tears``: the write changes committed bytes, so the commit is
        marked torn.

        A commit that failed may be on disk nevertheless, and a power cut may leave it or the last commit. So the last
        commit is written again first. The write of records may overwrite the commit before the last one, so this method
        first waits until all ranks have the last commit. Raises `CapacityError` or `StorageError`.
        """
        assert not self._is_read_only, "a store that views an older commit is read-only"
        self._wait_for_all()
        if self._is_on_disk and (self._is_marked_torn or not tears):
            return
        with self._lock:
            marks_torn = self._is_marked_torn or tears
            if self._is_on_disk and marks_torn == self._is_marked_torn:
                return
            self._is_on_disk = False
            if self.last is None:
                remove_durably(os.path.join(self._directory, COMMIT_NAME))
            else:
                torn = replace(self.last, journal={}, log_start_byte=0, log_stop_byte=0, log_crc32=0, is_torn=True)
                write_commit(torn if marks_torn else self.last, self._directory)
                self._is_marked_torn = marks_torn
            self._is_on_disk = True

    def write_next(
        self,
        home: Homes,
        checksum: Checksums,
        ties: TieCodes | None,
        facts: Mapping[str, Any],
        journal: Mapping[str, bytes],
        log_lines: bytes,
        *,
        keep_log: bool,
        model_files: Mapping[str, bytes] | None,
    ) -> None:
        """Write the next commit. Raises `CapacityError` or `StorageError`, and then leaves the last commit
        unchanged."""
        assert not self._is_read_only, "a store that views an older commit is read-only"
        self._wait_for_all()
        last = self.last or self._none
        log_start, crc32 = last.log_start_byte, last.log_crc32
        if not keep_log:  # the last commit's lines must stay valid until the new commit is in place
            log_start, crc32 = last.log_stop_byte, 0
        log_stop = self._log.append(last.log_stop_byte, log_lines)
        commit = Commit(
            last.store_id,
            last.number + 1,
            home,
            checksum,
            ties,
            facts,
            journal,
            log_start,
            log_stop,
            zlib.crc32(log_lines, crc32),
            model_folder=last.model_folder,
            model_files=last.model_files,
            group_id=self._agreement.group_id if self._group_id is None else self._group_id,
            layout_id=last.layout_id,
        )
        if model_files is not None:
            self.before_write(False)  # the commit on disk must not name the folder that is written
            commit = self._with_model_files(commit, model_files)
        keeps_previous = self._agreement.keeps_previous
        with self._lock:
            self._is_on_disk = False
            write_commit(commit, self._directory, keep_previous=keeps_previous and self.last is not None)
            self._is_on_disk, self._is_marked_torn = True, False
            self.last = commit
            self._is_agreed = not keeps_previous
        if not keeps_previous and commit.model_folder != last.model_folder:
            with suppress(StorageError):  # the next model files replace any remaining files
                remove_folder(os.path.join(self._directory, last.model_folder or MODEL_NAMES[1]))

    def _with_model_files(self, commit: Commit, files: Mapping[str, bytes]) -> Commit:
        """Write the model files unless the last commit has the same files, undamaged."""
        digests = {name: xxhash.xxh3_64_hexdigest(content) for name, content in files.items()}
        if commit.model_folder and commit.model_files == digests:
            with suppress(StorageError):  # if a file is damaged, write all again
                commit.check_model_files(self._directory)
                return commit
        folder = MODEL_NAMES[commit.model_folder == MODEL_NAMES[0]]
        write_folder(os.path.join(self._directory, folder), files)
        return replace(commit, model_folder=folder, model_files=digests)
