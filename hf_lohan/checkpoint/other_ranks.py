"""Continues a run with another number of ranks: finds the stores of the ranks before, and divides them again.

All ranks call these functions together. New stores are a draft: each of their commits says from how many ranks it was
made, until the first step commits without that. The old stores are set aside only when all new ones are committed, and
are never removed. So a run that is killed at any time finds the old stores complete, or the new ones, and goes on from
there.
"""

from __future__ import annotations

import base64
import itertools
import json
import logging
import operator
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
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
from hf_lohan.checkpoint.seen_stores import (
    CUT_FROM,
    CUT_STORES,
    LOST,
    OLD,
    Kept,
    SeenStore,
    aside_of,
    log_aside,
    lost_commits,
    own_store,
    seen_stores,
    set_aside,
)
from hf_lohan.device import mapped_empty
from hf_lohan.files import CapacityError, IoEngine, StorageError, StorePath
from hf_lohan.files.directories import make_directory, sync_directory
from hf_lohan.files.lock import DirectoryLock
from hf_lohan.model import StoredForm
from hf_lohan.ranks import Channel, Kind, Links, PayloadReader, one_rank_at_a_time
from hf_lohan.store import ModelIdentity, RecordSpec, Store, kept_commits
from hf_lohan.store.commits import ImmediateAgreement
from hf_lohan.store.rank_folders import rank_folder
from hf_lohan.wording import times

logger = logging.getLogger(__name__)

_TOGETHER_BYTES = 256 << 20
"""Bytes that one rank copies before all ranks meet again. A rank that waits longer would count as hung."""


@dataclass(frozen=True)
class _Report:
    """What one rank of this run sees."""

    own_seen: SeenStore | None
    others_seen: tuple[SeenStore, ...]
    lost: tuple[Kept, ...]
    launch_id: str | None

    @property
    def committed(self) -> tuple[Kept, ...]:
        """In its own store."""
        return () if self.own_seen is None else self.own_seen.commits

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> _Report:
        fields = json.loads(packed)
        return cls(
            None if fields["own_seen"] is None else SeenStore.from_json(fields["own_seen"]),
            tuple(map(SeenStore.from_json, fields["others_seen"])),
            tuple(map(Kept.from_json, fields["lost"])),
            fields["launch_id"],
        )


@dataclass(frozen=True)
class OtherRanks:
    """What is left of a run of another number of ranks."""

    state: Literal["nothing", "cuttable", "cut", "lost"]
    """With `cuttable` all stores of the ranks before are there. With `cut` they have been divided again for this run.
    With `lost` a part of them is gone, so that only a checkpoint is left."""
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
    stores: tuple[SeenStore, ...] = field(default=(), repr=False)
    """One for each old rank, in rank order."""
    visible: Mapping[tuple[int, int], tuple[str, ...]] = field(default_factory=dict, repr=False)
    """The folders of an old rank's store, by a rank of this run that sees it, and the old rank."""
    left_stores: tuple[SeenStore, ...] = field(default=(), repr=False)
    """The stores of the numbers `left_over`, as each rank that sees them reports them."""
    own_left: tuple[SeenStore, ...] = field(default=(), repr=False)
    """Stores of this number of ranks that are incomplete, which are set aside before new ones are made."""

    def is_of_run(self, output_dir: str, default_store: str) -> bool:
        """Return whether the run in ``output_dir`` made them. It may have been moved with the store in it."""
        is_inside = [*map(os.path.realpath, self.directories[0])] == [os.path.realpath(default_store)]
        return self.output_dir == os.path.realpath(output_dir) or is_inside


