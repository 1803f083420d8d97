"""What goes with a step's records in each rank's store, for another number of ranks than had made it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_RANDOM_NUMBERS = re.compile(r"((?:epoch_)?rng_state)(?:_\d+)?\.pth")
"""Of one rank, or with its number behind it of several."""
_OF_THE_EPOCH = "epoch_rng_state"


def journal_of_rank(journals: Sequence[Mapping[str, bytes]], rank: int, num_ranks: int) -> dict[str, bytes]:
    """The journal of one of ``num_ranks``, from those of all ranks before. A rank that was not there has what rank 0
    had, but for its random numbers: upstream's warning says so when it resumes. All ranks draw an epoch's order from
    the same."""
    was_there = rank < len(journals)
    journal: dict[str, bytes] = {}
    for name, content in journals[rank if was_there else 0].items():
        match = _RANDOM_NUMBERS.fullmatch(name)
        if match is None:
            journal[name] = content
        elif was_there or match[1] == _OF_THE_EPOCH:
            journal[f"{match[1]}.pth" if num_ranks == 1 else f"{match[1]}_{rank}.pth"] = content
    return journal


def facts_of_all(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Those of rank 0, with each parameter's number of updates as whoever has it counts them."""
    updates: dict[str, int] = {}
    for own in facts:
        for name, count in own.get("num_updates", {}).items():
            updates[name] = max(updates.get(name, 0), int(count))
    return {**facts[0], **({"num_updates": updates} if updates else {})}
