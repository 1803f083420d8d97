"""What all ranks decide about a step: one small exchange behind its last backward.

Each says what it measured of the gradients, whether it applies or drops them, whether the step after this one is to be
committed, and whether it was asked to end. The rest follows on each rank alike: the norm, clipping, whether a guess was
right, and whether the step is skipped.
"""

from __future__ import annotations

from hf_lohan.ranks.errors import RanksDisagreeError
from hf_lohan.ranks.links import Links

END_OF_STEP = "the end of the step"
"""What the exchange is called where ranks are at different places."""
_DROPS, _COMMITS_NEXT, _ENDS_RUN = 1, 2, 4


class StepAgreement:
    """Of one rank with all others. `wish_to_end` may be called anywhere, also in a signal handler; all else on the
    computing thread."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._wishes_to_end = False
        self._wishes_commit = False
        self._ends_run = False
        self.commits_next: bool | None = None
        """Whether the step after the last one that was applied is committed: all ranks wished it. None before one was
        applied."""

    def wish_to_end(self) -> None:
        """This rank was asked to end."""
        self._wishes_to_end = True

    def wish_commit(self, is_wanted: bool) -> None:
        """Whether this rank would have the step after the one in progress committed."""
        self._wishes_commit = is_wanted

    @property
    def ends_run(self) -> bool:
        """Whether all ranks end behind the last step: one of them had been asked to before they agreed on it. The only
        rank asks nobody."""
        return self._ends_run or (self._wishes_to_end and not self._links.ranks.others)

    def apply(self, measured: bytes) -> list[bytes]:
        """This rank applies the step's gradients, of which it has `measured` its part. Returns what each rank has, in
        rank order. Raises RanksDisagreeError where one drops them."""
        came = self._exchange(0, measured)
        self.commits_next = all(flags & _COMMITS_NEXT for flags, _ in came)
        self._ends_run = any(flags & _ENDS_RUN for flags, _ in came)
        return [its for _, its in came]

    def drop(self) -> None:
        """This rank drops them. Raises RanksDisagreeError where one applies them."""
        self._exchange(_DROPS, b"")

    def _exchange(self, drops: int, measured: bytes) -> list[tuple[int, bytes]]:
        flags = drops | _COMMITS_NEXT * self._wishes_commit | _ENDS_RUN * self._wishes_to_end
        came = [(said[0], said[1:]) for said in self._links.gather(END_OF_STEP, bytes([flags]) + measured)]
        for rank, (its, _) in enumerate(came):
            if its & _DROPS != drops:
                raise RanksDisagreeError(
                    f"rank {self._links.ranks.rank} {_worded(drops)} the step's gradients, and rank {rank} "
                    f"{_worded(its & _DROPS)} them; all ranks have to do the same: look for what only one of them "
                    "catches or skips"
                )
        return came


def _worded(drops: int) -> str:
    return "drops" if drops else "applies"
