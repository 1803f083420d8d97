"""Parsing and formatting of byte sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_lohan.config import ConfigError, parse_bytes
from hf_lohan.wording import format_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24GiB", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("512 MiB", 512 * 2**20),
        (" 1.5gib ", 3 * 2**29),
        ("0.1 GB", 10**8),
        ("4096", 4096),
        ("7 B", 7),
        ("3KB", 3000),
        ("2TiB", 2 * 2**40),
        (0, 0),
        (12345, 12345),
    ],
)
def test_parse_bytes(text: object, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "bad", ["24G", "24GiBs", "", "GiB", "-1GiB", "1e9", "nan", -1, 1.5, True, None, ["1GiB"], "1 2 GiB", "٣GiB"]
)
def test_parse_bytes_refuses_and_quotes(bad: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(bad)
    assert repr(bad) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (24 * 2**30, "24 GiB"),
        (2**20 - 1, "1 MiB"),
        (-(5 * 2**20), "-5 MiB"),
        (3000 * 2**50, "3000 PiB"),
        (100 * 2**20, "100 MiB"),
    ],
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(min_value=0, max_value=2**60))
def test_a_formatted_size_parses_back_within_its_digits(num_bytes: int) -> None:
    assert abs(parse_bytes(format_bytes(num_bytes)) - num_bytes) <= 0.0051 * num_bytes + 1
