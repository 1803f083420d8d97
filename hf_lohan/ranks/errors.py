"""What ends the run of one rank because of another."""

from __future__ import annotations


class RankFailedError(RuntimeError):
    """A rank ended, failed or sent what cannot be read, so the others cannot go on."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank
        """Where it began."""


class RankTimeoutError(RankFailedError):
    """A rank said nothing for too long while another waited for it."""


class RanksDisagreeError(RuntimeError):
    """Two ranks are at different places of what all of them must do in one order."""
