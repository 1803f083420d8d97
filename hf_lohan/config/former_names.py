"""Former names of settings, and their replacements."""

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
"""Maps each former name to the present name. A setting whose present name begins with "_" is no longer public."""
_DECIDED = {
    "schedule": "a run always reads a chunk before it writes the previous one",
    "clip": "a run measures both ways to wait for the norm and uses the faster one",
    "solver": "a run uses Algorithm 1, and `lohan plan` simulates the plans of the others",
    "resident_records": "a run copies as many records to RAM as cpu_memory has room for",
    "io_threads": "a run has one thread for each CPU, at least 2 and at most 8",
    "io_piece_bytes": "a run reads and writes 8 MiB at a time",
}
"""For each setting that is no longer public: the choice that a run makes by itself."""


_IN_ALL_RECORDS = {"schedule", "io_threads", "io_piece_bytes", "prefetch_blocks"}
"""Settings that every earlier version wrote when it saved a run's config."""


def refuse_former_names(settings: Mapping[Any, object]) -> None:
    """Raise ConfigError if settings have former names. The error gives the replacement of each."""
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
    """Return settings with present names if an earlier version recorded them. Return other settings unchanged."""
    if not settings.keys() >= _IN_ALL_RECORDS:
        return settings
    return {_NOW.get(name, name): value for name, value in settings.items()}
