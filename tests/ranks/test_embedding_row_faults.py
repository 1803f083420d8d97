"""Reads of rows of the embeddings at the wrong time, interrupted ones, and ranks that fail in them."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from embedding_ranks import WORDS, Batch, Run, Trained, random_batch, small_model
from rank_processes import RankProcesses
from torch import Tensor

from hf_lohan.annexes.embedding_rows.row_loads import ShardedRows
from hf_lohan.costs import cuts
from hf_lohan.engine import OffloadEngine
from hf_lohan.ranks import Links, RankFailedError, RanksDisagreeError
from hf_lohan.testing.models import tiny_batch
from hf_lohan.testing.thread_ranks import Fault, rank_outcomes, run_ranks
from hf_lohan.weights.shared_source import StaleError

pytestmark = pytest.mark.usefixtures("cuts_small_tables")


def read_rows(engine: OffloadEngine) -> Tensor:
    with torch.no_grad():
        return torch.nn.functional.embedding(torch.arange(1501), engine.model.get_input_embeddings().weight)


@pytest.mark.slow
def test_rows_that_other_ranks_have_updated_are_refused(tmp_path: Path) -> None:
    """A rank without a token also gets no weights of a step that has not ended."""
    table = small_model().get_input_embeddings().weight.detach()

    def batch(step: int, rank: int, micro: int) -> Batch:
        found = random_batch(step, rank, micro)
        if rank == 1:
            found["inputs_embeds"] = table[found.pop("input_ids")]
        return found

    def read(engine: OffloadEngine, step: int) -> None:
        if engine.links.ranks.rank == 1:
            read_rows(engine)

    with pytest.raises(RuntimeError, match="is needed again in a step whose updates run in backward"):
        run_ranks(2, lambda links: Run(batch=batch, before_step=read).train_rank(links, tmp_path, "rows"))


@pytest.mark.slow
def test_rows_of_a_step_that_is_ending_are_refused(tmp_path: Path) -> None:
    """A rank that has clipped and not stepped gets no rows of an owner that has updated them in its step."""
    is_updated, is_read = threading.Event(), threading.Event()

    def read(engine: OffloadEngine, step: int) -> None:
        if step == 0:
            return
        if engine.links.ranks.rank == 0:
            assert is_updated.wait(60)
            try:
                read_rows(engine)
            finally:
                is_read.set()
            return
        pipeline = engine._pipeline
        finish = pipeline.finish_step

        def finish_slowly(*args: Any) -> Any:
            result = finish(*args)
            pipeline.wait_for_updates()
            is_updated.set()
            is_read.wait(1.0)
            return result

        pipeline.finish_step = finish_slowly  # type: ignore[method-assign]

    with pytest.raises(
        RanksDisagreeError, match=r"rank 1 ends a step with step\(\) or .* changes model\.embed_tokens, while another"
    ):
        run_ranks(2, lambda links: Run(max_norm=0.5, before_step=read).train_rank(links, tmp_path, "rows"))


def evaluate(engine: OffloadEngine) -> Tensor:
    """Run a forward, for which other ranks lend their weights."""
    with torch.no_grad():
        return engine.model(**tiny_batch()).loss


@pytest.mark.covering(0)
@pytest.mark.parametrize("clip", ["defer", "speculate"])
@pytest.mark.parametrize("schedule", ["serial", "naive", "optimized"])
@pytest.mark.parametrize("read_weights", [evaluate, read_rows])
@pytest.mark.parametrize("num_local", [1, 2])
def test_a_read_while_another_rank_ends_the_first_step_ends_at_once(
    num_local: int, read_weights: Callable[[OffloadEngine], Tensor], schedule: str, clip: str, tmp_path: Path
) -> None:
    """The updates of the other rank need this rank's first commit, for which this rank needs no `step`."""
    is_ending = threading.Event()

    def read(engine: OffloadEngine, step: int) -> None:
        if engine.links.ranks.rank == 0:
            assert is_ending.wait(60)
            read_weights(engine)
            return
        finish = engine._pipeline.finish_step

        def finish_noted(*args: Any) -> Any:
            is_ending.set()
            return finish(*args)

        engine._pipeline.finish_step = finish_noted  # type: ignore[method-assign]

    run = Run(max_norm=0.5, settings={"_schedule": schedule, "_clip": clip}, before_step=read)
    with pytest.raises(
        RanksDisagreeError,
        match=r"rank 1 ends a step with step\(\) or .* changes model\.\S+, while another rank still reads",
    ):
        run_ranks(2, lambda links: run.train_rank(links, tmp_path, "rows"), num_local=num_local)


@pytest.mark.covering(0)
@pytest.mark.parametrize("read_weights", [evaluate, read_rows])
@pytest.mark.parametrize(("schedule", "clip"), [("serial", "defer"), ("optimized", "speculate")])
def test_a_read_while_another_rank_drops_the_first_step_ends_at_once(
    read_weights: Callable[[OffloadEngine], Tensor], schedule: str, clip: str, tmp_path: Path
) -> None:
    is_dropping, is_read = threading.Event(), threading.Event()

    def read(engine: OffloadEngine, step: int) -> None:
        if engine.links.ranks.rank == 0:
            assert is_dropping.wait(60)
            try:
                read_weights(engine)
            finally:
                is_read.set()
        else:
            pipeline = engine._pipeline
            abandon = pipeline.abandon_step

            def abandon_slowly() -> Any:
                is_dropping.set()
                result = abandon()
                is_read.wait(1.0)
                return result

            pipeline.abandon_step = abandon_slowly  # type: ignore[method-assign]
            engine.drop_gradients()
            pipeline.abandon_step = abandon  # type: ignore[method-assign]
        assert is_read.wait(60)
        if engine.links.ranks.rank == 0:
            engine.drop_gradients()

    run = Run(max_norm=0.5, settings={"_schedule": schedule, "_clip": clip}, before_step=read, num_steps=1)
    outcomes = rank_outcomes(2, lambda links: run.train_rank(links, tmp_path, "rows"))
    for outcome in outcomes:
        error = outcome.error
        assert error is None or "rank 1 ends a step with" in str(error), error
        assert isinstance(error, RanksDisagreeError | RankFailedError | None), error
    assert len({outcome.error is None for outcome in outcomes}) == 1, "one rank ended with an error that another missed"