def find_other_ranks(
    directories: Sequence[Sequence[str]], own_paths: Sequence[str], links: Links, launch_id: str | None
) -> OtherRanks:
    """Return what is left of a run with another number of ranks, which is the same on all ranks. ``directories`` are
    all lists of ssd paths at which a rank of this machine may have its store, and ``own_paths`` those of this rank's.
    Changes nothing. Raises the errors of `kept_commits`, and ValueError if it is not clear which state continues."""
    ranks = links.ranks
    own = own_store(own_paths, ranks.rank, ranks.num_ranks)
    others = tuple(seen_stores(directories, ranks.rank, ranks.num_ranks))
    report = _Report(own, others, tuple(lost_commits(directories)), launch_id)
    packed = links.all_gather("the stores that each rank sees", report.pack())
    reports = [_Report.unpack(of_rank) for of_rank in packed]
    if any(seen.damage for of_rank in reports for seen in of_rank.others_seen):
        state = _common([of_rank.committed for of_rank in reports])
        for seen in (seen for seen in others if seen.damage):
            if state is None or state.cut_from is not None:
                kept_commits(seen.directories)  # raises
            logger.warning("a store of %s is ignored: %s", times(seen.num_ranks, "rank"), seen.damage)
        links.barrier("the damaged stores to be read again")
    return _judge(reports, directories)


def _judge(reports: Sequence[_Report], directories: Sequence[Sequence[str]]) -> OtherRanks:
    num_ranks = len(reports)
    launches = {report.launch_id for report in reports} - {None}
    runs: dict[int, dict[int, SeenStore]] = {}
    for seen in (seen for report in reports for seen in report.others_seen):
        stores = runs.setdefault(seen.num_ranks, {})
        stores[seen.rank] = _only(stores.get(seen.rank, seen), seen, launches)
    complete = {
        number: commit
        for number, stores in runs.items()
        if len(stores) == number and (commit := _common([stores[rank].commits for rank in range(number)])) is not None
    }
    own = _common([report.committed for report in reports])
    drafts = tuple(number for number, stores in runs.items() if _are_drafts(stores.values()))

    def seen_of(numbers: Sequence[int]) -> tuple[SeenStore, ...]:
        assert num_ranks not in numbers, "a run does not set aside its own stores"
        return tuple(
            seen
            for report in reports
            for seen in report.others_seen
            if seen.num_ranks in numbers and seen.store_id == runs[seen.num_ranks][seen.rank].store_id
        )

    if own is not None and own.cut_from is None:
        older = tuple(n for n in drafts if max(store.newest for store in runs[n].values()) <= own.number)
        return OtherRanks(
            "nothing", directories, left_over=older, output_dir=own.output_dir, key=own.key, left_stores=seen_of(older)
        )

    def found(
        state: Literal["cuttable", "cut", "lost"], number: int, commit: Kept, why_lost: str = "", **fields: Any
    ) -> OtherRanks:
        of_number = runs.get(number, {})
        stores = tuple(store for _, store in sorted(of_number.items()))
        of_launch = (one.launch_id in launches for store in stores for one in store.commits)
        left_over = tuple({number, *drafts}) if state != "lost" else ()
        return OtherRanks(
            state,
            directories,
            number,
            commit.step,
            commit.launch_id in launches or any(of_launch),
            why_lost,
            commit.last_checkpoint,
            left_over,
            commit.output_dir,
            stores[0].fingerprint if stores else "",
            commit.key,
            stores,
            {(seen.seen_by, seen.rank): seen.directories for seen in seen_of([number] if stores else [])}
            if number != num_ranks
            else {},
            seen_of(left_over),
            **fields,
        )

    def state_of(number: int) -> str:
        """Describe the stores of a number of ranks for a message."""
        if number == num_ranks:
            of_ranks = dict(enumerate(report.committed for report in reports))
        else:
            of_ranks = {rank: store.commits for rank, store in runs[number].items()}
        step = max((commit.step for commits in of_ranks.values() for commit in commits), default=0)
        lacks = [rank for rank in range(number) if not of_ranks.get(rank)]
        is_complete = (own if number == num_ranks else complete.get(number)) is not None
        why = f"the store of rank {lacks[0]} is gone" if lacks else "they have no common step"
        return f"those of {times(number, 'rank')} are " + (
            f"complete, with step {complete[number].step if number in complete else step}"
            if is_complete
            else f"incomplete ({why}), with step {step}"
        )

    where = directories[0][0]
    if own is not None and not _must_be_copied_again(own, complete.get(own.cut_from or 0)):
        before, old = complete.get(own.cut_from or 0), runs.get(own.cut_from or 0, {})
        newer = [number for number in complete if number not in drafts and complete[number].number > own.number]
        is_copy = before is not None and (before.number, before.step) == (own.number, own.step)
        if not [n for n in newer if n != own.cut_from] and (is_copy or (before is None and _is_as_cut(own, old))):
            return found("cut", own.cut_from or 0, own)
        if newer != [own.cut_from] or not _is_same_run(own, old):
            others = sorted({*newer, *([own.cut_from] if old and own.cut_from else [])})
            raise ValueError(
                f"{where} holds stores of several runs, and it is not clear which one continues: those of this run's "
                f"{times(num_ranks, 'rank')} were divided from {times(own.cut_from or 0, 'rank')} at step {own.step}; "
                f"{'; '.join(map(state_of, others))}. To continue from step {own.step}, move the folders of the others "
                "to another place; to continue from another state, move the folders of this one, and bring back what "
                "is missing"
            )
    candidates = [number for number in complete if number not in drafts] or [*complete]
    every = [commit for report in reports for commit in report.committed]
    half_own = [commit for commit in every if commit.is_resumable and commit.cut_from is None]
    own_stores = tuple(report.own_seen for report in reports if report.own_seen is not None and report.own_seen.commits)
    if len(candidates) > 1 or (candidates and half_own and not _is_later(complete, runs, candidates[0], own_stores)):
        numbers = sorted([*candidates, *([num_ranks] if half_own else [])])
        counts = " and ".join(map(str, numbers))
        advice = " or ".join(times(number, "rank") for number in candidates)
        raise ValueError(
            f"{where} holds stores of runs with {counts} ranks, and only one of these runs can continue: "
            f"{'; '.join(map(state_of, numbers))}. Continue with {advice}, which "
            f"{'are' if len(candidates) > 1 else 'is'} complete, or move the folders of the states that this run does "
            "not continue to another place, on each ssd path"
        )
    for number in candidates:
        commit = complete[number]
        if commit.is_resumable:
            is_draft_of = [all(kept.cut_from == number for kept in store.commits) for store in own_stores]
            own_left = tuple(itertools.compress(own_stores, map(operator.not_, is_draft_of)))
            return found("cuttable", number, commit, own_left=own_left)
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


