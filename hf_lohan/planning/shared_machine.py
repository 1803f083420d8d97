"""Divides a machine's memory, CPUs and free space among its ranks, for settings that are "auto"."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_lohan.config import ConfigError, OffloadConfig, SsdPath
from hf_lohan.device import Device, available_host_memory_bytes, host_memory_limit_bytes
from hf_lohan.files.directories import free_bytes, occupied_bytes
from hf_lohan.hardware.paths import existing_directory
from hf_lohan.ranks import Links, Ranks
from hf_lohan.store import DATA_NAMES
from hf_lohan.store.manifest import rank_of
from hf_lohan.store.rank_folders import rank_folder, shared_directory
from hf_lohan.threads import usable_cpus

_PROBE_BYTES = 2 << 20
"""Bytes that each rank sends to each other rank to measure the network."""
_NUM_PROBES = 3
_MOST_RANKS = 64
"""Maximum number of nodes, and of local ranks, whose directories are searched for stores of other numbers of ranks."""


@dataclass(frozen=True)
class Share:
    """One rank's part of a machine. All ranks of a run have the same numbers, so that they make the same plan."""

    host_memory_bytes: int
    device_memory_bytes: int
    num_cpus: int


@dataclass(frozen=True)
class _Offer:
    """The free resources that a rank sees before any rank takes memory."""

    settings: Mapping[str, Any]
    """The settings without paths, which may differ between machines."""
    host_memory_bytes: int
    device_memory_bytes: int
    device: str
    """A name that is equal for ranks that share a device."""
    cpus: Sequence[int]
    drives: Sequence[Sequence[int]]
    """For each path, its device number, free bytes, and bytes of the store in it."""

    def pack(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> _Offer:
        return cls(**json.loads(packed))


def rank_paths(paths: Sequence[SsdPath], ranks: Ranks) -> tuple[SsdPath, ...]:
    """Return the paths of this rank's store, with the patterns of ``paths`` filled in. All ranks get the same
    ``paths``. With several ranks, each rank has its own folder below a path. A path that already names this rank's
    folder is unchanged."""
    return tuple(replace(ssd, path=_folder(ssd, ranks), names_ranks=False) for ssd in paths)


def _filled_in(ssd: SsdPath, local_rank: int, node: int) -> str:
    if not ssd.names_ranks:
        return ssd.path
    return ssd.path.replace("{local_rank}", str(local_rank)).replace("{node}", str(node))


def _folder(ssd: SsdPath, ranks: Ranks) -> str:
    path = _filled_in(ssd, ranks.local_rank, ranks.node)
    is_own = rank_of(path) == (ranks.rank, ranks.num_ranks)
    return path if is_own else rank_folder(path, ranks.rank, ranks.num_ranks)


def directories_of_ranks(paths: Sequence[SsdPath]) -> list[list[str]]:
    """Return the lists of directories in which any rank may have its store on this machine. There is one list, unless
    ``paths`` have `{local_rank}` or `{node}`."""
    text = " ".join(ssd.path for ssd in paths if ssd.names_ranks)
    local_ranks, nodes = (range(_MOST_RANKS if name in text else 1) for name in ("{local_rank}", "{node}"))
    found: list[list[str]] = []
    for node, local_rank in itertools.product(nodes, local_ranks):
        directories = [shared_directory(_filled_in(ssd, local_rank, node)) for ssd in paths]
        if directories not in found and (len(nodes) * len(local_ranks) == 1 or all(map(os.path.isdir, directories))):
            found.append(directories)
    return found


def searched_directories(paths: Sequence[SsdPath], ranks: Ranks) -> list[list[str]]:
    """Return the lists of directories in which a run looks for stores. The first has this rank's store."""
    is_own = (ranks.rank, ranks.num_ranks)
    folders = [ssd.path for ssd in rank_paths(paths, ranks)]
    own = [shared_directory(folder) if rank_of(folder) == is_own else folder for folder in folders]
    return [own, *(other for other in directories_of_ranks(paths) if {*other} != {*own})]


def memory_limit_of(ranks: Ranks) -> int | None:
    """Return the bytes of host memory that the limits of control groups allow each rank of this machine."""
    limit = host_memory_limit_bytes()
    return None if limit is None else limit // ranks.num_local


def share_of_machine(
    config: OffloadConfig, device: Device, paths: tuple[SsdPath, ...], links: Links
) -> tuple[Share, tuple[SsdPath, ...]]:
    """Return this rank's share, and its ``paths`` with capacities that leave room for the other ranks. All ranks call
    this together, before any rank takes memory. Raises ConfigError if their settings differ."""
    ranks = links.ranks
    if not ranks.others:
        return Share(available_host_memory_bytes(), device.total_memory_bytes(), usable_cpus()), paths
    offered = links.all_gather("what is free for each rank", _offer(config, device, paths).pack())
    offers = [_Offer.unpack(packed) for packed in offered]
    _refuse_differences(offers)
    shares = [_share(offers, ranks.of_rank(rank)) for rank in range(ranks.num_ranks)]
    least = Share(
        min(share.host_memory_bytes for share in shares),
        min(share.device_memory_bytes for share in shares),
        min(share.num_cpus for share in shares),
    )
    return least, tuple(
        ssd if ssd.capacity != "auto" else replace(ssd, capacity=_capacity(offers, ranks, number))
        for number, ssd in enumerate(paths)
    )


def measure_network(links: Links) -> float | None:
    """Return the bytes per second that a node sends to the others while it receives the same number; None for a single
    node. All ranks call this together and get the same number."""
    ranks = links.ranks
    num_receivers = ranks.num_ranks - ranks.num_local
    if num_receivers == 0:
        return None
    seconds = []
    for _ in range(_NUM_PROBES):
        links.barrier("the network is measured")
        begin_s = time.perf_counter()
        links.all_gather("bytes that measure the network", bytes(_PROBE_BYTES))
        seconds.append(time.perf_counter() - begin_s)
    slowest_s = max(map(float, links.all_gather("the seconds of the measurement", repr(min(seconds)).encode())))
    return ranks.num_local * num_receivers * _PROBE_BYTES / slowest_s


def _offer(config: OffloadConfig, device: Device, paths: Sequence[SsdPath]) -> _Offer:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    return _Offer(
        settings={name: value for name, value in config.to_dict(with_dots=True).items() if name != "ssd"},
        host_memory_bytes=available_host_memory_bytes(),
        device_memory_bytes=device.total_memory_bytes(),
        device="host" if device.memory_is_host else f"{device.torch_device} of {visible}",
        cpus=sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(usable_cpus())),
        drives=[_drive(ssd.path) for ssd in paths],
    )


