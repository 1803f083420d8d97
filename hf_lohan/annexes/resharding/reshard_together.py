"""Copies the last step of a run to stores for another number of ranks. All ranks copy together.

`reshard` does the same in one process, for `lohan reshard`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hf_lohan.annexes.resharding.copied_commits import OldRun, OldStore, facts_of_all
from hf_lohan.annexes.resharding.reshard import (
    COPY_BYTES,
    OverlappedCopies,
    Piece,
    check_records,
    checksums_of,
    io_engine,
    new_store,
    owners_in,
    pieces_of,
    records_by_rank,
)
from hf_lohan.checkpoint.generations import RunStores, SeenStore
from hf_lohan.device import mapped_empty
from hf_lohan.engine.parameter_access import another_base_error
from hf_lohan.files import (
    CapacityError,
    CorruptionError,
    ForeignStoreError,
    IoEngine,
    StorageError,
    StorePath,
)
from hf_lohan.files.data_file import byte_tensor
from hf_lohan.huggingface.models.export import described_model
from hf_lohan.model import Block
from hf_lohan.ranks import Links, RankLane, bytes_of, one_rank_at_a_time
from hf_lohan.store import RecordSpec, Store
from hf_lohan.store.versions import Checksums

_TOGETHER_BYTES = 256 << 20
"""All ranks synchronize after one has copied this many bytes, because a rank that waits longer would count as hung."""


def reshard_together(
    found: RunStores,
    links: Links,
    launch_id: str | None,
    capacities: Sequence[int | None] = (),
    opened: tuple[Store, Sequence[Block]] | None = None,
    on_copied: Callable[[int, int], object] = lambda num_bytes, total_bytes: None,
) -> None:
    """Copy the last step of the stores that were ``found`` to new stores of these ranks. The old stores are unchanged.
    ``capacities``: capacities of this rank's paths; None is all free space. ``opened``: this rank's own store and its
    blocks, if a model was loaded to it. The store has no commit. After an error it may have weights of both models.
    ``on_copied(num_bytes, total_bytes)`` is called for each piece that any rank has copied.

    A rank reads the old stores that it sees, and gets the records of other stores from a rank that sees them. Reads are
    verified. Raises `CorruptionError`, `CapacityError`, `StorageError`, `StoreInUseError`, `ForeignStoreError` if the
    loaded model has another base, and ValueError if this version divides the model into other records.
    """
    with ExitStack() as stack:
        io = io_engine()
        stack.callback(io.close)
        old = _describe(found, links, io)
        if opened is None:
            folders = found.own_folders(links.ranks.rank, links.ranks.num_ranks)
            all_free = [None] * len(folders)
            paths = [StorePath(*of_path) for of_path in zip(folders, capacities or all_free, strict=True)]
            with one_rank_at_a_time(links, "the new stores"):  # the stores may share a drive
                try:
                    store = new_store(paths, old, links.ranks.rank, io)
                except CapacityError as error:
                    raise CapacityError(error.shortfalls, may_delete=found.may_delete(links.ranks.rank)) from error
                stack.push(store)
        else:
            store = opened[0]
            _refuse_another_model(store, old.shards[links.ranks.rank], old)
        loaded = () if opened is None else opened[1]
        lane = links.open("pieces of old stores", carries="weights", stops_compute=True)

        def copied(num_bytes: int) -> None:
            on_copied(num_bytes, old.num_bytes)

        for writer in range(links.ranks.num_ranks):
            _copy_shard(found, old, store, loaded, writer, links, lane, io, copied)
        facts = facts_of_all([of_rank.facts for of_rank in old.stores])
        facts["launch_id"] = launch_id if found.is_of_launch else facts.get("launch_id")
        old.commit(store, links.ranks.rank, facts)
        links.barrier("the new stores to be committed")


def _stores(found: RunStores) -> list[SeenStore]:
    assert found.found is not None
    return [found.found.stores[rank] for rank in range(found.num_ranks)]


def _refuse_another_model(opened: Store, records: Sequence[RecordSpec], old: OldRun) -> None:
    """Raise `ForeignStoreError` if the records of the old run do not fit this rank's open store."""
    where = opened.paths[0].path
    if opened.num_homes != old.num_homes:
        raise ForeignStoreError(
            f"the old stores have durability {'step' if old.num_homes > 1 else 'checkpoint'!r}, and the new store in "
            f"{where} has durability {opened.durability!r}, because the setting has changed, or two versions did not "
            "fit beside the old stores; free some space if needed, delete the new store (it has no committed step), "
            "and start again with the durability of the old stores"
        )
    if opened.model.fingerprint != old.model.fingerprint or opened.records != tuple(records):
        raise ForeignStoreError(
            f"the store in {where} is for a different model than the old stores; load the model with the settings of "
            "the old run, or give this run another ssd path"
        )
    assert opened.committed is None, "the store was created for this run"


