"""AdamW on encoded moments trains like float32 with any tiles, and writes only elements that a step changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_moments import DTYPES, GROUP, NUMEL, Records, bytes_of, decoded, encoded, new_records, typical_moments
from torch import Tensor

from hf_lohan.optim import STOCHASTIC, AdamWGroup, MomentDtype, Segment, master_format
from hf_lohan.optim.adamw import adamw_
from hf_lohan.optim.moments import SCALE_BLOCK_NUMEL
from hf_lohan.optim.precision import NO_TIES, TIE_CODES, TIE_RUN_NUMEL
from hf_lohan.optim.update import adamw_in_tiles_


def train_on(dtype: MomentDtype, num_steps: int, gradient: Tensor, records: Records, numel: int = NUMEL) -> Tensor:
    """Take `num_steps` steps of AdamW with the same gradient and return the total change of the weights."""
    form = master_format(torch.float32, dtype)
    everything = {"param": torch.zeros(numel), **records}
    workspace = torch.empty(1 << 17, dtype=torch.uint8)
    for step in range(1, num_steps + 1):
        segments = [Segment(0, numel, GROUP, step)]
        adamw_in_tiles_(everything, gradient, segments, form, position=0, workspace=workspace)
    return everything["param"]


def test_a_second_moment_decays_exactly_on_average(dtype: MomentDtype) -> None:
    """It decays by a thousandth per step, far less than half the distance of two numbers of the type. With rounding to
    nearest, it would never decay."""
    num_steps = 2000
    exp_avg, exp_avg_sq = torch.zeros(NUMEL), torch.ones(NUMEL)
    gradient = torch.zeros(NUMEL)
    large = slice(None, None, SCALE_BLOCK_NUMEL)
    exp_avg_sq[large], gradient[large] = 100.0, 10.0  # keeps the scale constant
    records = encoded(dtype, exp_avg, exp_avg_sq)
    train_on(dtype, num_steps, gradient, records)
    _, found = decoded(dtype, records)
    decayed = found.view(-1, SCALE_BLOCK_NUMEL)[:, 1:]
    expected = GROUP.beta2**num_steps
    assert float(decayed.mean()) == pytest.approx(expected, rel=0.02)
    assert float(decayed.std()) < 0.5 * expected
    assert torch.allclose(found[large], torch.tensor(100.0), rtol=0.03)


def test_training_follows_float32(dtype: MomentDtype) -> None:
    """With random gradients around a mean, the weights follow those of exact moments within a few percent."""
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


@st.composite
def updates(draw: st.DrawFn) -> tuple[int, list[Segment]]:
    """Segments of a chunk that begin at scale blocks, with gaps between them and at the end."""
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
            NO_TIES + 1, 1 << 15, (numel,), generator=generator, dtype=torch.int16
        )
        records[TIE_CODES] = torch.full((-(-numel // TIE_RUN_NUMEL),), NO_TIES, dtype=torch.int16)
    return form, records | encoded(dtype, *typical_moments(numel, numel)), torch.randn(numel, generator=generator)


@settings(max_examples=60)
@given(updates(), st.sampled_from((*DTYPES, STOCHASTIC)), st.sampled_from([torch.float32, torch.bfloat16]), st.data())
def test_cuts_and_workspaces_change_no_bit_and_gaps_do_not_change(
    update: tuple[int, list[Segment]], dtype: MomentDtype, working_dtype: torch.dtype, data: st.DataObject
) -> None:
    numel, segments = update
    position = SCALE_BLOCK_NUMEL * data.draw(st.integers(0, 1 << 20))
    form, whole, gradient = chunk(dtype, working_dtype, numel)
    _, parts, _ = chunk(dtype, working_dtype, numel)
    before = {kind: record.clone() for kind, record in whole.items()}
    large = torch.empty(1 << 20, dtype=torch.uint8)
    adamw_in_tiles_(whole, gradient, segments, form, position=position, workspace=large)
    unit = TIE_RUN_NUMEL if form.has_residual else SCALE_BLOCK_NUMEL
    cut = unit * data.draw(st.integers(0, numel // unit))
    small = torch.empty(data.draw(st.integers(1024, 8192)) // 4 * 4, dtype=torch.uint8)
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
        if kind == TIE_CODES:
            continue
        is_touched = touched if form.params_per_element(kind) == 1 else blocks.repeat_interleave(2)
        assert torch.equal(record[~is_touched], before[kind][~is_touched]), kind


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_in_bfloat16_is_widened_and_scaled_in_float32(dtype: MomentDtype, scale: float) -> None:
    segments = [Segment(0, 100, AdamWGroup(1e-2, 0.9, 0.999, 1e-8, 0.1), 3)]
    form, narrow, gradient = chunk(dtype, torch.bfloat16, 128)
    _, wide, _ = chunk(dtype, torch.bfloat16, 128)
    gradient = gradient.bfloat16()
    before = gradient.clone()
    workspace = torch.empty(1024, dtype=torch.uint8)
    adamw_in_tiles_(narrow, gradient, segments, form, position=0, scale=scale, workspace=workspace)
    adamw_in_tiles_(wide, gradient.float() * scale, segments, form, position=0, workspace=workspace)
    assert bytes_of(narrow) == bytes_of(wide)
    assert torch.equal(gradient, before)


def test_a_workspace_that_is_too_small_is_refused() -> None:
    form, records, gradient = chunk("int8", torch.float32, 64)
    with pytest.raises(AssertionError, match="a workspace of 1000 bytes is less than 1024"):
        adamw_in_tiles_(records, gradient, [], form, position=0, workspace=torch.empty(1000, dtype=torch.uint8))


def test_weights_without_masters_are_rounded_right_on_average() -> None:
    """The new weight is one of the two neighbours of AdamW's, and the mean error of ten million elements is zero."""
    numel, group = 10_000_000 // 32 * 32, AdamWGroup(1e-4, 0.9, 0.999, 1e-8, 0.1)
    form = master_format(torch.bfloat16, STOCHASTIC)
    assert form.state_bytes_per_param + 2 == 4.25
    weights = torch.randn(numel).mul_(0.03).bfloat16()
    exact, gradient = weights.float(), torch.randn(numel)
    records = {"param": weights.clone()} | {
        kind: torch.zeros(form.numel(kind, numel), dtype=form.state_dtype(kind)) for kind in form.state_kinds
    }
    segments = [Segment(0, numel, group, 1, parameter="model.embed_tokens.weight")]
    adamw_in_tiles_(records, gradient, segments, form, position=0, workspace=torch.empty(1 << 21, dtype=torch.uint8))
    adamw_(exact, gradient, torch.zeros(numel), torch.zeros(numel), segments)
    ulp = ((exact.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32) - (
        exact.view(torch.int32) & -0x10000
    ).view(torch.float32)
    error = ((records["param"].float() - exact) / ulp).double()
    assert float(error.abs().max()) < 1 and float(error.abs().mean()) > 0.1
    assert abs(float(error.mean())) < 5 * float(error.std()) / numel**0.5
