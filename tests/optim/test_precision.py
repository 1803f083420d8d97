"""The split master is exact for every float32, and its bfloat16 half is what torch rounds it to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_lohan.optim import join_master_, master_format, split_master_, widen_in_place
from hf_lohan.optim.precision import NO_TIES, TIE_CODES, TIE_RUN_NUMEL

LOW_HALVES = torch.arange(1 << 16, dtype=torch.int64)
SOME_LOW_HALVES = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
# denormals, the smallest normal numbers, numbers around one, the largest numbers
EXPONENTS = (0, 1, 2, 96, 126, 127, 128, 200, 253, 254)
MANTISSA_TOPS = (0, 1, 0x3F, 0x40, 0x7E, 0x7F)
often = settings(max_examples=200)


def from_bits(bits: Tensor) -> Tensor:
    """float32 [numel] from unsigned bit patterns in int64."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def split(master: Tensor) -> dict[str, Tensor]:
    num_runs = -(-master.numel() // TIE_RUN_NUMEL)
    records = {
        "param": torch.empty(master.numel(), dtype=torch.bfloat16),
        "master_residual": torch.empty(master.numel(), dtype=torch.int16),
        TIE_CODES: torch.zeros(num_runs, dtype=torch.int16),
    }
    split_master_(master, records)
    return records


def assert_round_trip(master: Tensor) -> None:
    bits = master.view(torch.int32).clone()
    records = split(master)
    assert torch.equal(master.view(torch.int32), bits), "encoding changed the master"
    joined = torch.full_like(master, 7.0)
    join_master_(joined, records)
    is_nan = master.isnan()
    assert torch.equal(joined.view(torch.int32)[~is_nan], bits[~is_nan])
    assert joined[is_nan].isnan().all()


def assert_nearest(master: Tensor) -> None:
    """The weight is what torch's conversion gives."""
    expected, found = master.bfloat16(), split(master)["param"]
    is_number = ~master.isnan()
    assert torch.equal(found.view(torch.int16)[is_number], expected.view(torch.int16)[is_number])


@pytest.mark.parametrize("low_half", SOME_LOW_HALVES.tolist())
def test_every_upper_half_round_trips(low_half: int) -> None:
    assert_round_trip(from_bits((LOW_HALVES << 16) + low_half))  # all signs, exponents, infinities and NaNs


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_every_lower_half_round_trips_and_rounds_to_nearest(exponent: int) -> None:
    for sign in (0, 1):
        for top in MANTISSA_TOPS:
            master = from_bits((sign << 31) + (exponent << 23) + (top << 16) + LOW_HALVES)
            assert_round_trip(master)
            assert_nearest(master)


@often
@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=64))
def test_any_bit_pattern_round_trips(patterns: list[int]) -> None:
    assert_round_trip(from_bits(torch.tensor(patterns)))


@often
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=64))
def test_any_number_rounds_to_nearest(values: list[float]) -> None:
    assert_nearest(torch.tensor(values, dtype=torch.float32))


def test_bfloat16_values_have_no_residual() -> None:
    exact = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    records, is_number = split(exact.float()), ~exact.isnan()
    assert torch.equal(records["param"].view(torch.int16)[is_number], exact.view(torch.int16)[is_number])
    assert not records["master_residual"][is_number].any()
    assert (records[TIE_CODES] == NO_TIES).all()


def test_ties_of_every_weight_round_trip() -> None:
    """Each weight has a master half a step below or above it, or both, which share one residual."""
    master = from_bits((torch.arange(1 << 16, dtype=torch.int64).repeat_interleave(2) << 16) + 0x8000)
    assert_round_trip(master)
    assert_nearest(master)


def test_values_of_float16_round_trip() -> None:
    """Every 16th value of float16 is a tie that is rounded towards zero."""
    master = torch.randn(5 * TIE_RUN_NUMEL + 77, generator=torch.Generator().manual_seed(0)).half().float()
    assert_round_trip(master)
    assert_nearest(master)
    assert (split(master)[TIE_CODES] != NO_TIES).all()


def test_a_run_that_uses_many_residuals_has_a_code_left() -> None:
    """The residuals that are tried first as codes are in use, and so are as many others as fit a run."""
    ties = torch.tensor([0x8000, 0x18000])  # one above and one below an even weight
    lows = torch.arange(0x7FFF, 0x7FFF - TIE_RUN_NUMEL + len(ties), -1)
    master = from_bits((127 << 23) + torch.cat([lows, ties]))
    assert_round_trip(master)
    code = int(split(master)[TIE_CODES])
    assert code not in lows.tolist() and code != NO_TIES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 2, 31, 1023, 1024, 1025, 2048, 4097, 100_003])
def test_widening_in_place_keeps_every_value(numel: int, dtype: torch.dtype) -> None:
    narrow = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    buffer = torch.full((4 * numel + 12,), 0xAB, dtype=torch.uint8)  # pool buffers are longer than most chunks
    buffer[2 * numel : 4 * numel].view(dtype).copy_(narrow)
    wide = widen_in_place(buffer, dtype, numel)
    assert wide.dtype == torch.float32
    assert wide.data_ptr() == buffer.data_ptr()
    assert torch.equal(wide, narrow.float())
    assert bool((buffer[4 * numel :] == 0xAB).all())


def test_formats_name_the_records_of_a_master() -> None:
    full, split_master = master_format(torch.float32), master_format(torch.bfloat16)
    assert full.state_kinds == ("exp_avg", "exp_avg_sq")
    assert split_master.state_kinds == ("master_residual", "exp_avg", "exp_avg_sq")
    stored_bytes = {
        master.working_dtype: sum(master.state_dtype(kind).itemsize for kind in ("param", *master.state_kinds))
        for master in (full, split_master)
    }
    assert stored_bytes == {torch.float32: 12, torch.bfloat16: 12}


def test_float16_has_no_exact_master() -> None:
    with pytest.raises(ValueError, match=r"torch\.float16.*bf16=True"):
        master_format(torch.float16)
