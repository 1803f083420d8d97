"""Describes the run whose step is copied for another number of ranks, and commits the copy in the new stores."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hf_lohan.checkpoint.generations import RESHARDED_FROM, RESHARDED_STORES
from hf_lohan.experts import ROUTED_ROWS, RoutedRows
from hf_lohan.files.durable_file import read_whole, replace_durably
from hf_lohan.planning.run_plan import CHUNKS_NAME, RUN_ID
from hf_lohan.store import ModelIdentity, RecordSpec, Store
from hf_lohan.store.versions import TieCodes
from hf_lohan.updates import MISSED_STEPS_NAME

_RANDOM_STATE = re.compile(r"((?:epoch_)?rng_state)(?:_\d+)?\.pth")
"""Name of a file with a rank's random state. With several ranks the name ends with the index of the rank."""
_EPOCH_RANDOM_STATE = "epoch_rng_state"


@dataclass(frozen=True)
class OldStore:
    """The facts about an old rank's store that all new ranks need, at the commit that is copied."""

    records: tuple[RecordSpec, ...]
    facts: Mapping[str, Any]
    journal: Mapping[str, bytes]
    tie_codes: Mapping[str, tuple[int, TieCodes]]
    rounds_half_up: bool
    chunks: bytes | None
    """Content of the file with the number of tokens in a chunk. None if this store or run has none."""

    @classmethod
    def of(cls, store: Store) -> OldStore:
        commit, chunks = store.committed, None
        assert commit is not None
        with suppress(FileNotFoundError):
            chunks = read_whole(os.path.join(store.paths[0].path, CHUNKS_NAME))
            if json.loads(chunks).get(RUN_ID) != commit.facts.get(RUN_ID):  # the file is of another run
                chunks = None
        ties = store.all_tie_codes()
        return cls(store.records, commit.facts, commit.journal, ties, commit.ties is None, chunks)


@dataclass(frozen=True, kw_only=True)
class OldRun:
    """A run whose step is copied, and the shards that the new ranks get."""

    stores: Sequence[OldStore]
    """The old stores, in rank order."""
    copied: Sequence[tuple[str, int]]
    """(id, number of the newest commit) of each old store."""
    shards: Sequence[tuple[RecordSpec, ...]]
    model: ModelIdentity
    num_homes: int
    commit_number: int
    group_id: str
    """Group id of the new commits. Empty for a single rank."""
    log: bytes
    model_files: Mapping[str, bytes] | None

    @classmethod
    def of(
        cls,
        first: Store,
        stores: Sequence[OldStore],
        copied: Sequence[tuple[str, int]],
        shards: Sequence[tuple[RecordSpec, ...]],
    ) -> OldRun:
        """``first``: the old store of rank 0, open at the commit that is copied."""
        assert first.committed is not None
        return cls(
            stores=stores,
            copied=copied,
            shards=shards,
            model=first.model,
            num_homes=first.num_homes,
            commit_number=first.committed.number,
            group_id=(first.committed.group_id or uuid.uuid4().hex) if len(shards) > 1 else "",
            log=first.log,
            model_files=first.model_files,
        )

    @property
    def num_bytes(self) -> int:
        """Size of all records in bytes."""
        return sum(record.num_bytes for shard in self.shards for record in shard)

    def refuse_deferred_steps(self, directory: str) -> None:
        """Raise ValueError if the commits have deferred updates of experts."""
        if any(MISSED_STEPS_NAME in store.journal for store in self.stores):
            raise ValueError(
                f"experts.lazy (auto by default) has deferred updates of experts in {directory}, which cannot be "
                "applied with another number of ranks; train one step with experts.lazy: false first"
            )

    def commit(self, store: Store, rank: int, facts: Mapping[str, Any]) -> None:
        """Commit the copy in the store of a new rank, with ``facts`` and with facts that name the old stores."""
        store.count_commits_from(self.commit_number, self.group_id)
        if (chunks := next((old.chunks for old in self.stores if old.chunks is not None), None)) is not None:
            replace_durably(os.path.join(store.paths[0].path, CHUNKS_NAME), chunks)
        store.take_tie_codes([old.tie_codes for old in self.stores])
        store.commit(
            {**facts, RESHARDED_FROM: len(self.copied), RESHARDED_STORES: [*map(list, self.copied)]},
            journal_of_rank([old.journal for old in self.stores], rank, len(self.shards)),
            self.log,
            model_files=self.model_files,
            rounds_half_up=any(old.rounds_half_up for old in self.stores),
        )


def facts_of_all(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the facts of all ranks in the facts of rank 0. The number of updates of a parameter is from its owner.
    Trainer's sums since the last log become means, because Trainer logs the mean over ranks. Numbers of rows of experts
    are summed over all ranks, and stored for rank 0."""
    num_updates: dict[str, int] = {}
    for facts_of_rank in facts:
        for name, count in facts_of_rank.get("num_updates", {}).items():
            num_updates[name] = max(num_updates.get(name, 0), int(count))
    joined = {**facts[0], **({"num_updates": num_updates} if num_updates else {})}
    if (routed := RoutedRows.of_all(facts)) is not None:
        joined[ROUTED_ROWS] = routed.to_fact()
    sums = [facts_of_rank["trainer"] for facts_of_rank in facts if "trainer" in facts_of_rank]
    if len(sums) == len(facts):
        joined["trainer"] = {name: _mean([of_rank[name] for of_rank in sums]) for name in sums[0]}
    return joined


def _mean(numbers: Sequence[float]) -> float:
    return numbers[0] if len({*numbers}) == 1 else sum(numbers) / len(numbers)


def journal_of_rank(journals: Sequence[Mapping[str, bytes]], rank: int, num_ranks: int) -> dict[str, bytes]:
    """Return the journal of one of ``num_ranks`` new ranks. ``journals`` has the journals of all old ranks.

    An additional rank gets a copy of rank 0's journal without the random state, and transformers warns about this on
    resume. The copy has the random state of the epoch's beginning, with which all ranks draw the epoch's order.
    """
    is_old_rank = rank < len(journals)
    journal: dict[str, bytes] = {}
    for name, content in journals[rank if is_old_rank else 0].items():
        match = _RANDOM_STATE.fullmatch(name)
        if match is None:
            journal[name] = content
        elif is_old_rank or match[1] == _EPOCH_RANDOM_STATE:
            journal[f"{match[1]}.pth" if num_ranks == 1 else f"{match[1]}_{rank}.pth"] = content
    return journal
