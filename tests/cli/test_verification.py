"""`lohan verify` checks the stores of several ranks. After a kill, one rank may be a commit ahead of the others."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

import hf_lohan
from hf_lohan.cli import app
from hf_lohan.files import CorruptionError, IoEngine, StorePath
from hf_lohan.store import GRANULE_NUMEL, ModelIdentity, RecordSpec, Store, kept_commits
from hf_lohan.store.commits import PREVIOUS_NAME, ImmediateAgreement, write_commit
from hf_lohan.store.manifest import sealed
from hf_lohan.store.rank_folders import rank_folder
from hf_lohan.testing.stored_state import aligned, content_of

pytestmark = pytest.mark.storm

MODEL = ModelIdentity("LlamaForCausalLM", 12345, "abc")
NUMEL = 2 * GRANULE_NUMEL


@pytest.fixture
def engine() -> Iterator[IoEngine]:
    io = IoEngine(num_threads=1, piece_bytes=1 << 20, max_inflight_bytes=1 << 20)
    yield io
    io.close()


class RanksOfARun:
    """The stores of two ranks, with a block that is cut between them, in a run's output folder."""

    def __init__(self, folder: Path, engine: IoEngine) -> None:
        self.folder, self.random, self.engine = folder, Random(5), engine
        (folder / "lohan").mkdir(parents=True)
        settings = {"ssd": [{"path": str(folder / "ssd"), "capacity": "auto"}]}
        (folder / "lohan" / "config.json").write_text(json.dumps(settings))
        self.records = [RecordSpec("a", "param", "bfloat16", NUMEL, first=rank * NUMEL) for rank in range(2)]
        for rank, record in enumerate(self.records):
            self.folder_of(rank).mkdir(parents=True)
            paths = [StorePath(str(self.folder_of(rank)), 10**6)]
            Store.create(paths, [record], model=MODEL, engine=engine, num_homes=2).close()

    def folder_of(self, rank: int) -> Path:
        return Path(rank_folder(str(self.folder / "ssd"), rank, 2))

    def open(self, rank: int) -> Store:
        return Store.open([StorePath(str(self.folder_of(rank)))], model=None, engine=self.engine)

    def commit(self, *ranks: int, is_resumable: bool = False) -> None:
        """Commit one more step on these ranks, without a journal."""
        for rank in ranks:
            with self.open(rank) as store:
                store.agree_on_commits(ImmediateAgreement("run", keeps_previous=True))
                number = store.committed.number + 1 if store.committed is not None else 1
                record = self.records[rank]
                store.write("a", "param", record.first, aligned(record, NUMEL, self.random)).wait()
                store.commit({"global_step": number, "is_resumable": is_resumable, "durability": "step"}, {}, b"{}\n")

    def flip(self, rank: int, commit: int) -> None:
        """Flip a bit that this commit wrote. Commits 1, 3, ... are in the first home."""
        with (self.folder_of(rank) / f"records-{1 - commit % 2}.bin").open("r+b") as stream:
            stream.seek(100)
            byte = stream.read(1)[0]
            stream.seek(100)
            stream.write(bytes([byte ^ 8]))

    def verify(self) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["verify", str(self.folder)])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout + result.stderr


@pytest.fixture
def ahead(tmp_path: Path, engine: IoEngine) -> RanksOfARun:
    """Both ranks have commit 2, and rank 1 also has commit 3."""
    run = RanksOfARun(tmp_path, engine)
    run.commit(0, 1)
    run.commit(0, 1)
    run.commit(1)
    return run


def test_a_rank_that_is_ahead_is_named_and_nothing_changes(ahead: RanksOfARun) -> None:
    before = {file: file.read_bytes() for file in ahead.folder.rglob("*") if file.is_file()}
    code, output = ahead.verify()
    assert code == 0, output
    assert "rank 0 of 2: commit 2, 1 records" in output and "rank 1 of 2: commit 2, 1 records" in output
    assert "rank 1 of 2 also has commit 3, which a resume drops: every checksum is right" in output
    assert output.splitlines()[-1] == "all 2 ranks hold commit 2"
    assert {file: file.read_bytes() for file in ahead.folder.rglob("*") if file.is_file()} == before


