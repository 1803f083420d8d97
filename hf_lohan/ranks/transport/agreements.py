"""Decisions that all ranks make together: how a step ends, and which commits count.

*A step* ends with one small exchange after its last backward. Each rank sends its norms of gradients, whether it
applies or drops the gradients, whether the next step is to be committed, whether it was asked to end the run, and a
digest of the hyperparameters. From these, every rank computes the norm, the clipping, whether a guess was right, and
whether the step is skipped. Ranks whose hyperparameters differ end with an error before they apply the step.

*A commit* is made by each rank separately, and announced to the others when it is durable. The previous commit stays,
because no rank overwrites its records or its file before all ranks have the new commit. The first write after a commit
waits for this agreement. This write happens a whole forward later, so it hardly ever waits. So if some rank lacks
commit k, no rank has begun to write k + 1, and commit k - 1 is complete on every rank. When ranks start again, they use
the newest commit that all of them have. At most one commit is lost, and no coordinator is needed.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from hf_lohan.ranks.equal_values import DIGEST_BYTES, NamedValues, are_equal, digest_of, refuse_difference
from hf_lohan.ranks.transport.failures import RanksDisagreeError
from hf_lohan.ranks.transport.links import Links

END_OF_STEP = "the end of the step"
"""Tag of the exchange at the end of a step, for errors of ranks that do different things."""
_DROPS, _COMMITS_NEXT, _ENDS_RUN = 1, 2, 4
_NO_COMMIT = ("", 0)
"""The commit of a rank without commits, and the commit before a rank's first commit."""


class StepAgreement:
    """One rank's side of the agreement on steps. `request_end` may be called anywhere, even in a signal handler. All
    other methods are for the computing thread."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._settings: Callable[[], NamedValues] = dict
        self._requests_end = False
        self._requests_commit = False
        self._ends_run = False
        self.commits_next: bool | None = None
        """Whether the step after the last applied step is committed, because all ranks requested it; None before the
        first applied step."""

    def compare_settings(self, settings: Callable[[], NamedValues]) -> None:
        """Compare the values that ``settings`` returns in each step. "step" must be the number of the step."""
        self._settings = settings

    def request_end(self) -> None:
        """Request the end of the run."""
        self._requests_end = True

    def request_commit(self, is_wanted: bool) -> None:
        """Set whether this rank requests a commit of the step after the step in progress."""
        self._requests_commit = is_wanted

    @property
    def ends_run(self) -> bool:
        """Whether all ranks end after the last step, because a rank had requested it when that step ended."""
        return self._ends_run or (self._requests_end and not self._links.ranks.others)

    def apply_gradients(self, measured: bytes, max_norm: float | None = None) -> list[bytes]:
        """Agree to apply the step's gradients. ``measured``: this rank's norms of them. ``max_norm``: the norm to which
        this rank clips them; None if it does not clip. Returns the norms of each rank, in rank order. Raises
        RanksDisagreeError if another rank drops its gradients, or has other hyperparameters."""
        settings = {**self._settings(), "max_norm": max_norm}
        votes = self._exchange(0, digest_of(settings) + measured)
        if not are_equal(told[:DIGEST_BYTES] for _, told in votes):
            step = f"step {settings.get('step')}"
            advice = (
                f"{step} was not taken; give all ranks the same hyperparameters and clipping, and look for a callback "
                "or a scheduler that only some of them run"
            )
            refuse_difference(f"the hyperparameters of {step}", settings, self._links, advice)
        self.commits_next = all(flags & _COMMITS_NEXT for flags, _ in votes)
        self._ends_run = any(flags & _ENDS_RUN for flags, _ in votes)
        return [told[DIGEST_BYTES:] for _, told in votes]

    def drop_gradients(self) -> None:
        """Agree to drop the step's gradients. Raises RanksDisagreeError if another rank applies them."""
        self._exchange(_DROPS, b"")

    def _exchange(self, drops: int, told: bytes) -> list[tuple[int, bytes]]:
        flags = drops | _COMMITS_NEXT * self._requests_commit | _ENDS_RUN * self._requests_end
        packed = self._links.all_gather(END_OF_STEP, bytes([flags]) + told)
        votes = [(vote[0], vote[1:]) for vote in packed]
        for rank, (others_flags, _) in enumerate(votes):
            if others_flags & _DROPS != drops:
                raise RanksDisagreeError(
                    f"rank {self._links.ranks.rank} {'drops' if drops else 'applies'} the step's gradients, and rank "
                    f"{rank} {'applies' if drops else 'drops'} them; all ranks must do the same; look for code that "
                    "only one of them runs"
                )
        return votes


