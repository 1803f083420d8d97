"""Offloads unmodified scripts. Replaces Trainer and Accelerator with offloading classes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import accelerate
import yaml
from transformers import trainer as stock_module

import hf_lohan
from hf_lohan.config import OffloadConfig
from hf_lohan.files.directories import temporary_folder
from hf_lohan.huggingface.accelerator import Accelerator
from hf_lohan.huggingface.launch import launch_offloaded
from hf_lohan.huggingface.local_run import launched_with
from hf_lohan.huggingface.trainer import OffloadTrainerMixin, Trainer
from hf_lohan.huggingface.trainer.trl_models import initialize_before

logger = logging.getLogger(__name__)

_TRAINER_MODULES = ("transformers", "transformers.trainer", "hf_lohan")
_ACCELERATOR_MODULES = ("accelerate", "accelerate.accelerator", "hf_lohan")
_LAUNCHER_MODULE = "accelerate.commands.launch"


@contextlib.contextmanager
def offload_by_default(offload: Any = "lohan") -> Iterator[None]:
    """In this context, `transformers.Trainer`, `accelerate.Accelerator` and all derived classes offload with these
    settings. Scripts that accelerate's launcher starts (such as by `trl sft`) offload too. At the end, logs a warning
    if nothing was offloaded and no error was raised.

    Classes that are defined or imported in the context keep their offloading base. Other classes get their former base
    back. `offload=` of a Trainer (None is the stock Trainer) and `lohan_plugin=` of an Accelerator have precedence.
    Trainer's own accelerator does not change.

    Args: offload: anything that `OffloadConfig.load` takes. Raises ConfigError for invalid settings, before anything is
        changed.
    """
    config = OffloadConfig.load(offload)
    launcher = _OffloadingLauncher(config)
    stock = stock_module.Trainer
    offloading = _offloading_class(stock, config)
    with launched_with(config) as launch, contextlib.ExitStack() as undo:
        for name in _TRAINER_MODULES:
            _replace(undo, importlib.import_module(name), "Trainer", offloading)
        accelerator = _offloading_accelerator(config)
        for name in _ACCELERATOR_MODULES:
            _replace(undo, importlib.import_module(name), "Accelerator", accelerator)
        _replace(undo, hf_lohan, "OffloadTrainerMixin", _AlreadyMixedIn)
        _replace(undo, importlib.import_module(_LAUNCHER_MODULE), "launch_command", launcher)
        for derived in stock.__subclasses__():
            if not issubclass(derived, OffloadTrainerMixin):
                bases = tuple(offloading if base is stock else base for base in derived.__bases__)
                # A derived class may already have the mixin, in an order of bases that contradicts this one.
                with contextlib.suppress(TypeError):
                    _replace(undo, derived, "__bases__", bases)
        system_exit: SystemExit | None = None
        try:
            yield
        except SystemExit as error:  # installed programs end by calling `sys.exit(main())`
            system_exit = error
        has_succeeded = system_exit is None or system_exit.code in (None, 0)
        if has_succeeded and not launch.has_offloaded and not launcher.has_launched:
            logger.warning(
                "nothing was offloaded, because no model was trained by transformers.Trainer or prepared by "
                "accelerate.Accelerator; other training loops must use hf_lohan.Accelerator"
            )
        if system_exit is not None:
            raise system_exit


class _AlreadyMixedIn:
    """Replaces `OffloadTrainerMixin` if a base already has it, because Python cannot order a base that occurs twice."""


def _offloading_class(stock: type[Any], config: OffloadConfig) -> type[Any]:
    class OffloadingTrainer(Trainer):
        default_offload: ClassVar[OffloadConfig] = config

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            if cls.__module__.partition(".")[0] == "trl":
                initialize_before(cls)

    # Scripts inspect the arguments of `Trainer.__init__` to distinguish versions of transformers.
    functools.update_wrapper(OffloadingTrainer.__init__, stock.__init__)
    OffloadingTrainer.__name__ = OffloadingTrainer.__qualname__ = stock.__name__
    OffloadingTrainer.__doc__ = stock.__doc__
    return OffloadingTrainer


def _offloading_accelerator(config: OffloadConfig) -> type[Accelerator]:
    class OffloadingAccelerator(Accelerator):
        default_offload: ClassVar[OffloadConfig] = config

        # This class has its own `__init__`, because the signature of `Accelerator.__init__` must stay.
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    stock = accelerate.Accelerator
    functools.update_wrapper(OffloadingAccelerator.__init__, stock.__init__)
    OffloadingAccelerator.__name__ = OffloadingAccelerator.__qualname__ = stock.__name__
    OffloadingAccelerator.__doc__ = stock.__doc__
    return OffloadingAccelerator


class _OffloadingLauncher:
    """Replaces accelerate's `launch_command` for programs that start a script with it, such as `trl`."""

    def __init__(self, config: OffloadConfig) -> None:
        self._config = config
        self.has_launched = False
        """Whether a script was started. That script itself warns if nothing was offloaded."""

    def __call__(self, options: Namespace) -> None:
        """Run the script offloaded, in the number of processes that `lohan launch` would start. Raises ValueError for
        unsupported options."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                f"several processes run this program, and each would start {options.training_script}; start the "
                "program as one process, and pass --num_processes to the program itself"
            )
        self.has_launched = True
        with temporary_folder() as folder:
            file = Path(folder) / "lohan.yaml"
            file.write_text(yaml.safe_dump(self._config.to_dict()), encoding="utf-8")
            launch_offloaded(options, ["--offload", str(file)])


def _replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
