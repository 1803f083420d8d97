"""Memory that the ranks of one node share. Between these ranks only offsets in it are sent.

The file of this memory has no name, so it disappears with the processes, even if they are killed. The other ranks of
the node open the descriptor of the first one through /proc, which the kernel allows to processes of the same user.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from hf_lohan.device import Device, available_host_memory_bytes, mapped_file
from hf_lohan.ranks.transport.topology import Ranks
from hf_lohan.wording import format_bytes

FILES_IN_RAM = "/dev/shm"


class NodeLinks(Protocol):
    """The methods of `Links` that sharing needs. `RowLinks` has them too."""

    @property
    def ranks(self) -> Ranks: ...

    def all_gather(self, tag: str, payload: bytes = b"") -> list[bytes]: ...


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
        tag, memory = f"the memory of {name}", None
        offer: dict[str, Any] = {"num_bytes": num_bytes}
        with contextlib.ExitStack() as cleanup:
            try:
                if links.ranks.local_rank == 0:
                    fd = cleanup.enter_context(_file_in_ram(num_bytes, name, links.ranks.num_local))
                    memory = map_it(fd, num_bytes)
                    offer["file"] = f"/proc/{os.getpid()}/fd/{fd}"
            except (OSError, ValueError) as error:
                offer["refused"] = str(error)
            offered = _exchange(links, tag, offer)[links.ranks.on_this_node[0]]
            refused = ""
            if memory is None:
                try:
                    memory = _map(offered["file"], num_bytes, map_it)
                except (OSError, ValueError) as error:
                    refused = (
                        f"rank {links.ranks.rank} cannot map the memory that its node shares for {name} ({error}); "
                        "start the ranks of one node as one user, in one container"
                    )
            _exchange(links, f"all to have {tag}", {"refused": refused} if refused else {})
        assert memory is not None
        return cls(memory, name)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Return the offset of a tensor in bytes; None if the tensor is not in this memory."""
        offset = tensor.data_ptr() - self.bytes.data_ptr()
        return offset if offset >= 0 and offset + tensor.nbytes <= self.bytes.nbytes else None


def _map(path: str, num_bytes: int, map_it: Callable[[int, int], Tensor]) -> Tensor:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return map_it(fd, num_bytes)
    finally:
        os.close(fd)


def _exchange(links: NodeLinks, tag: str, message: dict[str, Any]) -> list[dict[str, Any]]:
    """Exchange the offers and requests of all ranks. Raises ValueError if a rank's request was refused, or if ranks of
    a node want different sizes."""
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
