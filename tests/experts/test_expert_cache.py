"""The cache of experts in RAM hits when its policy says so, reads only misses, and never gives stale weights."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from async_device import AsyncDevice
from torch import Tensor, nn

from hf_lohan.costs import SizeClass
from hf_lohan.device import BufferPool, Event, Lane
from hf_lohan.experts.cache_policies import CachePolicy
from hf_lohan.experts.expert_cache import ExpertCache
from hf_lohan.files import SECTOR_BYTES
from hf_lohan.model import Block, lay_out_block
from hf_lohan.store import RecordRead
from hf_lohan.updates import Delivery
from hf_lohan.weights import LocalWeights, Slot

NUM_EXPERTS, NUMEL, CAPACITY, PASS_LENGTH = 12, 3 * 4096, 4, 10


class Cached:
    """Blocks e0, e1, ... with the stored values, and a cache on a device that runs copies late."""

    def __init__(self, policy: Any) -> None:
        self.device = AsyncDevice(0, max_delay_s=2e-4)
        self.blocks = [
            lay_out_block(f"e{i}", SizeClass.EXPERT, {f"p{i}": nn.Parameter(torch.zeros(NUMEL))})
            for i in range(NUM_EXPERTS)
        ]
        self.stored = {block.name: float(i) for i, block in enumerate(self.blocks)}
        self.version: Counter[Block] = Counter()
        self.read_bytes = 0
        self.fails = False
        staging = BufferPool(self.device, name="staging", num_buffers=2, buffer_bytes=4 * 4096)
        source = LocalWeights(self.device, self, staging, self._deliver)
        self.cache = ExpertCache(self.device, source, policy, 4 * NUMEL, lambda block: self.version[block])
        self.slots = [Slot(self.device.empty(4 * NUMEL).view(torch.float32), SizeClass.EXPERT) for _ in range(2)]
        self._num_loads = 0

    def _deliver(self, block: Block, weights: Tensor, free: Event | None) -> Delivery:
        if free is not None:
            self.device.wait(Lane.H2D, free)
        return Delivery(weights)

    def read(self, block: str, kind: str, start_numel: int, out: Tensor, *, is_urgent: bool = False) -> RecordRead:
        """Read like a store."""
        assert kind == "param" and not out.data_ptr() % SECTOR_BYTES
        if self.fails and start_numel:
            raise OSError("the drive is gone")
        out.fill_(self.stored[block])
        self.read_bytes += out.nbytes
        return RecordRead.of_memory()

    def load(self, block: Block, slot: Slot) -> None:
        """Load a block. Raises the error of a failed load."""
        errors: list[BaseException | None] = []
        self.cache.begin_load(block, slot, errors.append)
        self.cache.finish_loads()
        if errors[0] is not None:
            raise errors[0]

    def use(self, number: int) -> bool:
        """Load the block, check its weights one load later, and return whether nothing was read."""
        block, slot, before = self.blocks[number], self.slots[self._num_loads % 2], self.read_bytes
        self._num_loads += 1
        was_here = self.cache.has(block)
        self.load(block, slot)
        self.device.record(Lane.H2D).synchronize()
        assert bool((slot.weights == self.stored[block.name]).all())
        slot.last_use = self.device.record(Lane.COMPUTE, reads=[slot.weights])
        assert was_here == (self.read_bytes == before)
        return was_here


def skewed(num_uses: int) -> list[int]:
    """Return random experts of a router that prefers the first ones."""
    weights = 1 / torch.arange(1, NUM_EXPERTS + 1, dtype=torch.float64) ** 1.3
    return torch.multinomial(weights, num_uses, True, generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("name", ["auto", "lru"])
def test_the_cache_hits_as_its_policy_says_and_reads_the_rest(name: Any) -> None:
    cached, pure = Cached(CachePolicy(CAPACITY, name)), CachePolicy(CAPACITY, name)
    uses = skewed(300)
    num_hits = 0
    for time, number in enumerate(uses):
        expected = pure.use(number).is_hit
        assert cached.use(number) == expected
        num_hits += expected
        if time % PASS_LENGTH == PASS_LENGTH - 1:
            cached.cache.end_pass()
            pure.end_pass()
    assert num_hits > len(uses) * CAPACITY / NUM_EXPERTS  # more than experts in random order would have
    assert cached.read_bytes == (len(uses) - num_hits) * 4 * NUMEL
    assert cached.device.num_races == 0


def test_memory_is_not_reused_before_a_late_copy_ends() -> None:
    cached = Cached(CachePolicy(1, "lru"))
    cached.device._max_delay_s = 2e-2
    first, second = cached.slots
    cached.load(cached.blocks[1], first)
    cached.load(cached.blocks[2], second)  # into the same memory
    cached.device.record(Lane.H2D).synchronize()
    assert bool((first.weights == 1.0).all()) and bool((second.weights == 2.0).all())


def test_changed_weights_are_read_again() -> None:
    cached = Cached(CachePolicy(CAPACITY, "lru"))
    assert not cached.use(3) and cached.use(3)
    cached.stored["e3"] = 77.0
    cached.version[cached.blocks[3]] += 1
    assert not cached.use(3) and cached.use(3)  # this checks the values


def test_a_failed_read_leaves_nothing_in_the_cache() -> None:
    cached = Cached(CachePolicy(1, "lru"))
    assert not cached.use(3)
    cached.fails = True
    with pytest.raises(OSError, match="the drive is gone"):
        cached.use(4)
    cached.fails = False
    assert not cached.cache.has(cached.blocks[4])
    assert not cached.use(4) and cached.use(4)
