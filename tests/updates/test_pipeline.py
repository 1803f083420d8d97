"""The pipeline turns gradients into updates in the order of its schedule, sums gradients and releases all buffers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipeline_bench import GROUP, NUM_CHUNKS, Bench
from torch import Tensor

from hf_lohan.config import Schedule
from hf_lohan.device import PoolAborted
from hf_lohan.files import IoRequest
from hf_lohan.model import ParamSlice
from hf_lohan.store import Checksums
from hf_lohan.updates import RankGradientPipeline, UpdateSetup
from hf_lohan.updates.gradients import ChunkGradient


@pytest.mark.parametrize("lends", [False, True])
def test_optimized_reads_the_next_chunk_before_it_writes_the_last(
    lends: bool, make_bench: Callable[..., Bench]
) -> None:
    """Updates in backward borrow no buffers of gradients."""
    bench = make_bench("optimized", hold_gradients=False, lends_gradient_buffers=lends)
    bench.submit_all()
    bench.finish_step()
    assert bench.store.order == ["r3", "r2", "w3", "r1", "w2", "r0", "w1", "w0"]


def test_naive_takes_one_chunk_after_another(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench("naive", hold_gradients=False)
    bench.submit_all()
    bench.finish_step()
    assert bench.store.order == ["r3", "w3", "r2", "w2", "r1", "w1", "r0", "w0"]


@pytest.mark.parametrize("schedule", ["optimized", "naive", "serial"])
def test_held_gradients_are_applied_at_the_step_in_forward_order(
    schedule: Schedule, make_bench: Callable[..., Bench]
) -> None:
    bench = make_bench(schedule, hold_gradients=True)
    bench.submit_all()
    bench.pipeline.wait_for_norms()  # a barrier: all gradients were accepted
    assert bench.store.order == []
    bench.finish_step()
    reads = [event for event in bench.store.order if event.startswith("r")]
    assert reads == ["r0", "r1", "r2", "r3"]


def test_deferred_updates_delay_only_readers_of_their_block(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench("optimized", hold_gradients=True)
    bench.submit_all()
    bench.pipeline.wait_for_norms()
    bench.store.may_read.clear()
    bench.pipeline.finish_step(1.0, lambda part: GROUP)  # does not wait
    assert bench.store.order == []
    with ThreadPoolExecutor(1) as threads:
        reader = threads.submit(bench.read_weights)
        assert not reader.done()
        bench.store.may_read.set()
        read = reader.result(60)
    bench.pipeline.wait_for_updates()
    assert torch.equal(read, bench.store.records["param"])
    assert [event for event in bench.store.order if event.startswith("w")] == ["w0", "w1", "w2", "w3"]


def test_the_last_chunk_of_a_backward_uses_the_hyperparameters_of_its_step(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler may change them as soon as the step returns, before the chunk is updated."""
    bench = make_bench("optimized", hold_gradients=False)
    pipeline = bench.pipeline
    monkeypatch.setattr(pipeline._thread, "_idle", lambda: False)  # the thread does not finish the last chunk early
    gate = threading.Event()
    queue = pipeline._worker._queue
    end_step = queue.end_step

    def late_end_step(of_others: Collection[ParamSlice] = ()) -> None:
        assert gate.wait(60)
        end_step(of_others)

    monkeypatch.setattr(queue, "end_step", late_end_step)
    bench.submit_all()
    pipeline.wait_for_norms()
    pipeline.finish_step(1.0, lambda part: GROUP)
    bench.groups.append(replace(GROUP, lr=1.0))
    gate.set()
    pipeline.wait_for_updates()
    assert len(bench.store.records["param"].unique()) == 1


