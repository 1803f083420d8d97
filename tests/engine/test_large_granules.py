"""Large granules change no number."""

from __future__ import annotations

from functools import partial

import pytest
from engines import TwinsFactory

from hf_lohan.model import block
from hf_lohan.store import GRANULE_NUMEL, MAX_GRANULE_NUMEL
from hf_lohan.testing.models import tiny_model


@pytest.mark.parametrize("hold_gradients", [True, False], ids=["held", "active"])
def test_large_granules_change_no_bit(
    hold_gradients: bool, make_twins: TwinsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block, "MIN_GRANULES", 4)
    twins = make_twins(
        model_factory=partial(tiny_model, "llama", hidden_size=512, num_layers=2),
        hold_gradients=hold_gradients,
        gpu_memory="32MiB",
        cpu_memory="40MiB",
    )
    (granule_numel,) = {part.granule_numel for part in twins.engine.layout.blocks}
    assert granule_numel > GRANULE_NUMEL and twins.engine.layout.plan.chunk_numel >= granule_numel
    assert MAX_GRANULE_NUMEL % granule_numel == 0
    for step in range(3):
        twins.backward(batch_seed=step)
        if hold_gradients:
            twins.clip(0.5)
        twins.step()
    twins.assert_equal()
