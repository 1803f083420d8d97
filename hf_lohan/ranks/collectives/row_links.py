"""The lane of the ranks that share the tokens of one row.

These ranks are on one node. Their computing threads call the same collectives in the same order. They do not wait for
ranks of other rows.
"""

from __future__ import annotations

from hf_lohan.ranks.transport.links import Links
from hf_lohan.ranks.transport.topology import Ranks


class RowLinks:
    """One rank's lane to the others that have tokens of the same rows."""

    def __init__(self, links: Links, num_ranks: int) -> None:
        """``num_ranks``: number of ranks of a row. It divides the ranks of a node. All ranks of a row call this."""
        place = links.ranks.local_rank % num_ranks
        first = links.ranks.rank - place
        self.ranks = Ranks(place, num_ranks, place, num_ranks)
        """This rank among the ranks of the row."""
        lane = links.open(f"row {first}", range(first, first + num_ranks), stops_compute=True)
        self.all_gather, self.barrier = lane.agree, lane.barrier
