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
from planned_models import one_plan_alone
from resharded_stores import STORE, content_at, in_child, newest_folder, reshard_to
from short_runs import train_until
from torch import Tensor
from typer.testing import CliRunner

import hf_lohan
from hf_lohan.annexes.resharding import reshard as resharding
from hf_lohan.annexes.resharding.reshard import balanced_owners, reshard
from hf_lohan.cli import app
from hf_lohan.config import OffloadConfig
from hf_lohan.experts import RoutedRows
from hf_lohan.files import CapacityError, IoEngine, StorePath
from hf_lohan.huggingface.models.export import described_model
from hf_lohan.huggingface.ranks import at_stores
from hf_lohan.model import owners_as_stored
from hf_lohan.ranks import Links
from hf_lohan.store import Commit, Store
from hf_lohan.store.commits import ImmediateAgreement
from hf_lohan.store.manifest import read_manifest
from hf_lohan.testing.thread_ranks import run_ranks

EXPERT = re.compile(r"model\.layers\.(\d)\.mlp\.experts\.(\d)")
SETTINGS: dict[str, Any] = {"experts": "streamed", "experts.lazy": False, "cpu_memory": "16MiB"}


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
    reshard([[str(run / STORE)]], 2, removes_old=True)
    return run


balance = partial(reshard, balances=True)


