"""Continues a run with another number of ranks: finds the stores of the ranks before, and cuts them anew.

All ranks call these functions together. New stores are a draft: each of their commits says from how many ranks it was
cut, until the first step commits without that. The old stores are removed only when all new ones are committed. So a
run that is killed at any time finds the old stores complete, or the new ones, and goes on from there.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import Tensor

from hf_lohan.checkpoint.resharding import (
    COPY_BYTES,
    check_records,
    facts_of_all,
    io_engine,
    journal_of_rank,
    pieces_of,
    records_by_rank,
    refuse_deferred_steps,
)
from hf_lohan.checkpoint.resume_point import is_resumable
from hf_lohan.device import mapped_empty
from hf_lohan.files import IoEngine, StorageError, StorePath
from hf_lohan.files.directories import make_folders, sync_directory
from hf_lohan.files.durable_file import remove_folder
from hf_lohan.files.lock import DirectoryLock
from hf_lohan.model import StoredForm
from hf_lohan.ranks import Channel, Kind, Links, PayloadReader, one_rank_at_a_time
from hf_lohan.store import Commit, ModelIdentity, RecordSpec, Store, kept_commits
from hf_lohan.store.commits import ImmediateAgreement, read_commit
from hf_lohan.store.manifest import read_manifest
from hf_lohan.store.rank_folders import rank_folder, shared_directory, stores_under
from hf_lohan.store.store_folders import names_in, remove_store

CUT_FROM = "cut_from"
"""Name of a fact in the commit of a store that was cut anew: the number of ranks before."""
_LOST_FOLDER = re.compile(r"lost-store-of-\d+(-\d+)?")
_TOGETHER_BYTES = 256 << 20
"""Bytes that one rank copies before all ranks meet again. A rank that waits longer would count as hung."""


@dataclass(frozen=True)
class _Kept:
    """What a rank tells the others about a commit of a store."""

    group_id: str
    number: int
    step: int
    is_resumable: bool
    cut_from: int | None
    launch_id: str | None
    last_checkpoint: str | None
    output_dir: str

    @classmethod
    def of(cls, commit: Commit) -> _Kept:
        facts, step = commit.facts, commit.facts.get("global_step")
        return cls(
            commit.group_id,
            commit.number,
            step if type(step) is int else 0,
            is_resumable(commit),
            facts.get(CUT_FROM),
            facts.get("launch_id"),
            facts.get("last_checkpoint"),
            str(facts.get("output_dir")),
        )

    @property
    def key(self) -> tuple[str, int]:
        return self.group_id, self.number


@dataclass(frozen=True)
class _SeenStore:
    """The store of one rank of another number of ranks, as a rank of this run sees it."""

    seen_by: int
    num_ranks: int
    rank: int
    directories: tuple[str, ...]
    store_id: str
    fingerprint: str
    commits: tuple[_Kept, ...]


@dataclass(frozen=True)
class _Report:
    """What one rank of this run sees."""

    committed: tuple[_Kept, ...]
    """In its own store."""
    others: tuple[_SeenStore, ...]
    lost: tuple[_Kept, ...]
    launch_id: str | None

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> _Report:
        fields = json.loads(packed)
        others = [
            {**seen, "directories": tuple(seen["directories"]), "commits": _kept(seen["commits"])}
            for seen in fields["others"]
        ]
        return cls(
            _kept(fields["committed"]),
            tuple(_SeenStore(**seen) for seen in others),
            _kept(fields["lost"]),
            fields["launch_id"],
        )


def _kept(commits: Sequence[Mapping[str, Any]]) -> tuple[_Kept, ...]:
    return tuple(_Kept(**commit) for commit in commits)


@dataclass(frozen=True)
class OtherRanks:
    """What is left of a run of another number of ranks."""

    state: Literal["nothing", "cuttable", "cut", "lost"]
    """With `cuttable` all stores of the ranks before are there. With `cut` they have been cut anew for this run. With
    `lost` a part of them is gone, so that only a checkpoint is left."""
    directories: Sequence[Sequence[str]] = field(repr=False)
    """Each element is one list of the ssd paths, without a rank's folder."""
    num_ranks: int = 0
    """The number of ranks before."""
    step: int = 0
    """Their last committed step."""
    is_of_launch: bool = False
    """Whether an earlier attempt of this launch committed it."""
    why_lost: str = ""
    last_checkpoint: str | None = None
    """The checkpoint that their last commit names."""
    left_over: tuple[int, ...] = ()
    """Numbers of ranks whose stores are copies, or are older than those of this run."""
    output_dir: str = ""
    fingerprint: str = ""
    key: tuple[str, int] = ("", 0)
    stores: tuple[_SeenStore, ...] = field(default=(), repr=False)
    """One for each old rank, in rank order."""
    visible: Mapping[tuple[int, int], tuple[str, ...]] = field(default_factory=dict, repr=False)
    """The folders of an old rank's store, by a rank of this run that sees it, and the old rank."""

    def is_of_run(self, output_dir: str, default_store: str) -> bool:
        """Return whether the run in ``output_dir`` made them. It may have been moved with the store in it."""
        is_inside = [*map(os.path.realpath, self.directories[0])] == [os.path.realpath(default_store)]
        return self.output_dir == os.path.realpath(output_dir) or is_inside


