"""Updates that wait for the next forward change no bit, with and without clipping, after right and wrong guesses."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from async_device import AsyncDevice
from clip_norms import CLIPS, LETS_THROUGH
from engines import TwinsFactory
from pipeline_bench import Bench
from storage_doubles import SlowBackend

from hf_lohan.updates.gradients import ChunkGradient, HeldGradients
from hf_lohan.updates.worker import UpdateQueue

WAYS: dict[str, tuple[dict[str, Any], list[float]]] = {
    "unclipped": ({"hold_gradients": False, "sums_gradients": False}, [0.0] * 4),
    "guessed": ({"_clip": "speculate"}, [LETS_THROUGH] * 4),
    "some redone": ({"_clip": "speculate"}, [LETS_THROUGH, CLIPS, CLIPS, LETS_THROUGH]),
}
SEEDS = [pytest.param(way, seed, marks=[] if seed == 0 else pytest.mark.slow) for way in WAYS for seed in range(10)]


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """Counts updates after backward (True) and in backward (False)."""
    number: Counter[bool] = Counter()
    update = UpdateQueue.update

    def counted(queue: UpdateQueue, *args: Any, may_borrow: bool = False, **settings: Any) -> None:
        number[may_borrow] += 1
        update(queue, *args, may_borrow=may_borrow, **settings)

    monkeypatch.setattr(UpdateQueue, "update", counted)
    return number


@pytest.mark.parametrize(("way", "seed"), SEEDS)
def test_late_copies_change_no_bit(way: str, seed: int, updates: Counter[bool], make_twins: TwinsFactory) -> None:
    settings, max_norms = WAYS[way]
    device = AsyncDevice(seed, max_delay_s=5e-4)
    twins = make_twins(
        ["llama", "mixtral"][seed % 2],
        **{
            "activations": "swap",
            "cpu_memory": "8MiB",
            "recompute": True,
            "device": device,
            "_parked": 0.4,
            **settings,
        },
        backend=SlowBackend(1e-4),
    )
    for step, max_norm in enumerate(max_norms):
        twins.train(1, first_seed=10 * step, max_norm=max_norm)
    twins.assert_equal()
    assert device.num_races == 0
    assert updates[True] > 0 and updates[False] > 0
    assert twins.engine.clip_history.num_redone == max_norms.count(CLIPS)


def test_reads_between_steps_wait_for_parked_updates(updates: Counter[bool], make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", _clip="speculate", _parked=0.4, backend=SlowBackend(1e-3))
    for step in range(3):
        twins.train(1, first_seed=10 * step, max_norm=LETS_THROUGH)
        twins.losses(step)  # a forward alone
        twins.assert_equal()
    assert updates[True] > 0


def test_a_second_gradient_is_refused_while_the_first_is_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    def hold_in_buffer(held: HeldGradients, gradient: ChunkGradient) -> bool:
        held.hold(gradient)
        return True

    monkeypatch.setattr(HeldGradients, "hold_in_shared_ram", hold_in_buffer)
    bench = Bench("optimized", hold_gradients=False)
    bench.pipeline.park(1.0)
    bench.submit_all()
    bench.pipeline.submit(bench.arrived(1, 1.0), is_final=True)
    with pytest.raises(RuntimeError, match="second gradient of p1 arrived"):
        bench.finish_step()
