"""Profiles that are written by hand are read as intended, and errors in them are named."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_lohan.costs import HardwareProfile, ProfileError
from hf_lohan.costs.hardware_profile import ASSUMED_NVLINK_BYTES_PER_S

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "hardware"

MINIMAL = """
device: {flops_per_s: 160e12, memory_bytes: 24GB}
h2d_bytes_per_s: 20e9
d2h_bytes_per_s: 2.1e+10
ssd: [{read_bytes_per_s: 7.0GB/s, write_bytes_per_s: 4190000000, capacity_bytes: 3.84 TB}]
cpu: {memory_bytes: 768GiB, optimizer_params_per_s: 2_000_000_000}
"""


def minimal() -> dict[str, Any]:
    values = yaml.safe_load(MINIMAL)
    assert isinstance(values, dict)
    return values


def changed(path: str, value: object) -> dict[str, Any]:
    """Return the minimal profile with one value replaced, or removed (`...`)."""
    values = copy.deepcopy(minimal())
    inner: Any = values
    *parents, last = path.split(".")
    for key in parents:
        inner = inner[int(key)] if key.isdigit() else inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[int(last) if last.isdigit() else last] = value
    return values


def test_numbers_that_yaml_reads_as_text_are_read() -> None:
    values = minimal()
    assert values["device"]["flops_per_s"] == "160e12", "YAML 1.1 reads this as text"
    profile = HardwareProfile.from_mapping(values)
    assert profile.device.flops_per_s == 160e12
    assert profile.device.memory_bytes == 24 * 10**9
    assert (profile.h2d_bytes_per_s, profile.d2h_bytes_per_s) == (20e9, 21e9)
    assert (profile.ssd_read_bytes_per_s, profile.ssd_write_bytes_per_s) == (7e9, 4.19e9)
    assert profile.ssd_capacity_bytes == 3_840_000_000_000
    assert profile.cpu.memory_bytes == 768 * 1024**3
    assert profile.cpu.optimizer_params_per_s == 2e9
    assert not profile.device.shares_cpu


def test_a_written_profile_reads_back_equal() -> None:
    values = minimal()
    values |= {"duplex_bytes_per_s": 30e9, "ssd_together_read_bytes_per_s": 6e9, "ssd_mixed_bytes_per_s": "5GB/s"}
    values["device"] |= {"shares_cpu": True, "memory_bytes_per_s": 1e12, "name": "a device"}
    values["ssd"][0] |= {"endurance_bytes": "7PB", "path": "drive"}
    values["cpu"]["checksum_bytes_per_s"] = 1e10
    values |= {"gpu_link": "nvlink", "gpu_link_bytes_per_s": "50GB/s"}
    profile = HardwareProfile.from_mapping(values)
    assert profile.ssd_read_bytes_per_s == 6e9
    assert HardwareProfile.from_mapping(yaml.safe_load(yaml.safe_dump(profile.to_mapping()))) == profile


def test_the_rate_between_gpus_is_assumed_if_it_is_not_known() -> None:
    profile = HardwareProfile.from_mapping(minimal())
    assert profile.gpu_link == "" and profile.between_gpus_bytes_per_s == 20e9 and profile.gpus_share_links
    pcie, nvlink = (HardwareProfile.from_mapping(minimal() | {"gpu_link": kind}) for kind in ("pcie", "nvlink"))
    assert pcie.between_gpus_bytes_per_s == 20e9 and pcie.gpus_share_links
    assert nvlink.between_gpus_bytes_per_s == ASSUMED_NVLINK_BYTES_PER_S and not nvlink.gpus_share_links


def test_minimal_profiles_are_written_short() -> None:
    written = HardwareProfile.from_mapping(minimal()).to_mapping()
    assert set(written) == set(minimal())
    assert set(written["device"]) == {"flops_per_s", "memory_bytes"}


def test_equal_drives_have_a_count() -> None:
    values = minimal()
    values["ssd"][0]["count"] = 3
    values["ssd"].append({"read_bytes_per_s": 1e9, "write_bytes_per_s": 1e9, "capacity_bytes": 10**12})
    profile = HardwareProfile.from_mapping(values)
    assert len(profile.ssd) == 4
    assert profile.ssd_read_bytes_per_s == 22e9


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("device.flops_per_s", ..., ["device.flops_per_s", "missing", "160e12"]),
        ("device.flops_per_s", "fast", ["device.flops_per_s", "'fast'", "number above 0"]),
        ("device.flops_per_s", True, ["device.flops_per_s", "True"]),
        ("device.flops_per_s", "160GB", ["device.flops_per_s", "'160GB'"]),
        ("device.memory_bytes", -1, ["device.memory_bytes", "-1", "24GiB"]),
        ("device.memory_bytes", "24G", ["device.memory_bytes", "'24G'", "24GB"]),
        ("device.memory_bytes", 0.5, ["device.memory_bytes", "0.5"]),
        ("device.shares_cpu", "yes", ["device.shares_cpu", "'yes'", "true or false"]),
        ("device.tflops", 160, ["device.tflops", "160", "flops_per_s, memory_bytes"]),
        ("device.name", 4090, ["device.name", "4090", "text"]),
        ("gpu_link", "NVLink", ["gpu_link", "'NVLink'", "nvlink or pcie or none"]),
        ("gpu_link_bytes_per_s", 0, ["gpu_link_bytes_per_s", "0", "bytes per second"]),
        ("h2d_bytes_per_s", 0, ["h2d_bytes_per_s", "0", "bytes per second"]),
        ("h2d_bytes_per_s", float("nan"), ["h2d_bytes_per_s", "nan"]),
        ("h2d_bytes_per_s", "1e999", ["h2d_bytes_per_s", "1e999"]),
        ("d2h_bytes_per_s", None, ["d2h_bytes_per_s", "empty"]),
        ("d2h_byte_per_s", 1, ["d2h_byte_per_s", "did you mean d2h_bytes_per_s?"]),
        ("ssd", [], ["ssd", "[]", "list of drives"]),
        ("ssd", {"read_bytes_per_s": 1}, ["ssd", "list of drives"]),
        ("ssd.0", "nvme", ["ssd[0]", "'nvme'", "read_bytes_per_s"]),
        ("ssd.0.capacity_bytes", ..., ["ssd[0].capacity_bytes", "missing"]),
        ("ssd.0.count", 0, ["ssd[0].count", "0", "whole number"]),
        ("ssd.0.count", 1.5, ["ssd[0].count", "1.5"]),
        ("cpu", 64, ["cpu", "64", "optimizer_params_per_s"]),
        ("cpu.optimizer_params_per_s", [1], ["cpu.optimizer_params_per_s", "[1]"]),
    ],
)
def test_errors_name_the_key_and_the_value(path: str, value: object, words: list[str]) -> None:
    with pytest.raises(ProfileError) as caught:
        HardwareProfile.from_mapping(changed(path, value))
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("values", [None, [], "device"])
def test_a_profile_is_a_mapping(values: Any) -> None:
    with pytest.raises(ProfileError, match=r"the hardware profile is .*; write a mapping with the keys device, "):
        HardwareProfile.from_mapping(values)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_machines_in_configs_are_read(path: Path) -> None:
    profile = HardwareProfile.from_mapping(yaml.safe_load(path.read_text(encoding="utf-8")))
    assert 1e12 < profile.device.flops_per_s < 1e15
    assert all(ssd.endurance_bytes and ssd.endurance_bytes > 100 * ssd.capacity_bytes for ssd in profile.ssd)
