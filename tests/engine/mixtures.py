"""Draw placements of activations at random."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from hf_lohan.activations.trace import LayerTrace
from hf_lohan.costs import INPUT, ActivationPlacements, Placement

EVERYWHERE = tuple(Placement)


def random_mixture(
    trace: Mapping[str, LayerTrace], seed: int, places: Sequence[Placement] = EVERYWHERE
) -> ActivationPlacements:
    """Draw one of `places` for each operation of each layer, also for operations that recomputation would not run."""
    draw = random.Random(seed)
    return {name: {what: draw.choice(places) for what in (INPUT, *layer.operations)} for name, layer in trace.items()}


def all_in(trace: Mapping[str, LayerTrace], place: Placement) -> ActivationPlacements:
    return random_mixture(trace, 0, [place])
