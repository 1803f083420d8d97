"""Continues a run with another number of ranks: finds the stores of the ranks before, and whether to reshard them.

All ranks call these functions together. New stores are a draft: each of their commits says from how many ranks it was
made, until the first step commits without that. The old stores are set aside only when all new ones are committed, and
are never removed. So a run that is killed at any time finds the old stores complete, or the new ones, and goes on from
there.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from typing import Literal

from hf_lohan.checkpoint.moves import finish_moves
from hf_lohan.checkpoint.seen_stores import (
    Kept,
    SeenStore,
    lost_commits,
    own_store,
    seen_stores,
)
from hf_lohan.ranks import Links
from hf_lohan.store import kept_commits
from hf_lohan.wording import times

logger = logging.getLogger(__name__)


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

    state: Literal["nothing", "reshardable", "resharded", "lost"]
    """With `reshardable` all stores of the ranks before are there. With `resharded` they have been resharded for
    this run. With `lost` a part of them is gone, so that only a checkpoint is left."""
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
    run_id: str | None = None
    fingerprint: str = ""
    key: tuple[str, int] = ("", 0)
    stores: tuple[SeenStore, ...] = field(default=(), repr=False)
    """One for each old rank, in rank order."""
    visible: Mapping[tuple[int, int], tuple[str, ...]] = field(default_factory=dict, repr=False)
    """The folders of an old rank's store, by a rank of this run that sees it, and the old rank."""
    left_stores: tuple[SeenStore, ...] = field(default=(), repr=False)
    """The stores of the numbers `left_over`, as each rank that sees them reports them."""
    own_left: tuple[SeenStore, ...] = field(default=(), repr=False)
    """Stores of this number of ranks of which a part is gone, and which are no copies of `stores`. They are set aside
    before new ones are made."""

    def is_of_run(self, output_dir: str, default_store: str) -> bool:
        """Return whether the run in ``output_dir`` made them. It may have been moved with the store in it."""
        is_inside = [*map(os.path.realpath, self.directories[0])] == [os.path.realpath(default_store)]
        return self.output_dir == os.path.realpath(output_dir) or is_inside


def find_other_ranks(
    directories: Sequence[Sequence[str]], own_paths: Sequence[str], links: Links, launch_id: str | None
) -> OtherRanks:
    """Return what is left of a run with another number of ranks, which is the same on all ranks. ``directories`` are
    all lists of ssd paths at which a rank of this machine may have its store, and ``own_paths`` those of this rank's.
    Finishes what a killed run has begun to set aside, and changes nothing else. Raises the errors of `finish_moves` and
    `kept_commits`, and ValueError if it is not clear which state continues."""
    ranks = links.ranks
    finish_moves(directories, links)
    own = own_store(own_paths, ranks.rank, ranks.num_ranks)
    others = tuple(seen_stores(directories, ranks.rank, ranks.num_ranks))
    report = _Report(own, others, tuple(lost_commits(directories)), launch_id)
    packed = links.all_gather("the stores that each rank sees", report.pack())
    reports = [_Report.unpack(of_rank) for of_rank in packed]
    if any(seen.damage for of_rank in reports for seen in of_rank.others_seen):
        state = _common([of_rank.committed for of_rank in reports])
        for seen in (seen for seen in others if seen.damage):
            if state is None or state.resharded_from is not None:
                kept_commits(seen.directories)  # raises
            logger.warning("a store of %s is ignored: %s", times(seen.num_ranks, "rank"), seen.damage)
        links.barrier("the damaged stores to be read again")
    return _AllSeen(reports, directories).judge()


