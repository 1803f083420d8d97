"""Device slots. Tracks which blocks are on the device and in use, and which slots may be overwritten."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_lohan.absent import AbsentParameter, MovedGradients, StandIns
from hf_lohan.compat.torch_private import StorageWeakRef, in_own_storage, storage_id, tree_map, version_of
from hf_lohan.costs import MIN_SLOTS_TO_LEND, PoolPlan, SizeClass
from hf_lohan.device import Device, Event, Lane
from hf_lohan.model import Block, ParamSlice, WrittenWeightError
from hf_lohan.updates import BorrowedSlot, WeightChange, WeightSlots

_NUM_LAST_CHANGES = 64
"""The kinds of this number of last changes of weights are kept."""


@dataclass(eq=False)
class Slot:
    """A fixed device buffer. `weights` is a flat view [numel] in the dtype of the slot's block."""

    weights: Tensor
    size_class: SizeClass
    block: Block | None = None
    ready: Event | None = None
    """Event of the arrival of `block`. None until the load of `block` is enqueued."""
    is_loading: bool = False
    """Whether a load writes to the slot. The block may have been forgotten meanwhile."""
    last_use: Event | None = None
    """Event after the last compute that reads the slot."""
    num_pins: int = 0
    borrowed: list[BorrowedSlot] = field(default_factory=list)
    """The `BorrowedSlot` of each update that borrows the slot and copies its weights."""
    is_kept: bool = False
    """Whether the block stays permanently."""
    shown: Tensor | None = None
    """`weights` as a tensor with its own storage, while the block's parameters are views of this tensor."""
    versions: dict[nn.Parameter, int] = field(default_factory=dict)  # of the parameters when they became views

    @property
    def is_claimable(self) -> bool:
        """Whether the slot may be overwritten."""
        return not (self.num_pins or self.borrowed or self.is_loading or self.is_kept)


