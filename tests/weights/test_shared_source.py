"""Ranks that have a part of each block load whole blocks together, from their stores and their updates."""

from __future__ import annotations

import errno
import queue
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from async_device import AsyncDevice
from covering import slow_but
from lockstep_ranks import Op, ProgramWriter, run_program, slots_for
from storage_doubles import FaultyBackend, SlowBackend
from torch import Tensor, nn

from hf_lohan.costs import PoolPlan, SizeClass
from hf_lohan.device import BufferPool, CpuDevice, Device, mapped_empty
from hf_lohan.files import CorruptionError, FileBackend, IoEngine, StorageError, StorePath
from hf_lohan.model import Block, Chunk, lay_out_block
from hf_lohan.model.stored_form import records_of_rank
from hf_lohan.ranks import Links, RankFailedError
from hf_lohan.store import GRANULE_NUMEL, ModelIdentity, RecordRead, Store
from hf_lohan.testing.thread_ranks import Fault, rank_outcomes, run_ranks
from hf_lohan.updates.handover import Handover
from hf_lohan.weights import RankLoader, RecordReader, SharedWeights, SlotRing
from hf_lohan.weights.node_shards import NodeShards, SharedRegions

CHUNK_NUMEL = GRANULE_NUMEL


def make_blocks(num_ranks: int) -> list[Block]:
    """Make blocks as in `lockstep_ranks`, with a part for each rank. Some weights are frozen, and only one rank has the
    norm.
    """

    def block(name: str, size_class: SizeClass, numel: int, frozen_numel: int = 0) -> Block:
        parameters = {f"{name}.weight": nn.Parameter(torch.empty(numel))}
        if frozen_numel:
            parameters[f"{name}.frozen"] = nn.Parameter(torch.empty(frozen_numel), requires_grad=False)
        laid_out = lay_out_block(name, size_class, parameters)
        laid_out.cut_for_ranks(num_ranks)
        if num_ranks > 1 and numel > GRANULE_NUMEL:  # small blocks are cut between parameters
            edges = [
                round(rank * laid_out.numel / num_ranks / GRANULE_NUMEL) * GRANULE_NUMEL for rank in range(num_ranks)
            ]
            laid_out.rank_edges = (*edges, laid_out.numel)
        return laid_out

    layers = [block(f"layer{i}", SizeClass.LAYER, (3 + i % 3) * GRANULE_NUMEL, GRANULE_NUMEL) for i in range(6)]
    return [
        block("embedding", SizeClass.OUTER, 9 * GRANULE_NUMEL),
        *layers,
        block("norm", SizeClass.RESIDENT, 100),
        block("head", SizeClass.OUTER, 7 * GRANULE_NUMEL + 100),
    ]


def content(number: int, block: Block, version: int) -> Tensor:
    """Return the expected weights of a whole block. Frozen weights do not change."""
    values = torch.arange(block.numel, dtype=torch.float32) + 10_000.0 * number
    values[: block.state_numel] += 0.5 * version
    return values


