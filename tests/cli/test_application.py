"""The `lohan` command prints its settings, refuses bad input in one line and imports little."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from python_runs import run_python
from typer.testing import CliRunner

import hf_lohan
from hf_lohan.cli import app, application
from hf_lohan.config import OffloadConfig
from hf_lohan.testing.models import tiny_config
from hf_lohan.threads import usable_cpus

runner = CliRunner()


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"lohan {hf_lohan.__version__}\n"


def test_help_names_the_commands() -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "launch" in result.stdout
    assert "config" in result.stdout
    assert "..." not in result.stdout.split("Commands:")[1], "no sentence is cut"
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_config_prints_the_settings_of_this_machine() -> None:
    result = runner.invoke(app, ["config"])
    assert result.exit_code == 0
    settings = yaml.safe_load(result.stdout)
    assert settings["ssd"] == "auto", "its folder is in a run's output directory"
    assert "output directory" in result.stdout
    assert settings["cpu_threads"] == usable_cpus()
    resolved = OffloadConfig.load({**settings, "ssd": "somewhere"})
    assert "auto" not in (resolved.gpu_memory, resolved.cpu_memory, resolved.prefetch_blocks)


def test_config_keeps_settings_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"cpu_memory: 1GiB\nssd: {{path: {tmp_path}, capacity: 2GiB}}\n")
    result = runner.invoke(app, ["config", "--offload", str(path), "--json"])
    assert result.exit_code == 0
    settings = json.loads(result.stdout)
    assert settings["cpu_memory"] == 2**30
    assert settings["ssd"] == [{"path": str(tmp_path), "capacity": 2**31}]
    assert OffloadConfig.load(settings).gpu_memory == settings["gpu_memory"] != "auto"


def test_the_printed_yaml_is_a_config_file(tmp_path: Path) -> None:
    path = tmp_path / "resolved.yaml"
    path.write_text(runner.invoke(app, ["config"]).stdout)
    again = runner.invoke(app, ["config", "--offload", str(path)])
    assert again.stdout == path.read_text()


FLAGS = ["--model", "models/a b", "--card", "RTX 4090", "--ram", "64GiB", "--drives", "/mnt/a=1.5TB,/mnt/b"]


def test_four_answers_give_a_config_and_its_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["config", "--ask", *FLAGS])
    assert result.exit_code == 0, result.stderr
    settings = yaml.safe_load(Path("lohan.yaml").read_text())
    assert settings == {
        "gpu_memory": "19.1GiB",
        "cpu_memory": "54.3GiB",
        "ssd": [{"path": "/mnt/a", "capacity": "1.5TB"}, {"path": "/mnt/b"}],
    }
    OffloadConfig.load("lohan.yaml")
    *_, wear, estimate, launch = result.stdout.splitlines()
    assert wear == "wear: not known, because models/a b cannot be planned here"
    assert estimate == "lohan estimate 'models/a b' --offload lohan.yaml"
    assert launch.startswith("lohan launch --offload lohan.yaml -m trl.cli.main sft --model_name_or_path 'models/a b' ")
    again = runner.invoke(app, ["config", "--ask", *FLAGS])
    assert (again.exit_code, again.stderr) == (
        2,
        "error: 'lohan.yaml' exists already; give another file with --output\n",
    )


def test_a_machine_without_a_card_computes_in_its_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner.invoke(app, ["config", "--ask", *FLAGS, "--card", "none"])
    assert yaml.safe_load(Path("lohan.yaml").read_text())["cpu_memory"] == "38.3GiB"


def test_the_wear_is_said_of_a_model_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_config("llama").save_pretrained(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["config", "--ask", *FLAGS, "--model", "tiny"])
    assert re.search(r"^wear: 1,000 steps write [\d.]+ [MG]B to the SSDs; with ", result.stdout, re.MULTILINE)
    assert not Path("/mnt/a").exists(), "nothing is measured"


def test_a_question_is_repeated_until_it_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(application, "_has_terminal", lambda: True)
    result = runner.invoke(app, ["config", "--ask", "--output", "mine.yaml"], input="models/a\nA1\nA100\n64\nauto\n\n")
    assert result.exit_code == 0, result.stderr
    assert "the card 'A1' is not known" in result.stdout and "the RAM '64' is not a size" in result.stdout
    assert OffloadConfig.load("mine.yaml") == OffloadConfig(gpu_memory="32GiB")  # of the A100 with 40 GiB


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ["config", "--ask", "--model", "m", "--ram", "auto"],
            "there is no terminal for the questions; also give --card, --drives",
        ),
        (["config", *FLAGS, "--card", "banana"], "the card 'banana' is not known; give its memory, such as 24GB"),
        (["config", *FLAGS, "--drives", "/mnt/a=lots"], "'lots'"),
        (["config", "--offload", "nope"], "'nope' is neither"),
        (["config", "--offload", "bad.yaml"], "did you mean 'cpu_memory'?"),
        (["launch", "--offload", "bad.yaml", "script.py"], "did you mean 'cpu_memory'?"),
        (["launch", "missing.py", "--offload", "nope"], "no script 'missing.py'"),
        (["launch", "--config_file", "bad.yaml", "script.py"], "distributed_type"),
    ],
)
def test_refusals_are_one_line_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], message: str
) -> None:
    (tmp_path / "script.py").touch()
    (tmp_path / "bad.yaml").write_text("cpu_memori: 1GiB\n")
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, command)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_launch_passes_all_arguments_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    import hf_lohan.huggingface.launch as launching

    received: list[list[str]] = []

    def launch(arguments: list[str]) -> int:
        received.append(list(arguments))
        return 3

    monkeypatch.setattr(launching, "launch_script", launch)
    command = ["--num_processes", "1", "-m", "--offload=x.yaml", "train", "--help", "-q", "--version", "a b"]
    result = runner.invoke(app, ["launch", *command])
    assert received == [command]
    assert result.exit_code == 3


def test_launch_help_shows_accelerates_options() -> None:
    result = runner.invoke(app, ["launch", "--help"])
    assert result.exit_code == 0
    assert "lohan launch [--offload X]" in result.stdout
    assert "--num_processes" in result.stdout


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("hf_lohan.cli", {"torch", "transformers", "accelerate", "yaml"}),
        ("hf_lohan.huggingface.launch", {"transformers", "peft", "datasets", "torch._dynamo", "hf_lohan.engine"}),
    ],
)
def test_importing_the_command_is_light(module: str, heavy: set[str]) -> None:
    code = f"import sys, {module}; print({heavy} & set(sys.modules))"
    assert run_python("-c", code).stdout == "set()\n"


def test_it_runs_as_a_module() -> None:
    assert run_python("-m", "hf_lohan.cli", "--version").stdout == f"lohan {hf_lohan.__version__}\n"
