"""`lohan report` makes a page from complete and incomplete runs, and refuses other folders in one line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from python_runs import run_python
from typer.testing import CliRunner

from hf_lohan.cli import app
from hf_lohan.report import write_report
from hf_lohan.report.svg import ticks

runner = CliRunner()
OLD_SUMMARY = {
    "num_steps": 4, "step_s": 2.5, "tokens_per_s": 100.0, "store_bytes": 3 << 30, "predicted_step_s": 2.4,
    "corrected_step_s": 2.4, "bottleneck": "ssd", "num_parameters": 134_500_000,
    "hardware": {"kind": "cpu", "name": "a CPU", "num_cpus": 2},
    "config": {"cpu_memory": 1 << 30, "ssd": [{"path": "store", "capacity": "auto"}]},
}  # fmt: skip
"""The summary of an old run that wrote no steps."""


def write_run(folder: Path, *, summary: Any = None, steps: str | None = None) -> Path:
    (folder / "lohan").mkdir(parents=True)
    if summary is not None:
        (folder / "lohan" / "summary.json").write_text(json.dumps(summary))
    if steps is not None:
        (folder / "lohan" / "steps.jsonl").write_text(steps)
    return folder


def test_a_folder_without_a_run_is_refused_in_one_line(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        result = runner.invoke(app, ["report", str(path)])
        assert result.exit_code == 2
        assert "is not the output folder of an offloaded run" in result.stderr
        assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_damaged_summary_is_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "lohan" / "summary.json").write_text("{")
    result = runner.invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert str(tmp_path / "lohan" / "summary.json") in result.stderr


def test_an_old_run_has_a_smaller_page(tmp_path: Path) -> None:
    ssd = {"path": "/mnt/a/long/path/to/the/store", "read_bytes_per_s": 2e9, "write_bytes_per_s": 1e9}
    run = write_run(tmp_path / "run", summary={**OLD_SUMMARY, "measured_hardware": {"ssd": [ssd]}})
    result = runner.invoke(app, ["report", str(run)])
    assert result.exit_code == 0, result.stderr
    page = (run / "lohan" / "report.html").read_text()
    for figure in ("2.5 s", "100", "134 million", "the SSDs", "3 GiB", "a CPU (cpu)", "1 GiB"):
        assert figure in page, figure
    assert "<svg" not in page
    row = "<td>SSD</td><td>/mnt/a/long/path/to/the/store: reads 2 GB/s, writes 1 GB/s</td>"
    assert row in page, "keys are not wrapped, so a path as a key would leave no room for values"


@pytest.mark.parametrize("given", [".", "lohan"])
def test_a_run_that_wrote_only_steps_has_a_page(tmp_path: Path, given: str) -> None:
    lines = [{"step": number, "step_s": 2.0, "loss": 3.0 / number} for number in (1, 2, 2, 3)]
    run = write_run(tmp_path / "run", steps="".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 4, "st')
    result = runner.invoke(app, ["report", str(run / given), "--output", str(tmp_path / "page.html")])
    assert result.exit_code == 0, result.stderr
    page = (tmp_path / "page.html").read_text()
    assert "The loss went from 3.000 at step 1 to 1.000 at step 3" in page
    assert "A step took 2 s" in page
    assert "it is at step 3, or it was stopped there" in page


def test_an_unwritable_output_is_refused_in_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", summary=OLD_SUMMARY)
    result = runner.invoke(app, ["report", str(run), "--output", str(tmp_path / "missing" / "page.html")])
    assert result.exit_code == 2
    assert "missing" in result.stderr and result.stderr.count("\n") == 1


def test_charts_need_no_matplotlib(tmp_path: Path) -> None:
    line = {
        "step_s": 2.0, "busy_s": {"compute": 1.5, "ssd read": 1.0}, "waits_s": {"compute waits": {"weights": 0.4}},
        "cpu_pool_bytes": {"states": 3 << 20}, "anon_rss_bytes": 1 << 30, "device_slots_bytes": 1 << 20,
        "ssd_read_bytes": 1 << 20, "ssd_write_bytes": 0, "grad_norm": 1.0,
    }  # fmt: skip
    steps = [{"step": number, "loss": 3.0 / number, **line} for number in range(1, 1200)]
    steps[700]["step_s"] = 90.0
    run = write_run(tmp_path / "run", summary=OLD_SUMMARY, steps="".join(f"{json.dumps(step)}\n" for step in steps))
    page = tmp_path / "page.html"
    code = f"""
import sys
sys.modules["matplotlib"] = None  # importing it fails, as without the extra
from hf_lohan.report import write_report
write_report({str(run)!r}, {str(page)!r})
"""
    run_python("-c", code)
    charts = re.findall(r"<svg.*?</svg>", page.read_text(), flags=re.DOTALL)
    assert len(charts) == 6
    on_a_phone = re.findall(
        r'<div class="chart"><svg viewBox="0 0 (\d+) \d+" style="--width:(\d+)px"', page.read_text()
    )
    assert [width for width, scrolled_from in on_a_phone if width == scrolled_from] == ["1030", *["500"] * 4, "1030"]
    for chart in charts:
        for element in ElementTree.fromstring(chart).iter():
            numbers = [element.get(name) for name in ("x", "y", "width", "height", "x1", "y1", "x2", "y2", "cx", "cy")]
            points = (element.get("points") or "").replace(",", " ").split()
            assert all(-50 <= float(number) <= 1080 for number in [*filter(None, numbers), *points])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("steps.jsonl", b"\xff\xfe\n"),
        ("steps.jsonl", b'{"step": 1, "step_s": "long"}\n'),
        ("trace.json", b'{"traceEvents": [{"ph": "X"}]}'),
        ("trace.json", b'{"traceEvents": 7}'),
        ("summary.json", b'{"hardware": "a CPU"}'),
        ("config.json", b"\xff"),
    ],
)
def test_a_foreign_file_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    run = write_run(tmp_path / "run", summary=OLD_SUMMARY)
    (run / "lohan" / name).write_bytes(content)
    result = runner.invoke(app, ["report", str(run)])
    if content.startswith(b"\xff\xfe"):
        assert result.exit_code == 0, "lines that are no steps are left out"
        return
    assert result.exit_code == 2, result.output
    assert name in result.stderr and result.stderr.count("\n") == 1


def test_other_users_may_not_write_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", summary=OLD_SUMMARY)
    before = os.umask(0)
    try:
        page = write_report(run)
    finally:
        os.umask(before)
    assert page.stat().st_mode & 0o022 == 0


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.5, 3.5, [1, 2, 3]),
        (7.0, 7.0, [7.0]),
        (-0.5, 2600.0, [0, 500, 1000, 1500, 2000, 2500]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high, 6, whole=low % 1 != 0) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["report.html", "report.html.new"])
def test_a_link_does_not_redirect_the_page(name: str, tmp_path: Path) -> None:
    run, other = write_run(tmp_path / "run", summary=OLD_SUMMARY), tmp_path / "mine"
    other.write_text("notes")
    (run / "lohan" / name).symlink_to(other)
    result = runner.invoke(app, ["report", str(run)])
    page = run / "lohan" / "report.html"
    assert result.exit_code == 0 and other.read_text() == "notes"
    assert not page.is_symlink() and "<!DOCTYPE html>" in page.read_text()
    page.unlink()
    os.mkfifo(page)
    assert runner.invoke(app, ["report", str(run)]).exit_code == 0 and page.is_file()
    page.unlink()
    page.mkdir()
    result = runner.invoke(app, ["report", str(run)])
    assert result.exit_code == 2 and str(page) in result.stderr and result.stderr.count("\n") == 1
