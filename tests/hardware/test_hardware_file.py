"""Profiles as YAML files, and errors in such files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_lohan.costs import HardwareProfile, ProfileError
from hf_lohan.hardware import read_hardware, write_hardware

LEAST = """
device: {flops_per_s: 160e12, memory_bytes: 24GB}
h2d_bytes_per_s: 20e9
d2h_bytes_per_s: 20e9
ssd: [{read_bytes_per_s: 7.0e9, write_bytes_per_s: 4.19e9, capacity_bytes: 3.84e12}]
cpu: {memory_bytes: 768000000000, optimizer_params_per_s: 2e9}
"""


def test_a_written_profile_is_read(profile: HardwareProfile, tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    write_hardware(file, profile)
    write_hardware(str(file), profile)
    assert read_hardware(str(file)) == profile
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [", "is not YAML"),
        (b"\xff\xfe\xff", "is not YAML"),
        (b"", "not a table"),
        (b"- 1", "not a table"),
        (LEAST.replace("h2d_bytes_per_s: 20e9", "").encode(), "h2d_bytes_per_s"),
        (LEAST.replace("h2d_bytes_per_s: 20e9", "h2d_bytes_per_s: fast").encode(), "h2d_bytes_per_s.*fast"),
        (LEAST.replace("160e12", "-1").encode(), r"device\.flops_per_s.*-1"),
        (LEAST.replace("write_bytes_per_s", "writes").encode(), r"ssd\[0\].*writes"),
    ],
)
def test_errors_name_the_file_the_key_and_the_value(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "machine.yaml"
    file.write_bytes(content)
    with pytest.raises(ProfileError, match=f"machine.yaml.*{message}") as caught:
        read_hardware(file)
    assert "\n" not in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"nowhere.yaml.*No such file.*give the path"):
        read_hardware(tmp_path / "nowhere.yaml")