def find_other_ranks(
    directories: Sequence[Sequence[str]], own_paths: Sequence[str], links: Links, launch_id: str | None
) -> OtherRanks:
    """Return what is left of a run with another number of ranks, which is the same on all ranks. ``directories`` are
    all lists of ssd paths at which a rank of this machine may have its store, and ``own_paths`` those of this rank's.
    Changes nothing. Raises the errors of `kept_commits`, and ValueError if several runs are complete."""
    ranks = links.ranks
    own = tuple(map(_Kept.of, kept_commits(own_paths)))
    others = tuple(_seen(directories, ranks.rank, ranks.num_ranks))
    report = _Report(own, others, tuple(_lost_commits(directories)), launch_id)
    packed = links.all_gather("the stores that each rank sees", report.pack())
    return _judge([_Report.unpack(of_rank) for of_rank in packed], directories)


def _seen(directories: Sequence[Sequence[str]], seen_by: int, own_num_ranks: int) -> Iterator[_SeenStore]:
    for paths in directories:
        for num_ranks, stores in stores_under(paths[0]).items():
            for rank, _ in stores if num_ranks != own_num_ranks else ():
                folders = tuple(rank_folder(path, rank, num_ranks) for path in paths)
                manifest = read_manifest(folders[0])
                if manifest is not None:
                    commits = tuple(map(_Kept.of, kept_commits(folders)))
                    store_id, fingerprint = manifest.store_id, manifest.model.fingerprint
                    yield _SeenStore(seen_by, num_ranks, rank, folders, store_id, fingerprint, commits)


def _lost_commits(directories: Sequence[Sequence[str]]) -> Iterator[_Kept]:
    for path in {path for paths in directories for path in paths if os.path.isdir(path)}:
        for name in filter(_LOST_FOLDER.fullmatch, os.listdir(path)):
            for folder, _, names in os.walk(os.path.join(path, name)):
                commit = read_commit(folder) if "manifest.json" in names else None
                if commit is not None:
                    yield _Kept.of(commit)