def _refuse_another_base(
    store: Store, blocks: Sequence[Block], piece: Piece, content: Tensor, checksums: Checksums, folder: str
) -> None:
    """Raise `ForeignStoreError` if frozen weights of a loaded model differ from a piece of the run in ``folder``.
    ``store`` has the loaded weights. It is read only if its checksums differ from the ``checksums`` of the piece."""
    record = store.layout.record(piece.block, piece.kind)
    numel, first = record.granule_numel, (piece.start - record.first) // record.granule_numel
    _, loaded = store.versions.live(piece.block, piece.kind, first, first + len(checksums))
    for granule in map(int, np.flatnonzero(checksums != loaded)):
        if (first + granule) * numel < record.versioned_numel:
            continue  # the parameter is trained
        of_run = content[granule * numel : (granule + 1) * numel]
        of_model = mapped_empty(of_run.nbytes).view(of_run.dtype)
        store.read(piece.block, piece.kind, piece.start + granule * numel, of_model).wait()
        differs = (of_run.view(torch.uint8) != of_model.view(torch.uint8)).nonzero()
        if len(differs):
            element = piece.start + granule * numel + int(differs[0]) // of_run.element_size()
            raise another_base_error(folder, _weight_at(blocks, piece, element))


def _weight_at(blocks: Sequence[Block], piece: Piece, element: int) -> str:
    """Return the name of the weight that has this element of the piece's record."""
    block = next(block for block in blocks if block.name == piece.block)
    for part in block.slices:
        start, stop = {
            "codes": (part.codes_start, part.codes_stop),
            "scales": (part.scales_start, part.scales_stop),
        }.get(piece.kind, (part.start, part.stop))
        if start <= element < stop:
            return part.name
    return block.name


def _describe(found: RunStores, links: Links, io: IoEngine) -> OldRun:
    """Return the facts of the old run that all ranks need. The first rank that sees an old store describes it."""
    seen_stores, key, num_ranks = _stores(found), found.last.key, links.ranks.num_ranks
    own: dict[int, OldStore] = {}
    for seen in seen_stores:
        if seen.seen_by == links.ranks.rank:
            with _opened(seen.directories, key, io) as store:
                own[seen.rank] = OldStore.of(store)
    by_rank: dict[int, OldStore] = {}
    for told in links.all_gather_object("the content of the old stores", own):
        by_rank |= told
    stores = [by_rank[rank] for rank in range(found.num_ranks)]
    records, first, divided = [old.records for old in stores], seen_stores[0], None
    if first.seen_by == links.ranks.rank:
        with _opened(first.directories, key, io) as store:
            _, form = described_model(store)
            old_shards = records_by_rank(form, found.num_ranks, owners_in(form, records))
            copied = [(seen.store_id, seen.newest) for seen in seen_stores]
            divided = OldRun.of(store, [], copied, records_by_rank(form, num_ranks)), old_shards
    run, old_shards = next(filter(None, links.all_gather_object("how the new stores are divided", divided)))
    check_records(old_shards, records, [seen.directories[0] for seen in seen_stores])
    old: OldRun = replace(run, stores=stores)
    old.refuse_deferred_steps(first.directories[0])
    return old