def test_damage_in_the_commit_of_a_resume_is_found(ahead: RanksOfARun) -> None:
    ahead.flip(1, 2)
    code, output = ahead.verify()
    assert code == 1 and "rank 1 of 2: commit 2, 1 records, 65536 bytes: 1 granules are damaged" in output, output
    assert "also has commit 3, which a resume drops: every checksum is right" in output
    with ahead.open(1) as store:
        store.restore_commit(store.kept_commits[1])
        with pytest.raises(CorruptionError):
            content_of(store)


def test_damage_in_a_commit_that_a_resume_drops_is_named_and_harmless(ahead: RanksOfARun) -> None:
    ahead.flip(1, 3)
    code, output = ahead.verify()
    assert (
        code == 0 and "commit 3, which a resume drops: 1 granules are damaged, which does not affect a resume" in output
    )
    with ahead.open(1) as store:
        store.restore_commit(store.kept_commits[1])
        content_of(store)


def test_a_damaged_previous_commit_is_ignored(ahead: RanksOfARun, caplog: pytest.LogCaptureFixture) -> None:
    ahead.commit(0)
    (ahead.folder_of(0) / PREVIOUS_NAME).write_bytes(b"nothing of the kind")
    with caplog.at_level(logging.WARNING):
        code, output = ahead.verify()
    assert code == 0 and output.splitlines()[-1] == "all 2 ranks hold commit 3", output
    assert "is ignored: no valid commit in" in caplog.text and PREVIOUS_NAME in caplog.text
    with ahead.open(0) as store:
        assert [commit.number for commit in store.kept_commits] == [3]
    ahead.commit(0, 1)  # the next commit replaces the damaged file
    assert ahead.verify()[1].splitlines()[-1] == "all 2 ranks hold commit 4"
    ahead.commit(0, 1, is_resumable=True)
    (ahead.folder_of(1) / PREVIOUS_NAME).write_bytes(b"")
    assert hf_lohan.last_step(ahead.folder) == 5


def test_without_a_common_commit_each_rank_is_verified_at_its_own(ahead: RanksOfARun) -> None:
    ahead.commit(1)
    code, output = ahead.verify()
    assert code == 1 and "there is no commit that all ranks hold" in output, output
    assert "rank 0 of 2: commit 2" in output and "rank 1 of 2: commit 4" in output


@pytest.mark.parametrize("is_swapped", [True, False])
@pytest.mark.parametrize("says_rank", [True, False])
def test_folders_that_were_swapped_or_copied_are_refused(is_swapped: bool, says_rank: bool, ahead: RanksOfARun) -> None:
    if not says_rank:  # older versions wrote no rank
        for rank in range(2):
            folder = str(ahead.folder_of(rank))
            for commit in reversed(kept_commits([folder])):
                write_commit(replace(commit, layout_id=""), folder, keep_previous=True)
            file = ahead.folder_of(rank) / "manifest.json"
            fields = json.loads(file.read_text()) | {"format_version": 3}
            del fields["rank"]
            file.write_text(json.dumps(sealed(fields)))
        assert ahead.verify()[0] == 0
    first, second, aside = ahead.folder_of(0), ahead.folder_of(1), ahead.folder / "aside"
    if is_swapped:
        first.rename(aside)
        second.rename(first)
        aside.rename(second)
    else:
        shutil.rmtree(second)
        shutil.copytree(first, second)
    code, output = ahead.verify()
    expected = "holds the store of rank" if says_rank else "are not the shards of one model"
    assert code == 2 and expected in output and "Traceback" not in output, output
