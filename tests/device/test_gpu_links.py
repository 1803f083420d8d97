"""Links between GPUs, from a double of torch's answers and of nvidia-smi's."""

from __future__ import annotations

import ctypes
import subprocess
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_lohan.costs import HardwareProfile
from hf_lohan.device import gpu_links, links_between_gpus
from hf_lohan.device.gpu_links import GpuLink, LinkKind, nvlinks_in, reaches, why_not_linked
from hf_lohan.hardware import with_gpu_link

TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV4\tPHB\tSYS\tPIX\t0-31\t0\t\tN/A
GPU1\tNV4\t X \tPIX\tSYS\tSYS\t0-31\t0\t\tN/A
GPU2\tPHB\tPIX\t X \tNV12\tSYS\t32-63\t1\t\tN/A
GPU3\tSYS\tSYS\tNV12\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\tSYS\t X \t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""
LIST = "".join(f"GPU {number}: NVIDIA A100-SXM4-40GB (UUID: GPU-{number}{number}-aa)\n" for number in range(4))


class Machine:
    """Four GPUs. This process sees those with the given numbers, in this order."""

    def __init__(self, patch: pytest.MonkeyPatch, visible: list[int], unreachable: set[frozenset[int]]) -> None:
        self.visible = visible
        self.unreachable = unreachable
        self.answers: dict[str, str] = {"topo": TOPOLOGY, "-L": LIST}
        patch.setattr(torch.cuda, "device_count", lambda: len(visible))
        patch.setattr(gpu_links, "reaches", self.reaches)
        patch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda index: SimpleNamespace(uuid=f"{visible[index]}{visible[index]}-aa"),
        )
        patch.setattr(subprocess, "run", self.run)

    def reaches(self, first: int, second: int) -> bool:
        return frozenset((self.visible[first], self.visible[second])) not in self.unreachable

    def run(self, command: tuple[str, ...], **_options: Any) -> Any:
        if command[1] not in self.answers:
            raise FileNotFoundError(command[0])
        return SimpleNamespace(stdout=self.answers[command[1]])


def test_the_matrix_of_nvidia_smi_names_pairs_with_nvlink() -> None:
    assert set(nvlinks_in(TOPOLOGY)) == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert not list(nvlinks_in("")) and not list(nvlinks_in("Failed to initialize NVML"))


def test_links_have_a_kind_and_torch_s_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, [3, 2, 1], {frozenset((3, 1))})
    assert links_between_gpus() == [
        GpuLink(0, 1, LinkKind.NVLINK),
        GpuLink(0, 2, LinkKind.NONE),
        GpuLink(1, 2, LinkKind.PCIE),
    ]


@pytest.mark.parametrize(
    ("unreachable", "num_gpus", "found"),
    [
        (set(), 2, "nvlink"),  # 0 and 1 of the machine
        (set(), None, "pcie"),  # the slowest link of three GPUs
        (set(), 4, ""),  # there are three
        ({frozenset((0, 2))}, 3, "none"),
    ],
)
def test_a_profile_has_the_slowest_link(
    unreachable: set[frozenset[int]], num_gpus: int | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch, [0, 1, 2], unreachable)
    machine = {
        "device": {"flops_per_s": 1e12, "memory_bytes": "24GB"},
        "h2d_bytes_per_s": 20e9,
        "d2h_bytes_per_s": 20e9,
        "ssd": [{"read_bytes_per_s": 1e9, "write_bytes_per_s": 1e9, "capacity_bytes": "1TB"}],
        "cpu": {"memory_bytes": "64GB", "optimizer_params_per_s": 1e9},
    }
    assert with_gpu_link(HardwareProfile.from_mapping(machine), num_gpus).gpu_link == found
    written = HardwareProfile.from_mapping(machine | {"gpu_link": "pcie"})
    assert with_gpu_link(written, num_gpus) is written


def test_without_nvidia_smi_no_link_is_called_nvlink(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, [0, 1], set()).answers.clear()
    assert links_between_gpus() == [GpuLink(0, 1, LinkKind.PCIE)]


def test_a_single_gpu_and_no_gpu_have_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible in ([0], []):
        Machine(monkeypatch, visible, set()).answers.clear()
        assert links_between_gpus() == []


def test_the_reason_why_gpus_are_not_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, [0, 1, 2], {frozenset((0, 2))})
    assert why_not_linked("00-aa", ["11-aa"]) == ""
    assert why_not_linked("00-aa", ["11-aa", "22-aa"]) == "GPU 0 cannot reach the memory of GPU 2"
    assert "several ranks compute on GPU 1" in why_not_linked("11-aa", ["00-aa", "11-aa"])
    assert "GPU 33-aa of another rank is not in this rank's CUDA_VISIBLE_DEVICES" in why_not_linked("00-aa", ["33-aa"])


def test_a_driver_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, [0, 1], set())
    monkeypatch.setattr(gpu_links, "reaches", partial(reaches, driver="libno-such-driver.so.1"))
    assert links_between_gpus() == [GpuLink(0, 1, LinkKind.UNKNOWN)]
    assert "does not say which GPUs reach each other (libno-such-driver" in why_not_linked("00-aa", ["11-aa"])


def test_an_error_of_the_driver_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"cuInit": 0, "cuDeviceGet": 0, "cuDeviceCanAccessPeer": 100}
    driver = SimpleNamespace(**{name: lambda *_args, status=status: status for name, status in answers.items()})
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: driver)
    with pytest.raises(RuntimeError, match=r"whether GPU 0 reaches GPU 1 \(error \[0, 0, 0, 100\]\)"):
        reaches(0, 1)