class _AllSeen:
    """What all ranks see together. `judge` says what it means.

    =========================  ==================================  ====================================
    this number of ranks       other numbers of ranks              state
    =========================  ==================================  ====================================
    has a step of its own      any                                 `nothing`: this run continues itself
    is a copy of N ranks       those N as copied, or gone          `resharded`
    is a copy of N ranks       those N went on                     as if there was no copy
    is a copy of N ranks       others have later steps             ValueError
    has no common step         one is complete                     `reshardable`; `lost` without a step
    has no common step         several are complete                ValueError
    has no common step         none is complete, some have steps   `lost`
    some ranks' stores gone    none                                `lost`
    nothing                    set aside by this launch            `lost`
    nothing                    nothing                             `nothing`
    =========================  ==================================  ====================================
    """

    def __init__(self, reports: Sequence[_Report], directories: Sequence[Sequence[str]]) -> None:
        self._reports, self._directories = reports, directories
        self._num_ranks = len(reports)
        self._launches = {report.launch_id for report in reports} - {None}
        self._runs: dict[int, dict[int, SeenStore]] = {}
        """The stores of each other number of ranks, by rank."""
        for seen in (seen for report in reports for seen in report.others_seen):
            stores = self._runs.setdefault(seen.num_ranks, {})
            stores[seen.rank] = _only(stores.get(seen.rank, seen), seen, self._launches)
        self._complete = {
            number: commit
            for number, stores in self._runs.items()
            if len(stores) == number
            and (commit := _common([stores[rank].commits for rank in range(number)])) is not None
        }
        """The newest common commit of each number of ranks whose stores are all there."""
        self._own = _common([report.committed for report in reports])
        self._drafts = tuple(number for number, stores in self._runs.items() if _are_drafts(stores.values()))
        """Numbers of ranks whose stores have no step of their own."""
        self._own_stores = tuple(
            report.own_seen for report in reports if report.own_seen is not None and report.own_seen.commits
        )

    def judge(self) -> OtherRanks:
        """Return what is left of a run with another number of ranks, by the first rule that applies."""
        rules = (self._goes_on, self._is_copy, self._is_complete, self._is_incomplete, self._is_own_lost)
        found = (state for rule in rules if (state := rule()) is not None)
        return next(found, None) or self._is_set_aside() or OtherRanks("nothing", self._directories)

    def _goes_on(self) -> OtherRanks | None:
        """This number of ranks has a step of its own."""
        own = self._own
        if own is None or own.resharded_from is not None:
            return None
        older = tuple(n for n in self._drafts if max(store.newest for store in self._runs[n].values()) <= own.number)
        return OtherRanks(
            "nothing",
            self._directories,
            left_over=older,
            output_dir=own.output_dir,
            key=own.key,
            left_stores=self._seen_of(older),
        )

    def _is_copy(self) -> OtherRanks | None:
        """The own stores are a copy without a step of its own."""
        own, complete = self._own, self._complete
        if own is None or own.resharded_from is None:
            return None
        number = own.resharded_from
        before, old = complete.get(number), self._runs.get(number, {})
        if _must_be_copied_again(own, before):
            return None
        newer = [n for n in complete if n not in self._drafts and complete[n].number > own.number]
        is_copy = before is not None and (before.number, before.step) == (own.number, own.step)
        is_copy = is_copy or (before is None and _is_as_resharded(own, old))
        if is_copy and not [n for n in newer if n != number]:
            return self._found("resharded", number, own)
        if newer == [number] and _is_same_run(own, old):
            return None
        others = sorted({*newer, *([number] if old else [])})
        raise ValueError(
            f"{self._directories[0][0]} holds stores of several runs, and it is not clear which one continues: those "
            f"of this run's {times(self._num_ranks, 'rank')} were resharded from {times(number, 'rank')} at step "
            f"{own.step}; {'; '.join(map(self._state_of, others))}. To continue from step {own.step}, move the folders "
            "of the others to another place; to continue from another state, move the folders of this one, and "
            "bring back what is missing"
        )

    def _is_complete(self) -> OtherRanks | None:
        """All stores of another number of ranks are there."""
        complete, own_stores = self._complete, self._own_stores
        candidates = [number for number in complete if number not in self._drafts] or [*complete]
        has_own_steps = any(commit.resharded_from is None for commit in self._resumable_own())
        if not candidates:
            return None
        if len(candidates) > 1 or (has_own_steps and not _is_later(complete, self._runs, candidates[0], own_stores)):
            numbers = sorted([*candidates, *([self._num_ranks] if has_own_steps else [])])
            counts = " and ".join(map(str, numbers))
            advice = " or ".join(times(number, "rank") for number in candidates)
            raise ValueError(
                f"{self._directories[0][0]} holds stores of runs with {counts} ranks, and only one of these runs can "
                f"continue: {'; '.join(map(self._state_of, numbers))}. Continue with {advice}, which "
                f"{'are' if len(candidates) > 1 else 'is'} complete, or move the folders of the states that this run "
                "does not continue to another place, on each ssd path"
            )
        number = candidates[0]
        if not complete[number].is_resumable:
            why = "they have no whole step, as with durability: checkpoint"
            return self._found("lost", number, complete[number], why)
        copied = tuple((store.store_id, store.newest) for _, store in sorted(self._runs[number].items()))
        own_left = tuple(store for store in own_stores if not _is_copy_of(store, number, copied))
        return self._found("reshardable", number, complete[number], own_left=own_left)

    def _is_incomplete(self) -> OtherRanks | None:
        """A part of the stores of another number of ranks is gone."""
        broken = [
            (commit.step, number, commit)
            for number, stores in self._runs.items()
            for store in stores.values()
            for commit in store.commits
        ]
        if not broken:
            return None
        _, number, commit = max(broken, key=lambda found: found[0])
        stores = self._runs[number]
        missing = [rank for rank in range(number) if rank not in stores or not stores[rank].commits]
        why = _are_gone(missing, number) if missing else "their stores have no common step"
        return self._found("lost", number, commit, why)

    def _is_own_lost(self) -> OtherRanks | None:
        """A part of the stores of this number of ranks is gone."""
        empty = [rank for rank, report in enumerate(self._reports) if not report.committed]
        resumable = self._resumable_own()
        if not resumable or not empty:
            return None
        commit = max(resumable, key=lambda kept: kept.step)
        return self._found("lost", self._num_ranks, commit, _are_gone(empty, self._num_ranks))

    def _is_set_aside(self) -> OtherRanks | None:
        """An earlier attempt of this launch has set stores aside, because a part was gone."""
        lost = [commit for report in self._reports for commit in report.lost if commit.launch_id in self._launches]
        if not lost or self._own_stores:
            return None
        return self._found("lost", 0, max(lost, key=lambda kept: kept.step), "a part of the stores is gone")

    def _resumable_own(self) -> list[Kept]:
        return [commit for report in self._reports for commit in report.committed if commit.is_resumable]

    def _seen_of(self, numbers: Sequence[int]) -> tuple[SeenStore, ...]:
        """Return the stores of these numbers of ranks, once for each rank that sees them."""
        assert self._num_ranks not in numbers, "a run does not set aside its own stores"
        return tuple(
            seen
            for report in self._reports
            for seen in report.others_seen
            if seen.num_ranks in numbers and seen.store_id == self._runs[seen.num_ranks][seen.rank].store_id
        )

    def _found(
        self,
        state: Literal["reshardable", "resharded", "lost"],
        number: int,
        commit: Kept,
        why_lost: str = "",
        *,
        own_left: tuple[SeenStore, ...] = (),
    ) -> OtherRanks:
        stores = tuple(store for _, store in sorted(self._runs.get(number, {}).items()))
        commits = [commit, *(one for store in stores for one in store.commits)]
        left_over = tuple({number, *self._drafts}) if state != "lost" else ()
        visible = self._seen_of([number]) if stores else ()
        return OtherRanks(
            state,
            self._directories,
            num_ranks=number,
            step=commit.step,
            is_of_launch=any(one.launch_id in self._launches for one in commits),
            why_lost=why_lost,
            last_checkpoint=commit.last_checkpoint,
            left_over=left_over,
            output_dir=commit.output_dir,
            run_id=commit.run_id,
            fingerprint=stores[0].fingerprint if stores else "",
            key=commit.key,
            stores=stores,
            visible={(seen.seen_by, seen.rank): seen.directories for seen in visible},
            left_stores=self._seen_of(left_over),
            own_left=own_left,
        )

    def _state_of(self, number: int) -> str:
        """Describe the stores of a number of ranks for a message."""
        if number == self._num_ranks:
            of_ranks = dict(enumerate(report.committed for report in self._reports))
        else:
            of_ranks = {rank: store.commits for rank, store in self._runs[number].items()}
        common = self._own if number == self._num_ranks else self._complete.get(number)
        step = max((commit.step for commits in of_ranks.values() for commit in commits), default=0)
        if common is not None:
            step = step if number == self._num_ranks else common.step
            how = "complete"
        else:
            lacks = [rank for rank in range(number) if not of_ranks.get(rank)]
            how = f"incomplete ({f'the store of rank {lacks[0]} is gone' if lacks else 'they have no common step'})"
        return f"those of {times(number, 'rank')} are {how}, with step {step}"


