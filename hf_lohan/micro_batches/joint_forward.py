"""The forwards of a step's micro-batches, block by block: all of them through a block before the next one."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from hf_lohan.micro_batches.heads import MicroBatchHeads
from hf_lohan.micro_batches.leaves import MicroBatchLeaves
from hf_lohan.micro_batches.lockstep import Lockstep
from hf_lohan.model import Block
from hf_lohan.planner import SizeClass
from hf_lohan.weights import BlocksInUse, Slot


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


class JointForward:
    """What `ModelHooks` does otherwise while several micro-batches are under way; `lockstep` says which one runs.

    A block stays in its slot from one micro-batch to the next, until another one of its size class is asked for.
    """

    def __init__(
        self,
        lockstep: Lockstep,
        in_use: BlocksInUse,
        leaves: MicroBatchLeaves,
        *,
        num_layers: int,
        heads: MicroBatchHeads | None,
    ) -> None:
        """``heads``: None if they are to wait for each other, too."""
        self.lockstep = lockstep
        self._num_layers = num_layers
        self._heads = heads
        self._in_use = in_use
        self._leaves = leaves
        self._progress: defaultdict[int, _Progress] = defaultdict(_Progress)
        self._saving: dict[int, contextlib.AbstractContextManager[Any]] = {}

    def begin_model(self, saving: contextlib.AbstractContextManager[Any]) -> None:
        """A forward of the whole model begins. ``saving``: hooks for what it saves, if it is to have a backward."""
        if torch.is_grad_enabled():
            progress = self._progress[self.lockstep.running]
            self._progress[self.lockstep.running] = _Progress(progress.num_forwards + 1)
            saving.__enter__()
            self._saving[self.lockstep.running] = saving

    def end_model(self) -> None:
        """It has ended, or broken off."""
        saving = self._saving.pop(self.lockstep.running, None)
        if saving is not None:
            saving.__exit__(None, None, None)

    def enter(self, block: Block) -> None:
        """A module that needs the block is about to run."""
        if block.size_class is SizeClass.LAYER and self._progress[self.lockstep.running].num_layers:
            # All are past the first layer, and what lies before it need not keep the head from being read ahead.
            self._in_use.leave_idle(SizeClass.OUTER, self._is_idle)
        self._in_use.enter_for_many(block, is_idle=self._is_idle)
        self._leaves.enter(self.lockstep.running, block)

    def leave(self, block: Block) -> None:
        """That module has run."""
        self._leaves.leave(self.lockstep.running, block)

    def fetch_in_backward(self, block: Block) -> Slot:
        """Bring the block here for the backward of a head."""
        return self._in_use.enter_for_many(block, is_idle=self._is_idle)

    def stop_before(self, blocks: tuple[Block, ...]) -> None:
        """Let the others catch up before blocks that have to make room for each other."""
        progress = self._progress[self.lockstep.running]
        is_in_head = self._heads is not None and progress.num_layers == self._num_layers
        if torch.is_grad_enabled() and not is_in_head and any(block.size_class is SizeClass.OUTER for block in blocks):
            progress.num_stops += 1
            self._pass_on(progress.position())

    def stop_behind_layer(self, index: int, output: Any) -> Any:
        """Let the others run the layer, too. Not before a layer: where hooks run within its checkpoint (transformers
        before 5.23), that has noted the random generator's state by then, and the others would draw from it. Returns
        what to give to the next layer."""
        if not torch.is_grad_enabled():
            return output  # it leaves nothing for a backward, so its place among the others does not matter
        number = self.lockstep.running
        progress = self._progress[number]
        progress.num_layers, progress.num_stops = index + 1, 0
        if self._heads is None or progress.num_layers < self._num_layers:
            self._pass_on(progress.position())
            return output
        # Heads have their backward at once, so the first micro-batch's gradient must come first.
        self._pass_on((*progress.position(), number))
        self._leaves.begin_head(number)
        return self._heads.put_gate(number, output)

    def _pass_on(self, position: tuple[int, ...]) -> None:
        number = self.lockstep.running
        self._leaves.suspend(number)
        self.lockstep.pass_on(position)
        self._leaves.resume(number)

    def _is_idle(self, block: Block) -> bool:
        return not self._leaves.is_in_use(block)

    def restore(self) -> None:
        """All forwards are over, or broke off: the model is as it was."""
        self._leaves.restore()

    def leave_all(self) -> None:
        """All forwards are over: no block is needed for now."""
        for size_class in SizeClass:
            self._in_use.leave_idle(size_class, self._is_idle)