def _judge(reports: Sequence[_Report], directories: Sequence[Sequence[str]]) -> OtherRanks:
    num_ranks = len(reports)
    launches = {report.launch_id for report in reports} - {None}
    runs: dict[int, dict[int, _SeenStore]] = {}
    for seen in (seen for report in reports for seen in report.others):
        stores = runs.setdefault(seen.num_ranks, {})
        stores[seen.rank] = _only(stores.get(seen.rank, seen), seen, launches)
    complete = {
        number: commit
        for number, stores in runs.items()
        if len(stores) == number and (commit := _common([stores[rank].commits for rank in range(number)])) is not None
    }
    own = _common([report.committed for report in reports])
    drafts = tuple(number for number, stores in runs.items() if _are_drafts(store.commits for store in stores.values()))
    if own is not None and own.cut_from is None:
        return OtherRanks("nothing", directories, left_over=drafts, output_dir=own.output_dir)

    def found(state: Literal["cuttable", "cut", "lost"], number: int, commit: _Kept, why_lost: str = "") -> OtherRanks:
        stores = tuple(store for _, store in sorted(runs.get(number, {}).items()))
        return OtherRanks(
            state,
            directories,
            number,
            commit.step,
            commit.launch_id in launches,
            why_lost,
            commit.last_checkpoint,
            tuple({number, *drafts}) if state != "lost" else (),
            commit.output_dir,
            stores[0].fingerprint if stores else "",
            commit.key,
            stores,
            {
                (seen.seen_by, seen.rank): seen.directories
                for report in reports
                for seen in report.others
                if (seen.num_ranks, seen.store_id) == (number, runs[number][seen.rank].store_id)
            },
        )

    if own is not None:
        before = complete.get(own.cut_from or 0)
        if before is None or (before.number, before.step) == (own.number, own.step):
            return found("cut", own.cut_from or 0, own)
    candidates = [number for number in complete if number not in drafts] or [*complete]
    every = [commit for report in reports for commit in report.committed]
    half_own = [commit for commit in every if commit.is_resumable and commit.cut_from is None]
    if len(candidates) > 1 or (candidates and half_own):
        counts = " and ".join(map(str, sorted([*candidates, *([num_ranks] if half_own else [])])))
        raise ValueError(
            f"{directories[0][0]} holds stores of runs with {counts} ranks, and only one of these runs can continue; "
            "delete the stores of the others on each ssd path"
        )
    for number in candidates:
        commit = complete[number]
        if commit.is_resumable:
            return found("cuttable", number, commit)
        return found("lost", number, commit, "they have no whole step, as with durability: checkpoint")
    broken = [
        (commit.step, number, commit)
        for number, stores in runs.items()
        for store in stores.values()
        for commit in store.commits
    ]
    if broken:
        _, number, commit = max(broken, key=lambda found: found[0])
        missing = [rank for rank in range(number) if rank not in runs[number] or not runs[number][rank].commits]
        ranks = " and ".join(map(str, missing))
        why = f"the store of rank {ranks} of {number} is gone" if missing else "their stores have no common step"
        return found("lost", number, commit, why)
    empty = [rank for rank, report in enumerate(reports) if not report.committed]
    if half_own and empty and any(commit.launch_id in launches for commit in half_own):
        commit = max(half_own, key=lambda kept: kept.step)
        return found("lost", num_ranks, commit, f"the store of rank {empty[0]} of {num_ranks} is gone")
    lost = [commit for report in reports for commit in report.lost if commit.launch_id in launches]
    if lost and not every:
        commit = max(lost, key=lambda kept: kept.step)
        return found("lost", 0, commit, "a part of the stores is gone")
    return OtherRanks("nothing", directories)


def _only(first: _SeenStore, second: _SeenStore, launches: Set[str | None]) -> _SeenStore:
    """Return the store that counts of two that are seen in the same folder, perhaps on two machines."""
    if first.store_id == second.store_id or not second.commits:
        return first
    if not first.commits:
        return second
    are_of_launch = [any(commit.launch_id in launches for commit in seen.commits) for seen in (first, second)]
    if are_of_launch[0] == are_of_launch[1]:
        raise ValueError(
            f"{first.directories[0]} holds different stores on the machines of rank {first.seen_by} and rank "
            f"{second.seen_by}; delete the one that this run does not continue"
        )
    return first if are_of_launch[0] else second


def _common(commits_by_rank: Sequence[Sequence[_Kept]]) -> _Kept | None:
    """Return rank 0's newest commit that all ranks have, or None."""
    common = set.intersection(*({commit.key for commit in commits} for commits in commits_by_rank))
    shared = [commit for commit in commits_by_rank[0] if commit.key in common]
    return max(shared, key=lambda commit: commit.number) if shared else None


def _are_drafts(commits_by_rank: Iterator[Sequence[_Kept]]) -> bool:
    """Whether all commits are of stores that were cut anew. Stores without a commit have no state."""
    return all(commit.cut_from is not None for commits in commits_by_rank for commit in commits)


