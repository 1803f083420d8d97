"""How ranks find each other: addresses go through torch.distributed's store, then each pair connects.

Ranks of one box meet at Unix sockets, others over TCP. Whoever connects shows that it knows the secret of the run,
without telling it; anything else that finds the port is sent away. The secret comes from the launcher's environment.
Where that has none it goes through the store, which tells it to whoever asks, until all ranks have met.
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
"""What the store has in place of a secret that all ranks know already."""
_LOOK_S = 0.01
_MOST_GREETINGS = 64
"""At a time. Who comes then waits until one of them has ended."""
_HANDSHAKE_S = 5.0
"""Who takes longer to say who it is, is nobody."""
_GREETING = struct.Struct("<4sIB")
_MAGIC = b"LOH1"
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 20_000))
"""A box without power says nothing: its connections end after 20 s."""


class KeyValueStore(Protocol):
    """What is used of a `torch.distributed.KeyValueStore`."""

    def set(self, key: str, value: str) -> object: ...

    def get(self, key: str) -> bytes: ...

    def add(self, key: str, amount: int) -> int: ...

    def check(self, keys: list[str]) -> bool: ...

    def delete_key(self, key: str) -> bool: ...


def connect(ranks: Ranks, store: KeyValueStore, timeout_s: float) -> Links:
    """Connect with all other ranks; all call this equally often. `timeout_s`: how long one may take to come, and later
    be silent while it is waited for. Raises RankTimeoutError."""
    if ranks.num_ranks == 1:
        return Links.alone()
    links = _Meeting(ranks, store, timeout_s).hold()
    atexit.register(_end, weakref.ref(links))
    return links


def _end(links_ref: weakref.ref[Links]) -> None:
    """The program is over: the others are told the exception that ended it, or that all is well."""
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
                threads.append(threading.Thread(target=self._take_in, args=(listener, secret), daemon=True))
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
                    listener.shutdown(socket.SHUT_RDWR)  # ends who waits for one to come
            for thread in threads:
                thread.join()
            for listener in listeners:
                listener.close()
        links = Links(ranks, self._sockets, self._timeout_s)
        try:
            links.barrier("all ranks to be connected")
            if ranks.rank == 0:
                with contextlib.suppress(RuntimeError, NotImplementedError):  # of a store that cannot
                    self._store.delete_key(f"{self._prefix}/secret")
        except BaseException as error:
            links.fail(error)
            links.close()
            raise
        return links

    def _secret(self) -> bytes:
        """Of this run. Raises ValueError where only some ranks were given it."""
        own, rank = os.environ.get(SECRET_VARIABLE, ""), self._ranks.rank
        if rank == 0:
            self._store.set(f"{self._prefix}/secret", _OF_THE_ENVIRONMENT if own else secrets.token_hex(32))
        told = self._get("secret", 0, "the secret of this run")
        if bool(own) != (told == _OF_THE_ENVIRONMENT):
            has, lacks = (rank, 0) if own else (0, rank)
            raise ValueError(
                f"{SECRET_VARIABLE} is set for rank {has} and not for rank {lacks}: set it to the same secret for all "
                "ranks, or for none"
            )
        return (own or told).encode()

    # Those of higher ranks come here

    def _listen(self, listeners: list[socket.socket]) -> None:
        """Tell all where this rank is reached."""
        backlog = len(Channel) * self._ranks.num_ranks
        address: dict[str, Any] = {"unix": f"\0lohan-{secrets.token_hex(16)}"}  # a name that is no file
        listeners.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listeners[0].bind(address["unix"])
        listeners[0].listen(backlog)
        if self._ranks.num_nodes > 1:
            family, host = outgoing_address()
            listeners.append(socket.create_server((host, 0), family=family, backlog=backlog))
            address["tcp"] = listeners[1].getsockname()[:2]
        self._store.set(f"{self._prefix}/address/{self._ranks.rank}", json.dumps(address))

    def _take_in(self, listener: socket.socket, secret: bytes) -> None:
        while not self._is_over.is_set():
            if not self._greetings.acquire(timeout=_LOOK_S):
                continue
            try:
                sock, address = listener.accept()
            except OSError:  # it was shut, or strangers who say nothing hold all the files that may be open
                self._greetings.release()
                self._is_over.wait(_LOOK_S)
                continue
            # On a thread of its own, or whoever connects and says nothing would keep the others out.
            threading.Thread(target=self._greet, args=(sock, address, secret), daemon=True).start()

    def _greet(self, sock: socket.socket, address: object, secret: bytes) -> None:
        """Take in one that knows the secret."""
        try:
            until_s = time.monotonic() + _HANDSHAKE_S
            sock.settimeout(_HANDSHAKE_S)
            nonce = secrets.token_bytes(_NONCE_BYTES)
            sock.sendall(nonce)
            greeting = _receive(sock, _GREETING.size, until_s)
            others_nonce = _receive(sock, _NONCE_BYTES, until_s)
            proof = _receive(sock, _PROOF_BYTES, until_s)
            magic, rank, channel = _GREETING.unpack(greeting)
            if magic != _MAGIC or not hmac.compare_digest(proof, _proof(secret, nonce, greeting)):
                raise ConnectionError("it does not know the secret of this run")
            sock.sendall(_proof(secret, others_nonce, b"welcome"))
            with self._lock:
                if not self._ranks.rank < rank < self._ranks.num_ranks or (Channel(channel), rank) in self._sockets:
                    raise ConnectionError(f"rank {rank} came again, or not to whom it should")
                self._sockets[Channel(channel), rank] = sock
        except (OSError, ValueError) as error:
            logger.warning("a connection from %s was refused: %s", address or "this box", error)
            sock.close()
        finally:
            self._greetings.release()

    # And this one goes to those of lower ranks

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
                    continue  # it has too many others to greet
                self._give_up(peer, f"its answer to a greeting ({error})")
            with self._lock:
                self._sockets[channel, peer] = sock
            return

    def _introduce(self, sock: socket.socket, channel: Channel, secret: bytes) -> None:
        until_s = time.monotonic() + min(_HANDSHAKE_S, self._timeout_s)
        nonce = _receive(sock, _NONCE_BYTES, until_s)
        greeting, own_nonce = _GREETING.pack(_MAGIC, self._ranks.rank, channel), secrets.token_bytes(_NONCE_BYTES)
        sock.sendall(greeting + own_nonce + _proof(secret, nonce, greeting))
        if not hmac.compare_digest(_receive(sock, _PROOF_BYTES, until_s), _proof(secret, own_nonce, b"welcome")):
            raise ConnectionError("it does not know the secret of this run")

    # Waiting

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
            f"rank {rank} did not come within {self._timeout_s:g} s: rank {self._ranks.rank} waited for {what}; see "
            f"whether it was started, and whether boxes reach each other (set {INTERFACE_VARIABLES[0]} to the name of "
            "the network interface)",
            rank,
        )

    def _close_all(self) -> None:
        with self._lock:
            for sock in self._sockets.values():
                sock.close()


def outgoing_address() -> tuple[socket.AddressFamily, str]:
    """Where other boxes reach this one. Raises ValueError if there is no such address."""
    for variable in INTERFACE_VARIABLES:
        interface = os.environ.get(variable, "").split(",")[0]
        if interface:
            return _address_of(interface, variable)
    for host in filter(None, (os.environ.get("MASTER_ADDR"), "192.0.2.1")):  # to no one: connecting UDP sends nothing
        with contextlib.suppress(OSError):
            family, _, _, _, remote = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect(remote)
                address = str(sock.getsockname()[0])
            if not address.startswith("127.") and address != "::1":
                return family, address
    raise ValueError(
        f"this box has no address that other boxes reach; set {INTERFACE_VARIABLES[0]} to the name of the network "
        f"interface to them: {', '.join(sorted(psutil.net_if_addrs()))}"
    )


def _address_of(interface: str, variable: str) -> tuple[socket.AddressFamily, str]:
    of_all = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for address in of_all.get(interface, ()):
            if address.family == family and not address.address.startswith("fe80:"):
                return family, address.address
    raise ValueError(f"{variable}={interface}: no such network interface with an address; set one of {sorted(of_all)}")


def _proof(secret: bytes, nonce: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, nonce + said, "sha256")


def _receive(sock: socket.socket, num_bytes: int, until_s: float) -> bytes:
    """Raises TimeoutError where they have not come by then, however many have."""
    content = bytearray()
    while len(content) < num_bytes:
        sock.settimeout(max(0.001, until_s - time.monotonic()))
        came = sock.recv(num_bytes - len(content))
        if not came:
            raise ConnectionError("it closed the connection")
        content += came
    return bytes(content)


def _set_up_tcp(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
