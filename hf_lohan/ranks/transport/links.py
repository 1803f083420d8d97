"""One rank's connections to all others: its lanes, its watch, and the first failure of any rank.

`connect` connects to the other ranks once, through the store of torch.distributed's default group. The groups of the
lanes trust their network, as all groups of torch.distributed do.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pickle
import socket
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any

import psutil
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from hf_lohan.compat.torch_private import gloo_group
from hf_lohan.ranks.transport.failures import Failure, FirstRankFailure, RankFailedError
from hf_lohan.ranks.transport.lanes import RankLane
from hf_lohan.ranks.transport.topology import SINGLE_RANK, Ranks
from hf_lohan.ranks.transport.watch import Watch
from hf_lohan.threads import Owner

logger = logging.getLogger(__name__)

CARRIES = ("control", "weights", "gradients", "tokens")
"""Kinds of data in lanes. Tokens are rows for experts and their results, and rows of embeddings."""
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_CONNECTS_WITHIN = timedelta(seconds=60)
_LEAVES_WITHIN_S = 2.0
"""Seconds in which threads leave all lanes. It takes 0.1 s, but more if other programs use all cores."""
_WITHOUT_EFFECT = {
    "LOHAN_SOCKET_IFNAME": f"set {INTERFACE_VARIABLE} to the network interface, and unset it",
    "LOHAN_RANKS_SECRET": "ranks trust their network as torch.distributed does, so close MASTER_PORT and the ports of "
    "the ranks to other machines, and unset it",
}
"""Environment variables of earlier versions, and advice for them."""


class Links:
    """The connections of one rank. Any thread may call its methods, except methods of its control lane."""

    def __init__(
        self,
        ranks: Ranks,
        store: Any,
        timeout_s: float,
        *,
        host: str = "",
        exits: Mapping[int, int] | None = None,
        interfere: Callable[[str], object] = lambda lane: None,
    ) -> None:
        """Connect to the other ranks. ``store``: a store of torch.distributed, which no other connections use.
        ``timeout_s``: seconds that a rank may take to connect, or may be idle later while this rank waits for it.
        ``host``: the address at which other ranks reach this rank, by default `outgoing_address`. ``exits``: see
        `Watch`. ``interfere``: see `RankLane`. Raises RankTimeoutError."""
        self.ranks = ranks
        self._owner = Owner()
        self._failure = FirstRankFailure(ranks.rank)
        self._interfere = interfere
        self._connects_within_s = timeout_s
        self._lanes: list[tuple[str, RankLane]] = []
        """The kind of data of each lane, and the lane."""
        self._num_of_name: Counter[str] = Counter()
        self._is_closed = False
        self._host = host
        self.watch = Watch(ranks, store, self._failure, timeout_s, exits)
        try:
            if ranks.others:
                self.watch.begin()
                self._host = host or ("127.0.0.1" if ranks.num_nodes == 1 else outgoing_address())
                self.watch.start(time.monotonic() + timeout_s)
            self._control = self.open("control", stops_compute=True)
        except BaseException as error:
            self.fail(error)
            self.close()
            raise

    @classmethod
    def alone(cls) -> Links:
        """Return links of a single rank, on which every call works and nothing is sent."""
        return cls(SINGLE_RANK, None, timeout_s=0.0)

    def __enter__(self) -> Links:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    # Lanes.

    def open(
        self,
        name: str,
        members: Sequence[int] | None = None,
        *,
        carries: str = "control",
        stops_compute: bool = False,
        connect: Callable[[Any, int, int], Any] | None = None,
    ) -> RankLane:
        """Make a lane of ``members``, by default all ranks, together with these ranks. All ranks open their lanes of
        one name in the same order. ``carries``: the kind of data, for `sent_bytes`. ``stops_compute``: see `RankLane`.
        ``connect(store, place, num_members)`` makes the process group, by default a gloo group. Raises RankFailedError
        and RankTimeoutError."""
        members = list(range(self.ranks.num_ranks)) if members is None else list(members)
        self._num_of_name[name] += 1
        unique = name if self._num_of_name[name] == 1 else f"{name} {self._num_of_name[name]}"
        group = None
        if len(members) > 1:
            until_s = time.monotonic() + self._connects_within_s
            store = self.watch.add_lane(unique, members, until_s, stops_compute=stops_compute)
            try:
                group = (connect or self._connect)(store, members.index(self.ranks.rank), len(members))
            except RuntimeError as error:
                self.watch.raise_cause(f"the connections of {unique}", error, members)
        lane = RankLane(
            unique,
            members,
            self.watch,
            self._failure,
            group,
            stops_compute=stops_compute,
            interfere=self._interfere,
        )
        self._lanes.append((carries, lane))
        return lane

    def _connect(self, store: Any, place: int, num_members: int) -> Any:
        return gloo_group(store, place, num_members, self._host, _CONNECTS_WITHIN)

    def open_here(self, name: str, **options: Any) -> RankLane:
        """Make a lane of the ranks of this node. For ``options`` see `open`."""
        node = "" if self.ranks.num_nodes == 1 else f" of node {self.ranks.node}"
        return self.open(name + node, self.ranks.on_this_node, **options)

    def open_across(self, name: str, **options: Any) -> RankLane:
        """Make a lane of the ranks of all nodes with this rank's local number. For ``options`` see `open`."""
        members = sorted([self.ranks.rank, *self.ranks.counterparts])
        return self.open(f"{name} of local rank {self.ranks.local_rank}", members, **options)

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Bytes of payloads for other ranks, by kind of data. Payloads between devices are not counted."""
        sent = dict.fromkeys(CARRIES, 0)
        for carries, lane in self._lanes:
            sent["control"] += lane.agreed_bytes
            if carries in sent:
                sent[carries] += lane.sent_bytes
        return sent

    @property
    def waited_s(self) -> dict[int, float]:
        """Seconds in which threads of this rank waited for each other rank."""
        return {rank: sum(lane.waited_s[rank] for _, lane in self._lanes) for rank in self.ranks.others}

    # Collective calls of the computing thread of each rank, in the same order on all ranks.

    def all_gather(self, tag: str, payload: bytes = b"") -> list[bytes]:
        """Return the payloads of all ranks, in rank order. See `RankLane.agree`."""
        return self._control.agree(tag, payload)

    def all_gather_object(self, tag: str, own: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order. Objects are pickled, as by torch.distributed's function of
        this name."""
        return [pickle.loads(of_rank) for of_rank in self.all_gather(tag, pickle.dumps(own))]

    def barrier(self, tag: str) -> None:
        """Wait until all ranks have called this."""
        self.all_gather(tag)

    def broadcast(self, tensor: Tensor, owner: int, tag: str) -> None:
        """See `RankLane.broadcast`."""
        self._control.broadcast(tensor, owner, tag)

    # Waits and failures.

    def raise_if_failed(self, what: str) -> None:
        """Raise RankFailedError if another rank has failed, or this rank's own exception if this rank has failed.
        ``what`` completes "while rank 0 ..."."""
        self._failure.raise_if_known(what)

    def add_failure_callback(self, callback: Callable[[RankFailedError], object]) -> None:
        """Call ``callback`` once, on any thread, when a rank has failed, or now if one has already failed."""
        self._failure.add_callback(callback)

    def fail(self, error: BaseException) -> None:
        """Tell all other ranks that this rank cannot continue. Every later operation raises. Does nothing in a forked
        process and after `close`."""
        if not self._owner.is_here or self._is_closed:
            return
        origin, text = (error.rank, str(error)) if isinstance(error, RankFailedError) else (self.ranks.rank, "")
        failure = Failure(origin, text or f"{type(error).__name__}: {error}", error)
        self._failure.record_failure(failure)
        if self.ranks.others and self._failure.failure is failure:
            self.watch.announce(failure)

    def close(self) -> None:
        """Leave all lanes. Unless a rank has failed, the other ranks may continue while they do not need this rank.
        Does nothing in a forked process."""
        if not self._owner.is_here or self._is_closed:
            return
        self._is_closed = True
        for _, lane in self._lanes:
            lane.stop()
        if self.ranks.others:
            self.watch.close()
        until_s = time.monotonic() + _LEAVES_WITHIN_S
        for _, lane in self._lanes:
            lane.leave(has_failed=self._failure.is_known, until_s=until_s)


