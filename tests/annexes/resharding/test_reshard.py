"""A step copied for another number of ranks keeps every bit, and damaged records are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hf_lohan.annexes.resharding import reshard as resharding
from hf_lohan.annexes.resharding.copied_commits import facts_of_all, journal_of_rank
from hf_lohan.annexes.resharding.reshard import LoggedProgress, copy_records
from hf_lohan.costs import cut_for_ranks, units_between
from hf_lohan.files import IoEngine, StorageError, StorePath
from hf_lohan.store import ModelIdentity, RecordSpec, Store
from hf_lohan.store.commits import ImmediateAgreement
from hf_lohan.testing.stored_state import aligned, content_of

MODEL = ModelIdentity("LlamaForCausalLM", 12345, "abc")
GRANULE = 2048
UNITS = {"a": [3 * GRANULE, 5 * GRANULE, 2 * GRANULE], "b": [4 * GRANULE, GRANULE]}
FROZEN = {"a": 0, "b": 3 * GRANULE}
"""The number of frozen elements after the trained ones."""
KINDS = {"param": "bfloat16", "master_residual": "int16", "exp_avg": "float32"}


@pytest.fixture
def engine() -> Iterator[IoEngine]:
    io = IoEngine(num_threads=1, piece_bytes=1 << 20, max_inflight_bytes=1 << 20)
    yield io
    io.close()


def records_of(rank: int, num_ranks: int) -> tuple[RecordSpec, ...]:
    """Return the records that `model.stored_form` gives for blocks with some frozen weights."""
    records = []
    for block, units in UNITS.items():
        trained = sum(units)
        edges = cut_for_ranks(units, trained + FROZEN[block], num_ranks, granule_numel=GRANULE)
        start, stop = edges[rank], edges[rank + 1]
        own = sum(units_between(units, start, stop))
        if start < stop:
            records.append(RecordSpec(block, "param", "bfloat16", stop - start, own, GRANULE, start))
        if own:
            for kind in ("master_residual", "exp_avg"):
                records.append(RecordSpec(block, kind, KINDS[kind], own, own, GRANULE, min(start, trained)))
    return tuple(records)


def make_stores(root: Path, num_ranks: int, engine: IoEngine, held: ExitStack) -> list[Store]:
    stores = []
    for rank in range(num_ranks):
        paths = [StorePath(str(root / f"{path}" / f"rank-{rank}-of-{num_ranks}"), 10**7) for path in range(2)]
        for path in paths:
            Path(path.path).mkdir(parents=True)
        records = records_of(rank, num_ranks)
        stores.append(held.enter_context(Store.create(paths, records, model=MODEL, engine=engine, num_homes=2)))
    return stores


def whole(stores: Sequence[Store]) -> dict[tuple[str, str], bytes]:
    """Return the whole records, joined from the parts of all stores."""
    parts: dict[tuple[str, str], dict[int, bytes]] = {}
    for store in stores:
        content = content_of(store)
        for record in store.records:
            parts.setdefault((record.block, record.kind), {})[record.first] = content[record.block, record.kind]
    return {name: b"".join(content for _, content in sorted(own.items())) for name, own in parts.items()}


def write_all(stores: Sequence[Store], random: Random) -> None:
    for store in stores:
        for record in store.records:
            content = aligned(record, record.numel, random)
            store.write(record.block, record.kind, record.first, content).wait()
        store.commit()


def test_records_survive_resharding_to_any_number_of_ranks_and_back(tmp_path: Path, engine: IoEngine) -> None:
    with ExitStack() as held:
        stores = make_stores(tmp_path / "first", 2, engine, held)
        write_all(stores, Random(5))
        before, of_each = whole(stores), [content_of(store) for store in stores]
        assert {len(content) for content in before.values()} == {20 * 2048, 40 * 2048, 16 * 2048, 10 * 2048}
        for number, num_ranks in enumerate((1, 4, 3, 2)):
            fresh = make_stores(tmp_path / f"{number}", num_ranks, engine, held)
            for rank, store in enumerate(fresh):
                moved = sum(copy_records(stores, store))
                assert moved == sum(record.num_bytes for record in records_of(rank, num_ranks))
                store.commit()
            assert whole(fresh) == before
            stores = fresh
        assert [content_of(store) for store in stores] == of_each


def test_a_missing_part_is_named(tmp_path: Path, engine: IoEngine) -> None:
    with ExitStack() as held:
        old = make_stores(tmp_path / "first", 3, engine, held)
        write_all(old, Random(5))
        (new,) = make_stores(tmp_path / "one", 1, engine, held)
        with pytest.raises(StorageError, match=r"no element \d+ of param of a is in .*rank-0-of-3 or .*rank-1-of-3"):
            sum(copy_records(old[:2], new))


def test_commit_numbers_continue(tmp_path: Path, engine: IoEngine) -> None:
    with ExitStack() as held:
        (store,) = make_stores(tmp_path, 1, engine, held)
        store.agree_on_commits(ImmediateAgreement("run", keeps_previous=True))
        store.count_commits_from(17)
        write_all([store], Random(1))
        assert (store.committed.number, store.committed.group_id) == (17, "run")
        write_all([store], Random(2))
        assert [commit.number for commit in store.kept_commits] == [18, 17]


JOURNAL_OF_ONE = {"trainer_state.json": b"state", "rng_state.pth": b"random", "epoch_rng_state.pth": b"epoch"}
JOURNALS_OF_TWO = [
    {"trainer_state.json": b"state", "rng_state_0.pth": b"0", "epoch_rng_state_0.pth": b"epoch"},
    {"rng_state_1.pth": b"1", "epoch_rng_state_1.pth": b"epoch"},
]


def test_each_rank_finds_its_random_state_by_rank() -> None:
    assert journal_of_rank([JOURNAL_OF_ONE], 0, 1) == JOURNAL_OF_ONE
    assert journal_of_rank([JOURNAL_OF_ONE], 0, 2) == JOURNALS_OF_TWO[0] | {"rng_state_0.pth": b"random"}
    assert [journal_of_rank(JOURNALS_OF_TWO, rank, 4) for rank in (0, 1)] == JOURNALS_OF_TWO
    assert journal_of_rank(JOURNALS_OF_TWO, 0, 1) == JOURNAL_OF_ONE | {"rng_state.pth": b"0"}


def test_a_new_rank_gets_only_the_random_state_of_the_epoch() -> None:
    assert journal_of_rank(JOURNALS_OF_TWO, 2, 4) == {"trainer_state.json": b"state", "epoch_rng_state_2.pth": b"epoch"}


def test_update_counts_are_joined_over_ranks() -> None:
    facts = [
        {"global_step": 7, "num_updates": {"a": 7, "b": 0}},
        {"global_step": 7, "num_updates": {"a": 0, "b": 6, "c": 7}},
    ]
    assert facts_of_all(facts) == {"global_step": 7, "num_updates": {"a": 7, "b": 6, "c": 7}}
    assert facts_of_all([{"global_step": 7}]) == {"global_step": 7}


def test_losses_since_the_last_log_are_the_mean_over_ranks() -> None:
    facts = [{"trainer": {"loss": loss, "logged_at": 6.0, "total": 0.1}} for loss in (1.0, 4.0, 2.5)]
    assert facts_of_all(facts) == {"trainer": {"loss": 2.5, "logged_at": 6.0, "total": 0.1}}


def test_reads_and_writes_overlap_in_bounded_memory(
    tmp_path: Path, engine: IoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next pieces are read while a piece is written, and at most as many pieces as there are buffers are open."""
    monkeypatch.setattr(resharding, "COPY_BYTES", 4 * GRANULE)
    unfinished, most, both = Counter[str](), 0, 0

    def watched(store: Store, verb: str) -> None:
        begin = getattr(store, verb)

        def begun(*args: Any, **given: Any) -> object:
            nonlocal most, both
            request = begin(*args, **given)
            unfinished[verb] += 1
            most = max(most, unfinished.total())
            both += all(unfinished[one] for one in ("read", "write"))

            def wait(finish: Callable[[], None] = request.wait) -> None:
                unfinished[verb] -= 1
                finish()

            request.wait = wait
            return request

        monkeypatch.setattr(store, verb, begun)

    with ExitStack() as held:
        old = make_stores(tmp_path / "first", 2, engine, held)
        write_all(old, Random(5))
        (new,) = make_stores(tmp_path / "one", 1, engine, held)
        for store in old:
            watched(store, "read")
        watched(new, "write")
        assert sum(copy_records(old, new)) == sum(record.num_bytes for record in new.records)
        monkeypatch.undo()
        new.commit()
        assert whole([new]) == whole(old)
    assert both > 3 and 4 < most <= 8


def test_long_copies_are_logged_with_rate_and_time_left(caplog: pytest.LogCaptureFixture) -> None:
    """The first piece may wait for a model to be described and for files to be allocated, so it has no rate."""
    times_s = [60.0, 64.0, 68.0, 72.0, 76.0]
    progress = LoggedProgress("copied", lambda: times_s.pop(0))
    for _ in range(5):
        progress.advance(10**9, 8 * 10**9)
    (line,) = caplog.messages
    assert line == "copied 3.73 GiB of 7.45 GiB (0.25 GB/s), 16 s left"
    assert progress.text() == "copied 4.66 GiB of 7.45 GiB (0.25 GB/s)"
