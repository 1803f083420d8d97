"""Chunks without a gradient that a backward passes are updated with zeros, as in torch, without a gradient buffer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pipeline_bench import CHUNK_NUMEL, GROUP, NUM_CHUNKS, Bench
from torch import nn

from hf_lohan.config import Schedule

ALL = range(NUM_CHUNKS)


class Stock:
    """The same parameters with torch's AdamW."""

    def __init__(self) -> None:
        self.parameters = [nn.Parameter(torch.zeros(CHUNK_NUMEL)) for _ in ALL]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=GROUP.lr, weight_decay=GROUP.weight_decay, fused=True)

    def step(self, values: Iterable[float | None]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.grad = None if value is None else torch.full_like(parameter, value)
        self.optimizer.step()

    def assert_equal(self, bench: Bench) -> None:
        states = [self.optimizer.state[parameter] for parameter in self.parameters]
        assert torch.equal(bench.store.records["param"], torch.cat([p.detach() for p in self.parameters]))
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(bench.store.records[kind], torch.cat([state[kind] for state in states])), kind
        assert list(bench.step_counts.values()) == [int(state["step"]) for state in states]


def submit(bench: Bench, touched: Collection[int], value: float, *, is_final: bool = True) -> None:
    """Run a backward that passes all chunks and has gradients for the touched ones."""
    gate = bench.hold_up()
    for index in sorted(touched, reverse=True):
        bench.pipeline.submit(bench.arrived(index, value), is_final=is_final)
    bench.pipeline.note_passed(bench.chunks)
    gate.set()


def gradients(touched: Collection[int], value: float) -> list[float | None]:
    return [value if index in touched else 0.0 for index in ALL]


@pytest.mark.parametrize("hold_gradients", [True, False])
@pytest.mark.parametrize("schedule", ["optimized", "naive", "serial"])
def test_passed_chunks_without_a_gradient_are_updated_with_zeros(
    schedule: Schedule, hold_gradients: bool, make_bench: Callable[..., Bench]
) -> None:
    bench, stock = make_bench(schedule, hold_gradients=hold_gradients), Stock()
    for touched in (ALL, {0, 2}, {3}, {1}, {0, 1, 2}, ()):
        submit(bench, touched, 0.5 + len(touched))
        assert bench.finish_step() == {bench.block}
        stock.step(gradients(touched, 0.5 + len(touched)))
    stock.assert_equal(bench)
    for buffers in (bench.gradients, bench.states):
        assert buffers.num_free == buffers.num_buffers


def test_chunks_that_no_backward_passed_take_no_step(make_bench: Callable[..., Bench]) -> None:
    bench, stock = make_bench(hold_gradients=True), Stock()
    submit(bench, ALL, 1.0)
    bench.finish_step()
    stock.step(gradients(ALL, 1.0))
    bench.pipeline.submit(bench.arrived(1, 2.0), is_final=True)
    bench.pipeline.note_passed(bench.chunks[1:3])
    bench.finish_step()
    stock.step([None, 2.0, 0.0, None])
    stock.assert_equal(bench)


def test_a_later_backward_may_have_the_gradient(make_bench: Callable[..., Bench]) -> None:
    bench, stock = make_bench(hold_gradients=True), Stock()
    submit(bench, ALL, 1.0)
    bench.finish_step()
    stock.step(gradients(ALL, 1.0))
    submit(bench, {0, 1}, 0.25, is_final=False)
    submit(bench, {1, 2}, 0.5)
    bench.finish_step()
    stock.step([0.25, 0.75, 0.5, 0.0])
    stock.assert_equal(bench)


def test_a_gradient_of_zeros_needs_no_arrival_buffer(make_bench: Callable[..., Bench]) -> None:
    bench, stock = make_bench(hold_gradients=True), Stock()
    taken = [bench.gradients.acquire() for _ in range(bench.gradients.num_buffers - 1)]
    submit(bench, {2}, 1.0)
    bench.finish_step()
    stock.step(gradients({2}, 1.0))
    stock.assert_equal(bench)
    for buffer in taken:
        buffer.release()


@pytest.mark.parametrize(("clip_coefficient", "applied"), [(1.0, "accepted"), (0.5, "redone")])
def test_guesses_with_zero_gradients_equal_torch(
    clip_coefficient: float, applied: str, make_bench: Callable[..., Bench]
) -> None:
    bench, stock = make_bench(hold_gradients=True, speculates=True), Stock()
    for touched in (ALL, {0, 2}, {3}):
        submit(bench, touched, 1.0)
        bench.finish_step(clip_coefficient)
        stock.step(gradients(touched, clip_coefficient))
    assert bench.applied == [applied] * 3
    stock.assert_equal(bench)


@pytest.mark.parametrize("speculates", [True, False])
def test_an_abandoned_step_leaves_no_gradients_of_zeros(speculates: bool, make_bench: Callable[..., Bench]) -> None:
    bench, stock = make_bench(hold_gradients=True, speculates=speculates), Stock()
    submit(bench, ALL, 1.0)
    bench.finish_step()
    stock.step(gradients(ALL, 1.0))
    submit(bench, {0}, float("nan"))
    bench.pipeline.wait_for_norms()
    bench.pipeline.abandon_step()
    bench.pipeline.note_passed(bench.chunks)  # a backward that failed before its first gradient
    bench.pipeline.abandon_step()
    bench.pipeline.submit(bench.arrived(1, 2.0), is_final=True)
    bench.finish_step()
    stock.step([None, 2.0, None, None])
    stock.assert_equal(bench)


def test_readers_wait_for_an_update_with_zeros(make_bench: Callable[..., Bench]) -> None:
    bench, stock = make_bench("optimized", hold_gradients=True), Stock()
    submit(bench, ALL, 1.0)
    bench.finish_step()
    stock.step(gradients(ALL, 1.0))
    submit(bench, {0}, 1.0)
    bench.pipeline.wait_for_norms()
    bench.store.may_read.clear()
    bench.pipeline.finish_step(1.0, lambda part: GROUP)
    stock.step(gradients({0}, 1.0))
    with ThreadPoolExecutor(1) as threads:
        reader = threads.submit(bench.read_weights)
        assert not reader.done()
        bench.store.may_read.set()
        weights = reader.result(60)
    assert torch.equal(weights, torch.cat([parameter.detach() for parameter in stock.parameters]))
