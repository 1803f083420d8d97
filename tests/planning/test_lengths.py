"""The longest row that fits is found with few plans, and an epoch of rows has the sum of its batches' times."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_lohan.costs import BudgetError
from hf_lohan.planning import LongestRow, longest_row, plan_epoch, read_lengths
from hf_lohan.planning.lengths import MOST_TOKENS

ROOM = 10**9


class Plans:
    """Plans steps whose memory has a constant part, and a part for each token."""

    def __init__(self, fixed: float, slope: float, square: float = 0.0, most: int | None = None) -> None:
        self.lengths: list[int] = []
        self.fixed, self.slope, self.square, self.most = fixed, slope, square, most

    def __call__(self, length: int) -> Any:
        self.lengths.append(length)
        if self.most is not None and length > self.most:
            raise ValueError("the model has fewer positions")
        return SimpleNamespace(
            plan=SimpleNamespace(least_device_bytes=self.need(length), fits=self.need(length) <= ROOM)
        )

    def need(self, length: int) -> int:
        return int(self.fixed + self.slope * length + self.square * length**2)

    def longest(self, begin: int = 2048, num_positions: int | None = None) -> LongestRow:
        return longest_row(self, begin=begin, num_positions=num_positions, room_bytes=ROOM)


@pytest.mark.parametrize("begin", [16, 2048, 500_000])
@pytest.mark.parametrize(
    ("plans", "most_plans"),
    [(Plans(4e8, 9000.0), 6), (Plans(4e8, 0.0, 2.0), 12), (Plans(9.9e8, 9000.0), 9), (Plans(1e8, 2000.0, 0.01), 9)],
)
def test_the_longest_row_is_within_a_hundredth(plans: Plans, most_plans: int, begin: int) -> None:
    plans.lengths.clear()
    found = plans.longest(begin)
    assert not found.is_longest_tried
    assert plans.need(found.num_tokens) <= ROOM < plans.need(int(1.02 * found.num_tokens) + 2)
    assert len(plans.lengths) <= most_plans


def test_drives_may_bound_the_longest_row() -> None:
    """The memory of the device then has room for more."""

    def plan(length: int) -> Any:
        return SimpleNamespace(plan=SimpleNamespace(least_device_bytes=1000 + length, fits=length <= 77_777))

    found = longest_row(plan, begin=2048, num_positions=None, room_bytes=ROOM)
    assert 77_777 / 1.02 < found.num_tokens <= 77_777


def test_no_row_is_longer_than_the_models_positions() -> None:
    assert Plans(0, 1.0, most=2048).longest(begin=256, num_positions=2048) == LongestRow(2048, is_longest_tried=False)
    assert Plans(0, 1.0).longest(num_positions=4096) == LongestRow(MOST_TOKENS, is_longest_tried=True)


def test_positions_that_the_config_does_not_name_end_the_search() -> None:
    for most in range(40, 56):
        assert Plans(0, 1.0, most=most).longest(begin=16) == LongestRow(most, is_longest_tried=False)


def test_no_row_may_fit() -> None:
    assert Plans(2e9, 1.0).longest() == LongestRow(0, is_longest_tried=False)

    def refuse(_length: int) -> Any:
        raise BudgetError("too small")

    assert longest_row(refuse, begin=8, num_positions=None, room_bytes=ROOM).num_tokens == 0


def test_lengths_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("12\n 7 \n2048\n")
    assert read_lengths(file) == [12, 7, 2048]
    for wrong in ("twelve", "", "-3", "0", "1.5", "١٢"):
        file.write_text(f"12\n{wrong}\n7\n", encoding="utf-8")
        with pytest.raises(ValueError, match=f"line 2 of .* is {wrong!r}; write a row's number of tokens"):
            read_lengths(file)
    file.write_text("")
    with pytest.raises(ValueError, match="has no lines"):
        read_lengths(file)


def steps_of(length: int) -> Any:
    """A step takes a second for each 100 tokens of its rows, and at least 2 seconds."""
    prediction = SimpleNamespace(step_s=max(2.0, length / 100), bottleneck="ssd", ssd_hides_from_tokens=3000.0)
    return SimpleNamespace(plan=SimpleNamespace(prediction=prediction))


def test_an_epoch_has_the_time_of_its_batches() -> None:
    lengths = [1000, 10, 900, 10, 500, 400, 100, 90, 100]
    options: dict[str, Any] = {"batch_size": 2, "packed_row_tokens": 1000}
    epoch = plan_epoch(steps_of, lengths, num_micro_batches=1, num_ranks=1, **options)
    assert [(one.num_tokens, one.num_batches) for one in epoch.classes] == [(1000, 2), (500, 1), (100, 2)]
    assert epoch.epoch_s == pytest.approx(10 + 9 + 5 + 2 + 2)
    assert (epoch.num_rows, epoch.num_tokens, epoch.num_steps) == (9, 3110, 5)
    assert epoch.num_padded_tokens == 2 * (1000 + 900 + 500 + 100) + 100
    assert (epoch.num_packed_rows, epoch.num_packed_steps, epoch.packed_epoch_s) == (4, 2, 20)
    assert epoch.ssd_hides_from_packed_rows == 3
    assert sum(one.epoch_s for one in epoch.classes) == pytest.approx(epoch.epoch_s)

    accumulated = plan_epoch(steps_of, lengths, num_micro_batches=2, num_ranks=1, **options)
    assert accumulated.num_steps == 3 and accumulated.epoch_s == pytest.approx(epoch.epoch_s / 2)
    of_ranks = plan_epoch(steps_of, lengths, num_micro_batches=1, num_ranks=2, **options)
    assert of_ranks.epoch_s == pytest.approx(10 + 5 + 2)  # each pair of batches takes as long as its longer one
    assert of_ranks.num_padded_tokens == epoch.num_padded_tokens
