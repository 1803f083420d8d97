"""Names that settings had in earlier versions, and what has replaced them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hf_lohan.config.values import ConfigError

_NOW = {
    "expert_parallel": "experts.parallel",
    "balance_experts": "experts.balance",
    "lazy_experts": "experts.lazy",
    "expert_cache": "experts.cache",
    "chunked_loss": "chunks.loss",
    "chunked_layers": "chunks.layers",
    "sequence_ranks": "ranks.per_row",
    "collectives": "ranks.collectives",
    "transport": "ranks.transport",
    "net_timeout": "ranks.timeout",
    "schedule": "_schedule",
    "clip": "_clip",
    "solver": "_solver",
    "resident_records": "_resident_records",
    "io_threads": "_io_threads",
    "io_piece_bytes": "_io_piece_bytes",
}
"""Former names by the present ones. The setting of a name that begins with "_" is not public any more."""
_DECIDED = {
    "schedule": "a run always reads a chunk before it writes the previous one",
    "clip": "a run measures both ways to wait for the norm and uses the faster one",
    "solver": "a run uses Algorithm 1, and `lohan plan` simulates the plans of the others",
    "resident_records": "a run copies as many records to RAM as cpu_memory has room for",
    "io_threads": "a run has one thread for each CPU, at least 2 and at most 8",
    "io_piece_bytes": "a run reads and writes 8 MiB at a time",
}
"""What a run does by itself in place of a setting that is not public any more."""


_IN_ALL_RECORDS = {"schedule", "io_threads", "io_piece_bytes", "prefetch_blocks"}
"""Settings that all earlier versions have recorded."""


def refuse_former_names(settings: Mapping[Any, object]) -> None:
    """Raise ConfigError, with what has replaced them, for settings whose names are former ones."""
    told = []
    for name in settings:
        if name in _DECIDED:
            told.append(f"the offload setting {name!r} was removed, because {_DECIDED[name]}; leave it out")
        elif name in _NOW:
            value = json.dumps(settings[name], default=str)
            told.append(f"the offload setting {name!r} is now {_NOW[name]!r}; write {_NOW[name]}: {value}")
    if told:
        raise ConfigError(". And ".join(told))


def with_present_names(settings: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return settings that an earlier version has recorded under their present names, and others as they are."""
    if not settings.keys() >= _IN_ALL_RECORDS:
        return settings
    return {_NOW.get(name, name): value for name, value in settings.items()}
