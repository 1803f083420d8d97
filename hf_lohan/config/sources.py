"""Where settings come from: a dict, or a YAML file that holds one."""

from __future__ import annotations

import os
from collections.abc import Mapping

import yaml

from hf_lohan.config.errors import ConfigError

ALL_AUTO = "lohan"
"""The word for offloading with every setting at its default, and the key to nest settings under."""


def read_file(path: str) -> Mapping[object, object]:
    """The settings in a YAML file. Raises ConfigError where there is no such file or no settings in it."""
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(
            f"cannot read the offload config {path!r}: {error.strerror}; give the path of a YAML file"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"the offload config {path!r} is not YAML: {problem}") from None
    return unnest({} if content is None else content, where=f"{path}: ")


def unnest(content: object, *, where: str = "") -> Mapping[object, object]:
    """The settings in ``content``: at top level or all under the one key "lohan". Raises ConfigError."""
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"{where}{content!r} is not a table of settings; write 'key: value', e.g. 'cpu_memory: 32GiB'"
        )
    if ALL_AUTO not in content:
        return content
    if len(content) > 1:
        others = ", ".join(repr(key) for key in content if key != ALL_AUTO)
        raise ConfigError(f"{where}{others} beside the key {ALL_AUTO!r}; put every setting under {ALL_AUTO!r}, or none")
    inner = content[ALL_AUTO]
    return unnest({} if inner is None else inner, where=where)


def file_named(value: str | os.PathLike[str]) -> str:
    """The config file that ``value`` names. Raises ConfigError for a word that names none."""
    path = os.path.expanduser(os.fspath(value))
    if isinstance(value, os.PathLike) or path.endswith((".yaml", ".yml")) or os.path.isfile(path):
        return path
    raise ConfigError(f"offload={value!r} is neither {ALL_AUTO!r} (everything automatic) nor an existing YAML file")
