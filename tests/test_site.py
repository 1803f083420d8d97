"""The site of the documents builds, its quotes are current, and its commands can be parsed."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from hf_lohan.cli import app

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
COMMAND = re.compile(r"^(?:\$ )?((?:lohan|accelerate launch|python|bash) [^\n]*)$", flags=re.MULTILINE)


def module(path: Path) -> ModuleType:
    """Import a script once, because other tests pickle its classes."""
    if path.stem in sys.modules:
        return sys.modules[path.stem]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = found
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def from_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for folder in (".", "benchmarks", "development"):
        monkeypatch.syspath_prepend(str(ROOT / "scripts" / folder))


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=True))
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 12
    loaded = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:)?//')
    assert [page.name for page in pages if loaded.search(page.read_text(encoding="utf-8"))] == []


def test_the_settings_page_is_renewed(from_root: None) -> None:
    renewed = module(ROOT / "scripts" / "development" / "renew_docs.py").settings_page()
    assert (DOCS / "settings.md").read_text(encoding="utf-8") == renewed, "run scripts/development/renew_docs.py"


def test_the_table_of_benchmarks_is_renewed(from_root: None) -> None:
    renewal = module(ROOT / "scripts" / "development" / "renew_benchmarks.py")
    page = (DOCS / "benchmarks" / "README.md").read_text(encoding="utf-8")
    table = page.split(renewal.BEGIN)[1].split(renewal.END)[0]
    assert table == renewal.table(), "run scripts/development/renew_benchmarks.py --table-only"
    assert len([line for line in table.splitlines() if line.startswith("|")]) == 2 + 16


@pytest.mark.slow
def test_quoted_plans_and_the_readme_table_are_renewed(from_root: None) -> None:
    renewal = module(ROOT / "scripts" / "development" / "renew_docs.py")
    quoted = [one for document in DOCUMENTS for one in renewal.quoted_plans(document.read_text(encoding="utf-8"))]
    assert len(quoted) >= 6
    for command, expected in quoted:
        assert renewal.answer(command) == expected, f"{command}: run scripts/development/renew_docs.py"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert renewal.with_table(readme) == readme, "README's table: run scripts/development/renew_docs.py"


# Error messages.


@cache
def sentences() -> tuple[str, ...]:
    """Return all strings of the code, with a mark for each inserted value."""
    found = []
    for path in (ROOT / "hf_lohan").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def is_said(quoted: str) -> bool:
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in quoted.split("…")), flags=re.DOTALL)
    return any(pattern.search(sentence) for sentence in sentences())


def quoted_errors() -> list[str]:
    return re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_every_explained_error_exists() -> None:
    assert len(quoted_errors()) > 20
    assert [quoted for quoted in quoted_errors() if not is_said(quoted)] == []
    assert not is_said("this is expected … nowhere")


# Commands.


def plain_blocks(text: str) -> list[str]:
    """Return the code blocks without a language."""
    fences = re.split(r"^```(\w*)\n", text, flags=re.MULTILINE)
    return [inside for opened, inside in zip(fences[1::4], fences[2::4], strict=True) if not opened]


def commands() -> list[str]:
    """Return the commands of all code blocks, with joined lines and without comments."""
    found: dict[str, None] = {}
    for document in DOCUMENTS:
        for block in plain_blocks(document.read_text(encoding="utf-8") + "\n"):
            joined = re.sub(r"\\\n\s*", "", block)
            found |= dict.fromkeys(re.sub(r"\s+#.*", "", match[1]) for match in COMMAND.finditer(joined))
    return list(found)


def parse_ours(words: list[str]) -> None:
    """Parse `lohan ...` without running it."""
    group: Any = typer.main.get_command(app)
    if words[0] == "--version":
        return
    command = group.commands[words[0]]
    if words[0] != "launch":
        command.make_context(words[0], words[1:])
        return
    from hf_lohan.huggingface.launch import _parser

    options, script = _parser().parse_known_args(words[1:])
    assert options.training_script and not [word for word in script if word in ("--offload", "--trace")]


def parse_script(script: str, words: list[str]) -> None:
    path = ROOT / script
    if script == "any_script.py":
        return
    assert path.is_file(), f"{script} does not exist"
    if path.name == "sft.py":
        trl = pytest.importorskip("trl")
        parser: Any = trl.TrlParser((module(path).RunArguments, module(path).SFTArguments, trl.ModelConfig))
    elif path.name.startswith("finetune_"):
        from transformers import HfArgumentParser, TrainingArguments

        arguments = module(ROOT / "scripts" / "finetune_arguments.py")
        parser = HfArgumentParser((arguments.ModelArguments, arguments.DataArguments, TrainingArguments))
    else:  # these scripts have few options, so it is enough that each option's name occurs in the source
        flags = {word.split("=")[0] for word in words if word.startswith("--")}
        text = path.read_text(encoding="utf-8") + (ROOT / "scripts/benchmarks/benchmarking.py").read_text(
            encoding="utf-8"
        )
        assert all(flag.lstrip("-").replace("-", "_") in text or flag in text for flag in flags), flags
        return
    known = {option for action in parser._actions for option in action.option_strings}
    assert {word.split("=")[0] for word in words if word.startswith("--")} <= known


def test_every_command_can_be_parsed(from_root: None) -> None:
    assert len(commands()) > 15
    for command in commands():
        program, *words = shlex.split(command)
        if program == "lohan":
            parse_ours(words)
            continue
        if program == "accelerate":
            from accelerate.commands.launch import launch_command_parser

            options = launch_command_parser().parse_args(words[1:])
            parse_script(options.training_script, options.training_script_args)
        elif program == "bash":
            assert (ROOT / words[0]).is_file(), command
        elif words[0].endswith(".py") and "<" not in words[0]:
            parse_script(words[0], words[1:])


def test_files_that_commands_name_exist() -> None:
    named = {word for command in commands() for word in shlex.split(command) if re.match(r"(configs|scripts)/", word)}
    assert named and not [name for name in named if not (ROOT / name).exists()]
