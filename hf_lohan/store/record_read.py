"""A read of a record. The caller verifies the bytes, best while they are in its CPU cache."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hf_lohan.files import IoRequest
from hf_lohan.store.layout import granules_of

VerifyGranules = Callable[[int, int], None]
"""Raises `CorruptionError` if one of the granules [first, stop) of the read differs from the written bytes."""


class RecordRead:
    """One read of ``numel`` elements. An element must be verified before it is used. `wait` waits for all elements and
    verifies them. A caller that uses elements part by part calls `wait_for_bytes` once, and `verify` before each part,
    because hashing is cheapest just before the bytes are used. Several threads may verify parts."""

    def __init__(
        self, request: IoRequest, numel: int = 0, granule_numel: int = 1, check: VerifyGranules | None = None
    ) -> None:
        """Without ``check`` nothing is verified."""
        self._request = request
        self.granule_numel = granule_numel
        self._check = check
        self._is_verified = np.zeros(granules_of(numel, granule_numel), bool)

    @classmethod
    def of_memory(cls) -> RecordRead:
        """Return a read from RAM, which is done and needs no verification."""
        return cls(IoRequest.finished())

    @property
    def num_granules(self) -> int:
        """Number of granules of the read. The last one may be short."""
        return len(self._is_verified)

    @property
    def num_bytes(self) -> int:
        """Bytes read from a drive."""
        return self._request.num_bytes

    @property
    def is_verified(self) -> bool:
        """Whether all elements are verified."""
        return bool(self._is_verified.all())

    def done(self) -> bool:
        """Return whether no thread uses the read's memory any more, after success or failure."""
        return self._request.done()

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once, when the read is done. See `IoRequest.add_done_callback`."""
        self._request.add_done_callback(lambda _request: callback())

    def wait_for_bytes(self) -> None:
        """Wait for the bytes, without verifying them. Raises `StorageError` if they cannot be read."""
        self._request.wait()

    def verify(self, first: int, stop: int) -> None:
        """Verify granules [first, stop) of the read after its bytes have arrived. Raises `CorruptionError`."""
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
