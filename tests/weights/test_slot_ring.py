"""Parameters are views into slots or placeholders, and slots in use are never overwritten."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from slot_plans import plan_of_slots
from torch import nn

from hf_lohan.compat.torch_private import without_torch_function
from hf_lohan.costs import SizeClass
from hf_lohan.device import CpuDevice, Event, Lane
from hf_lohan.model import Block, lay_out_block
from hf_lohan.store import RECORD_ALIGN_NUMEL
from hf_lohan.weights import SlotRing

SLOT_BYTES = 2 * RECORD_ALIGN_NUMEL * 4
DEVICE = CpuDevice()


def layer(name: str, *shapes: tuple[int, ...]) -> Block:
    return lay_out_block(
        name, SizeClass.LAYER, {f"{name}.{i}": nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(shapes)}
    )


@pytest.fixture
def ring() -> SlotRing:
    """A ring with two layer slots."""
    plan = plan_of_slots({SizeClass.LAYER: 2}, {SizeClass.LAYER: SLOT_BYTES}, chunk_numel=RECORD_ALIGN_NUMEL)
    return SlotRing(DEVICE, plan)


def load(ring: SlotRing, block: Block, value: float) -> None:
    """Load a block into an empty slot, as the loader's thread does."""
    with ring.lock:
        slot = next(slot for slot in ring.slots[SizeClass.LAYER] if slot.block is None)
        ring.claim(slot, block)
        slot.weights.fill_(value)
        ring.publish(slot, DEVICE.record(Lane.H2D))


def pin(ring: SlotRing, block: Block) -> None:
    with ring.lock:
        assert ring.pin(block) is not None


def test_a_shown_parameter_is_a_view_into_its_slot(ring: SlotRing) -> None:
    block = layer("a", (3, 5), (7,))
    load(ring, block, 2.0)
    pin(ring, block)
    ring.show(block)
    weights = ring.slot_of(block).weights
    for part in block.slices:
        assert part.parameter.shape == part.shape
        assert bool((part.parameter == 2.0).all())
        assert ring.block_behind(part.parameter.data) is block
        assert ring.block_behind(part.parameter.data.flatten()[2:]) is block
        weights[part.start] = 9.0
        assert part.parameter.flatten()[0] == 9.0
    assert ring.block_behind(torch.zeros(3)) is None


def test_a_hidden_parameter_keeps_its_shape_and_reads_as_nan(ring: SlotRing) -> None:
    block = layer("a", (3, 5), (7,))
    load(ring, block, 2.0)
    pin(ring, block)
    ring.show(block)
    ring.hide(block)
    for part in block.slices:
        data = part.parameter.data
        assert (data.shape, data.dtype) == (part.shape, torch.float32)
        with pytest.raises(RuntimeError, match="offloaded model that no longer exists"):
            data.isnan()
        with without_torch_function():
            assert bool(data.isnan().all())
            assert data.untyped_storage().nbytes() == 4
            assert ring.block_behind(data) is None


def test_pinned_slots_are_not_claimable_until_the_last_unpin(ring: SlotRing) -> None:
    first, second = layer("a", (4,)), layer("b", (4,))
    load(ring, first, 1.0)
    load(ring, second, 2.0)
    pin(ring, first)
    pin(ring, first)
    ring.unpin(first)
    assert not ring.slot_of(first).is_claimable
    assert ring.slot_of(second).is_claimable
    ring.unpin(first)
    assert ring.slot_of(first).is_claimable
    assert ring.slot_of(first).last_use is not None  # the next copy into the slot must wait for this event
    with pytest.raises(AssertionError, match="unpinned more often"):
        ring.unpin(first)


def test_a_released_block_stays_until_its_slot_is_claimed(ring: SlotRing) -> None:
    first, second = layer("a", (4,)), layer("b", (4,))
    load(ring, first, 1.0)
    pin(ring, first)
    ring.unpin(first)
    assert ring.is_here(first)
    with ring.lock:
        ring.claim(ring.slot_of(first), second)
        assert not ring.is_here(first)
        assert ring.pin(first) is None


