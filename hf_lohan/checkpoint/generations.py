"""Chooses the stores that a run continues: the newest generation in which all ranks have a common commit.

A reshard writes new stores under the next generation, beside the old stores, and renames nothing. The old generation is
the newest complete generation until all ranks have committed the copy; then the new one is. So a
process that is killed at any instant leaves one state. Commits of a copy name its source stores, until the first step
commits without these names. If the source has later steps, the source continues. An incomplete copy is ignored only
while its source is there. If a part of other stores is gone, no older generation replaces them silently.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from glob import escape, glob
from typing import Any, Literal

from hf_lohan.annexes import need_annex
from hf_lohan.files import ForeignStoreError, IoEngine, StorageError, StorePath
from hf_lohan.planning.run_plan import RUN_ID
from hf_lohan.ranks import Links, RanksDisagreeError
from hf_lohan.ranks.transport.agreements import newest_common_commit
from hf_lohan.store import Commit, Store, kept_commits
from hf_lohan.store.manifest import read_manifest
from hf_lohan.store.rank_folders import files_of, rank_folder, shared_directory, stores_under
from hf_lohan.store.store_folders import names_in
from hf_lohan.wording import exact_bytes, times

logger = logging.getLogger(__name__)

_PIECE_BYTES = 4 << 20
RESHARDED_FROM = "cut_from"
"""Name of a fact in the commit of a resharded store: the former number of ranks. Version 1 has the same name."""
RESHARDED_STORES = "cut_from_stores"
"""Name of a fact in the same commit: for each former rank, the id of its store and the number of its newest commit."""


def is_resumable(commit: Commit) -> bool:
    """Return whether a run can resume from the commit, because it has a journal and two versions of each record."""
    return bool(commit.facts.get("is_resumable")) and not commit.is_torn and commit.facts.get("durability") == "step"


@dataclass(frozen=True)
class Kept:
    """Facts about a commit of a store. A rank sends them to the other ranks."""

    group_id: str
    number: int
    step: int
    is_resumable: bool
    resharded_from: int | None
    """The former number of ranks, if the store was resharded and has committed no step since."""
    resharded_stores: tuple[tuple[str, int], ...]
    launch_id: str | None
    last_checkpoint: str | None
    output_dir: str
    run_id: str | None
    """Id of the run, which a continued run keeps. None in commits of older versions."""

    @classmethod
    def of(cls, commit: Commit, num_ranks: int, generation: int) -> Kept:
        facts, step = commit.facts, commit.facts.get("global_step")
        resharded_from = facts.get(RESHARDED_FROM)
        if not generation and resharded_from == num_ranks:  # an older `lohan reshard` copied the fact from the source
            resharded_from = None
        return cls(
            commit.group_id,
            commit.number,
            step if type(step) is int else 0,
            is_resumable(commit),
            resharded_from,
            tuple((str(store_id), int(number)) for store_id, number in facts.get(RESHARDED_STORES, ())),
            facts.get("launch_id"),
            facts.get("last_checkpoint"),
            str(facts.get("output_dir")),
            facts.get(RUN_ID),
        )

    @property
    def key(self) -> tuple[str, int]:
        return self.group_id, self.number


@dataclass(frozen=True)
class SeenStore:
    """The store of one rank, as a rank of this run finds it."""

    seen_by: int
    is_own: bool
    """Whether it is the store of the rank `seen_by`, in the folder of this rank."""
    generation: int
    num_ranks: int
    rank: int
    directories: tuple[str, ...]
    store_id: str = ""
    fingerprint: str = ""
    commits: tuple[Kept, ...] = ()
    damage: str = ""
    """The error of reading its commits, or ""."""

    @property
    def newest(self) -> int:
        """The number of the newest commit, or 0 without commits."""
        return max((commit.number for commit in self.commits), default=0)


@dataclass(frozen=True)
class StoreSet:
    """The stores of one generation and one number of ranks, by rank."""

    generation: int
    num_ranks: int
    stores: Mapping[int, SeenStore]

    @cached_property
    def common(self) -> Kept | None:
        """The newest commit that all ranks have, from the store of rank 0. None if there is none."""
        if len(self.stores) < self.num_ranks:
            return None
        keys = set.intersection(*({kept.key for kept in store.commits} for store in self.stores.values()))
        shared = (kept for kept in self.stores[0].commits if kept.key in keys)
        return max(shared, key=lambda kept: kept.number, default=None)

    @property
    def commits(self) -> list[Kept]:
        return [kept for store in self.stores.values() for kept in store.commits]

    @property
    def is_copy(self) -> bool:
        """Whether these stores are a copy by a reshard, and have committed no step since."""
        commits = self.commits if self.common is None else [self.common]
        return bool(commits) and all(kept.resharded_from is not None for kept in commits)

    @property
    def newest(self) -> Kept:
        return self.common or max(self.commits, key=lambda kept: (kept.is_resumable, kept.step))

    def folders(self) -> list[tuple[str, ...]]:
        """Return the folders of each rank's store, one for each ssd path."""
        return [self.stores[rank].directories for rank in range(self.num_ranks)]

    def why_incomplete(self) -> str:
        gone = [rank for rank in range(self.num_ranks) if rank not in self.stores or not self.stores[rank].commits]
        if gone:
            return f"the store of rank {' and '.join(map(str, gone))} of {self.num_ranks} is gone"
        try:
            newest_common_commit([[kept.key for kept in self.stores[r].commits] for r in range(self.num_ranks)])
        except RanksDisagreeError as error:
            return str(error)
        return ""

    def describe(self) -> str:
        """Return a clause with the number of ranks, the step and the names of the files."""
        first = next(iter(self.stores.values()))
        files = files_of(shared_directory(first.directories[0]), self.num_ranks, self.generation)
        return f"the stores of {times(self.num_ranks, 'rank')} have step {self.newest.step} and are {files}"


