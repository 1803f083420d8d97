"""In what order autograd records, for threads that take part in one forward and one backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from hf_lohan.compat.torch_private import sequence_number, without_modes

_VIEWS_AT_ONCE = 256


class SequenceNumbers:
    """Lets threads that run in turns number what they record for autograd as if they were one.

    Each thread counts for itself, and of what is ready autograd's backward runs the highest number first. A count
    cannot be set, but whatever is recorded, here views that nobody keeps, raises it; that takes less than a microsecond
    each.
    """

    def __init__(self) -> None:
        self._next = 0
        self._source = torch.zeros((), requires_grad=True)

    def leave(self) -> None:
        """The calling thread's turn ends."""
        with _recording():
            self._next = self._number()

    def enter(self) -> None:
        """The calling thread's turn begins: what it records comes behind all that was recorded in earlier turns."""
        with _recording():
            behind = self._next - self._number()
            while behind > 0:
                torch.atleast_1d([self._source] * min(behind, _VIEWS_AT_ONCE))
                behind -= _VIEWS_AT_ONCE

    def _number(self) -> int:
        node = self._source.view(1).grad_fn
        assert node is not None
        return sequence_number(node)


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Autograd records, and no mode of a forward that is under way sees it."""
    with torch.enable_grad(), without_modes():
        yield
