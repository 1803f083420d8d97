"""Ranks that load rows of the embeddings train with the bits of ranks that load the table, and of stock torch, and send
the rows alone.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import slow_but
from engines import ONE_GENERATOR, RANK_SETTINGS, open_engine, resolved
from rank_processes import RankProcesses
from torch import Tensor
from trained_nodes import quiet_bytes

from hf_lohan.device import Device
from hf_lohan.engine import OffloadEngine
from hf_lohan.model import rows_between
from hf_lohan.optim import OffloadAdamW
from hf_lohan.planner import SizeClass, cuts
from hf_lohan.planning import lay_out
from hf_lohan.ranks import Channel, Kind, Links, RankFailedError, RanksDisagreeError, TableRows
from hf_lohan.ranks.collectives.node_sums import SUM_PIECE_NUMEL
from hf_lohan.testing.async_device import AsyncDevice
from hf_lohan.testing.models import tiny_batch, tiny_model
from hf_lohan.testing.thread_ranks import Fault, rank_outcomes, run_ranks
from hf_lohan.weights import ShardedRows
from hf_lohan.weights.joint_order import StaleError

LR = 1e-3
WORDS = "model.embed_tokens.weight"
Batch = dict[str, Tensor]


@pytest.fixture(autouse=True)
def cuts_small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has a part of a table, which begins and ends within rows."""
    monkeypatch.setattr(cuts, "SMALL_NUMEL", 0)


def small_model(family: str = "llama", **overrides: Any) -> Any:
    """Return a model with a table of four granules."""
    return tiny_model(family, vocab_size=1501, hidden_size=40, **overrides)


def untied_gpt2() -> Any:
    return small_model("gpt2", tie_word_embeddings=False)


def random_batch(step: int, rank: int, micro: int) -> Batch:
    batch = tiny_batch(seed=1000 * step + 10 * rank + micro)
    ids = batch["input_ids"] * 5  # rows of all ranks
    return {**batch, "input_ids": ids, "labels": ids.clone()}


@dataclass
class Trained:
    """The results of a rank."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Weights and moments."""
    sent: Mapping[Channel, int] = field(default_factory=dict)
    rows_bytes: int | None = None
    """Bytes of rows that came to the device; None if the table was loaded."""
    layout: Any = None


