"""Maximum norms that clip or do not clip, and the engine's counts of speculated steps."""

from __future__ import annotations

from typing import Any

import pytest

CLIPS, LETS_THROUGH = 0.1, 1e6
NORMS = {
    "every_step_clips": [CLIPS] * 4,
    "no_step_clips": [LETS_THROUGH] * 4,
    "some_steps_clip": [LETS_THROUGH, CLIPS, CLIPS, LETS_THROUGH],
}
MAX_NORMS = pytest.mark.parametrize("max_norms", NORMS.values(), ids=NORMS)
EITHER_WAY = pytest.mark.parametrize("max_norm", [CLIPS, LETS_THROUGH], ids=["clips", "lets_through"])


def train(twins: Any, max_norms: list[float]) -> None:
    for step, max_norm in enumerate(max_norms):
        twins.train(1, first_seed=10 * step, max_norm=max_norm)


def counts(twins: Any) -> tuple[int, int]:
    history = twins.engine.clip_history
    return history.num_speculated, history.num_redone


def assert_speculated(twins: Any, max_norms: list[float]) -> None:
    """Check that all steps were speculated and that exactly the clipped steps were redone."""
    assert counts(twins) == (len(max_norms), max_norms.count(CLIPS))
    assert (twins.engine.undone_update_s > 0) == (CLIPS in max_norms)
