"""The requests that still touch somebody's files, to be waited for together."""

from __future__ import annotations

from contextlib import suppress
from threading import Lock

from hf_lohan.files.request import IoRequest


class RequestsUnderWay:
    """Knows each request from when it is added until it is done."""

    def __init__(self) -> None:
        self._requests: set[IoRequest] = set()
        self._lock = Lock()

    def add(self, request: IoRequest) -> IoRequest:
        """Returns the request."""
        with self._lock:
            self._requests.add(request)
        request.add_done_callback(self._forget)
        return request

    def wait(self) -> None:
        """Return when all that were added before are done. Raises what a request under way fails with; one that failed
        before told whoever waits for it."""
        for request in self._now():
            request.wait()

    def settle(self) -> None:
        """`wait`, but errors are for whoever waits for the request."""
        for request in self._now():
            with suppress(Exception):
                request.wait()

    def _now(self) -> list[IoRequest]:
        with self._lock:
            return list(self._requests)

    def _forget(self, request: IoRequest) -> None:
        with self._lock:
            self._requests.discard(request)
