"""The interface to Hugging Face: Trainer, Accelerator, loading, saving, checkpoints, launching.

Only this package and `compat` import transformers, accelerate and peft. This package overrides their public methods.
The names below are loaded when they are first used, because a launcher or a plan needs few of them.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_lohan.checkpoint.resume_point import last_step
    from hf_lohan.huggingface.accelerator import Accelerator, LohanPlugin
    from hf_lohan.huggingface.arguments import LohanArguments, TrainingArguments
    from hf_lohan.huggingface.attachment import from_pretrained, offload_model
    from hf_lohan.huggingface.generate.generation import load_for_generation
    from hf_lohan.huggingface.models.merging import merge
    from hf_lohan.huggingface.offloaded_model import engine_of
    from hf_lohan.huggingface.trainer import OffloadTrainerMixin, Trainer

if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":  # must precede the first process group
    from hf_lohan.huggingface.ranks import separate_attempts

    separate_attempts()

_HOMES = {
    "Accelerator": "hf_lohan.huggingface.accelerator",
    "LohanArguments": "hf_lohan.huggingface.arguments",
    "LohanPlugin": "hf_lohan.huggingface.accelerator",
    "OffloadTrainerMixin": "hf_lohan.huggingface.trainer",
    "Trainer": "hf_lohan.huggingface.trainer",
    "TrainingArguments": "hf_lohan.huggingface.arguments",
    "engine_of": "hf_lohan.huggingface.offloaded_model",
    "from_pretrained": "hf_lohan.huggingface.attachment",
    "last_step": "hf_lohan.checkpoint.resume_point",
    "load_for_generation": "hf_lohan.huggingface.generate.generation",
    "merge": "hf_lohan.huggingface.models.merging",
    "offload_model": "hf_lohan.huggingface.attachment",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
