"""The contents of the wheel, found by setuptools with the settings of `pyproject.toml`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]


def test_the_wheel_has_every_room_but_the_test_doubles() -> None:
    setuptools_pyproject = pytest.importorskip("setuptools.config.pyprojecttoml")
    settings = setuptools_pyproject.read_configuration(PROJECT / "pyproject.toml")
    shipped = set(settings["tool"]["setuptools"]["packages"])
    rooms = {".".join(path.parent.relative_to(PROJECT).parts) for path in (PROJECT / "hf_lohan").rglob("__init__.py")}
    assert rooms - shipped == {"hf_lohan.testing"}
    assert not [package for package in shipped if not package.startswith("hf_lohan")]


def test_nothing_in_the_wheel_imports_the_test_doubles() -> None:
    shipped = [path for path in (PROJECT / "hf_lohan").rglob("*.py") if "testing" not in path.parts]
    assert len(shipped) > 100
    assert not [path for path in shipped if "hf_lohan.testing" in path.read_text()]


def test_the_wheel_installs_and_imports_from_a_clean_folder(tmp_path: Path) -> None:
    pytest.importorskip("pip")
    source, wheels, site = (tmp_path / name for name in ("source", "wheels", "site"))
    shutil.copytree(PROJECT / "hf_lohan", source / "hf_lohan", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    settings = ["--no-deps", "--no-index"]
    subprocess.run([*pip, "wheel", *settings, "--no-build-isolation", "-w", wheels, source], check=True)
    (wheel,) = wheels.iterdir()
    subprocess.run([*pip, "install", *settings, "--no-compile", "--target", site, wheel], check=True)
    code = "import hf_lohan; from hf_lohan.cli import app; print(hf_lohan.__file__); app(['--version'])"
    printed = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    version = re.search(r'^version = "(.+)"$', (PROJECT / "pyproject.toml").read_text(), re.M)[1]
    assert printed.stdout.splitlines() == [str(site / "hf_lohan" / "__init__.py"), f"lohan {version}"], printed.stderr
    assert (site / "hf_lohan" / "report" / "page.html").is_file()
    assert f"\nversion: {version}\n" in (PROJECT / "CITATION.cff").read_text()


def test_the_image_installs_a_torch_that_the_package_takes() -> None:
    """Otherwise pip would replace it by another build, from another index."""
    (needed,) = re.findall(r'^    "(torch>=.+)",$', (PROJECT / "pyproject.toml").read_text(), re.M)
    dockerfile = (PROJECT / "Dockerfile").read_text()
    assert f' "{needed}"\n' in dockerfile
    copied = re.findall(r"^COPY (.+) \S+$", dockerfile, re.M)
    in_context = {line[1:] for line in (PROJECT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {name for names in copied for name in names.split()} == in_context
    assert all((PROJECT / name).exists() for name in in_context)
