"""`lohan reshard --balance` gives experts to ranks by their rows. It moves whole experts and changes no bit."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from divided_experts import Chosen
from expert_models import expert_model
from resharded_stores import STORE, content_at, form_of, in_child, reshard_to
from short_runs import train_until
from torch import Tensor
from typer.testing import CliRunner

from hf_lohan.checkpoint.resharding import balanced_owners, reshard
from hf_lohan.checkpoint.seen_stores import finish_moves
from hf_lohan.cli import app
from hf_lohan.experts import RoutedRows
from hf_lohan.ranks import Links
from hf_lohan.store.manifest import read_manifest
from hf_lohan.store.rank_folders import rank_folder

EXPERT = re.compile(r"model\.layers\.(\d)\.mlp\.experts\.(\d)")
SETTINGS: dict[str, Any] = {"experts": "streamed", "lazy_experts": False, "cpu_memory": "16MiB"}


def first_two(index: Tensor, num: int) -> Tensor:
    """Return choices of the first two experts alone, which belong to one rank."""
    return torch.arange(index.numel(), device=index.device).view(index.shape) % 2


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run of one rank that was stopped after its third step."""
    folder = tmp_path_factory.mktemp("run")
    train_until(folder, 3, model=Chosen("mixtral", first_two)(), **SETTINGS)
    return folder


@pytest.fixture
def run(stopped_run: Path, tmp_path: Path) -> Path:
    """A copy of the stopped run, whose stores are divided for two ranks."""
    run = Path(shutil.copytree(stopped_run, tmp_path / "run"))
    reshard([str(run / STORE)], 2, form_of=form_of, removes_old=True)
    return run


balance = partial(reshard, form_of=form_of, balances=True)


