"""Copies the last step of a run to new stores for another number of ranks."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_lohan.annexes.resharding.copied_commits import OldRun, OldStore, facts_of_all
from hf_lohan.checkpoint.generations import RunStores, newest_common_commits, refuse_steps, stores_of
from hf_lohan.costs import balanced_experts, most_rows, owned_experts
from hf_lohan.device import mapped_empty
from hf_lohan.experts import RoutedRows
from hf_lohan.files import IoEngine, IoRequest, StorageError, StorePath
from hf_lohan.files.directories import make_directory
from hf_lohan.files.durable_file import remove_folder
from hf_lohan.huggingface.models.export import described_model
from hf_lohan.model import StoredForm, assign_shards, owners_by_name, records_of_rank
from hf_lohan.ranks import RanksDisagreeError
from hf_lohan.store import Commit, RecordSpec, Store
from hf_lohan.store.layout import granules_of
from hf_lohan.store.rank_folders import files_of, rank_folder, shared_directory
from hf_lohan.store.record_read import RecordRead
from hf_lohan.store.store_folders import remove_store
from hf_lohan.store.versions import Checksums, Home
from hf_lohan.wording import format_bytes, gb_per_s, seconds, times

logger = logging.getLogger(__name__)

_IO_PIECE_BYTES = 4 << 20
COPY_BYTES = 8 << 20
_READS_AHEAD, _WRITES_BEHIND = 4, 4
"""Number of pieces that are read, and that are written, at the same time. Each has a buffer of `COPY_BYTES`."""
_IO_THREADS = 4
_LOG_EVERY_S = 10.0


@dataclass(frozen=True)
class BalancedOwners:
    """Owners of experts that balance the rows of the experts among ranks."""

    owners: Mapping[str, int]
    """Maps the name of each expert's block to the rank that owns it."""
    num_nodes: int
    num_rows: int
    most_before: float
    """Maximum rows of a rank over the mean of ranks, with the former owners. Mean over layers, weighted by rows."""
    most_after: float
    """The same with `owners`."""


@dataclass(frozen=True, kw_only=True)
class Resharded:
    commit_number: int
    global_step: int | None
    num_ranks_before: int
    folders: tuple[str, ...]
    """Folders of the new stores on their first ssd path."""
    old_files: str
    new_files: str
    """Names of the files of the old stores, and of the new stores, on each ssd path. The user may delete either."""
    balanced: BalancedOwners | None = None
    """The owners of experts, if they were balanced."""