class KeptCommit(Protocol):
    """A commit to which a rank can return."""

    @property
    def group_id(self) -> str: ...

    @property
    def number(self) -> int: ...


_Commit = TypeVar("_Commit", bound=KeptCommit)


class AgreeingStore(Protocol[_Commit]):
    """The part of a rank's store that `CommitAgreement` uses."""

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
        self._announced = 0
        """The number of this rank's last durable commit."""
        self._others_follow: Callable[[], list[bytes]] | None = None
        """Waits until all ranks have announced this commit."""
        self.group_id = ""
        self.keeps_previous = True

    def restore_common_commit(self, store: AgreeingStore[_Commit]) -> _Commit | None:
        """Take this rank's store back to the newest commit that all ranks have, and commit with the others from now on.
        All ranks call this before any rank writes. Returns this commit; None if all begin without a commit, or if they
        keep one version and cannot go back.

        Raises RanksDisagreeError if ranks have no common commit, or keep different numbers of versions. Nothing is
        changed then. Also raises the store's errors.
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
        newest = newest_common_commit(commits_by_rank)
        chosen = kept.get(newest)
        store.restore_commit(chosen)
        # A commit that a rank gives up must be removed on every rank before another commit gets its number, even if the
        # run is killed.
        self._links.barrier("all ranks are at the same commit")
        # Each start has a new group. Two continuations of one run have commits with the same numbers, and the group
        # keeps them apart.
        self.group_id = str(descriptions[0]["group_id"])
        self._announced, self._others_follow = newest[1], None
        self._lane = self._links.open("commits")
        store.agree_on_commits(self)
        return chosen

    def announce_commit(self, number: int) -> None:
        """Tell the other ranks that this rank's commit is durable. Does not wait. Call it only after `wait_for_commit`
        of the previous commit."""
        if number > self._announced:
            self._announced = number
            self._others_follow = self._lane.begin_agree("all ranks to have the commit", number.to_bytes(8, "little"))

    def wait_for_commit(self, number: int) -> None:
        """Wait until the commit is durable on every rank. Raises RankFailedError or RankTimeoutError, and
        RanksDisagreeError if a rank has made another commit."""
        if self._others_follow is None or number < self._announced:
            return
        for rank, told in enumerate(self._others_follow()):
            if (others := int.from_bytes(told, "little")) != number:
                raise RanksDisagreeError(
                    f"rank {self._links.ranks.rank} has made commit {number}, and rank {rank} has made commit "
                    f"{others}; look for a save that only some of them run"
                )
        self._others_follow = None  # not before, because an interrupted or failed wait must not let a write pass


def newest_common_commit(commits_by_rank: Sequence[Sequence[tuple[str, int]]]) -> tuple[str, int]:
    """Return the newest commit (group, number) that all ranks have. Raises RanksDisagreeError if none exists."""
    common = set(commits_by_rank[0]).intersection(*commits_by_rank[1:])
    if common:
        return max(common, key=lambda commit: commit[1])
    shown = "; ".join(f"rank {rank} holds {_format_commits(commits)}" for rank, commits in enumerate(commits_by_rank))
    raise RanksDisagreeError(
        f"there is no commit that all ranks hold: {shown}. Give each rank its own store of the same run, and restore "
        "only backups that were made at the same time on all drives; to start from a checkpoint or from the beginning, "
        "remove the stores of all ranks first"
    )


def _format_commits(commits: Sequence[tuple[str, int]]) -> str:
    words = [f"commit {number} (start {group_id[:8]})" for group_id, number in commits if number]
    return " and ".join(words) or "nothing"


def _check_num_homes(num_homes: Sequence[int]) -> None:
    words = ["one version" if number == 1 else "two versions" for number in num_homes]
    for rank, number in enumerate(num_homes):
        if number != num_homes[0]:
            raise RanksDisagreeError(
                f"rank 0 keeps {words[0]} of its records, and rank {rank} keeps {words[rank]}; set durability to step "
                "or checkpoint for all ranks, or give the rank with less room a larger drive"
            )
