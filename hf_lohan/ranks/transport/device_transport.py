"""Sends weights and gradients between the devices of a node's ranks, without their host memory.

All exchanges go through one group of devices, and one thread of each rank enqueues them. The node's first rank chooses
their order, and tells it to the others. It chooses only exchanges for which all ranks are ready, so none waits for a
rank that waits for another one. A group cannot tell why an operation takes long, and its waits have no timeout. So
another thread watches each exchange through the links, which know the ranks that have failed or are silent. It aborts
the group if the exchange cannot end.

With several nodes, each node has its own group, order and threads, and groups share nothing. *No wait is circular.* An
exchange begins when all ranks of the node have the memory that it reads and fills, so it ends whatever other nodes do.
Waits for other nodes may wait for an exchange, but no exchange waits for them. Ranks become ready for a load in the
order of loads, after they have sent their shard of it to other nodes. So the first load that is not over waits for no
later one. A node may be ready for a load that others do not carry out, because it needs nothing of theirs. A rank that
knows this takes no part in the load. So the node's first rank, which learns it like all others, tells those that are
ready that there is nothing to wait for (`leave_out`). Only its order decides, so all ranks of a node do the same.
"""

from __future__ import annotations

import contextlib
import enum
import secrets
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, TypeAlias

import torch
from torch import Tensor

from hf_lohan.device import Device, DeviceGroup
from hf_lohan.ranks.transport.failures import RankFailedError, RankTimeoutError
from hf_lohan.ranks.transport.links import Links
from hf_lohan.ranks.transport.messages import Kind, PayloadReader
from hf_lohan.threads import start_thread

_MEETING = "the devices of a machine's ranks to connect"
GRADIENTS_OF_DEVICES = "gradients that devices add"

Name: TypeAlias = tuple[int, int, int, int]
"""What an exchange brings: `_Brings`, and up to three numbers."""
_NAME = struct.Struct("<4q")


class _Brings(enum.IntEnum):
    WEIGHTS = 0
    """Shards of all ranks, for all. The number is that of the load."""
    GRADIENT = 1
    """Gradients of some ranks, for the owner of a chunk. The numbers are those of `order_sum`."""
    NO_WEIGHTS = 2
    """Nothing, because not all ranks carry out this load together."""


@dataclass(eq=False)
class _ReadyLoad:
    """An exchange of weights for which this rank is ready."""

    what: str
    enqueue: Callable[[], object]
    is_done: bool = False
    is_void: bool = False


