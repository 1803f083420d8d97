"""The rounding noise is uniform and depends only on the element and the step."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_lohan.optim import rounding_noise
from hf_lohan.optim.rounding_noise import MAX_RUN_NUMEL, PERIOD

positions = st.integers(0, 1 << 40)
steps = st.integers(1, 1 << 31)


def whole_period(step: int, stream: int) -> torch.Tensor:
    runs = [rounding_noise.integers(start, MAX_RUN_NUMEL, step, stream) for start in range(0, PERIOD, MAX_RUN_NUMEL)]
    return torch.cat(runs)


@given(steps, st.integers(0, 1))
def test_a_period_contains_every_value_once(step: int, stream: int) -> None:
    assert torch.equal(whole_period(step, stream).sort().values, torch.arange(PERIOD, dtype=torch.int32))


@given(positions, steps, st.integers(0, 1), st.integers(1, MAX_RUN_NUMEL), st.data())
def test_an_elements_noise_does_not_depend_on_the_run(
    position: int, step: int, stream: int, numel: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, numel - 1))
    run = rounding_noise.integers(position, numel, step, stream)
    assert run.numel() == numel
    assert torch.equal(rounding_noise.integers(position + first, numel - first, step, stream), run[first:])
    fractions = rounding_noise.fractions(position, numel, step, stream)
    assert torch.equal(fractions, (run.float() + 0.5) / PERIOD)
    assert fractions.min() > 0 and fractions.max() < 1


def test_an_elements_noise_is_uniform_over_its_steps() -> None:
    """The noise of the two moments, and of successive steps, is uncorrelated."""
    seen = torch.tensor(
        [[float(rounding_noise.fractions(77, 1, step, stream)) for step in range(1, 4001)] for stream in (0, 1)]
    )
    counts = torch.histc(seen[0], bins=20, min=0, max=1)
    assert bool(((counts - 200).abs() < 60).all()), counts  # more than four standard deviations
    correlations = torch.corrcoef(torch.stack([seen[0][1:], seen[0][:-1], seen[1][1:]]))
    assert bool(((correlations - torch.eye(3)).abs() < 0.06).all()), correlations


def of_weights(key: str, first: int, numel: int) -> torch.Tensor:
    return rounding_noise.hashed_integers(key, first, numel, torch.empty(2, numel, dtype=torch.int32))


@given(positions, st.integers(1, MAX_RUN_NUMEL), st.data())
def test_a_weights_noise_does_not_depend_on_the_run(first: int, numel: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, numel - 1))
    run = of_weights("0 1 a", first, numel)
    assert torch.equal(of_weights("0 1 a", first + start, numel - start), run[start:])
    assert int(run.min()) >= 0 and int(run.max()) < PERIOD


def test_the_noise_of_weights_is_uniform_over_elements_steps_and_seeds() -> None:
    """Neighbours, steps, seeds and parameters are uncorrelated."""
    numel = 1 << 16
    runs = [of_weights(key, 0, numel) for key in ("0 1 a", "0 2 a", "1 1 a", "0 1 b")]
    counts = torch.bincount(runs[0] >> 8, minlength=256)
    assert float(((counts - 256.0) ** 2 / 256).sum()) < 350  # 255 is expected, with a standard deviation of 23
    shifted = [runs[0].roll(distance) for distance in (1, 32, 576)]
    found = torch.corrcoef(torch.stack([*runs, *shifted]).double())
    assert bool(((found - torch.eye(len(found))).abs() < 0.02).all()), found  # five standard deviations
    over_steps = torch.cat([of_weights(f"0 {step} a", 7, 1) for step in range(4000)])
    assert abs(float(over_steps.double().mean()) - PERIOD / 2) < 5 * PERIOD / (12 * 4000) ** 0.5
    assert of_weights("0 1 model.norm.weight", 123, 6).tolist() == [30974, 10639, 22505, 33598, 642, 44450]


def test_the_table_is_the_same_on_every_machine() -> None:
    """A run can be continued bit for bit with another version of torch's generators."""
    assert rounding_noise.integers(0, 6, 1, 0).tolist() == [63110, 40418, 33065, 59665, 56540, 32318]
    assert rounding_noise.integers(12345, 6, 1000, 1).tolist() == [60575, 60878, 26003, 37038, 24443, 59065]
