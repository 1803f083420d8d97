"""Experts in slots of a real ring, brought by the loader's own thread from a source that counts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from hf_lohan.device import CpuDevice
from hf_lohan.experts.expert_loader import ExpertLoader
from hf_lohan.experts.expert_schedule import Call
from hf_lohan.model import Block, lay_out_block
from hf_lohan.planner import PoolPlan, SizeClass
from hf_lohan.updates import DeliveryListener
from hf_lohan.weights import Slot, SlotRing

NUMEL = 512
NO_SLOTS = dict.fromkeys(SizeClass, 0)


@dataclass
class CountingSource:
    """Fills slots with the block's number; counts loads; is as slow as it is told to be."""

    delay_s: Callable[[], float] = lambda: 0.0
    loads: list[str] = field(default_factory=list)
    fails: Callable[[Block], bool] = lambda block: False

    def begin_load(self, block: Block, slot: Slot, listener: DeliveryListener) -> None:
        self.loads.append(block.name)
        slot.weights.fill_(float("nan"))
        delay_s = self.delay_s()
        if delay_s:
            time.sleep(delay_s)
        if self.fails(block):
            raise OSError(f"{block.name} cannot be read")
        slot.weights.fill_(number_of(block))
        listener.on_delivered(None)

    def finish_loads(self) -> None:
        """All loads have ended."""

    @property
    def num_loads(self) -> Counter[str]:
        return Counter(self.loads)


def number_of(block: Block) -> float:
    layer, expert = block.name.split(".")
    return 1000.0 * int(layer) + int(expert)


class ExpertLane:
    """``num_layers`` layers of ``num_experts`` experts each."""

    def __init__(self, num_layers: int, num_experts: int, num_slots: int, source: CountingSource | None = None) -> None:
        self.layers = [[_block(f"{layer}.{e}") for e in range(num_experts)] for layer in range(num_layers)]
        plan = PoolPlan(
            chunk_numel=NUMEL,
            num_staging_buffers=0,
            num_state_buffers=0,
            num_gradient_buffers=0,
            num_arrival_buffers=0,
            gradients_per_buffer=1,
            num_recall_buffers=0,
            held_blocks=(),
            spilled_blocks=(),
            slot_bytes={**NO_SLOTS, SizeClass.EXPERT: 4 * self.layers[0][0].numel},
            num_slots={**NO_SLOTS, SizeClass.EXPERT: num_slots},
        )
        self.ring = SlotRing(CpuDevice(), plan)
        self.source = source or CountingSource()
        self.loader = ExpertLoader(self.ring, self.source, self.layers)

    def call(self, layer: int, experts: Sequence[int], call: Call = Call.FORWARD, *, at_once: int = 1) -> list[str]:
        """What an operation does: it computes with its experts as they come, ``at_once`` of them pinned at a time.
        Returns the order. Raises AssertionError where a weight is another's."""
        self.loader.route(layer, experts, num_rows=len(experts), call=call)
        order: list[str] = []
        while len(order) < len(experts):
            wave = [self.loader.acquire_any() for _ in range(min(at_once, len(experts) - len(order)))]
            for block, slot in wave:
                assert bool((slot.weights == number_of(block)).all()), f"{block.name} has weights of another"
            for block, _ in wave:
                self.ring.unpin(block)
                order.append(block.name)
        assert sorted(order) == sorted(f"{layer}.{e}" for e in experts)
        return order

    def until_idle(self) -> None:
        """Wait until the loading thread has nothing that it could do."""
        for _ in range(2000):
            with self.ring.lock:
                loading = any(slot.is_loading for slot in self.ring.slots[SizeClass.EXPERT])
                if not loading and self.loader.find_load() is None:
                    return
            time.sleep(0.005)
        raise AssertionError("it is still loading after 10 s")


def _block(name: str) -> Block:
    return lay_out_block(name, SizeClass.EXPERT, {name: nn.Parameter(torch.zeros(NUMEL))})
