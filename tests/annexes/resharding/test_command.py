"""`lohan reshard` splits the store of a real run for several ranks and joins it again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from resharded_stores import STORE, content_at
from typer.testing import CliRunner

import hf_lohan
from hf_lohan.cli import app
from hf_lohan.config import OffloadConfig
from hf_lohan.files import IoEngine, StorePath
from hf_lohan.huggingface.models.export import described_model
from hf_lohan.model import records_of_rank
from hf_lohan.store import Store


def lohan(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.stderr.splitlines()[-1] if result.exit_code == 2 else result.stdout


def own_facts(commit: Any) -> dict[str, Any]:
    """Return the facts without those that say of which stores it is a copy."""
    return {name: fact for name, fact in commit.facts.items() if not name.startswith("cut_from")}


def test_a_store_is_cut_for_four_ranks_and_joined_again(run: Path, tmp_path: Path) -> None:
    before, commit = content_at(run / STORE)
    code, output = lohan("reshard", run, "--ranks", 4)
    assert code == 0, output
    assert output.startswith("step 3 of 1 rank is in ") and "rank-3-of-4" in output
    whole_bytes = sum(map(len, before.values()))
    parts = [content_at(run / STORE / f"rank-{rank}-of-4.g1") for rank in range(4)]
    assert sum(len(content) for part, _ in parts for content in part.values()) == whole_bytes
    assert max(sum(map(len, part.values())) for part, _ in parts) < 0.8 * whole_bytes
    assert len({(own.group_id, own.number) for _, own in parts}) == 1
    assert {own.number for _, own in parts} == {commit.number}
    for rank, (_, own) in enumerate(parts):
        assert (f"rng_state_{rank}.pth" in own.journal) == (rank == 0) and own_facts(own) == commit.facts
        assert "trainer_state.json" in own.journal and "optimizer.pt" in own.journal
    assert lohan("verify", run / STORE / "rank-2-of-4.g1")[0] == 0
    code, output = lohan("verify", run)
    assert code == 0 and "rank 3 of 4: commit" in output and f"all 4 ranks hold commit {commit.number}" in output
    assert hf_lohan.last_step(run) == 3
    code, output = lohan("export", run, tmp_path / "out")
    assert code == 2 and "merge them with lohan reshard" in output

    for num_ranks in (2, 1):
        code, output = lohan("reshard", run, "--ranks", num_ranks, "--remove-old")
        assert code == 0 and "stay" not in output, output
        assert len(list((run / STORE).glob("rank-*"))) == num_ranks
    after, again = content_at(run / STORE / "rank-0-of-1.g3")
    assert after == before
    assert (again.number, own_facts(again), again.journal) == (commit.number, commit.facts, commit.journal)
    for number, given in enumerate((run, run / STORE)):  # also by the ssd path
        out = tmp_path / f"out-{number}"
        assert lohan("export", given, out) == (0, f"wrote {out} (step 3)\n")


def test_shards_have_the_records_of_a_run_with_these_ranks(run: Path) -> None:
    lohan("reshard", run, "--ranks", 3)
    engine = IoEngine(2, 1 << 20, 1 << 22)
    with Store.open([StorePath(str(run / STORE))], model=None, engine=engine) as store:
        _, form = described_model(store)
    for block in form.model_blocks.blocks:
        block.cut_for_ranks(3)
    for rank in range(3):
        paths = [StorePath(str(run / STORE / f"rank-{rank}-of-3.g1"))]
        with Store.open(paths, model=form.identity, engine=engine) as store:
            assert store.records == records_of_rank(form.model_blocks.blocks, rank)
    engine.close()


def test_both_stores_stay_and_the_new_ones_continue(run: Path, tmp_path: Path) -> None:
    code, output = lohan("reshard", run, "--ranks", 2)
    assert code == 0 and "a run continues from there. The old stores stay: on each ssd path, you may " in output
    assert "delete the files manifest.json, " in output
    assert "(--remove-old does this), or the folders rank-*-of-2.g1 to continue as before" in output
    code, output = lohan("verify", run)
    assert code == 0 and "all 2 ranks hold commit" in output
    assert hf_lohan.last_step(run) == 3
    for folder in (run / STORE).glob("rank-*"):
        shutil.rmtree(folder)
    assert lohan("export", run, tmp_path / "out")[0] == 0


def test_stores_of_ranks_with_paths_of_their_own_are_found(run: Path, tmp_path: Path) -> None:
    """As with `{local_rank}` in a path. A run writes the paths of all ranks to its settings."""
    assert lohan("reshard", run, "--ranks", 2, "--remove-old")[0] == 0
    config, drives = run / "lohan" / "config.json", [tmp_path / f"drive-{rank}" for rank in range(2)]
    settings = json.loads(config.read_text())
    for rank, drive in enumerate(drives):
        shutil.move(run / STORE / f"rank-{rank}-of-2.g1", drive / f"rank-{rank}-of-2.g1")
    paths = [str(drive / f"rank-{rank}-of-2") for rank, drive in enumerate(drives)]
    settings["ssd"] = [{"path": paths[0], "capacity": "auto", "paths_of_ranks": paths}]
    config.write_text(json.dumps(settings))
    OffloadConfig.load({"ssd": settings["ssd"]})
    assert hf_lohan.last_step(run) == 3
    code, output = lohan("verify", run)
    assert code == 0 and "all 2 ranks hold" in output
    assert lohan("reshard", run, "--ranks", 3)[0] == 0
    assert [path.parent.name for path in sorted(tmp_path.glob("drive-*/*.g2"))] == ["drive-0", "drive-0", "drive-1"]
    assert lohan("verify", run)[0] == 0 and hf_lohan.last_step(run) == 3
    shutil.rmtree(drives[1])
    code, output = lohan("verify", run)
    assert code == 2 and f"is not under {drives[0]} or {drives[1]}; copy the folders of all machines there" in output


def test_bad_input_is_refused_in_one_line(run: Path, tmp_path: Path) -> None:
    def refused(*args: object) -> str:
        code, output = lohan("reshard", *args)
        assert code == 2, output
        return output

    assert "the number of ranks is 0; it must be at least 1" in refused(run, "--ranks", 0)
    assert "already has a store of a run with 1 rank" in refused(run, "--ranks", 1)
    (tmp_path / "empty").mkdir()
    assert "is not the output folder of an offloaded run" in refused(tmp_path / "empty", "--ranks", 2)
    paths = tmp_path / "empty", tmp_path / "other"
    assert "has neither a store nor stores of ranks" in refused(*paths, "--ranks", 2)
    assert lohan("reshard", run, "--ranks", 2)[0] == 0
    assert "already has a store of a run with 2 ranks, which can continue" in refused(run, "--ranks", 2)
    for name in ("rank-1-of-2.g1", "manifest.json"):
        path = run / STORE / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert "the store of rank 1 of 2 is not under" in refused(run, "--ranks", 3)
