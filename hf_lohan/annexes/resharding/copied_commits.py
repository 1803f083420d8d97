"""What the commits of stores for another number of ranks say, by the commits of the stores that are copied."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hf_lohan.checkpoint.generations import RESHARDED_FROM, RESHARDED_STORES
from hf_lohan.experts import ROUTED_ROWS, RoutedRows
from hf_lohan.files.durable_file import read_whole, replace_durably
from hf_lohan.planning.run_plan import CHUNKS_NAME, RUN_ID
from hf_lohan.updates import MISSED_STEPS_NAME


def refuse_deferred_steps(journals: Sequence[Mapping[str, bytes]], directory: str) -> None:
    """Raise ValueError if the commits of these ``journals`` have updates of experts that were deferred."""
    if any(MISSED_STEPS_NAME in journal for journal in journals):
        raise ValueError(
            f"experts.lazy (auto by default) has deferred updates of experts in {directory}, which cannot be applied "
            "with another number of ranks; train one step with experts.lazy: false first"
        )


def marked_as_copy(facts: Mapping[str, Any], stores: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Return the facts of a commit, with the facts that it is a copy of these ``stores``: the id of each old rank's
    store and the number of its newest commit."""
    return {**facts, RESHARDED_FROM: len(stores), RESHARDED_STORES: [*map(list, stores)]}


def chunks_of_all(folders: Sequence[str], run_id: str | None) -> bytes | None:
    """Return the file with the tokens of a chunk that the run has decided, from the first folders of its stores; None
    if it has decided none."""
    for folder in folders:
        with suppress(FileNotFoundError):
            content = read_whole(os.path.join(folder, CHUNKS_NAME))
            if json.loads(content).get(RUN_ID) == run_id:  # the file of another run says nothing about this one
                return content
    return None


def keep_chunks(content: bytes | None, folder: str) -> None:
    """Write the file of `chunks_of_all` to the first folder of a new store."""
    if content is not None:
        replace_durably(os.path.join(folder, CHUNKS_NAME), content)


def facts_of_all(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return rank 0's facts, with each parameter's number of updates from the rank that owns the parameter, and with
    the means of Trainer's sums since the last log, because Trainer logs the mean over ranks, and with the rows of
    experts of all ranks, which count for rank 0."""
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
