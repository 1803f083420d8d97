"""What a run did when: seconds busy and bytes moved for each lane, always; each single task, while a trace is wanted.

Every room that does work notes it here, under the lane of the resource that does it. The counters cost a lock and two
clock readings a task and are always on; a trace keeps every task and writes them as Chrome's trace JSON. Uses the
standard library alone.
"""

from hf_lohan.timeline.chrome_trace import trace_events
from hf_lohan.timeline.timeline import (
    COMPUTE,
    COMPUTE_WAITS,
    CPU_OPTIMIZER,
    D2H,
    H2D,
    LANES,
    LOADS_WAIT,
    SSD_READ,
    SSD_WRITE,
    UPDATES_WAIT,
    LaneTotals,
    Task,
    Timeline,
)

__all__ = [
    "COMPUTE",
    "COMPUTE_WAITS",
    "CPU_OPTIMIZER",
    "D2H",
    "H2D",
    "LANES",
    "LOADS_WAIT",
    "SSD_READ",
    "SSD_WRITE",
    "UPDATES_WAIT",
    "LaneTotals",
    "Task",
    "Timeline",
    "trace_events",
]