def lohan(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.stderr.splitlines()[-1] if result.exit_code == 2 else result.stdout


def owners(directory: Path, num_ranks: int) -> dict[tuple[int, int], int]:
    """Return the rank of each expert by (layer, expert), and check that each expert has one."""
    found: dict[tuple[int, int], int] = {}
    for rank in range(num_ranks):
        manifest = read_manifest(str(newest_folder(directory, rank, num_ranks)))
        assert manifest is not None
        names = {record.block for record in manifest.layout.records}
        for match in filter(None, map(EXPERT.fullmatch, names)):
            assert found.setdefault((int(match[1]), int(match[2])), rank) == rank
    return found


def joined(directory: Path, num_ranks: int) -> tuple[dict[tuple[str, str], bytes], Any]:
    """Return the whole records of all ranks' stores, and the facts of rank 0."""
    parts: dict[tuple[str, str], list[bytes]] = {}
    of_ranks = [content_at(newest_folder(directory, rank, num_ranks)) for rank in range(num_ranks)]
    for content, _ in of_ranks:
        for name, of_part in content.items():
            parts.setdefault(name, []).append(bytes(of_part))
    return {name: b"".join(of) for name, of in parts.items()}, own_facts(of_ranks[0][1])


def own_facts(commit: Commit) -> dict[str, Any]:
    """Return the facts without those that say of which stores it is a copy."""
    return {name: fact for name, fact in commit.facts.items() if not name.startswith("cut_from")}


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


def test_balanced_stores_continue_in_place_of_the_old_ones(run: Path) -> None:
    store = run / STORE
    before, facts = joined(store, 2)
    code, output = lohan("reshard", run, "--num_processes", 2, "--balance")
    assert code == 0, output
    assert output.startswith("in 768 counted rows of experts, the most loaded rank of a layer has on average 1.00 ")
    assert (
        "(2 ranks on 1 node); before it was 2.00 times" in output
        and "you may delete the folders rank-*-of-2.g1" in output
    )
    owned = owners(store, 2)
    assert len(owned) == 16 and all(owned[layer, 0] != owned[layer, 1] for layer in range(4))
    assert all(sum(owned[layer, expert] for expert in range(4)) == 2 for layer in range(4)), "equally many each"
    assert joined(store, 2) == (before, facts)
    assert lohan("verify", run)[0] == 0 and hf_lohan.last_step(run) == 3
    names = [f"rank-{rank}-of-2.g{generation}" for rank in range(2) for generation in (1, 2)]
    assert sorted(path.name for path in store.iterdir() if path.is_dir()) == names
    code, output = lohan("reshard", run, "--ranks", 2, "--balance")
    assert code == 2 and "already belong to the ranks to which --balance would give them" in output


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_another_number_of_ranks_divides_experts_in_ranges_again(num_ranks: int, run: Path) -> None:
    store = run / STORE
    before = joined(store, 2)
    balance([[str(store)]], 2, removes_old=True)
    assert not [*store.glob("rank-*.g1")]
    in_together = Path(shutil.copytree(run, run.parent / "together")) / STORE
    reshard([[str(store)]], num_ranks, removes_old=True)
    assert joined(store, num_ranks) == before
    reshard_to(num_ranks, lambda rank: [in_together])
    assert joined(in_together, num_ranks)[0] == before[0]
    assert num_ranks == 1 or owners(in_together, num_ranks) == owners(store, num_ranks)
    for directory in (store, in_together):
        reshard([[str(directory)]], 2, removes_old=True)
        assert owners(directory, 2)[0, 0] == owners(directory, 2)[0, 1] and joined(directory, 2)[0] == before[0]


def test_stores_of_another_number_of_ranks_are_balanced_beside_the_old_ones(run: Path) -> None:
    store = run / STORE
    before = joined(store, 2)
    balance([[str(store)]], 4, num_nodes=2)
    assert joined(store, 4) == before
    owned = owners(store, 4)
    for layer in range(4):
        nodes = [owned[layer, expert] // 2 for expert in range(4)]
        assert nodes[0] != nodes[1] and sorted(owned[layer, expert] for expert in range(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("num_kills", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_a_killed_balance_keeps_the_old_stores_or_ends_with_the_new_ones(
    num_kills: int, run: Path, tmp_path: Path
) -> None:
    """It is killed at some calls of the operating system. Owners are read in the stores that continue."""
    before, old, model = joined(run / STORE, 2), owners(run / STORE, 2), expert_model("mixtral")
    counted = Path(shutil.copytree(run, tmp_path / "counted")) / STORE
    num_calls = in_child(lambda: balance([[str(counted)]], 2), dies_at=None)
    assert num_calls > 100
    new, ends = owners(counted, 2), []
    for dies_at in (
        *range(num_calls, num_calls - num_kills // 2, -1),
        *range(1, num_calls, 2 * num_calls // num_kills),
    ):
        store = Path(shutil.copytree(run, tmp_path / "killed")) / STORE
        assert not in_child(lambda store=store: balance([[str(store)]], 2), dies_at=dies_at)

        def on_rank(links: Links, store: Path = store) -> dict[str, int] | None:
            config, found = at_stores(OffloadConfig.load({"ssd": str(store)}), "", links)
            assert found.state == "own"
            return owners_as_stored(model, config, links)

        told, other = run_ranks(2, on_rank)
        owned = {tuple(map(int, EXPERT.fullmatch(name).groups())): rank for name, rank in told.items()}
        assert told == other and owned in (old, new), dies_at
        ends.append(owned == new)
        if owned == old:
            balance([[str(store)]], 2)
        assert owners(store, 2) == new and joined(store, 2) == before
        shutil.rmtree(tmp_path / "killed")
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
    assert "--nodes is only used with --balance" in refused(run, "--ranks", 4, "--nodes", 2)
    train_until(tmp_path / "dense", 1)
    assert "has no experts that belong to one rank each" in refused(tmp_path / "dense", "--ranks", 2, "--balance")
    assert not [*(run / STORE).glob("rank-*.g2")] and not [*(tmp_path / "dense" / STORE).glob("rank-*")]


@pytest.mark.parametrize("rows", [None, {"a": [0, 0]}, {"model.layers.0.mlp.experts": [1, 2]}])
def test_a_run_without_counted_rows_is_refused(rows: dict[str, list[int]] | None, run: Path) -> None:
    engine = IoEngine(2, 1 << 20, 1 << 22)
    with Store.open([StorePath(str(run / STORE / "rank-0-of-2.g1"))], model=None, engine=engine) as store:
        _, form = described_model(store)
    engine.close()
    facts: list[dict[str, Any]] = [{}, {}]
    if rows is not None:
        facts[0]["routed_rows"] = {"rank": 0, "num_nodes": 1, "layers": rows}
    with pytest.raises(ValueError, match="has no counted rows of experts"):
        balanced_owners(form, facts, 2, None, None, "here")


@pytest.mark.slow
def test_a_plan_knows_the_rows_and_the_owners_of_a_run(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Chosen("mixtral", first_two)()
    model.config.save_pretrained(run)
    model.config.save_pretrained(tmp_path / "model")
    hardware = Path(__file__).parents[2] / "configs" / "hardware" / "rtx4090_desktop.yaml"
    options = ("--batch-size", 2, "--seq-len", 16, "--hardware", hardware, "--ranks", 2, "--expert-parallel", "world")

    def lohan_plan(*arguments: object) -> tuple[int, str]:
        with one_plan_alone():
            return lohan("plan", *arguments, *options)

    def planned(*arguments: object) -> dict[str, Any]:
        code, output = lohan_plan(*arguments, "--json")
        assert code == 0, output
        return json.loads(output)

    assert "most_loaded_rank" not in planned(tmp_path / "model")
    of_run = planned(tmp_path / "model", "--routing", run)
    assert of_run["most_loaded_rank"] == pytest.approx({"now": 2.0, "balanced": 1.0})
    assert planned(run)["most_loaded_rank"] == of_run["most_loaded_rank"], "the run that saved the model"
    _, text = lohan_plan(run)
    assert "the most loaded rank has 2.00 times the mean rows" in " ".join(text.split())
    # With 32 tokens of a rank and 2 choices of each, the two hot experts have 32 rows of each rank.
    offload = tmp_path / "balance.yaml"
    offload.write_text("experts.balance: 32\n")
    lending = {"now": 1.0, "balanced": 1.0, "owned": 2.0}
    assert planned(run, "--offload", offload)["most_loaded_rank"] == pytest.approx(lending)
    _, text = lohan("plan", run, *options, "--offload", offload)
    assert "with experts.balance the most loaded rank computes 1.00 times the mean" in " ".join(text.split())
    balance([[str(run / STORE)]], 2)
    assert planned(run)["most_loaded_rank"] == pytest.approx({"now": 1.0, "balanced": 1.0})
    newest_folder(run / STORE, 1, 2).rename(run / "gone")
    shutil.rmtree(run / STORE / "rank-1-of-2.g1")
    caplog.clear()
    assert "most_loaded_rank" not in planned(run), "a store is gone"
    assert f"planned without the routing of the run in {run}: " in caplog.text
    code, text = lohan_plan(tmp_path / "model", "--routing", run)
    assert code == 2 and "the store of rank 1 of 2 is not under" in text
    code, text = lohan_plan(tmp_path / "model", "--routing", tmp_path)
    assert code == 2 and "is not the output folder of an offloaded run" in text
    train_until(tmp_path / "whole", 1, model=expert_model("mixtral"), **SETTINGS | {"experts": "with_layer"})
    code, text = lohan_plan(tmp_path / "model", "--routing", tmp_path / "whole")
    assert code == 2 and "has counted no rows of the experts of this model" in text


def test_stores_without_a_commit_decide_no_owners(run: Path) -> None:
    balance([[str(run / STORE)]], 2)
    for path in (run / STORE).glob("rank-*/*.safetensors"):
        path.unlink()
    model = expert_model("mixtral")

    def on_rank(links: Links) -> dict[str, int] | None:
        config, _ = at_stores(OffloadConfig.load({"ssd": str(run / STORE)}), "", links)
        return owners_as_stored(model, config, links)

    assert run_ranks(2, on_rank) == [None, None]


def test_a_failed_balance_leaves_no_new_stores(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = joined(run / STORE, 2)
    names = sorted(path.name for path in (run / STORE).iterdir())

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise CapacityError([])

    with monkeypatch.context() as patch, pytest.raises(CapacityError):
        patch.setattr(resharding, "copy_records", fails)
        balance([[str(run / STORE)]], 2)
    assert sorted(path.name for path in (run / STORE).iterdir()) == names
    assert joined(run / STORE, 2) == before


def test_each_rank_keeps_its_own_facts_if_experts_are_balanced(run: Path) -> None:
    """As the sums of its losses since the last log, whose means an equal number of ranks does not need."""
    store = run / STORE
    for rank in range(2):
        folder = store / f"rank-{rank}-of-2.g1"
        engine = IoEngine(2, 1 << 20, 1 << 22)
        with Store.open([StorePath(str(folder))], model=None, engine=engine) as opened:
            last = opened.committed
            assert last is not None
            opened.agree_on_commits(ImmediateAgreement(last.group_id))
            facts = {**last.facts, "trainer": {**last.facts["trainer"], "loss_sum": 1.0 + rank}}
            opened.commit(facts, last.journal, opened.log, model_files=opened.model_files)
        engine.close()
    before = [own_facts(content_at(newest_folder(store, rank, 2))[1]) for rank in range(2)]
    assert before[0]["trainer"] != before[1]["trainer"]
    balance([[str(store)]], 2)
    assert [own_facts(content_at(newest_folder(store, rank, 2))[1]) for rank in range(2)] == before


ROWS = {"rank": 0, "num_nodes": 1, "layers": {"a": [1, 2]}}


@pytest.mark.parametrize(
    ("fact", "is_read"),
    [
        (ROWS, True),
        (ROWS | {"a field of a later version": 3}, True),
        ({"num_nodes": 1, "layers": {}}, False),
        ({"rank": 0, "layers": {"a": [1, 2]}}, False),
        (ROWS | {"layers": [1, 2]}, False),
        (ROWS | {"layers": {"a": [1, "b"]}}, False),
        ("text", False),
    ],
)
def test_rows_that_another_version_has_counted_are_read_or_ignored(fact: Any, is_read: bool) -> None:
    facts = {"routed_rows": fact}
    expected = RoutedRows(0, 1, {"a": [1, 2]}) if is_read else None
    assert RoutedRows.of_rank(facts, 0) == RoutedRows.of_all([facts, {}]) == expected
    of_another = {"routed_rows": {"rank": 1, "num_nodes": 1, "layers": {"b": [1, 2]}}}
    assert RoutedRows.of_all([{"routed_rows": ROWS}, of_another]) is None
    of_another["routed_rows"] = {**ROWS, "rank": 1, "layers": {"a": [1, 2, 3]}}
    assert RoutedRows.of_all([{"routed_rows": ROWS}, of_another]) is None


def test_balanced_stores_of_another_number_of_ranks_had_no_loads_before(run: Path) -> None:
    code, output = lohan("reshard", run, "--num_processes", 4, "--balance")
    assert code == 0 and "without --balance it would be 2.00 times" in output and "before" not in output.split(";")[1]
