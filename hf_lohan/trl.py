"""TRL's trainers with `offload=`: `from hf_lohan.trl import SFTTrainer` in place of `from trl import SFTTrainer`.

Loaded when they are first used. Any other trainer of TRL takes the argument from `hf_lohan.OffloadTrainerMixin`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_lohan.huggingface.trl_trainers import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer

__all__ = ["DPOTrainer", "GRPOTrainer", "KTOTrainer", "RewardTrainer", "SFTTrainer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module("hf_lohan.huggingface.trl_trainers"), name)
    except ModuleNotFoundError as error:
        if error.name != "trl":
            raise
        raise ImportError("TRL is not installed; pip install hf-lohan[trl]") from error


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