def lohan(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.stderr.splitlines()[-1] if result.exit_code == 2 else result.stdout


def owners(directory: Path, num_ranks: int) -> dict[tuple[int, int], int]:
    """Return the rank of each expert by (layer, expert), and check that each expert has one."""
    found: dict[tuple[int, int], int] = {}
    for rank in range(num_ranks):
        manifest = read_manifest(rank_folder(str(directory), rank, num_ranks))
        assert manifest is not None
        names = {record.block for record in manifest.layout.records}
        for match in filter(None, map(EXPERT.fullmatch, names)):
            assert found.setdefault((int(match[1]), int(match[2])), rank) == rank
    return found


def joined(directory: Path, num_ranks: int) -> tuple[dict[tuple[str, str], bytes], Any]:
    """Return the whole records of all ranks' stores, and the facts of rank 0."""
    parts: dict[tuple[str, str], list[bytes]] = {}
    of_ranks = [content_at(Path(rank_folder(str(directory), rank, num_ranks))) for rank in range(num_ranks)]
    for content, _ in of_ranks:
        for name, of_part in content.items():
            parts.setdefault(name, []).append(bytes(of_part))
    return {name: b"".join(of) for name, of in parts.items()}, of_ranks[0][1].facts


def test_the_rows_of_a_run_are_in_its_commit(stopped_run: Path) -> None:
    _, commit = content_at(stopped_run / STORE)
    rows = RoutedRows.of_rank(commit.facts, 0)
    assert rows is not None and rows.num_nodes == 1
    num_choices = 3 * 2 * 16 * 2  # steps, rows of a batch, tokens, choices
    assert set(map(tuple, rows.layers.values())) == {(num_choices // 2, num_choices // 2, 0, 0)}


def test_a_resumed_run_counts_on(stopped_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(stopped_run, tmp_path / "run"))
    train_until(run, 4, "last_step", model=Chosen("mixtral", first_two)(), **SETTINGS)
    rows = RoutedRows.of_rank(content_at(run / STORE)[1].facts, 0)
    assert rows is not None and set(map(tuple, rows.layers.values())) == {(128, 128, 0, 0)}


def test_balanced_stores_take_the_places_of_the_old_ones(run: Path) -> None:
    store = run / STORE
    before, facts = joined(store, 2)
    code, output = lohan("reshard", run, "--num_processes", 2, "--balance")
    assert code == 0, output
    assert output.startswith("by 768 rows of experts, the most loaded rank of each layer has 1.00 times the mean of ")
    assert "2 ranks on 1 node; it had 2.00 times before" in output and "old-store-of-2; you may delete" in output
    owned = owners(store, 2)
    assert len(owned) == 16 and all(owned[layer, 0] != owned[layer, 1] for layer in range(4))
    assert all(sum(owned[layer, expert] for expert in range(4)) == 2 for layer in range(4)), "equally many each"
    assert joined(store, 2) == (before, facts) == joined(store / "old-store-of-2", 2)
    assert lohan("verify", run)[0] == 0
    assert sorted(path.name for path in store.iterdir() if path.is_dir()) == [
        "old-store-of-2",
        "rank-0-of-2",
        "rank-1-of-2",
    ]
    code, output = lohan("reshard", run, "--ranks", 2, "--balance")
    assert code == 2 and "already belong to the ranks to which --balance would give them" in output


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_another_number_of_ranks_divides_experts_in_ranges_again(num_ranks: int, run: Path) -> None:
    store = run / STORE
    before = joined(store, 2)
    balance([str(store)], 2, removes_old=True)
    assert not [*store.glob("old-store*")]
    in_together = Path(shutil.copytree(run, run.parent / "together")) / STORE
    reshard([str(store)], num_ranks, form_of=form_of, removes_old=True)
    assert joined(store, num_ranks) == before
    reshard_to(num_ranks, lambda rank: [in_together])
    assert joined(in_together, num_ranks)[0] == before[0]
    assert num_ranks == 1 or owners(in_together, num_ranks) == owners(store, num_ranks)
    for directory in (store, in_together):
        reshard([str(directory)], 2, form_of=form_of, removes_old=True)
        assert owners(directory, 2)[0, 0] == owners(directory, 2)[0, 1] and joined(directory, 2)[0] == before[0]


def test_stores_of_another_number_of_ranks_are_balanced_beside_the_old_ones(run: Path) -> None:
    store = run / STORE
    before = joined(store, 2)
    resharded = balance([str(store)], 4, num_nodes=2)
    assert not resharded.set_aside and joined(store, 4) == before
    owned = owners(store, 4)
    for layer in range(4):
        nodes = [owned[layer, expert] // 2 for expert in range(4)]
        assert nodes[0] != nodes[1] and sorted(owned[layer, expert] for expert in range(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("part", range(4))
def test_a_killed_balance_keeps_the_old_stores_or_ends_with_the_new_ones(part: int, run: Path, tmp_path: Path) -> None:
    """It is killed at some calls of the operating system, a fourth of them in each case."""
    before = joined(run / STORE, 2)

    def copied(name: str) -> Path:
        return Path(shutil.copytree(run, tmp_path / name)) / STORE

    counted = copied("counted")
    num_calls = in_child(lambda: balance([str(counted)], 2), dies_at=None)
    assert num_calls > 100
    new = owners(counted, 2)
    old = owners(run / STORE, 2)
    dies = [*range(num_calls, num_calls - 24, -1), *range(num_calls - 24, 0, -num_calls // 8)][part::4]
    ends: list[bool] = []
    for dies_at in dies:
        store = copied("killed")
        assert not in_child(lambda store=store: balance([str(store)], 2), dies_at=dies_at)
        finish_moves([[str(store)]], Links.alone())
        owned = owners(store, 2)
        assert owned in (old, new) and joined(store, 2) == before
        ends.append(owned == new)
        again = Path(shutil.copytree(store, tmp_path / "again"))
        if owned == old:
            balance([str(again)], 2)
        assert owners(again, 2) == new and joined(again, 2) == before
        assert not [*again.glob("new-store*")] and not [*again.glob("*/moving-*")]
        shutil.rmtree(tmp_path / "killed")
        shutil.rmtree(again)
    assert set(ends) == {False, True}


def test_what_cannot_be_balanced_is_refused_in_one_line(run: Path, tmp_path: Path) -> None:
    def refused(*args: object) -> str:
        code, output = lohan("reshard", *args)
        assert code == 2, output
        return output

    assert "a single rank owns all experts" in refused(run, "--ranks", 1, "--balance")
    assert "4 ranks on 3 nodes; give each node equally many ranks" in refused(
        run, "--ranks", 4, "--balance", "--nodes", 3
    )
    assert "4 ranks on 0 nodes" in refused(run, "--ranks", 4, "--balance", "--nodes", 0)
    assert "--nodes says how --balance divides experts" in refused(run, "--ranks", 4, "--nodes", 2)
    train_until(tmp_path / "dense", 1)
    assert "has no experts that belong to one rank each" in refused(tmp_path / "dense", "--ranks", 2, "--balance")
    assert not [*(run / STORE).glob("new-store*")] and not [*(tmp_path / "dense" / STORE).glob("rank-*")]


@pytest.mark.parametrize("rows", [None, {"a": [0, 0]}, {"model.layers.0.mlp.experts": [1, 2]}])
def test_a_run_without_counted_rows_is_refused(rows: dict[str, list[int]] | None, run: Path) -> None:
    from hf_lohan.files import IoEngine, StorePath
    from hf_lohan.store import Store

    engine = IoEngine(2, 1 << 20, 1 << 22)
    with Store.open([StorePath(str(run / STORE / "rank-0-of-2"))], model=None, engine=engine) as store:
        form = form_of(store)
    engine.close()
    facts: list[dict[str, Any]] = [{}, {}]
    if rows is not None:
        facts[0]["routed_rows"] = {"rank": 0, "num_nodes": 1, "layers": rows}
    with pytest.raises(ValueError, match="has no counted rows of experts"):
        balanced_owners(form, facts, 2, None, None, "here")


def test_a_plan_knows_the_rows_and_the_owners_of_a_run(run: Path, tmp_path: Path) -> None:
    model = Chosen("mixtral", first_two)()
    model.config.save_pretrained(run)
    model.config.save_pretrained(tmp_path / "model")
    hardware = Path(__file__).parents[2] / "configs" / "hardware" / "rtx4090_desktop.yaml"
    options = ("--batch-size", 2, "--seq-len", 16, "--hardware", hardware, "--ranks", 2, "--expert-parallel", "world")

    def planned(*arguments: object) -> dict[str, Any]:
        code, output = lohan("plan", *arguments, *options, "--json")
        assert code == 0, output
        return json.loads(output)

    assert "most_loaded_rank" not in planned(tmp_path / "model")
    of_run = planned(tmp_path / "model", "--routing", run)
    assert of_run["most_loaded_rank"] == pytest.approx({"now": 2.0, "balanced": 1.0})
    assert planned(run)["most_loaded_rank"] == of_run["most_loaded_rank"], "the run that saved the model"
    _, text = lohan("plan", run, *options)
    assert "the most loaded rank has 2.00 times the mean rows" in " ".join(text.split())
    balance([str(run / STORE)], 2)
    assert planned(run)["most_loaded_rank"] == pytest.approx({"now": 1.0, "balanced": 1.0})
    code, text = lohan("plan", tmp_path / "model", *options, "--routing", tmp_path)
    assert code == 2 and "is not the output folder of an offloaded run" in text
    train_until(tmp_path / "whole", 1, model=expert_model("mixtral"), **SETTINGS | {"experts": "with_layer"})
    code, text = lohan("plan", tmp_path / "model", *options, "--routing", tmp_path / "whole")
    assert code == 2 and "has counted no rows of the experts of this model" in text
