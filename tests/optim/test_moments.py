"""Moments in fewer bytes: right on average, no zero under something, nothing written but what a step changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_lohan.optim import AdamWGroup, MomentDtype, Segment, adamw_, adamw_in_tiles_, master_format, moment_codec
from hf_lohan.optim.moments import NUM_SCRATCH, SCALE_BLOCK_NUMEL, MomentCodec, Span
from hf_lohan.optim.rounding_noise import PERIOD

DTYPES: tuple[MomentDtype, ...] = ("bfloat16", "int8")
NUMEL = 4096
GROUP = AdamWGroup(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)

Records = dict[str, Tensor]


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> MomentDtype:
    dtype: MomentDtype = request.param
    return dtype


def codec_of(dtype: MomentDtype) -> MomentCodec:
    codec = moment_codec(dtype)
    assert codec is not None
    return codec


def new_records(dtype: MomentDtype, numel: int = NUMEL) -> Records:
    form = master_format(torch.float32, dtype)
    return {kind: torch.zeros(form.numel(kind, numel), dtype=form.state_dtype(kind)) for kind in form.state_kinds}


def encoded(dtype: MomentDtype, exp_avg: Tensor, exp_avg_sq: Tensor, step: int = 1, position: int = 0) -> Records:
    records, numel = new_records(dtype, exp_avg.numel()), exp_avg.numel()
    span, scratch = Span(0, numel, step, position), torch.empty(NUM_SCRATCH, numel)
    codec_of(dtype).encode_(records, exp_avg.clone(), exp_avg_sq.clone(), span, scratch)
    return records


def decoded(dtype: MomentDtype, records: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    moments = torch.full((2, records["exp_avg"].numel()), torch.nan)
    codec_of(dtype).decode_(records, moments[0], moments[1], torch.empty(NUM_SCRATCH, moments.shape[1]))
    return moments[0], moments[1]


def some_moments(seed: int = 0, numel: int = NUMEL) -> tuple[Tensor, Tensor]:
    """As training has them: of very different sizes, and some still zero."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(3 * torch.randn(numel, generator=generator)) * 1e-4
    exp_avg, exp_avg_sq = torch.randn(numel, generator=generator) * sizes, sizes.square()
    never = torch.rand(numel, generator=generator) < 0.1
    return exp_avg.masked_fill_(never, 0), exp_avg_sq.masked_fill_(never, 0)


def bytes_of(records: Mapping[str, Tensor]) -> dict[str, bytes]:
    return {kind: record.view(torch.uint8).numpy().tobytes() for kind, record in records.items()}


def test_bytes_a_parameter() -> None:
    for dtype, num_bytes in (("float32", 8.0), ("bfloat16", 4.0), ("int8", 2.25)):
        form = master_format(torch.float32, dtype)  # type: ignore[arg-type]
        assert form.state_bytes_per_param == num_bytes
    assert moment_codec("float32") is None


def test_what_was_never_written_is_zero(dtype: MomentDtype) -> None:
    for moment in decoded(dtype, new_records(dtype)):
        assert torch.equal(moment, torch.zeros(NUMEL))
    assert not any(map(any, bytes_of(encoded(dtype, torch.zeros(NUMEL), torch.zeros(NUMEL))).values()))


