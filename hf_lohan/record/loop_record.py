"""A raw training loop's record: what Trainer tells its callbacks, told by hooks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_lohan.engine import OffloadEngine
from hf_lohan.optim import OffloadAdamW
from hf_lohan.planning.run_plan import RunPlan
from hf_lohan.record.run_record import RunRecord


class LoopRecord:
    """Writes `<folder>/lohan/` for steps that nobody announces: one begins with its first forward and ends with the
    optimizer's step. Nobody knows how many there will be."""

    def __init__(self, engine: OffloadEngine, plan: RunPlan | None, folder: Path) -> None:
        self.engine = engine
        self._record = RunRecord(engine, plan)
        self._folder = folder
        self._num_steps = 0
        self._has_begun = self._has_ended = self._is_in_step = False
        engine.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def follow(self, optimizer: OffloadAdamW) -> None:
        """Its steps end the loop's steps."""
        optimizer.register_step_post_hook(self._after_step)

    def resume(self) -> None:
        """A state was loaded: count on from the steps that its parameters have taken."""
        self._num_steps = max(self.engine.step_counts.values())

    def _before_forward(self, _model: nn.Module, args: Any, inputs: Mapping[str, Any]) -> None:
        if self._has_ended or not torch.is_grad_enabled():
            return
        if not self._has_begun:
            self._has_begun = True
            self._record.begin(self._folder, step=self._num_steps, num_steps=None)
        if not self._is_in_step:
            self._is_in_step = True
            self._record.begin_step()
        self._record.count_tokens(inputs if "input_ids" in inputs or not args else {"input_ids": args[0]})

    def _after_step(self, *_: Any) -> None:
        if self._is_in_step:
            self._is_in_step = False
            self._num_steps += 1
            self._record.end_step(self._num_steps)

    def log(self, values: Mapping[str, Any]) -> None:
        """What the loop says of its last step. What is no number is not for the record."""
        if self._has_begun:
            self._record.log(self._num_steps, {name: value for name, value in values.items() if _is_number(value)})

    def end(self) -> None:
        """The loop is over."""
        if self._has_begun and not self._has_ended:
            self._has_ended = True
            try:
                self._record.end()
            finally:
                self._record.close()


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):  # lists, words, tensors of several elements
        return False
    return True
