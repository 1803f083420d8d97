"""The picture of a typical step."""

from __future__ import annotations

from hf_lohan.report.findings import merged, overlap_s, picture_of
from hf_lohan.report.run_data import TracedTask


def step(number: int, began_s: float, ended_s: float) -> TracedTask:
    return TracedTask("step", str(number), began_s, ended_s)


def test_the_median_step_of_the_later_half_is_chosen() -> None:
    steps = [step(1, 0, 9), step(2, 9, 10), step(3, 10, 12), step(4, 12, 17), step(5, 17, 20)]
    picture = picture_of(steps)
    assert (picture.step, picture.step_s) == (5, 3)
    assert picture_of([]) is None
    assert picture_of([TracedTask("compute", "forward", 0, 1)]) is None


def test_tasks_are_cut_to_the_step_and_merged() -> None:
    tasks = [
        step(1, 10, 20),
        TracedTask("compute", "forward", 8, 12),
        TracedTask("compute", "backward", 14, 18),
        TracedTask("ssd read", "param", 11, 13),
        TracedTask("ssd read", "param", 12, 13.5),
        TracedTask("ssd read", "param", 13.502, 14),
        TracedTask("ssd write", "param", 19, 25),
        TracedTask("ssd write", "param", 25, 26),
    ]
    picture = picture_of(tasks)
    assert picture.spans == {
        ("compute", "backward"): [(4, 8)],
        ("compute", "forward"): [(0, 2)],
        ("ssd read", "param"): [(1, 4)],
        ("ssd write", "param"): [(9, 10)],
    }
    assert picture.ssd_hidden_share is not None
    assert abs(picture.ssd_hidden_share - 1 / 3.998) < 1e-9, "only the first second of reading overlaps the forward"


def test_union_and_overlap() -> None:
    assert merged([(3, 4), (0, 2), (1, 2.5)]) == [(0, 2.5), (3, 4)]
    assert merged([(0, 1), (1.1, 2)], gap_s=0.2) == [(0, 2)]
    assert overlap_s([(0, 2), (3, 5), (8, 9)], [(1, 4), (4.5, 8.25)]) == 1 + 1 + 0.5 + 0.25
    assert overlap_s([], [(0, 1)]) == 0