def test_dropped_gradients_release_their_buffers(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(hold_gradients=True)
    bench.submit_all()
    assert bench.pipeline.abandon_step() == (set(), False)
    assert bench.gradients.num_free == bench.gradients.num_buffers
    assert bench.finish_step() == set()
    assert bench.store.order == []


def test_a_failure_ends_waits_for_buffers_and_is_raised_by_the_step(make_bench: Callable[..., Bench]) -> None:
    cause = OSError(5, "the drive is gone")
    bench = make_bench(hold_gradients=False, fail=cause)
    with pytest.raises(PoolAborted, match="the drive is gone") as aborted:
        for _ in range(bench.gradients.num_buffers + 1):  # backward does not know of the failure
            bench.pipeline.submit(bench.arrived(0, 1.0), is_final=True)
    assert aborted.value.__cause__ is cause
    raised = []
    for _ in range(2):  # an object that several threads raise collects all their tracebacks
        with pytest.raises(OSError, match="the drive is gone") as error:
            bench.finish_step()
        raised.append(error.value)
    assert raised[0] is not raised[1] and {error.__cause__ for error in raised} == {cause}
    assert [error.errno for error in raised] == [5, 5]


def test_updates_after_backward_read_further_ahead_with_borrowed_buffers(make_bench: Callable[..., Bench]) -> None:
    borrowing, other = (
        make_bench("optimized", hold_gradients=True, lends_gradient_buffers=lends) for lends in (True, False)
    )
    for bench in (borrowing, other):
        bench.submit_all()
        bench.finish_step(0.5)
        assert (bench.gradients.num_free, bench.states.num_free) == (2 * NUM_CHUNKS, 3 * NUM_CHUNKS)
    assert other.store.order == ["r0", "r1", "w0", "r2", "w1", "r3", "w2", "w3"]
    # Gradients hold four of eight buffers. One more update can begin, and another after two have ended.
    assert borrowing.store.order == ["r0", "r1", "r2", "w0", "w1", "r3", "w2", "w3"]
    for kind, record in other.store.records.items():
        assert torch.equal(borrowing.store.records[kind], record)


def test_a_buffer_is_not_released_while_it_is_written(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each buffer of an update is released when its own write ends, successfully or not."""
    bench = make_bench("optimized", hold_gradients=True)
    writes: list[IoRequest] = []

    def write(block: str, kind: str, start: int, source: Tensor, *, checksums: Checksums | None = None) -> IoRequest:
        writes.append(IoRequest(source.nbytes, 1, lambda num_bytes: None))
        return writes[-1]

    monkeypatch.setattr(bench.store, "write", write)
    bench.pipeline.submit(bench.arrived(0, 1.0), is_final=True)
    bench.pipeline.wait_for_norms()
    bench.pipeline.finish_step(1.0, lambda part: GROUP)
    bench.pipeline.wait_for_norms()  # a barrier: the writes are issued
    assert bench.gradients.num_free == bench.gradients.num_buffers
    num_free = bench.states.num_free
    assert num_free == bench.states.num_buffers - 3
    cause = OSError("badly")
    for number, request in enumerate(writes):
        assert bench.states.num_free == num_free + number
        assert bench.pipeline.failure is None
        request.finish_piece(cause if number == 2 else None)
    assert bench.states.num_free == bench.states.num_buffers
    assert bench.pipeline.failure is cause


def test_an_error_at_the_end_of_a_write_fails_the_pipeline(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request only logs errors of its callbacks, so without this a reader would wait forever."""
    bench = make_bench("optimized", hold_gradients=True)

    def written(_new: object) -> None:
        raise RuntimeError("planned")

    monkeypatch.setattr(bench.pipeline._handover, "note_written", written)
    bench.submit_all()
    with pytest.raises(RuntimeError, match="planned"):
        bench.finish_step()
    with pytest.raises(RuntimeError, match="planned"):
        bench.read_weights()


def test_an_update_reads_after_the_writes_of_the_last_one(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads that do not wait would overtake writes."""
    bench = make_bench("optimized", hold_gradients=True)
    bench.store.write_requests = "when_waited_for"
    running: list[IoRequest] = []
    num_reads = 0
    read, write = bench.store.read, bench.store.write

    def noted_read(*args: Any) -> Any:
        nonlocal num_reads
        assert all(request.done() for request in running)
        num_reads += 1
        return read(*args)

    def noted_write(*args: Any, **options: Any) -> IoRequest:
        running.append(write(*args, **options))
        return running[-1]

    monkeypatch.setattr(bench.store, "read", noted_read)
    monkeypatch.setattr(bench.store, "write", noted_write)
    for _ in range(2):
        bench.pipeline.submit(bench.arrived(0, 1.0), is_final=True)
        bench.pipeline.wait_for_norms()
        bench.pipeline.finish_step(1.0, lambda part: GROUP)
    bench.pipeline.wait_for_updates()
    assert num_reads == 2 * 3


def test_sums_are_measured_on_all_threads(make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm's last bit depends on the number of threads. Holding a gradient needs only one."""
    num_threads = dict[str, set[int]](held=set(), summed=set())
    bench = make_bench("optimized", hold_gradients=True)
    held, norms = bench.pipeline._worker._held, bench.pipeline._norms
    monkeypatch.setattr(norms, "set_summed", lambda *args: num_threads["summed"].add(torch.get_num_threads()))
    hold = held.hold

    def holding(gradient: ChunkGradient, **asked: Any) -> None:
        num_threads["held"].add(torch.get_num_threads())
        hold(gradient, **asked)

    monkeypatch.setattr(held, "hold", holding)
    bench.submit_all(is_final=False)
    bench.pipeline.wait_for_norms()
    assert num_threads == {"held": {1}, "summed": set()}
    bench.submit_all()
    bench.pipeline.wait_for_norms()
    assert num_threads["summed"] == {torch.get_num_threads()}


def test_another_rank_may_have_failed_before_the_pipeline_is_made(make_bench: Callable[..., Bench]) -> None:
    def start(put: Any, on_failure: Callable[[BaseException], None], apply_unexpected: Any) -> None:
        on_failure(RuntimeError("rank 1 ended"))

    exchange: Any = SimpleNamespace(start=start, fail=lambda error: None, close=lambda: None, published=set())
    agreement: Any = None

    def make_pipeline(setup: UpdateSetup) -> RankGradientPipeline:
        return RankGradientPipeline(setup, exchange, agreement)

    bench = make_bench("optimized", hold_gradients=False, make_pipeline=make_pipeline)
    with pytest.raises((RuntimeError, PoolAborted), match="rank 1 ended"):
        bench.submit_all()