class RankStore:
    """One rank's part of all blocks in a store, and a thread that carries out updates."""

    def __init__(
        self, folder: Path, blocks: Sequence[Block], links: Links, backend: FileBackend | None, delays: random.Random
    ) -> None:
        self.rank = links.ranks.rank
        self.versions = dict.fromkeys(blocks, 0)
        self.handover = Handover(CpuDevice())
        self.read_bytes = 0
        self._numbers = {block: number for number, block in enumerate(blocks)}
        self._delays = delays
        self._engine = IoEngine(2, 16384, 1 << 20)
        path = StorePath(str(folder), None)
        identity = ModelIdentity("Tested", sum(block.numel for block in blocks), "0" * 64)
        records = [spec for spec in records_of_rank(blocks, self.rank) if spec.kind == "param"]
        self.store = Store.create([path], records, model=identity, engine=self._engine, num_homes=2)
        for block in blocks:
            first, last = block.rank_ranges[self.rank]
            if first < last:
                self._write(block, first, content(self._numbers[block], block, 0)[first:last])
        if backend is not None:
            self.store.commit()
            self.store.close()
            self._engine.close()
            self._engine = IoEngine(2, 16384, 1 << 20, backend)
            self.store = Store.open([path], model=identity, engine=self._engine)
        self._chunks = {block: [c for c in block.cut(CHUNK_NUMEL) if c.owner == self.rank] for block in blocks}
        self._pool = BufferPool(CpuDevice(), name="states", num_buffers=3, buffer_bytes=4 * CHUNK_NUMEL)
        self._outstanding: set[Chunk] = set()
        self._updates: queue.SimpleQueue[tuple[Chunk, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._update_all, daemon=True)
        self._thread.start()

    # The interface of `lockstep_ranks.Weights`.

    def of(self, block: Block) -> Tensor:
        return content(self._numbers[block], block, self.versions[block])

    def update(self, block: Block) -> None:
        while any(chunk in self._outstanding for chunk in self._chunks[block]):
            time.sleep(1e-4)  # a step begins after the updates of the previous one
        self.versions[block] += 1
        self._outstanding.update(self._chunks[block])
        self.handover.announce(self._chunks[block])
        for chunk in self._chunks[block]:
            self._updates.put((chunk, self.versions[block]))

    def close(self) -> None:
        self._updates.put(None)
        self._thread.join()
        self.read_bytes = self._engine.read_bytes
        self.store.close()
        self._engine.close()

    def _update_all(self) -> None:
        try:
            while (update := self._updates.get()) is not None:
                chunk, version = update
                if self._delays.random() < 0.3:
                    time.sleep(2e-3 * self._delays.random())
                buffer = self._pool.acquire()
                param = buffer.view(torch.float32, chunk.numel)
                param.copy_(content(self._numbers[chunk.block], chunk.block, version)[chunk.start : chunk.stop])
                new, copied = self.handover.hand_over(chunk, param, buffer)
                if copied is not None:
                    copied.synchronize()
                self.store.write(chunk.block.name, "param", chunk.start, param).wait()
                if self._delays.random() < 0.3:
                    time.sleep(2e-3 * self._delays.random())
                self.handover.note_written(new)
                buffer.release()
                self._outstanding.discard(chunk)
        except BaseException as error:
            self.handover.abort(error)
            raise

    def _write(self, block: Block, start: int, values: Tensor) -> None:
        aligned = mapped_empty(values.nbytes).view(torch.float32)
        aligned.copy_(values)
        self.store.write(block.name, "param", start, aligned).wait()


class NodeMemory:
    """The memory that the ranks of one node share."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = mapped_empty(num_bytes)


class World:
    """Runs ranks that have stores."""

    def __init__(self, folder: Path, num_ranks: int, *, num_local: int | None = None, room: float = 2.0) -> None:
        """`room`: the size of shared memory, in blocks of the largest size."""
        self.num_ranks = num_ranks
        self.num_local = num_local or num_ranks
        self.num_slots = (3, 1)
        self.device: Callable[[int], Device] = lambda rank: CpuDevice()
        self.backends: dict[int, FileBackend] = {}
        self.readers: dict[int, Callable[[RecordReader], RecordReader]] = {}
        """By rank: a function that wraps its store for reads."""
        self.read_bytes: dict[int, int] = {}
        self.sent_bytes: dict[int, int] = {}
        self.folder = folder
        folder.mkdir(exist_ok=True)
        largest = max(block.param_bytes for block in make_blocks(num_ranks))
        self._nodes = defaultdict[int, NodeMemory](lambda: NodeMemory(int(room * largest) // 4096 * 4096))
        self._lock = threading.Lock()

    def rank(self, links: Links, ops: Sequence[Op], seed: int) -> None:
        """Run the program on one rank."""
        rank = links.ranks.rank
        blocks = make_blocks(self.num_ranks)
        delays = random.Random(f"{seed} {rank}")
        with ExitStack() as stack:
            store = RankStore(self.folder / str(rank), blocks, links, self.backends.get(rank), delays)
            stack.callback(store.close)
            with self._lock:
                memory = self._nodes[links.ranks.node].memory
            device = self.device(rank)
            ring = SlotRing(device, self.plan(blocks))
            reader = self.readers.get(rank, lambda store: store)(store.store)
            source = SharedWeights(
                device, reader, store.handover.deliver, ring, links, memory, blocks, read_bytes=3 * 4 * GRANULE_NUMEL
            )
            prefetcher = RankLoader(ring, source, blocks)
            stack.callback(prefetcher.close)
            run_program(ops, blocks, prefetcher, ring, store, meet=lambda: links.barrier("the end of a step"))
            if not any(verb == "fault" for verb, _ in ops):
                links.barrier("the end")
            self.sent_bytes[rank] = links.sent_bytes["weights"]
        self.read_bytes[rank] = store.read_bytes

    def plan(self, blocks: Sequence[Block]) -> PoolPlan:
        return slots_for(blocks, num_layer_slots=self.num_slots[0], num_outer_slots=self.num_slots[1])

    def write(self, seed: int, num_passes: int, oddity: float = 0.2) -> list[Op]:
        blocks = make_blocks(self.num_ranks)
        return ProgramWriter(blocks, self.plan(blocks), seed, oddity=oddity).write(num_passes)

    def run(self, ops: Sequence[Op], seed: int | None = None) -> None:
        run_ranks(
            self.num_ranks, lambda links: self.rank(links, ops, seed or 0), num_local=self.num_local, delays_seed=seed
        )


@pytest.mark.parametrize(("num_ranks", "num_local"), [(2, 1), (4, 2)])
def test_each_use_sees_the_weights_of_the_last_update(num_ranks: int, num_local: int, tmp_path: Path) -> None:
    world = World(tmp_path, num_ranks, num_local=num_local)
    world.num_slots = (4, 2)
    world.run(world.write(1, num_passes=4), 1)


@pytest.mark.parametrize(("num_ranks", "num_local"), [(2, 2), (4, 2), (4, 1)])
def test_a_node_reads_a_block_once_and_sends_it_once_to_each_other_node(
    num_ranks: int, num_local: int, tmp_path: Path
) -> None:
    world = World(tmp_path, num_ranks, num_local=num_local)
    world.backends = {rank: FileBackend() for rank in range(num_ranks)}  # new engines count only these passes
    blocks = make_blocks(num_ranks)
    ops: list[Op] = [("begin", 0)]
    for number in range(len(blocks)):
        ops += [("use", number), ("unpin", number)]
    world.run([*ops, ("end", 0)], seed=1)
    pass_bytes = sum(block.param_bytes for block in blocks)
    num_nodes = num_ranks // num_local
    assert sum(world.read_bytes.values()) == pass_bytes
    assert sum(world.sent_bytes.values()) == (num_nodes - 1) * pass_bytes


@pytest.mark.parametrize("takes_memory", [False, True])
def test_later_shards_are_sent_while_earlier_ones_arrive(
    takes_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards in memory of their own, such as coded ones, go one load after the other."""
    begin, under_way, most = NodeShards.begin_exchange, Counter[int](), Counter[int]()

    def begun(parts: NodeShards, *args: Any, **settings: Any) -> Callable[[], Any]:
        end = begin(parts, *args, **settings)
        under_way[id(parts)] += 1
        most[id(parts)] = max(most[id(parts)], under_way[id(parts)])

        def end_later() -> Any:
            time.sleep(0.01)
            arrived = end()
            under_way[id(parts)] -= 1
            return arrived

        return end_later

    monkeypatch.setattr(NodeShards, "begin_exchange", begun)
    monkeypatch.setattr(NodeShards, "takes_memory", lambda parts, **_load: takes_memory)
    world = World(tmp_path, 2, num_local=1, room=3.0)
    world.run(world.write(3, num_passes=3))
    assert len(most) == 2
    assert max(most.values()) == 1 if takes_memory else min(most.values()) >= 2


def test_ranks_wait_for_slow_drives(tmp_path: Path) -> None:
    world = World(tmp_path, 3)
    world.backends = {1: SlowBackend(2e-3)}
    world.run(world.write(3, num_passes=3, oddity=0.0), seed=3)


def different_programs(world: World, seed: int, num_steps: int) -> list[list[Op]]:
    """Write a program for each rank. Their passes differ. After each step, all ranks update the same blocks."""
    blocks = make_blocks(world.num_ranks)
    writers = [
        ProgramWriter(blocks, world.plan(blocks), 100 * seed + rank, oddity=0.3) for rank in range(world.num_ranks)
    ]
    programs: list[list[Op]] = [[] for _ in writers]
    common = random.Random(seed)
    for _ in range(num_steps):
        updates: list[Op] = [("update", number) for number in range(len(blocks)) if common.random() < 0.7]
        for writer, ops in zip(writers, programs, strict=True):
            num_before = len(writer.ops)
            writer.write(1 + writer._random.randrange(2))
            ops += [op for op in writer.ops[num_before:] if op[0] not in ("update", "foresee", "meet")]
            ops += [("meet", 0), *updates, ("foresee", 1)]
    return programs


def run_different(world: World, seed: int, num_steps: int) -> None:
    programs = different_programs(world, seed, num_steps)
    run_ranks(
        world.num_ranks,
        lambda links: world.rank(links, programs[links.ranks.rank], seed),
        num_local=world.num_local,
        delays_seed=seed,
    )


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("seed", "num_ranks", "num_local", "room"), [(3, 4, 2, 1.0), (1, 2, 1, 2.0), (2, 3, 3, 1.5), (0, 2, 2, 1.0)]
)
def test_ranks_that_run_different_layers_see_the_weights_of_the_last_update(
    seed: int, num_ranks: int, num_local: int, room: float, tmp_path: Path
) -> None:
    world = World(tmp_path, num_ranks, num_local=num_local, room=room)
    world.num_slots = [(2, 1), (4, 2)][seed % 2]
    run_different(world, seed, num_steps=3)


