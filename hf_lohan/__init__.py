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

_HOMES = {
    "Accelerator": "hf_lohan.huggingface",
    "ConfigError": "hf_lohan.config",
    "LohanArguments": "hf_lohan.huggingface",
    "LohanPlugin": "hf_lohan.huggingface",
    "OffloadAdamW": "hf_lohan.optim",
    "OffloadConfig": "hf_lohan.config",
    "OffloadTrainerMixin": "hf_lohan.huggingface",
    "Trainer": "hf_lohan.huggingface",
    "TrainingArguments": "hf_lohan.huggingface",
    "engine_of": "hf_lohan.huggingface",
    "from_pretrained": "hf_lohan.huggingface",
    "gathered_parameters": "hf_lohan.absent",
    "last_step": "hf_lohan.huggingface",
    "load_for_generation": "hf_lohan.huggingface",
    "merge": "hf_lohan.huggingface",
}

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
