"""The memory for swapped activations: a share of `cpu_memory`, and room on the SSD once it is known how much."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeAlias

from hf_lohan.activations import LayerTrace
from hf_lohan.activations.swapper import SPILL_BLOCK, SPILL_KIND
from hf_lohan.activations.tiers import ActivationTiers, placed_bytes, swap_everything
from hf_lohan.config import Activations, format_bytes
from hf_lohan.device import BufferPool
from hf_lohan.engine.tiers import Tiers
from hf_lohan.files import CapacityError
from hf_lohan.planner.placement import ActivationPlacements
from hf_lohan.store import GRANULE_NUMEL, RECORD_ALIGN_NUMEL, RecordSpec

logger = logging.getLogger(__name__)

_NUM_STAGING_BUFFERS = 4
_STAGING_SHARE = 4
"""At most one part in so many of the memory for activations is buffers on the way to the SSD."""
_HEADROOM = 1.25
"""Batches differ in length: room for somewhat more than the first one left."""
SPILL_NAME = "activations"

Plan: TypeAlias = Callable[[Mapping[str, LayerTrace]], ActivationPlacements]
"""The planner: from what the layers were seen to do to what becomes of it."""


class ActivationMemory:
    """Watches the first step, then decides where activations go and takes the memory for it, once.

    The first step recomputes everything (LoHan's profiling iteration): the real batch's shapes are known only then.
    """

    def __init__(self, activations: ActivationTiers, mode: Activations, tiers: Tiers, budget_bytes: int) -> None:
        """``budget_bytes`` of host memory may be taken."""
        self.plan: Plan | None = None
        """Asked after the first step; followed under "auto"."""
        self._trace: Mapping[str, LayerTrace] = {}
        self._activations = activations
        self.num_together = 1
        """The most micro-batches of a step that left what they leave before any of them had its backward."""
        self._mode = mode
        self._tiers = tiers
        self._budget_bytes = budget_bytes
        self._staging: BufferPool | None = None
        if mode != "keep":
            activations.trace = {}

    @property
    def ram_bytes(self) -> int:
        """What swapped activations may take of RAM, without the buffers on the way to the SSD."""
        return self._budget_bytes - _NUM_STAGING_BUFFERS * self._staging_buffer_bytes

    @property
    def _staging_buffer_bytes(self) -> int:
        share = self._budget_bytes // _STAGING_SHARE // _NUM_STAGING_BUFFERS
        return min(self._tiers.staging.buffer_bytes, share) // GRANULE_NUMEL * GRANULE_NUMEL

    @property
    def trace(self) -> Mapping[str, LayerTrace]:
        """What the first step was seen to do."""
        return self._trace or self._activations.trace or {}

    def _end_tracing(self) -> bool:
        """Whether a whole step was traced until now. What had no backward does not count."""
        trace = self._activations.trace
        if not trace or not any(layer.recomputed for layer in trace.values()):
            return False
        self._activations.trace, self._trace = None, trace
        return True

    def run_together(self, num_micro_batches: int) -> None:
        """So many micro-batches come, all forwards before the first backward. If they are more than ever, what was
        decided for fewer is decided anew: a step at an epoch's end may have been the first to be seen."""
        if num_micro_batches > self.num_together:
            self.num_together = num_micro_batches
            if self._trace:
                self._decide()

    def end_step(self) -> None:
        """Once the first step is over: decide. Before the next forward."""
        if self._end_tracing():
            self._decide()

    def _decide(self) -> None:
        planned = self.plan(self.trace) if self.plan is not None else {}
        if self._mode == "swap":
            self.place(swap_everything(self.trace, self.ram_bytes // self.num_together))
        elif self._mode == "auto":
            self.place(planned)

    def place(self, placements: ActivationPlacements) -> None:
        """Follow `placements` from the next forward on. The first that need memory take it, for all that come later."""
        self._end_tracing()
        ram_bytes, ssd_bytes = (self.num_together * num_bytes for num_bytes in placed_bytes(self.trace, placements))
        all_bytes = self.num_together * sum(sum(layer.sizes().values()) for layer in self.trace.values())
        swapper = self._activations.swapper
        if (ram_bytes or ssd_bytes) and not swapper.ram_bytes:
            swapper.take_ram(min(self.ram_bytes, int(all_bytes * _HEADROOM)))
        if ssd_bytes and not swapper.ssd_bytes:
            self._take_ssd(int(all_bytes * _HEADROOM))
        self._activations.placements = placements
        logger.info(
            "of %s that the layers leave for backward, %s are swapped to RAM and %s to the SSD",
            format_bytes(all_bytes),
            format_bytes(ram_bytes),
            format_bytes(ssd_bytes),
        )

    def _take_ssd(self, num_bytes: int) -> None:
        if self._staging_buffer_bytes < GRANULE_NUMEL:
            logger.warning("cpu_memory leaves no buffers for activations on their way to the SSD: they are recomputed")
            return
        unit = max(GRANULE_NUMEL, RECORD_ALIGN_NUMEL)
        # A tensor's last granule may be short.
        num_tensors = self.num_together * sum(1 + len(layer.operations) for layer in self.trace.values())
        numel = -(-(num_bytes + num_tensors * GRANULE_NUMEL) // unit) * unit
        record = RecordSpec(SPILL_BLOCK, SPILL_KIND, "uint8", numel)
        try:
            files = self._tiers.store.scratch([record], SPILL_NAME)
        except CapacityError as error:
            logger.warning("no room to swap activations to the SSD, so they are recomputed: %s", error)
            return
        self._staging = BufferPool(
            self._tiers.device,
            name="activation staging",
            num_buffers=_NUM_STAGING_BUFFERS,
            buffer_bytes=self._staging_buffer_bytes,
        )
        self._activations.swapper.take_ssd(files, self._staging, numel)

