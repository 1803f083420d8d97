"""Compares values that each rank has found alone, and that must be equal, such as its settings or its checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hf_lohan.ranks.transport.failures import RanksDisagreeError
from hf_lohan.ranks.transport.links import Links

NamedValues = Mapping[str, Any]
"""JSON values by name. Ranks must find them in the same order."""
DIGEST_BYTES = 8


def check_equal(what: str, find: Callable[[], NamedValues], links: Links, advice: str) -> None:
    """Raise RanksDisagreeError if ``find`` returns different values on another rank. All ranks call this together.
    ``what`` names all values in a few words, and ``advice`` says what to do about a difference."""
    if not links.ranks.others:
        return
    values = find()
    if not are_equal(links.all_gather(f"{what} to be the same", digest_of(values))):
        refuse_difference(what, values, links, advice)


def digest_of(values: NamedValues) -> bytes:
    return hashlib.sha256(_pack(values)).digest()[:DIGEST_BYTES]


def are_equal(digests: Iterable[bytes]) -> bool:
    return len(set(digests)) == 1


def refuse_difference(what: str, values: NamedValues, links: Links, advice: str) -> None:
    """Raise RanksDisagreeError for the first value that differs between rank 0 and another rank. If digests differ, all
    ranks call this together."""
    packed = links.all_gather(f"{what} of each rank", _pack(values))
    by_rank: Sequence[dict[str, str]] = [
        {name: json.dumps(value) for name, value in json.loads(of_rank).items()} for of_rank in packed
    ]
    for rank, theirs in enumerate(by_rank):
        for name in {**by_rank[0], **theirs}:
            first, other = by_rank[0].get(name, "missing"), theirs.get(name, "missing")
            if first != other:
                raise RanksDisagreeError(f"{name} is {first} on rank 0 and {other} on rank {rank}; {advice}")
    raise RanksDisagreeError(f"{what} have a different order on one of the ranks; {advice}")


def _pack(values: NamedValues) -> bytes:
    return json.dumps(values, default=str).encode()  # a learning rate may have a dtype