@dataclass(frozen=True)
class Run:
    """A training by several ranks."""

    num_ranks: int = 2
    num_local: int = 2
    make_model: Callable[[], Any] = small_model
    batch: Callable[[int, int, int], Batch] = random_batch
    """Returns the batch of a step, a rank and a micro-batch."""
    max_norm: float = 0.0
    accumulation: int = 1
    num_steps: int = 3
    together: bool = False
    """Whether micro-batches run together."""
    dtype: torch.dtype = torch.float32
    settings: Mapping[str, Any] = field(default_factory=dict)
    make_device: Callable[[], Device | None] = lambda: None
    before_step: Callable[[OffloadEngine, int], object] = lambda _engine, _step: None
    after_step: Callable[[OffloadEngine, int], object] = lambda _engine, _step: None

    def ranks(self, folder: Path, embedding: str, **options: Any) -> list[Trained]:
        folder.mkdir(exist_ok=True)
        devices = [self.make_device() for _ in range(self.num_ranks)]

        def train(links: Links) -> Trained:
            return self.train_rank(links, folder, embedding, devices[links.ranks.rank])

        return run_ranks(self.num_ranks, train, num_local=self.num_local, **options)

    def train_rank(self, links: Links, folder: Path, embedding: str, device: Device | None = None) -> Trained:
        rank = links.ranks.rank
        with ONE_GENERATOR:
            model = self.make_model().to(self.dtype).train()
        defaults = {**RANK_SETTINGS, "cpu_memory": "8MiB", "gpu_memory": "4MiB", "resident_records": "none"}
        settings = {**defaults, **self.settings, "embedding": embedding}
        config = resolved(folder / f"rank-{rank}", **settings)
        holds = self.max_norm > 0 or self.accumulation > 1
        layout = lay_out(model, config, working_dtype=self.dtype, hold_gradients=holds, ranks=links.ranks)
        engine = open_engine(model, layout, config, device, links)
        before, found = dict(links.sent_bytes), Trained(layout=layout)
        try:
            optimizer = OffloadAdamW(model.parameters(), lr=LR, weight_decay=0.1, engine=engine)
            for step in range(self.num_steps):
                self._run_step(engine, step, rank, found)
                if self.max_norm:
                    found.norms.append(engine.clip_grad_norm(self.max_norm))
                self.before_step(engine, step)
                optimizer.step()
                optimizer.zero_grad()
                self.after_step(engine, step)
            engine.wait_for_updates()
            quiet_bytes(links, before)
            found.sent = {channel: links.sent_bytes[channel] - before[channel] for channel in Channel}
            found.rows_bytes = engine.embedding_rows.num_bytes if engine.embedding_rows is not None else None
            for name, _ in model.named_parameters():
                found.tensors[name] = engine.parameters.read_parameter(name)
                for kind in ("exp_avg", "exp_avg_sq"):
                    found.tensors[f"{name} {kind}"] = engine.parameters.read_flat(name, kind)
            return found
        finally:
            engine.close()

    def _run_step(self, engine: OffloadEngine, step: int, rank: int, found: Trained) -> None:
        def run(micro: int) -> None:
            loss = engine.model(**self.batch(step, rank, micro)).loss
            if not engine.defer_backward(loss / self.accumulation):
                (loss / self.accumulation).backward()
            found.losses.append(loss.detach())

        if self.together:
            engine.run_micro_batches([lambda micro=micro: run(micro) for micro in range(self.accumulation)])
            return
        for micro in range(self.accumulation):
            engine.announce_backward(is_final=micro == self.accumulation - 1)
            run(micro)

    def stock(self) -> Trained:
        """Train one process in memory with the batches of all ranks."""
        model, found = self.make_model().train(), Trained()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, fused=True)
        for step in range(self.num_steps):
            for rank in range(self.num_ranks):
                for micro in range(self.accumulation):
                    loss = model(**self.batch(step, rank, micro)).loss
                    (loss / self.accumulation / self.num_ranks).backward()
                    found.losses.append(loss.detach())
            if self.max_norm:
                found.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_norm))
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            found.tensors[name] = parameter.detach()
            for kind in ("exp_avg", "exp_avg_sq"):
                found.tensors[f"{name} {kind}"] = optimizer.state[parameter][kind].view(-1)
        return found


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits, in which 0.0 differs from -0.0."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def assert_same(ours: list[Trained], whole: list[Trained]) -> None:
    for of_rank, expected in zip(ours, whole, strict=True):
        assert of_rank.rows_bytes is not None and expected.rows_bytes is None
        assert all(map(same_bits, of_rank.losses, expected.losses))
        assert all(map(same_bits, of_rank.norms, expected.norms))
        for name, tensor in expected.tensors.items():
            assert same_bits(of_rank.tensors[name], tensor), name


def assert_stock(ours: list[Trained], stock: Trained) -> None:
    for rank, of_rank in enumerate(ours):
        assert all(map(same_bits, of_rank.losses, stock.losses[rank :: len(ours)]))
        for name, tensor in stock.tensors.items():
            assert same_bits(of_rank.tensors[name], tensor), name


# A large vocabulary.

VOCABULARY, WIDTH = 128_000, 40


def large_model() -> Any:
    return tiny_model("llama", vocab_size=VOCABULARY, hidden_size=WIDTH, num_layers=1)


LARGE = {"cpu_memory": "160MiB", "gpu_memory": "80MiB"}


