"""The page of architectures: what it says of a class is what training it offloaded and in memory gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import architecture_matrix as matrix
import pytest
import torch
from architecture_matrix import EXACT, EXACT_KEPT, Outcome, class_names, page_of, try_class


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a child of the matrix."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("GptOssForCausalLM", EXACT),  # vectors of four elements, and experts
        ("GPTNeoXJapaneseForCausalLM", EXACT_KEPT),  # cannot recompute
        ("XLNetLMHeadModel", EXACT_KEPT),  # no layer class
    ],
)
def test_classes_that_need_care_are_exact(name: str, what: str, tmp_path: Path) -> None:
    assert try_class(name, tmp_path / "store") == Outcome(name, what)


def test_what_differs_and_what_breaks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = matrix.train_in_memory

    def off_by_one_bit(model: object, make_batch: matrix.Batches, max_norm: float) -> matrix.Trained:
        losses, norms, weights = stock(model, make_batch, max_norm)
        return losses, [norms[0], torch.nextafter(norms[1], torch.tensor(torch.inf))], weights

    monkeypatch.setattr(matrix, "train_in_memory", off_by_one_bit)
    found = try_class("LlamaForCausalLM", tmp_path / "store")
    assert found.what == matrix.WRONG and found.why.startswith("norm: 1 differs by")
    outcomes = list(matrix.outcomes_of(["NoSuchForCausalLM"]))
    assert [one.what for one in outcomes] == [matrix.FAILED] and "NoSuchForCausalLM" in outcomes[0].why


def test_the_page_has_a_row_for_each_class_and_is_that_of_this_transformers() -> None:
    names = class_names()
    assert len(names) == len(set(names)) > 150 and "LlamaForCausalLM" in names
    page = page_of([Outcome(name, EXACT) for name in names])
    assert f"**{len(names)} of {len(names)} are exact**" in page
    assert all(f"| `{name}` | exact |" in page for name in names)
    kept = (Path(__file__).parents[2] / "docs" / "architectures.md").read_text(encoding="utf-8")
    assert "WRONG |" not in kept and json.dumps("FAILED") not in kept