def run_same(world: World, seed: int, num_steps: int) -> None:
    world.run(world.write(seed, num_passes=num_steps, oddity=0.3), seed)


RUNS = pytest.mark.parametrize("run", [run_same, run_different])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
@RUNS
def test_each_use_sees_the_last_update_in_many_programs(
    run: Callable[[World, int, int], None], seed: int, tmp_path: Path
) -> None:
    num_ranks, num_local = [(2, 2), (2, 1), (4, 2), (3, 1), (3, 3), (4, 4), (8, 4)][seed % 7]
    world = World(tmp_path, num_ranks, num_local=num_local, room=1.0 + seed % 3 / 2)
    world.num_slots = [(2, 1), (3, 1), (4, 2), (6, 2)][seed % 4]
    run(world, seed, 6)


@pytest.mark.parametrize("seed", slow_but([0], range(10)))
@RUNS
def test_no_memory_is_overwritten_before_it_is_copied(
    run: Callable[[World, int, int], None], seed: int, tmp_path: Path
) -> None:
    devices = [AsyncDevice(seed + 100 * rank, max_delay_s=2e-3) for rank in range(2)]
    world = World(tmp_path, 2, room=1.0 + seed % 2)
    world.device = devices.__getitem__
    run(world, seed, 2)
    assert sum(device.num_races for device in devices) == 0


