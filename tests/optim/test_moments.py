"""Encoded moments are right on average, and exact if possible. A second moment never becomes zero if the first is
not."""

from __future__ import annotations

import pytest
import torch
from stored_moments import NUMEL, bytes_of, decoded, encoded, new_records, typical_moments
from torch import Tensor

from hf_lohan.optim import MomentDtype, master_format
from hf_lohan.optim.moments import MOMENT_CODECS, SCALE_BLOCK_NUMEL
from hf_lohan.optim.rounding_noise import PERIOD


def test_bytes_per_parameter() -> None:
    for dtype, num_bytes in (("float32", 8.0), ("bfloat16", 4.0), ("int8", 2.25)):
        form = master_format(torch.float32, dtype)  # type: ignore[arg-type]
        assert form.state_bytes_per_param == num_bytes
    assert MOMENT_CODECS["float32"] is None


def test_records_of_zeros_are_moments_of_zero(dtype: MomentDtype) -> None:
    for moment in decoded(dtype, new_records(dtype)):
        assert torch.equal(moment, torch.zeros(NUMEL))
    assert not any(map(any, bytes_of(encoded(dtype, torch.zeros(NUMEL), torch.zeros(NUMEL))).values()))


def test_bfloat16_rounds_to_a_neighbour() -> None:
    moments = typical_moments()
    for exact, found in zip(moments, decoded("bfloat16", encoded("bfloat16", *moments)), strict=True):
        low = (exact.view(torch.int32) & -0x10000).view(torch.float32)
        high = ((exact.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
        assert bool(((found == low) | ((found == high) & (exact != low))).all())
        assert bool((found == high).any()) and bool((found == low).any())


def int8_levels(moments: Tensor, like: Tensor, power: int, highest: int) -> Tensor:
    """Return the positions of `moments` among the int8 codes, as real numbers, with the scales of `like`."""
    largest = like.abs().view(-1, SCALE_BLOCK_NUMEL).amax(1, keepdim=True).double()
    return ((moments.abs().view(-1, SCALE_BLOCK_NUMEL).double() / largest) ** (1 / power) * highest).flatten()


@pytest.mark.parametrize(("moment", "power", "highest", "lowest"), [(0, 4, 127, 0), (1, 8, 256, 1)])
def test_int8_rounds_to_a_neighbour(moment: int, power: int, highest: int, lowest: int) -> None:
    exact = typical_moments()[moment]
    found = decoded("int8", encoded("int8", *typical_moments()))[moment]
    levels, wanted = (int8_levels(values, exact, power, highest) for values in (found, exact))
    assert bool(((levels - levels.round()).abs() < 1e-3).all())
    assert bool((levels >= lowest - 1e-3).all())
    assert bool(((levels - wanted).abs() < 1.001)[wanted >= lowest].all())
    assert bool((levels[wanted < lowest] < lowest + 1e-3).all())
    assert bool((found * exact >= 0).all())


def test_a_second_moment_is_not_zero_if_the_first_is_not() -> None:
    """With a second moment of zero, the update would be the first moment divided by eps."""
    exp_avg = torch.full((NUMEL,), 1e-9)
    exp_avg[::SCALE_BLOCK_NUMEL] = 1.0
    for step in range(1, 50):
        found, found_sq = decoded("int8", encoded("int8", exp_avg, exp_avg.square(), step))
        assert bool((found_sq > 0).all())
        assert bool((found[found != 0].abs() / found_sq[found != 0].sqrt() < 20).all())


def test_the_largest_of_a_block_is_kept() -> None:
    exp_avg, exp_avg_sq = typical_moments()
    found = decoded("int8", encoded("int8", exp_avg, exp_avg_sq))
    for exact, moment in zip((exp_avg, exp_avg_sq), found, strict=True):
        largest = exact.abs().view(-1, SCALE_BLOCK_NUMEL).amax(1)
        assert torch.allclose(moment.abs().view(-1, SCALE_BLOCK_NUMEL).amax(1), largest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [1.0, -3.14159, 1e-30, 7e20])
def test_bfloat16_is_right_on_average_to_the_last_bit(value: float) -> None:
    """A period of the noise contains each value once."""
    exp_avg = torch.full((PERIOD // 2,), value)
    halves = [
        decoded("bfloat16", encoded("bfloat16", exp_avg, exp_avg.abs(), step=5, position=start))
        for start in (0, PERIOD // 2)
    ]
    for moment, exact in ((0, exp_avg[0]), (1, exp_avg[0].abs())):
        mean = torch.stack([half[moment].double() for half in halves]).mean()
        assert abs(float(mean / exact.double()) - 1) < 1e-12


@pytest.mark.parametrize(("moment", "power", "highest"), [(0, 4, 127), (1, 8, 256)])
def test_int8_is_right_on_average(moment: int, power: int, highest: int) -> None:
    """The error of the mean is at most four and a half standard deviations. The deviation of one step is at most half
    the distance between two codes. Values below the smallest code of the second moment become that code."""
    moments, num_steps = typical_moments(numel=1024), 3000
    exact = moments[moment]
    mean = torch.zeros(1024, dtype=torch.float64)
    for step in range(1, num_steps + 1):
        mean += decoded("int8", encoded("int8", *moments, step))[moment] / num_steps
    level = int8_levels(exact, exact, power, highest)
    largest = exact.abs().view(-1, SCALE_BLOCK_NUMEL).amax(1, keepdim=True).expand(-1, SCALE_BLOCK_NUMEL).flatten()
    between = (((level.floor() + 1) / highest) ** power - (level.floor() / highest) ** power) * largest
    tolerance = (
        (4.5 * 0.5 / num_steps**0.5) * between + 1e-6 * exact.abs() + moment * float(highest) ** -power * largest
    )
    assert bool(((mean - exact).abs() <= tolerance).all())


BITS = [0x7FFFFFFF, -1, 0x7F800001, -0x7FFFFF, 0x7FC00000, -0x400000, 0x7F80FFFF]


@pytest.mark.parametrize("bits", BITS, ids=hex)
def test_a_nan_stays_a_nan(dtype: MomentDtype, bits: int) -> None:
    """The NaN of a GPU has all bits set."""
    exp_avg, exp_avg_sq = typical_moments()
    for moment in (exp_avg, exp_avg_sq):
        moment.view(torch.int32)[7::SCALE_BLOCK_NUMEL] = bits
    for step in range(1, 20):
        for moment in decoded(dtype, encoded(dtype, exp_avg, exp_avg_sq, step)):
            assert bool(moment[7::SCALE_BLOCK_NUMEL].isnan().all())


def test_the_largest_and_smallest_numbers_are_encoded(dtype: MomentDtype) -> None:
    largest = torch.finfo(torch.float32).max
    for size in (largest, 1e-37, 1e-45):
        exp_avg = torch.full((NUMEL,), size)
        exp_avg[::2] *= -1
        for step in range(1, 5):
            found, found_sq = decoded(dtype, encoded(dtype, exp_avg, exp_avg.abs(), step))
            assert bool(found.isfinite().all()) and bool(found_sq.isfinite().all())
            assert bool((found * exp_avg >= 0).all())
            if size > 1e-40:
                assert torch.allclose(found, exp_avg, rtol=0.02, atol=1e-36)
                assert torch.allclose(found_sq, exp_avg.abs(), rtol=0.02, atol=1e-36)


def test_bfloat16_moments_are_never_infinite() -> None:
    infinite = torch.full((NUMEL,), torch.inf)
    found, found_sq = decoded("bfloat16", encoded("bfloat16", -infinite, infinite))
    assert torch.equal(found_sq, torch.full((NUMEL,), torch.finfo(torch.bfloat16).max))
    assert torch.equal(found, -found_sq)


def test_decoded_moments_are_encoded_without_error(dtype: MomentDtype) -> None:
    """This holds for any noise, except that int8 may differ in the last bit of the scale."""
    for step in range(2, 40):
        before = encoded(dtype, *typical_moments(seed=step), step=1)
        again = encoded(dtype, *decoded(dtype, before), step=step, position=64 * step)
        if dtype == "bfloat16":
            assert bytes_of(again) == bytes_of(before)
        else:
            assert torch.allclose(again["moment_scales"], before["moment_scales"], rtol=3e-7, atol=0)
            differing = sum(int((again[kind] != before[kind]).sum()) for kind in ("exp_avg", "exp_avg_sq"))
            assert differing <= 2
