"""The lanes of a run's timeline as a report shows them: what they are called, their colours, and which of them wait."""

from __future__ import annotations

from dataclasses import dataclass

from hf_lohan.report.svg import BLUE, GRAY, GREEN, PURPLE, RED, TEAL
from hf_lohan.timeline import (
    COMPUTE,
    COMPUTE_WAITS,
    CPU_OPTIMIZER,
    D2H,
    H2D,
    LOADS_WAIT,
    SSD_READ,
    SSD_WRITE,
    UPDATES_WAIT,
)


@dataclass(frozen=True, slots=True)
class ShownLane:
    """How a report shows one lane."""

    label: str
    color: str
    waits: bool = False
    """It is time that a thread waited, not work of a resource."""


LANES = {
    COMPUTE: ShownLane("computing", BLUE),
    H2D: ShownLane("copies to the device", PURPLE),
    D2H: ShownLane("copies from the device", "#b79be0"),
    SSD_READ: ShownLane("SSD reading", TEAL),
    SSD_WRITE: ShownLane("SSD writing", "#2f7f88"),
    CPU_OPTIMIZER: ShownLane("optimizer on the CPU", GREEN),
    COMPUTE_WAITS: ShownLane("computing waits", RED, waits=True),
    LOADS_WAIT: ShownLane("loading waits", "#b9a18f", waits=True),
    UPDATES_WAIT: ShownLane("updating waits", GRAY, waits=True),
}
WORK_LANES = tuple(name for name, lane in LANES.items() if not lane.waits)
WAIT_LANES = tuple(name for name, lane in LANES.items() if lane.waits)
