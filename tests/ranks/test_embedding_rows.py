"""Ranks that load rows of the embeddings train with the bits of ranks that load the table, and of stock torch, and send
the rows alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from async_device import AsyncDevice
from covering import slow_but
from embedding_ranks import WORDS, Batch, Run, assert_same, assert_stock, random_batch, small_model, untied_gpt2
from equal_tensors import same_bits
from torch import Tensor

from hf_lohan.costs import SizeClass
from hf_lohan.engine import OffloadEngine
from hf_lohan.model import rows_between
from hf_lohan.ranks import TableRows
from hf_lohan.ranks.collectives.node_sums import SUM_PIECE_NUMEL
from hf_lohan.testing.models import tiny_batch, tiny_model

pytestmark = pytest.mark.usefixtures("cuts_small_tables")


# A large vocabulary.

VOCABULARY, WIDTH = 128_000, 40


def large_model() -> Any:
    return tiny_model("llama", vocab_size=VOCABULARY, hidden_size=WIDTH, num_layers=1)


LARGE = {"cpu_memory": "160MiB", "gpu_memory": "80MiB"}


@pytest.mark.slow
@pytest.mark.covering(0)
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
        assert ours.sent["tokens"] == sent_rows_bytes(run, ours.layout, rank)
        less = whole[rank].sent["gradients"] - ours.sent["gradients"]
        assert less == table_gradient_bytes(run, ours.layout, rank, by_rows=False) - table_gradient_bytes(
            run, ours.layout, rank, by_rows=True
        )
        assert less == 0 or less > table_bytes // 3


def sent_rows_bytes(run: Run, layout: Any, rank: int) -> int:
    """Return the bytes of the rows that a rank sends to others, and of the numbers of those that it wants."""
    first, stop = layout.model_blocks.table.rank_ranges[rank]
    found = 0
    for other in range(run.num_ranks):
        for step in range(run.num_steps):
            for micro in range(run.accumulation):
                ids = run.batch(step, other, micro)["input_ids"].unique().numpy()
                if other == rank:
                    found += ids.nbytes * (run.num_ranks - 1)
                    continue
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
        pytest.param(Run(max_norm=0.5, num_steps=2), id="deferred"),
        pytest.param(Run(max_norm=100.0, settings={"_clip": "speculate"}), id="guessed", marks=pytest.mark.slow),
        pytest.param(Run(max_norm=0.5, settings={"_clip": "speculate"}), id="guessed wrong", marks=pytest.mark.slow),
        pytest.param(Run(max_norm=0.5, accumulation=3), id="accumulated", marks=pytest.mark.slow),
        pytest.param(Run(max_norm=0.5, accumulation=3, together=True), id="together", marks=pytest.mark.slow),
        pytest.param(Run(2, 1, max_norm=0.5, accumulation=2), id="two nodes", marks=pytest.mark.slow),
        pytest.param(Run(4, 2, max_norm=0.5, dtype=torch.bfloat16, num_steps=2), id="bfloat16"),
        pytest.param(Run(settings={"_schedule": "serial"}), id="serial", marks=pytest.mark.slow),
        pytest.param(Run(2, 1, untied_gpt2), id="gpt2", marks=pytest.mark.slow),
        pytest.param(
            Run(2, 1, max_norm=0.5, settings={"_resident_records": "auto", "cpu_memory": "16MiB"}),
            id="in RAM",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Run(2, 1, max_norm=0.5, settings={"durability": "checkpoint"}), id="one version", marks=pytest.mark.slow
        ),
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
    assert stock.norms


@pytest.mark.slow
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
    coded = Run(2, 1, num_steps=1, settings={"ranks.collectives": {"within": "exact", "gradients": "int4"}})
    found = coded.ranks(tmp_path / "coded", "rows")
    for of_rank in found:
        assert same_bits(of_rank.weights[WORDS], exact[0].weights[WORDS])
        assert not same_bits(of_rank.weights["lm_head.weight"], exact[0].weights["lm_head.weight"])
    Run(2, 1, num_steps=1, settings={"ranks.collectives": collectives}).ranks(tmp_path / "both", "rows")


# Batches.

PAD = 3


@pytest.mark.covering(0)
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
    assert len(found) == run.num_steps and torch.equal(last, rows[0].weights[WORDS][ids])


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
