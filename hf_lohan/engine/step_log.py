"""Commits of an engine: after each step, with what is needed to go on from there."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_lohan.model import ParamSlice
from hf_lohan.store import Commit, Store


@dataclass(frozen=True)
class Journal:
    """What whoever drives the steps wants to find again after a crash."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """In JSON's types."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    log_lines: bytes = b""
    """Follow those of the journals before, unless `begins_log`."""
    begins_log: bool = False


class StepLog:
    """Writes commits to a store and reads them back."""

    def __init__(self, store: Store, slices: Iterable[ParamSlice]) -> None:
        self._store = store
        self._slices = {part.name: part for part in slices if part.trainable}
        self.last_commit_s = 0.0
        self.num_commits = 0

    def commit(self, journal: Journal) -> None:
        """Make what is written count. All updates must be in the store."""
        began_s = time.perf_counter()
        num_updates = {name: part.num_updates for name, part in self._slices.items()}
        facts = {"durability": self._store.durability, "num_updates": num_updates, **journal.facts}
        self._store.commit(facts, journal.files, journal.log_lines, keep_log=not journal.begins_log)
        self.last_commit_s = time.perf_counter() - began_s
        self.num_commits += 1

    def go_back(self) -> Commit:
        """Forget what was written since the last commit. Raises ValueError if there is none, `TornStoreError` if it
        was overwritten."""
        commit = self._store.committed
        if commit is None:
            raise ValueError(f"nothing is committed in {self._store.paths[0].path}; train from the start")
        self._store.drop()
        for name, num_updates in commit.facts["num_updates"].items():
            self._slices[name].num_updates = int(num_updates)
        return commit
