"""Connects ranks. They exchange addresses through torch.distributed's store, and then each pair connects.

Ranks of one node connect by Unix sockets, and others by TCP. Both sides prove that they know the run's secret without
sending it. A connection without this proof is closed. The secret comes from the launcher's environment. If the
environment has none, rank 0 writes a secret to the store, where every client of the store can read it until all ranks
have connected.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Protocol

import psutil

from hf_lohan.ranks.transport.failures import RankTimeoutError
from hf_lohan.ranks.transport.links import Links
from hf_lohan.ranks.transport.messages import Channel
from hf_lohan.ranks.transport.topology import Ranks

logger = logging.getLogger(__name__)

INTERFACE_VARIABLES = ("LOHAN_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
SECRET_VARIABLE = "LOHAN_RANKS_SECRET"
_OF_THE_ENVIRONMENT = "environment"
"""Value in the store if the secret is in the environment."""
_LOOK_S = 0.01
_MOST_GREETINGS = 64
"""Limit of connections that are greeted at the same time. Other connections wait."""
_HANDSHAKE_S = 5.0
"""Timeout in seconds for the proof of a new connection."""
_GREETING = struct.Struct("<4sIB")
_GREETING_MAGIC = b"LOH1"
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 20_000))
"""A node that lost power sends nothing. Connections to it end after 20 s."""


class KeyValueStore(Protocol):
    """The part of `torch.distributed.Store` that this module uses."""

    def set(self, key: str, value: str) -> object: ...

    def get(self, key: str) -> bytes: ...

    def add(self, key: str, amount: int) -> int: ...

    def check(self, keys: list[str]) -> bool: ...

    def delete_key(self, key: str) -> bool: ...


def connect(ranks: Ranks, store: KeyValueStore, timeout_s: float) -> Links:
    """Connect with all other ranks. All ranks call this the same number of times. `timeout_s`: seconds that a rank may
    take to connect, and later may be silent while another waits for it. Raises RankTimeoutError."""
    if ranks.num_ranks == 1:
        return Links.alone()
    links = _Meeting(ranks, store, timeout_s).hold()
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
    """Tell the other ranks of an exception that ends the main thread. `atexit` comes only after all other threads of
    the program have ended, which may be much later."""
    if (links := links_ref()) is not None:
        links.fail(error)
    told_next(kind, error, traceback)


def _end(links_ref: weakref.ref[Links]) -> None:
    """Tell the other ranks at the end of the program that it ended well, or with which exception."""
    links = links_ref()
    if links is None:
        return
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException):
        links.fail(error)
    links.close()


class _Meeting:
    """One call of `connect`."""

    def __init__(self, ranks: Ranks, store: KeyValueStore, timeout_s: float) -> None:
        self._ranks = ranks
        self._store = store
        self._timeout_s = timeout_s
        self._until_s = time.monotonic() + timeout_s
        number = store.add(f"lohan/calls/{ranks.rank}", 1)
        self._prefix = f"lohan/{number}"
        self._lock = threading.Lock()
        self._sockets: dict[tuple[Channel, int], socket.socket] = {}
        self._is_over = threading.Event()
        self._greetings = threading.Semaphore(_MOST_GREETINGS)

    def hold(self) -> Links:
        ranks = self._ranks
        secret = self._secret()
        listeners: list[socket.socket] = []
        threads: list[threading.Thread] = []
        try:
            self._listen(listeners)
            for listener in listeners:
                threads.append(threading.Thread(target=self._accept_all, args=(listener, secret), daemon=True))
                threads[-1].start()
            for peer in range(ranks.rank):
                address = json.loads(self._get(f"address/{peer}", peer, f"the address of rank {peer}"))
                for channel in Channel:
                    self._reach(peer, channel, address, secret)
            self._wait_for_others()
        except BaseException:
            self._close_all()
            raise
        finally:
            self._is_over.set()
            for listener in listeners:
                with contextlib.suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)  # wakes a thread in accept()
            for thread in threads:
                thread.join()
            for listener in listeners:
                listener.close()
        links = Links(ranks, self._sockets, self._timeout_s)
        try:
            links.barrier("all ranks to be connected")
            if ranks.rank == 0:
                with contextlib.suppress(RuntimeError, NotImplementedError):  # some stores cannot delete keys
                    self._store.delete_key(f"{self._prefix}/secret")
        except BaseException as error:
            links.fail(error)
            links.close()
            raise
        return links

    def _secret(self) -> bytes:
        """Return the secret of this run. Raises ValueError if only some ranks have it in their environment."""
        own, rank = os.environ.get(SECRET_VARIABLE, ""), self._ranks.rank
        if rank == 0:
            self._store.set(f"{self._prefix}/secret", _OF_THE_ENVIRONMENT if own else secrets.token_hex(32))
        stored = self._get("secret", 0, "the secret of this run")
        if bool(own) != (stored == _OF_THE_ENVIRONMENT):
            has, lacks = (rank, 0) if own else (0, rank)
            raise ValueError(
                f"{SECRET_VARIABLE} is set for rank {has} but not for rank {lacks}; set it to the same secret for all "
                "ranks, or for none"
            )
        return (own or stored).encode()

    # Ranks with higher numbers connect to this one.

    def _listen(self, listeners: list[socket.socket]) -> None:
        """Publish the address of this rank."""
        backlog = len(Channel) * self._ranks.num_ranks
        address: dict[str, Any] = {"unix": f"\0lohan-{secrets.token_hex(16)}"}  # an abstract name, which is not a file
        listeners.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listeners[0].bind(address["unix"])
        listeners[0].listen(backlog)
        if self._ranks.num_nodes > 1:
            family, host = outgoing_address()
            listeners.append(socket.create_server((host, 0), family=family, backlog=backlog))
            address["tcp"] = listeners[1].getsockname()[:2]
        self._store.set(f"{self._prefix}/address/{self._ranks.rank}", json.dumps(address))

    def _accept_all(self, listener: socket.socket, secret: bytes) -> None:
        while not self._is_over.is_set():
            if not self._greetings.acquire(timeout=_LOOK_S):
                continue
            try:
                sock, address = listener.accept()
            except OSError:  # it was closed, or idle strangers use all file descriptors
                self._greetings.release()
                self._is_over.wait(_LOOK_S)
                continue
            # Each greeting has a thread, because a connection that sends nothing must not block the others.
            threading.Thread(target=self._greet, args=(sock, address, secret), daemon=True).start()

    def _greet(self, sock: socket.socket, address: object, secret: bytes) -> None:
        """Accept a connection if it proves that it knows the secret."""
        try:
            until_s = time.monotonic() + _HANDSHAKE_S
            sock.settimeout(_HANDSHAKE_S)
            nonce = secrets.token_bytes(_NONCE_BYTES)
            sock.sendall(nonce)
            greeting = _receive(sock, _GREETING.size, until_s)
            others_nonce = _receive(sock, _NONCE_BYTES, until_s)
            proof = _receive(sock, _PROOF_BYTES, until_s)
            magic, rank, channel = _GREETING.unpack(greeting)
            if magic != _GREETING_MAGIC or not hmac.compare_digest(proof, _proof(secret, nonce, greeting)):
                raise ConnectionError("it does not know the secret of this run")
            sock.sendall(_proof(secret, others_nonce, b"welcome"))
            with self._lock:
                if not self._ranks.rank < rank < self._ranks.num_ranks or (Channel(channel), rank) in self._sockets:
                    raise ConnectionError(f"rank {rank} has already connected, or connected to the wrong rank")
                self._sockets[Channel(channel), rank] = sock
        except (OSError, ValueError) as error:
            logger.warning("a connection from %s was refused: %s", address or "this node", error)
            sock.close()
        finally:
            self._greetings.release()

    # This rank connects to ranks with lower numbers.

    def _reach(self, peer: int, channel: Channel, address: dict[str, Any], secret: bytes) -> None:
        is_local = peer in self._ranks.on_this_node
        while True:
            try:
                if is_local:
                    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                    sock.connect(address["unix"])
                else:
                    host, port = address["tcp"]
                    sock = socket.create_connection((host, port), timeout=min(_HANDSHAKE_S, self._timeout_s))
            except OSError as error:
                if time.monotonic() > self._until_s or is_local:
                    self._give_up(peer, f"it to answer at {address['unix' if is_local else 'tcp']} ({error})")
                time.sleep(_LOOK_S)
                continue
            try:
                self._introduce(sock, channel, secret)
            except OSError as error:
                sock.close()
                if isinstance(error, TimeoutError) and time.monotonic() < self._until_s:
                    continue  # the other rank has many others to greet
                self._give_up(peer, f"its answer to a greeting ({error})")
            with self._lock:
                self._sockets[channel, peer] = sock
            return

    def _introduce(self, sock: socket.socket, channel: Channel, secret: bytes) -> None:
        until_s = time.monotonic() + min(_HANDSHAKE_S, self._timeout_s)
        nonce = _receive(sock, _NONCE_BYTES, until_s)
        greeting, own_nonce = (
            _GREETING.pack(_GREETING_MAGIC, self._ranks.rank, channel),
            secrets.token_bytes(_NONCE_BYTES),
        )
        sock.sendall(greeting + own_nonce + _proof(secret, nonce, greeting))
        if not hmac.compare_digest(_receive(sock, _PROOF_BYTES, until_s), _proof(secret, own_nonce, b"welcome")):
            raise ConnectionError("it does not know the secret of this run")

    # Waits.

    def _get(self, key: str, rank: int, what: str) -> str:
        key = f"{self._prefix}/{key}"
        self._wait_until(lambda: self._store.check([key]), rank, what)
        return self._store.get(key).decode()

    def _wait_for_others(self) -> None:
        expected = [
            (channel, rank) for rank in range(self._ranks.rank + 1, self._ranks.num_ranks) for channel in Channel
        ]
        for which in expected:
            self._wait_until(
                partial(self._sockets.__contains__, which), which[1], f"its connection of channel {which[0]}"
            )
        for sock in self._sockets.values():
            sock.settimeout(None)
            if sock.family != socket.AF_UNIX:
                _set_up_tcp(sock)

    def _wait_until(self, predicate: Callable[[], bool], rank: int, what: str) -> None:
        while not predicate():
            if time.monotonic() > self._until_s:
                self._give_up(rank, what)
            time.sleep(_LOOK_S)

    def _give_up(self, rank: int, what: str) -> NoReturn:
        raise RankTimeoutError(
            f"rank {rank} did not connect within {self._timeout_s:g} s: rank {self._ranks.rank} waited for {what}; "
            f"check that it was started and that nodes reach each other (set {INTERFACE_VARIABLES[0]} to the name of "
            "the network interface)",
            rank,
        )

    def _close_all(self) -> None:
        with self._lock:
            for sock in self._sockets.values():
                sock.close()


def outgoing_address() -> tuple[socket.AddressFamily, str]:
    """Return the address at which other nodes reach this one. Raises ValueError if none exists."""
    for variable in INTERFACE_VARIABLES:
        interface = os.environ.get(variable, "").split(",")[0]
        if interface:
            return _address_of(interface, variable)
    for host in filter(None, (os.environ.get("MASTER_ADDR"), "192.0.2.1")):  # connecting a UDP socket sends nothing
        with contextlib.suppress(OSError):
            family, _, _, _, remote = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect(remote)
                address = str(sock.getsockname()[0])
            if not address.startswith("127.") and address != "::1":
                return family, address
    raise ValueError(
        f"other nodes cannot reach this one, because it has no network address; set {INTERFACE_VARIABLES[0]} to the "
        f"network interface to them, one of {', '.join(sorted(psutil.net_if_addrs()))}"
    )


def _address_of(interface: str, variable: str) -> tuple[socket.AddressFamily, str]:
    interfaces = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for address in interfaces.get(interface, ()):
            if address.family == family and not address.address.startswith("fe80:"):
                return family, address.address
    raise ValueError(
        f"{variable}={interface} is not a network interface with an address; set one of {sorted(interfaces)}"
    )


def _proof(secret: bytes, nonce: bytes, message: bytes) -> bytes:
    return hmac.digest(secret, nonce + message, "sha256")


def _receive(sock: socket.socket, num_bytes: int, until_s: float) -> bytes:
    """Receive ``num_bytes`` bytes. Raises TimeoutError if they have not arrived by ``until_s`` (`time.monotonic`)."""
    content = bytearray()
    while len(content) < num_bytes:
        sock.settimeout(max(0.001, until_s - time.monotonic()))
        received = sock.recv(num_bytes - len(content))
        if not received:
            raise ConnectionError("it closed the connection")
        content += received
    return bytes(content)


def _set_up_tcp(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