@pytest.mark.parametrize(
    ("num_ranks", "num_local"),
    [(2, 2), (4, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(4, 4), (2, 1)])],
)
def test_a_large_vocabulary(num_ranks: int, num_local: int, tmp_path: Path) -> None:
    """The device has no slot for the table. Between nodes, rows alone are sent, in both directions."""

    def batch(step: int, rank: int, micro: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
        ids = torch.randint(0, VOCABULARY, (2, 16), generator=generator)
        ids[0, :4] = 77  # all ranks have this one
        return {"input_ids": ids, "labels": ids.clone()}

    run = Run(num_ranks, num_local, large_model, batch, num_steps=2, settings=LARGE)
    assert VOCABULARY * WIDTH > 4 << 20, "one rank has the table"
    rows, whole = run.ranks(tmp_path / "rows", "rows"), run.ranks(tmp_path / "whole", "whole")
    assert_same(rows, whole)
    if num_ranks == num_local or num_local == 1:  # otherwise nodes add their sums first
        assert_stock(rows, run.stock())
    table_bytes = VOCABULARY * WIDTH * 4
    for rank, ours in enumerate(rows):
        slots = ours.layout.plan.num_slots
        assert (slots[SizeClass.OUTER], whole[rank].layout.plan.num_slots[SizeClass.OUTER]) == (1, 2)
        assert whole[rank].layout.plan.gpu_pool_bytes - ours.layout.plan.gpu_pool_bytes >= table_bytes
        tokens = [batch(step, rank, 0)["input_ids"].unique() for step in range(run.num_steps)]
        assert ours.rows_bytes == sum(map(len, tokens)) * WIDTH * 4
        assert ours.sent[Channel.TOKENS] == sent_rows_bytes(run, ours.layout, rank)
        less = whole[rank].sent[Channel.GRADIENTS] - ours.sent[Channel.GRADIENTS]
        assert less == table_gradient_bytes(run, ours.layout, rank, by_rows=False) - table_gradient_bytes(
            run, ours.layout, rank, by_rows=True
        )
        assert less == 0 or less > table_bytes // 3


def sent_rows_bytes(run: Run, layout: Any, rank: int) -> int:
    """Return the bytes of the rows that a rank sends to other nodes."""
    first, stop = layout.model_blocks.table.rank_ranges[rank]
    found = 0
    for other in range(run.num_ranks):
        if other // run.num_local != rank // run.num_local:
            for step in range(run.num_steps):
                for micro in range(run.accumulation):
                    ids = run.batch(step, other, micro)["input_ids"].unique().numpy()
                    elements = rows_between(ids, WIDTH, first, min(stop, VOCABULARY * WIDTH))[1]
                    found += 4 * (elements.stop - elements.start)
    return found


def table_gradient_bytes(run: Run, layout: Any, rank: int, *, by_rows: bool) -> int:
    """Return the bytes that a rank sends of the gradient of the table: all of it, or rows with a token on its node."""
    node, local_rank = divmod(rank, run.num_local)
    found = 0
    for chunk in layout.chunks():
        owner_node, owner_local = divmod(chunk.owner, run.num_local)
        if chunk.block.name != layout.model_blocks.table.name or owner_local != local_rank or owner_node == node:
            continue
        cut = TableRows(WIDTH, chunk.start % WIDTH)
        for step in range(run.num_steps):
            on_node = range(node * run.num_local, (node + 1) * run.num_local)
            # The last token of a sequence predicts none, so its gradient is zero.
            used = [run.batch(step, other, 0)["input_ids"][:, :-1].flatten() for other in on_node]
            ids = torch.cat(used).unique().numpy()
            for start in range(0, chunk.numel, SUM_PIECE_NUMEL):
                numel = min(SUM_PIECE_NUMEL, chunk.numel - start)
                begin = chunk.start + start
                elements = rows_between(ids, WIDTH, begin, begin + numel)[1]
                num_values = elements.stop - elements.start
                found += cut.message_bytes(start, numel, num_values, 4) if by_rows else 4 * numel
    return found


# Every way to train.


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(Run(max_norm=0.5), id="deferred"),
        pytest.param(Run(max_norm=100.0, settings={"clip": "speculate"}), id="guessed"),
        pytest.param(Run(max_norm=0.5, settings={"clip": "speculate"}), id="guessed wrong"),
        pytest.param(Run(max_norm=0.5, accumulation=3), id="accumulated"),
        pytest.param(Run(max_norm=0.5, accumulation=3, together=True), id="together"),
        pytest.param(Run(2, 1, max_norm=0.5, accumulation=2), id="two nodes"),
        pytest.param(Run(4, 2, max_norm=0.5, dtype=torch.bfloat16), id="bfloat16"),
        pytest.param(Run(settings={"schedule": "serial"}), id="serial"),
        pytest.param(Run(2, 1, untied_gpt2), id="gpt2"),
        pytest.param(
            Run(2, 1, max_norm=0.5, settings={"resident_records": "auto", "cpu_memory": "16MiB"}), id="in RAM"
        ),
        pytest.param(Run(2, 1, max_norm=0.5, settings={"durability": "checkpoint"}), id="one version"),
    ],
)
def test_equals_whole_embeddings(run: Run, tmp_path: Path) -> None:
    rows = run.ranks(tmp_path / "rows", "rows")
    assert_same(rows, run.ranks(tmp_path / "whole", "whole"))
    if not run.max_norm:
        assert_stock(rows, run.stock())


