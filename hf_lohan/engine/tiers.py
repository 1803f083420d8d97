"""Opens the tiers of a run: the store on the SSDs, its I/O threads, and the host pools."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hf_lohan.activations.layer_runs import RowMemory
from hf_lohan.config import ResolvedConfig
from hf_lohan.device import BufferPool, Device, HostStack
from hf_lohan.engine.ranks import (
    LinkCodecs,
    RankMemory,
    agree_on_commits,
    check_equal_layout,
    open_device_transport,
    open_rank_memory,
)
from hf_lohan.files import IoEngine, StorePath
from hf_lohan.hardware.direct_io import DirectIo, open_direct_io
from hf_lohan.planning import OffloadLayout
from hf_lohan.ranks import DeviceLanes, Links, RowLinks, one_rank_at_a_time
from hf_lohan.store import RecordFiles, Store
from hf_lohan.wording import format_bytes, states_setting

logger = logging.getLogger(__name__)


@dataclass
class Tiers:
    """The store, I/O threads and pools through which an engine streams. The engine closes them."""

    device: Device
    io: IoEngine
    store: Store
    spill: RecordFiles | None
    staging: BufferPool
    expert_staging: BufferPool
    """Staging buffers for experts that are loaded one by one."""
    states: BufferPool
    gradients: BufferPool
    recall: BufferPool
    shared_ram: HostStack
    """Memory for swapped activations and held gradients. Allocated with the plan."""
    links: Links
    """Links to the other ranks, which are not closed with the tiers."""
    direct: DirectIo
    """How files are read and written."""
    codecs: LinkCodecs
    """Codecs for data that is sent to other nodes."""
    rank_memory: RankMemory | None = None
    """None for a single rank."""
    transport: DeviceLanes | None = None
    """Sends weights between the devices of a node's ranks. None if they go through host memory."""
    row_memory: RowMemory | None = None
    """Memory of the ranks that share rows (`ranks.per_row`). None if a rank has whole rows."""
    paths_of_ranks: Sequence[Sequence[str]] = ()
    """The ssd paths of each rank, in the order of the settings."""

    @property
    def pools(self) -> tuple[BufferPool, ...]:
        staging = (self.staging, self.expert_staging) if self.expert_staging.num_buffers else (self.staging,)
        return *staging, self.states, self.gradients, self.recall

    @property
    def peak_cpu_pool_bytes(self) -> int:
        """Largest number of bytes of all host pools that were in use at once."""
        return sum(pool.high_water_bytes for pool in self.pools)

    @property
    def own_shared_bytes(self) -> int:
        """This rank's part of the RAM that the ranks of its node share, in bytes."""
        return 0 if self.rank_memory is None else self.rank_memory.num_bytes // self.links.ranks.num_local

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()
        self.store.close()
        self.io.close()
        self.direct.close()


def open_tiers(layout: OffloadLayout, config: ResolvedConfig, device: Device, links: Links | None = None) -> Tiers:
    """Allocate the memory and open or create the model's store, whose records are zeros until they are loaded. The last
    commit of an earlier run stays until the next commit. Raises CapacityError, StorageError or ForeignStoreError, and
    RanksDisagreeError if models or settings differ between ranks."""
    plan, links = layout.plan, links or Links.alone()
    check_equal_layout(layout, config, links)
    codecs = LinkCodecs(config.ranks.collectives, links)
    assert links.ranks == layout.ranks, "the layout is for other ranks"
    # Parts that may refuse the settings are opened before the first write.
    with contextlib.ExitStack() as cleanup:
        transport = open_device_transport(config, device, links)
        if transport is not None:
            cleanup.callback(transport.close)
        direct = open_direct_io(config, device)
        cleanup.callback(direct.close)
        io = IoEngine(
            num_threads=config.io_threads,
            piece_bytes=config.io_piece_bytes,
            max_inflight_bytes=max(plan.cpu_pool_bytes + plan.gpu_pool_bytes, config.io_piece_bytes),
            timeline=device.timeline,
            backend=direct.backend,
        )
        cleanup.callback(io.close)
        paths = [StorePath(ssd.path, ssd.capacity if isinstance(ssd.capacity, int) else None) for ssd in config.ssd]
        own_paths = json.dumps([ssd.path for ssd in config.ssd]).encode()
        with one_rank_at_a_time(links, "the store"):  # stores may share parent folders
            store = Store.open_or_create(
                paths,
                layout.records,
                model=layout.identity,
                engine=io,
                durability=config.durability,
                scratch=(*layout.spill_records(), *layout.decided().copy_records),
            )
        cleanup.callback(store.close)
        store.use_device(direct.hasher)
        agree_on_commits(store, links)  # loaded weights may replace a commit later
        store.clear_records()
        spill_records = layout.spill_records()
        spill = store.scratch(spill_records) if spill_records else None

        rank_memory = open_rank_memory(layout, device, links)
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
            direct,
            codecs,
            rank_memory,
            transport,
            RowMemory(RowLinks(links, config.ranks.per_row), device) if config.ranks.per_row > 1 else None,
            [json.loads(of_rank) for of_rank in links.all_gather("the ssd paths of each rank", own_paths)],
        )
        cleanup.pop_all()
    _log_tiers(layout, tiers)
    return tiers


def _log_tiers(layout: OffloadLayout, tiers: Tiers) -> None:
    plan, master = layout.plan, layout.master
    if master.moment_codec is not None:
        logger.warning(
            "%s: AdamW's moments are rounded when they are stored, in %g bytes a parameter instead of 8%s, so this run "
            "differs from an exact run (see docs/optimizers.md)",
            states_setting(master.moment_dtype),
            sum(master.state_bytes(kind) for kind in master.moment_kinds),
            ", and weights have no float32 masters" if master.rounds_weights else "",
        )
    logger.info(
        "%s: %d parameters in %d blocks; store %s (durability: %s), and %s for spilled gradients, on %s; host pools %s "
        "(%d-element chunks); device slots %s; gradients of %d blocks held in RAM, and of %d spilled",
        layout.identity.model_class,
        layout.num_parameters,
        len(layout.blocks),
        format_bytes(tiers.store.size_bytes),
        tiers.store.durability,
        format_bytes(tiers.store.scratch_bytes),
        ", ".join(path.path for path in tiers.store.paths),
        format_bytes(plan.cpu_pool_bytes),
        plan.chunk_numel,
        format_bytes(plan.gpu_pool_bytes),
        len(plan.held_blocks),
        len(plan.spilled_blocks),
    )
