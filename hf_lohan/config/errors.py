"""What is raised for a setting the user has to change."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A setting is misspelt or its value is not allowed; one line: what was wrong, the value, what to do."""


def refuse_unknown_keys(keys: Iterable[object], known: Iterable[str], *, what: str) -> None:
    """Raise ConfigError for the first of ``keys`` that is not in ``known``, naming the nearest known one.

    ``what`` says what kind of key it is, e.g. "offload setting".
    """
    known_keys = list(known)
    for key in keys:
        if key in known_keys:
            continue
        nearest = difflib.get_close_matches(str(key).lower(), known_keys, n=1, cutoff=0.4)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
        raise ConfigError(f"unknown {what} {key!r}{hint} Known: {', '.join(known_keys)}")
