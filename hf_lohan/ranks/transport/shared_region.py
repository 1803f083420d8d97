"""Memory that the ranks of one node share. Messages between these ranks contain only offsets in it.

The file of this memory has no name, so it disappears with the processes, even if they are killed. The first rank of the
node sends the file's descriptor to the others over a socket. Ranks that are threads of one process get the same tensor.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from hf_lohan.device import Device, available_host_memory_bytes, mapped_file
from hf_lohan.ranks.transport.connection import SLICE_S
from hf_lohan.ranks.transport.failures import RankTimeoutError
from hf_lohan.ranks.transport.topology import Ranks
from hf_lohan.wording import format_bytes

FILES_IN_RAM = "/dev/shm"
_TOKEN_BYTES = 32
_of_this_process: dict[str, Tensor] = {}
"""By token, the regions for ranks that are threads of this process."""


class NodeLinks(Protocol):
    """The calls of `Links` that sharing needs. Those of one row's ranks have them too."""

    @property
    def ranks(self) -> Ranks: ...

    @property
    def timeout_s(self) -> float: ...

    def all_gather(self, tag: str, payload: bytes = b"") -> list[bytes]: ...

    def raise_if_failed(self, doing: str) -> None: ...


@dataclass(frozen=True, eq=False)
class SharedRegion:
    """A piece of memory that all ranks of this node map."""

    bytes: Tensor
    """uint8 [num_bytes], page-aligned, initially zero, and pinned if the device pins memory."""
    name: str

    @classmethod
    def create(cls, links: NodeLinks, num_bytes: int, name: str, device: Device | None = None) -> SharedRegion:
        """Share memory on each node. All ranks call this, and ranks of one node pass the same size. If it fails on one
        rank, all raise ValueError."""
        if num_bytes <= 0:
            raise ValueError(f"cannot share {num_bytes} bytes of memory ({name}); request at least 1 byte")
        map_it = device.host_shared if device is not None else mapped_file
        if links.ranks.num_local == 1 and links.ranks.num_ranks == 1:
            with _file_in_ram(num_bytes, name, 1) as fd:
                return cls(map_it(fd, num_bytes), name)
        if links.ranks.local_rank == 0:
            return cls(_offer(links, num_bytes, name, map_it), name)
        return cls(_accept(links, num_bytes, name, map_it), name)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Return the offset of a tensor in bytes; None if the tensor is not in this memory."""
        offset = tensor.data_ptr() - self.bytes.data_ptr()
        return offset if offset >= 0 and offset + tensor.nbytes <= self.bytes.nbytes else None


def _offer(links: NodeLinks, num_bytes: int, name: str, map_it: Callable[[int, int], Tensor]) -> Tensor:
    """Allocate the memory of this node, and send it to the node's other ranks."""
    ranks = links.ranks
    token = secrets.token_hex(_TOKEN_BYTES // 2)
    offer: dict[str, Any] = {"pid": os.getpid(), "num_bytes": num_bytes, "token": token}
    with contextlib.ExitStack() as cleanup:
        try:
            fd = cleanup.enter_context(_file_in_ram(num_bytes, name, ranks.num_local))
            region = map_it(fd, num_bytes)
            listener = cleanup.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            offer["address"] = f"\0lohan-{secrets.token_hex(16)}"  # a name that is no file
            listener.bind(offer["address"])
            listener.listen(ranks.num_local)
            _of_this_process[token] = region
            cleanup.callback(_of_this_process.pop, token)
        except (OSError, ValueError) as error:
            offer["refused"] = str(error)
        exchanged = _exchange(links, f"the memory of {name}", offer)
        num_others = sum(exchanged[rank]["pid"] != os.getpid() for rank in ranks.on_this_node)
        _serve(links, listener, fd, token, num_others, name)
        _exchange(links, f"all to have the memory of {name}", {})
        return region


def _accept(links: NodeLinks, num_bytes: int, name: str, map_it: Callable[[int, int], Tensor]) -> Tensor:
    """Get the memory from local rank 0."""
    ranks = links.ranks
    exchanged = _exchange(links, f"the memory of {name}", {"pid": os.getpid(), "num_bytes": num_bytes})
    offered = exchanged[ranks.on_this_node[0]]
    try:
        region = _of_this_process[offered["token"]] if offered["pid"] == os.getpid() else None
        if region is None:
            region = _fetch(offered, num_bytes, links.timeout_s, map_it)
    except OSError as error:
        raise ValueError(
            f"rank {ranks.rank} cannot map the memory that its node shares for {name} ({error}); start the ranks of "
            "one node in one container"
        ) from error
    _exchange(links, f"all to have the memory of {name}", {})
    return region


def _fetch(offered: dict[str, Any], num_bytes: int, timeout_s: float, map_it: Callable[[int, int], Tensor]) -> Tensor:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        sock.connect(offered["address"])
        sock.sendall(offered["token"].encode())
        _, fds, _, _ = socket.recv_fds(sock, 1, 1)
    if not fds:
        raise OSError("local rank 0 did not hand it over")
    try:
        return map_it(fds[0], num_bytes)
    finally:
        os.close(fds[0])


def _exchange(links: NodeLinks, tag: str, message: dict[str, Any]) -> list[dict[str, Any]]:
    """Exchange what each rank offers or wants. Raises ValueError if a rank's request was refused, or if ranks of a node
    want different sizes."""
    messages = [json.loads(packed) for packed in links.all_gather(tag, json.dumps(message).encode())]
    for message in messages:
        if "refused" in message:
            raise ValueError(message["refused"])
    for rank, message in enumerate(messages):
        first = messages[rank - rank % links.ranks.num_local]
        if message.get("num_bytes") != first.get("num_bytes"):
            raise ValueError(
                f"rank {rank} wants {message['num_bytes']} bytes for {tag}, and the first rank of its node wants "
                f"{first['num_bytes']}; give all ranks of a node the same budgets"
            )
    return messages


def _serve(links: NodeLinks, listener: socket.socket, fd: int, token: str, num_others: int, name: str) -> None:
    """Send `fd` to ``num_others`` processes that know the token."""
    until_s = time.monotonic() + links.timeout_s
    listener.settimeout(SLICE_S)
    while num_others:
        links.raise_if_failed(f"handed out the memory of {name}")
        if time.monotonic() > until_s:
            raise RankTimeoutError(
                f"{num_others} ranks of this node did not take the memory of {name} within {links.timeout_s:g} s; "
                "start the ranks of one node in one container",
                links.ranks.rank,
            )
        with contextlib.suppress(TimeoutError, OSError):
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(SLICE_S)
                if secrets.compare_digest(connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL), token.encode()):
                    socket.send_fds(connection, [b"!"], [fd])
                    num_others -= 1


@contextlib.contextmanager
def _file_in_ram(num_bytes: int, name: str, num_local: int) -> Iterator[int]:
    """Yield the descriptor of a file of ``num_bytes`` bytes without a name."""
    sharing = f"{num_local} ranks of a node share" if num_local > 1 else "one rank wants"
    wanted = f"{sharing} {format_bytes(num_bytes)} of memory for {name}"
    available = available_host_memory_bytes()
    if num_bytes > available:
        raise ValueError(f"{wanted}, and {format_bytes(available)} are free; lower cpu_memory, or start fewer ranks")
    try:
        fd = os.memfd_create(f"lohan-{name}", os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        free = shutil.disk_usage(FILES_IN_RAM).free
        if num_bytes > free:
            raise ValueError(
                f"{wanted}, and {FILES_IN_RAM} has {format_bytes(free)} free, on a system without memfd; give "
                "the container more (docker run --shm-size or --ipc=host), or lower cpu_memory"
            ) from None
        fd = os.open(FILES_IN_RAM, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        yield fd
    finally:
        os.close(fd)