def _are_gone(ranks: Sequence[int], num_ranks: int) -> str:
    return f"the store of rank {' and '.join(map(str, ranks))} of {num_ranks} is gone"


def _is_as_resharded(own: Kept, old: Mapping[int, SeenStore]) -> bool:
    """Whether what is visible of the old stores is what was copied, and has no later commits."""
    if not own.resharded_stores:
        return all(seen.newest <= own.number for seen in old.values())
    by_rank = dict(enumerate(own.resharded_stores))
    return all(
        by_rank.get(rank, ("", 0))[0] == seen.store_id and seen.newest <= by_rank[rank][1] for rank, seen in old.items()
    )


def _is_copy_of(store: SeenStore, num_ranks: int, copied: tuple[tuple[str, int], ...]) -> bool:
    """Whether a store has nothing but what was copied from these stores, as they are or at an earlier step."""
    ids = [store_id for store_id, _ in copied]
    return all(
        kept.resharded_from == num_ranks
        and [store_id for store_id, _ in kept.resharded_stores] == ids
        and all(then <= now for (_, then), (_, now) in zip(kept.resharded_stores, copied, strict=True))
        for kept in store.commits
    )


def _is_same_run(own: Kept, old: Mapping[int, SeenStore]) -> bool:
    """Whether these stores were copied, and may have gone on since."""
    return [seen.store_id for _, seen in sorted(old.items())] == [store_id for store_id, _ in own.resharded_stores]


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
    """Whether all commits are of stores that were resharded. Stores without a commit have no state."""
    return all(not seen.damage and all(kept.resharded_from is not None for kept in seen.commits) for seen in stores)


def _must_be_copied_again(own: Kept, before: Kept | None) -> bool:
    """Return whether a run has written to the copy ``own`` without a step, so that only the stores ``before`` have the
    step."""
    return before is not None and before.is_resumable and not own.is_resumable
