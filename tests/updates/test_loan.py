"""Updates in backward borrow a block's weights from the slot that backward uses."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
from async_device import AsyncDevice
from engines import EngineFactory, TwinsFactory
from paced_device import PacedDevice, SteppedClock
from torch import Tensor

from hf_lohan.costs import SizeClass
from hf_lohan.device import Lane
from hf_lohan.store import RecordRead
from hf_lohan.testing.models import tiny_model
from hf_lohan.updates.handover import BorrowedSlot


class Lender:
    def __init__(self) -> None:
        self.num_returns = 0

    def take_back(self) -> None:
        self.num_returns += 1


def test_a_slot_is_given_back_when_the_read_has_arrived() -> None:
    device, lender = AsyncDevice(max_delay_s=5e-3), Lender()
    weights = device.empty(32).view(torch.float32)
    weights.copy_(torch.arange(8.0))
    borrowed = BorrowedSlot(device, weights, lender.take_back)
    out = torch.empty(4)
    read = borrowed.start_read(2, out)
    borrowed.give_back()  # the slot is given back when the read arrives
    assert lender.num_returns == 0
    read.wait_for_bytes()
    assert lender.num_returns == 1 and torch.equal(out, torch.arange(2.0, 6.0))
    assert read.is_verified
    read.wait()
    assert lender.num_returns == 1


def test_a_read_from_a_slot_does_not_wait_for_later_gradients() -> None:
    device = PacedDevice(link_bytes_per_s=1e3, flops_per_s=1.0, clock=SteppedClock())
    began_s = device.clock.now_s()
    device.take_flops(100.0)
    device.wait(Lane.D2H, device.record(Lane.COMPUTE))
    device.copy(Lane.D2H, torch.empty(4), torch.ones(4))
    BorrowedSlot(device, torch.zeros(4), lambda: None).start_read(0, torch.empty(4)).wait_for_bytes()
    assert device.clock.now_s() - began_s == pytest.approx(16 / 1e3)


@pytest.mark.parametrize(("prefetch_blocks", "lends"), [(2, True), (1, False)])
def test_borrowed_weights_are_not_read_from_the_store(
    prefetch_blocks: int, lends: bool, make_twins: TwinsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three layer slots one can be lent. If a pool has two, compute needs both."""
    twins = make_twins(
        model_factory=lambda: tiny_model("llama", num_layers=4).train(),
        hold_gradients=False,
        prefetch_blocks=prefetch_blocks,
        _resident_records="none",
    )
    twins.train(1)
    reads: Counter[str] = Counter()
    store = twins.engine.tiers.store
    store_read = store.read

    def read(block: str, kind: str, start_numel: int, out: Tensor, *, is_urgent: bool = False) -> RecordRead:
        if threading.current_thread().name == "lohan-gradients" and ".layers." in block:
            reads[kind] += 1
        return store_read(block, kind, start_numel, out, is_urgent=is_urgent)

    monkeypatch.setattr(store, "read", read)
    twins.train(1)
    twins.engine.wait_for_updates()
    if lends:
        assert reads["param"] < reads["exp_avg"]
    else:
        assert reads["param"] == reads["exp_avg"]
    twins.assert_equal()


def test_a_borrowed_slot_is_not_overwritten_and_one_is_lent_at_a_time(build_engine: EngineFactory) -> None:
    engine = build_engine(tiny_model("llama", num_layers=5).train(), prefetch_blocks=2)
    ring, prefetcher = engine._ring, engine._prefetcher
    layers = [block for block in engine.layout.blocks if block.size_class is SizeClass.LAYER]
    prefetcher.begin_pass(is_training=False)
    assert ring.borrow_slot(layers[0]) is None  # compute does not use it
    slot = prefetcher.acquire(layers[0])
    borrowed = ring.borrow_slot(layers[0])
    assert borrowed is not None and ring.borrow_slot(layers[0]) is not None
    ring.unpin(layers[0])
    prefetcher.acquire(layers[1])
    assert ring.borrow_slot(layers[1]) is None
    with ring.lock:
        assert not slot.is_claimable
    borrowed.give_back()
    with ring.lock:
        assert not slot.is_claimable  # it was borrowed twice
