"""Sends weights between the devices of a node's ranks, without their host memory.

All exchanges go through one group of devices. One thread of each rank enqueues them, in an order that all ranks have.
A group cannot tell why an operation takes long, and its waits have no timeout. So another thread watches each exchange
through the links, which know the ranks that have failed or are silent. It aborts the group if the exchange cannot end.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from hf_lohan.device import Device, DeviceGroup
from hf_lohan.ranks.transport.failures import RankFailedError
from hf_lohan.ranks.transport.links import Links
from hf_lohan.ranks.transport.messages import Kind
from hf_lohan.threads import start_thread

_MEETING = "the devices of a machine's ranks to connect"


class DeviceTransport:
    """One rank's device in the group of its node's devices. One thread calls `fill_from_all` and `watching`."""

    def __init__(self, links: Links, group: DeviceGroup, token: int) -> None:
        """``token``: distinguishes this group's messages from those of an earlier one."""
        self._links = links
        self._token = token
        self._ranks = links.ranks
        self._group = group
        self._others = [rank for rank in links.ranks.on_this_node if rank != links.ranks.rank]
        self._awaited = ""
        """What the exchange in progress brings; "" without one. The links' lock guards it and what follows."""
        self._num_exchanges = 0
        self._num_begun = dict.fromkeys(self._others, 0)
        """Number of exchanges that each other rank has begun."""
        self._error: BaseException | None = None
        self._is_closed = False
        self.sent_bytes = 0
        """Bytes that this rank's device sent to others."""
        this = weakref.ref(self)  # the links live longer
        links.set_handler(Kind.EXCHANGE, lambda peer, numbers, _payload: _note_begun(this(), peer, *numbers))
        links.add_failure_callback(lambda error: _abort(this(), error))
        self._watcher = start_thread(self._watch, f"lohan-rank-{links.ranks.rank}-devices", beside_kernels=False)

    @classmethod
    def connect(cls, links: Links, device: Device) -> DeviceTransport:
        """Connect the devices of each node's ranks. All ranks call this together. Raises RankFailedError, or
        RuntimeError if the devices cannot be connected."""
        ranks = links.ranks
        tokens = links.all_gather(_MEETING, str(secrets.randbits(31)).encode())
        token = int(tokens[ranks.on_this_node[0]])
        open_it = partial(device.open_group, f"lohan/devices/{token}", ranks.local_rank, ranks.num_local)
        transport = cls(links, _on_another_thread(links, open_it), token)
        links.barrier(_MEETING)
        return transport

    # Called by the thread that enqueues.

    def fill_from_all(self, whole: Tensor, parts: Sequence[tuple[int, int]]) -> None:
        """Send this rank's part of ``whole``, memory of its device, to the node's other ranks, and receive theirs.
        ``parts``: the ranges [start, stop) by local rank. Call this in a lane of the device. An error is raised by
        `watching` instead, and the memory then has no values."""
        views = [whole[start:stop].view(torch.uint8) for start, stop in parts]
        own, members = views[self._ranks.local_rank], range(self._ranks.num_local)
        others = [member for member in members if member != self._ranks.local_rank]
        sends = [(member, own) for member in others if own.numel()]
        receives = [(member, views[member]) for member in others if views[member].numel()]
        try:
            self._group.exchange(sends, receives)
        except RuntimeError as error:
            self._break_off(error)
        self.sent_bytes += own.numel() * len(sends)

    @contextlib.contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """A context in which the calling thread enqueues an exchange, and waits for its end. Raises RankFailedError or
        RankTimeoutError at the end if the memory has no values. ``what`` completes "rank 0 waited for ..."."""
        with self._links.lock:
            self._awaited, self._num_exchanges = what, self._num_exchanges + 1
            self._links.notify()
        try:
            for rank in self._others:
                self._links.send(rank, Kind.EXCHANGE, self._token, self._num_exchanges)
            yield
        finally:
            with self._links.lock:
                self._awaited = ""
                self._links.notify()
        if self._error is not None or self._is_closed:
            self._raise_error(what)

    def _raise_error(self, what: str) -> None:
        if isinstance(self._error, RankFailedError):
            raise self._error
        self._links.raise_cause(what)
        rank = self._ranks.rank
        raise RankFailedError(
            f"rank {rank} lost its connection to the devices of other ranks while it waited for {what} ({self._error})",
            rank,
        )

    # Faults.

    def _watch(self) -> None:
        """Abort an exchange if another rank has failed or is silent."""
        try:
            while not self._is_closed:
                self._links.wait_for(lambda: self._awaited or self._is_closed, "an exchange of devices", peers=[])
                number, what = self._num_exchanges, self._awaited
                if what:
                    is_over = partial(self._is_over, number)
                    self._links.wait_for(is_over, what, peers=partial(self._missing, number))
        except Exception as error:  # of another rank, or of this one
            self._break_off(error)

    def _is_over(self, number: int) -> bool:
        return self._num_exchanges > number or not self._awaited or self._is_closed

    def _missing(self, number: int) -> list[int]:
        """Return the ranks that have not begun the exchange, or all others if all have."""
        return [rank for rank in self._others if self._num_begun[rank] < number] or self._others

    def _break_off(self, error: BaseException) -> None:
        with self._links.lock:
            is_first = self._error is None and not self._is_closed
            self._error = self._error or error
        if is_first:
            self._group.abort()

    def close(self) -> None:
        """End an exchange in progress with an error, and take part in no more. Ranks call this when they need no more
        of what others would send."""
        with self._links.lock:
            was_closed, self._is_closed = self._is_closed, True
            self._links.notify()
        if not was_closed:
            self._group.abort()
        if self._watcher is not threading.current_thread():
            self._watcher.join()


def _note_begun(transport: DeviceTransport | None, peer: int, token: int, number: int) -> None:
    if transport is not None and token == transport._token:
        transport._num_begun[peer] = number


def _abort(transport: DeviceTransport | None, error: RankFailedError) -> None:
    if transport is not None:
        transport._break_off(error)


def _on_another_thread(links: Links, open_group: Callable[[], DeviceGroup]) -> DeviceGroup:
    """Call the function on another thread. If another rank fails meanwhile, raise its error and leave the thread
    behind."""
    groups: list[DeviceGroup] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            groups.append(open_group())
        except Exception as error:
            errors.append(error)
        links.notify()

    start_thread(call, f"lohan-rank-{links.ranks.rank}-opens-devices", beside_kernels=False)
    links.wait_for(lambda: groups or errors, _MEETING, peers=[])
    if errors:
        links.raise_cause(_MEETING)
        raise errors[0]
    return groups[0]