def cut_anew(
    found: OtherRanks,
    own_paths: Sequence[str],
    links: Links,
    form_of: Callable[[Store], StoredForm],
    launch_id: str | None,
) -> None:
    """Copy the last step of the stores that were ``found`` to new stores of these ranks, in ``own_paths`` on each. The
    old stores stay as they are.

    A rank reads the old stores that it sees. Of the others it gets the records from a rank that sees them. Reads are
    verified. Raises `CorruptionError`, `CapacityError`, `StorageError`, `StoreInUseError`, and ValueError if this
    version cannot cut the stores.
    """
    with ExitStack() as stack:
        io = io_engine()
        stack.callback(io.close)
        old = _describe(found, links, io, form_of)
        for path in own_paths:
            make_folders(path, mode=0o700)
        paths, new = [StorePath(path) for path in own_paths], old.shards[links.ranks.rank]
        with one_rank_at_a_time(links, "the new stores"):  # they may share a drive
            store = stack.enter_context(Store.create(paths, new, model=old.model, engine=io, num_homes=old.num_homes))
        for writer in range(links.ranks.num_ranks):
            _copy_shard(found, old, store, writer, links, io)
        facts = {**facts_of_all(old.facts), CUT_FROM: found.num_ranks}
        facts["launch_id"] = launch_id if found.is_of_launch else facts.get("launch_id")
        store.count_commits_from(found.key[1])
        if len(old.shards) > 1:
            store.agree_on_commits(ImmediateAgreement(found.key[0] or old.new_group_id))
        journal = journal_of_rank(old.journals, links.ranks.rank, links.ranks.num_ranks)
        store.commit(facts, journal, old.log, model_files=old.model_files)
        links.barrier("the new stores to be committed")


@dataclass(frozen=True)
class _OldRun:
    """What all ranks must know of the old stores."""

    records: Sequence[tuple[RecordSpec, ...]]
    """By old rank."""
    facts: Sequence[Mapping[str, Any]]
    journals: Sequence[Mapping[str, bytes]]
    shards: Sequence[tuple[RecordSpec, ...]]
    """The records of each rank of this run."""
    model: ModelIdentity
    num_homes: int
    log: bytes
    model_files: Mapping[str, bytes] | None
    new_group_id: str


def _describe(found: OtherRanks, links: Links, io: IoEngine, form_of: Callable[[Store], StoredForm]) -> _OldRun:
    described = {}
    for seen in found.stores:
        if seen.seen_by == links.ranks.rank:
            with _opened(seen.directories, found.key, io) as store:
                described[seen.rank] = _description(store)
                if seen.rank == 0:
                    numbers = found.num_ranks, links.ranks.num_ranks
                    described[0] |= _description_of_run(store, *(records_by_rank(form_of(store), n) for n in numbers))
    packed = links.all_gather("what the old stores hold", json.dumps(described).encode())
    by_rank = {int(rank): content for of_rank in packed for rank, content in json.loads(of_rank).items()}
    first, every = by_rank[0], [by_rank[rank] for rank in range(found.num_ranks)]
    records, journals = [_records(own["records"]) for own in every], [_decoded(own["journal"]) for own in every]
    check_records([_records(shard) for shard in first["old_shards"]], records, [s.directories[0] for s in found.stores])
    refuse_deferred_steps(journals, found.stores[0].directories[0])
    return _OldRun(
        records,
        [content["facts"] for content in every],
        journals,
        [_records(shard) for shard in first["shards"]],
        ModelIdentity(**first["model"]),
        first["num_homes"],
        base64.b64decode(first["log"]),
        None if first["model_files"] is None else _decoded(first["model_files"]),
        first["new_group_id"],
    )