def _opened(directories: Sequence[str], key: tuple[str, int], io: IoEngine) -> Store:
    """Open an old store for reading at its commit ``key``."""
    store = Store.open([StorePath(path) for path in directories], model=None, engine=io)
    try:
        kept = [commit for commit in store.kept_commits if commit.key == key]
        if not kept:
            advice = "start again when no other run uses the store"
            raise StorageError("another step was committed meanwhile in", path=directories[0], advice=advice)
        store.view_commit(kept[0])
    except BaseException:
        store.close()
        raise
    return store


def _copy_shard(
    found: RunStores,
    old: OldRun,
    new: Store,
    loaded: Sequence[Block],
    writer: int,
    links: Links,
    lane: RankLane,
    io: IoEngine,
    on_copied: Callable[[int], object],
) -> None:
    """Copy the new shard of rank ``writer``. ``new`` is this rank's own store. ``loaded`` has the blocks of a model
    that was loaded to it before. The model's frozen weights must equal the old run's. Copies of pieces that the writer
    itself reads run concurrently. A piece of another rank is sent after all pieces before it are written."""
    me, memory = links.ranks.rank, mapped_empty(COPY_BYTES)
    reader_of = {seen.rank: writer if (writer, seen.rank) in found.visible else seen.seen_by for seen in _stores(found)}
    copied_bytes, folders = 0, [seen.directories[0] for seen in _stores(found)]

    def check(piece: Piece, content: Tensor, checksums: Checksums) -> None:
        if loaded:
            _refuse_another_base(new, loaded, piece, content, checksums, folders[0])

    with ExitStack() as stack:
        stores: dict[int, Store] = {}
        copies = stack.enter_context(OverlappedCopies(on_copied, check))
        for piece in pieces_of(old.shards[writer], [of_rank.records for of_rank in old.stores], folders):
            reader, content = reader_of[piece.source], piece.in_memory(memory)
            copied_bytes += content.nbytes
            if reader != writer or copied_bytes >= _TOGETHER_BYTES:
                copied_bytes = 0
                copies.finish()
                links.barrier("the stores to be resharded")  # now the writer has written all earlier pieces
            if me == reader and piece.source not in stores:
                seen = found.visible[me, piece.source]
                stores[piece.source] = stack.enter_context(_opened(seen, found.last.key, io))
            if me == reader == writer:
                copies.add(stores[piece.source], new, piece)
                continue
            if me == reader:
                stores[piece.source].read(piece.block, piece.kind, piece.start, content).wait()
            if reader != writer:
                _hand_over(content, reader, writer, lane)
            checksums = sent = None
            if me == reader:
                sent = byte_tensor(torch.from_numpy(checksums_of(stores[piece.source], piece, content)))
            if me == writer:
                checksums = new.checksums(piece.block, piece.kind, content)
                sent = torch.empty(checksums.nbytes, dtype=torch.uint8) if sent is None else sent
            if reader != writer:
                _hand_over(sent, reader, writer, lane)
            if checksums is not None and sent is not None:
                if not np.array_equal(sent.numpy(), checksums.view(np.uint8)):
                    raise CorruptionError(
                        f"{piece.kind} of {piece.block}, elements {piece.start} to {piece.stop}, changed in transit "
                        f"from rank {reader} to rank {me}; it was read without damage from",
                        path=folders[piece.source],
                        advice="check the network and the memory of both machines, and start again",
                    )
                check(piece, content, checksums)
                new.write(piece.block, piece.kind, piece.start, content, checksums=checksums).wait()
            on_copied(content.nbytes)
        copies.finish()
    links.barrier("a new store to be copied")


def _hand_over(content: Tensor | None, reader: int, writer: int, lane: RankLane) -> None:
    """Send ``content`` from rank ``reader`` to rank ``writer``. All ranks call this. Others' content is unused."""
    me = lane.place
    flat = bytes_of(content) if content is not None and me in (reader, writer) else torch.empty(0, dtype=torch.uint8)
    sent = [flat.numel() * (me == reader and rank == writer) for rank in lane.members]
    got = [flat.numel() * (me == writer and rank == reader) for rank in lane.members]
    lane.exchange(flat[: sum(sent)], sent, flat[: sum(got)], got, "a piece of an old store")
