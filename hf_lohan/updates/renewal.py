"""Weights that turn from old to new in the slots where they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from hf_lohan.device import Device
from hf_lohan.model import Block
from hf_lohan.updates.blocks_in_update import BlocksInUpdate
from hf_lohan.updates.weight_loan import WeightLoan


@dataclass(frozen=True, eq=False)
class Renewal:
    """A slot that keeps its block over a step. Each update has the old weights of its chunk from there, not from the
    SSD, and leaves the new ones in their place; what is not updated is right as it is."""

    weights: Tensor
    """[block.numel], on the device. The H2D lane waits for whoever computed with the old ones."""
    ended: Callable[[BaseException | None], None]
    """Called when the copies of all new weights are enqueued on the H2D lane, or with what made that impossible."""


class Renewals:
    """Those of one step after the other. Used by the thread that updates, which no interrupt ends between claiming a
    slot and saying what comes into it."""

    def __init__(self, device: Device, updates: BlocksInUpdate, renew: Callable[[Block], Renewal | None]) -> None:
        """`renew` lets the slot of a block keep it while it is updated, if there is one and it is needed soon."""
        self._device = device
        self._updates = updates
        self._renew = renew
        self._under_way: dict[Block, Renewal] = {}

    def begin(self, blocks: Iterable[Block]) -> set[Block]:
        """Have what is to come of these blocks, which `BlocksInUpdate` knows, put into the slots that keep them.
        Returns the blocks of which there is one."""
        for block in blocks:
            renewal = self._renew(block)
            if renewal is not None:
                self._under_way[block] = renewal
                self._updates.renew(block, renewal.weights).when_ended(renewal.ended)
        return set(self._under_way)

    def loan_of(self, block: Block) -> WeightLoan | None:
        """The old weights of a block that is renewed, for one chunk's update. Nobody waits for it to be given back."""
        renewal = self._under_way.get(block)
        return None if renewal is None else WeightLoan(self._device, renewal.weights, lambda: None)

    def end_step(self) -> None:
        """All updates have begun, or none will."""
        self._under_way.clear()
