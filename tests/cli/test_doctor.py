"""`lohan doctor` prints checks, writes a profile even if a drive is unusable, and refuses bad input in one line."""

from __future__ import annotations

import json
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from planned_models import TINY_EFFORT
from rich.console import Console
from typer.testing import CliRunner

from hf_lohan.cli import app, doctor
from hf_lohan.cli.doctor import examine, print_tables
from hf_lohan.cli.verdicts import Check, Verdict
from hf_lohan.hardware import MatrixShape, cached_hardware, read_hardware

runner = CliRunner()


@pytest.fixture
def offload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A config file with its own path. Measurements take milliseconds and are cached next to it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "cached_hardware", partial(cached_hardware, effort=TINY_EFFORT))
    monkeypatch.setattr(doctor, "SHAPES", (MatrixShape(64, 32, 16),))
    (tmp_path / "store").mkdir()
    file = tmp_path / "offload.yaml"
    file.write_text(f"ssd: {tmp_path / 'store'}\ncpu_memory: 256MiB\n")
    return str(file)


def run(*arguments: str) -> Any:
    return runner.invoke(app, ["doctor", *arguments])


def test_the_tables_have_all_checks(offload: str, tmp_path: Path) -> None:
    result = run("--offload", offload)
    assert result.exit_code == 0, result.stderr
    for words in ("this machine", str(tmp_path / "store"), "O_DIRECT", "optimizer", "checks: "):
        assert words in result.stdout.replace("\n", "")
    assert list((tmp_path / "store").iterdir()) == []


def test_json_has_the_checks_and_the_profile(offload: str) -> None:
    result = run("--offload", offload, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert {tuple(check) for check in found["checks"]} == {("name", "value", "verdict", "advice", "subject")}
    assert {check["verdict"] for check in found["checks"]} <= {verdict.value for verdict in Verdict}
    assert found["hardware"]["device"]["flops_per_s"] > 0


def test_without_measuring_no_rates_are_printed(offload: str, tmp_path: Path) -> None:
    found = json.loads(run("--offload", offload, "--json", "--no-measure").stdout)
    assert found["hardware"] is None
    assert "compute" not in {check["name"] for check in found["checks"]}
    assert not (tmp_path / "cache").exists()


def test_rates_are_measured_once_and_again_with_no_cache(offload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    measured = doctor.cached_hardware

    def cached(*arguments: Any, **options: Any) -> Any:
        asked.append(options["measure_again"])
        return measured(*arguments, **options)

    monkeypatch.setattr(doctor, "cached_hardware", cached)
    first, second = (json.loads(run("--offload", offload, "--json").stdout)["hardware"] for _ in range(2))
    run("--offload", offload, "--no-cache")
    assert asked == [False, False, True]
    assert first["device"]["flops_per_s"] == second["device"]["flops_per_s"]


def test_the_profile_is_written_for_plans(offload: str, tmp_path: Path) -> None:
    result = run("--offload", offload, "--output", str(tmp_path / "machine.yaml"))
    assert result.exit_code == 0, result.stderr
    assert read_hardware(tmp_path / "machine.yaml").ssd[0].path == str(tmp_path / "store")


def test_an_unusable_path_is_one_check(offload: str, tmp_path: Path) -> None:
    Path(offload).write_text("ssd: /proc/nowhere\n")
    found = json.loads(run("--offload", offload, "--json").stdout)
    assert found["hardware"] is None
    bad = [check["name"] for check in found["checks"] if check["verdict"] == "bad"]
    assert bad == ["access", "measured rates"]
    result = run("--offload", offload, "--output", str(tmp_path / "machine.yaml"))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: nothing was written to")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--offload", "nope"], "'nope' is neither"),
        (["--offload", "bad.yaml"], "did you mean 'cpu_memory'?"),
        (["--no-measure", "--output", "x.yaml"], "remove --no-measure"),
    ],
)
def test_refusals_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    (tmp_path / "bad.yaml").write_text("cpu_memori: 1GiB\n")
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_auto_paths_are_in_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    subjects = {check.subject for check in examine("lohan", measure=False)[0]}
    assert subjects == {"", str(tmp_path / "_lohan" / "store")}
    assert list(tmp_path.iterdir()) == []


def test_words_fit_into_cells_in_80_columns() -> None:
    advice = "use a GPU; if the machine has one, install its driver"
    value = "2.1 GB/s to it, 2.55 GB/s from it"
    console = Console(width=80, record=True, file=StringIO())
    print_tables([Check("reads and writes mixed", value, Verdict.COULD_BE_BETTER, advice)], console)
    lines = [line.strip() for line in console.export_text().splitlines()]
    assert f"reads and writes mixed   could be better   {value}" in lines
    assert sum(line in f"{advice} " and len(line) > 8 for line in lines) == 2, "the advice needs two lines"


def test_brackets_in_paths_are_printed() -> None:
    checks = (Check("[bold]name", "[/red]", Verdict.BAD, "[x]", "/mnt/[1]"),)
    console = Console(width=100, record=True, file=StringIO())
    print_tables(checks, console)
    printed = console.export_text()
    for words in ("[bold]name", "[/red]", "[x]", "/mnt/[1]", "1 checks: 1 bad"):
        assert words in printed
