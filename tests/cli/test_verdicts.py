"""Every verdict on invented facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hf_lohan.cli.verdicts import Check, Verdict, machine_checks, path_checks, rate_checks
from hf_lohan.costs import CpuProfile, DeviceProfile, HardwareProfile, SsdProfile
from hf_lohan.device import GpuLink, LinkKind
from hf_lohan.hardware import MachineFacts, PathFacts

GIB = 1 << 30
GOOD, COULD_BE_BETTER, BAD, NOT_KNOWN = Verdict

MACHINE = MachineFacts(
    device_type="cuda", device_name="some GPU", device_memory_bytes=24 * GIB, is_pinned=True, gpudirect_problem="",
    bf16_units=(), usable_cpus=16, cpu_quota=None, cpu_threads=16, omp_num_threads=None, load=1.5, is_wsl=False,
    memory_bytes=128 * GIB, available_memory_bytes=120 * GIB, memory_limit_bytes=None, cpu_memory=72 * GIB,
)  # fmt: skip

LINKS = (
    GpuLink(0, 1, LinkKind.NVLINK),
    GpuLink(0, 2, LinkKind.PCIE),
    GpuLink(1, 2, LinkKind.NONE),
    GpuLink(2, 3, LinkKind.NVLINK),
)

PATH = PathFacts(
    path="/mnt/nvme/store", file_system="xfs", problem="", is_direct=True, can_reflink=True, free_bytes=1000 * GIB,
    capacity="auto", wear_percent=3, wear_problem="",
)  # fmt: skip

HARDWARE = HardwareProfile(
    device=DeviceProfile(flops_per_s=1.5e14, memory_bytes=24 * GIB, memory_bytes_per_s=9e11),
    h2d_bytes_per_s=2.4e10,
    d2h_bytes_per_s=2.5e10,
    duplex_bytes_per_s=4e10,
    ssd=tuple(
        SsdProfile(path=path, read_bytes_per_s=7e9, write_bytes_per_s=4e9, capacity_bytes=1000 * GIB)
        for path in ("/mnt/a", "/mnt/b")
    ),
    ssd_together_read_bytes_per_s=1.3e10,
    ssd_together_write_bytes_per_s=8e9,
    ssd_mixed_bytes_per_s=9e9,
    cpu=CpuProfile(memory_bytes=100 * GIB, optimizer_params_per_s=2e9, checksum_bytes_per_s=1e11),
)


def check_named(checks: list[Check], name: str) -> Check:
    [found] = [check for check in checks if check.name == name]
    assert bool(found.advice) == (found.verdict in (COULD_BE_BETTER, BAD)), "only bad verdicts have advice"
    return found


def test_good_facts_give_no_advice() -> None:
    checks = [*machine_checks(MACHINE), *path_checks(PATH), *rate_checks(HARDWARE, "bfloat16")]
    assert {check.verdict for check in checks} == {GOOD}
    assert not any(check.advice for check in checks)


@pytest.mark.parametrize(
    ("name", "changes", "verdict", "words"),
    [
        ("device", {"device_type": "cpu"}, COULD_BE_BETTER, "use a GPU"),
        ("bfloat16 on the CPU", {"device_type": "cpu"}, COULD_BE_BETTER, "float32"),
        ("bfloat16 on the CPU", {"device_type": "cpu", "bf16_units": ("amx_bf16",)}, GOOD, "amx_bf16"),
        ("pinned memory", {"is_pinned": False}, BAD, "memlock"),
        ("pinned memory", {"device_type": "cpu", "is_pinned": False}, GOOD, "not needed"),
        ("links between GPUs", {}, GOOD, "none, because there is one GPU"),
        ("links between GPUs", {"device_type": "cpu"}, GOOD, "none, because there is no GPU"),
        ("links between GPUs", {"gpu_links": LINKS}, GOOD, "NVLink (0-1, 2-3); PCIe peer (0-2); none (1-2)"),
        ("GPUDirect Storage", {"gpudirect_problem": "kvikio is not installed"}, GOOD, "kvikio is not installed"),
        ("GPUDirect Storage", {"device_type": "cpu", "gpudirect_problem": "there is no GPU"}, GOOD, "there is no GPU"),
        ("CPU threads", {"cpu_threads": 1}, COULD_BE_BETTER, "cpu_threads to auto"),
        ("CPU threads", {"cpu_threads": 32}, COULD_BE_BETTER, "cpu_threads to 16"),
        ("CPU threads", {"cpu_quota": 2.5}, COULD_BE_BETTER, "cpu_threads to 2"),
        ("CPU threads", {"cpu_quota": 0.5}, COULD_BE_BETTER, "cpu_threads to 1"),
        ("CPU threads", {"cpu_quota": 16.0}, GOOD, "16 on 16"),
        ("CPU threads", {"omp_num_threads": "1"}, COULD_BE_BETTER, "OMP_NUM_THREADS is 1"),
        ("CPU threads", {"omp_num_threads": "16"}, GOOD, "16 on 16"),
        ("CPU threads", {"omp_num_threads": "1", "usable_cpus": 1, "cpu_threads": 1}, GOOD, "1 on 1"),
        ("other load", {"load": 8.1}, COULD_BE_BETTER, "8.1 of 16 CPUs"),
        ("other load", {"load": 8.0}, GOOD, "8.0 of 16 CPUs"),
        ("memory", {"available_memory_bytes": 60 * GIB}, BAD, "below 60 GiB"),
        ("memory", {"available_memory_bytes": 20 * GIB, "cpu_memory": 12 * GIB}, COULD_BE_BETTER, "20 GiB free"),
        ("container limit", {"memory_limit_bytes": 100 * GIB}, COULD_BE_BETTER, "100 GiB of 128 GiB"),
        ("container limit", {"memory_limit_bytes": 256 * GIB}, GOOD, "none"),
        ("system", {"is_wsl": True}, COULD_BE_BETTER, "WSL"),
    ],
)
def test_verdicts_on_the_machine(name: str, changes: dict[str, Any], verdict: Verdict, words: str) -> None:
    check = check_named(machine_checks(replace(MACHINE, **changes)), name)
    assert check.verdict is verdict
    assert words in f"{check.value} {check.advice}"
    assert check.subject == ""


@pytest.mark.parametrize(
    ("name", "changes", "verdict", "words"),
    [
        ("access", {"problem": "Permission denied"}, BAD, "Permission denied"),
        *[("file system", {"file_system": kind}, GOOD, kind) for kind in ("ext4", "btrfs", "zfs")],
        *[("file system", {"file_system": kind}, BAD, "in RAM") for kind in ("tmpfs", "ramfs")],
        *[("file system", {"file_system": kind}, BAD, "network") for kind in ("nfs4", "cifs", "9p", "fuse.sshfs")],
        *[("file system", {"file_system": kind}, COULD_BE_BETTER, "layer") for kind in ("overlay", "aufs")],
        ("file system", {"file_system": "newfs"}, NOT_KNOWN, "newfs"),
        ("file system", {"file_system": ""}, NOT_KNOWN, "unknown"),
        ("O_DIRECT", {"is_direct": False}, BAD, "page cache"),
        ("room", {"free_bytes": GIB // 2}, BAD, "free space"),
        ("room", {"free_bytes": 12 * GIB}, COULD_BE_BETTER, "537 million parameters"),
        ("room", {"capacity": 240 * GIB}, GOOD, "240 GiB, 10.7 billion parameters"),
        ("room", {"capacity": 2000 * GIB}, COULD_BE_BETTER, "lower its capacity (1.95 TiB)"),
        ("drive wear", {"wear_percent": 79}, GOOD, "79%"),
        ("drive wear", {"wear_percent": 80}, COULD_BE_BETTER, "new drive"),
        ("drive wear", {"wear_percent": 130}, BAD, "replace the drive"),
        ("drive wear", {"wear_percent": None, "wear_problem": "it may need root"}, NOT_KNOWN, "it may need root"),
        ("reflinks", {"can_reflink": False}, COULD_BE_BETTER, "XFS or Btrfs"),
    ],
)
def test_verdicts_on_a_path(name: str, changes: dict[str, Any], verdict: Verdict, words: str) -> None:
    check = check_named(path_checks(replace(PATH, **changes)), name)
    assert check.verdict is verdict
    assert words in f"{check.value} {check.advice}"
    assert check.subject == PATH.path


def test_an_unwritable_path_has_a_single_check() -> None:
    assert len(path_checks(replace(PATH, problem="Read-only file system"))) == 1


def drives(read: float, write: float) -> dict[str, Any]:
    return {"ssd": (SsdProfile(path="/mnt/a", read_bytes_per_s=read, write_bytes_per_s=write, capacity_bytes=GIB),)}


@pytest.mark.parametrize(
    ("name", "changes", "verdict", "words"),
    [
        ("compute", {"device": DeviceProfile(flops_per_s=9e12, memory_bytes=1)}, COULD_BE_BETTER, "throttled"),
        (
            "compute",
            {"device": DeviceProfile(flops_per_s=2e11, memory_bytes=1, shares_cpu=True)},
            COULD_BE_BETTER,
            "0.2",
        ),
        ("host to device", {"h2d_bytes_per_s": 1.2e10}, COULD_BE_BETTER, "12 GB/s"),
        ("device to host", {"d2h_bytes_per_s": 3e9}, BAD, "16 lanes"),
        ("both ways at once", {"duplex_bytes_per_s": 2.5e10}, COULD_BE_BETTER, "one direction at a time"),
        ("reads", drives(2e9, 4e9), COULD_BE_BETTER, "NVMe"),
        ("reads", drives(5e8, 4e9), BAD, "0.5 GB/s"),
        ("writes", drives(7e9, 1e9), COULD_BE_BETTER, "cache is full"),
        ("writes", drives(7e9, 1e8), BAD, "0.1 GB/s"),
        ("all paths together", {"ssd_together_read_bytes_per_s": 7e9}, COULD_BE_BETTER, "its own drive"),
        ("all paths together", {"ssd_together_write_bytes_per_s": 4e9}, COULD_BE_BETTER, "4 GB/s written"),
        ("reads and writes mixed", {"ssd_mixed_bytes_per_s": 4e9}, COULD_BE_BETTER, "4 GB/s"),
        (
            "optimizer",
            {"cpu": CpuProfile(memory_bytes=1, optimizer_params_per_s=1e8)},
            COULD_BE_BETTER,
            "the drives could feed 413 M parameters/s",
        ),
        (
            "optimizer",
            {"cpu": CpuProfile(memory_bytes=1, optimizer_params_per_s=2e9, checksum_bytes_per_s=2e9)},
            COULD_BE_BETTER,
            "checksums 2 GB/s",
        ),
    ],
)
def test_verdicts_on_rates(name: str, changes: dict[str, Any], verdict: Verdict, words: str) -> None:
    check = check_named(rate_checks(replace(HARDWARE, **changes), "bfloat16"), name)
    assert check.verdict is verdict
    assert words in f"{check.value} {check.advice}"


def test_the_memory_of_a_cpu_is_no_link() -> None:
    on_cpu = replace(HARDWARE, device=replace(HARDWARE.device, shares_cpu=True), h2d_bytes_per_s=1e9)
    names = {check.name for check in rate_checks(on_cpu, "float32")}
    assert "copies to the device" in names
    assert "host to device" not in names


def test_rates_of_a_path_have_the_path_as_subject() -> None:
    subjects = [check.subject for check in rate_checks(HARDWARE, "bfloat16") if check.name in ("reads", "writes")]
    assert subjects == ["/mnt/a", "/mnt/a", "/mnt/b", "/mnt/b"]


def test_unmeasured_rates_have_no_verdict() -> None:
    least = replace(HARDWARE, duplex_bytes_per_s=None, ssd_mixed_bytes_per_s=None, ssd=HARDWARE.ssd[:1])
    names = {check.name for check in rate_checks(least, "bfloat16")}
    assert not names & {"both ways at once", "reads and writes mixed", "all paths together"}