def _is_as_cut(own: Kept, old: Mapping[int, SeenStore]) -> bool:
    """Whether what is visible of the old stores is what was copied, and has no later commits."""
    if not own.cut_stores:
        return all(seen.newest <= own.number for seen in old.values())
    by_rank = dict(enumerate(own.cut_stores))
    return all(
        by_rank.get(rank, ("", 0))[0] == seen.store_id and seen.newest <= by_rank[rank][1] for rank, seen in old.items()
    )


def _is_same_run(own: Kept, old: Mapping[int, SeenStore]) -> bool:
    """Whether these stores were copied, and may have gone on since."""
    return [seen.store_id for _, seen in sorted(old.items())] == [store_id for store_id, _ in own.cut_stores]


def _is_later(
    complete: Mapping[int, Kept],
    runs: Mapping[int, Mapping[int, SeenStore]],
    number: int,
    own_stores: Sequence[SeenStore],
) -> bool:
    """Whether the stores of ``number`` ranks replace the incomplete ``own_stores``: they have no earlier step, or were
    made later, because a machine was gone for some time."""
    step = max(commit.step for store in own_stores for commit in store.commits)
    created = max(store.created for store in own_stores)
    return complete[number].step >= step or min(store.created for store in runs[number].values()) > created


def _only(first: SeenStore, second: SeenStore, launches: Set[str | None]) -> SeenStore:
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


def _common(commits_by_rank: Sequence[Sequence[Kept]]) -> Kept | None:
    """Return rank 0's newest commit that all ranks have, or None."""
    common = set.intersection(*({commit.key for commit in commits} for commits in commits_by_rank))
    shared = [commit for commit in commits_by_rank[0] if commit.key in common]
    return max(shared, key=lambda commit: commit.number) if shared else None


def _are_drafts(stores: Iterable[SeenStore]) -> bool:
    """Whether all commits are of stores that were divided again. Stores without a commit have no state."""
    return all(not seen.damage and all(kept.cut_from is not None for kept in seen.commits) for seen in stores)


