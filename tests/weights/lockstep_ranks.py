"""Ranks as threads. Each runs the same random program of passes, and all ranks load blocks together."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from slot_plans import plan_of_slots
from torch import Tensor, nn

from hf_lohan.device import CpuDevice, Device, Event, Lane
from hf_lohan.model import Block, lay_out_block
from hf_lohan.planner import PoolPlan, SizeClass
from hf_lohan.weights import BlockLoader, Slot, SlotRing
from hf_lohan.weights.joint_order import Standing

NUM_LAYERS = 6
JOIN_S = 120.0

Op = tuple[str, int]
"""An operation of a computing thread, and the number of its block or the kind of its pass."""


def make_blocks() -> list[Block]:
    """Make the blocks of a model: an embedding, layers, a resident norm and a head."""

    def block(name: str, size_class: SizeClass) -> Block:
        return lay_out_block(name, size_class, {name: nn.Parameter(torch.empty(1))})

    layers = [block(f"layer{number}", SizeClass.LAYER) for number in range(NUM_LAYERS)]
    return [
        block("embedding", SizeClass.OUTER),
        *layers,
        block("norm", SizeClass.RESIDENT),
        block("head", SizeClass.OUTER),
    ]


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
        self.ops.append(("end", 0))
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


class Weights:
    """The value of each block in a rank's store. An update changes it at its place in the program."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._values = {block: float(number) for number, block in enumerate(blocks)}

    def of(self, block: Block) -> float:
        return self._values[block]

    def update(self, block: Block) -> None:
        self._values[block] += 100.0


def run_program(
    ops: Sequence[Op],
    blocks: Sequence[Block],
    loader: BlockLoader,
    ring: SlotRing,
    weights: Weights,
    pause: Callable[[], None] = lambda: None,
    meet: Callable[[], None] = lambda: None,
) -> None:
    """Run a program as a computing thread does. Check the weights of each used block."""
    pinned: dict[Block, Slot] = {}

    def check(block: Block) -> None:
        held = pinned[block].weights[: block.numel]
        assert bool((held == weights.of(block)).all()), f"{block} has wrong weights"

    for verb, number in ops:
        pause()
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


class Meeting:
    """Collects the parts of all ranks, in place of shared memory and messages."""

    def __init__(self, num_ranks: int, *, num_entries: int = 2) -> None:
        self.num_ranks = num_ranks
        self.num_entries = num_entries
        self.lock = threading.Condition()
        self.brought: defaultdict[int, dict[int, float]] = defaultdict(dict)
        """By position of the load: the value of each rank's part."""
        self.num_taken: defaultdict[int, int] = defaultdict(int)

    def has_room(self, position: int) -> bool:
        last = position - self.num_entries
        return last < 0 or self.num_taken[last] == self.num_ranks


@dataclass(frozen=True)
class Carried:
    """A load that a rank has carried out."""

    number: int
    block: str
    slot: int


class MeetingSource:
    """A `JointSource` whose parts are numbers that arrive some time after their load began."""

    def __init__(
        self, meeting: Meeting, rank: int, ring: SlotRing, weights: Weights, delays: random.Random | None
    ) -> None:
        self.carried: list[Carried] = []
        self._meeting = meeting
        self._rank = rank
        self._device: Device = ring.device
        slots = [slot for of_class in ring.slots.values() for slot in of_class]
        self._slot_numbers = {slot.weights.data_ptr(): number for number, slot in enumerate(slots)}
        self._weights = weights
        self._delays = delays
        self._coming: dict[int, Block] = {}
        self._names: dict[int, str] = {}
        self._positions: dict[int, int] = {}
        """By number of a load, its position among all loads, which is the same on all ranks."""
        self._has_news = False
        self.failed: BaseException | None = None

    def begin_load(
        self, number: int, block: Block, version: int, is_wanted: Callable[[], bool], num_ended: int = 0
    ) -> bool:
        position = self._positions.setdefault(number, len(self._positions))
        with self._meeting.lock:
            if not self._meeting.has_room(position):
                return False
        self._coming[number] = block
        self._names[number] = block.name
        return True

    def advance_loads(self) -> bool:
        if not self._coming:
            return False
        if self._delays is not None and self._delays.random() < 0.5:
            time.sleep(5e-4 * self._delays.random())
        number = min(self._coming)
        value = self._weights.of(self._coming.pop(number))
        with self._meeting.lock:
            self._meeting.brought[self._positions[number]][self._rank] = value
            self._meeting.lock.notify_all()
        return True

    def is_whole(self, number: int) -> bool:
        with self._meeting.lock:
            return len(self._meeting.brought[self._positions[number]]) == self._meeting.num_ranks

    def finish_load(self, number: int, weights: Tensor, free: Event | None) -> Event:
        parts = set(self._meeting.brought[self._positions[number]].values())
        if free is not None:
            self._device.wait(Lane.H2D, free)
        # If ranks have different versions, no rank may use the block. `run_program` would find NaN.
        value = parts.pop() if len(parts) == 1 else float("nan")
        self._device.copy(Lane.H2D, weights, torch.full_like(weights, value))
        ready = self._device.record(Lane.H2D)
        ready.synchronize()
        self.carried.append(
            Carried(self._positions[number], self._names[number], self._slot_numbers[weights.data_ptr()])
        )
        with self._meeting.lock:
            self._meeting.num_taken[self._positions[number]] += 1
            self._meeting.lock.notify_all()
        return ready

    def is_common(self, number: int) -> bool:
        return True

    def give_up_loads(self) -> None:
        raise AssertionError("all loads are common")

    def begin_lent_load(self, number: int, block: Block, weights: Tensor, free: Event | None) -> None:
        raise AssertionError("all loads are common")

    def finish_lent_load(self, *, is_wanted: bool) -> Event | None:
        raise AssertionError("all loads are common")

    def stand_by(self, standing: Standing, looks_again_after_s: float) -> None:
        pass

    def wait(self) -> None:
        with self._meeting.lock:
            if not self._has_news:
                self._meeting.lock.wait(0.25)
            self._has_news = False

    def notify(self) -> None:
        with self._meeting.lock:
            self._has_news = True
            self._meeting.lock.notify_all()

    def fail(self, error: BaseException) -> None:
        self.failed = error

    def close(self) -> None:
        pass


def run_in_threads(functions: Sequence[Callable[[], None]]) -> None:
    """Run all functions in parallel. Raises the first error, or AssertionError if a function does not end."""
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + JOIN_S
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "ranks hang"


def host_device(_rank: int) -> Device:
    return CpuDevice()
