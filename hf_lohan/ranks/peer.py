"""What one rank knows of another."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_lohan.ranks.connection import Connection
from hf_lohan.ranks.messages import Lane


@dataclass(eq=False)
class Peer:
    """Another rank, at the other end of a connection for each lane."""

    rank: int
    connections: dict[Lane, Connection]
    pid: int = 0
    host: str = ""
    lanes_left: set[Lane] = field(default_factory=set)

    @property
    def has_left(self) -> bool:
        """Whether it said goodbye, and everything before that was handled."""
        return len(self.lanes_left) == len(self.connections)

    @property
    def last_heard_s(self) -> float:
        """By `time.monotonic`."""
        return max(connection.last_heard_s for connection in self.connections.values())

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid}, {self.host})" if self.pid else f"rank {self.rank}"