class RecordsWithVerifier(RecordReader):
    """Calls `verify(block, start)` instead of verifying reads of `blocks`."""

    def __init__(self, records: RecordReader, blocks: set[str], verify: Callable[[str, int], object]) -> None:
        self._records = records
        self._blocks = blocks
        self._verify = verify

    def read(self, block: str, kind: str, start_numel: int, out: Tensor, *, is_urgent: bool = False) -> RecordRead:
        read = self._records.read(block, kind, start_numel, out, is_urgent=is_urgent)
        if block in self._blocks:
            read._check = lambda first, stop: self._verify(block, start_numel)
        return read


@pytest.mark.parametrize(("damaged_rank", "uses"), [(0, (4, 4)), (0, (1, 6)), (1, (1, 6))])
def test_a_wrong_checksum_ends_all_ranks(damaged_rank: int, uses: tuple[int, int], tmp_path: Path) -> None:
    """They load the same block or different ones, and the damaged one is the last."""
    world, damaged = World(tmp_path, 2), f"layer{max(uses) - 1}"

    def raise_damaged(block: str, start: int) -> None:
        raise CorruptionError(f"param of {block} is damaged in", path="store", advice="resume from a checkpoint")

    world.readers[damaged_rank] = lambda records: RecordsWithVerifier(records, {damaged}, raise_damaged)
    end: Op = ("fault" if uses[0] == uses[1] else "meet", 0)
    ops: list[list[Op]] = [[("begin", 0), ("use", layer), ("unpin", layer), end] for layer in uses]
    outcomes = rank_outcomes(2, lambda links: world.rank(links, ops[links.ranks.rank], 0))
    assert all(f"param of {damaged} is damaged" in str(outcome.error) for outcome in outcomes), outcomes
    # The other rank may tell first that it got no shard of this block.
    assert isinstance(outcomes[damaged_rank].error, CorruptionError | RankFailedError)


def test_a_failed_read_of_one_rank_ends_the_others(tmp_path: Path) -> None:
    world = World(tmp_path, 3)
    world.backends = {1: FaultyBackend("read", 6, errno.EIO, sticky=True)}
    ops = [*world.write(0, num_passes=1, oddity=0.0), ("fault", 0)]
    outcomes = rank_outcomes(3, lambda links: world.rank(links, ops, 0))
    assert isinstance(outcomes[1].error, StorageError)
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, RankFailedError)
        assert "rank 1" in str(outcomes[rank].error)