def test_bfloat16_is_one_of_the_two_neighbours() -> None:
    moments = some_moments()
    for exact, found in zip(moments, decoded("bfloat16", encoded("bfloat16", *moments)), strict=True):
        low = (exact.view(torch.int32) & -0x10000).view(torch.float32)
        high = ((exact.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
        assert bool(((found == low) | ((found == high) & (exact != low))).all())
        assert bool((found == high).any()) and bool((found == low).any())


def int8_levels(moments: Tensor, like: Tensor, power: int, highest: int) -> Tensor:
    """Where int8's codes for numbers of the size of ``moments`` are, as real numbers, with scales that ``like`` has."""
    largest = like.abs().view(-1, SCALE_BLOCK_NUMEL).amax(1, keepdim=True).double()
    return ((moments.abs().view(-1, SCALE_BLOCK_NUMEL).double() / largest) ** (1 / power) * highest).flatten()


@pytest.mark.parametrize(("moment", "power", "highest", "lowest"), [(0, 4, 127, 0), (1, 8, 256, 1)])
def test_int8_is_one_of_the_two_neighbours(moment: int, power: int, highest: int, lowest: int) -> None:
    exact = some_moments()[moment]
    found = decoded("int8", encoded("int8", *some_moments()))[moment]
    levels, wanted = (int8_levels(values, exact, power, highest) for values in (found, exact))
    assert bool(((levels - levels.round()).abs() < 1e-3).all())
    assert bool((levels >= lowest - 1e-3).all())
    assert bool(((levels - wanted).abs() < 1.001)[wanted >= lowest].all())
    assert bool((levels[wanted < lowest] < lowest + 1e-3).all())
    assert bool((found * exact >= 0).all())


def test_no_second_moment_becomes_zero_under_a_first_one() -> None:
    """The step would be the first moment over eps."""
    exp_avg = torch.full((NUMEL,), 1e-9)
    exp_avg[::SCALE_BLOCK_NUMEL] = 1.0
    for step in range(1, 50):
        found, found_sq = decoded("int8", encoded("int8", exp_avg, exp_avg.square(), step))
        assert bool((found_sq > 0).all())
        assert bool((found[found != 0].abs() / found_sq[found != 0].sqrt() < 20).all())


def test_the_largest_of_a_block_is_kept() -> None:
    exp_avg, exp_avg_sq = some_moments()
    found = decoded("int8", encoded("int8", exp_avg, exp_avg_sq))
    for exact, moment in zip((exp_avg, exp_avg_sq), found, strict=True):
        largest = exact.abs().view(-1, SCALE_BLOCK_NUMEL).amax(1)
        assert torch.allclose(moment.abs().view(-1, SCALE_BLOCK_NUMEL).amax(1), largest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [1.0, -3.14159, 1e-30, 7e20])
def test_bfloat16_is_right_on_average_to_the_last_bit(value: float) -> None:
    """A whole period of the noise has each of its values once."""
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
    """To four and a half standard deviations of the mean, where one step's is at most half of what lies between two
    codes. What is below the second moment's smallest code becomes that."""
    moments, num_steps = some_moments(numel=1024), 3000
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


def train_on(dtype: MomentDtype, num_steps: int, gradient: Tensor, records: Records, numel: int = NUMEL) -> Tensor:
    """`num_steps` of AdamW with the same gradient. Returns the weights' sum of changes."""
    form = master_format(torch.float32, dtype)
    everything = {"param": torch.zeros(numel), **records}
    workspace = torch.empty(1 << 17, dtype=torch.uint8)
    for step in range(1, num_steps + 1):
        segments = [Segment(0, numel, GROUP, step)]
        adamw_in_tiles_(everything, gradient, segments, form, position=0, workspace=workspace)
    return everything["param"]


def test_a_second_moment_decays_as_it_should(dtype: MomentDtype) -> None:
    """By a thousandth a step, far less than half of what lies between two numbers of the type: rounded to the nearest,
    it would stay for ever."""
    num_steps = 2000
    exp_avg, exp_avg_sq = torch.zeros(NUMEL), torch.ones(NUMEL)
    gradient = torch.zeros(NUMEL)
    large = slice(None, None, SCALE_BLOCK_NUMEL)
    exp_avg_sq[large], gradient[large] = 100.0, 10.0  # keeps the scale where it is
    records = encoded(dtype, exp_avg, exp_avg_sq)
    train_on(dtype, num_steps, gradient, records)
    _, found = decoded(dtype, records)
    decayed = found.view(-1, SCALE_BLOCK_NUMEL)[:, 1:]
    expected = GROUP.beta2**num_steps
    assert float(decayed.mean()) == pytest.approx(expected, rel=0.02)
    assert float(decayed.std()) < 0.5 * expected
    assert torch.allclose(found[large], torch.tensor(100.0), rtol=0.03)


def test_training_goes_where_float32_goes(dtype: MomentDtype) -> None:
    """With random gradients around a mean, the weights' path is that of exact moments, to a few percent."""
    num_steps = 300
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(NUMEL, generator=generator) * torch.exp(torch.randn(NUMEL, generator=generator))
    form = master_format(torch.float32, dtype)
    stored = {"param": torch.zeros(NUMEL), **new_records(dtype)}
    exact, exp_avg, exp_avg_sq = torch.zeros(3, NUMEL)
    workspace = torch.empty(1 << 17, dtype=torch.uint8)
    for step in range(1, num_steps + 1):
        gradient = mean + mean.abs() * torch.randn(NUMEL, generator=generator)
        segments = [Segment(0, NUMEL, GROUP, step)]
        adamw_in_tiles_(stored, gradient, segments, form, position=0, workspace=workspace)
        adamw_(exact, gradient, exp_avg, exp_avg_sq, segments)
    relative = float((stored["param"] - exact).norm() / exact.norm())
    assert relative < {"bfloat16": 0.02, "int8": 0.08}[dtype], relative


BITS = [0x7FFFFFFF, -1, 0x7F800001, -0x7FFFFF, 0x7FC00000, -0x400000, 0x7F80FFFF]


@pytest.mark.parametrize("bits", BITS, ids=hex)
def test_a_nan_stays_one(dtype: MomentDtype, bits: int) -> None:
    """Also a GPU's, which is all ones."""
    exp_avg, exp_avg_sq = some_moments()
    for moment in (exp_avg, exp_avg_sq):
        moment.view(torch.int32)[7::SCALE_BLOCK_NUMEL] = bits
    for step in range(1, 20):
        for moment in decoded(dtype, encoded(dtype, exp_avg, exp_avg_sq, step)):
            assert bool(moment[7::SCALE_BLOCK_NUMEL].isnan().all())


def test_numbers_at_the_ends_of_the_range(dtype: MomentDtype) -> None:
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


def test_bfloat16_makes_no_infinity_and_keeps_none() -> None:
    infinite = torch.full((NUMEL,), torch.inf)
    found, found_sq = decoded("bfloat16", encoded("bfloat16", -infinite, infinite))
    assert torch.equal(found_sq, torch.full((NUMEL,), torch.finfo(torch.bfloat16).max))
    assert torch.equal(found, -found_sq)


def test_what_is_exact_stays_exact(dtype: MomentDtype) -> None:
    """What has been stored is stored again as it is, whatever the noise: for int8 but for the scale's last bit."""
    for step in range(2, 40):
        before = encoded(dtype, *some_moments(seed=step), step=1)
        again = encoded(dtype, *decoded(dtype, before), step=step, position=64 * step)
        if dtype == "bfloat16":
            assert bytes_of(again) == bytes_of(before)
        else:
            assert torch.allclose(again["moment_scales"], before["moment_scales"], rtol=3e-7, atol=0)
            differing = sum(int((again[kind] != before[kind]).sum()) for kind in ("exp_avg", "exp_avg_sq"))
            assert differing <= 2


@st.composite
def updates(draw: st.DrawFn) -> tuple[int, list[Segment]]:
    """Segments of a chunk, which begin at scale blocks; between them, and at last, there may be gaps."""
    num_blocks = draw(st.integers(1, 40))
    segments: list[Segment] = []
    edge = 0
    while edge < num_blocks and draw(st.booleans() if segments else st.just(True)):
        start = draw(st.integers(edge, num_blocks - 1))
        stop = draw(st.integers(start * SCALE_BLOCK_NUMEL + 1, num_blocks * SCALE_BLOCK_NUMEL))
        segments.append(Segment(start * SCALE_BLOCK_NUMEL, stop, GROUP, draw(st.integers(1, 100))))
        edge = -(-stop // SCALE_BLOCK_NUMEL)
    return num_blocks * SCALE_BLOCK_NUMEL, segments


def chunk(dtype: MomentDtype, working_dtype: torch.dtype, numel: int) -> tuple[Any, Records, Tensor]:
    form = master_format(working_dtype, dtype)
    generator = torch.Generator().manual_seed(numel)
    records = {"param": torch.randn(numel, generator=generator).to(working_dtype)}
    if form.has_residual:
        records["master_residual"] = torch.randint(
            -(1 << 15), 1 << 15, (numel,), generator=generator, dtype=torch.int16
        )
    return form, records | encoded(dtype, *some_moments(numel, numel)), torch.randn(numel, generator=generator)


@settings(max_examples=60, deadline=None)
@given(updates(), st.sampled_from(DTYPES), st.sampled_from([torch.float32, torch.bfloat16]), st.data())
def test_cuts_and_workspaces_change_no_bit_and_gaps_keep_theirs(
    update: tuple[int, list[Segment]], dtype: MomentDtype, working_dtype: torch.dtype, data: st.DataObject
) -> None:
    numel, segments = update
    position = SCALE_BLOCK_NUMEL * data.draw(st.integers(0, 1 << 20))
    form, whole, gradient = chunk(dtype, working_dtype, numel)
    _, parts, _ = chunk(dtype, working_dtype, numel)
    before = {kind: record.clone() for kind, record in whole.items()}
    large = torch.empty(1 << 20, dtype=torch.uint8)
    adamw_in_tiles_(whole, gradient, segments, form, position=position, workspace=large)
    cut = SCALE_BLOCK_NUMEL * data.draw(st.integers(0, numel // SCALE_BLOCK_NUMEL))
    small = torch.empty(data.draw(st.integers(896, 8192)) // 4 * 4, dtype=torch.uint8)
    for start, stop in ((0, cut), (cut, numel)):
        of_part = {kind: record[slice(*form.elements(kind, start, stop))] for kind, record in parts.items()}
        clipped = [
            Segment(max(s.start, start) - start, min(s.stop, stop) - start, s.group, s.step)
            for s in segments
            if s.start < stop and s.stop > start
        ]
        adamw_in_tiles_(of_part, gradient[start:stop], clipped, form, position=position + start, workspace=small)
    assert bytes_of(parts) == bytes_of(whole)
    touched = torch.zeros(numel, dtype=torch.bool)
    for segment in segments:
        touched[segment.start : segment.stop] = True
    blocks = touched.view(-1, SCALE_BLOCK_NUMEL).any(1)
    for kind, record in whole.items():
        is_touched = touched if form.params_per_element(kind) == 1 else blocks.repeat_interleave(2)
        assert torch.equal(record[~is_touched], before[kind][~is_touched]), kind


def test_a_workspace_that_is_too_small_is_said_so() -> None:
    form, records, gradient = chunk("int8", torch.float32, 64)
    with pytest.raises(AssertionError, match="a workspace of 800 bytes is less than 896"):
        adamw_in_tiles_(records, gradient, [], form, position=0, workspace=torch.empty(800, dtype=torch.uint8))
