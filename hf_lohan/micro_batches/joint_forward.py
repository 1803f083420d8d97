"""The forwards of a step's micro-batches, block by block: all of them through a block before the next one."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hf_lohan.device import Device
from hf_lohan.micro_batches.heads import MicroBatchHeads
from hf_lohan.micro_batches.leaves import GradientSums, MicroBatchLeaves
from hf_lohan.micro_batches.lockstep import Lockstep
from hf_lohan.model import Block, ParamSlice
from hf_lohan.planner import SizeClass
from hf_lohan.weights import BlocksInUse, Slot, SlotRing


@dataclass
class _Progress:
    """Of one micro-batch. Compared as a whole: what skips a layer waits for those that do not."""

    num_forwards: int = 0
    num_layers: int = 0
    """That it has behind it, or has skipped, in this forward."""
    num_stops: int = 0
    """Since then."""

    def position(self) -> tuple[int, ...]:
        return self.num_forwards, self.num_layers, self.num_stops


class PassUnderWay(Protocol):
    """The model's pass, as the engine follows it: a joint forward is one forward to it."""

    @property
    def in_use(self) -> BlocksInUse: ...

    def begin_forward(self, *, is_training: bool) -> None: ...

    def end_forward(self, *, is_training: bool) -> None: ...

    def begin_head(self) -> None: ...

    def begin_backward(self, before_end: Callable[[], None]) -> None: ...

    def send_gradient(self, part: ParamSlice, gradient: Tensor | None, *, has_more: bool = False) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class JointParts:
    """What micro-batches go through together."""

    model: nn.Module
    num_layers: int
    device: Device
    ring: SlotRing
    model_pass: PassUnderWay
    holds_gradients: bool
    """Whether the host can add to gradients that have come."""
    going_by: Callable[[JointForward], contextlib.AbstractContextManager[None]]
    """A context within which the model's hooks tell a joint forward where the model is."""


