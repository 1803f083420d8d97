"""Loads experts one by one, on a separate thread from the loader of layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from hf_lohan.device import Event, Lane
from hf_lohan.experts.expert_schedule import Call, ExpertSchedule
from hf_lohan.experts.next_expert import ExpertFigures, NextExpert
from hf_lohan.experts.routing import RoutedRows
from hf_lohan.model import Block
from hf_lohan.ranks import Ranks
from hf_lohan.timeline import COMPUTE_WAITS
from hf_lohan.weights import BlockLoader, Slot, SlotRing, WeightSource


class ExpertLoader(BlockLoader):
    """Loads experts to slots of the class EXPERT, in the order of an `ExpertSchedule`, on its own thread.

    Several blocks may be in use at once. A caller that pins all slots must not acquire another block.
    """

    def __init__(
        self,
        ring: SlotRing,
        source: WeightSource,
        layers: Sequence[Sequence[Block]],
        is_in_ram: Callable[[Block], bool] = lambda block: False,
        on_pass_end: Callable[[], None] = lambda: None,
        *,
        own: Callable[[Block], bool] = lambda block: True,
    ) -> None:
        """``layers`` are the experts of each layer, in forward order. Only the loading thread uses ``source``.
        ``is_in_ram`` returns whether a block has a copy in RAM, for the figures. The computing thread calls
        ``on_pass_end``. ``own`` returns whether this process loads the block. The number of an expert is its index
        among the experts of the layer that this process loads."""
        self._on_pass_end = on_pass_end
        self._first_experts = [experts[0] for experts in layers]
        self._experts = ExpertSchedule([list(filter(own, experts)) for experts in layers])
        self._next_expert = NextExpert(self._experts, ring, is_in_ram)
        super().__init__(
            ring, source, self._experts, self._next_expert, overlaps_loads=True, thread_name="lohan-experts"
        )
        self._arrived: deque[Block] = deque()
        """Loaded blocks that the running call has not used yet, in the order of arrival."""
        self._lane_name = ""
        self._num_tokens = [[0] * len(experts) for experts in layers]
        self._rows_before: RoutedRows | None = None
        self._start()

    @property
    def figures(self) -> ExpertFigures:
        """A copy of the figures so far."""
        with self._ring.lock:
            return replace(self._next_expert.figures)

    # For the computing thread.

    def end_pass(self) -> None:
        super().end_pass()
        self._on_pass_end()

    @contextmanager
    def together(self, num_micro_batches: int) -> Iterator[None]:
        """Expect this many micro-batches together in each layer, in training passes that begin within this context."""
        with self._ring.lock:
            self._experts.expect_together(num_micro_batches)
        try:
            yield
        finally:
            with self._ring.lock:
                self._experts.expect_together(1)

    def route(self, layer: int, experts: Sequence[int] | None, *, num_rows: int, call: Call) -> None:
        """Begin a call of the layer's experts (`ExpertSchedule.route`). `acquire_any` then returns them one by one."""
        with self._ring.lock:
            self._experts.route(layer, experts, num_rows=num_rows, call=call)
            needed = self._experts.left
            self._next_expert.begin_call(layer, needed)
            here = (block for block in needed if self._ring.is_here(block))
            self._arrived = deque(block for block in here if self._ring.slot_of(block).ready is not None)
            self._lane_name = self._first_experts[layer].name
            self._ring.changed.notify_all()

    def note_tokens(self, layer: int, experts: Sequence[int], num_tokens: Sequence[int]) -> None:
        """Record how many of this process's tokens a forward of the layer sent to each of ``experts``, which are
        indices among all experts of the layer."""
        for expert, number in zip(experts, num_tokens, strict=True):
            self._num_tokens[layer][expert] += number

    def routing(self) -> list[tuple[Block, list[int]]]:
        """Return each layer's first expert, and the number of tokens of each expert so far."""
        return [(first, list(of)) for first, of in zip(self._first_experts, self._num_tokens, strict=True)]

    def routed_rows(self, ranks: Ranks) -> RoutedRows:
        """Return the number of rows of each expert in all forwards of this run and of the run that it continues."""
        counts = {first.name.rpartition(".")[0]: list(of) for first, of in self.routing()}
        before = self._rows_before.layers if self._rows_before is not None else {}
        return RoutedRows(ranks.rank, ranks.num_nodes, before).plus(counts)

    def continue_rows(self, before: RoutedRows | None) -> None:
        """Continue the counts of the commit from which the run continues. Counts of later steps are dropped."""
        self._num_tokens = [[0] * len(of) for of in self._num_tokens]
        self._rows_before = before

    def hint(self, layer: int, experts: Sequence[int]) -> None:
        """Predict the layer's experts (`ExpertSchedule.hint`). A wrong prediction causes only needless loads."""
        with self._ring.lock:
            self._experts.hint(layer, experts)
            self._next_expert.note_layer(layer)
            self._ring.changed.notify_all()

    def acquire_arrived(self, *, but: Collection[Block]) -> tuple[Block, Slot] | None:
        """Pin an expert as `acquire_any` does, if an expert outside ``but`` is present. Does not wait."""
        with self._ring.lock:
            self._raise_failure()
            block = next((block for block in self._arrived if block not in but and self._is_wanted(block)), None)
            if block is None:
                return None
            self._arrived.remove(block)
            self._experts.use(block)
            slot, ready = self._pin(block)
        self._ring.device.wait(Lane.COMPUTE, ready)
        return block, slot

    def acquire_any(self) -> tuple[Block, Slot]:
        """Pin an expert that the running call has not used yet: the first that is present, or else the next to arrive.
        Compute enqueued from now on may use the slot. Each expert is returned once. `SlotRing.unpin` releases it."""
        device = self._ring.device
        with device.timeline.task(COMPUTE_WAITS, "weights", block=self._lane_name), self._ring.lock:
            self._ring.changed.wait_for(lambda: self._has_arrived() or self._is_broken)
            self._raise_failure()
            block = self._arrived.popleft()
            self._experts.use(block)
            slot, ready = self._pin(block)
        device.wait(Lane.COMPUTE, ready)
        return block, slot

    def _has_arrived(self) -> bool:
        while self._arrived and not self._is_wanted(self._arrived[0]):
            self._arrived.popleft()  # an urgent load has overwritten it, so it is loaded again
        return bool(self._arrived)

    def _is_wanted(self, block: Block) -> bool:
        return self._ring.is_here(block) and self._experts.is_left(block)

    def _pin(self, block: Block) -> tuple[Slot, Event]:
        slot, ready = super()._pin(block)
        self._next_expert.note_use(slot)
        return slot, ready

    def _note_arrival(self, block: Block) -> None:
        if self._experts.is_left(block):
            self._arrived.append(block)
