"""hf_lohan: fine-tune Hugging Face models whose training state does not fit in memory. The state is on SSDs.

The names below are loaded when they are first used: importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_lohan.absent import gathered_parameters
    from hf_lohan.config import ConfigError, OffloadConfig
    from hf_lohan.huggingface import (
        Accelerator,
        LohanArguments,
        LohanPlugin,
        OffloadTrainerMixin,
        Trainer,
        TrainingArguments,
        engine_of,
        from_pretrained,
        last_step,
        load_for_generation,
        merge,
    )
    from hf_lohan.optim import OffloadAdamW

try:
    __version__ = metadata.version("hf-lohan")
except metadata.PackageNotFoundError:  # a clone that is on the path, and was not installed
    __version__ = "0+unknown"

__all__ = [
    "Accelerator",
    "ConfigError",
    "LohanArguments",
    "LohanPlugin",
    "OffloadAdamW",
    "OffloadConfig",
    "OffloadTrainerMixin",
    "Trainer",
    "TrainingArguments",
    "engine_of",
    "from_pretrained",
    "gathered_parameters",
    "last_step",
    "load_for_generation",
    "merge",
]
_HOMES = {"ConfigError": "config", "OffloadAdamW": "optim", "OffloadConfig": "config", "gathered_parameters": "absent"}
"""The rooms that have these names. `huggingface` has all others."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'huggingface')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