def _drive(path: str) -> tuple[int, int, int]:
    return os.stat(existing_directory(path)).st_dev, free_bytes(path), occupied_bytes(path, DATA_NAMES)


def _share(offers: Sequence[_Offer], ranks: Ranks) -> Share:
    offer, on_node = offers[ranks.rank], [offers[rank] for rank in ranks.on_this_node]
    cpus = sum(1 / sum(cpu in other.cpus for other in on_node) for cpu in offer.cpus)
    return Share(
        host_memory_bytes=min(other.host_memory_bytes for other in on_node) // ranks.num_local,
        device_memory_bytes=offer.device_memory_bytes // sum(other.device == offer.device for other in on_node),
        num_cpus=max(1, int(cpus + 1e-6)),
    )


def _capacity(offers: Sequence[_Offer], ranks: Ranks, number: int) -> int:
    """Return this rank's part of the free space of one of its paths. Stores of the node's ranks on this drive count as
    free."""
    drive, free, _ = offers[ranks.rank].drives[number]
    sharing = [other for rank in ranks.on_this_node for other in offers[rank].drives if other[0] == drive]
    return (free + sum(occupied for _, _, occupied in sharing)) // len(sharing)


def _refuse_differences(offers: Sequence[_Offer]) -> None:
    for rank, offer in enumerate(offers):
        for name, value in offer.settings.items():
            if value != offers[0].settings[name]:
                raise ConfigError(
                    f"{name} is {offers[0].settings[name]!r} on rank 0 and {value!r} on rank {rank}; give all ranks "
                    "the same offload settings, except ssd paths"
                )
