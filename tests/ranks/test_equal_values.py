"""What ranks find alone is compared, and the first difference is named on every rank."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from training_ranks import rank_engine

from hf_lohan.ranks import Links, RankFailedError, RanksDisagreeError, check_equal
from hf_lohan.testing.models import tiny_model
from hf_lohan.testing.thread_ranks import rank_outcomes


def check_by_ranks(*values: dict[str, Any]) -> list[BaseException | None]:
    """Let each rank check its values, and return the errors of all ranks."""

    def check(links: Links) -> None:
        check_equal("the numbers", lambda: values[links.ranks.rank], links, "give all ranks the same")

    return [outcome.error for outcome in rank_outcomes(len(values), check)]


def test_equal_values_pass() -> None:
    values = {"a": 1, "b": [0.1, None, "c"], "d": {"e": float("inf")}, "f": torch.float64}
    assert check_by_ranks(values, dict(values), dict(values)) == [None] * 3


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ({"a": 1, "b": 0.2}, "b is 0.1 on rank 0 and 0.2 on rank 2; give all ranks the same"),
        ({"a": 1}, "b is 0.1 on rank 0 and missing on rank 2; give all ranks the same"),
        ({"a": 1, "b": 0.1, "c": None}, "c is missing on rank 0 and null on rank 2; give all ranks the same"),
        ({"a": True, "b": 0.2}, "a is 1 on rank 0 and true on rank 2; give all ranks the same"),
        ({"b": 0.1, "a": 1}, "the numbers have a different order on one of the ranks; give all ranks the same"),
    ],
)
def test_the_first_difference_is_named_on_every_rank(theirs: dict[str, Any], expected: str) -> None:
    errors = check_by_ranks({"a": 1, "b": 0.1}, {"a": 1, "b": 0.1}, theirs)
    assert any(isinstance(error, RanksDisagreeError) for error in errors)
    assert all(isinstance(error, RanksDisagreeError | RankFailedError) and expected in str(error) for error in errors)


def test_a_single_rank_compares_nothing() -> None:
    check_equal("the numbers", lambda: pytest.fail("it looked for values"), Links.alone(), "")


def open_by_ranks(folder: Path, *of_ranks: dict[str, Any]) -> list[str]:
    """Let each rank open an engine for its model, and return the errors. ``of_ranks``: what each rank has of its own.
    ``frozen``: the name of the module that it freezes."""

    def open_one(links: Links) -> None:
        own = {"frozen": "", **of_ranks[links.ranks.rank]}
        frozen = own.pop("frozen")

        def make_model() -> Any:
            model = tiny_model("llama", num_layers=2)
            if frozen:
                model.get_submodule(frozen).requires_grad_(False)
            return model

        with rank_engine(links, folder, make_model, **own):
            pass

    return [str(outcome.error) for outcome in rank_outcomes(len(of_ranks), open_one)]


@pytest.mark.parametrize(
    ("setting", "of_ranks", "expected"),
    [
        ("ranks.transport", ["auto", "host"], 'transport is "auto" on rank 0 and "host" on rank 1; give all ranks'),
        ("ranks.collectives", [{"gradients": "int8"}, {"gradients": "int4"}], "give all ranks the same settings"),
    ],
)
def test_settings_that_differ_are_refused(tmp_path: Path, setting: str, of_ranks: list[Any], expected: str) -> None:
    assert all(expected in error for error in open_by_ranks(tmp_path, *({setting: own} for own in of_ranks)))


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1", "expected"),
    [
        ({}, {"frozen": "model.layers.1.mlp"}, r"layers.1.mlp.gate_proj.weight is .trained, .* and .frozen, .*rank 1"),
        (
            {"frozen": "model.layers.0.mlp"},
            {"frozen": "model.layers.1.mlp"},
            r"layers.0.mlp.gate_proj.weight is .frozen, .* on rank 0 and .trained, .* on rank 1",
        ),
        ({}, {"dtype": torch.bfloat16}, r"embed_tokens.weight is .*float32.* on rank 0 and .*bfloat16.* on rank 1"),
        ({}, {"hold_gradients": False}, "holds_gradients is true on rank 0 and false on rank 1"),
    ],
    ids=["one_froze", "froze_others", "dtype", "no_clip"],
)
def test_models_that_differ_are_refused(
    tmp_path: Path, of_rank_0: dict[str, Any], of_rank_1: dict[str, Any], expected: str
) -> None:
    """At once, by name, and before a store is made."""
    errors = open_by_ranks(tmp_path, of_rank_0, of_rank_1)
    assert all(re.search(expected, error) for error in errors), errors
    assert all("the same model with the same weights frozen" in error for error in errors)
    assert not any(tmp_path.iterdir())
