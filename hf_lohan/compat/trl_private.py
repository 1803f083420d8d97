"""What TRL offers nobody, and offloading needs: how its trainers make models and default arguments. TRL itself is not
imported here: a trainer of its comes with the modules that are looked at."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

MAKES_MODELS = "create_model_from_path"
"""What a module of TRL calls with a path, a model class or None, and keywords for `from_pretrained`."""
STEP_FACTS = ("_total_train_tokens", "_step", "entropy_coef", "_last_world_entropy")
"""What trainers of TRL count from step to step, and a checkpoint of theirs forgets."""
GENERATIONS = "_buffered_inputs"
"""What GRPO generated for steps to come."""


def _modules_that_make_models(trainer_class: type) -> list[ModuleType]:
    names = dict.fromkeys(base.__module__ for base in trainer_class.__mro__)
    modules = [sys.modules[name] for name in names if name.partition(".")[0] == "trl"]
    return [module for module in modules if hasattr(module, MAKES_MODELS)]


def makes_models(trainer_class: type) -> bool:
    """Whether it is a trainer of TRL that makes its models itself, from their paths."""
    return bool(_modules_that_make_models(trainer_class))


@contextlib.contextmanager
def models_made_by(trainer_class: type, make: Callable[..., Any]) -> Iterator[None]:
    """Within, a trainer of TRL that is being made has `make` make its models. It is given the function of TRL's that
    would have made the model, and that one's arguments."""
    stock = {module: getattr(module, MAKES_MODELS) for module in _modules_that_make_models(trainer_class)}
    try:
        for module, function in stock.items():
            setattr(module, MAKES_MODELS, partial(make, function))
        yield
    finally:
        for module, function in stock.items():
            setattr(module, MAKES_MODELS, function)


def default_arguments(trainer_class: type, model: Any) -> Any:
    """What a trainer of TRL takes where it is given no arguments; None for others."""
    for base in trainer_class.__mro__:
        if base.__module__.partition(".")[0] == "trl" and base.__name__.endswith("Trainer"):
            config_class = getattr(sys.modules[base.__module__], f"{base.__name__.removesuffix('Trainer')}Config", None)
            if config_class is not None:
                name = model if isinstance(model, str) else model.config.name_or_path
                return config_class(f"{name.rpartition('/')[-1]}-{base._name}")  # type: ignore[attr-defined]
    return None


def step_facts(trainer: Any) -> dict[str, Any]:
    """What `restore_step_facts` gives back, in JSON's types. Nothing of trainers that are not TRL's."""
    if not makes_models(type(trainer)):
        return {}
    counted = {name: getattr(trainer, name) for name in STEP_FACTS if hasattr(trainer, name)}
    return {"counted": counted, "metrics": trainer._metrics["train"]}


def restore_step_facts(trainer: Any, facts: dict[str, Any]) -> None:
    """Let a trainer go on counting, and averaging its metrics until its next log."""
    for name, value in facts["counted"].items():
        setattr(trainer, name, value)
    for name, values in facts["metrics"].items():
        trainer._metrics["train"][name].extend(values)
