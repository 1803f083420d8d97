"""Copies a run's last step to stores of another number of ranks, all ranks together.

`resharding` does the same in one process, for `lohan reshard`.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_lohan.annexes.resharding.copied_commits import (
    chunks_of_all,
    facts_of_all,
    keep_chunks,
    marked_as_copy,
    refuse_deferred_steps,
)
from hf_lohan.annexes.resharding.reshard import (
    COPY_BYTES,
    OverlappedCopies,
    Piece,
    check_records,
    checksums_of,
    io_engine,
    journal_of_rank,
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
from hf_lohan.model import Block, StoredForm
from hf_lohan.planning.run_plan import RUN_ID
from hf_lohan.ranks import Links, RankLane, bytes_of, one_rank_at_a_time
from hf_lohan.store import ModelIdentity, RecordSpec, Store
from hf_lohan.store.versions import Checksums, TieCodes

_TOGETHER_BYTES = 256 << 20
"""Bytes that one rank copies before all ranks meet again. A rank that waits longer would count as hung."""


def reshard_together(
    found: RunStores,
    links: Links,
    form_of: Callable[[Store], StoredForm],
    launch_id: str | None,
    capacities: Sequence[int | None] = (),
    opened: tuple[Store, Sequence[Block]] | None = None,
    on_copied: Callable[[int, int], object] = lambda num_bytes, total_bytes: None,
) -> None:
    """Copy the last step of the stores that were ``found`` to new stores of these ranks. The old stores stay as they
    are. ``capacities`` are those of this rank's paths; None is all free space. ``opened``: this rank's own store and
    its blocks, if a model was loaded to it. It has no commit, and after an error it may have weights of both models.
    ``on_copied`` is called with the bytes of each copied piece, also of other ranks, and of all pieces.

    A rank reads the old stores that it sees. Of the others it gets the records from a rank that sees them. Reads are
    verified. Raises `CorruptionError`, `CapacityError`, `StorageError`, `StoreInUseError`, `ForeignStoreError` if the
    loaded model has another base, and ValueError if this version cannot cut the stores.
    """
    with ExitStack() as stack:
        io = io_engine()
        stack.callback(io.close)
        old = _describe(found, links, io, form_of)
        new = old.shards[links.ranks.rank]
        if opened is None:
            folders = found.own_folders(links.ranks.rank, links.ranks.num_ranks)
            all_free = [None] * len(folders)
            paths = [StorePath(*of_path) for of_path in zip(folders, capacities or all_free, strict=True)]
            with one_rank_at_a_time(links, "the new stores"):  # they may share a drive
                try:
                    store = new_store(paths, new, old.model, old.num_homes, io)
                except CapacityError as error:
                    raise CapacityError(error.shortfalls, may_delete=found.may_delete(links.ranks.rank)) from error
                stack.push(store)
        else:
            store = opened[0]
            _refuse_another_model(store, new, old)
        loaded = () if opened is None else opened[1]
        total_bytes = sum(record.num_bytes for shard in old.shards for record in shard)
        lane = links.open("pieces of old stores", carries="weights", stops_compute=True)
        for writer in range(links.ranks.num_ranks):
            _copy_shard(
                found, old, store, loaded, writer, links, lane, io, lambda num_bytes: on_copied(num_bytes, total_bytes)
            )
        copied = [(seen.store_id, seen.newest) for seen in _stores(found)]
        facts = marked_as_copy(facts_of_all(old.facts), copied)
        facts["launch_id"] = launch_id if found.is_of_launch else facts.get("launch_id")
        group_id, number = found.last.key
        store.count_commits_from(number, (group_id or old.new_group_id) if len(old.shards) > 1 else "")
        keep_chunks(old.chunks, store.paths[0].path)
        journal = journal_of_rank(old.journals, links.ranks.rank, links.ranks.num_ranks)
        store.take_tie_codes(old.tie_codes)
        store.commit(facts, journal, old.log, model_files=old.model_files, rounds_half_up=old.rounds_half_up)
        links.barrier("the new stores to be committed")


def _stores(found: RunStores) -> list[SeenStore]:
    """Return the old stores in rank order."""
    assert found.found is not None
    return [found.found.stores[rank] for rank in range(found.num_ranks)]


def _refuse_another_model(opened: Store, records: Sequence[RecordSpec], old: _OldRun) -> None:
    """Raise `ForeignStoreError` if this rank's open store cannot get the old run's records."""
    where = opened.paths[0].path
    if opened.num_homes != old.num_homes:
        raise ForeignStoreError(
            f"the stores of the ranks before have durability {'step' if old.num_homes > 1 else 'checkpoint'!r}, and "
            f"the new one in {where}, which has no step, has durability {opened.durability!r}, by the setting or "
            "because two versions did not fit beside the old stores; make room if it lacks, delete the new store, and "
            "start again with the durability of before"
        )
    if opened.model.fingerprint != old.model.fingerprint or opened.records != tuple(records):
        raise ForeignStoreError(
            f"{where} holds a store of another model than those of the ranks before; load the model with the settings "
            "that it had then, or give this run another ssd path"
        )
    assert opened.committed is None, "it was made for this run"


def _refuse_another_base(
    store: Store, blocks: Sequence[Block], piece: Piece, content: Tensor, checksums: Checksums, folder: str
) -> None:
    """Raise `ForeignStoreError` if a loaded model has other frozen weights than a piece of the run in ``folder``.
    ``store`` has the loaded weights, and is read only where their checksums differ from the piece's ``checksums``."""
    record = store.layout.record(piece.block, piece.kind)
    numel, first = record.granule_numel, (piece.start - record.first) // record.granule_numel
    _, loaded = store.versions.live(piece.block, piece.kind, first, first + len(checksums))
    for granule in map(int, np.flatnonzero(checksums != loaded)):
        if (first + granule) * numel < record.versioned_numel:
            continue  # it is trained
        of_run = content[granule * numel : (granule + 1) * numel]
        of_model = mapped_empty(of_run.nbytes).view(of_run.dtype)
        store.read(piece.block, piece.kind, piece.start + granule * numel, of_model).wait()
        differs = (of_run.view(torch.uint8) != of_model.view(torch.uint8)).nonzero()
        if len(differs):
            element = piece.start + granule * numel + int(differs[0]) // of_run.element_size()
            raise another_base_error(folder, _weight_at(blocks, piece, element))


