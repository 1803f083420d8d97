"""The commits of an open store, one after the other: each is in place, whole, before the next may touch a byte."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import replace
from threading import Lock
from typing import Any

from hf_lohan.files import StorageError
from hf_lohan.files.appended_log import AppendedLog
from hf_lohan.files.durable_file import remove_durably
from hf_lohan.store.commit import COMMIT_NAME, Commit, write_commit
from hf_lohan.store.granules import Checksums
from hf_lohan.store.versions import Homes

LOG_NAME = "log.jsonl"


class CommitSequence:
    """Keeps the commit file and the log of the store in ``directory``, whose lock is held."""

    def __init__(self, store_id: str, directory: str, last: Commit | None) -> None:
        self._store_id = store_id
        self._directory = directory
        self._last = last
        self._log = AppendedLog(os.path.join(directory, LOG_NAME))
        self._is_marked_torn = last is not None and last.is_torn
        self._is_settled = True
        """Whether the commit file is certainly that of ``_last``, also after a power cut."""
        self._lock = Lock()

    @property
    def last(self) -> Commit | None:
        """What the last commit wrote down; None before the first."""
        return self._last

    @property
    def log(self) -> bytes:
        """The lines of the log up to the last commit. Raises `StorageError` if they are not there."""
        return read_log(self._directory, self._last) if self._last is not None else b""

    def before_write(self, tears: bool) -> None:
        """Before records are written: what is on disk must not name bytes that go away, other than as torn.

        A commit that failed at its very end may be in place all the same, and a power cut may bring either: then the
        last one is put back first. Raises `CapacityError` or `StorageError` if that fails.
        """
        if self._is_settled and (self._is_marked_torn or not tears):
            return
        with self._lock:
            marks_torn = self._is_marked_torn or tears
            if self._is_settled and marks_torn == self._is_marked_torn:
                return
            self._is_settled = False
            if self._last is None:
                remove_durably(os.path.join(self._directory, COMMIT_NAME))
            else:
                write_commit(_torn(self._last) if marks_torn else self._last, self._directory)
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
    ) -> None:
        """Make these the last commit. Raises `CapacityError` or `StorageError`, and then the last one is as before."""
        last = self._last
        number = last.number + 1 if last is not None else 1
        log_start, log_stop, crc32 = (last.log_start_byte, last.log_stop_byte, last.log_crc32) if last else (0, 0, 0)
        if not keep_log:
            log_start, crc32 = log_stop, 0  # behind the lines of the last commit, which count until this one does
        log_stop = self._log.append(log_stop, log_lines)
        crc32 = zlib.crc32(log_lines, crc32)
        commit = Commit(self._store_id, number, home, checksum, facts, journal, log_start, log_stop, crc32)
        with self._lock:
            self._is_settled = False
            write_commit(commit, self._directory)
            self._is_settled, self._is_marked_torn = True, False
            self._last = commit


def read_log(directory: str, commit: Commit) -> bytes:
    """The lines that belong to a commit. Raises `StorageError` if they are not there, or not as they were written."""
    log = AppendedLog(os.path.join(directory, LOG_NAME))
    lines = log.read(commit.log_start_byte, commit.log_stop_byte)
    if zlib.crc32(lines) != commit.log_crc32:
        advice = "check the drive; resume from a checkpoint"
        raise StorageError("the checksum is wrong of", path=log.path, advice=advice)
    return lines


def _torn(commit: Commit) -> Commit:
    return replace(commit, journal={}, log_start_byte=0, log_stop_byte=0, log_crc32=0, is_torn=True)