def reshard(
    paths_of_ranks: Sequence[Sequence[str]],
    num_ranks: int,
    *,
    removes_old: bool = False,
    balances: bool = False,
    num_nodes: int | None = None,
    on_copied: Callable[[int, int], None] = lambda num_bytes, total_bytes: None,
) -> Resharded:
    """Copy the newest common step of a run's ranks to stores of the next generation, for ``num_ranks`` ranks.

    ``paths_of_ranks`` has all ssd paths of the run's stores (`store_paths_of`). ``removes_old`` removes the old stores
    at the end. ``balances`` divides experts by counted rows (see `balanced_owners`, also for ``num_nodes``). Then the
    number of ranks may stay the same. ``on_copied(num_bytes, total_bytes)`` is called for each copied piece. Until all
    new stores are committed, a run continues from the old stores. Raises ValueError if there is no step to copy, if the
    run already has this number of ranks, or if nothing can be balanced. Raises the errors of `Store`.
    """
    if num_ranks < 1:
        raise ValueError(f"the number of ranks is {num_ranks}; it must be at least 1")
    if balances and num_ranks == 1:
        raise ValueError("a single rank owns all experts, so there is nothing to balance; leave out --balance")
    found, where = stores_of(paths_of_ranks), paths_of_ranks[0][0]
    if found.found is None:
        raise ValueError(f"{where} has neither a store nor stores of ranks; give the ssd paths of the run")
    before, num_before = found.found, found.num_ranks
    if num_before == num_ranks and not balances:
        raise ValueError(
            f"{', '.join(paths[0] for paths in before.folders())} already has a store of a run with "
            f"{times(num_ranks, 'rank')}, which can continue; give another number of ranks, or add --balance"
        )
    io, folders = io_engine(), _new_folders(found, num_ranks)
    try:
        with ExitStack() as stack:
            old = [
                stack.enter_context(Store.open([*map(StorePath, of_rank)], model=None, engine=io))
                for of_rank in before.folders()
            ]
            commits, copied = _commits_to_copy(old)
            _, form = described_model(next((store for store in old if store.model_folder is not None), old[0]))
            records = [store.records for store in old]
            owners = owners_in(form, records)
            check_records(records_by_rank(form, num_before, owners), records, [store.paths[0].path for store in old])
            balanced = None
            if balances:
                facts = [commit.facts for commit in commits]
                own = owners if num_before == num_ranks else None
                balanced = balanced_owners(form, facts, num_ranks, num_nodes, own, where)
                if balanced.owners == own:
                    raise ValueError(
                        f"the experts in {where} already belong to the ranks to which --balance would give them"
                    )
            shards = records_by_rank(form, num_ranks, None if balanced is None else balanced.owners)
            run = OldRun.of(old[0], [*map(OldStore.of, old)], copied, shards)
            run.refuse_deferred_steps(where)
            new: list[Store] = []
            try:
                for rank, new_folders in enumerate(folders):
                    new.append(stack.enter_context(new_store([*map(StorePath, new_folders)], run, rank, io)))
                for store in new:
                    for num_bytes in copy_records(old, store):
                        on_copied(num_bytes, run.num_bytes)
                joined = facts_of_all([commit.facts for commit in commits])
                for rank, store in enumerate(new):
                    run.commit(store, rank, commits[rank].facts if len(new) == len(old) else joined)
            except BaseException:
                for folder in (path.path for store in new for path in store.paths):
                    with suppress(StorageError):  # the next reshard replaces a folder that cannot be removed
                        remove_folder(folder)
                raise
            resharded = Resharded(
                commit_number=commits[0].number,
                global_step=commits[0].facts.get("global_step"),
                num_ranks_before=num_before,
                folders=tuple(of_rank[0] for of_rank in folders),
                old_files=files_of(shared_directory(before.folders()[0][0]), num_before, before.generation),
                new_files=files_of(shared_directory(folders[0][0]), num_ranks, found.generation),
                balanced=balanced,
            )
            for of_rank in before.folders() if removes_old else ():
                remove_store(of_rank)
        for folder in (folder for of_rank in before.folders() for folder in of_rank) if removes_old else ():
            if shared_directory(folder) != folder:
                remove_folder(folder)
        return resharded
    finally:
        io.close()


def _new_folders(found: RunStores, num_ranks: int) -> list[list[str]]:
    """Return the folders of each new rank's store. If old ranks have different paths, new ranks get these in rotation.
    A run with other paths copies the stores to its own paths."""
    lists = found.directories
    return [
        [rank_folder(path, rank, num_ranks, found.generation) for path in lists[rank % len(lists)]]
        for rank in range(num_ranks)
    ]


def owners_in(form: StoredForm, records: Sequence[Sequence[RecordSpec]]) -> dict[str, int] | None:
    """Return a dict from expert to the rank whose store has its records. None for a single store, and for
    stores that do not have each expert exactly once."""
    names = [{record.block for record in of_rank} for of_rank in records]
    experts = [block.name for blocks in form.model_blocks.experts.values() for block in blocks]
    return owners_by_name(names, experts) if len(records) > 1 else None