def test_a_slot_that_is_being_loaded_is_not_claimable(ring: SlotRing) -> None:
    block = layer("a", (4,))
    with ring.lock:
        slot = ring.slots[SizeClass.LAYER][0]
        ring.claim(slot, block)
        assert not slot.is_claimable
        assert ring.is_here(block)  # the block counts as here, and its users wait for the load
        ring.abandon(slot)
        assert slot.is_claimable
        assert not ring.is_here(block)


def test_a_slot_of_a_block_forgotten_during_its_load_is_claimable_after_the_load(ring: SlotRing) -> None:
    first = layer("a", (4,))
    with ring.lock:
        slot = ring.slots[SizeClass.LAYER][0]
        ring.claim(slot, first)
    ring.forget([first])
    with ring.lock:
        assert not ring.is_here(first) and not slot.is_claimable
        ring.publish(slot, DEVICE.record(Lane.H2D))
        assert slot.is_claimable and not ring.is_here(first)
        assert slot.ready is None  # the slot is empty


def test_stale_blocks_are_forgotten_unless_they_are_pinned(ring: SlotRing) -> None:
    first, second = layer("a", (4,)), layer("b", (4,))
    load(ring, first, 1.0)
    pin(ring, first)
    with pytest.raises(AssertionError, match="stale while it was in use"):
        ring.forget([first])
    ring.unpin(first)
    ring.forget([first, second])
    assert not ring.is_here(first)


def test_a_change_that_an_exception_ended_is_unknown_until_it_is_counted(ring: SlotRing) -> None:
    """Other ranks get no weights that may be of either side of the change."""
    block, other = layer("a", (4, 4)), layer("b", (4, 4))
    with pytest.raises(KeyboardInterrupt), ring.changing():
        raise KeyboardInterrupt
    assert ring.is_half_changed
    assert not ring.is_unchanged_since(block, 0)
    ring.end_step([block])
    assert not ring.is_half_changed and ring.num_changes == 1
    assert not ring.is_unchanged_since(block, 0)
    assert ring.is_unchanged_since(block, 1) and ring.is_unchanged_since(other, 0)
    with pytest.raises(KeyboardInterrupt), ring.changing():
        ring.end_step([block])
        raise KeyboardInterrupt
    assert ring.is_unchanged_since(block, 2), "the change is counted already"


def test_unpin_all_releases_every_pin(ring: SlotRing) -> None:
    first, second = layer("a", (4,)), layer("b", (4,))
    for block in (first, second):
        load(ring, block, 1.0)
        pin(ring, block)
    pin(ring, second)
    ring.unpin_all()
    assert all(slot.is_claimable for slot in ring.slots[SizeClass.LAYER])
    assert all(slot.last_use is not None for slot in ring.slots[SizeClass.LAYER])


def test_the_high_water_mark_counts_filled_slots(ring: SlotRing) -> None:
    assert ring.high_water_bytes == 0
    first, second, third = (layer(name, (4,)) for name in "abc")
    load(ring, first, 1.0)
    assert ring.high_water_bytes == SLOT_BYTES
    load(ring, second, 1.0)
    ring.forget([first, second])
    load(ring, third, 1.0)
    assert ring.high_water_bytes == 2 * SLOT_BYTES


def test_unpinning_records_the_end_of_the_read(ring: SlotRing, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[tuple[Lane, int]] = []
    record = DEVICE.record

    def noted(lane: Lane, *, reads: Sequence[torch.Tensor]) -> Event:
        recorded.extend((lane, tensor.data_ptr()) for tensor in reads)
        return record(lane, reads=reads)

    block = layer("a", (4,))
    load(ring, block, 1.0)
    pin(ring, block)
    monkeypatch.setattr(DEVICE, "record", noted)
    ring.unpin(block)
    assert recorded == [(Lane.COMPUTE, ring.slot_of(block).weights.data_ptr())]