def _description(store: Store) -> dict[str, Any]:
    assert store.committed is not None
    return {
        "records": [asdict(record) for record in store.records],
        "facts": dict(store.committed.facts),
        "journal": _encoded(store.committed.journal),
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
        store.view_commit(next(commit for commit in store.kept_commits if (commit.group_id, commit.number) == key))
    except BaseException:
        store.close()
        raise
    return store


def _copy_shard(found: OtherRanks, old: _OldRun, new: Store, writer: int, links: Links, io: IoEngine) -> None:
    """Copy the new shard of rank ``writer``. ``new`` is this rank's own store."""
    me, memory = links.ranks.rank, mapped_empty(COPY_BYTES)
    reader_of = {seen.rank: writer if (writer, seen.rank) in found.visible else seen.seen_by for seen in found.stores}
    received = _Received(links, memory)
    copied_bytes = 0
    with ExitStack() as stack:
        stores: dict[int, Store] = {}
        for piece in pieces_of(old.shards[writer], old.records):
            if piece.source is None:
                raise StorageError(
                    f"no element {piece.start} of {piece.kind} of {piece.block} is in",
                    path=found.stores[0].directories[0],
                    advice="resume from a checkpoint",
                )
            reader, content = reader_of[piece.source], piece.in_memory(memory)
            copied_bytes += content.nbytes
            if reader != writer or copied_bytes >= _TOGETHER_BYTES:
                copied_bytes = 0
                links.barrier("the stores to be cut anew")  # the writer has written what it got before
            if me == reader:
                if piece.source not in stores:
                    folders = found.visible[me, piece.source]
                    stores[piece.source] = stack.enter_context(_opened(folders, found.key, io))
                stores[piece.source].read(piece.block, piece.kind, piece.start, content).wait()
                if me != writer:
                    links.send(writer, Kind.STORE_PIECE, payload=content, channel=Channel.WEIGHTS)
            elif me == writer:
                received.wait_for(reader, content)
            if me == writer:
                new.write(piece.block, piece.kind, piece.start, content).wait()
    links.barrier("a new store to be copied")


class _Received:
    """Receives pieces of other ranks' old stores into ``memory``."""

    def __init__(self, links: Links, memory: Tensor) -> None:
        self._links = links
        self._memory = memory
        self._num_bytes = 0
        links.set_handler(Kind.STORE_PIECE, self._on_piece)

    def wait_for(self, reader: int, content: Tensor) -> None:
        """Wait until ``content``, the beginning of the memory, has come from rank ``reader``."""
        what = "its piece of an old store"
        self._links.wait_for(lambda: self._num_bytes == content.nbytes, what, peers=[reader])
        self._num_bytes = 0

    def _on_piece(self, peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        assert payload is not None
        num_bytes = payload.num_bytes
        payload.read_into(self._memory[:num_bytes])
        with self._links.lock:
            self._num_bytes = num_bytes
            self._links.notify()


def remove_left_over(found: OtherRanks, links: Links) -> None:
    """Remove the stores of other numbers of ranks of which this run has a copy or a later step. All ranks have
    committed their own stores before."""
    for rank in range(links.ranks.num_ranks if found.left_over else 0):
        for number, folders in _folders_of(found, found.left_over) if rank == links.ranks.rank else ():
            with ExitStack() as locks:
                for folder in folders:
                    locks.callback(DirectoryLock(folder).close)
                remove_store(folders)
            for folder in folders if number > 1 else ():
                remove_folder(folder)
        links.barrier("the old stores to be removed")


def set_lost_aside(found: OtherRanks, links: Links) -> None:
    """Rename what is left of stores of which a part is gone, so that this run can make its own."""
    for rank in range(links.ranks.num_ranks):
        for number, folders in [*_folders_of(found, (found.num_ranks,))] if rank == links.ranks.rank else ():
            for folder in folders:
                _set_aside(folder, number)
        links.barrier("what is left of old stores to be renamed")


def _folders_of(found: OtherRanks, numbers: Sequence[int]) -> Iterator[tuple[int, list[str]]]:
    """Yield the folders of each rank's store that this rank sees, with the store's number of ranks."""
    for number in numbers:
        for paths in found.directories:
            for rank in range(number):
                folders = [rank_folder(path, rank, number) for path in paths]
                if existing := [folder for folder in folders if os.path.isdir(folder) and names_in(folder)]:
                    yield number, existing


def _set_aside(folder: str, num_ranks: int) -> None:
    """Move the files of a store to a folder of the same name below `lost_folder`."""
    directory = shared_directory(folder)
    name = "" if folder == directory else os.path.basename(folder)
    target = lost_folder(directory, num_ranks)
    for number in itertools.count(2):
        if not os.path.lexists(os.path.join(target, name)):
            break
        target = f"{lost_folder(directory, num_ranks)}-{number}"
    make_folders(target, mode=0o700)
    try:
        if name:
            os.rename(folder, os.path.join(target, name))
        for file in names_in(directory) if not name else ():
            os.rename(os.path.join(directory, file), os.path.join(target, file))
        sync_directory(directory)
    except OSError as error:
        raise StorageError("cannot rename", path=folder, errno=error.errno, advice="delete it") from error


def lost_folder(directory: str, num_ranks: int) -> str:
    """Return the folder for what is left of stores of which a part is gone."""
    return os.path.join(directory, f"lost-store-of-{num_ranks}")
