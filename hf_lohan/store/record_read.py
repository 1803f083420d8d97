"""A read of a record whose bytes the caller verifies, best while they are in its cache."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hf_lohan.files import IoRequest
from hf_lohan.store.layout import granules_of

VerifyGranules = Callable[[int, int], None]
"""Raises `CorruptionError` if one of the granules [first, stop) of the read is not what was written."""


class RecordRead:
    """One read of ``numel`` elements. No element may be used before it is verified.

    `wait` waits for all elements and verifies them. A caller that works through them part by part calls
    `wait_for_bytes` once and `verify` before each part: hashing is cheapest just before the bytes are used. Several
    threads may verify parts.
    """

    def __init__(
        self, request: IoRequest, numel: int = 0, granule_numel: int = 1, check: VerifyGranules | None = None
    ) -> None:
        """Without ``check`` there is nothing to verify."""
        self._request = request
        self.granule_numel = granule_numel
        self._check = check
        self._is_verified = np.zeros(granules_of(numel, granule_numel), bool)

    @classmethod
    def of_memory(cls) -> RecordRead:
        """A read that was served from RAM: it is done and needs no verification."""
        return cls(IoRequest.finished())

    @property
    def num_granules(self) -> int:
        """Granules of the read; the last one may be short."""
        return len(self._is_verified)

    @property
    def num_bytes(self) -> int:
        """Bytes read from a drive."""
        return self._request.num_bytes

    @property
    def is_verified(self) -> bool:
        """Whether all of it is verified."""
        return bool(self._is_verified.all())

    def done(self) -> bool:
        """Whether no thread touches its memory any more, filled or not."""
        return self._request.done()

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once, as `IoRequest.add_done_callback` does."""
        self._request.add_done_callback(lambda _request: callback())

    def wait_for_bytes(self) -> None:
        """Wait for the bytes without verifying them. Raises `StorageError` if they cannot be read."""
        self._request.wait()

    def verify(self, first: int, stop: int) -> None:
        """Verify granules [first, stop) of the read, whose bytes are there. Raises `CorruptionError`."""
        if self._check is None:
            return
        assert 0 <= first <= stop <= self.num_granules, f"granules {first} to {stop} of {self.num_granules}"
        self._check(first, stop)
        self._is_verified[first:stop] = True

    def wait(self) -> None:
        """Wait for all bytes and verify them. Raises `StorageError` or `CorruptionError`, on every call."""
        self.wait_for_bytes()
        if not self.is_verified:
            self.verify(0, self.num_granules)
