"""The number of this rank, the number of all ranks, and the ranks on this node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank among all. Each node has the same number of ranks. They are numbered node by node."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    num_local: int = 1
    """Number of ranks on each node."""

    def __post_init__(self) -> None:
        if self.num_local < 1 or self.num_ranks < 1 or self.num_ranks % self.num_local:
            raise ValueError(
                f"{self.num_ranks} ranks cannot be divided into nodes of {self.num_local} ranks; start the same "
                "number on each node"
            )
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank {self.rank} is not below {self.num_ranks}, the number of ranks; count ranks from 0")
        if self.local_rank != self.rank % self.num_local:
            raise ValueError(
                f"rank {self.rank} has local rank {self.local_rank}, but on nodes of {self.num_local} ranks it has "
                f"{self.rank % self.num_local}; number ranks node by node, as torchrun does"
            )

    @property
    def node(self) -> int:
        """The node of this rank."""
        return self.rank // self.num_local

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.num_local

    @property
    def others(self) -> list[int]:
        """All ranks except this one."""
        return [rank for rank in range(self.num_ranks) if rank != self.rank]

    @property
    def counterparts(self) -> list[int]:
        """The ranks of other nodes with this local rank. Only counterparts send weights and gradients between nodes."""
        return [self.rank_at(node, self.local_rank) for node in range(self.num_nodes) if node != self.node]

    @property
    def on_this_node(self) -> range:
        """The ranks of this node, including this one."""
        return range(self.node * self.num_local, (self.node + 1) * self.num_local)

    @property
    def file_suffix(self) -> str:
        """Suffix for the name of a file that each rank writes; empty for a single rank."""
        return f"-{self.rank}of{self.num_ranks}" if self.num_ranks > 1 else ""

    def rank_at(self, node: int, local_rank: int) -> int:
        return node * self.num_local + local_rank

    def of_rank(self, rank: int) -> Ranks:
        """Return the same ranks from the view of `rank`."""
        return Ranks(rank, self.num_ranks, rank % self.num_local, self.num_local)


SINGLE_RANK = Ranks()
