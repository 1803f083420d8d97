"""The links between the GPUs of this machine: NVLink, PCIe from GPU to GPU, or none."""

from __future__ import annotations

import ctypes
import enum
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

_TOPOLOGY_COMMAND = ("nvidia-smi", "topo", "-m")
_LIST_COMMAND = ("nvidia-smi", "-L")
_ANSWERS_WITHIN_S = 20.0
_DRIVER = "libcuda.so.1"
_UUID = re.compile(r"GPU (\d+):.*\(UUID: GPU-([0-9a-fA-F-]+)\)")
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


class LinkKind(enum.Enum):
    """How two GPUs reach each other's memory."""

    NVLINK = "NVLink"
    PCIE = "PCIe peer"
    NONE = "none"
    UNKNOWN = "not known"
    """The driver does not answer."""


@dataclass(frozen=True, slots=True)
class GpuLink:
    """The link between two GPUs, which are numbered as in torch."""

    first: int
    second: int
    kind: LinkKind


def links_between_gpus() -> list[GpuLink]:
    """Return the links of all pairs of GPUs that this process may use. A link is NVLink if nvidia-smi shows NVLink."""
    pairs = list(combinations(range(torch.cuda.device_count()), 2))
    with_nvlink = _pairs_with_nvlink() if pairs else set()
    return [GpuLink(first, second, _kind(first, second, with_nvlink)) for first, second in pairs]


def _kind(first: int, second: int, with_nvlink: set[frozenset[str]]) -> LinkKind:
    try:
        if not (reaches(first, second) and reaches(second, first)):
            return LinkKind.NONE
    except RuntimeError:
        return LinkKind.UNKNOWN
    is_nvlink = frozenset((uuid_of(first), uuid_of(second))) in with_nvlink
    return LinkKind.NVLINK if is_nvlink else LinkKind.PCIE


def reaches(first: int, second: int, driver: str = _DRIVER) -> bool:
    """Return whether a GPU reaches the memory of another. This asks the driver, because torch would make a context on
    the first GPU. Raises RuntimeError if the driver does not answer."""
    try:
        cuda = ctypes.CDLL(driver)
        numbers, can_access = (ctypes.c_int(), ctypes.c_int()), ctypes.c_int()
        statuses = [cuda.cuInit(0)]
        for number, index in zip(numbers, (first, second), strict=True):
            statuses.append(cuda.cuDeviceGet(ctypes.byref(number), index))
        statuses.append(cuda.cuDeviceCanAccessPeer(ctypes.byref(can_access), *numbers))
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"the CUDA driver does not say which GPUs reach each other ({error})") from error
    if any(statuses):
        raise RuntimeError(f"the CUDA driver does not say whether GPU {first} reaches GPU {second} (error {statuses})")
    return can_access.value == 1


def uuid_of(index: int) -> str:
    """Return the UUID of a GPU, without nvidia-smi's prefix. `CUDA_VISIBLE_DEVICES` changes indices, but not UUIDs."""
    return str(torch.cuda.get_device_properties(index).uuid)


def why_not_linked(own: str, identities: Sequence[str]) -> str:
    """Return why the GPU with the UUID ``own`` cannot reach the GPUs with ``identities``; "" if it can."""
    index_of = {uuid_of(index): index for index in range(torch.cuda.device_count())}
    for other in identities:
        if other == own:
            return f"several ranks compute on GPU {index_of[own]}, and NCCL needs a GPU for each rank"
        if other not in index_of:
            return f"GPU {other} of another rank is not in this rank's CUDA_VISIBLE_DEVICES; all ranks need the same"
        try:
            if not reaches(index_of[own], index_of[other]):
                return f"GPU {index_of[own]} cannot reach the memory of GPU {index_of[other]}"
        except RuntimeError as error:
            return str(error)
    return ""


def _pairs_with_nvlink() -> set[frozenset[str]]:
    """Return the pairs of UUIDs that nvidia-smi shows with NVLink. There are none if nvidia-smi does not answer."""
    uuid_by_number = {int(number): uuid.lower() for number, uuid in _UUID.findall(_output_of(_LIST_COMMAND))}
    return {
        frozenset((uuid_by_number[first], uuid_by_number[second]))
        for first, second in nvlinks_in(_output_of(_TOPOLOGY_COMMAND))
        if first in uuid_by_number and second in uuid_by_number
    }


def nvlinks_in(topology: str) -> Iterator[tuple[int, int]]:
    """Yield the pairs of GPUs, by nvidia-smi's numbers, that the matrix of `nvidia-smi topo -m` shows with NVLink."""
    lines = _COLORS.sub("", topology).splitlines()
    columns = next((line.split() for line in lines if line.split()[:1] == ["GPU0"]), [])
    for line in lines:
        name, *cells = line.split() or [""]
        if name not in columns or not cells or "X" not in cells:
            continue  # the header, the legend, or a network card
        for column, cell in zip(columns, cells, strict=False):
            if column.startswith("GPU") and re.fullmatch(r"NV\d+", cell):
                yield int(name.removeprefix("GPU")), int(column.removeprefix("GPU"))


def _output_of(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_ANSWERS_WITHIN_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
