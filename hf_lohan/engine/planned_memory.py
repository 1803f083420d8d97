"""Divides the RAM that a plan leaves: room for activations and gradients, and copies of records."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from hf_lohan.activations import LayerTrace
from hf_lohan.activations.swapper import SPILL_BLOCK, SPILL_KIND
from hf_lohan.activations.tiers import ActivationTiers, Sizes, placed_bytes, swap_everything
from hf_lohan.config import OffloadConfig
from hf_lohan.device import BufferPool
from hf_lohan.device.host_stack import CACHE_LINE_BYTES
from hf_lohan.engine.out_of_memory import OutOfMemoryAdvice
from hf_lohan.engine.tiers import Tiers
from hf_lohan.files import CapacityError
from hf_lohan.planner import ActivationPlacements
from hf_lohan.planning import OffloadLayout, PlannedStep, StepShape
from hf_lohan.planning.layout import NUM_ACTIVATION_STAGING_BUFFERS
from hf_lohan.store import GRANULE_NUMEL, RECORD_ALIGN_NUMEL, RecordSpec
from hf_lohan.wording import format_bytes

logger = logging.getLogger(__name__)

_HEADROOM = 1.25
"""Later batches may be longer than the first one."""
_SPILL_NAME = "activations"


class PlannedMemory:
    """Allocates the memory for activations and for copies of records, once, and decides where activations go.

    The plan is made before the first layer runs. Without a plan the first step recomputes everything and is traced, and
    the placements are chosen after it.
    """

    def __init__(
        self, activations: ActivationTiers, config: OffloadConfig, tiers: Tiers, layout: OffloadLayout
    ) -> None:
        self._activations = activations
        self._mode = mode = config.activations
        self._planned: PlannedStep | None = None
        self.last_shape: StepShape | None = None
        """Of the last training forward, if its batch had token ids."""
        self.out_of_memory = OutOfMemoryAdvice(config, lambda: (self._planned, self.last_shape))
        """For errors that are raised while a step runs."""
        self._tiers = tiers
        self.layout = layout
        """Divides the RAM as the plan does; before the plan, as it will if there is none."""
        self._has_copies = False
        self.num_together = 1
        """Largest number of micro-batches whose forwards all ran before the first backward."""
        self.trace: Mapping[str, LayerTrace] = activations.watch() if mode != "keep" else {}
        """Of the layers in the first step."""
        self.sizes: Sizes = {}
        """Bytes that one micro-batch could swap, once that is known."""
        self._staging: BufferPool | None = None

    def follow_plan(self, planned: PlannedStep) -> None:
        """Follow a plan from the next layer on."""
        self._planned = planned
        self._activations.end_watching()
        if not self._has_copies:
            self.layout = planned.layout
            self.allocate_copies()
        self.sizes = planned.activation_bytes
        if self._mode in ("auto", "swap"):
            self.set_placements(planned.plan.activations)

    def allocate_copies(self) -> None:
        """Allocate the memory for copies of records, unless it is allocated: with the plan, or when the model is used
        without one."""
        if self._has_copies:
            return
        self._has_copies = True
        names = [(record.block, record.kind) for record in self.layout.resident_records]
        self._tiers.store.keep_copies(names, self._tiers.device.host_empty)
        if names:
            logger.info("copies of records take %s of RAM", format_bytes(self.layout.resident_bytes))

    def expect_micro_batches(self, num_together: int) -> bool:
        """The forwards of so many micro-batches will run before the first backward. Returns whether these are more than
        ever before. Placements are then chosen again: the first step may have been the short one of an epoch's end."""
        if num_together <= self.num_together:
            return False
        self.num_together = num_together
        if self.trace and not self._activations.is_watching:
            self._swap_traced_layers()
        return True

    def begin_step(self) -> None:
        """The first forward after a step begins. If that step was traced, choose the placements."""
        if self._end_watching():
            self._swap_traced_layers()

    def _end_watching(self) -> bool:
        """Returns whether a whole step was traced. A forward without a backward does not count."""
        if not self._activations.is_watching or not any(layer.recomputed for layer in self.trace.values()):
            return False
        self._activations.end_watching()
        self.sizes = {name: layer.sizes() for name, layer in self.trace.items()}
        return True

    def _swap_traced_layers(self) -> None:
        if self._mode == "swap":
            self.set_placements(swap_everything(self.sizes, self.layout.activation_ram_bytes // self.num_together))

    def set_placements(self, placements: ActivationPlacements) -> None:
        """Follow `placements` from now on. The first ones that need memory allocate it, for all later ones as well."""
        self._end_watching()
        ram_bytes, ssd_bytes = (self.num_together * num_bytes for num_bytes in placed_bytes(self.sizes, placements))
        all_bytes = self.num_together * sum(sum(sizes.values()) for sizes in self.sizes.values())
        room_bytes, gradient_bytes = int(all_bytes * _HEADROOM), self._gradient_bytes()
        if (ram_bytes or ssd_bytes or gradient_bytes) and not self._tiers.shared_ram.num_bytes:
            self._tiers.shared_ram.reallocate(min(self.layout.activation_ram_bytes, room_bytes + gradient_bytes))
        if ssd_bytes and not self._activations.swapper.ssd_bytes:
            self._allocate_ssd(room_bytes)
        self._activations.set_placements(placements)
        logger.info(
            "of %s that the layers keep for backward, %s are swapped to RAM and %s to the SSD",
            format_bytes(all_bytes),
            format_bytes(ram_bytes),
            format_bytes(ssd_bytes),
        )

    def _gradient_bytes(self) -> int:
        """RAM that gradients would use if none of them went to the SSD."""
        if not self.layout.held_gradients():
            return 0
        num_chunks = len(self.layout.chunks()) - self.layout.num_held_chunks
        return sum(record.num_bytes for record in self.layout.spill_records()) + num_chunks * CACHE_LINE_BYTES

    def _allocate_ssd(self, num_bytes: int) -> None:
        if self.layout.activation_staging_bytes < GRANULE_NUMEL:
            logger.warning("cpu_memory leaves no buffers to swap activations to the SSD, so they are recomputed")
            return
        unit = max(GRANULE_NUMEL, RECORD_ALIGN_NUMEL)
        # A tensor's last granule may be short.
        num_tensors = self.num_together * sum(map(len, self.sizes.values()))
        numel = -(-(num_bytes + num_tensors * GRANULE_NUMEL) // unit) * unit
        record = RecordSpec(SPILL_BLOCK, SPILL_KIND, "uint8", numel)
        try:
            files = self._tiers.store.scratch([record], _SPILL_NAME)
        except CapacityError as error:
            logger.warning("there is no room to swap activations to the SSD, so they are recomputed: %s", error)
            return
        self._staging = BufferPool(
            self._tiers.device,
            name="activation staging",
            num_buffers=NUM_ACTIVATION_STAGING_BUFFERS,
            buffer_bytes=self.layout.activation_staging_bytes,
        )
        self._activations.swapper.use_ssd(files, self._staging, numel)