class DeviceTransport:
    """One rank's device in the group of its node's devices."""

    def __init__(self, links: Links, device: Device, group: DeviceGroup, token: int) -> None:
        """``token``: distinguishes this group's messages from those of an earlier one."""
        self._links = links
        self._device = device
        self._token = token
        self._ranks = links.ranks
        self._group = group
        self._others = [rank for rank in links.ranks.on_this_node if rank != links.ranks.rank]
        self._first = links.ranks.on_this_node[0]
        """The rank that chooses the order."""
        self._ready: dict[Name, set[int]] = {}
        """By exchange, the ranks that are ready for it. The links' lock guards it and what follows."""
        self._last_load = -1
        """Number of the last load whose weights were exchanged."""
        self._offers: dict[Name, _ReadyLoad] = {}
        self._orders: deque[list[Name]] = deque()
        """The next exchanges of this rank. Those of one list are one operation."""
        self._add: Callable[[Sequence[tuple[int, ...]]], Callable[[], object]] | None = None
        self._needs_sum: Callable[[], bool] = lambda: False
        self._is_common: Callable[[int], bool] = lambda _load: True
        self._awaited = ""
        """What the exchange in progress brings; "" without one."""
        self._num_exchanges = 0
        """Number of exchanges that this rank has begun."""
        self._num_ended = 0
        self._num_begun = dict.fromkeys(self._others, 0)
        """Number of exchanges that each other rank has begun."""
        self._last_of: dict[int, int] = {}
        """By other rank that has closed, the number of exchanges that have ended on it."""
        self._error: BaseException | None = None
        self._is_closed = False
        self.sent_bytes = 0
        """Bytes that this rank's device sent to others."""
        this = weakref.ref(self)  # the links live longer
        links.set_handler(Kind.EXCHANGE, lambda peer, numbers, _payload: _note_begun(this(), peer, *numbers))
        links.set_handler(Kind.EXCHANGE_READY, lambda peer, numbers, _payload: _note_ready(this(), peer, *numbers))
        links.set_handler(Kind.EXCHANGE_ORDER, lambda _peer, numbers, payload: _note_order(this(), numbers, payload))
        links.add_failure_callback(lambda error: _abort(this(), error))
        name = f"lohan-rank-{links.ranks.rank}-devices"
        self._threads = [
            start_thread(self._watch, f"{name}-watched", beside_kernels=False),
            start_thread(self._carry_out_orders, name, beside_kernels=device.shares_cores),
        ]

    @classmethod
    def connect(cls, links: Links, device: Device) -> DeviceTransport:
        """Connect the devices of each node's ranks. All ranks call this together. Raises RankFailedError, or
        RuntimeError if the devices cannot be connected."""
        ranks = links.ranks
        tokens = links.all_gather(_MEETING, str(secrets.randbits(31)).encode())
        token = int(tokens[ranks.on_this_node[0]])
        meeting = f"lohan/devices/{token}/{ranks.node}"
        open_it = partial(device.open_group, meeting, ranks.local_rank, ranks.num_local)
        transport = cls(links, device, _on_another_thread(links, open_it), token)
        links.barrier(_MEETING)
        return transport

    # Exchanges for which ranks are ready.

    def leave_out(self, is_common: Callable[[int], bool]) -> None:
        """Set what says whether all ranks carry out a load together. It is called with the links' lock. On several
        nodes, one node may begin a load that another has not."""
        self._is_common = is_common

    def take_part(self, load: int, what: str, enqueue: Callable[[], object]) -> bool:
        """Have the transport's thread call ``enqueue`` when all ranks of the node have called this for the load, and
        wait for its end. It calls `fill_from_all` in a lane of the device, and waits for that. Loads come in their
        order. ``what`` completes "rank 0 waited for ...". Returns False if no rank of the node calls ``enqueue``,
        because not all ranks carry out the load together. Raises RankFailedError or RankTimeoutError if the memory has
        no values."""
        name, offer = (_Brings.WEIGHTS, load, 0, 0), _ReadyLoad(what, enqueue)
        with self._links.lock:
            self._offers[name] = offer
        _note_ready(self, self._ranks.rank, self._token, *name)
        for rank in self._others:
            self._links.send(rank, Kind.EXCHANGE_READY, self._token, *name)

        def is_over() -> bool:
            has_closed = name in self._offers and bool(self._absent(self._num_exchanges + 1))
            return offer.is_done or offer.is_void or self.has_ended or has_closed

        try:
            self._links.wait_for(is_over, what, peers=lambda: self._not_ready(name))
        except RankTimeoutError as error:
            self._links.fail(error)  # before `close` tells the others that this rank has ended
            raise
        if not (offer.is_done or offer.is_void):
            self.raise_error(what)
        return offer.is_done

    def _missing_for(self, name: Name) -> list[int]:
        return [rank for rank in self._others if rank not in self._ready.get(name, ())]

    def _not_ready(self, name: Name) -> list[int]:
        """Return the ranks that can bring the exchange forward. `_watch` waits for one that is in progress."""
        return [] if self._awaited else self._missing_for(name) or self.choosing_rank()

    def choosing_rank(self) -> list[int]:
        """Return the rank that must choose the next exchange if all are ready for one. Empty if it is this rank, while
        an exchange is in progress, for which `_watch` waits, and after the last one. The caller holds the links'
        lock."""
        return [] if self._awaited or self.has_ended or self._first == self._ranks.rank else [self._first]

    def add_with(
        self, add: Callable[[Sequence[tuple[int, ...]]], Callable[[], object]], needs_sum: Callable[[], bool]
    ) -> None:
        """Set what adds gradients. ``add`` gets the numbers of some calls of `order_sum`, by any ranks, calls
        `exchange` in a lane of the device, and waits for that. It returns what is called when all went well.
        ``needs_sum`` returns whether this rank needs a sum that has not come. It is called with the links' lock."""
        self._add, self._needs_sum = add, needs_sum

    def order_sum(self, *numbers: int) -> None:
        """Have all ranks of the node call what `add_with` has set, with these three numbers. Each of them can send its
        part of the sum now. Does not wait. Does nothing after `close`. After an error it ends the run, because this
        rank needs the sum."""
        if self._is_closed:
            return
        if self._error is not None:
            # This may be the thread that learns which rank has failed.
            start_thread(self._end_run, f"lohan-rank-{self._ranks.rank}-devices-end", beside_kernels=False)
        elif self._first == self._ranks.rank:
            _note_ready(self, self._ranks.rank, self._token, _Brings.GRADIENT, *numbers)
        else:
            self._links.send(self._first, Kind.EXCHANGE_READY, self._token, _Brings.GRADIENT, *numbers)

    # Called by the thread that enqueues.

    def fill_from_all(self, whole: Tensor, parts: Sequence[tuple[int, int]]) -> None:
        """Send this rank's part of ``whole``, memory of its device, to the node's other ranks, and receive theirs.
        ``parts``: the ranges [start, stop) by local rank."""
        views = [whole[start:stop].view(torch.uint8) for start, stop in parts]
        own, members = views[self._ranks.local_rank], range(self._ranks.num_local)
        others = [member for member in members if member != self._ranks.local_rank]
        sends = [(member, own) for member in others if own.numel()]
        self.exchange(sends, [(member, views[member]) for member in others if views[member].numel()])

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Send bytes of this device to those of local ranks, and receive bytes of theirs. An error is raised later, and
        the memory then has no values."""
        try:
            self._group.exchange(sends, receives)
        except RuntimeError as error:
            self._break_off(error)
        self.sent_bytes += sum(sent.nbytes for _, sent in sends)

    def _carry_out_orders(self) -> None:
        try:
            self._device.enter_thread()
            while names := self._next_order():
                self._carry_out(names)
        except Exception as error:  # of another rank, or of this one
            self._break_off(error)
            with self._links.lock:
                # A rank closes when it needs no more, and others may have loaded ahead.
                is_failure = not self._is_closed and (self._needs_sum() or not self._absent(self._num_exchanges + 1))
            if is_failure:
                self._links.fail(self._error if isinstance(self._error, RankFailedError) else error)

    def _next_order(self) -> list[Name]:
        """Wait for the next exchanges. Empty after `close`."""
        is_first = self._first == self._ranks.rank

        def has_order() -> bool:
            if is_first and not self._orders and (chosen := self._choose()):
                self._orders.append(chosen)
            return bool(self._orders) or self._is_closed or is_stuck()

        def is_stuck() -> bool:
            return not self._orders and self._needs_sum() and bool(self._absent(self._num_exchanges + 1))

        self._links.wait_for(has_order, "an exchange of devices", peers=[], is_noted=False)
        with self._links.lock:
            if self._is_closed:
                return []
            if not self._orders:
                self.raise_error(GRADIENTS_OF_DEVICES)
            names = self._orders.popleft()
            for name in names:
                self._ready.pop((_Brings.WEIGHTS, *name[1:]) if name[0] == _Brings.NO_WEIGHTS else name, None)
                if name[0] == _Brings.WEIGHTS:
                    self._last_load = name[1]
        payload = b"".join(_NAME.pack(*name) for name in names)
        for rank in self._others if is_first else ():
            self._links.send(rank, Kind.EXCHANGE_ORDER, self._token, payload=payload)
        return names

    def _choose(self) -> list[Name]:
        """Return exchanges for which all ranks are ready: a load, because compute may wait for it, or else gradients,
        at most one for each owner. Or a load that not all ranks carry out together. The caller holds the links'
        lock."""
        of_owners: dict[int, Name] = {}
        for name, ready in self._ready.items():
            if name[0] == _Brings.GRADIENT:
                (owner,) = ready
                of_owners.setdefault(owner, name)
            elif not self._is_common(name[1]):
                return [(_Brings.NO_WEIGHTS, *name[1:])]
            elif len(ready) == self._ranks.num_local:
                return [name]
        return list(of_owners.values())

    def _carry_out(self, names: list[Name]) -> None:
        if names[0][0] == _Brings.GRADIENT:
            assert self._add is not None
            with self._watching(GRADIENTS_OF_DEVICES):
                finish = self._add([name[1:] for name in names])
            finish()
            return
        if names[0][0] == _Brings.NO_WEIGHTS:
            # A rank that is not ready for this load will not be, or hears this once more.
            with self._links.lock:
                if (void := self._offers.pop((_Brings.WEIGHTS, *names[0][1:]), None)) is not None:
                    void.is_void = True
                    self._links.notify()
            return
        offer = self._offers.pop(names[0])
        with self._watching(offer.what):
            offer.enqueue()
        with self._links.lock:
            offer.is_done = True
            self._links.notify()

    @contextlib.contextmanager
    def _watching(self, what: str) -> Iterator[None]:
        """A context in which the calling thread enqueues an exchange, and waits for its end. Raises RankFailedError or
        RankTimeoutError at the end if the memory has no values."""
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
        if self.has_ended:
            self.raise_error(what)
        self._num_ended = self._num_exchanges

    # Faults.

    @property
    def has_ended(self) -> bool:
        """Whether this rank takes part in no more exchanges. The links' lock guards it."""
        return self._error is not None or self._is_closed

    def raise_error(self, what: str) -> NoReturn:
        """Raise RankFailedError after `has_ended`, with its cause."""
        if isinstance(self._error, RankFailedError):
            raise self._error
        self._links.raise_cause(what)
        if closed := self._absent(self._num_exchanges + 1):
            raise self._closed_before(closed[0], what)
        raise self._lost(what)

    def _end_run(self) -> None:
        try:
            self.raise_error(GRADIENTS_OF_DEVICES)
        except Exception as error:
            self._links.fail(error)

    def _absent(self, number: int) -> list[int]:
        """Return the ranks that have closed before the end of an exchange, by its number, so that it cannot end."""
        return [rank for rank, last in self._last_of.items() if last < number]

    def _closed_before(self, rank: int, what: str) -> RankFailedError:
        text = f"rank {rank} had ended its exchanges while rank {self._ranks.rank} waited for {what}"
        return RankFailedError(text, rank)

    def _lost(self, what: str) -> RankFailedError:
        rank = self._ranks.rank
        return RankFailedError(
            f"rank {rank} lost its connection to the devices of other ranks while it waited for {what} ({self._error})",
            rank,
        )

    def _watch(self) -> None:
        """Abort an exchange if another rank has failed, has closed or is silent."""
        try:
            while not self._is_closed:
                self._links.wait_for(lambda: self._awaited or self._is_closed, "an exchange of devices", peers=[])
                number, what = self._num_exchanges, self._awaited
                if what:
                    is_over = partial(self._is_over, number)
                    self._links.wait_for(is_over, what, peers=partial(self._missing, number))
                    if not self._has_passed(number):
                        self.raise_error(what)
        except Exception as error:  # of another rank, or of this one
            self._break_off(error)

    def _is_over(self, number: int) -> bool:
        return self._has_passed(number) or bool(self._absent(number))

    def _has_passed(self, number: int) -> bool:
        return self._num_exchanges > number or not self._awaited or self._is_closed

    def _missing(self, number: int) -> list[int]:
        """Return the ranks that have not begun the exchange, or all others if all have."""
        return [rank for rank in self._others if self._num_begun[rank] < number] or self._others

    def _break_off(self, error: BaseException) -> None:
        with self._links.lock:
            is_first = not self.has_ended
            self._error = self._error or error
            self._links.notify()
        if is_first:
            self._group.abort()

    def close(self) -> None:
        """End an exchange in progress with an error, and take part in no more. Ranks call this when they need no more
        of what others would send."""
        with self._links.lock:
            was_closed, self._is_closed, num_ended = self._is_closed, True, self._num_ended
            self._links.notify()
        if not was_closed:
            with contextlib.suppress(RankFailedError):
                for rank in self._others:
                    self._links.send(rank, Kind.EXCHANGE, self._token, ~num_ended)
            self._group.abort()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()


def _note_ready(transport: DeviceTransport | None, peer: int, token: int, *name: int) -> None:
    if transport is None or token != transport._token:
        return
    brings, number, *rest = name
    with transport._links.lock:
        # The news of another rank may come after the order.
        if brings != _Brings.WEIGHTS or number > transport._last_load:
            transport._ready.setdefault((brings, number, *rest), set()).add(peer)  # type: ignore[arg-type]
            transport._links.notify()


def _note_order(transport: DeviceTransport | None, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
    if transport is None or numbers != (transport._token,):
        return
    assert payload is not None
    names = list(_NAME.iter_unpack(payload.bytes()))
    with transport._links.lock:
        transport._orders.append(names)
        transport._links.notify()


def _note_begun(transport: DeviceTransport | None, peer: int, token: int, number: int) -> None:
    """Note the number of an exchange that another rank has begun. After its last, the number is negative."""
    if transport is None or token != transport._token:
        return
    with transport._links.lock:
        if number < 0:
            transport._last_of[peer] = ~number
            transport._links.notify()
        else:
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