def _must_be_copied_again(own: Kept, before: Kept | None) -> bool:
    """Return whether a run has written to the copy ``own`` without a step, so that only the stores ``before`` have the
    step."""
    return before is not None and before.is_resumable and not own.is_resumable


def cut_anew(
    found: OtherRanks,
    own_paths: Sequence[str],
    links: Links,
    form_of: Callable[[Store], StoredForm],
    launch_id: str | None,
    capacities: Sequence[int | None] = (),
) -> None:
    """Copy the last step of the stores that were ``found`` to new stores of these ranks, in ``own_paths`` on each. The
    old stores stay as they are. ``capacities`` are those of the paths; None is all free space.

    A rank reads the old stores that it sees. Of the others it gets the records from a rank that sees them. Reads are
    verified. Raises `CorruptionError`, `CapacityError`, `StorageError`, `StoreInUseError`, and ValueError if this
    version cannot cut the stores.
    """
    with ExitStack() as stack:
        io = io_engine()
        stack.callback(io.close)
        old = _describe(found, links, io, form_of)
        if found.own_left:
            mine = [seen for seen in found.own_left if seen.seen_by == links.ranks.rank]
            set_aside([(seen, seen.num_ranks, seen.directories) for seen in mine], LOST, links)
        for path in own_paths:
            make_directory(path)
            sync_directory(os.path.dirname(os.path.abspath(path)))  # before an old store is moved
        paths = [StorePath(*of_path) for of_path in zip(own_paths, capacities or [None] * len(own_paths), strict=True)]
        new = old.shards[links.ranks.rank]
        with one_rank_at_a_time(links, "the new stores"):  # they may share a drive
            try:
                store = Store.create(paths, new, model=old.model, engine=io, num_homes=old.num_homes)
            except CapacityError as error:
                raise CapacityError(error.shortfalls, may_delete=aside_of(own_paths)) from error
            stack.push(store)
        for writer in range(links.ranks.num_ranks):
            _copy_shard(found, old, store, writer, links, io)
        cut_stores = [(seen.store_id, seen.newest) for seen in found.stores]
        facts = {**facts_of_all(old.facts), CUT_FROM: found.num_ranks, CUT_STORES: cut_stores}
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
        kept = [commit for commit in store.kept_commits if (commit.group_id, commit.number) == key]
        if not kept:
            advice = "start again when no other run uses the store"
            raise StorageError("another step was committed meanwhile in", path=directories[0], advice=advice)
        store.view_commit(kept[0])
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
                links.barrier("the stores to be divided again")  # the writer has written what it got before
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


def set_left_over_aside(found: OtherRanks, own_paths: Sequence[str], links: Links, *, is_open: bool) -> None:
    """Set aside the stores of other numbers of ranks of which this run has a copy or a later step. All ranks have
    committed their own stores before. ``is_open``: this process has opened its own store in ``own_paths``, and so holds
    its locks. Raises `StoreInUseError` and `StorageError`."""
    if not found.left_over:
        return
    with ExitStack() as locks:
        for path in () if is_open else own_paths:
            locks.callback(DirectoryLock(path).close)
        own = own_store(own_paths, links.ranks.rank, links.ranks.num_ranks)
        number = (
            0 if own is None else max((kept.number for kept in own.commits if kept.key[1] == found.key[1]), default=0)
        )
        for of_rank in links.all_gather("its own new store", str(number).encode()):
            if int(of_rank) != found.key[1]:
                raise StorageError(
                    f"a rank no longer has step {found.step} in the stores of", path=own_paths[0], advice="start again"
                )
        mine = [seen for seen in found.left_stores if seen.seen_by == links.ranks.rank]
        log_aside(
            set_aside([(seen, seen.num_ranks, seen.directories) for seen in mine], OLD, links), links.ranks.num_ranks
        )


def set_lost_aside(found: OtherRanks, links: Links) -> None:
    """Rename what is left of stores of which a part is gone, so that this run can make its own. Raises
    `StoreInUseError` and `StorageError`."""
    number = found.num_ranks
    folders = [
        [rank_folder(path, rank, number) for path in paths] for paths in found.directories for rank in range(number)
    ]
    set_aside([(None, number, of_store) for of_store in folders], LOST, links)
