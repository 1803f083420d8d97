"""Where blocks lie in host memory that is shared by the ranks of a box."""

from __future__ import annotations

PAGE_BYTES = 4096


class SharedPlaces:
    """Where blocks lie in the memory through which they pass one after the other. All ranks of a box know it alike,
    since it follows from the order of the blocks."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._taken_until = 0
        self._in_use: dict[int, tuple[int, int]] = {}

    def next_start(self, num_bytes: int) -> int | None:
        """Where the next block goes to; None as long as another is there."""
        start = self._taken_until if self._taken_until + num_bytes <= self.num_bytes else 0
        if any(first < start + num_bytes and start < last for first, last in self._in_use.values()):
            return None
        return start

    def take(self, number: int, start: int, num_bytes: int) -> None:
        """Load ``number`` is there from here on."""
        self._taken_until = -(-(start + num_bytes) // PAGE_BYTES) * PAGE_BYTES
        self._in_use[number] = start, start + num_bytes

    def free(self, number: int) -> None:
        """Everybody has copied it."""
        del self._in_use[number]
