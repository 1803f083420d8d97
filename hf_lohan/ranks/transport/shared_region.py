"""Memory that the ranks of one box share: what one writes there the others read, and messages only say where.

The file behind it has no name, so nothing is left behind however its processes end. Its descriptor is handed over a
socket. Ranks that are threads of one process get the same tensor.
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
from typing import Any

from torch import Tensor

from hf_lohan.device import Device, available_host_memory_bytes, mapped_file
from hf_lohan.ranks.transport.connection import SLICE_S
from hf_lohan.ranks.transport.failures import RankTimeoutError
from hf_lohan.ranks.transport.links import Links
from hf_lohan.wording import format_bytes

FILES_IN_RAM = "/dev/shm"
_TOKEN_BYTES = 32
_of_this_process: dict[str, Tensor] = {}
"""By token, while ranks that are threads of it get theirs."""


@dataclass(frozen=True, eq=False)
class SharedRegion:
    """Of one box."""

    bytes: Tensor
    """uint8 [num_bytes], page-aligned, zero at first. Pinned where the device does that."""
    name: str

    @classmethod
    def create(cls, links: Links, num_bytes: int, name: str, device: Device | None = None) -> SharedRegion:
        """To be called by all ranks, with a size that those of a box agree on. Raises ValueError where one is refused;
        then on all ranks."""
        if num_bytes <= 0:
            raise ValueError(f"shared memory of {num_bytes} bytes was asked for ({name}); ask for at least 1 byte")
        map_it = device.host_shared if device is not None else mapped_file
        if links.ranks.num_local == 1 and links.ranks.num_ranks == 1:
            with _file_in_ram(num_bytes, name, 1) as fd:
                return cls(map_it(fd, num_bytes), name)
        if links.ranks.local_rank == 0:
            return cls(_offer(links, num_bytes, name, map_it), name)
        return cls(_accept(links, num_bytes, name, map_it), name)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Where a tensor begins in it, in bytes; None if it lies elsewhere."""
        offset = tensor.data_ptr() - self.bytes.data_ptr()
        return offset if offset >= 0 and offset + tensor.nbytes <= self.bytes.nbytes else None


def _offer(links: Links, num_bytes: int, name: str, map_it: Callable[[int, int], Tensor]) -> Tensor:
    """Make the memory of this box, and give it to the others there."""
    ranks = links.ranks
    token = secrets.token_hex(_TOKEN_BYTES // 2)
    said: dict[str, Any] = {"pid": os.getpid(), "num_bytes": num_bytes, "token": token}
    with contextlib.ExitStack() as cleanup:
        try:
            fd = cleanup.enter_context(_file_in_ram(num_bytes, name, ranks.num_local))
            region = map_it(fd, num_bytes)
            listener = cleanup.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            said["address"] = f"\0lohan-{secrets.token_hex(16)}"  # a name that is no file
            listener.bind(said["address"])
            listener.listen(ranks.num_local)
            _of_this_process[token] = region
            cleanup.callback(_of_this_process.pop, token)
        except (OSError, ValueError) as error:
            said["refused"] = str(error)
        of_all = _exchange(links, f"the memory of {name}", said)
        in_box = [of_all[rank] for rank in ranks.on_this_node]
        num_others = sum(other["pid"] != os.getpid() for other in in_box)
        _serve(links, listener, fd, token, num_others, name)
        _exchange(links, f"all to have the memory of {name}", {})
        return region


def _accept(links: Links, num_bytes: int, name: str, map_it: Callable[[int, int], Tensor]) -> Tensor:
    """Get it from local rank 0."""
    ranks = links.ranks
    of_all = _exchange(links, f"the memory of {name}", {"pid": os.getpid(), "num_bytes": num_bytes})
    offered = of_all[ranks.on_this_node[0]]
    try:
        region = _of_this_process[offered["token"]] if offered["pid"] == os.getpid() else None
        if region is None:
            region = _fetch(offered, num_bytes, links.timeout_s, map_it)
    except OSError as error:
        raise ValueError(
            f"rank {ranks.rank} cannot map the memory that its box shares for {name} ({error}); ranks of one box have "
            "to be in one container"
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


def _exchange(links: Links, tag: str, said: dict[str, Any]) -> list[dict[str, Any]]:
    """What all ranks say. Raises where one of them was refused, and where those of a box want different sizes."""
    of_all = [json.loads(packed) for packed in links.all_gather(tag, json.dumps(said).encode())]
    for its in of_all:
        if "refused" in its:
            raise ValueError(its["refused"])
    ranks = links.ranks
    for rank, its in enumerate(of_all):
        first = of_all[rank - rank % ranks.num_local]
        if its.get("num_bytes") != first.get("num_bytes"):
            raise ValueError(
                f"rank {rank} wants {its['num_bytes']} bytes for {tag}, and the first rank of its box "
                f"{first['num_bytes']}; give all ranks of a box the same budgets"
            )
    return of_all


def _serve(links: Links, listener: socket.socket, fd: int, token: str, num_others: int, name: str) -> None:
    """Hand `fd` to so many processes that know the token."""
    until_s = time.monotonic() + links.timeout_s
    listener.settimeout(SLICE_S)
    while num_others:
        links.raise_if_failed(f"handed out the memory of {name}")
        if time.monotonic() > until_s:
            raise RankTimeoutError(
                f"{num_others} ranks of this box did not take the memory of {name} within {links.timeout_s:g} s; are "
                "all of them in one container?",
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
    """The descriptor of a file without a name, of so many bytes."""
    sharing = f"{num_local} ranks of a box share" if num_local > 1 else "one rank wants"
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
                f"{wanted}, and {FILES_IN_RAM} has {format_bytes(free)} free, on a system that gives no other; give "
                "the container more (docker run --shm-size or --ipc=host), or lower cpu_memory"
            ) from None
        fd = os.open(FILES_IN_RAM, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        yield fd
    finally:
        os.close(fd)
