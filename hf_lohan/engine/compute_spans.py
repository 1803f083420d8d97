"""What the device computes for which block, as tasks of the timeline."""

from __future__ import annotations

from hf_lohan.device import Device, Lane, Stamp
from hf_lohan.model import Block


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
