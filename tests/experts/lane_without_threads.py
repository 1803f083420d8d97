"""Experts that load at once, to test the schedule and the choice of slots without a thread or a store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from hf_lohan.costs import SizeClass
from hf_lohan.experts.expert_schedule import Call, ExpertSchedule
from hf_lohan.experts.next_expert import NextExpert
from hf_lohan.model import Block
from hf_lohan.weights import Slot, SlotRing


@dataclass(eq=False)
class NamedBlock:
    """The parts of a `Block` that a schedule uses."""

    name: str
    param_bytes: int = 100


@dataclass(eq=False)
class OneSlot:
    """The parts of a `Slot` that the choice of slots uses."""

    block: NamedBlock | None = None
    num_pins: int = 0
    is_loading: bool = False
    last_use: None = None

    @property
    def is_claimable(self) -> bool:
        return not (self.num_pins or self.is_loading)


@dataclass
class Slots:
    """The parts of a `SlotRing` that the choice of slots uses, with one set of slots."""

    num: int
    num_forgets: int = 0
    here: dict[NamedBlock, OneSlot] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.all = [OneSlot() for _ in range(self.num)]
        self.slots = {SizeClass.EXPERT: self.all}

    def is_here(self, block: NamedBlock) -> bool:
        return block in self.here

    def slot_of(self, block: NamedBlock) -> OneSlot:
        return self.here[block]

    def claim(self, slot: OneSlot, block: NamedBlock) -> None:
        if slot.block is not None:
            del self.here[slot.block]
        slot.block = block
        self.here[block] = slot

    def forget(self) -> None:
        self.num_forgets += 1
        for slot in self.here.values():
            slot.block = None
        self.here.clear()


class Lane:
    """Loads all that can be loaded after every change. A call computes with one expert at a time, and prefers experts
    that are here.
    """

    def __init__(self, num_layers: int, num_experts: int, num_slots: int) -> None:
        self.layers = [[NamedBlock(f"{layer}.{e}") for e in range(num_experts)] for layer in range(num_layers)]
        self.schedule = ExpertSchedule(cast(Sequence[Sequence[Block]], self.layers))
        self.ring = Slots(num_slots)
        self.next = NextExpert(self.schedule, cast(SlotRing, self.ring))
        self.loads: list[str] = []
        self.used: list[str] = []

    def load_all(self, at_most: int = 1 << 30) -> None:
        for _ in range(at_most):
            load = self.next.find_load()
            if load is None:
                return
            self.next.claim_slot(load)
            self.next.end_load(load)
            self.loads.append(load.block.name)

    def begin(self, *, is_training: bool) -> None:
        self.schedule.begin_pass(is_training=is_training)
        self.load_all()

    def call(self, layer: int, experts: Iterable[int] | None, call: Call = Call.FORWARD, *, num_rows: int = 0) -> None:
        """Compute with these experts of a layer, or with all of them and 10 rows each."""
        listed = None if experts is None else list(experts)
        rows = num_rows or (10 * len(self.layers[layer]) if listed is None else len(listed))
        self.schedule.route(layer, listed, num_rows=rows, call=call)
        left = self.schedule.left
        self.next.begin_call(layer, left)
        while left:
            self.load_all()
            block = next((block for block in left if self.ring.is_here(cast(NamedBlock, block))), None)
            assert block is not None, "nothing that is needed is here, and nothing can be loaded"
            left.remove(block)
            slot = self.ring.slot_of(cast(NamedBlock, block))
            self.schedule.use(block)
            slot.num_pins += 1
            self.next.note_use(cast(Slot, slot))
            self.load_all()
            self.used.append(block.name)
            slot.num_pins -= 1
        self.load_all()

    def training_pass(self, experts: Sequence[Iterable[int] | None]) -> None:
        """Run a training pass of one micro-batch. `experts` has the experts of each layer."""
        self.begin(is_training=True)
        for layer, listed in enumerate(experts):
            self.call(layer, listed)
        for layer, listed in reversed(list(enumerate(experts))):
            self.call(layer, None if listed is None else sorted(listed, reverse=True), Call.BACKWARD)
        self.schedule.end_pass()
