"""The memory of a run, taken once: host pools, the store on the SSDs, and the threads that move bytes to it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from hf_lohan.config import OffloadConfig
from hf_lohan.device import BufferPool, Device
from hf_lohan.files import IoEngine, StorePath
from hf_lohan.planning import OffloadLayout
from hf_lohan.store import RecordFiles, Store
from hf_lohan.wording import format_bytes

logger = logging.getLogger(__name__)


@dataclass
class Tiers:
    """What the engine streams through. Closed once, by whoever opened it."""

    device: Device
    io: IoEngine
    store: Store
    spill: RecordFiles | None
    staging: BufferPool
    states: BufferPool
    gradients: BufferPool
    recall: BufferPool

    @property
    def pools(self) -> tuple[BufferPool, ...]:
        return self.staging, self.states, self.gradients, self.recall

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


def open_tiers(layout: OffloadLayout, config: OffloadConfig, device: Device) -> Tiers:
    """Take the memory, and open the model's store or create it. Its records are zeros, to be loaded; what an earlier
    run committed is there until the next commit. Raises CapacityError, StorageError or ForeignStoreError."""
    plan = layout.plan
    assert isinstance(config.io_threads, int) and isinstance(config.io_piece_bytes, int) and config.ssd != "auto"
    io = IoEngine(
        num_threads=config.io_threads,
        piece_bytes=config.io_piece_bytes,
        max_inflight_bytes=max(plan.cpu_pool_bytes + plan.gpu_pool_bytes, config.io_piece_bytes),
        timeline=device.timeline,
    )
    paths = [StorePath(ssd.path, ssd.capacity if isinstance(ssd.capacity, int) else None) for ssd in config.ssd]
    try:
        store = Store.open_or_create(
            paths,
            layout.records,
            model=layout.identity,
            engine=io,
            durability=config.durability,
            scratch=layout.spill_records(),
        )
    except BaseException:
        io.close()
        raise
    try:
        store.keep_copies([(record.block, record.kind) for record in layout.resident_records], device.host_empty)
        store.begin_anew()
        spill_records = layout.spill_records()
        spill = store.scratch(spill_records) if spill_records else None

        def pool(name: str, num_buffers: int) -> BufferPool:
            return BufferPool(device, name=name, num_buffers=num_buffers, buffer_bytes=plan.buffer_bytes)

        tiers = Tiers(
            device,
            io,
            store,
            spill,
            pool("staging", plan.num_staging_buffers),
            pool("states", plan.num_state_buffers),
            pool("gradients", plan.num_gradient_buffers),
            pool("recall", plan.num_recall_buffers),
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
        "(%d-element chunks), copies of records %s; device slots %s; gradients of %d blocks held in RAM, of %d spilled",
        layout.identity.model_class,
        layout.num_parameters,
        len(layout.blocks),
        format_bytes(tiers.store_bytes),
        tiers.store.durability,
        format_bytes(tiers.scratch_bytes),
        ", ".join(path.path for path in tiers.store.paths),
        format_bytes(plan.cpu_pool_bytes),
        plan.chunk_numel,
        format_bytes(layout.resident_bytes),
        format_bytes(plan.gpu_pool_bytes),
        len(plan.held_blocks),
        len(plan.spilled_blocks),
    )
