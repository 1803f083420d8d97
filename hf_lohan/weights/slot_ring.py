"""Device slots: which blocks are on the device, which of them are in use, and which slots may be overwritten."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_lohan.absent import AbsentParameter, MovedGradients, StandIns
from hf_lohan.device import Device, Event, Lane
from hf_lohan.model import Block
from hf_lohan.planner import MIN_SLOTS_TO_LEND, PoolPlan, SizeClass
from hf_lohan.updates import BorrowedSlot, WeightSlots


@dataclass(eq=False)
class Slot:
    """A fixed device buffer. `weights` is its flat view [numel] in the dtype of its block."""

    weights: Tensor
    size_class: SizeClass
    block: Block | None = None
    ready: Event | None = None
    """Reached when `block` has arrived; None while its load is not enqueued yet."""
    is_loading: bool = False
    """Whether a load writes to it. Its block may have been forgotten meanwhile."""
    last_use: Event | None = None
    """Reached when the last compute that reads the slot is done."""
    num_pins: int = 0
    num_borrows: int = 0
    """Number of updates that borrow the slot and copy its weights."""
    is_kept: bool = False
    """Whether its block stays for good."""

    @property
    def is_claimable(self) -> bool:
        """Whether it may be overwritten."""
        return not (self.num_pins or self.num_borrows or self.is_loading or self.is_kept)


class SlotRing(WeightSlots):
    """Puts a block's parameters on the device and takes them off.

    The `data` of a present parameter is a view of a slot. The `data` of an absent one is a NaN, expanded to its shape,
    so code that bypasses `AbsentParameter` never gets a wrong finite number. A released slot keeps its block until it
    is claimed for another one.

    The computing thread pins and releases, the loading thread claims and publishes. `lock` guards both; `changed` is
    notified of every change.
    """

    def __init__(self, device: Device, plan: PoolPlan, kept: Collection[str] = ()) -> None:
        """``kept``: names of blocks that stay once they are loaded. At least two slots of their class must remain for
        other blocks."""
        self.device = device
        self._kept = frozenset(kept)
        # Callers enter the lock itself, not the condition: see `IoEngine`.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.slots: dict[SizeClass, list[Slot]] = {
            size_class: [
                Slot(device.empty(plan.slot_bytes[size_class]), size_class) for _ in range(plan.num_slots[size_class])
            ]
            for size_class in SizeClass
        }
        self.moved_gradients = MovedGradients()
        self.stand_ins = StandIns(device)
        self._holder: dict[Block, Slot] = {}
        self._by_storage = {slot.weights.untyped_storage().data_ptr(): slot for slot in self._all()}
        self._num_loads: Counter[Block] = Counter()
        self._num_forgotten: Counter[Block] = Counter()
        self._held_bytes = 0
        self._high_water_bytes = 0
        self.num_forgets = 0
        """How often slots were emptied because the store had newer weights."""
        self._return_callbacks: list[Callable[[], None]] = []

    def _all(self) -> list[Slot]:
        return [slot for slots in self.slots.values() for slot in slots]

    @property
    def num_slots(self) -> dict[SizeClass, int]:
        """Number of slots by size class."""
        return {size_class: len(slots) for size_class, slots in self.slots.items()}

    @property
    def high_water_bytes(self) -> int:
        """The most bytes of slots that ever held a block at once."""
        return self._high_water_bytes

    # For the computing thread.

    def pin(self, block: Block) -> Slot | None:
        """Keep a block from being overwritten, if it has a slot. Caller holds `lock`."""
        slot = self._holder.get(block)
        if slot is not None:
            slot.num_pins += 1
        return slot

    def pin_arrived(self, block: Block) -> Slot | None:
        """Pin a block whose load is enqueued; None if it is not."""
        with self.lock:
            slot = self._holder.get(block)
            return self.pin(block) if slot is not None and slot.ready is not None else None

    def borrow_slot(self, block: Block) -> BorrowedSlot | None:
        """The weights of a block that compute uses, for the optimizer. None if compute needs all slots: one block at a
        time is borrowed, and two slots must remain."""
        slots = self.slots[block.size_class]
        with self.lock:
            slot = self._holder.get(block)
            if slot is None or not slot.num_pins or len(slots) < MIN_SLOTS_TO_LEND:
                return None
            if any(other.num_borrows for other in slots if other is not slot):
                return None
            slot.num_borrows += 1
            return BorrowedSlot(self.device, slot.weights[: block.numel], lambda: self._return_slot(slot))

    def _return_slot(self, slot: Slot) -> None:
        with self.lock:
            slot.num_borrows -= 1
            self.changed.notify_all()
        for callback in self._return_callbacks:
            callback()

    def add_return_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever a borrowed slot is returned, on the thread that returns it."""
        self._return_callbacks.append(callback)

    def show(self, block: Block) -> None:
        """Make the parameters views into the pinned slot."""
        for part in block.slices:
            assert part.is_whole, f"{part.name} lies in several blocks, so no single one can show it"
            weights = self.slot_of(block).weights
            AbsentParameter.show(part.parameter, weights[part.start : part.stop].view(part.shape))

    def hide(self, block: Block) -> None:
        """Make the parameters absent. A parameter in several blocks is always absent."""
        for part in block.slices:
            if not part.first:
                AbsentParameter.hide(part.parameter, self.stand_ins.placeholder(block, part))

    def has_room_for(self, block: Block) -> bool:
        """Whether the block can be pinned without unpinning another one."""
        with self.lock:
            return block in self._holder or any(not slot.num_pins for slot in self.slots[block.size_class])

    def unpin(self, block: Block) -> None:
        """No compute that is enqueued later reads the block, until it is pinned again."""
        with self.lock:
            slot = self.slot_of(block)
            slot.last_use = self.device.record(Lane.COMPUTE, reads=[slot.weights])
            slot.num_pins -= 1
            assert slot.num_pins >= 0, f"{block} unpinned more often than pinned"
            self.changed.notify_all()

    def unpin_all(self) -> None:
        """After an exception: no block is in use any more."""
        with self.lock:
            for slot in self._all():
                if slot.num_pins:
                    slot.last_use = self.device.record(Lane.COMPUTE, reads=[slot.weights])
                    slot.num_pins = 0
            self.changed.notify_all()

    def num_loads(self, block: Block) -> int:
        """How often the block was loaded."""
        return self._num_loads[block]

    def version_of(self, block: Block) -> int:
        """How often the block was forgotten."""
        return self._num_forgotten[block]

    def slot_of(self, block: Block) -> Slot:
        return self._holder[block]

    def block_behind(self, tensor: Tensor) -> Block | None:
        """The block in the slot that ``tensor`` is a view of. None if it is no view of a slot."""
        slot = self._by_storage.get(tensor.untyped_storage().data_ptr())
        assert slot is None or slot.block is not None, "a view of an empty slot"
        return slot.block if slot is not None else None

    def forget(self, blocks: Iterable[Block]) -> None:
        """The store has newer parameters of these blocks. Empty their slots."""
        with self.lock:
            self.num_forgets += 1
            for block in blocks:
                self._num_forgotten[block] += 1
                slot = self._holder.get(block)
                if slot is not None:
                    assert slot.num_pins == 0, f"{block} went stale while it was in use"
                    self._empty(slot)
            self.changed.notify_all()

    # For the loading thread. The caller holds `lock`.

    def is_here(self, block: Block) -> bool:
        return block in self._holder

    def claim(self, slot: Slot, block: Block) -> None:
        """Give ``slot`` to ``block``, which is loaded next."""
        self._empty(slot)
        self._num_loads[block] += 1
        slot.block, slot.is_loading, slot.is_kept = block, True, block.name in self._kept
        slot.weights = slot.weights.view(torch.uint8).view(block.master.working_dtype)
        self._holder[block] = slot
        self._held_bytes += slot.weights.untyped_storage().nbytes()
        self._high_water_bytes = max(self._high_water_bytes, self._held_bytes)
        self.changed.notify_all()

    def publish(self, slot: Slot, ready: Event) -> None:
        """The load of the claimed slot is enqueued. ``ready`` is reached when it is done."""
        slot.is_loading = False
        if slot.block is not None:  # else it was forgotten meanwhile
            slot.ready = ready
        self.changed.notify_all()

    def abandon(self, slot: Slot) -> None:
        """The load of the claimed slot failed."""
        self._empty(slot)
        slot.is_loading = False
        self.changed.notify_all()

    def _empty(self, slot: Slot) -> None:
        if slot.block is not None:
            del self._holder[slot.block]
            self._held_bytes -= slot.weights.untyped_storage().nbytes()
        slot.block, slot.ready, slot.is_kept = None, None, False