class JointForward:
    """A `ForwardPass` of several micro-batches; `lockstep` says which one runs.

    A block stays in its slot from one micro-batch to the next, until another one of its size class is asked for.
    """

    def __init__(self, parts: JointParts, lockstep: Lockstep, *, heads_apart: bool) -> None:
        """``heads_apart``: whether to try and take heads back one by one."""
        self._pass = parts.model_pass
        self._in_use = parts.model_pass.in_use
        self._ring = parts.ring
        self._num_layers = parts.num_layers
        self._adds_on_host = parts.holds_gradients
        self._num_sent: Counter[ParamSlice] = Counter()
        self._lockstep = lockstep
        self._heads_apart = heads_apart
        self._sums = GradientSums(lockstep.num_functions, parts.model_pass.send_gradient)
        self._leaves = MicroBatchLeaves(parts.model, parts.ring, self._take_gradient)
        self.heads = MicroBatchHeads(self._leaves.__contains__)
        self._progress: defaultdict[int, _Progress] = defaultdict(_Progress)
        self._saving: dict[int, contextlib.AbstractContextManager[Any]] = {}
        self._is_in_forward = True

    @contextlib.contextmanager
    def forwards(self) -> Iterator[None]:
        """Within, all forwards run; behind it, their one backward may."""
        try:
            yield
        finally:
            self._leaves.restore()
            self._is_in_forward = False
        if self._heads_apart and not self.heads.are_apart:
            self._sums.keep_order()
        for size_class in SizeClass:
            self._in_use.leave_idle(size_class, self._is_idle)
        self._pass.end_forward(is_training=True)

    # Forward.

    def begin_model(self) -> None:
        if torch.is_grad_enabled():
            progress = self._progress[self._lockstep.running]
            self._progress[self._lockstep.running] = _Progress(progress.num_forwards + 1)

    def save_by(self, saving: contextlib.AbstractContextManager[Any]) -> None:
        saving.__enter__()
        self._saving[self._lockstep.running] = saving

    def end_model(self, *, is_whole: bool) -> None:
        saving = self._saving.pop(self._lockstep.running, None)
        if saving is not None:
            saving.__exit__(None, None, None)

    def enter(self, blocks: Sequence[Block]) -> None:
        self._stop_before(blocks)
        number = self._lockstep.running
        for block in blocks:
            if block.size_class is SizeClass.LAYER and self._progress[number].num_layers:
                # All are past the first layer, and what lies before it need not keep the head from being read ahead.
                self._in_use.leave_idle(SizeClass.OUTER, self._is_idle)
            self._in_use.enter_for_many(block, is_idle=self._is_idle)
            self._ring.show(block)
            self._leaves.enter(number, block)

    def leave(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._leaves.leave(self._lockstep.running, block)
            if self._is_idle(block):
                self._ring.hide(block)  # it stays in its slot, but what reads its weights needs a leaf

    @property
    def number(self) -> int:
        return self._lockstep.running

    @property
    def is_saving(self) -> bool:
        return self._lockstep.running in self._saving

    @property
    def is_here(self) -> bool:
        return self._lockstep.is_here

    def enter_to_read(self, block: Block) -> None:
        self.enter((block,))

    def weight(self, part: ParamSlice) -> Tensor:
        return self._leaves.leaf(self._lockstep.running, part)

    def _stop_before(self, blocks: Sequence[Block]) -> None:
        """Let the others catch up before blocks that have to make room for each other."""
        progress = self._progress[self._lockstep.running]
        is_in_head = self._heads_apart and progress.num_layers == self._num_layers
        if torch.is_grad_enabled() and not is_in_head and any(block.size_class is SizeClass.OUTER for block in blocks):
            progress.num_stops += 1
            self._pass_on(progress.position())

    def behind_layer(self, index: int, output: Any) -> Any:
        """Let the others run the layer, too. Not before a layer: where hooks run within its checkpoint (transformers
        before 5.23), that has noted the random generator's state by then, and the others would draw from it. Returns
        what to give to the next layer."""
        if not torch.is_grad_enabled():
            return output  # it leaves nothing for a backward, so its place among the others does not matter
        number = self._lockstep.running
        progress = self._progress[number]
        progress.num_layers, progress.num_stops = index + 1, 0
        if not self._heads_apart or progress.num_layers < self._num_layers:
            self._pass_on(progress.position())
            return output
        # Heads have their backward at once, so the first micro-batch's gradient must come first.
        self._pass_on((*progress.position(), number))
        self._leaves.begin_head(number)
        return self.heads.put_gate(number, output)

    def _pass_on(self, position: tuple[int, ...]) -> None:
        number = self._lockstep.running
        self._leaves.suspend(number)
        self._lockstep.pass_on(position)
        self._leaves.resume(number)

    def _is_idle(self, block: Block) -> bool:
        return not self._leaves.is_in_use(block)

    # Backward.

    def backward(self) -> None:
        """Of all micro-batches. Raises RuntimeError if none gave a loss."""
        try:
            self.heads.backward()
        finally:
            self._sums.clear()  # of a backward that broke off

    def enter_backward(self) -> None:
        if self._is_in_forward:
            self._pass.begin_head()
        else:
            self._pass.begin_backward(before_end=self._sums.flush)

    def take_gradient(self, part: ParamSlice, parameter: nn.Parameter) -> None:
        raise RuntimeError(
            f"an autograd function was given {part.name} itself, so what the micro-batches contribute to its gradient "
            "cannot be told apart; set vertical_micro_batches: false"
        )

    def take_part(self, number: int, part: ParamSlice, gradient: Tensor | None) -> None:
        """Sums of all experts of a layer may be more than the device has room for, so the host adds them up. It does so
        as they come; where that may not be in the order of the micro-batches, they wait on the device."""
        self.enter_backward()
        if self._sums.keeps_order or not self._adds_on_host:
            self._ring.gradients_away.note()
            self._sums.add_gradient(number, part, gradient)
            return
        self._num_sent[part] += 1
        self._pass.send_gradient(part, gradient, has_more=self._num_sent[part] < self._lockstep.num_functions)

    def fetch_in_backward(self, block: Block) -> Slot:
        if self._is_in_forward:
            return self._in_use.enter_for_many(block, is_idle=self._is_idle)
        return self._in_use.fetch_in_backward(block, self._done_with)

    def _take_gradient(self, micro_batch: int, part: ParamSlice, leaf: nn.Parameter, *, has_more: bool) -> None:
        self.enter_backward()
        self._ring.gradients_away.note()
        (self._sums.keep if has_more else self._sums.add)(micro_batch, part, leaf)

    def _done_with(self, block: Block) -> None:
        # A block outside the layers may have been used before and behind them: the last word on it is not said.
        if block.size_class is SizeClass.LAYER:
            self._sums.complete(block)