@dataclass(frozen=True)
class RunStores:
    """The stores that a run finds on its ssd paths."""

    state: Literal["nothing", "own", "reshardable", "lost"]
    """"own": each rank of this run has its store. "reshardable": all stores are there, but for another number of ranks
    or at other paths. "lost": a part of the stores is gone, so that a run can only resume from a checkpoint."""
    directories: Sequence[Sequence[str]] = field(repr=False)
    """Lists of ssd paths, without a rank's folder. The first list is this rank's."""
    generation: int = 0
    """Generation of the stores of this run. With "reshardable" and "lost", the run must still create these stores."""
    found: StoreSet | None = field(default=None, repr=False)
    """The stores from which the run continues, or the remaining part of them."""
    why_lost: str = ""
    is_of_launch: bool = False
    """Whether an earlier attempt of this launch has committed to the found stores."""
    visible: Mapping[tuple[int, int], tuple[str, ...]] = field(default_factory=dict, repr=False)
    """Maps (rank of this run, rank of a found store) to the folders in which the former rank sees this store."""
    unneeded: tuple[SeenStore, ...] = field(default=(), repr=False)
    """Older stores and incomplete copies, which no run needs."""

    def own_folders(self, rank: int, num_ranks: int) -> list[str]:
        """Return the folders of this rank's store in this run."""
        return [rank_folder(path, rank, num_ranks, self.generation) for path in self.directories[0]]

    @property
    def last(self) -> Kept:
        """The newest commit of the found stores."""
        assert self.found is not None
        return self.found.newest

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the found stores, or 0 if none were found."""
        return 0 if self.found is None else self.found.num_ranks

    @property
    def fingerprint(self) -> str:
        return "" if self.found is None else next(iter(self.found.stores.values())).fingerprint

    def is_of_run(self, output_dir: str, default_store: str) -> bool:
        """Return whether the run in ``output_dir`` made the stores. They may have been moved together."""
        is_inside = [*map(os.path.realpath, self.directories[0])] == [os.path.realpath(default_store)]
        return self.found is None or is_inside or self.last.output_dir == os.path.realpath(output_dir)

    def refuse_other_ranks(self, num_ranks: int) -> None:
        """Raise `ForeignStoreError` if the found stores are of another number of ranks."""
        if self.found is not None and self.num_ranks != num_ranks:
            raise ForeignStoreError(
                f"{self.directories[0][0]} holds the store of a run with {times(self.num_ranks, 'rank')}, and this run "
                f"has {times(num_ranks, 'rank')}; continue from it with resume_from_checkpoint=True in a Trainer, or "
                "convert it with lohan reshard and, in your own loop, call engine_of(model).go_back_to_commit(); or "
                "choose another directory, or delete the store if its state is no longer needed"
            )

    def may_delete(self, rank: int) -> str:
        """Return a list of folders with stores that no run needs, with their sizes, as text. Each folder is listed by
        one rank."""
        folders = [folder for store in self.unneeded if store.seen_by == rank for folder in store.directories]
        return " and ".join(
            f"{folder if shared_directory(folder) != folder else f'{files_of(folder, 1, 0)} in {folder}'} "
            f"({exact_bytes(_bytes_in(folder))})"
            for folder in filter(os.path.isdir, folders)
        )


def find_stores(directories: Sequence[Sequence[str]], links: Links, launch_id: str | None) -> RunStores:
    """Return the stores that a run finds. The result is the same on all ranks. ``directories`` has all lists of ssd
    paths at which a rank of this machine may have its store, and the list of this rank is first. Changes nothing, and
    takes no lock. All ranks call this together. Raises the errors of `kept_commits`, and ValueError if several states
    may continue."""
    ranks = links.ranks
    seen = [*_seen_stores(directories, ranks.rank, ranks.num_ranks)]
    reports = links.all_gather_object("the stores that each rank sees", (launch_id, seen))
    every = [store for _, of_rank in reports for store in of_rank]
    launches = {launch for launch, _ in reports} - {None}
    sets = _sets_of(every, launches)
    found, why_lost = _choose(sets, ranks.num_ranks, ranks.rank)
    if found is None:
        newest = max((one.generation for one in sets if one.num_ranks == ranks.num_ranks), default=0)
        return RunStores("nothing", directories, newest)
    is_own = found.num_ranks == ranks.num_ranks and all(store.is_own for store in found.stores.values())
    if not why_lost and not is_own and not found.newest.is_resumable:
        why_lost = "they have no complete step, as with durability: checkpoint"
    ids = {rank: store.store_id for rank, store in found.stores.items()}
    unneeded = [one for one in sets if one is not found and _is_unneeded(one, found, sets)]
    next_generation = 1 + max(one.generation for one in sets if not _is_worthless(one, sets))
    return RunStores(
        "lost" if why_lost else "own" if is_own else "reshardable",
        directories,
        found.generation if is_own and not why_lost else next_generation,
        found,
        why_lost,
        any(kept.launch_id in launches for kept in found.commits),
        {
            (seen.seen_by, seen.rank): seen.directories
            for seen in every
            if (seen.generation, seen.num_ranks) == (found.generation, found.num_ranks)
            and ids.get(seen.rank) == seen.store_id
        },
        () if why_lost else tuple(store for one in unneeded for store in one.stores.values()),
    )


def stores_of(paths_of_ranks: Sequence[Sequence[str]]) -> RunStores:
    """Return the stores at these ssd paths of each rank, for a process that runs alone. A single list of paths may have
    the stores of all ranks. Stores without a common commit, or without commits, are returned too. Raises the errors of
    `find_stores`, and ValueError if the store of a rank is missing."""
    num_ranks = len(paths_of_ranks)
    every = [store for rank, paths in enumerate(paths_of_ranks) for store in _seen_stores([paths], rank, num_ranks)]
    sets = _sets_of(every, set())
    found, why_lost = _choose(sets, None, None)
    found = found or max(sets, key=lambda one: one.generation, default=None)  # stores without commits
    if found is None:
        return RunStores("nothing", paths_of_ranks)
    if missing := [rank for rank in range(found.num_ranks) if rank not in found.stores]:
        raise ValueError(
            f"the store of rank {missing[0]} of {found.num_ranks} is not under "
            f"{' or '.join(dict.fromkeys(paths[0] for paths in paths_of_ranks))}; copy the folders of all machines "
            "there"
        )
    next_generation = 1 + max((one.generation for one in sets if not _is_worthless(one, sets)), default=-1)
    return RunStores("lost" if why_lost else "reshardable", paths_of_ranks, next_generation, found, why_lost)


@contextmanager
def opened_stores(paths_of_ranks: Sequence[Sequence[str]]) -> Iterator[list[Store]]:
    """Yield the stores of all ranks that `stores_of` finds, in rank order, open for reading. Raises the errors of
    `stores_of` and of `Store.open`."""
    found = stores_of(paths_of_ranks).found
    folders = paths_of_ranks if found is None else found.folders()
    io = IoEngine(num_threads=2, piece_bytes=_PIECE_BYTES, max_inflight_bytes=4 * _PIECE_BYTES)
    with ExitStack() as held:
        held.callback(io.close)
        paths = [[*map(StorePath, of_rank)] for of_rank in folders]
        yield [held.enter_context(Store.open(own, model=None, engine=io, is_read_only=True)) for own in paths]


def _seen_stores(directories: Sequence[Sequence[str]], seen_by: int, num_ranks: int) -> Iterator[SeenStore]:
    """Yield each store if the rank ``seen_by`` of ``num_ranks`` sees at least a part of it."""
    for number, paths in enumerate(directories):
        for path in paths:
            _refuse_half_moved(path)
        parts = {(*key, rank) for path in paths for key, ranks in stores_under(path).items() for rank in ranks}
        for generation, num, rank in sorted(parts):
            folders = tuple(rank_folder(path, rank, num, generation) for path in paths)
            is_own = (number, num, rank) == (0, num_ranks, seen_by)
            store = SeenStore(seen_by, is_own, generation, num, rank, folders)
            facts: dict[str, Any] = {}
            try:
                manifest = next(filter(None, map(read_manifest, folders)), None)
                if manifest is None:  # a run has just removed it
                    continue
                facts = {"store_id": manifest.store_id, "fingerprint": manifest.model.fingerprint}
                facts["commits"] = tuple(Kept.of(commit, num, generation) for commit in kept_commits(folders))
            except (StorageError, ForeignStoreError) as error:
                facts["damage"] = str(error)
            yield SeenStore(**{**vars(store), **facts})


def _refuse_half_moved(path: str) -> None:
    """Raise ValueError if an older version of this library was killed while it replaced old stores by new stores. Then
    the folder may have old and new stores."""
    notes = glob(os.path.join(escape(path), "old-store-of-*", "moving-*.json"))
    new = glob(os.path.join(escape(path), "new-store-of-*", "rank-*"))
    if notes and new:
        raise ValueError(
            f"an older version of hf_lohan was ended while it moved the stores in {path} (see {notes[0]}); run lohan "
            f"reshard of that version again to finish, or move the folders in {os.path.dirname(notes[0])} back to "
            f"{path}, where they replace folders of the same names, and delete {os.path.dirname(new[0])}"
        )


def _sets_of(every: Iterable[SeenStore], launches: Set[str | None]) -> list[StoreSet]:
    sets: dict[tuple[int, int], dict[int, SeenStore]] = {}
    for seen in every:
        stores = sets.setdefault((seen.generation, seen.num_ranks), {})
        stores[seen.rank] = _only(stores[seen.rank], seen, launches) if seen.rank in stores else seen
    return [StoreSet(*key, stores) for key, stores in sorted(sets.items())]


def _only(first: SeenStore, second: SeenStore, launches: Set[str | None]) -> SeenStore:
    """Two folders of the same name were found, perhaps on two machines. Return the store that belongs to the run."""
    if first.is_own != second.is_own:
        return first if first.is_own else second
    if first.store_id == second.store_id or not second.commits:
        return first
    if not first.commits:
        return second
    are_of_launch = [any(commit.launch_id in launches for commit in seen.commits) for seen in (first, second)]
    if are_of_launch[0] == are_of_launch[1]:
        raise ValueError(
            f"{first.directories[0]} and {second.directories[0]} hold different stores of one rank, seen by rank "
            f"{first.seen_by} and rank {second.seen_by}; delete the one that this run does not continue"
        )
    return first if are_of_launch[0] else second


def _choose(sets: Sequence[StoreSet], num_ranks: int | None, rank: int | None) -> tuple[StoreSet | None, str]:
    """Return the stores that continue, and "" as the reason. If a part of them is gone, return the rest and the reason
    why no step can be resumed. The caller is ``rank`` of ``num_ranks``. Both are None for a process that runs alone."""
    unsure: StoreSet | None = None
    for generation in sorted({one.generation for one in sets}, reverse=True):
        here = [one for one in sets if one.generation == generation]
        complete = [one for one in here if one.common is not None and not _is_superseded(one, sets)]
        chosen = [one for one in complete if not one.is_copy]
        chosen = chosen or [one for one in complete if _source_of(one, sets) not in complete]
        if not chosen or chosen[0].is_copy:
            _raise_damage(here, rank)
        if len(chosen) > 1:
            counts = " and ".join(str(one.num_ranks) for one in chosen)
            raise ValueError(
                f"{shared_directory(chosen[0].folders()[0][0])} holds stores of runs with {counts} ranks, and only one "
                f"of these runs can continue: {'; '.join(one.describe() for one in chosen)}. On each ssd path, move "
                "the stores that this run does not continue to another place"
            )
        if chosen:
            for one in (one for one in here if one is not chosen[0] and rank in (None, 0)):
                why = next((store.damage for store in one.stores.values() if store.damage), one.why_incomplete())
                if why and not _is_worthless(one, sets):
                    logger.warning("the stores of %s are ignored: %s", times(one.num_ranks, "rank"), why)
            return (chosen[0], "") if unsure is None else (unsure, unsure.why_incomplete())
        broken = [one for one in here if one.commits and one.common is None and not _is_worthless(one, sets)]
        if lost := [one for one in broken if one.newest.is_resumable]:
            last = max(lost, key=lambda one: one.newest.step)
            return last, last.why_incomplete()
        # Broken stores may have no step yet. An older generation does not replace them, but a new run may.
        unsure = next(iter([*filter(None, [unsure]), *broken]), None)
    return (None, "") if unsure is None or unsure.num_ranks == num_ranks else (unsure, unsure.why_incomplete())


def _raise_damage(sets: Sequence[StoreSet], rank: int | None) -> None:
    for seen in (store for one in sets for store in one.stores.values() if store.damage):
        if rank in (None, seen.seen_by):
            kept_commits(seen.directories)  # raises
        raise ForeignStoreError(seen.damage)


def _source_of(copy: StoreSet, sets: Sequence[StoreSet]) -> StoreSet | None:
    """Return the stores from which ``copy`` was made, or the remaining part of them."""
    kept = copy.newest
    ids = {store_id for store_id, _ in kept.resharded_stores}
    if ids:
        found = (one for one in sets if not ids.isdisjoint(store.store_id for store in one.stores.values()))
    else:  # version 1 did not name the source stores
        found = (one for one in sets if (one.generation, one.num_ranks) == (0, kept.resharded_from))
    return next(found, None)


def _is_backed(copy: StoreSet, sets: Sequence[StoreSet]) -> bool:
    """Whether the source of the copy still has the copied step or a later step."""
    source = _source_of(copy, sets)
    return source is not None and source.common is not None and source.common.number >= copy.newest.number


def _is_superseded(one: StoreSet, sets: Sequence[StoreSet]) -> bool:
    """Whether the source of a copy continues instead: it has later steps, or only the source is resumable."""
    source, kept = (_source_of(one, sets) if one.is_copy else None), one.newest
    if source is None:
        return False
    newest, common = dict(kept.resharded_stores), source.common
    has_gone_on = any(store.newest > newest.get(store.store_id, kept.number) for store in source.stores.values())
    is_better = common is not None and (common.number, common.is_resumable) > (kept.number, kept.is_resumable)
    return has_gone_on or is_better


def _is_worthless(one: StoreSet, sets: Sequence[StoreSet]) -> bool:
    """Whether these stores have no commits, or are an incomplete copy of stores that are still there."""
    if any(store.damage for store in one.stores.values()):
        return False
    return not one.commits or (one.common is None and one.is_copy and _is_backed(one, sets))


def _is_unneeded(one: StoreSet, found: StoreSet, sets: Sequence[StoreSet]) -> bool:
    """Whether no run needs these stores, because ``found`` continues. Stores with a later step are still needed. So are
    incomplete stores with steps that no other store has, because the missing part may return."""
    is_older = one.generation <= found.generation and (one.common is not None or one.is_copy)
    is_older = is_older and one.newest.step <= found.newest.step
    return is_older or _is_worthless(one, sets) or (one.common is not None and _is_superseded(one, sets))


def newest_common_commits(stores: Sequence[Store]) -> list[Commit]:
    """Return the newest commit that all stores have, once from each store. Raises RanksDisagreeError if there is no
    common commit, and ValueError for a store without commits."""
    kept_by_rank = [store.kept_commits for store in stores]
    for store, kept in zip(stores, kept_by_rank, strict=True):
        if not kept:
            raise ValueError(f"nothing is committed in {store.paths[0].path}; train at least one step first")
    return common_commits(kept_by_rank)


def common_commits(kept_by_rank: Sequence[Sequence[Commit]]) -> list[Commit]:
    """Return the newest commit that all ranks have, once from each rank. Raises RanksDisagreeError if there is none."""
    by_key = [{commit.key: commit for commit in kept} for kept in kept_by_rank]
    newest = newest_common_commit([list(commits) for commits in by_key])
    return [commits[newest] for commits in by_key]


def refuse_steps(folders: Sequence[str]) -> None:
    """Raise `StorageError` if another process has committed a step in a new generation, which should only have a
    copy."""
    if any(RESHARDED_FROM not in commit.facts for commit in kept_commits(folders)):
        raise StorageError("another process has committed a step in", path=folders[0], advice="start again")


def resharding_for(asked: str) -> Any:
    """Return the annex that copies a step to stores of another number of ranks. Raises ValueError if it is missing.
    ``asked`` is the feature that needs it, for the message."""
    return need_annex("resharding", asked)


def _bytes_in(folder: str) -> int:
    paths = [os.path.join(folder, name) for name in names_in(folder)]
    inside = (os.path.join(parent, name) for path in paths for parent, _, names in os.walk(path) for name in names)
    return sum(os.lstat(file).st_size for file in (*filter(os.path.isfile, paths), *inside))
