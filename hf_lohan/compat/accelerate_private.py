"""What accelerate offers nobody, and offloading needs."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.commands.config.config_args import default_config_file as default_config_file
from accelerate.commands.config.config_args import load_config_from_file as load_config_from_file
from accelerate.commands.launch import launch_command as launch_command
from accelerate.commands.launch import launch_command_parser as launch_command_parser
from accelerate.optimizer import AcceleratedOptimizer


def prepared_models(accelerator: Accelerator) -> list[Any]:
    """The models that went through `prepare`."""
    models: list[Any] = accelerator._models
    return models


def mark_prepared(model: Any) -> None:
    """Let `prepare_model` leave it alone: no `.to(device)`, no autocast, no DDP, none of which a streamed model
    survives."""
    model._is_accelerate_prepared = True


def is_prepared(model: Any) -> bool:
    """Whether an `Accelerator` has it."""
    return bool(getattr(model, "_is_accelerate_prepared", False))


def become(instance: Accelerator | AcceleratedOptimizer, derived: type) -> None:
    """Make what accelerate or Trainer has made one of a class derived from its own that adds methods alone."""
    instance.__class__ = derived
