"""The files, links and floors that the documents name exist."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_lohan"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
TOPS = {path.name for path in ROOT.iterdir() if path.is_dir()} | {path.name for path in PACKAGE.iterdir()}
OF_A_RUN = re.compile(r"^(store/(model|lohan|manifest|records|log)|lohan/|checkpoint-)")
"""Files of a run, whose folders have the names of rooms."""
OF_OTHERS = "transformers/tests/trainer/test_trainer.py"
WRITTEN_BY_USERS = {
    "train.py",
    "script.py",
    "your_script.py",
    "any_script.py",
    "llama.cpp/convert_hf_to_gguf.py",
    OF_OTHERS,
}
NAMED = re.compile(r"^[\w.{},*-]+(/[\w.{},*-]+)*/?$")
ANCHOR = re.compile(r"[^\w\- ]")


def words(document: Path) -> Iterator[str]:
    """Yield the words in backticks and in code blocks."""
    text = document.read_text(encoding="utf-8")
    blocks = re.findall(r"^```.*?^```", text, flags=re.DOTALL | re.MULTILINE)
    for block in blocks:
        text = text.replace(block, "")
        yield from block.split()
    for quoted in re.findall(r"`([^`\n]+)`", text):
        yield from quoted.split()


def expanded(name: str) -> list[str]:
    """Expand braces: "a/{b,c}.py" gives "a/b.py" and "a/c.py"."""
    match = re.search(r"\{([^{}]*)\}", name)
    if match is None:
        return [name]
    return [one for part in match[1].split(",") for one in expanded(name.replace(match[0], part, 1))]


def is_file_of_ours(name: str) -> bool:
    if not NAMED.match(name) or OF_A_RUN.match(name) or name in WRITTEN_BY_USERS:
        return False
    first, slash, _ = name.partition("/")
    return (bool(slash) and first in TOPS) or name.endswith((".py", ".sh"))


def exists(name: str) -> bool:
    """Return whether `name` is a path within the project or package, a file name, or a name in a module such as
    `files/reflink.clone_range`."""
    name = name.rstrip("/")
    module, _, inside = name.rpartition(".")
    for base in (ROOT, PACKAGE):
        if any(True for one in (name, f"{name}.py") for _ in base.glob(one)):
            return True
        if "/" in module and (base / f"{module}.py").is_file():
            return inside in (base / f"{module}.py").read_text(encoding="utf-8")
    return "/" not in name and name in all_names()


@cache
def all_names() -> set[str]:
    folders = (ROOT / name for name in ("hf_lohan", "scripts", "tests", "configs", "docs"))
    return {path.name for folder in folders for path in folder.rglob("*")}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_named_file_exists(document: Path) -> None:
    named = {word.strip(".,:;()\"'") for word in words(document)}
    wrong = [name for word in sorted(filter(is_file_of_ours, named)) for name in expanded(word) if not exists(name)]
    assert not wrong, f"{document.name} names missing files: {', '.join(wrong)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_has_a_target(document: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if re.match(r"https?://|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert not wrong, f"{document.name} has broken links: {', '.join(wrong)}"


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {ANCHOR.sub("", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_one_figure_file_for_each_benchmark_and_hardware() -> None:
    names = {path.name for path in (ROOT / "docs" / "benchmarks").iterdir()} - {"README.md"}
    assert all(re.fullmatch(r"[a-z]+(_[a-z0-9]+)*\.json", name) for name in names), names
    assert not [name for name in names if re.search(r"20\d\d|later|again|newer|\.png", name)]


def test_contributing_has_the_tested_floors() -> None:
    floors = runpy.run_path(str(ROOT / "tests" / "test_house.py"))["FLOORS"]
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (-?\d+) \| ([^|]*) \|", text, flags=re.MULTILINE)
    assert {room: int(floor) for floor, rooms in rows for room in re.findall(r"`(\w+)`", rooms)} == floors


def test_the_versions_that_are_run_are_those_of_the_project() -> None:
    """`scripts/development/test.sh --versions` runs the rows. Here nothing is installed."""
    names = ("transformers", "trl", "peft", "accelerate")
    lines = (ROOT / "scripts" / "development" / "versions.txt").read_text(encoding="utf-8").splitlines()
    rows = {row: tuple(versions[:4]) for row, *versions in map(str.split, lines) if row != "#"}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for name, floor, newest in zip(names, rows["floors"], rows["newest"], strict=True):
        floors = {re.sub(r"(\.0)+$", "", of) for of in re.findall(rf'"{name}>=([\d.]+),<', project)}
        assert floors == {re.sub(r"(\.0)+$", "", floor)}, f"the floor of {name} is not the one that is run"
        assert f"\n{name}=={newest}\n" in constraints, f"the row newest has another {name} than constraints.txt"
    page = (ROOT / "docs" / "beside.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, flags=re.MULTILINE)
    assert {row: tuple(versions) for row, *versions in table} == rows


def test_scripts_name_existing_tests() -> None:
    """pytest runs nothing if one of its arguments does not exist."""
    named = {
        match
        for script in (ROOT / "scripts").rglob("*.sh")
        for match in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", script.read_text(encoding="utf-8"))
    }
    assert len(named) > 4
    texts = {file: (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else "" for file, _ in named}
    wrong = [f"{file}::{test}" for file, test in sorted(named) if f"def {test}" not in texts[file]]
    assert not wrong, f"scripts name missing tests: {', '.join(wrong)}"