class SlotRing(WeightSlots):
    """The slots of a device. Shows and hides the parameters of the blocks in them.

    The `data` of a present parameter is a view of a slot. The `data` of an absent parameter is a NaN that is expanded
    to its shape, so code that bypasses `AbsentParameter` never gets a wrong finite number. A released slot keeps its
    block until a load claims the slot for another block.

    The computing thread pins and releases slots. The loading thread claims and publishes them. `lock` guards both.
    `changed` is notified of every change.
    """

    def __init__(self, device: Device, plan: PoolPlan, kept: Collection[str] = ()) -> None:
        """``kept``: names of blocks that stay on the device after their first load. At least two slots of their class
        must remain for other blocks."""
        self.device = device
        self._kept = frozenset(kept)
        # Callers enter the lock itself and not the condition. `IoEngine` says why.
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
        self.high_water_bytes = 0
        """The largest number of bytes of slots that held a block at the same time."""
        self.num_forgets = 0
        """Number of times that a slot was emptied because the store had newer weights."""
        self.num_changes = 0
        """Number of calls of `end_step`."""
        self._is_changing = False
        self.is_half_changed = False
        """Whether an exception ended a change, so that the store may have both old and new weights."""
        self._changed_at: dict[Block, int] = {}
        """For each block, the value of `num_changes` after the block's last change."""
        self._last_changes: deque[WeightChange] = deque(maxlen=_NUM_LAST_CHANGES)
        self._callbacks: list[Callable[[], None]] = []

    def _all(self) -> list[Slot]:
        return [slot for slots in self.slots.values() for slot in slots]

    @property
    def num_slots(self) -> dict[SizeClass, int]:
        """Number of slots by size class."""
        return {size_class: len(slots) for size_class, slots in self.slots.items()}

    # Called by the computing thread.

    def pin(self, block: Block) -> Slot | None:
        """Prevent a block from being overwritten, and return its slot; None if the block has no slot. The caller holds
        `lock`."""
        slot = self._holder.get(block)
        if slot is not None:
            slot.num_pins += 1
        return slot

    def pin_arrived(self, block: Block) -> Slot | None:
        """Pin a block whose load is enqueued, and return its slot; None if its load is not enqueued."""
        with self.lock:
            slot = self._holder.get(block)
            return self.pin(block) if slot is not None and slot.ready is not None else None

    def borrow_slot(self, block: Block) -> BorrowedSlot | None:
        """Borrow the slot of a block that compute uses, for the optimizer. Returns None if compute needs all slots.
        Only one block is borrowed at a time, and two slots must remain."""
        slots = self.slots[block.size_class]
        with self.lock:
            slot = self._holder.get(block)
            if slot is None or not slot.num_pins or len(slots) < MIN_SLOTS_TO_LEND:
                return None
            if any(other.borrowed for other in slots if other is not slot):
                return None
            borrowed = BorrowedSlot(self.device, slot.weights[: block.numel], lambda: self._return_slot(slot, borrowed))
            slot.borrowed.append(borrowed)
            return borrowed

    def _return_slot(self, slot: Slot, borrowed: BorrowedSlot) -> None:
        with self.lock:
            slot.borrowed.remove(borrowed)
            self.changed.notify_all()

    def take_back(self, slot: Slot) -> None:
        """Take a slot back from updates that have not begun to copy it. They read the store instead."""
        with self.lock:
            borrowed = list(slot.borrowed)
        for of_update in borrowed:
            of_update.give_back()

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the thread that ends a step, without the lock."""
        self._callbacks.append(callback)

    def show(self, block: Block) -> None:
        """Make the block's parameters views of its pinned slot."""
        part = next((part for part in block.slices if not part.is_whole), None)
        assert part is None, f"{part.name} is in several blocks, so no single block can show it"
        slot = self.slot_of(block)
        if slot.shown is None:
            slot.shown = in_own_storage(slot.weights)
            slot.versions = {part.parameter: version_of(part.parameter) for part in block.slices}
        for part in block.slices:
            AbsentParameter.show(part.parameter, slot.shown[part.start : part.stop].view(part.shape))

    def hide(self, block: Block) -> bool:
        """Make the block's parameters absent, or raise WrittenWeightError if one has changed. One in several blocks is
        always absent. Returns whether other views of the shown weights exist, which may get another block's values."""
        slot = self._holder.get(block)
        written: str | None = None
        for part in block.slices:
            if not part.first:
                written = part.name if slot is not None and _has_changed(slot, part) else written
                AbsentParameter.hide(part.parameter, self.stand_ins.placeholder(block, part))
        if slot is None or slot.shown is None:
            return False
        storage = StorageWeakRef(slot.shown.untyped_storage())
        slot.shown = None
        if written is not None:
            with self.lock:
                self._empty(slot)  # the next pass loads it again
            raise WrittenWeightError(written)
        return not (storage.expired() or block.size_class is SizeClass.RESIDENT)  # a resident block has its own slot

    def has_room_for(self, block: Block) -> bool:
        """Return whether the block can be pinned while all pinned blocks stay pinned."""
        with self.lock:
            return block in self._holder or any(not slot.num_pins for slot in self.slots[block.size_class])

    def unpin(self, block: Block) -> None:
        """Unpin a block. Compute that is enqueued later must not read the block until it is pinned again."""
        with self.lock:
            slot = self.slot_of(block)
            slot.last_use = self.device.record(Lane.COMPUTE, reads=[slot.weights])
            slot.num_pins -= 1
            assert slot.num_pins >= 0, f"{block} was unpinned more often than pinned"
            self.changed.notify_all()

    def unpin_all(self) -> None:
        """Unpin all blocks, after an exception."""
        with self.lock:
            for slot in (slot for slot in self._all() if slot.num_pins):
                slot.last_use = self.device.record(Lane.COMPUTE, reads=[slot.weights])
                slot.num_pins = 0
            self.changed.notify_all()

    def num_loads(self, block: Block) -> int:
        """Return how many times the block was loaded."""
        return self._num_loads[block]

    def version_of(self, block: Block) -> int:
        """Return how many times the block was forgotten."""
        return self._num_forgotten[block]

    def slot_of(self, block: Block) -> Slot:
        return self._holder[block]

    def block_behind(self, tensor: Tensor) -> Block | None:
        """Return the block whose slot ``tensor`` is a view of. Return None if it is not a view of a slot."""
        slot = self._by_storage.get(tensor.untyped_storage().data_ptr())
        assert slot is None or slot.block is not None, "a view of an empty slot"
        return slot.block if slot is not None else None

    def copy_views(self, output: Any, blocks: Collection[Block]) -> Any:
        """Return ``output`` with copies of arrays, and of tensors that are views of these blocks' slots."""

        def copy_view(leaf: Any) -> Any:
            if isinstance(leaf, np.ndarray):
                return leaf.copy()  # the array's memory may be a slot
            if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) and self.block_behind(leaf) in blocks:
                return leaf.clone()
            return leaf

        return tree_map(copy_view, output)

    def forget(self, blocks: Iterable[Block]) -> None:
        """Empty the slots of these blocks, because the store has newer weights."""
        with self.lock:
            self.num_forgets += 1
            for block in blocks:
                self._num_forgotten[block] += 1
                slot = self._holder.get(block)
                if slot is not None:
                    assert slot.num_pins == 0, f"{block} went stale while it was in use"
                    self._empty(slot)
            self.changed.notify_all()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """See `WeightSlots.changing`."""
        self._is_changing = True
        try:
            yield
        finally:
            with self.lock:
                self.is_half_changed, self._is_changing = self._is_changing, False  # if `end_step` was not called
                self.changed.notify_all()

    def end_step(self, changed: Iterable[Block], change: WeightChange = WeightChange.STEP) -> None:
        """Forget blocks that a step has changed, or that were written between steps. All ranks call this at the same
        points of their runs, so that `num_changes` tells which weights a load needs."""
        with self.lock:
            blocks = list(changed)
            self.num_changes += 1
            self._last_changes.append(change)
            self._changed_at.update(dict.fromkeys(blocks, self.num_changes))
            self._is_changing = self.is_half_changed = False
            self.forget(blocks)
        for callback in self._callbacks:
            callback()

    def is_unchanged_since(self, block: Block, num_changes: int) -> bool:
        """Return whether the block certainly has the weights that it had when `num_changes` had this value. Waits for
        the end of a step that is ending (`changing`)."""
        with self.lock:
            self.changed.wait_for(lambda: not self._is_changing)
            return not self.is_half_changed and self._changed_at.get(block, 0) <= num_changes

    def state_of(self, block: Block) -> tuple[int, int]:
        """Return `num_changes`, and its value after the block's last change. Both are equal on all ranks at the same
        point of their runs."""
        with self.lock:
            return self.num_changes, self._changed_at.get(block, 0)

    def change_before(self, num_changes: int) -> WeightChange | None:
        """Return the change that raised `num_changes` to this number; None if it was long ago, or does not exist."""
        with self.lock:
            place = num_changes - self.num_changes - 1
            return self._last_changes[place] if -len(self._last_changes) <= place < 0 else None

    # Called by the loading thread. The caller holds `lock`.

    def is_here(self, block: Block) -> bool:
        return block in self._holder

    def claim(self, slot: Slot, block: Block) -> None:
        """Assign ``slot`` to ``block``, which is loaded next."""
        self._empty(slot)
        self._num_loads[block] += 1
        slot.block, slot.is_loading, slot.is_kept = block, True, block.name in self._kept
        slot.weights = slot.weights.view(torch.uint8).view(block.master.working_dtype)
        self._holder[block] = slot
        self._held_bytes += slot.weights.untyped_storage().nbytes()
        self.high_water_bytes = max(self.high_water_bytes, self._held_bytes)
        self.changed.notify_all()

    def publish(self, slot: Slot, ready: Event) -> None:
        """Publish a claimed slot after its load is enqueued. ``ready`` is the event of the load's end."""
        slot.is_loading = False
        if slot.block is not None:  # the block may have been forgotten meanwhile
            slot.ready = ready
        self.changed.notify_all()

    def abandon(self, slot: Slot) -> None:
        """Abandon a claimed slot after its load has failed."""
        self._empty(slot)
        slot.is_loading = False
        self.changed.notify_all()

    def _empty(self, slot: Slot) -> None:
        if slot.block is not None:
            del self._holder[slot.block]
            self._held_bytes -= slot.weights.untyped_storage().nbytes()
        slot.block, slot.ready, slot.is_kept = None, None, False


def _has_changed(slot: Slot, part: ParamSlice) -> bool:
    """Return whether a shown parameter has changed. In forwards PEFT sets those in a `base_layer` to themselves."""
    if slot.shown is None or isinstance(part.parameter, AbsentParameter) or ".base_layer." in part.name:
        return False
    if storage_id(part.parameter) == storage_id(slot.shown):
        return version_of(part.parameter) != slot.versions[part.parameter]
    return not torch.equal(part.parameter, slot.shown[part.start : part.stop].view(part.shape))
