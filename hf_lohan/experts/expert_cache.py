"""A cache of experts in RAM for generation, in addition to the slots on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from torch import Tensor

from hf_lohan.device import Device, Event, Lane
from hf_lohan.experts.cache_policies import CachePolicy
from hf_lohan.model import Block
from hf_lohan.updates import OnDelivered
from hf_lohan.weights import LocalWeights, Slot


@dataclass(eq=False)
class _Entry:
    """Memory for one expert."""

    memory: Tensor
    version: int = 0
    """Version of the block in `memory`."""
    copied: Event | None = None
    """Event after the last copy from `memory`."""


class ExpertCache:
    """A `WeightSource` whose policy decides which experts have a copy in RAM. A cached expert is copied to its slot.
    Any other expert is read to its slot, through the cache if the policy keeps it.

    The policy counts loads, because an expert that stays in a slot needs no copy in RAM. One thread loads. Other
    threads may call `has` and `end_pass`.
    """

    def __init__(
        self,
        device: Device,
        source: LocalWeights,
        policy: CachePolicy[Block],
        entry_bytes: int,
        version_of: Callable[[Block], int],
    ) -> None:
        """Allocate `policy.capacity` entries of ``entry_bytes``, which is a multiple of the page size and not less than
        the size of the largest expert. ``version_of`` is `SlotRing.version_of`."""
        self._device = device
        self._source = source
        self._policy = policy
        self._version_of = version_of
        self._free = [_Entry(part) for part in device.host_empty(policy.capacity * entry_bytes).split(entry_bytes)]
        self._entries: dict[Block, _Entry] = {}
        # Guards the policy and the entries. No thread waits while it holds the lock.
        self._lock = Lock()

    def has(self, block: Block) -> bool:
        """Return whether the block's current weights are in the cache."""
        with self._lock:
            entry = self._entries.get(block)
            return entry is not None and entry.version == self._version_of(block)

    def end_pass(self) -> None:
        """End a pass, after all layers have run."""
        with self._lock:
            self._policy.end_pass()

    def finish_loads(self) -> None:
        self._source.finish_loads()

    def begin_load(self, block: Block, slot: Slot, on_delivered: OnDelivered) -> None:
        """Begin a load. A block whose updates are still being written does not go through the cache."""
        delivery = self._source.deliver(block, slot)
        if list(delivery.ranges_to_read()) != [(0, block.numel)]:
            with self._lock:
                self._forget(block)
            self._source.begin_rest(block, slot, delivery, on_delivered)
            return
        entry, is_hit = self._use(block)
        if entry is None:
            self._source.begin_rest(block, slot, delivery, on_delivered)
            return
        memory = entry.memory.view(block.master.working_dtype)[: block.numel]
        try:
            if is_hit:
                self._device.copy(Lane.H2D, slot.weights[: block.numel], memory)
            else:
                if entry.copied is not None:
                    entry.copied.synchronize()
                self._source.read_through(block, slot, memory)
        except BaseException:
            with self._lock:
                self._forget(block)
            raise
        finally:
            entry.copied = self._device.record(Lane.H2D)
        delivery.call_at_end(on_delivered)

    def _use(self, block: Block) -> tuple[_Entry | None, bool]:
        """Return the block's entry, which may be new or None, and whether the entry has the block's weights."""
        version = self._version_of(block)
        with self._lock:
            entry = self._entries.get(block)
            if entry is not None and entry.version != version:
                self._forget(block)
            use = self._policy.use(block)
            if use.is_hit:
                return self._entries[block], True
            if use.victim is not None:
                self._free.append(self._entries.pop(use.victim))
            if not use.is_kept:
                return None, False
            entry = self._entries[block] = self._free.pop()
            entry.version = version
            return entry, False

    def _forget(self, block: Block) -> None:
        entry = self._entries.pop(block, None)
        if entry is not None:
            self._policy.remove(block)
            self._free.append(entry)
