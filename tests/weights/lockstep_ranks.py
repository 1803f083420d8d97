"""Ranks as threads. Each runs the same random program of passes, and all ranks load blocks together."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from slot_plans import plan_of_slots

from hf_lohan.costs import PoolPlan, SizeClass
from hf_lohan.model import Block
from hf_lohan.weights import BlockLoader, Slot, SlotRing

NUM_LAYERS = 6
Op = tuple[str, int]
"""An operation of a computing thread, and the number of its block or the kind of its pass."""


def slots_for(blocks: Sequence[Block], *, num_layer_slots: int, num_outer_slots: int) -> PoolPlan:
    num_slots = {SizeClass.LAYER: num_layer_slots, SizeClass.OUTER: num_outer_slots, SizeClass.RESIDENT: 1}
    slot_bytes = {
        size_class: max((block.param_bytes for block in blocks if block.size_class is size_class), default=0)
        for size_class in SizeClass
    }
    return plan_of_slots(num_slots, slot_bytes, chunk_numel=blocks[0].numel)


class ProgramWriter:
    """Writes a random program of passes. Each acquire finds a slot that is not pinned."""

    def __init__(self, blocks: Sequence[Block], plan: PoolPlan, seed: int, *, oddity: float = 0.2) -> None:
        """`oddity`: how often a pass differs from the previous one."""
        self.ops: list[Op] = []
        self._blocks = blocks
        self._free = dict(plan.num_slots)
        self._pinned: dict[int, int] = defaultdict(int)
        self._random = random.Random(seed)
        self._oddity = oddity

    def write(self, num_passes: int) -> list[Op]:
        for _ in range(num_passes):
            if self._random.random() < 0.25:
                self._evaluation()
            else:
                self._training()
        return self.ops

    def _is_odd(self) -> bool:
        return self._random.random() < self._oddity

    def _order(self) -> list[int]:
        """Return the order of a forward. Layers may be skipped, run twice or change places."""
        order = list(range(len(self._blocks)))
        layers = order[1 : 1 + NUM_LAYERS]
        if self._is_odd():
            layers.remove(self._random.choice(layers))
        if self._is_odd():
            layers.insert(self._random.randrange(len(layers)), self._random.choice(layers))
        if self._is_odd():
            self._random.shuffle(layers)
        return [0, *layers, *order[1 + NUM_LAYERS :]]

    def _evaluation(self) -> None:
        self.ops.append(("begin", 0))
        self._forward(self._order())
        self.ops.append(("end", 0))

    def _training(self) -> None:
        self.ops.append(("begin", 1))
        order = self._order()
        # An outer module may use its own weight during the whole pass.
        around = self._random.choice([1, 0]) if self._is_odd() else None
        if around is not None and self._can_pin(around, leave=1):
            self._pin(around)
        else:
            around = None
        self._forward(order)
        if self._is_odd():
            self._evaluation()
        for number in reversed(order):
            if self._is_odd() and self._is_odd():
                return self._break_off()
            self._release_class(number, but=around)
            self._pin(number)
        if self._is_odd():  # backward may acquire saved weights again
            number = self._random.choice(order)
            self._release_class(number, but=around)
            self._pin(number)
        self._release_all()
        self.ops += [("end", 0), ("meet", 0)]  # as ranks that agree on the end of a step
        if self._is_odd():
            self.ops += [("update", self._random.randrange(len(self._blocks))) for _ in range(3)]
        else:
            self.ops += [("update", number) for number in range(len(self._blocks))]
        if not self._is_odd():
            self.ops.append(("foresee", 1))
        return None

    def _forward(self, order: Sequence[int]) -> None:
        for number in order:
            self._pin(number)
            if self._is_odd():
                other = self._random.randrange(len(self._blocks))
                if self._can_pin(other):
                    self.ops += [("read", other), ("unpin", other)]
            self._unpin(number)

    def _break_off(self) -> None:
        self._release_all()
        self.ops.append(("cancel", 0))

    def _can_pin(self, number: int, leave: int = 0) -> bool:
        return bool(self._pinned[number]) or self._free[self._blocks[number].size_class] > leave

    def _pin(self, number: int) -> None:
        if not self._pinned[number]:
            self._free[self._blocks[number].size_class] -= 1
        self._pinned[number] += 1
        self.ops.append(("use", number))

    def _unpin(self, number: int) -> None:
        self._pinned[number] -= 1
        if not self._pinned[number]:
            self._free[self._blocks[number].size_class] += 1
        self.ops.append(("unpin", number))

    def _release_class(self, number: int, but: int | None) -> None:
        for other, count in list(self._pinned.items()):
            if count and other != but and self._blocks[other].size_class is self._blocks[number].size_class:
                self._unpin(other)

    def _release_all(self) -> None:
        for number, count in list(self._pinned.items()):
            for _ in range(count):
                self._unpin(number)


class Weights(Protocol):
    """The value of each block in a rank's store."""

    def of(self, block: Block) -> Any: ...

    def update(self, block: Block) -> None:
        """Change it at this place in the program."""


def run_program(
    ops: Sequence[Op],
    blocks: Sequence[Block],
    loader: BlockLoader,
    ring: SlotRing,
    weights: Weights,
    meet: Callable[[], None] = lambda: None,
) -> None:
    """Run a program as a computing thread does. Check the weights of each used block."""
    pinned: dict[Block, Slot] = {}

    def check(block: Block) -> None:
        held = pinned[block].weights[: block.numel]
        assert bool((held == weights.of(block)).all()), f"{block} has wrong weights"

    for verb, number in ops:
        block = blocks[number]
        match verb:
            case "begin":
                loader.begin_pass(is_training=bool(number))
            case "foresee":
                loader.foresee_pass(is_training=bool(number))
            case "end":
                loader.end_pass()
            case "cancel":
                ring.unpin_all()
                loader.cancel_pass()
            case "use" | "read":
                pinned[block] = loader.acquire(block, for_operation=verb == "read")
                check(block)
            case "unpin":
                check(block)
                ring.unpin(block)
            case "update":
                weights.update(block)
                ring.end_step([block])
            case "meet":
                meet()
