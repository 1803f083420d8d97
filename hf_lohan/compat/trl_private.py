"""The private API of TRL that offloading needs: how its trainers make models and default arguments. The modules of TRL
are found through the trainer's class and not imported."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch

from hf_lohan.compat.patches import replaced

MAKES_MODELS = "create_model_from_path"
"""TRL's function that takes a path, a model class or None, and keywords for `from_pretrained`."""
ADDS_ADAPTERS = "get_peft_model"
"""TRL's function that takes a model and the config of its adapters."""
STEP_FACTS = ("_total_train_tokens", "_step", "entropy_coef", "_last_world_entropy")
"""Attributes of TRL's trainers with state between steps, which a checkpoint does not have."""


def _modules_that_make_models(trainer_class: type) -> list[ModuleType]:
    names = dict.fromkeys(base.__module__ for base in trainer_class.__mro__)
    modules = [sys.modules[name] for name in names if name.partition(".")[0] == "trl"]
    return [module for module in modules if hasattr(module, MAKES_MODELS)]


def makes_models(trainer_class: type) -> bool:
    """Return whether ``trainer_class`` is TRL's and makes its models from paths."""
    return bool(_modules_that_make_models(trainer_class))


def is_supervised(trainer_class: type) -> bool:
    """Return whether ``trainer_class`` is TRL's trainer for supervised fine-tuning."""
    return any(base.__name__ == "SFTTrainer" for base in trainer_class.__mro__)


def has_fused_head(trainer_class: type) -> bool:
    """Return whether the trainer's loss passes the head's weight to a function of TRL."""
    return any(hasattr(module, "add_fused_lm_head") for module in _modules_that_make_models(trainer_class))


@contextlib.contextmanager
def models_made_by(trainer_class: type, make: Callable[..., Any], adapt: Callable[..., Any]) -> Iterator[None]:
    """Have a TRL trainer call `make` to make its models and `adapt` to add adapters. The first argument of both is
    TRL's function, followed by its arguments."""
    with contextlib.ExitStack() as stack:
        for module in _modules_that_make_models(trainer_class):
            ours = {MAKES_MODELS: make, ADDS_ADAPTERS: adapt}
            by_stock = {name: partial(own, getattr(module, name)) for name, own in ours.items()}
            stack.enter_context(replaced(module, **by_stock))
        yield


def default_arguments(trainer_class: type, model: Any) -> Any:
    """Return the arguments that a TRL trainer uses by default, or None for other trainers."""
    for base in trainer_class.__mro__:
        if base.__module__.partition(".")[0] == "trl" and base.__name__.endswith("Trainer"):
            config_class = getattr(sys.modules[base.__module__], f"{base.__name__.removesuffix('Trainer')}Config", None)
            if config_class is not None:
                name = model if isinstance(model, str) else model.config.name_or_path
                return config_class(f"{name.rpartition('/')[-1]}-{base._name}")  # type: ignore[attr-defined]
    return None


def generations(trainer: Any) -> Any:
    """Return GRPO's unused generations, one batch for each micro-batch, or None if the next step generates."""
    args = trainer.args
    if getattr(trainer, "_buffered_inputs", None) is None:
        return None
    is_used_up = trainer._step % (args.steps_per_generation * trainer.num_iterations) == 0
    return None if is_used_up else trainer._buffered_inputs


def restore_generations(trainer: Any, batches: Any) -> None:
    trainer._buffered_inputs = batches


def step_number(trainer: Any) -> int:
    """Return the number of GRPO's next micro-batch, or 0 for other trainers."""
    return int(getattr(trainer, "_step", 0))


def trained_on(trainer: Any, inputs: Any, number: int) -> Any:
    """Return the batch that the micro-batch ``number`` (`step_number`) trains on: GRPO's generations, or ``inputs``."""
    batches = getattr(trainer, "_buffered_inputs", None)
    if batches is None:
        return inputs
    batch = batches[number % len(batches)]
    return {"input_ids": torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)}


def step_facts(trainer: Any) -> dict[str, Any]:
    """Return the state for `restore_step_facts` in JSON's types, which is empty for trainers that are not TRL's."""
    if not makes_models(type(trainer)):
        return {}
    counted = {name: getattr(trainer, name) for name in STEP_FACTS if hasattr(trainer, name)}
    return {"counted": counted, "metrics": trainer._metrics["train"]}


def restore_step_facts(trainer: Any, facts: dict[str, Any]) -> None:
    """Restore a trainer's counts, and its metrics until the next log."""
    for name, value in facts["counted"].items():
        setattr(trainer, name, value)
    for name, values in facts["metrics"].items():
        trainer._metrics["train"][name].extend(values)
