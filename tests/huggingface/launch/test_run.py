"""`python -m hf_lohan.run` runs a script as if it were started directly."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_lohan import run

ECHO = """
import json, sys
import transformers
is_main = sys.modules["__main__"].__dict__ is globals()
facts = [__name__, sys.argv, sys.path[0], transformers.Trainer.__mro__[1].__module__, is_main]
print("ECHO" + json.dumps(facts))
"""
_ECHO_LINE = 'print("ECHO" + json.dumps([%s]))'


def echoed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out.partition("ECHO")[2])


def test_a_script_runs_as_if_started_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    script = tmp_path / "folder" / "echo.py"
    script.parent.mkdir()
    script.write_text(ECHO)
    (tmp_path / "link.py").symlink_to(script)
    link = str(tmp_path / "link.py")
    run.main(["--offload", "lohan", link, "--offload", "its own", "-m", "x"])
    argv = [link, "--offload", "its own", "-m", "x"]
    assert echoed(capsys) == ["__main__", argv, str(script.parent), "hf_lohan.huggingface.trainer.trainer", True]


def test_the_trace_option_overrides_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run"])
    (tmp_path / "offload.yaml").write_text("prefetch_blocks: 3\ntrace: false\n")
    script = tmp_path / "script.py"
    values = "config.trace, config.prefetch_blocks"
    script.write_text(
        f"import json, transformers\nconfig = transformers.Trainer.default_offload\n{_ECHO_LINE % values}"
    )
    for options, is_traced in ((["--trace"], True), ([], False)):
        run.main(["--offload", str(tmp_path / "offload.yaml"), *options, str(script)])
        assert echoed(capsys) == [is_traced, 3]


def test_a_module_runs_as_with_python_m(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run"])
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "echo_package").mkdir()
    (tmp_path / "echo_package" / "__init__.py").touch()
    (tmp_path / "echo_package" / "train.py").write_text(ECHO)
    run.main(["-m", "echo_package.train", "--lr", "1"])
    argv = [str(tmp_path / "echo_package" / "train.py"), "--lr", "1"]
    assert echoed(capsys) == ["__main__", argv, str(tmp_path), "hf_lohan.huggingface.trainer.trainer", True]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["--offload", "nope", "script.py"], "'nope' is neither 'lohan'"),
        (["--offload", "bad.yaml", "script.py"], "did you mean 'cpu_memory'?"),
        (["missing.py"], "there is no script 'missing.py'"),
        (["-m", "no_such_module.train"], "there is no module 'no_such_module.train'; install its package"),
        (["-m", ".train"], "there is no module '.train'"),
    ],
)
@pytest.mark.usefixtures("bad_inputs")
def test_run_refuses_in_one_line(command: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run.main(command)
    error = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert message in error
    assert error.count("\n") == 1


@pytest.fixture
def bad_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").touch()
    (tmp_path / "bad.yaml").write_text("cpu_memori: 1GiB\n")
    monkeypatch.chdir(tmp_path)
