"""The private API of accelerate that offloading needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.commands.config.config_args import default_config_file as default_config_file
from accelerate.commands.config.config_args import load_config_from_file as load_config_from_file
from accelerate.commands.launch import launch_command as launch_command
from accelerate.commands.launch import launch_command_parser as launch_command_parser
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils.other import has_repeated_blocks, is_repeated_blocks
from torch import nn


def prepared_models(accelerator: Accelerator) -> list[Any]:
    """Return the models that `prepare` has processed."""
    models: list[Any] = accelerator._models
    return models


def mark_prepared(model: Any) -> None:
    """Have `prepare_model` skip the model, because `.to(device)`, autocast and DDP break a streamed model."""
    model._is_accelerate_prepared = True


def is_prepared(model: Any) -> bool:
    return bool(getattr(model, "_is_accelerate_prepared", False))


def become(instance: Accelerator | AcceleratedOptimizer, derived: type) -> None:
    """Change an object's class to a derived class that only adds methods."""
    instance.__class__ = derived


def compiled_regions(model: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the modules that accelerate's regional compilation compiles separately."""
    for child in model.children():
        if is_repeated_blocks(child):
            yield from child.children()
        elif has_repeated_blocks(child):
            yield from compiled_regions(child)
        else:
            yield child
