"""Random experts for passes, with the chances of a router."""

from __future__ import annotations

import numpy as np

NUM_EXPERTS, NUM_CHOSEN = 128, 8


def routed(num_passes: int, num_tokens: int, skew: float, *, seed: int = 0) -> list[list[int]]:
    """Return the experts of each pass. Each token chooses 8 of 128 experts with chances that fall as rank ** -skew."""
    rng = np.random.default_rng(seed)
    chances = np.arange(1, NUM_EXPERTS + 1) ** -float(skew)
    logs = np.log(chances / chances.sum())
    names = rng.permutation(NUM_EXPERTS)
    passes = []
    for _ in range(num_passes):
        scores = rng.gumbel(size=(num_tokens, NUM_EXPERTS)) + logs
        chosen = np.argpartition(-scores, NUM_CHOSEN - 1, axis=1)[:, :NUM_CHOSEN]
        passes.append(sorted(int(expert) for expert in names[np.unique(chosen)]))
    return passes