def test_clipped_ranks_equal_stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm of a table that is not cut is computed in one piece, as in stock torch."""
    monkeypatch.undo()
    run = Run(max_norm=0.5)
    rows, stock = run.ranks(tmp_path / "rows", "rows"), run.stock()
    assert_stock(rows, stock)
    assert all(map(same_bits, rows[0].norms, stock.norms))


@pytest.mark.parametrize("seed", slow_but([0], range(3)))
def test_no_wait_is_missing_if_copies_run_late(seed: int, tmp_path: Path) -> None:
    run = Run(4, 2, max_norm=0.5, make_device=lambda: AsyncDevice(seed, max_delay_s=5e-4))
    assert_same(run.ranks(tmp_path / "rows", "rows", delays_seed=seed), run.ranks(tmp_path / "whole", "whole"))


def test_tied_embeddings_stay_whole(tmp_path: Path) -> None:
    run = Run(2, 1, lambda: small_model("opt"))
    tied = run.ranks(tmp_path / "tied", "rows")
    assert [of_rank.rows_bytes for of_rank in tied] == [None, None]
    assert_stock(tied, run.stock())


def test_rows_are_not_rounded(tmp_path: Path) -> None:
    """Other gradients are, between the nodes and on the links of the devices."""
    collectives = {"gradients": "int4", "within": "int8"}
    exact = Run(2, 1, num_steps=1).ranks(tmp_path / "exact", "rows")
    coded = Run(2, 1, num_steps=1, settings={"collectives": {"within": "exact", "gradients": "int4"}})
    found = coded.ranks(tmp_path / "coded", "rows")
    for of_rank in found:
        assert same_bits(of_rank.tensors[WORDS], exact[0].tensors[WORDS])
        assert not same_bits(of_rank.tensors["lm_head.weight"], exact[0].tensors["lm_head.weight"])
    Run(2, 1, settings={"collectives": collectives}).ranks(tmp_path / "both", "rows")


# Batches.

PAD = 3


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_local", [1, 2])
@pytest.mark.parametrize("kind", ["only padding", "one token", "no tokens", "much longer"])
def test_batches_that_differ(kind: str, num_local: int, tmp_path: Path) -> None:
    table = small_model().get_input_embeddings().weight.detach()

    def batch(step: int, rank: int, micro: int) -> Batch:
        found = random_batch(step, rank, micro)
        if kind == "one token":
            found["input_ids"] = torch.full_like(found["input_ids"], 9)
        elif kind == "much longer" and rank == 0:
            found = tiny_batch(batch_size=1, sequence_length=120, seed=step)
        elif kind == "only padding" and rank == 1:
            found["input_ids"] = torch.full_like(found["input_ids"], PAD)
        elif kind == "no tokens" and rank == 1:
            found["inputs_embeds"] = table[found.pop("input_ids")]
        return found

    run = Run(2, num_local, lambda: small_model(pad_token_id=PAD), batch, num_steps=3)
    rows = run.ranks(tmp_path / "rows", "rows")
    assert_same(rows, run.ranks(tmp_path / "whole", "whole"))
    assert_stock(rows, run.stock())


def test_one_rank_reads_rows_alone(tmp_path: Path) -> None:
    """The others need not be in a forward."""
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def read(engine: OffloadEngine, step: int) -> None:
        if engine.links.ranks.rank == step % 2:
            ids = torch.arange(0, 1501, 3 + step)
            with torch.no_grad():
                found[step] = ids, torch.nn.functional.embedding(ids, engine.model.get_input_embeddings().weight)

    run = Run(2, 1, after_step=read)
    rows = run.ranks(tmp_path / "rows", "rows")
    assert_stock(rows, run.stock())
    ids, last = found[run.num_steps - 1]
    assert len(found) == run.num_steps and torch.equal(last, rows[0].tensors[WORDS][ids])


# Errors.


def read_rows(engine: OffloadEngine) -> Tensor:
    with torch.no_grad():
        return torch.nn.functional.embedding(torch.arange(1501), engine.model.get_input_embeddings().weight)


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


def test_rows_of_a_step_that_is_ending_are_refused(tmp_path: Path) -> None:
    """A rank that has clipped and not stepped gets no rows of an owner that has updated them in its step."""
    is_updated, is_read = threading.Event(), threading.Event()

    def read(engine: OffloadEngine, step: int) -> None:
        if step == 0:
            return
        if engine.links.ranks.rank == 0:
            assert is_updated.wait(20)
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


@pytest.mark.covering(1)
@pytest.mark.parametrize("clip", ["defer", "speculate"])
@pytest.mark.parametrize("schedule", ["serial", "naive", "optimized"])
@pytest.mark.parametrize("read_weights", [read_rows, evaluate])
def test_a_read_while_another_rank_ends_the_first_step_ends_at_once(
    read_weights: Callable[[OffloadEngine], Tensor], schedule: str, clip: str, tmp_path: Path
) -> None:
    """The updates of the other rank need this rank's first commit, for which this rank needs no `step`."""
    is_ending = threading.Event()

    def read(engine: OffloadEngine, step: int) -> None:
        if engine.links.ranks.rank == 0:
            assert is_ending.wait(20)
            read_weights(engine)
            return
        finish = engine._pipeline.finish_step

        def finish_noted(*args: Any) -> Any:
            is_ending.set()
            return finish(*args)

        engine._pipeline.finish_step = finish_noted  # type: ignore[method-assign]

    run = Run(max_norm=0.5, settings={"schedule": schedule, "clip": clip}, before_step=read)
    with pytest.raises(
        RanksDisagreeError,
        match=r"rank 1 ends a step with step\(\) or .* changes model\.\S+, while another rank still reads",
    ):
        run_ranks(2, lambda links: run.train_rank(links, tmp_path, "rows"))


