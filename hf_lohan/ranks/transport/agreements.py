"""Decisions of all ranks together: how a step ends, and which commits count.

*A step* ends with one small exchange after its last backward. Each rank sends what it measured of the gradients,
whether it applies or drops them, whether the next step is to be committed, and whether it was asked to end the run.
Every rank derives the rest alike: the norm, clipping, whether a guess was right, and whether the step is skipped.

*A commit* is made by each rank alone, and announced to the others when it is durable. The commit before it stays: no
rank overwrites its records or its file before all ranks have the new one. The first write after a commit waits for
that, a whole forward later, so it hardly ever waits. Hence, if some rank lacks commit k, no rank has begun to write
k + 1, and commit k - 1 is whole on every rank. When ranks start again they take the newest commit that all of them
hold. At most one commit is given up, and no rank coordinates.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Protocol, TypeVar

from hf_lohan.ranks.transport.failures import RanksDisagreeError
from hf_lohan.ranks.transport.links import Links
from hf_lohan.ranks.transport.messages import Kind, PayloadReader

END_OF_STEP = "the end of the step"
"""Tag of the exchange at the end of a step, for errors where ranks do different things."""
_DROPS, _COMMITS_NEXT, _ENDS_RUN = 1, 2, 4
_NO_COMMIT = ("", 0)
"""Held by a rank that has no commit, or none before its first."""


class StepAgreement:
    """One rank's side of the agreement on steps. `request_end` may be called anywhere, also in a signal handler; all
    else on the computing thread."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._requests_end = False
        self._requests_commit = False
        self._ends_run = False
        self.commits_next: bool | None = None
        """Whether the step after the last applied one is committed: all ranks requested it. None before one was
        applied."""

    def request_end(self) -> None:
        """This rank was asked to end the run."""
        self._requests_end = True

    def request_commit(self, is_wanted: bool) -> None:
        """Whether this rank would commit the step after the one in progress."""
        self._requests_commit = is_wanted

    @property
    def ends_run(self) -> bool:
        """Whether all ranks end after the last step: one of them had requested it when that step ended. A single rank
        decides alone."""
        return self._ends_run or (self._requests_end and not self._links.ranks.others)

    def apply_gradients(self, measured: bytes) -> list[bytes]:
        """Apply the step's gradients, of which this rank measured ``measured``. Returns what each rank measured, in
        rank order. Raises RanksDisagreeError where another rank drops them."""
        votes = self._exchange(0, measured)
        self.commits_next = all(flags & _COMMITS_NEXT for flags, _ in votes)
        self._ends_run = any(flags & _ENDS_RUN for flags, _ in votes)
        return [others for _, others in votes]

    def drop_gradients(self) -> None:
        """Drop the step's gradients. Raises RanksDisagreeError where another rank applies them."""
        self._exchange(_DROPS, b"")

    def _exchange(self, drops: int, measured: bytes) -> list[tuple[int, bytes]]:
        flags = drops | _COMMITS_NEXT * self._requests_commit | _ENDS_RUN * self._requests_end
        packed = self._links.all_gather(END_OF_STEP, bytes([flags]) + measured)
        votes = [(vote[0], vote[1:]) for vote in packed]
        for rank, (others_flags, _) in enumerate(votes):
            if others_flags & _DROPS != drops:
                raise RanksDisagreeError(
                    f"rank {self._links.ranks.rank} {'drops' if drops else 'applies'} the step's gradients, and rank "
                    f"{rank} {'applies' if drops else 'drops'} them; all ranks have to do the same: look for code that "
                    "only one of them runs"
                )
        return votes


class KeptCommit(Protocol):
    """A commit that a rank can go back to."""

    @property
    def group_id(self) -> str: ...

    @property
    def number(self) -> int: ...


_Commit = TypeVar("_Commit", bound=KeptCommit)


class AgreeingStore(Protocol[_Commit]):
    """What `CommitAgreement` uses of a rank's store."""

    @property
    def num_homes(self) -> int: ...

    @property
    def kept_commits(self) -> Sequence[_Commit]: ...

    def restore_commit(self, commit: _Commit | None) -> None: ...

    def agree_on_commits(self, agreement: CommitAgreement) -> None: ...


