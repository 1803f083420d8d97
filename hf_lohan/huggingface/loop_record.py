"""A raw training loop's summary, steps and trace: what Trainer tells its callbacks, told by hooks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.run_summary import RunSummary
from hf_lohan.huggingface.step_record import StepRecord
from hf_lohan.optim import OffloadAdamW


class LoopRecord:
    """Writes `<folder>/lohan/` for steps that nobody announces: one begins with its first forward and ends with the
    optimizer's step. Nobody knows how many there will be."""

    def __init__(self, engine: OffloadEngine, folder: Path) -> None:
        self.engine = engine
        self._summary = RunSummary(engine)
        self._steps = StepRecord(engine, self._summary)
        self._args = SimpleNamespace(output_dir=str(folder))
        self._state = SimpleNamespace(global_step=0, max_steps=0)
        self._has_begun = self._has_ended = self._is_in_step = False
        engine.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def follow(self, optimizer: OffloadAdamW) -> None:
        """Its steps end the loop's steps."""
        optimizer.register_step_post_hook(self._after_step)

    def resume(self) -> None:
        """A state was loaded: count on from the steps that its parameters have taken."""
        self._state.global_step = max(part.num_updates for part in self.engine.parameter_slices)

    def _before_forward(self, _model: nn.Module, args: Any, inputs: Mapping[str, Any]) -> None:
        if self._has_ended or not torch.is_grad_enabled():
            return
        if not self._has_begun:
            self._has_begun = True
            self._tell("on_train_begin")
        if not self._is_in_step:
            self._is_in_step = True
            self._tell("on_step_begin")
        self._summary.count_tokens(inputs if "input_ids" in inputs or not args else {"input_ids": args[0]})

    def _after_step(self, *_: Any) -> None:
        if self._is_in_step:
            self._is_in_step = False
            self._state.global_step += 1
            self._tell("on_step_end")

    def log(self, values: Mapping[str, Any]) -> None:
        """What the loop says of its last step; the names are Trainer's. What is no number is not for the record."""
        numbers = {name: value for name, value in values.items() if _is_number(value)}
        if self._has_begun:
            self._steps.on_log(self._args, self._state, None, logs=numbers)

    def end(self) -> None:
        """The loop is over."""
        if self._has_begun and not self._has_ended:
            self._has_ended = True
            try:
                if self.engine.is_closed:  # its figures are gone, but what was noted of the steps is there
                    self._summary.stop_watching()
                    self._steps.flush()
                else:
                    self._tell("on_train_end")
            finally:
                self._steps.end()

    def _tell(self, event: str) -> None:
        for listener in (self._summary, self._steps):
            getattr(listener, event)(self._args, self._state, None)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):  # lists, words, tensors of several elements
        return False
    return True
