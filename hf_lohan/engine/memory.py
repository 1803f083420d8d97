"""The memory of a run: host pools, the store on the SSDs, the threads that move bytes to it, room for activations."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hf_lohan.activations import LayerTrace
from hf_lohan.activations.swapper import SPILL_BLOCK, SPILL_KIND
from hf_lohan.activations.tiers import ActivationTiers, Sizes, placed_bytes, swap_everything
from hf_lohan.config import OffloadConfig
from hf_lohan.device import BufferPool, Device, HostStack
from hf_lohan.device.host_stack import CACHE_LINE_BYTES
from hf_lohan.engine.out_of_memory import OutOfMemoryAnswer
from hf_lohan.engine.ranks import LinkCodecs, RankMemory, agree_on_commits, open_rank_memory
from hf_lohan.files import CapacityError, IoEngine, StorePath
from hf_lohan.planner import ActivationPlacements
from hf_lohan.planning import OffloadLayout, PlannedStep, StepShape
from hf_lohan.planning.layout import NUM_ACTIVATION_STAGING_BUFFERS
from hf_lohan.ranks import Links, one_rank_at_a_time
from hf_lohan.store import GRANULE_NUMEL, RECORD_ALIGN_NUMEL, RecordFiles, RecordSpec, Store
from hf_lohan.wording import format_bytes

logger = logging.getLogger(__name__)

_HEADROOM = 1.25
"""Batches differ in length: room for somewhat more than the first one left."""
SPILL_NAME = "activations"


@dataclass
class Tiers:
    """What the engine streams through. Closed once, by whoever opened it."""

    device: Device
    io: IoEngine
    store: Store
    spill: RecordFiles | None
    staging: BufferPool
    expert_staging: BufferPool
    """For weights that pass on a lane of their own."""
    states: BufferPool
    gradients: BufferPool
    recall: BufferPool
    shared_ram: HostStack
    """For swapped activations, and for gradients where they leave room. Taken with the plan."""
    links: Links
    """To the other ranks. They outlive this."""
    codecs: LinkCodecs
    """For what goes to other nodes."""
    rank_memory: RankMemory | None = None
    """What several ranks need beside."""

    @property
    def pools(self) -> tuple[BufferPool, ...]:
        staging = (self.staging, self.expert_staging) if self.expert_staging.num_buffers else (self.staging,)
        return *staging, self.states, self.gradients, self.recall

    @property
    def peak_cpu_pool_bytes(self) -> int:
        """High-water mark over all host pools."""
        return sum(pool.high_water_bytes for pool in self.pools)

    @property
    def store_bytes(self) -> int:
        """Size of the files that stay."""
        return self.store.size_bytes

    @property
    def scratch_bytes(self) -> int:
        """Size of the files that hold spilled gradients and activations while the run lasts."""
        return self.store.scratch_bytes

    def close(self) -> None:
        self.store.close()
        self.io.close()


def open_tiers(layout: OffloadLayout, config: OffloadConfig, device: Device, links: Links | None = None) -> Tiers:
    """Take the memory, and open the model's store or create it. Its records are zeros, to be loaded; what an earlier
    run committed is there until the next commit. Raises CapacityError, StorageError or ForeignStoreError."""
    plan, links = layout.plan, links or Links.alone()
    codecs = LinkCodecs(config.collectives, links)
    assert links.ranks == layout.ranks, "a store is laid out for the ranks that there are"
    assert isinstance(config.io_threads, int) and isinstance(config.io_piece_bytes, int) and config.ssd != "auto"
    io = IoEngine(
        num_threads=config.io_threads,
        piece_bytes=config.io_piece_bytes,
        max_inflight_bytes=max(plan.cpu_pool_bytes + plan.gpu_pool_bytes, config.io_piece_bytes),
        timeline=device.timeline,
    )
    paths = [StorePath(ssd.path, ssd.capacity if isinstance(ssd.capacity, int) else None) for ssd in config.ssd]
    try:
        with one_rank_at_a_time(links, "the store"):  # folders above it are of several
            store = Store.open_or_create(
                paths,
                layout.records,
                model=layout.identity,
                engine=io,
                durability=config.durability,
                scratch=(*layout.spill_records(), *layout.kept_records),
            )
    except BaseException:
        io.close()
        raise
    try:
        agree_on_commits(store, links)  # before what is loaded takes the place of a commit that counts
        store.clear_records()
        spill_records = layout.spill_records()
        spill = store.scratch(spill_records) if spill_records else None

        rank_memory = open_rank_memory(layout, config, device, store, links)
        own_gradients = rank_memory.own_gradients if rank_memory is not None else None

        def staging(name: str, num_buffers: int) -> BufferPool:
            return BufferPool(device, name=name, num_buffers=num_buffers, buffer_bytes=plan.staging_buffer_bytes)

        def pool(name: str, num_buffers: int, memory: Tensor | None = None) -> BufferPool:
            return BufferPool(device, name=name, num_buffers=num_buffers, buffer_bytes=plan.buffer_bytes, memory=memory)

        tiers = Tiers(
            device,
            io,
            store,
            spill,
            staging("staging", plan.num_staging_buffers),
            staging("expert staging", plan.num_expert_staging_buffers),
            pool("states", plan.num_state_buffers),
            pool("gradients", plan.num_gradient_buffers, own_gradients),
            pool("recall", plan.num_recall_buffers),
            HostStack(device),
            links,
            codecs,
            rank_memory,
        )
    except BaseException:
        store.close()
        io.close()
        raise
    _announce(layout, tiers)
    return tiers


def _announce(layout: OffloadLayout, tiers: Tiers) -> None:
    plan, master = layout.plan, layout.master
    if master.moment_codec is not None:
        logger.warning(
            "optimizer_state_dtype=%s: AdamW's moments are rounded when they are stored, in %g bytes a parameter "
            "instead of 8, so this is not bit for bit the training that it would be with float32 (see "
            "docs/configuration.md)",
            master.moment_dtype,
            sum(master.state_bytes(kind) for kind in master.moment_kinds),
        )
    logger.info(
        "%s: %d parameters in %d blocks; store %s (durability: %s), and %s for spilled gradients, on %s; host pools %s "
        "(%d-element chunks); device slots %s; gradients of %d blocks held in RAM, of %d spilled",
        layout.identity.model_class,
        layout.num_parameters,
        len(layout.blocks),
        format_bytes(tiers.store_bytes),
        tiers.store.durability,
        format_bytes(tiers.scratch_bytes),
        ", ".join(path.path for path in tiers.store.paths),
        format_bytes(plan.cpu_pool_bytes),
        plan.chunk_numel,
        format_bytes(plan.gpu_pool_bytes),
        len(plan.held_blocks),
        len(plan.spilled_blocks),
    )


class PlannedMemory:
    """The RAM that the plan divides: decides where activations go, and takes the memory for them and for copies of
    records, once.

    Planned before the first layer runs, where a plan is to be had. Else the first step is watched, with everything
    recomputed, and decided after it.
    """

    def __init__(
        self,
        activations: ActivationTiers,
        config: OffloadConfig,
        tiers: Tiers,
        layout: OffloadLayout,
    ) -> None:
        self._activations = activations
        self._mode = mode = config.activations
        self._planned: PlannedStep | None = None
        self.seen: StepShape | None = None
        """Of the last training forward, if its batch had token ids."""
        self.out_of_memory = OutOfMemoryAnswer(config, lambda: (self._planned, self.seen))
        """To be given to errors of whoever runs a step."""
        self._tiers = tiers
        self.layout = layout
        """With the RAM divided as it is, or will be if there is no plan."""
        self._has_copies = False
        self.num_together = 1
        """The most micro-batches of a step that left what they leave before any of them had its backward."""
        self.trace: Mapping[str, LayerTrace] = activations.watch() if mode != "keep" else {}
        """What the layers of the first step were seen to do."""
        self.sizes: Sizes = {}
        """Bytes of all that one micro-batch could put away, once that is known."""
        self._staging: BufferPool | None = None

    def follow(self, planned: PlannedStep) -> None:
        """From the next layer on. Where activations are kept, or all recomputed, there is nothing to follow."""
        self._planned = planned
        self._activations.end_watching()
        if not self._has_copies:
            self.layout = planned.layout
            self.take_copies()
        self.sizes = planned.activation_bytes
        if self._mode in ("auto", "swap"):
            self.place(planned.plan.activations)

    def take_copies(self) -> None:
        """Take the memory for copies of records, if that has not been done: when the plan is there, or cannot come any
        more, or the model is used before."""
        if self._has_copies:
            return
        self._has_copies = True
        names = [(record.block, record.kind) for record in self.layout.resident_records]
        self._tiers.store.keep_copies(names, self._tiers.device.host_empty)
        if names:
            logger.info("copies of records take %s of RAM", format_bytes(self.layout.resident_bytes))

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
            self.place(swap_everything(self.sizes, self.layout.activation_ram_bytes // self.num_together))

    def place(self, placements: ActivationPlacements) -> None:
        """Follow `placements` from now on. The first that need memory take it, for all that come later."""
        self._end_watching()
        ram_bytes, ssd_bytes = (self.num_together * num_bytes for num_bytes in placed_bytes(self.sizes, placements))
        all_bytes = self.num_together * sum(sum(sizes.values()) for sizes in self.sizes.values())
        room_bytes, gradient_bytes = int(all_bytes * _HEADROOM), self._gradient_bytes()
        if (ram_bytes or ssd_bytes or gradient_bytes) and not self._tiers.shared_ram.num_bytes:
            self._tiers.shared_ram.reallocate(min(self.layout.activation_ram_bytes, room_bytes + gradient_bytes))
        if ssd_bytes and not self._activations.swapper.ssd_bytes:
            self._take_ssd(room_bytes)
        self._activations.follow(placements)
        logger.info(
            "of %s that the layers leave for backward, %s are swapped to RAM and %s to the SSD",
            format_bytes(all_bytes),
            format_bytes(ram_bytes),
            format_bytes(ssd_bytes),
        )

    def _gradient_bytes(self) -> int:
        """What gradients would take of the RAM for activations if none of them had to go to the SSD."""
        if not self.layout.held_gradients():
            return 0
        num_chunks = len(self.layout.chunks()) - self.layout.num_held_chunks
        return sum(record.num_bytes for record in self.layout.spill_records()) + num_chunks * CACHE_LINE_BYTES

    def _take_ssd(self, num_bytes: int) -> None:
        if self.layout.activation_staging_bytes < GRANULE_NUMEL:
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
            buffer_bytes=self.layout.activation_staging_bytes,
        )
        self._activations.swapper.take_ssd(files, self._staging, numel)
