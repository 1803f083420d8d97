"""Wear in the reports of smartctl and nvme, or the reason why it is unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_lohan.hardware import paths
from hf_lohan.hardware.paths import WearUnknownError, drive_endurance_bytes, drive_wear_percent, wear_in


@pytest.mark.parametrize(
    ("report", "wear"),
    [
        ({"nvme_smart_health_information_log": {"percentage_used": 3, "data_units_written": 9}}, 3),
        ({"endurance_used": {"current_percent": 120}}, 120),
        ({"percent_used": 0}, 0),
        ({"percentage_used": 7}, 7),
        ({"smartctl": {"exit_status": 2, "messages": [{"string": "Permission denied"}]}}, None),
        ({"nvme_smart_health_information_log": None, "endurance_used": 3}, None),
        ({}, None),
    ],
)
def test_reports(report: dict[str, Any], wear: int | None) -> None:
    assert wear_in(report) == wear


def install(folder: Path, program: str, script: str) -> None:
    file = folder / program
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_smartctl_reports_the_wear(programs: Path) -> None:
    install(programs, "smartctl", """[ "$3" = /dev/nvme7n1 ] && echo '{"endurance_used": {"current_percent": 12}}'""")
    assert drive_wear_percent("nvme7n1") == 12


def test_nvme_is_used_if_smartctl_fails(programs: Path) -> None:
    install(programs, "smartctl", "echo 'no JSON'; exit 2")
    install(programs, "nvme", """echo '{"percent_used": 44}'""")
    assert drive_wear_percent("nvme7n1") == 44


@pytest.mark.parametrize(("percent", "endurance_bytes"), [(8, 1000 * 512_000 * 100 // 8), (4, None)])
def test_the_endurance_follows_from_bytes_and_wear(
    programs: Path, monkeypatch: pytest.MonkeyPatch, percent: int, endurance_bytes: int | None
) -> None:
    monkeypatch.setattr(paths, "drive_of", lambda _: "nvme7n1")
    assert drive_endurance_bytes(str(programs / "store")) is None, "no program is there"
    log = f'{{"percentage_used": {percent}, "data_units_written": 1000}}'
    install(programs, "smartctl", f"""echo '{{"nvme_smart_health_information_log": {log}}}'""")
    assert drive_endurance_bytes(str(programs / "store")) == endurance_bytes
    others = [str(programs / "another")]
    assert drive_endurance_bytes(str(programs / "store"), others) == (endurance_bytes and endurance_bytes // 2)


def test_reasons(programs: Path) -> None:
    with pytest.raises(WearUnknownError, match="not on a single drive"):
        drive_wear_percent(None)
    with pytest.raises(WearUnknownError, match="smartmontools"):
        drive_wear_percent("nvme7n1")
    install(programs, "smartctl", "echo '[]'")
    with pytest.raises(WearUnknownError, match=r"smartctl reports no wear of /dev/nvme7n1; it may need root"):
        drive_wear_percent("nvme7n1")


def test_a_program_that_hangs_is_killed(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_TIMEOUT_S", 0.05)
    install(programs, "smartctl", "while :; do :; done")
    with pytest.raises(WearUnknownError):
        drive_wear_percent("nvme7n1")


def test_embedded_drives_report_tenths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "text_of", lambda file: "0x02 0x0B\n")
    assert drive_wear_percent("mmcblk0") == 110
