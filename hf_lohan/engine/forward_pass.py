"""How forwards go through a model's blocks, and their backward back: one at a time here, several in `micro_batches`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hf_lohan.engine.model_pass import ModelPass
from hf_lohan.model import Block, ParamSlice
from hf_lohan.weights import Slot


class ForwardPass(Protocol):
    """Is told by a model's hooks where the model is."""

    def begin_model(self) -> None:
        """A forward of the whole model begins."""

    def save_by(self, saving: AbstractContextManager[Any]) -> None:
        """It will have a backward; ``saving``: hooks for what it saves."""

    def end_model(self, *, is_whole: bool) -> None:
        """It has ended, or broken off."""

    def enter(self, blocks: Sequence[Block]) -> None:
        """A module that needs the blocks is about to run."""

    def leave(self, blocks: Sequence[Block]) -> None:
        """That module has run."""

    @property
    def number(self) -> int:
        """Which of several forwards that share the model runs."""

    @property
    def is_saving(self) -> bool:
        """Whether a forward of this thread notes what it saves."""

    @property
    def is_here(self) -> bool:
        """Whether this thread runs one of the forwards that are under way."""

    def enter_to_read(self, block: Block) -> None:
        """An operation is about to read weights of a block whose modules do not run. `leave` follows."""

    def weight(self, part: ParamSlice) -> Tensor:
        """What it is to read."""

    def behind_layer(self, index: int, output: Any) -> Any:
        """So has a layer. Returns what to give to the next one."""

    def enter_backward(self) -> None:
        """A backward begins, or goes on."""

    def take_gradient(self, part: ParamSlice, parameter: nn.Parameter) -> None:
        """A parameter's gradient of this backward is complete."""

    def take_part(self, number: int, part: ParamSlice, gradient: Tensor | None) -> None:
        """What the backward of the forward of that number has for one expert's part of a parameter is complete. None:
        zeros."""

    def fetch_in_backward(self, block: Block) -> Slot:
        """Bring the block here for the backward."""


class OneForward:
    """A forward has the model for itself."""

    def __init__(self, model_pass: ModelPass) -> None:
        self._pass = model_pass
        self._thread = 0
        self._is_running = False
        """Also true after an interrupt that ended the forward."""
        self._lock = threading.Lock()

    def begin_model(self) -> None:
        own = threading.get_ident()
        with self._lock:
            is_elsewhere = self._is_running and self._thread != own
            if is_elsewhere and any(thread.ident == self._thread for thread in threading.enumerate()):
                raise RuntimeError(
                    "an offloaded model was called on a second thread while its forward runs on another, and its "
                    "weights pass through one set of slots; call it on one thread at a time"
                )
            self._thread, self._is_running = own, True
        self._pass.begin_forward(is_training=torch.is_grad_enabled())

    def save_by(self, saving: AbstractContextManager[Any]) -> None:
        self._pass.save_by(saving)

    def end_model(self, *, is_whole: bool) -> None:
        if threading.get_ident() != self._thread:
            return  # the forward on this thread was refused
        self._is_running = False
        was_training = self._pass.end_saving()
        if is_whole:
            self._pass.end_forward(is_training=was_training)
        else:
            self._pass.break_off()

    def enter(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._pass.in_use.enter(block)

    def leave(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._pass.in_use.leave(block)

    @property
    def number(self) -> int:
        return 0

    @property
    def is_saving(self) -> bool:
        return self._pass.is_saving

    @property
    def is_here(self) -> bool:
        return threading.get_ident() == self._thread

    def enter_to_read(self, block: Block) -> None:
        self._pass.in_use.enter(block, for_operation=True)

    def weight(self, part: ParamSlice) -> Tensor:
        return part.parameter

    def behind_layer(self, index: int, output: Any) -> Any:
        return output

    def enter_backward(self) -> None:
        self._pass.begin_backward()

    def take_gradient(self, part: ParamSlice, parameter: nn.Parameter) -> None:
        self._pass.begin_backward()
        self._pass.take_gradient(part, parameter)

    def take_part(self, number: int, part: ParamSlice, gradient: Tensor | None) -> None:
        self._pass.begin_backward()
        self._pass.send_gradient(part, gradient)

    def fetch_in_backward(self, block: Block) -> Slot:
        return self._pass.in_use.fetch_in_backward(block)