@pytest.mark.covering(1)
@pytest.mark.parametrize("read_weights", [read_rows, evaluate])
@pytest.mark.parametrize(("schedule", "clip"), [("serial", "defer"), ("optimized", "speculate")])
def test_a_read_while_another_rank_drops_the_first_step_ends_at_once(
    read_weights: Callable[[OffloadEngine], Tensor], schedule: str, clip: str, tmp_path: Path
) -> None:
    is_dropping, is_read = threading.Event(), threading.Event()

    def read(engine: OffloadEngine, step: int) -> None:
        if engine.links.ranks.rank == 0:
            assert is_dropping.wait(20)
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
        assert is_read.wait(10)
        if engine.links.ranks.rank == 0:
            engine.drop_gradients()

    run = Run(max_norm=0.5, settings={"schedule": schedule, "clip": clip}, before_step=read, num_steps=1)
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
        RanksDisagreeError, match=r'has embedding="\w+", and rank \d has "\w+"; give all ranks the same'
    ):
        run_ranks(2, train)


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_local", [1, 2])
@pytest.mark.parametrize("at_message", [3, 5])
def test_a_rank_that_ends_in_the_exchange_ends_the_others(at_message: int, num_local: int, tmp_path: Path) -> None:
    """After a greeting for each rank, the messages of this channel are rows alone."""
    run = Run(4, num_local, max_norm=0.5)
    fault = Fault(1, "die", at_message, Channel.TOKENS)
    outcomes = rank_outcomes(
        4, lambda links: run.train_rank(links, tmp_path, "rows"), num_local=num_local, faults=[fault]
    )
    for outcome in outcomes:
        assert isinstance(outcome.error, RankFailedError)
        assert re.match(r"rank \d (\(pid \d+, \S+\) )?", str(outcome.error)), outcome.error


