"""How long forwards and backwards take, as the computing thread and as the device sees them."""

from __future__ import annotations

import time

from hf_lohan.device import Device, Lane, Stamp
from hf_lohan.model import Block


class StepClock:
    """Adds up over the backwards of a step."""

    def __init__(self) -> None:
        self.forward_s = 0.0
        self.backward_s = 0.0
        self.last_forward_s = 0.0
        """Of the step before."""
        self.last_backward_s = 0.0
        self._began_s = 0.0

    def begin(self) -> None:
        """A forward or a backward begins."""
        self._began_s = time.perf_counter()

    def end_forward(self) -> None:
        self.forward_s += time.perf_counter() - self._began_s

    def end_backward(self) -> None:
        self.backward_s += time.perf_counter() - self._began_s

    def end_step(self) -> None:
        """Begin to count anew."""
        self.last_forward_s, self.last_backward_s = self.forward_s, self.backward_s
        self.forward_s = self.backward_s = 0.0


class ComputeSpans:
    """One task at a time: compute of one pass that needs one block, until the next one is asked for."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._open: tuple[str, Block, Stamp] | None = None

    def is_open(self, name: str, block: Block) -> bool:
        return self._open is not None and self._open[:2] == (name, block)

    def begin(self, name: str, block: Block) -> None:
        """What is enqueued from here on is of the pass ``name`` and for ``block``."""
        self.end()
        self._open = name, block, self._device.stamp(Lane.COMPUTE)

    def end(self) -> None:
        """The last compute of the task, if one is open, is enqueued."""
        if self._open is not None:
            (name, block, began), self._open = self._open, None
            self._device.note_span(
                Lane.COMPUTE, name, began, self._device.stamp(Lane.COMPUTE), block=block.name
            )
