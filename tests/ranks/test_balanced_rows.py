"""Ranks that compute rows for each other's experts equal one torch process, and the most loaded rank has fewer rows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import slow_but
from divided_experts import (
    CHOICES,
    FAMILIES,
    Chosen,
    Trained,
    check_equal,
    check_ranks,
    half_to_one,
    train_rank,
    train_stock,
)
from equal_tensors import assert_same_tensors
from expert_models import expert_model
from training_ranks import assert_same_ranks

from hf_lohan.experts import BalancedRows
from hf_lohan.model import find_experts
from hf_lohan.ranks import Links
from hf_lohan.testing.thread_ranks import run_ranks


def check_balanced(trained: list[Trained]) -> BalancedRows:
    """Check that ranks moved rows, and that all know the same numbers. Returns them."""
    for ours in trained:
        assert ours.rows is not None and ours.rows == trained[0].rows
        assert ours.rows.most_computed < ours.rows.most_owned and sum(ours.rows.owned) == sum(ours.rows.computed)
    assert trained[0].rows is not None
    return trained[0].rows


@pytest.mark.parametrize("family", slow_but(("mixtral",), FAMILIES))
def test_ranks_of_a_node_share_the_rows_of_a_hot_expert(family: str, tmp_path: Path) -> None:
    rows = check_balanced(
        check_ranks(4, tmp_path, Chosen(family, half_to_one), recompute=True, **{"experts.balance": 1})
    )
    mean = sum(rows.owned) / 4
    assert rows.most_owned / mean > 2 and rows.most_computed / mean <= 1.25, rows


@pytest.mark.slow
def test_nodes_balance_their_rows_and_pass_them_on(tmp_path: Path) -> None:
    make_model = Chosen("mixtral", half_to_one)
    rows = check_balanced(check_ranks(4, tmp_path, make_model, num_local=2, recompute=True, **{"experts.balance": 1}))
    for node in (slice(0, 2), slice(2, 4)):
        assert sum(rows.owned[node]) == sum(rows.computed[node])


@pytest.mark.slow
@pytest.mark.parametrize("num_local", [2, 4])
@pytest.mark.parametrize("least_rows", [1, 6])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_that_balance_rows_train_as_one_process(
    family: str, least_rows: int, num_local: int, tmp_path: Path
) -> None:
    trained = check_ranks(
        4, tmp_path, partial(expert_model, family), num_local=num_local, **{"experts.balance": least_rows}
    )
    check_balanced(trained)


LAZY = (False, True)
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{f"{choice}, lazy {lazy}": (CHOICES[choice], {"experts.lazy": lazy}) for choice in CHOICES for lazy in LAZY},
    **{f"joint {joint}": (half_to_one, {"accumulation": 2, "is_joint": joint}) for joint in (False, True)},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_balanced_rows_in_each_way(way: str, tmp_path: Path) -> None:
    choose, settings = WAYS[way]
    trained = check_ranks(4, tmp_path, Chosen("mixtral", choose), recompute=True, **{"experts.balance": 1}, **settings)
    if "experts.lazy" in settings:
        check_balanced(trained)
        assert any(ours.num_behind for ours in trained) == settings["experts.lazy"]


@pytest.mark.slow
def test_balanced_rows_are_computed_again_for_some_ranks(tmp_path: Path) -> None:
    def train(links: Links) -> Trained:
        recompute = links.ranks.rank > 0
        return train_rank(
            links, tmp_path, Chosen("mixtral", half_to_one), recompute=recompute, **{"experts.balance": 1}
        )

    check_equal(run_ranks(4, train), train_stock(Chosen("mixtral", half_to_one), 4))


@pytest.mark.slow
def test_balanced_rows_in_bfloat16(tmp_path: Path) -> None:
    make_model = Chosen("mixtral", half_to_one)
    settings: dict[str, Any] = {"dtype": torch.bfloat16}
    alone = train_rank(Links.alone(), tmp_path / "alone", make_model, accumulation=2, **settings)
    trained = run_ranks(2, lambda links: train_rank(links, tmp_path, make_model, **{"experts.balance": 1}, **settings))
    check_balanced(trained)
    for ours in trained:
        assert_same_tensors(ours.weights, alone.weights)


@pytest.mark.slow
def test_ranks_lend_frozen_experts(tmp_path: Path) -> None:
    def make_model() -> Any:
        model = Chosen("mixtral", half_to_one)()
        for experts in find_experts(model).values():
            experts.module.requires_grad_(False)
        return model

    without = run_ranks(4, lambda links: train_rank(links, tmp_path / "without", make_model))
    trained = run_ranks(4, lambda links: train_rank(links, tmp_path, make_model, **{"experts.balance": 1}))
    check_balanced(trained)
    assert_same_ranks(trained, without)
