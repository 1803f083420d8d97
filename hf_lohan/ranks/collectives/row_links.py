"""Meetings of the ranks that share the tokens of one row, and memory for them.

These ranks are on one node. The computing threads of all of them come to the same meetings in the same order. Ranks of
other rows are not waited for.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections import defaultdict

from torch import Tensor

from hf_lohan.device import Device
from hf_lohan.ranks.transport.failures import RanksDisagreeError
from hf_lohan.ranks.transport.links import Links
from hf_lohan.ranks.transport.messages import Kind, PayloadReader
from hf_lohan.ranks.transport.shared_region import SharedRegion
from hf_lohan.ranks.transport.topology import Ranks

_NAME_LENGTH = struct.Struct("<I")
_of_links: weakref.WeakKeyDictionary[Links, weakref.ref[RowLinks]] = weakref.WeakKeyDictionary()
"""The links own their `RowLinks`, as the handler of a message. A reference from here would keep both forever."""
_lock = threading.Lock()


class RowLinks:
    """The connections of one rank to the others that have tokens of the same rows."""

    def __init__(self, links: Links, num_ranks: int) -> None:
        """``num_ranks`` divides the ranks of a node."""
        self._links = links
        local = links.ranks.local_rank
        first = links.ranks.rank - local % num_ranks
        self.ranks = Ranks(local % num_ranks, num_ranks, local % num_ranks, num_ranks)
        """This rank among those of the row."""
        self._global = range(first, first + num_ranks)
        self._num_meetings = 0
        self._arrived: dict[int, dict[int, tuple[str, bytes]]] = defaultdict(dict)
        """(name, payload) of each meeting, by number and then by rank."""
        links.set_handler(Kind.ROW_MEETING, self._on_meeting)

    @classmethod
    def of(cls, links: Links, num_ranks: int) -> RowLinks:
        """Return the connections of this process, which are made once. All ranks use the same ``num_ranks``."""
        with _lock:
            known = _of_links.get(links)
            found = known() if known is not None else None
            if found is None or found.ranks.num_ranks != num_ranks:
                found = cls(links, num_ranks)
                _of_links[links] = weakref.ref(found)
            return found

    @property
    def timeout_s(self) -> float:
        return self._links.timeout_s

    def raise_if_failed(self, doing: str) -> None:
        self._links.raise_if_failed(doing)

    def barrier(self, tag: str) -> None:
        """Wait until all ranks of the row have called this."""
        self.all_gather(tag)

    def all_gather(self, tag: str, payload: bytes = b"") -> list[bytes]:
        """Return the payloads of the row's ranks, in rank order. ``tag`` names the meeting in a few words. Raises
        RanksDisagreeError if a rank is at another meeting, and the errors of `Links.wait_for`."""
        own, others = self._links.ranks.rank, [rank for rank in self._global if rank != self._links.ranks.rank]
        self._links.raise_if_failed(f"waited for {tag}")
        with self._links.lock:
            number = self._num_meetings
            self._num_meetings += 1
            arrived = self._arrived[number]
        name = tag.encode()
        for rank in others:
            self._links.send(
                rank, Kind.ROW_MEETING, number, payload=b"".join((_NAME_LENGTH.pack(len(name)), name, payload))
            )

        def is_complete() -> bool:
            for rank, (theirs, _) in arrived.items():
                if theirs != tag:
                    raise RanksDisagreeError(
                        f"rank {own} is at {tag!r} where rank {rank} is at {theirs!r}; ranks that share a row must run "
                        "the same layers in the same order; look for a forward that only some of them run"
                    )
            return len(arrived) == len(others)

        self._links.wait_for(is_complete, tag, peers=lambda: [rank for rank in others if rank not in arrived])
        with self._links.lock:
            del self._arrived[number]
        return [payload if rank == own else arrived[rank][1] for rank in self._global]

    def share_memory(self, num_bytes: int, name: str, device: Device) -> Tensor:
        """Return memory, uint8 [num_bytes], that the ranks of the row share. All of them call this together."""
        return SharedRegion.create(self, num_bytes, name, device).bytes

    def _on_meeting(self, peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        assert payload is not None
        packed = payload.bytes()
        start = _NAME_LENGTH.size + _NAME_LENGTH.unpack_from(packed)[0]
        with self._links.lock:
            self._arrived[numbers[0]][peer] = packed[_NAME_LENGTH.size : start].decode(), packed[start:]
            self._links.notify()
