"""hf_lohan: fine-tune Hugging Face models whose training state does not fit in memory. The state is on SSDs.

The names below are loaded when they are first used: importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_lohan.absent import gathered_parameters as gathered_parameters
    from hf_lohan.checkpoint.resume_point import last_step as last_step
    from hf_lohan.config import ConfigError as ConfigError
    from hf_lohan.config import OffloadConfig as OffloadConfig
    from hf_lohan.huggingface.accelerator import Accelerator as Accelerator
    from hf_lohan.huggingface.accelerator import LohanPlugin as LohanPlugin
    from hf_lohan.huggingface.arguments import LohanArguments as LohanArguments
    from hf_lohan.huggingface.arguments import TrainingArguments as TrainingArguments
    from hf_lohan.huggingface.attachment import from_pretrained as from_pretrained
    from hf_lohan.huggingface.generate.generation import load_for_generation as load_for_generation
    from hf_lohan.huggingface.models.merging import merge as merge
    from hf_lohan.huggingface.offloaded_model import engine_of as engine_of
    from hf_lohan.huggingface.trainer import OffloadTrainerMixin as OffloadTrainerMixin
    from hf_lohan.huggingface.trainer import Trainer as Trainer
    from hf_lohan.optim import OffloadAdamW as OffloadAdamW

try:
    __version__ = metadata.version("hf-lohan")
except metadata.PackageNotFoundError:  # a clone that is on the path, and was not installed
    __version__ = "0+unknown"

_HOMES = {
    "Accelerator": "huggingface.accelerator",
    "ConfigError": "config",
    "LohanArguments": "huggingface.arguments",
    "LohanPlugin": "huggingface.accelerator",
    "OffloadAdamW": "optim",
    "OffloadConfig": "config",
    "OffloadTrainerMixin": "huggingface.trainer",
    "Trainer": "huggingface.trainer",
    "TrainingArguments": "huggingface.arguments",
    "engine_of": "huggingface.offloaded_model",
    "from_pretrained": "huggingface.attachment",
    "gathered_parameters": "absent",
    "last_step": "checkpoint.resume_point",
    "load_for_generation": "huggingface.generate.generation",
    "merge": "huggingface.models.merging",
}
"""The module that has each name."""
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
