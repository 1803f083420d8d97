"""Layers and experts on lanes of their own: both ahead of their use, neither behind the other."""

from __future__ import annotations

from hf_lohan.experts.expert_loader import ExpertLoader
from hf_lohan.model import Block
from hf_lohan.weights import BlockLoader, Slot


class TwoLanes:
    """What is said of a pass is said to both. Who computes with experts asks their loader itself. See `Loads`."""

    def __init__(self, layers: BlockLoader, experts: ExpertLoader) -> None:
        self._layers = layers
        self._experts = experts

    def begin_pass(self, *, is_training: bool) -> None:
        self._layers.begin_pass(is_training=is_training)
        self._experts.begin_pass(is_training=is_training)

    def foresee(self, *, is_training: bool) -> None:
        self._layers.foresee(is_training=is_training)
        self._experts.foresee(is_training=is_training)

    def end_pass(self) -> None:
        self._layers.end_pass()
        self._experts.end_pass()

    def cancel_pass(self) -> None:
        self._layers.cancel_pass()
        self._experts.cancel_pass()

    def acquire(self, block: Block, *, for_operation: bool = False) -> Slot:
        return self._layers.acquire(block, for_operation=for_operation)

    def close(self) -> None:
        self._layers.close()
        self._experts.close()
