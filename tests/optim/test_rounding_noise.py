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


def test_the_table_is_the_same_on_every_machine() -> None:
    """A run can be continued bit for bit with another version of torch's generators."""
    assert rounding_noise.integers(0, 6, 1, 0).tolist() == [63110, 40418, 33065, 59665, 56540, 32318]
    assert rounding_noise.integers(12345, 6, 1000, 1).tolist() == [60575, 60878, 26003, 37038, 24443, 59065]
