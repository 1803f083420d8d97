"""What becomes of an activation between its forward and its backward."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeAlias


class Placement(enum.Enum):
    """Where it waits, or that it does not."""

    GPU = "gpu"
    """Kept on the device."""
    CPU = "cpu"
    """Swapped to RAM."""
    SSD = "ssd"
    """Swapped to the SSD."""
    RECOMPUTE = "recompute"
    """Dropped, and made again in backward."""


INPUT = "input"
"""The name of a layer's input among its operations: what its recomputation starts from, so it is never recomputed."""

LayerPlacements: TypeAlias = Mapping[str, Placement]
"""By operation ("aten.mm#0", or `INPUT`). What is not named is recomputed, an input kept."""

ActivationPlacements: TypeAlias = Mapping[str, LayerPlacements]
"""By layer, the block's name."""


def activation_share(cpu_memory_bytes: int) -> int:
    """What of `cpu_memory` is for swapped activations where any may be: a quarter."""
    return cpu_memory_bytes // 4
