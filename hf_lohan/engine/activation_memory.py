"""The memory for swapped activations: a share of `cpu_memory`, and room on the SSD once it is known how much."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from hf_lohan.activations import LayerTrace
from hf_lohan.activations.swapper import SPILL_BLOCK, SPILL_KIND
from hf_lohan.activations.tiers import ActivationTiers, Sizes, placed_bytes, swap_everything
from hf_lohan.config import Activations
from hf_lohan.device import BufferPool
from hf_lohan.engine.tiers import Tiers
from hf_lohan.files import CapacityError
from hf_lohan.planner import ActivationPlacements
from hf_lohan.planning import OffloadLayout, PlannedStep
from hf_lohan.planning.layout import NUM_ACTIVATION_STAGING_BUFFERS
from hf_lohan.store import GRANULE_NUMEL, RECORD_ALIGN_NUMEL, RecordSpec
from hf_lohan.wording import format_bytes

logger = logging.getLogger(__name__)

_HEADROOM = 1.25
"""Batches differ in length: room for somewhat more than the first one left."""
SPILL_NAME = "activations"


class ActivationMemory:
    """Decides where activations go, and takes the memory for it once.

    Planned before the first layer runs, where a plan is to be had. Else the first step is watched, with everything
    recomputed, and decided after it.
    """

    def __init__(
        self,
        activations: ActivationTiers,
        mode: Activations,
        tiers: Tiers,
        layout: OffloadLayout,
    ) -> None:
        self._activations = activations
        self._mode = mode
        self._tiers = tiers
        self._layout = layout
        self.num_together = 1
        """The most micro-batches of a step that left what they leave before any of them had its backward."""
        self.trace: Mapping[str, LayerTrace] = activations.watch() if mode != "keep" else {}
        """What the layers of the first step were seen to do."""
        self.sizes: Sizes = {}
        """Bytes of all that one micro-batch could put away, once that is known."""
        self._staging: BufferPool | None = None

    def follow(self, planned: PlannedStep) -> None:
        """From the next layer on. Where activations are kept, or all recomputed, there is nothing to follow."""
        self._activations.end_watching()
        self.sizes = planned.activation_bytes
        if self._mode in ("auto", "swap"):
            self.place(planned.plan.activations)

    def run_together(self, num_micro_batches: int) -> bool:
        """So many micro-batches come, all forwards before the first backward. Returns whether they are more than ever;
        what was decided for fewer is decided anew: a step at an epoch's end may have been the first."""
        if num_micro_batches <= self.num_together:
            return False
        self.num_together = num_micro_batches
        if self.trace and not self._activations.is_watching:
            self._swap_what_was_seen()
        return True

    def begin_step(self) -> None:
        """The first forward after a step begins. If that step was watched: decide."""
        if self._end_watching():
            self._swap_what_was_seen()

    def _end_watching(self) -> bool:
        """Whether a whole step was watched until now. What had no backward does not count."""
        if not self._activations.is_watching or not any(layer.recomputed for layer in self.trace.values()):
            return False
        self._activations.end_watching()
        self.sizes = {name: layer.sizes() for name, layer in self.trace.items()}
        return True

    def _swap_what_was_seen(self) -> None:
        if self._mode == "swap":
            self.place(swap_everything(self.sizes, self._layout.activation_ram_bytes // self.num_together))

    def place(self, placements: ActivationPlacements) -> None:
        """Follow `placements` from now on. The first that need memory take it, for all that come later."""
        self._end_watching()
        ram_bytes, ssd_bytes = (self.num_together * num_bytes for num_bytes in placed_bytes(self.sizes, placements))
        all_bytes = self.num_together * sum(sum(sizes.values()) for sizes in self.sizes.values())
        swapper = self._activations.swapper
        if (ram_bytes or ssd_bytes) and not swapper.ram_bytes:
            swapper.take_ram(min(self._layout.activation_ram_bytes, int(all_bytes * _HEADROOM)))
        if ssd_bytes and not swapper.ssd_bytes:
            self._take_ssd(int(all_bytes * _HEADROOM))
        self._activations.follow(placements)
        logger.info(
            "of %s that the layers leave for backward, %s are swapped to RAM and %s to the SSD",
            format_bytes(all_bytes),
            format_bytes(ram_bytes),
            format_bytes(ssd_bytes),
        )

    def _take_ssd(self, num_bytes: int) -> None:
        if self._layout.activation_staging_bytes < GRANULE_NUMEL:
            logger.warning("cpu_memory leaves no buffers for activations on their way to the SSD: they are recomputed")
            return
        unit = max(GRANULE_NUMEL, RECORD_ALIGN_NUMEL)
        # A tensor's last granule may be short.
        num_tensors = self.num_together * sum(map(len, self.sizes.values()))
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
            num_buffers=NUM_ACTIVATION_STAGING_BUFFERS,
            buffer_bytes=self._layout.activation_staging_bytes,
        )
        self._activations.swapper.take_ssd(files, self._staging, numel)