def test_a_single_failed_read_is_repeated(tmp_path: Path) -> None:
    world = World(tmp_path, 2)
    world.backends = {1: FaultyBackend("read", 6, errno.EIO)}
    world.run(world.write(0, num_passes=1, oddity=0.0), seed=0)


@pytest.mark.parametrize("what", ["die", "hang"])
def test_the_error_of_a_lost_rank_names_the_rank(what: str, tmp_path: Path) -> None:
    world = World(tmp_path, 2)
    ops = [*world.write(0, num_passes=1, oddity=0.0), ("fault", 0)]
    fault = Fault(rank=1, what=what, at_operation=20)  # type: ignore[arg-type]
    outcomes = rank_outcomes(2, lambda links: world.rank(links, ops, 0), faults=[fault], timeout_s=1.0)
    error = outcomes[0].error
    assert isinstance(error, RankFailedError)
    assert "rank 1" in str(error)
    does = "rank 0 waited for" if what == "hang" else "while rank 0 "  # the send to a dead rank may fail first
    assert does in str(error)


def test_a_dropped_step_leaves_the_weights_of_the_store(tmp_path: Path) -> None:
    """The block's update is announced when the load begins, and never runs."""

    def run(links: Links) -> None:
        blocks = make_blocks(2)
        store = RankStore(tmp_path / str(links.ranks.rank), blocks, links, None, random.Random(0))
        device, block = CpuDevice(), blocks[1]
        ring = SlotRing(device, slots_for(blocks, num_layer_slots=2, num_outer_slots=1))
        begun = threading.Event()

        def deliver(block: Block, weights: Tensor, free: None) -> object:
            delivery = store.handover.deliver(block, weights, free)
            begun.set()
            return delivery

        source = SharedWeights(
            device,
            store.store,
            deliver,  # type: ignore[arg-type]
            ring,
            links,
            node.memory,
            blocks,
            read_bytes=4 * GRANULE_NUMEL,
        )
        prefetcher = RankLoader(ring, source, blocks)
        store.handover.announce([chunk for chunk in block.cut(CHUNK_NUMEL) if chunk.owner == links.ranks.rank])

        def drop() -> None:
            assert begun.wait(60)
            store.handover.call_off()

        dropping = threading.Thread(target=drop)
        dropping.start()
        slot = prefetcher.acquire(block)
        assert bool((slot.weights[: block.numel] == content(1, block, 0)).all())
        dropping.join()
        links.barrier("the end")
        prefetcher.close()
        store.close()

    node = NodeMemory(2 * max(block.param_bytes for block in make_blocks(2)))
    run_ranks(2, run)


def test_a_second_source_loads_after_the_first(tmp_path: Path) -> None:
    """Ranks end at different times, so some ranks may not have carried out the last loads."""
    world = World(tmp_path / "first", 2)
    ops = world.write(0, num_passes=2, oddity=0.0)

    def run(links: Links) -> None:
        for turn in range(3):
            again = World(tmp_path / f"{turn}", 2) if turn else world
            again._nodes = world._nodes
            again.rank(links, [*ops, ("fault", 0)], turn)

    run_ranks(2, run, delays_seed=5)


def places_of(memory_bytes: int, sizes: Sequence[int]) -> Iterator[int | None]:
    """Return the place of each block if no block is freed."""
    places = SharedRegions(memory_bytes)
    for number, num_bytes in enumerate(sizes):
        start = places.find_start(num_bytes)
        yield start
        if start is not None:
            places.take_region(number, start, num_bytes)


def test_blocks_use_shared_memory_one_after_the_other() -> None:
    assert list(places_of(8 * 4096, [3 * 4096, 3 * 4096, 3 * 4096])) == [0, 3 * 4096, None]
    assert list(places_of(8 * 4096, [100, 100, 8 * 4096])) == [0, 4096, None]
    places = SharedRegions(8 * 4096)
    for number in range(100):
        num_bytes = (1 + number * 7 % 8) * 4096
        start = places.find_start(num_bytes)
        while start is None:
            places.free_region(next(iter(places._regions)))
            start = places.find_start(num_bytes)
        places.take_region(number, start, num_bytes)
        taken = sorted(places._regions.values())
        assert all(last <= first for (_, last), (first, _) in pairwise(taken))
        assert taken[-1][1] <= 8 * 4096


def test_too_little_shared_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"block embedding needs 589824 bytes; share at least that much"):
        SharedWeights(
            CpuDevice(),
            None,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            Links.alone(),
            mapped_empty(4096),
            make_blocks(1),
            read_bytes=4096,
        )
