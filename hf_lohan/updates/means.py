"""Where a chunk's gradient becomes that of all ranks. With one rank it is so already."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Protocol

from hf_lohan.model import Chunk
from hf_lohan.threads import Command
from hf_lohan.updates.chunk_gradient import ChunkGradient

Apply = Callable[[ChunkGradient], object]


class GradientMeans(Protocol):
    """Takes each chunk's gradient, complete on this rank, and gives back the mean over all ranks of what is this
    rank's to update."""

    are_of_many: bool
    """Whether there are several ranks."""

    @property
    def given(self) -> Set[Chunk]:
        """What came in this step."""

    @property
    def while_waiting(self) -> Callable[[float], object] | None:
        """To be called now and then by who waits for a buffer in which gradients arrive, with when that began: raises
        where other ranks keep them in vain. None where there are no others."""

    def when_none_was_given(self, apply: Apply) -> None:
        """What is called with a mean that is this rank's to update, and of which it had no gradient itself."""

    def give(self, gradient: ChunkGradient, apply: Apply, unwanted: Callable[[], object]) -> None:
        """Take over a gradient, once for each chunk and step. On the worker's thread, on which ``apply`` is then called
        with the mean, if this rank is to have it; else ``unwanted``."""

    def finish(self) -> None:
        """No more comes of this step's gradients. Returns when all means that are this rank's have been given to the
        worker's thread, or others have dropped the step. On the computing thread."""

    def drop(self) -> None:
        """Nobody wants the step's means. On the computing thread."""

    def end_step(self) -> None:
        """What is given from now on is the next step's."""

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on. From any thread."""

    def close(self) -> None:
        """Nothing is given any more."""


class OwnGradients:
    """`GradientMeans` of one rank."""

    are_of_many = False
    given: Set[Chunk] = frozenset()
    while_waiting = None

    def __init__(self, put: Callable[[Command], None], failed: Callable[[BaseException], None]) -> None:
        """Neither is needed: nothing comes from elsewhere."""

    def when_none_was_given(self, apply: Apply) -> None:
        """There is no such mean."""

    def give(self, gradient: ChunkGradient, apply: Apply, unwanted: Callable[[], object]) -> None:
        """It is the mean."""
        apply(gradient)

    def finish(self) -> None:
        """Nobody is to be waited for."""

    def drop(self) -> None:
        """Nobody has anything of them."""

    def end_step(self) -> None:
        """Nothing to forget."""

    def fail(self, error: BaseException) -> None:
        """Nobody else is to be told."""

    def close(self) -> None:
        """Nothing to let go."""
