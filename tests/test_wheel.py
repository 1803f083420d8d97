"""What the wheel contains, by setuptools' own discovery with the settings of `pyproject.toml`."""

from __future__ import annotations

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
