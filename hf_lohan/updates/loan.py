"""The weights of a block for the optimizer, from the slot that backward used: they need not be read again."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hf_lohan.device import Device, Event, Lane
from hf_lohan.files import IoRequest
from hf_lohan.store import RecordRead


class WeightLoan:
    """Of a slot that is not overwritten until the loan is given back, or what was read of it has arrived."""

    def __init__(self, device: Device, weights: Tensor, give_back: Callable[[], None]) -> None:
        """``weights``: the block's [numel], on the device."""
        self._device = device
        self._weights = weights
        self._give_back: Callable[[], None] | None = give_back

    def read(self, start_numel: int, out: Tensor) -> RecordRead:
        """Fill ``out`` [numel], on the host, with the elements from ``start_numel`` on: once, when a gradient of the
        block has arrived, so that the block has, too."""
        give_back, self._give_back = self._give_back, None
        assert give_back is not None, "the loan is over"
        self._device.copy(Lane.D2H_ASIDE, out, self._weights[start_numel : start_numel + out.numel()])
        return _LoanedRead(self._device.record(Lane.D2H_ASIDE), give_back)

    def give_back(self) -> None:
        """The weights are not wanted, or read already."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


def give_back(loan: WeightLoan | None) -> None:
    """If there is one."""
    if loan is not None:
        loan.give_back()


class _LoanedRead(RecordRead):
    """Of what a slot holds, which was verified when it was brought there."""

    def __init__(self, copied: Event, give_back: Callable[[], None]) -> None:
        super().__init__(IoRequest.finished())
        self._copied = copied
        self._give_back: Callable[[], None] | None = give_back

    def arrive(self) -> None:
        """See `RecordRead.arrive`. Called by one thread."""
        self._copied.synchronize()
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()