class CommitAgreement:
    """One rank's side of the agreement on commits."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._durable = dict.fromkeys(links.ranks.others, 0)
        """By rank, the number of its last durable commit."""
        self.group_id = ""
        self.keeps_previous = True

    def restore_common_commit(self, store: AgreeingStore[_Commit]) -> _Commit | None:
        """Take this rank's store to the newest commit that all ranks hold, and commit with the others from now on. All
        ranks call this before any of them writes. Returns that commit; None where all begin without one, or keep one
        version and cannot go back.

        Raises RanksDisagreeError where they have none in common, or keep different numbers of versions; then nothing
        has changed. Also raises what the store raises.
        """
        kept = {(commit.group_id, commit.number): commit for commit in store.kept_commits}
        held = [*kept, *([] if any(number > 1 for _, number in kept) else [_NO_COMMIT])]
        description = {"held": held, "num_homes": store.num_homes, "group_id": uuid.uuid4().hex}
        packed = self._links.all_gather("which commits each rank holds", json.dumps(description).encode())
        descriptions = [json.loads(of_rank) for of_rank in packed]
        _check_num_homes([int(of_rank["num_homes"]) for of_rank in descriptions])
        if store.num_homes == 1:
            return None
        commits_by_rank = [[(str(group), int(count)) for group, count in of_rank["held"]] for of_rank in descriptions]
        group_id, number = newest_common_commit(commits_by_rank)
        chosen = kept.get((group_id, number))
        store.restore_commit(chosen)
        # The commit that a rank goes back from must be gone everywhere, whenever the run is cut off, before another one
        # gets its number.
        self._links.barrier("all ranks are at the same commit")
        self.group_id = group_id or str(descriptions[0]["group_id"])
        self._durable = dict.fromkeys(self._links.ranks.others, number)
        self._links.set_handler(Kind.PREPARED, self._on_prepared)
        store.agree_on_commits(self)
        return chosen

    def announce_commit(self, number: int) -> None:
        """Tell the others that this rank's commit is durable."""
        self._links.send_all(Kind.PREPARED, number)

    def wait_for_commit(self, number: int) -> None:
        """Return when the commit is durable on every rank. Raises RankFailedError or RankTimeoutError."""

        def ranks_behind() -> list[int]:
            return [rank for rank, durable in self._durable.items() if durable < number]

        self._links.wait_for(lambda: not ranks_behind(), f"all ranks to have commit {number}", peers=ranks_behind)

    def _on_prepared(self, peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        with self._links.lock:
            self._durable[peer] = max(self._durable[peer], numbers[0])
            self._links.notify()


def newest_common_commit(commits_by_rank: Sequence[Sequence[tuple[str, int]]]) -> tuple[str, int]:
    """The newest commit (group, number) that all ranks hold. Raises RanksDisagreeError if there is none."""
    common = set(commits_by_rank[0]).intersection(*commits_by_rank[1:])
    if common:
        return max(common, key=lambda commit: commit[1])
    shown = "; ".join(f"rank {rank} holds {_format_commits(commits)}" for rank, commits in enumerate(commits_by_rank))
    raise RanksDisagreeError(
        f"there is no commit that all ranks hold: {shown}. Give each rank the folder of its store of the same run; to "
        "start from a checkpoint, or anew, remove the stores of all ranks first"
    )


def _format_commits(commits: Sequence[tuple[str, int]]) -> str:
    words = [f"commit {number} of run {group_id[:8]}" for group_id, number in commits if number]
    return " and ".join(words) or "nothing"


def _check_num_homes(num_homes: Sequence[int]) -> None:
    words = ["one version" if number == 1 else "two versions" for number in num_homes]
    for rank, number in enumerate(num_homes):
        if number != num_homes[0]:
            raise RanksDisagreeError(
                f"rank 0 keeps {words[0]} of its records and rank {rank} {words[rank]}: set durability to step or "
                "checkpoint for all of them, or give the one with less room a larger drive"
            )
