"""What the ranks of a box do one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hf_lohan.ranks.links import Links


@contextlib.contextmanager
def one_rank_at_a_time(links: Links, what: str) -> Iterator[None]:
    """All ranks enter this at the same place. In it each rank of a box is alone, the first before the second. All leave
    it together, also where some fail in it."""
    ranks = links.ranks
    failure: BaseException | None = None
    for turn in range(ranks.num_local):
        if turn == ranks.local_rank:
            try:
                yield
            except BaseException as error:
                failure = error
        links.barrier(f"{what} of local rank {turn}")
    if failure is not None:
        raise failure