def _weight_at(blocks: Sequence[Block], piece: Piece, element: int) -> str:
    """Return the name of the weight with this element of the piece's record."""
    block = next(block for block in blocks if block.name == piece.block)
    for part in block.slices:
        start, stop = {
            "codes": (part.codes_start, part.codes_stop),
            "scales": (part.scales_start, part.scales_stop),
        }.get(piece.kind, (part.start, part.stop))
        if start <= element < stop:
            return part.name
    return block.name


@dataclass(frozen=True)
class _OldRun:
    """What all ranks must know of the old stores."""

    records: Sequence[tuple[RecordSpec, ...]]
    """By old rank."""
    facts: Sequence[Mapping[str, Any]]
    journals: Sequence[Mapping[str, bytes]]
    tie_codes: Sequence[Mapping[str, tuple[int, TieCodes]]]
    rounds_half_up: bool
    shards: Sequence[tuple[RecordSpec, ...]]
    """The records of each rank of this run."""
    model: ModelIdentity
    num_homes: int
    log: bytes
    model_files: Mapping[str, bytes] | None
    chunks: bytes | None
    """The file with the tokens of a chunk that the run has decided."""
    new_group_id: str


def _describe(found: RunStores, links: Links, io: IoEngine, form_of: Callable[[Store], StoredForm]) -> _OldRun:
    described, stores = {}, _stores(found)
    for seen in stores:
        if seen.seen_by == links.ranks.rank:
            with _opened(seen.directories, found.last.key, io) as store:
                described[seen.rank] = _description(store)
    packed = links.all_gather("what the old stores hold", json.dumps(described).encode())
    by_rank = {int(rank): content for of_rank in packed for rank, content in json.loads(of_rank).items()}
    every = [by_rank[rank] for rank in range(found.num_ranks)]
    records, journals = [_records(own["records"]) for own in every], [_decoded(own["journal"]) for own in every]
    of_run = {}
    first_store = stores[0]
    if first_store.seen_by == links.ranks.rank:
        with _opened(first_store.directories, found.last.key, io) as store:
            form = form_of(store)
            old_shards = records_by_rank(form, found.num_ranks, owners_in(form, records))
            of_run = _description_of_run(store, old_shards, records_by_rank(form, links.ranks.num_ranks))
    told = links.all_gather("how the new stores are divided", json.dumps(of_run).encode())
    first = next(filter(None, map(json.loads, told)))
    check_records([_records(shard) for shard in first["old_shards"]], records, [s.directories[0] for s in stores])
    refuse_deferred_steps(journals, stores[0].directories[0])
    return _OldRun(
        records,
        [content["facts"] for content in every],
        journals,
        [
            {
                block: (first, np.frombuffer(base64.b64decode(codes), np.int16))
                for block, first, codes in own["tie_codes"]
            }
            for own in every
        ],
        any(own["rounds_half_up"] for own in every),
        [_records(shard) for shard in first["shards"]],
        ModelIdentity(**first["model"]),
        first["num_homes"],
        base64.b64decode(first["log"]),
        None if first["model_files"] is None else _decoded(first["model_files"]),
        next((base64.b64decode(content["chunks"]) for content in every if content["chunks"] is not None), None),
        first["new_group_id"],
    )