def kills_itself(links: Links, report: Callable[[object], None], folder: Path, at_call: int) -> None:
    """Kill rank 1 when it is about to read rows for another rank."""
    calls, fill = iter(range(at_call)), ShardedRows._fill_lent
    cuts.SMALL_NUMEL = 0

    def killing(*args: Any) -> None:
        if links.ranks.rank == 1 and next(calls, None) is None:
            report(time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
        fill(*args)

    ShardedRows._fill_lent = killing  # type: ignore[method-assign]
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


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize("num_local", [1, 2])
def test_rows_come_after_an_interrupt_between_requests(num_local: int, is_sent: bool, tmp_path: Path) -> None:
    found: list[Tensor] = []

    def interrupt(engine: OffloadEngine, step: int) -> None:
        links = engine.links
        if links.ranks.rank:
            return
        send, calls = links.send, iter(range(1))

        def interrupted(rank: int, kind: Kind, *args: Any, **options: Any) -> None:
            is_first = kind is Kind.ROWS_WANTED and next(calls, None) is not None
            if not is_first or is_sent:
                send(rank, kind, *args, **options)
            if is_first:
                raise KeyboardInterrupt

        links.send = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            read_rows(engine)
        links.send = send  # type: ignore[method-assign]
        found.append(read_rows(engine))

    run = Run(2, num_local, num_steps=2, after_step=interrupt)
    rows = run.ranks(tmp_path, "rows")
    assert torch.equal(found[-1], rows[0].tensors[WORDS])


def test_an_error_without_a_text_ends_the_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: Any) -> None:
        raise StaleError

    monkeypatch.setattr(ShardedRows, "_fill_lent", fail)
    with pytest.raises(RanksDisagreeError, match="StaleError"):
        run_ranks(2, lambda links: Run().train_rank(links, tmp_path, "rows"))


def test_a_second_engine_takes_no_late_rows_of_the_first(tmp_path: Path) -> None:
    """No request has a number of an earlier one."""

    def train(links: Links) -> list[tuple[int, int]]:
        send, requests = links.send, list[tuple[int, int]]()

        def noting(rank: int, kind: Kind, *numbers: int, **options: Any) -> None:
            if kind is Kind.ROWS_WANTED:
                requests.append((rank, numbers[0]))
            send(rank, kind, *numbers, **options)

        links.send = noting  # type: ignore[method-assign]
        for name in ("first", "second"):
            Run(num_steps=1).train_rank(links, tmp_path / name, "rows")
        return requests

    for requests in run_ranks(2, train):
        assert len(requests) == len(set(requests)) >= 2


# Messages.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 24, 300])
@pytest.mark.parametrize(("start", "numel"), [(0, 240), (5, 1), (3, 500), (48, 24), (100, 203)])
def test_rows_that_are_not_zero_come_back(start: int, numel: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(numel)
    for before in {0, width // 2, width - 1}:
        rows = TableRows(width, before)
        num_rows, lead, _ = rows.cut(start, numel)
        of_row = (torch.arange(numel) + lead) // width
        for share in (0.0, 0.4, 1.0):
            is_used = torch.rand(num_rows, generator=generator) < share
            values = torch.randn(numel, generator=generator).to(dtype) * is_used[of_row]
            values = torch.where(is_used[of_row], values, torch.zeros((), dtype=dtype))
            if share:
                values[of_row == of_row[-1]] = -0.0  # which zeros that are left out would change
            message = rows.pack_rows(values, start)
            assert same_bits(rows.unpack_rows(message, start, numel, dtype), values)
            is_sent = is_used.clone()
            is_sent[-1] |= share > 0
            num_values = int(is_sent[of_row].sum())
            assert message.numel() == rows.message_bytes(start, numel, num_values, dtype.itemsize)