def test_ranks_with_another_form_are_refused(tmp_path: Path) -> None:
    def train(links: Links) -> Trained:
        return Run().train_rank(links, tmp_path, "rows" if links.ranks.rank else "whole")

    with pytest.raises(
        RanksDisagreeError, match=r'embedding is "whole" on rank 0 and "rows" on rank 1; give all ranks the same'
    ):
        run_ranks(2, train)


@pytest.mark.covering(0)
@pytest.mark.parametrize("num_local", [1, 2])
@pytest.mark.parametrize("at_operation", [3, 5])
def test_a_rank_that_ends_in_the_exchange_ends_the_others(at_operation: int, num_local: int, tmp_path: Path) -> None:
    run = Run(4, num_local, max_norm=0.5)
    fault = Fault(1, "die", at_operation, "rows")
    outcomes = rank_outcomes(
        4, lambda links: run.train_rank(links, tmp_path, "rows"), num_local=num_local, faults=[fault], timeout_s=3.0
    )
    for outcome in (outcomes[0], *outcomes[2:]):
        assert isinstance(outcome.error, RankFailedError)
        assert re.match(r"rank \d (\(pid \d+, \S+\) )?", str(outcome.error)), outcome.error


def kills_itself(links: Links, report: Callable[[object], None], folder: Path, at_call: int) -> None:
    """Kill rank 1 when it is about to read rows for another rank."""
    calls, fill = iter(range(at_call)), ShardedRows._fill
    cuts.SMALL_NUMEL = 0

    def killing(*args: Any) -> None:
        if links.ranks.rank == 1 and next(calls, None) is None:
            report("is killed")
            os.kill(os.getpid(), signal.SIGKILL)
        fill(*args)

    ShardedRows._fill = killing  # type: ignore[method-assign]
    Run(links.ranks.num_ranks, links.ranks.num_local, max_norm=0.5).train_rank(links, folder, "rows")


@pytest.mark.slow
@pytest.mark.parametrize("at_call", [0, 1, 4])
@pytest.mark.parametrize("num_local", [3, 1])
def test_the_kill_of_a_rank_in_the_exchange_is_named(
    fork_server: None, num_local: int, at_call: int, tmp_path: Path
) -> None:
    ranks = RankProcesses(3, partial(kills_itself, folder=tmp_path, at_call=at_call), num_local=num_local)
    try:
        ranks.assert_killed_and_named(1)
    finally:
        ranks.close()


def test_damage_of_another_ranks_rows_is_named(tmp_path: Path) -> None:
    def damage(engine: OffloadEngine, step: int) -> None:
        engine.wait_for_updates()
        table = engine.layout.model_blocks.table
        assert table is not None
        engine.links.barrier("all to have written")
        if engine.links.ranks.rank == 1 and step == 1:
            for path, extent in engine.tiers.store.extents(table.name, "param") or ():
                with open(path, "r+b") as file:
                    file.seek(extent.file_offset)
                    file.write(b"\x55" * extent.num_bytes)
        engine.links.barrier("all to go on")

    run = Run(2, 1, max_norm=0.5, after_step=damage)
    outcomes = rank_outcomes(2, lambda links: run.train_rank(links, tmp_path, "rows"), num_local=1)
    told = [str(outcome.error) for outcome in outcomes]
    assert any("model.embed_tokens" in text for text in told), told


@pytest.mark.covering(0)
@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("num_local", [1, 2])
def test_rows_come_after_an_interrupt_between_requests(num_local: int, is_told: bool, tmp_path: Path) -> None:
    found: list[Tensor] = []

    def interrupt(engine: OffloadEngine, step: int) -> None:
        if engine.links.ranks.rank:
            return
        source = engine.embedding_rows._source
        wait_for, waits = source.changed.wait_for, iter((is_told, False))

        def interrupted(predicate: Callable[[], bool]) -> bool:
            if not next(waits):
                raise KeyboardInterrupt
            return wait_for(predicate)

        source.changed.wait_for = interrupted
        with pytest.raises(KeyboardInterrupt):
            read_rows(engine)
        source.changed.wait_for = wait_for
        found.append(read_rows(engine))

    run = Run(2, num_local, num_steps=2, after_step=interrupt)
    rows = run.ranks(tmp_path, "rows")
    assert torch.equal(found[-1], rows[0].weights[WORDS])


def test_an_error_without_a_text_ends_the_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = ShardedRows._fill

    def fail(rows: ShardedRows, *args: Any) -> None:
        if rows._own.rank:
            raise StaleError
        fill(rows, *args)

    monkeypatch.setattr(ShardedRows, "_fill", fail)
    of_rank_0, of_rank_1 = rank_outcomes(2, lambda links: Run().train_rank(links, tmp_path, "rows"))
    # Rank 0 learns of the error with its read, or from rank 1, which may fail first.
    assert isinstance(of_rank_0.error, RanksDisagreeError | RankFailedError)
    assert "StaleError" in str(of_rank_0.error)
    assert isinstance(of_rank_1.error, StaleError | RankFailedError), repr(of_rank_1.error)