def balanced_owners(
    form: StoredForm,
    facts: Sequence[Mapping[str, Any]],
    num_ranks: int,
    num_nodes: int | None,
    owners: Mapping[str, int] | None,
    where: str,
) -> BalancedOwners:
    """Divide the experts of a model among ranks, so that all ranks have about equally many of the counted rows.

    ``facts``: facts in the commits of the run's ranks. ``num_nodes``: number of nodes of the new ranks. By default it
    is the run's number of nodes if that divides ``num_ranks``, and otherwise 1. ``owners``: former owners, by default
    `owned_experts`. ``where`` is for errors. Raises ValueError if there is nothing to balance.
    """
    layers = {blocks[0].name.rpartition(".")[0]: blocks for blocks in form.model_blocks.experts.values()}
    if not layers:
        raise ValueError(
            f"the model in {where} has no experts that belong to one rank each (it is dense, or ran with experts: "
            "with_layer), so there is nothing to balance; leave out --balance"
        )
    routed = RoutedRows.of_all(facts)
    counts = [routed.layers.get(name, ()) if routed is not None else () for name in layers]
    are_whole = [len(of) for of in counts] == [len(blocks) for blocks in layers.values()]
    num_rows = sum(map(sum, counts))
    if routed is None or not are_whole or not num_rows:
        raise ValueError(
            f"the last step in {where} has no counted rows of experts, and --balance needs them to divide the experts; "
            "train a step with this version of hf_lohan first"
        )
    if num_nodes is None:
        num_nodes = routed.num_nodes if num_ranks % routed.num_nodes == 0 else 1
    if num_nodes < 1 or num_ranks % num_nodes:
        raise ValueError(f"{num_ranks} ranks on {num_nodes} nodes; give each node equally many ranks")
    divided = balanced_experts(counts, num_ranks, num_ranks // num_nodes)
    new = {
        blocks[expert].name: rank
        for blocks, of_layer in zip(layers.values(), divided, strict=True)
        for rank, experts in enumerate(of_layer)
        for expert in experts
    }
    before: list[Sequence[Sequence[int]]] = [
        [[e for e, block in enumerate(blocks) if owners[block.name] == rank] for rank in range(num_ranks)]
        if owners is not None
        else owned_experts(len(blocks), layer, num_ranks)
        for layer, blocks in enumerate(layers.values())
    ]
    most_before, most_after = (
        num_ranks * sum(most_rows(of, owned) for of, owned in zip(counts, way, strict=True)) / num_rows
        for way in (before, divided)
    )
    return BalancedOwners(new, num_nodes, num_rows, most_before, most_after)


def io_engine() -> IoEngine:
    inflight_bytes = (_READS_AHEAD + _WRITES_BEHIND) * COPY_BYTES
    return IoEngine(num_threads=_IO_THREADS, piece_bytes=_IO_PIECE_BYTES, max_inflight_bytes=inflight_bytes)


def _commits_to_copy(old: Sequence[Store]) -> tuple[list[Commit], list[tuple[str, int]]]:
    """Return the newest common commit from each store, and (id, number of the newest commit) of each store. The stores
    are read at the common commit from now on."""
    try:
        newest = newest_common_commits(old)
    except RanksDisagreeError as error:
        raise ValueError(str(error)) from None
    copied = [(store.kept_commits[0].store_id, store.kept_commits[0].number) for store in old]
    for store, commit in zip(old, newest, strict=True):
        store.view_commit(commit)
    return newest, copied


def records_by_rank(
    form: StoredForm, num_ranks: int, owners: Mapping[str, int] | None = None
) -> list[tuple[RecordSpec, ...]]:
    """Return the records of each of ``num_ranks`` ranks. ``owners``: rank of each expert, as for `assign_shards`."""
    if num_ranks == 1:
        return [form.records]
    assign_shards(form.model_blocks, num_ranks, owners)
    return [records_of_rank(form.model_blocks.blocks, rank) for rank in range(num_ranks)]


def check_records(
    expected: Sequence[Sequence[RecordSpec]], found: Sequence[Sequence[RecordSpec]], folders: Sequence[str]
) -> None:
    """Raise ValueError if this version would divide the model into records unlike the stores'."""
    for of_version, of_store, folder in zip(expected, found, folders, strict=True):
        if tuple(of_version) != tuple(of_store):
            raise ValueError(
                f"the records in {folder} differ from the records that this version of hf_lohan makes for "
                f"{times(len(folders), 'rank')}; use the version that made them, or resume from a checkpoint"
            )


def new_store(paths: Sequence[StorePath], run: OldRun, rank: int, io: IoEngine) -> Store:
    """Create the store of one new rank in the folders of a new generation. It may replace the incomplete copy of a
    killed reshard. Raises the errors of `Store.create`, and `StorageError` if a run has committed a step there."""
    for path in paths:
        make_directory(path.path)
    refuse_steps([path.path for path in paths])
    return Store.create(paths, run.shards[rank], model=run.model, engine=io, num_homes=run.num_homes)


def copy_records(old: Sequence[Store], new: Store) -> Iterator[int]:
    """Write all records of ``new`` from the shards in the ``old`` stores, and yield the bytes of each piece.

    Reads are verified. Raises `CorruptionError`, `CapacityError`, or `StorageError`, such as for elements in no store.
    """
    copied: list[int] = []
    with OverlappedCopies(copied.append) as copies:
        folders = [store.paths[0].path for store in old]
        for piece in pieces_of(new.records, [store.records for store in old], folders):
            copies.add(old[piece.source], new, piece)
            yield from copied
            copied.clear()
        copies.finish()
    yield from copied


def checksums_of(store: Store, piece: Piece, content: Tensor) -> Checksums:
    """Return the checksums with which a piece from ``store`` was verified. The copy keeps these checksums, so damage
    after the read is found later."""
    record = store.layout.record(piece.block, piece.kind)
    first, rest = divmod(piece.start - record.first, record.granule_numel)
    assert rest == 0, "pieces are whole granules"
    stop = first + granules_of(piece.stop - piece.start, record.granule_numel)
    homes, checksums = store.versions.live(piece.block, piece.kind, first, stop)
    if any(run.home is Home.NOWHERE for run in homes):  # granules that were never written have no checksums
        return store.checksums(piece.block, piece.kind, content)
    return checksums


class OverlappedCopies:
    """Copies pieces from store to store through a few buffers of `COPY_BYTES`, so that reads, checks and writes
    overlap. Leaving the context waits for all I/O, even after an error."""

    def __init__(
        self,
        on_copied: Callable[[int], object],
        check: Callable[[Piece, Tensor, Checksums], object] = lambda piece, content, checksums: None,
    ) -> None:
        """``on_copied`` is called with the size of each written piece in bytes. ``check`` is called before the write,
        and may raise."""
        self._on_copied = on_copied
        self._check = check
        self._free = [mapped_empty(COPY_BYTES) for _ in range(_READS_AHEAD + _WRITES_BEHIND)]
        self._reads: deque[_PieceRead] = deque()
        self._writes: deque[tuple[IoRequest, Tensor, int]] = deque()

    def __enter__(self) -> OverlappedCopies:
        return self

    def __exit__(self, *error: object) -> None:
        waits = [*(read.request.wait_for_bytes for read in self._reads), *(write.wait for write, *_ in self._writes)]
        for wait in waits:
            with suppress(Exception):  # the first error is already being raised
                wait()

    def add(self, old: Store, new: Store, piece: Piece) -> None:
        """Start to copy a piece. Raises the errors of earlier pieces."""
        if len(self._reads) == _READS_AHEAD:
            self._write_oldest()
        if not self._free:
            self._finish_oldest()
        memory = self._free.pop()
        content = piece.in_memory(memory)
        request = old.read(piece.block, piece.kind, piece.start, content)
        self._reads.append(_PieceRead(request, old, new, piece, content, memory))

    def finish(self) -> None:
        """Wait until all pieces are written."""
        while self._reads:
            self._write_oldest()
        while self._writes:
            self._finish_oldest()

    def _write_oldest(self) -> None:
        """Wait for the oldest read, check it, and start its write."""
        read = self._reads[0]
        read.request.wait()
        self._reads.popleft()
        piece, content = read.piece, read.content
        checksums = checksums_of(read.old, piece, content)
        self._check(piece, content, checksums)
        write = read.new.write(piece.block, piece.kind, piece.start, content, checksums=checksums)
        self._writes.append((write, read.memory, content.nbytes))

    def _finish_oldest(self) -> None:
        write, memory, num_bytes = self._writes[0]
        write.wait()
        self._writes.popleft()
        self._free.append(memory)
        self._on_copied(num_bytes)


class _PieceRead(NamedTuple):
    request: RecordRead
    old: Store
    new: Store
    piece: Piece
    content: Tensor
    memory: Tensor


class LoggedProgress:
    """Logs the progress of a long copy, with its rate and the remaining time."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        """``what`` begins each line, such as "copied"."""
        self._what = what
        self._clock = clock
        self._first_s = self._logged_s = self._last_s = 0.0
        """Times at which the first piece was copied, the last line was logged, and the last piece was copied."""
        self._first_bytes = 0
        self.num_bytes = self._total_bytes = 0

    def advance(self, num_bytes: int, total_bytes: int) -> None:
        """Count copied bytes, and log a line every few seconds. ``total_bytes``: size of the whole copy."""
        self._last_s = self._clock()
        if not self.num_bytes:
            self._first_s = self._logged_s = self._last_s
            self._first_bytes = num_bytes
        self.num_bytes += num_bytes
        self._total_bytes = total_bytes
        if self._last_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = self._last_s
            left_s = (total_bytes - self.num_bytes) / self._bytes_per_s
            logger.warning("%s, %s left", self.text(), seconds(left_s))

    def text(self) -> str:
        """Return a clause with the bytes that are copied so far, and the rate."""
        copied = f"{self._what} {format_bytes(self.num_bytes)} of {format_bytes(self._total_bytes)}"
        return f"{copied} ({gb_per_s(self._bytes_per_s)})" if self._last_s > self._first_s else copied

    @property
    def _bytes_per_s(self) -> float:
        """The rate since the first piece was copied. The time before is for allocating files."""
        return (self.num_bytes - self._first_bytes) / (self._last_s - self._first_s)


@dataclass(frozen=True)
class Piece:
    """Elements of a record that are all in one shard."""

    block: str
    kind: str
    dtype: str
    start: int
    stop: int
    source: int
    """The index of the shard."""

    def in_memory(self, memory: Tensor) -> Tensor:
        """Return a view of the beginning of ``memory``, a tensor of bytes, with the dtype and size of this piece."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return memory[: (self.stop - self.start) * dtype.itemsize].view(dtype)


def pieces_of(
    records: Sequence[RecordSpec], shards: Sequence[Sequence[RecordSpec]], folders: Sequence[str]
) -> Iterator[Piece]:
    """Divide records into pieces of at most `COPY_BYTES`, each within one of the ``shards``. If an element is in no
    shard, raises `StorageError` with ``folders``, the folders of the shards."""
    by_name: dict[tuple[str, str], list[tuple[int, RecordSpec]]] = {}
    for number, shard in enumerate(shards):
        for part in shard:
            by_name.setdefault((part.block, part.kind), []).append((number, part))
    for record in records:
        start, end = record.first, record.first + record.numel
        numel_at_once = COPY_BYTES // record.granule_bytes * record.granule_numel
        parts = by_name.get((record.block, record.kind), [])
        while start < end:
            source, shard_end = next(
                (
                    (number, part.first + part.numel)
                    for number, part in parts
                    if part.first <= start < part.first + part.numel
                ),
                (None, end),
            )
            if source is None:
                raise StorageError(
                    f"no element {start} of {record.kind} of {record.block} is in",
                    path=" or ".join(folders),
                    advice="give the stores of all ranks of the run, or resume from a checkpoint",
                )
            stop = min(shard_end, end, start + numel_at_once)
            yield Piece(record.block, record.kind, record.dtype, start, stop, source)
            start = stop
