"""Which commits all ranks have. Each rank commits by itself, and tells the others when that is durable.

A commit leaves the one before it where it is. Nobody overwrites that, neither its records nor its file, before all
ranks have the new one: the first write after a commit waits for them, a whole forward later, when they have long said
so. So if some rank has no commit k, no rank has begun to write k + 1, and every rank's k - 1 is whole. When ranks meet
again they take the newest commit that all of them hold: no more than one is given up, and no rank coordinates.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Protocol, TypeVar

from hf_lohan.ranks.errors import RanksDisagreeError
from hf_lohan.ranks.links import Links
from hf_lohan.ranks.messages import Kind, PayloadReader

_NOTHING = ("", 0)
"""What a rank holds that has no commit, or none before its first."""


class KeptCommit(Protocol):
    """One that a rank can be at."""

    @property
    def group_id(self) -> str: ...

    @property
    def number(self) -> int: ...


Kept = TypeVar("Kept", bound=KeptCommit)


class AgreeingStore(Protocol[Kept]):
    """What one rank's store has to offer."""

    @property
    def num_homes(self) -> int: ...

    @property
    def kept_commits(self) -> Sequence[Kept]: ...

    def restore_commit(self, commit: Kept | None) -> None: ...

    def agree_on_commits(self, agreement: CommitAgreement) -> None: ...


class CommitAgreement:
    """Of one rank with all others."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._prepared = dict.fromkeys(links.ranks.others, 0)
        """By rank, the number of the last commit that is durable there."""
        self.group_id = ""
        self.keeps_previous = True

    def begin(self, store: AgreeingStore[Kept]) -> Kept | None:
        """Have this rank's store be at the newest commit that all ranks hold, and commit with the others from now on.
        Returns that commit; None: all begin with nothing, or keep one version and cannot go back. All ranks call this,
        before any of them writes.

        Raises RanksDisagreeError where they hold none in common, or do not keep equally many versions; then nothing has
        changed. And as the store does.
        """
        kept = {(commit.group_id, commit.number): commit for commit in store.kept_commits}
        held = [*kept, *([] if any(number > 1 for _, number in kept) else [_NOTHING])]
        told = {"held": held, "num_homes": store.num_homes, "group_id": uuid.uuid4().hex}
        came = [json.loads(said) for said in self._links.gather("which commits each rank holds", _packed(told))]
        self._refuse_other_homes([int(said["num_homes"]) for said in came])
        if store.num_homes == 1:
            return None
        group_id, number = newest_of_all([[(str(group), int(count)) for group, count in said["held"]] for said in came])
        chosen = kept.get((group_id, number))
        store.restore_commit(chosen)
        # What a rank goes back from is a commit no more, wherever it is cut off, before another has this number.
        self._links.barrier("all ranks are at the same commit")
        self.group_id = group_id or str(came[0]["group_id"])
        self._prepared = dict.fromkeys(self._links.ranks.others, number)
        self._links.on(Kind.PREPARED, self._note)
        store.agree_on_commits(self)
        return chosen

    def announce_commit(self, number: int) -> None:
        """This rank's commit is durable."""
        self._links.send_all(Kind.PREPARED, number)

    def wait_for_commit(self, number: int) -> None:
        """Return when every rank's is. Raises RankFailedError or RankTimeoutError."""

        def behind() -> list[int]:
            return [rank for rank, prepared in self._prepared.items() if prepared < number]

        self._links.wait_for(lambda: not behind(), f"all ranks to have commit {number}", peers=behind)

    def _note(self, peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        with self._links.lock:
            self._prepared[peer] = max(self._prepared[peer], numbers[0])
            self._links.notify()

    def _refuse_other_homes(self, num_homes: Sequence[int]) -> None:
        for rank, number in enumerate(num_homes):
            if number != num_homes[0]:
                raise RanksDisagreeError(
                    f"rank 0 keeps {_versions(num_homes[0])} of its records and rank {rank} {_versions(number)}: set "
                    "durability to step or checkpoint for all of them, or give the one with less room a larger drive"
                )


def newest_of_all(held: Sequence[Sequence[tuple[str, int]]]) -> tuple[str, int]:
    """Of the commits (group, number) that each rank holds, the newest that all do. Raises RanksDisagreeError."""
    common = set(held[0]).intersection(*held[1:])
    if common:
        return max(common, key=lambda commit: commit[1])
    shown = "; ".join(f"rank {rank} holds {_shown(commits)}" for rank, commits in enumerate(held))
    raise RanksDisagreeError(
        f"there is no commit that all ranks hold: {shown}. Give each rank the folder of its store of the same run; to "
        "go on from a checkpoint, or to begin anew, remove the stores of all ranks first"
    )


def _shown(commits: Sequence[tuple[str, int]]) -> str:
    words = [f"commit {number} of run {group_id[:8]}" for group_id, number in commits if number]
    return " and ".join(words) or "nothing"


def _versions(number: int) -> str:
    return "one version" if number == 1 else "two versions"


def _packed(told: dict[str, object]) -> bytes:
    return json.dumps(told).encode()
