"""A cache of experts in RAM for a model that generates, besides the slots on the device."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Lock

from torch import Tensor

from hf_lohan.device import Device, Event, Lane
from hf_lohan.experts.cache_policies import CachePolicy
from hf_lohan.model import Block
from hf_lohan.updates import DeliveryListener
from hf_lohan.weights import LocalWeights, Slot


@dataclass(eq=False)
class _Entry:
    """Memory for one expert."""

    memory: Tensor
    version: int = 0
    """Of the block in `memory`."""
    copied: Event | None = None
    """Reached when no copy reads `memory` any more."""


class ExpertCache:
    """A `WeightSource` whose policy decides which experts have a copy in RAM. Cached experts are copied to the slot
    from RAM, others are read: into the cache first if they are to be kept.

    For the policy, a load is a use: an expert that stays in a slot needs no copy in RAM. One thread loads; other
    threads may call `has` and `end_pass`.
    """

    def __init__(
        self,
        device: Device,
        source: LocalWeights,
        policy: CachePolicy[Hashable],
        place_bytes: int,
        version_of: Callable[[Block], int],
    ) -> None:
        """Allocates `policy.capacity` entries of ``place_bytes``, a multiple of the page size that holds the largest
        expert. ``version_of``: see `SlotRing.version_of`."""
        self._device = device
        self._source = source
        self._policy = policy
        self._version_of = version_of
        self._free = [_Entry(part) for part in device.host_empty(policy.capacity * place_bytes).split(place_bytes)]
        self._places: dict[Block, _Entry] = {}
        # Guards the policy and the entries. No thread waits while it holds the lock.
        self._lock = Lock()

    def has(self, block: Block) -> bool:
        """Whether the block's current weights are in the cache."""
        with self._lock:
            place = self._places.get(block)
            return place is not None and place.version == self._version_of(block)

    def end_pass(self) -> None:
        """All layers have run."""
        with self._lock:
            self._policy.end_pass()

    def finish_loads(self) -> None:
        self._source.finish_loads()

    def begin_load(self, block: Block, slot: Slot, listener: DeliveryListener) -> None:
        """Blocks of which updates still have a part do not go through the cache."""
        delivery = self._source.deliver(block, slot)
        if list(delivery.ranges_to_read()) != [(0, block.numel)]:
            with self._lock:
                self._forget(block)
            self._source.begin_rest(block, slot, delivery, listener)
            return
        place, is_hit = self._use(block)
        if place is None:
            self._source.begin_rest(block, slot, delivery, listener)
            return
        memory = place.memory.view(block.master.working_dtype)[: block.numel]
        try:
            if is_hit:
                self._device.copy(Lane.H2D, slot.weights[: block.numel], memory)
            else:
                if place.copied is not None:
                    place.copied.synchronize()
                self._source.read_through(block, slot, memory)
        except BaseException:
            with self._lock:
                self._forget(block)
            raise
        finally:
            place.copied = self._device.record(Lane.H2D)
        delivery.set_listener(listener)

    def _use(self, block: Block) -> tuple[_Entry | None, bool]:
        """The block's entry, if it has one or gets one, and whether the block is in it."""
        version = self._version_of(block)
        with self._lock:
            place = self._places.get(block)
            if place is not None and place.version != version:
                self._forget(block)
            use = self._policy.use(block)
            if use.is_hit:
                return self._places[block], True
            if use.victim is not None:
                assert isinstance(use.victim, Block)
                self._free.append(self._places.pop(use.victim))
            if not use.is_kept:
                return None, False
            place = self._places[block] = self._free.pop()
            place.version = version
            return place, False

    def _forget(self, block: Block) -> None:
        place = self._places.pop(block, None)
        if place is not None:
            self._policy.remove(block)
            self._free.append(place)
