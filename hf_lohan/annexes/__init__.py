"""Annexes: optional parts. The rest of the library is the core, which works without them.

Each package here is one annex, and its docstring states its use and its costs. An annex may import the core. The
core does not import an annex. One file of the core finds the annex by name. Without the annex, this file either uses a
default that does nothing (`find_annex`) or refuses settings that need the annex (`need_annex`). `tests/test_house.py`
checks the imports, and `tests/annexes/test_removed.py` removes the annexes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

_SETTINGS: Mapping[str, Mapping[str, object]] = {
    "embedding_rows": {"embedding": "rows"},
    "gpu_direct": {"gpu_direct": True},
    "studies": {"switches.solver": "migration"},
}
"""Maps each annex to the settings and values that need it."""


def find_annex(name: str) -> Any:
    """Return the package of an annex, or None if it is not installed."""
    package = f"{__name__}.{name}"
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        return None


def need_annex(name: str, asked: str) -> Any:
    """Return the package of an annex, or raise ValueError. ``asked``: the setting or option that needs it."""
    annex = find_annex(name)
    if annex is None:
        raise ValueError(_missing(name, asked))
    return annex


def missing_for(settings: object) -> str | None:
    """Return why ``settings`` need an annex that is not installed, or None if they need none."""
    needed = (
        _missing(annex, f"{name.replace('switches.', '_')}: {str(value).lower()}")
        for annex, values in _SETTINGS.items()
        for name, value in values.items()
        if attrgetter(name)(settings) == value and not _is_installed(annex)
    )
    return next(needed, None)


def _is_installed(name: str) -> bool:
    try:  # find the annex without importing it, because checks of settings must be fast
        return importlib.util.find_spec(f"{__name__}.{name}") is not None
    except ModuleNotFoundError:
        return False


def _missing(name: str, asked: str) -> str:
    package = f"{__name__}.{name}"
    return f"{asked} needs the package {package}, which is not installed; install hf-lohan again, or leave it out"
