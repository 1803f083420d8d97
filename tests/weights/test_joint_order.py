"""Ranks find out which loads they have in common."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hf_lohan.ranks import Links
from hf_lohan.testing.thread_ranks import run_ranks
from hf_lohan.weights.joint_order import UNKNOWN_PLACE, JointOrder, Standing
from hf_lohan.weights.load_order import first_of_period

ORDERED = 3
"""Number of loads that rank 0 has ordered in period 2."""


def on_rank_0(check: Callable[[JointOrder, Links], None]) -> None:
    def run(links: Links) -> None:
        if links.ranks.rank == 0:
            check(JointOrder(links, lambda first, are_equal: None, lambda: None), links)

    run_ranks(2, run)


def standing(**changes: object) -> Standing:
    first = first_of_period(2)
    known: dict[str, object] = {"next_number": first + ORDERED, "has": lambda number: first <= number < first + ORDERED}
    return Standing(**{**known, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "num_ended", "changes", "is_missing"),
    [
        (first_of_period(2) + 1, 0, {"is_idle": True, "num_ended": 1}, False),  # ordered here too
        (first_of_period(2) + 3, 0, {"is_idle": True, "num_ended": 1}, True),  # of a pass that has ended here
        (first_of_period(2) + 3, 1, {"is_idle": True, "num_ended": 1}, False),  # may follow here
        (first_of_period(2) + 3, 0, {"is_idle": False, "num_ended": 1}, False),  # earlier loads still run
        (first_of_period(1) + 9, 0, {"is_idle": False}, True),  # of a step that has ended here
        (first_of_period(3), 0, {"is_idle": True, "num_ended": 1}, False),  # of a step that has not ended here
    ],
)
def test_a_load_is_missing_if_this_rank_will_not_order_it(
    number: int, num_ended: int, changes: dict[str, object], is_missing: bool
) -> None:
    def check(order: JointOrder, links: Links) -> None:
        order.note_wanted(1, number, 0, UNKNOWN_PLACE, num_ended)
        assert (order.find_missing(standing(**changes)) == number) == is_missing

    on_rank_0(check)


@pytest.mark.parametrize(("block", "place", "is_common"), [(4, 4096, True), (5, 4096, False), (4, 0, False)])
@pytest.mark.parametrize("hears_first", [False, True])
def test_another_block_or_place_of_the_same_load_is_a_cut(
    hears_first: bool, block: int, place: int, is_common: bool
) -> None:
    def check(order: JointOrder, links: Links) -> None:
        with links.lock:
            order.begin(6, 1, 0)
        if hears_first:
            order.note_wanted(1, 7, block, place, 0)
        with links.lock:
            order.begin(7, 4, 4096)
        if not hears_first:
            order.note_wanted(1, 7, block, place, 0)
        assert [order.is_common(number) for number in (6, 7, 8)] == [True, is_common, is_common]
        assert order.is_common(first_of_period(1)), "the next step begins together"

    on_rank_0(check)
