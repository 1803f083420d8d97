"""Experts in slots of a real ring, which the loader's thread loads from a source that counts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from slot_plans import plan_of_slots
from torch import nn

from hf_lohan.costs import SizeClass
from hf_lohan.device import CpuDevice
from hf_lohan.experts.expert_loader import ExpertLoader
from hf_lohan.experts.expert_schedule import Call
from hf_lohan.model import Block, lay_out_block
from hf_lohan.updates import OnDelivered
from hf_lohan.weights import Slot, SlotRing

NUMEL = 512


@dataclass
class CountingSource:
    """Fills slots with the block's number after `delay_s`, and counts loads."""

    delay_s: Callable[[], float] = lambda: 0.0
    loads: list[str] = field(default_factory=list)
    fails: Callable[[Block], bool] = lambda block: False

    def begin_load(self, block: Block, slot: Slot, on_delivered: OnDelivered) -> None:
        self.loads.append(block.name)
        slot.weights.fill_(float("nan"))
        delay_s = self.delay_s()
        if delay_s:
            time.sleep(delay_s)
        if self.fails(block):
            raise OSError(f"{block.name} cannot be read")
        slot.weights.fill_(number_of(block))
        on_delivered(None)

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
        expert_bytes = 4 * self.layers[0][0].numel
        plan = plan_of_slots({SizeClass.EXPERT: num_slots}, {SizeClass.EXPERT: expert_bytes}, chunk_numel=NUMEL)
        self.ring = SlotRing(CpuDevice(), plan)
        self.source = source or CountingSource()
        self.loader = ExpertLoader(self.ring, self.source, self.layers)

    def call(self, layer: int, experts: Sequence[int], call: Call = Call.FORWARD, *, at_once: int = 1) -> list[str]:
        """Acquire the experts of an operation as they arrive, with `at_once` of them pinned. Return their order. Raises
        AssertionError if an expert has the weights of another.
        """
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
        """Wait until the loader's thread has nothing to do."""
        for _ in range(2000):
            with self.ring.lock:
                loading = any(slot.is_loading for slot in self.ring.slots[SizeClass.EXPERT])
                if not loading and self.loader.find_load() is None:
                    return
            time.sleep(0.005)
        raise AssertionError("the thread still loads after 10 s")


def _block(name: str) -> Block:
    return lay_out_block(name, SizeClass.EXPERT, {name: nn.Parameter(torch.zeros(NUMEL))})
