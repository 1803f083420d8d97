"""Guesses are read and written in the right order, and no reader sees a guess."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pipeline_bench import GROUP, NUM_CHUNKS, Bench, LateCallbacks

MakeBench = Callable[..., Bench]
GUESSES = ["r3", "r2", "w3", "r1", "w2", "r0", "w1", "w0"]
REDONE = ["r0", "r1", "w0", "r2", "w1", "r3", "w2", "w3"]


def assert_all_buffers_back(bench: Bench) -> None:
    for buffers in (bench.gradients, bench.states):
        assert buffers.num_free == buffers.num_buffers, buffers.name


def test_a_right_guess_is_written_in_backward_and_not_again(make_bench: MakeBench) -> None:
    bench = make_bench(hold_gradients=True, speculates=True)
    bench.submit_all()
    assert bench.finish_step() == {bench.block}
    assert (bench.applied, bench.store.order, bench.pipeline.undone_s) == (["accepted"], GUESSES, 0.0)
    assert_all_buffers_back(bench)


def test_a_wrong_guess_is_dropped_after_its_last_write_and_redone(make_bench: MakeBench) -> None:
    bench = make_bench(hold_gradients=True, speculates=True)
    bench.submit_all()
    bench.finish_step(0.5)
    assert (bench.applied, bench.store.order) == (["redone"], [*GUESSES, "drop", *REDONE])
    assert bench.pipeline.undone_s > 0
    assert_all_buffers_back(bench)


def test_a_reader_never_sees_a_guess(make_bench: MakeBench) -> None:
    bench = make_bench(hold_gradients=True, speculates=True)
    bench.submit_all()
    bench.read_weights()
    assert bench.store.order == [*GUESSES, "drop"]
    assert not bench.store.records["param"].any()
    bench.finish_step()
    assert (bench.applied, bench.store.order) == (["deferred"], [*GUESSES, "drop", *REDONE])


@pytest.mark.parametrize("look", ["wait_for_updates", "run_when_written", "undo_guesses"])
def test_guesses_are_undone_before_the_store_is_read(look: str, make_bench: MakeBench) -> None:
    bench = make_bench(hold_gradients=True, speculates=True)
    bench.submit_all()
    seen: list[bool] = []
    if look == "run_when_written":
        bench.pipeline.run_when_written(lambda: seen.append(bool(bench.store.records["param"].any())))
        bench.pipeline.wait_for_updates()
    else:
        getattr(bench.pipeline, look)()
        seen.append(bool(bench.store.records["param"].any()))
    assert seen == [False]
    bench.finish_step()
    bench.pipeline.set_speculation(True)
    bench.submit_all()
    bench.finish_step()
    assert bench.applied == ["deferred", "accepted"]
    assert set(bench.step_counts.values()) == {2}


def test_dropped_guesses_are_undone(make_bench: MakeBench) -> None:
    bench = make_bench(hold_gradients=True, speculates=True)
    bench.submit_all()
    assert bench.pipeline.abandon_step() == ({bench.block}, False)
    assert bench.store.order == [*GUESSES, "drop"]
    assert set(bench.step_counts.values()) == {0}
    assert_all_buffers_back(bench)
    bench.submit_all()
    bench.finish_step()
    assert bench.applied == ["accepted"]


@pytest.mark.parametrize("hold_gradients", [True, False])
def test_nothing_is_guessed_or_undone_over_older_drafts(hold_gradients: bool, make_bench: MakeBench) -> None:
    """Undoing would drop these drafts as well."""
    bench = make_bench(hold_gradients=hold_gradients, speculates=True)
    bench.store.has_drafts = True
    bench.submit_all()
    assert bench.pipeline.abandon_step() == (set() if hold_gradients else {bench.block}, not hold_gradients)
    assert "drop" not in bench.store.order
    assert set(bench.step_counts.values()) == ({0} if hold_gradients else {1})


@pytest.mark.parametrize("end", ["redone", "dropped", "read"])
def test_drafts_are_dropped_only_after_all_writes(end: str, make_bench: MakeBench) -> None:
    bench = make_bench(hold_gradients=True, speculates=True)
    bench.store.write_requests = "when_waited_for"
    bench.submit_all()
    match end:
        case "redone":
            bench.finish_step(0.5)
        case "dropped":
            bench.pipeline.abandon_step()
        case "read":
            bench.read_weights()
    bench.pipeline.wait_for_updates()
    assert bench.store.order[: len(GUESSES) + 1] == [*GUESSES, "drop"]
    assert bench.store.num_running == 0


def test_a_late_callback_of_a_guess_does_not_end_the_second_update(make_bench: MakeBench) -> None:
    """The I/O thread may report the end of a guess's write while the step is being redone."""
    bench = make_bench(hold_gradients=True, speculates=True)
    bench.store.write_requests = "late_callbacks"
    bench.submit_all()
    bench.pipeline.wait_for_norms()
    bench.pipeline._thread.call(bench.pipeline._worker._queue.wait_for_writes)
    bench.store.may_read.clear()
    bench.store.write_requests = "at_once"
    bench.pipeline.finish_step(0.5, lambda part: GROUP)
    for request in bench.store.late:
        request.call_back()
    assert set(bench.pipeline._handover._new[bench.block]) == set(bench.chunks)
    with ThreadPoolExecutor(1) as threads:
        reader = threads.submit(bench.read_weights)
        bench.store.may_read.set()
        read = reader.result(60)
    bench.pipeline.wait_for_updates()
    assert torch.equal(read, bench.store.records["param"])
    assert bench.store.order == [*GUESSES, "drop", *REDONE]
    assert len(bench.store.late) == 3 * NUM_CHUNKS
    assert isinstance(bench.store.late[0], LateCallbacks)
