"""The forwards of a step's micro-batches, block by block: all of them through a block before the next one."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from hf_lohan.planner import SizeClass
from hf_lohan.runtime.block import Block
from hf_lohan.runtime.blocks_in_use import BlocksInUse
from hf_lohan.runtime.lockstep import Lockstep
from hf_lohan.runtime.micro_batch_leaves import MicroBatchLeaves


@dataclass
class _Progress:
    """Of one micro-batch. Compared as a whole: what skips a layer waits for those that do not."""

    num_forwards: int = 0
    num_layers: int = 0
    """That it has behind it, or has skipped, in this forward."""
    num_stops: int = 0
    """Since then."""

    def position(self) -> tuple[int, int, int]:
        return self.num_forwards, self.num_layers, self.num_stops


class JointForward:
    """What `ModelHooks` does otherwise while several micro-batches are under way; `lockstep` says which one runs.

    A block stays in its slot from one micro-batch to the next, until another one of its size class is asked for.
    """

    def __init__(self, lockstep: Lockstep, in_use: BlocksInUse, leaves: MicroBatchLeaves) -> None:
        self.lockstep = lockstep
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
        self._in_use.enter_for_many(block, may_leave=lambda other: not self._leaves.is_in_use(other))
        self._leaves.enter(self.lockstep.running, block)

    def leave(self, block: Block) -> None:
        """That module has run."""
        self._leaves.leave(self.lockstep.running, block)

    def stop_before(self, blocks: tuple[Block, ...]) -> None:
        """Let the others catch up before blocks that have to make room for each other."""
        if any(block.size_class is SizeClass.OUTER for block in blocks):
            self._progress[self.lockstep.running].num_stops += 1
            self._pass_on()

    def stop_behind_layer(self, index: int) -> None:
        """Let the others run the layer, too. Not before a layer: its checkpoint has noted the random generator's state
        by then, and the others would draw from it."""
        progress = self._progress[self.lockstep.running]
        progress.num_layers, progress.num_stops = index + 1, 0
        self._pass_on()

    def _pass_on(self) -> None:
        number = self.lockstep.running
        if not torch.is_grad_enabled():
            return  # it leaves nothing for a backward, so its place among the others does not matter
        self._leaves.suspend(number)
        self.lockstep.pass_on(self._progress[number].position())
        self._leaves.resume(number)

    def end(self) -> None:
        """All forwards are over, or broke off."""
        self._leaves.restore()
