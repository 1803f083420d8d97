from __future__ import annotations

import json
import threading

from hf_lohan.timeline import COMPUTE, LANES, SSD_READ, SSD_WRITE, Timeline, trace_events


def test_tasks_are_counted_by_lane_and_name() -> None:
    timeline = Timeline()
    with timeline.task(SSD_READ, "param", block="0", num_bytes=3):
        pass
    with timeline.task(SSD_READ, "exp_avg", num_bytes=4):
        pass
    timeline.add_task(COMPUTE, "forward", 1.0, 3.0)
    totals = timeline.totals()
    assert (totals[SSD_READ].num_bytes, totals[SSD_READ].num_tasks) == (7, 2)
    assert set(totals[SSD_READ].task_s) == {"param", "exp_avg"}
    assert totals[COMPUTE].busy_s == 2.0 and totals[COMPUTE].task_s == {"forward": 2.0}
    assert totals[SSD_WRITE].num_tasks == 0
    assert timeline.tasks == []


def test_simultaneous_tasks_count_once_as_busy() -> None:
    timeline = Timeline()
    both_run = threading.Barrier(2)

    def run() -> None:
        with timeline.task(SSD_READ, "param"):
            both_run.wait()
            both_run.wait()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lane = timeline.totals()[SSD_READ]
    assert 0 < lane.busy_s < lane.task_s["param"]


def test_running_tasks_count_as_busy() -> None:
    timeline = Timeline()
    with timeline.task(SSD_READ, "param"):
        first = timeline.totals()[SSD_READ].busy_s
        assert 0 < first < timeline.totals()[SSD_READ].busy_s


def test_a_failed_task_is_counted() -> None:
    timeline = Timeline(is_tracing=True)
    try:
        with timeline.task(SSD_READ, "param"):
            raise OSError
    except OSError:
        pass
    assert timeline.totals()[SSD_READ].num_tasks == len(timeline.tasks) == 1


def test_overlapping_tasks_get_further_rows() -> None:
    timeline = Timeline(is_tracing=True)
    began_s = timeline.began_s
    timeline.add_task(SSD_READ, "param", began_s + 1, began_s + 3, block="0", num_bytes=8)
    timeline.add_task(SSD_READ, "exp_avg", began_s + 2, began_s + 4)
    timeline.add_task(SSD_READ, "exp_avg", began_s + 3, began_s + 5)
    timeline.add_task(COMPUTE, "forward", began_s + 1, began_s + 2)
    events = json.loads(json.dumps(list(trace_events(timeline.tasks, began_s=began_s))))
    drawn = [event for event in events if event["ph"] == "X"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [(names[e["tid"]], e["name"], round(e["ts"]), round(e["dur"])) for e in drawn] == [
        ("compute", "forward", 1_000_000, 1_000_000),
        ("ssd read", "param 0", 1_000_000, 2_000_000),
        ("ssd read (2)", "exp_avg", 2_000_000, 2_000_000),
        ("ssd read", "exp_avg", 3_000_000, 2_000_000),
    ]
    assert drawn[1]["args"]["bytes"] == 8 and drawn[1]["cat"] in LANES


def test_simultaneous_reads_and_writes_count_once() -> None:
    timeline = Timeline()
    with timeline.task(SSD_READ, "param"), timeline.task(SSD_WRITE, "param"):
        sum(range(1_000_000))
    totals = timeline.totals()
    reads_s, writes_s = totals[SSD_READ].busy_s, totals[SSD_WRITE].busy_s
    assert writes_s <= timeline.drives_busy_s < reads_s + writes_s
    before_s = timeline.drives_busy_s
    timeline.add_task(COMPUTE, "forward", 1.0, 3.0)
    assert timeline.drives_busy_s == before_s