def _description(store: Store) -> dict[str, Any]:
    assert store.committed is not None
    chunks = chunks_of_all([store.paths[0].path], store.committed.facts.get(RUN_ID))
    return {
        "chunks": None if chunks is None else base64.b64encode(chunks).decode(),
        "records": [asdict(record) for record in store.records],
        "facts": dict(store.committed.facts),
        "journal": _encoded(store.committed.journal),
        "rounds_half_up": store.committed.ties is None,
        "tie_codes": [
            (block, first, base64.b64encode(codes.tobytes()).decode())
            for block, (first, codes) in store.all_tie_codes().items()
        ],
    }


def _description_of_run(
    store: Store, old_shards: Sequence[Sequence[RecordSpec]], shards: Sequence[Sequence[RecordSpec]]
) -> dict[str, Any]:
    files = store.model_files
    return {
        "old_shards": [[asdict(record) for record in shard] for shard in old_shards],
        "shards": [[asdict(record) for record in shard] for shard in shards],
        "model": store.model.to_json(),
        "num_homes": store.num_homes,
        "log": base64.b64encode(store.log).decode(),
        "model_files": None if files is None else _encoded(files),
        "new_group_id": uuid.uuid4().hex,
    }


def _records(shard: Sequence[Mapping[str, Any]]) -> tuple[RecordSpec, ...]:
    return tuple(RecordSpec(**fields) for fields in shard)


def _encoded(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(content).decode() for name, content in files.items()}


def _decoded(files: Mapping[str, str]) -> dict[str, bytes]:
    return {name: base64.b64decode(content) for name, content in files.items()}


def _opened(directories: Sequence[str], key: tuple[str, int], io: IoEngine) -> Store:
    """Open an old store at its commit ``key``, to read it."""
    store = Store.open([StorePath(path) for path in directories], model=None, engine=io)
    try:
        kept = [commit for commit in store.kept_commits if (commit.group_id, commit.number) == key]
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
    old: _OldRun,
    new: Store,
    loaded: Sequence[Block],
    writer: int,
    links: Links,
    lane: RankLane,
    io: IoEngine,
    on_copied: Callable[[int], object],
) -> None:
    """Copy the new shard of rank ``writer``. ``new`` is this rank's own store, and ``loaded`` the blocks of the model
    that was loaded to it before, which it must fit. Pieces that the writer reads itself overlap. A piece of another
    rank is sent when all before it are written."""
    me, memory = links.ranks.rank, mapped_empty(COPY_BYTES)
    reader_of = {seen.rank: writer if (writer, seen.rank) in found.visible else seen.seen_by for seen in _stores(found)}
    copied_bytes, folder = 0, _stores(found)[0].directories[0]

    def check(piece: Piece, content: Tensor, checksums: Checksums) -> None:
        if loaded:
            _refuse_another_base(new, loaded, piece, content, checksums, folder)

    with ExitStack() as stack:
        stores: dict[int, Store] = {}
        copies = stack.enter_context(OverlappedCopies(on_copied, check))
        for piece in pieces_of(old.shards[writer], old.records):
            if piece.source is None:
                raise StorageError(
                    f"no element {piece.start} of {piece.kind} of {piece.block} is in",
                    path=folder,
                    advice="resume from a checkpoint",
                )
            reader, content = reader_of[piece.source], piece.in_memory(memory)
            copied_bytes += content.nbytes
            if reader != writer or copied_bytes >= _TOGETHER_BYTES:
                copied_bytes = 0
                copies.finish()
                links.barrier("the stores to be resharded")  # the writer has written what it got before
            if me == reader and piece.source not in stores:
                folders = found.visible[me, piece.source]
                stores[piece.source] = stack.enter_context(_opened(folders, found.last.key, io))
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
                        f"{piece.kind} of {piece.block}, elements {piece.start} to {piece.stop}, changed on the way "
                        f"from rank {reader} to rank {me}; it was read without damage from",
                        path=_stores(found)[piece.source].directories[0],
                        advice="check the network and the memory of both machines, and start again",
                    )
                check(piece, content, checksums)
                new.write(piece.block, piece.kind, piece.start, content, checksums=checksums).wait()
            on_copied(content.nbytes)
        copies.finish()
    links.barrier("a new store to be copied")


def _hand_over(content: Tensor | None, reader: int, writer: int, lane: RankLane) -> None:
    """Copy ``content`` of one rank to that of another. All ranks call this, and the others' content is not used."""
    me = lane.place
    flat = bytes_of(content) if content is not None and me in (reader, writer) else torch.empty(0, dtype=torch.uint8)
    sent = [flat.numel() * (me == reader and rank == writer) for rank in lane.members]
    got = [flat.numel() * (me == writer and rank == reader) for rank in lane.members]
    lane.exchange(flat[: sum(sent)], sent, flat[: sum(got)], got, "a piece of an old store")