def connect(ranks: Ranks, store: Any, timeout_s: float) -> Links:
    """Connect with all other ranks. All ranks call this the same number of times. For the arguments see `Links`."""
    if not ranks.others:
        return Links.alone()
    if ranks.local_rank == 0:
        for variable in filter(os.environ.get, _WITHOUT_EFFECT):
            logger.warning("%s no longer has an effect; %s", variable, _WITHOUT_EFFECT[variable])
    number = store.add(f"lohan/calls/{ranks.rank}", 1)
    links = Links(ranks, PrefixStore(f"lohan/{number}", store), timeout_s)
    links.watch.ends_process = True
    atexit.register(_end, weakref.ref(links))
    sys.excepthook = partial(_tell_of_exception, weakref.ref(links), sys.excepthook)
    return links


def _tell_of_exception(
    links_ref: weakref.ref[Links],
    told_next: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    """Tell the other ranks of an exception that ends the main thread. `atexit` runs only after all other threads of
    the program have ended, which may be much later."""
    if (links := links_ref()) is not None:
        links.fail(error)
    told_next(kind, error, traceback)


def _end(links_ref: weakref.ref[Links]) -> None:
    """Tell the other ranks that the program ends, and the exception if it ends with one."""
    links = links_ref()
    if links is None:
        return
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException):
        links.fail(error)
    links.close()


@contextlib.contextmanager
def one_rank_at_a_time(links: Links, tag: str) -> Iterator[None]:
    """A context that all ranks enter. The ranks of a node run its body one after the other, in order. All leave it
    together, even if some fail in it."""
    failure: BaseException | None = None
    for turn in range(links.ranks.num_local):
        if turn == links.ranks.local_rank:
            try:
                yield
            except BaseException as error:
                failure = error
        links.barrier(f"{tag} of local rank {turn}")
    if failure is not None:
        raise failure


def outgoing_address() -> str:
    """Return the address at which other nodes reach this node. Raises ValueError if none exists."""
    if interface := os.environ.get(INTERFACE_VARIABLE, "").split(",")[0]:
        return _address_of(interface)
    for host in filter(None, (os.environ.get("MASTER_ADDR"), "192.0.2.1")):  # connecting a UDP socket sends nothing
        with contextlib.suppress(OSError):
            family, _, _, _, remote = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect(remote)
                address = str(sock.getsockname()[0])
            if not address.startswith("127.") and address != "::1":
                return address
    raise ValueError(
        f"other nodes cannot reach this node, because it has no network address; set {INTERFACE_VARIABLE} to the "
        f"network interface to them, one of {', '.join(sorted(psutil.net_if_addrs()))}"
    )


def _address_of(interface: str) -> str:
    interfaces = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for address in interfaces.get(interface, ()):
            if address.family == family and not address.address.startswith("fe80:"):
                return str(address.address)
    raise ValueError(
        f"{INTERFACE_VARIABLE}={interface} is not a network interface with an address; set one of {sorted(interfaces)}"
    )
