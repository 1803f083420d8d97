"""Reading text files and cutting texts into blocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import text_data
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

TEXTS = ["first document\nof two lines", "second, with ünïcode", "third"]


def write(path: Path, texts: list[str], *, column: str = "text") -> str:
    rows = Dataset.from_dict({column: texts, "number": list(range(len(texts)))})
    match path.suffix:
        case ".parquet":
            rows.to_parquet(path)
        case ".csv":
            rows.to_csv(path)
        case ".json":
            path.write_text(json.dumps([dict(row) for row in rows]))
        case ".jsonl":
            path.write_text("".join(json.dumps(dict(row)) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet", ".csv"])
@pytest.mark.parametrize("column", ["text", "body"])
def test_a_row_is_a_document(suffix: str, column: str, tmp_path: Path) -> None:
    documents = text_data.read_documents([write(tmp_path / f"data{suffix}", TEXTS, column=column)])
    assert documents.column_names == ["text"]
    assert list(documents["text"]) == TEXTS


def test_a_text_file_is_a_document(tmp_path: Path) -> None:
    files = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for file, text in zip(files, TEXTS, strict=False):
        file.write_text(text)
    assert list(text_data.read_documents([str(file) for file in files])["text"]) == TEXTS[:2]


def test_empty_texts_are_left_out(tmp_path: Path) -> None:
    documents = text_data.read_documents([write(tmp_path / "data.jsonl", ["", TEXTS[0], "  \n"])])
    assert list(documents["text"]) == TEXTS[:1]


def test_the_named_column_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"title": "a", "body": "b"}) + "\n")
    assert list(text_data.read_documents([str(path)], text_column="body")["text"]) == ["b"]


@pytest.mark.parametrize(
    ("name", "content", "column", "message"),
    [
        ("missing.txt", None, None, "does not exist"),
        ("data.xml", "<a/>", None, "not a data file known here; use one of .txt"),
        ("data.txt", "", None, "is empty"),
        ("data.json", "{ not json", None, "cannot read"),
        ("data.txt", " \n ", None, "no row has any text"),
        ("data.jsonl", '{"a": "x", "b": "y"}\n', None, "Columns with text: a, b; set --text_column"),
        ("data.jsonl", '{"number": 1}\n', None, "no column has text, among number"),
        ("data.jsonl", '{"content": "x"}\n', "contnet", "no column 'contnet' in the data; did you mean 'content'?"),
        ("data.jsonl", '{"number": 1}\n', "number", "not text"),
    ],
)
def test_bad_files_are_refused(
    name: str, content: str | None, column: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        text_data.read_documents([str(path)], text_column=column)


def test_files_of_different_kinds_are_refused(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.jsonl", TEXTS), write(tmp_path / "b.csv", TEXTS)]
    with pytest.raises(ValueError, match="different kinds"):
        text_data.read_documents(files)


@given(
    rows=st.lists(st.lists(st.integers(0, 9), max_size=20), max_size=10),
    block_size=st.integers(min_value=1, max_value=9),
)
def test_cutting_keeps_the_order_and_drops_less_than_a_block(rows: list[list[int]], block_size: int) -> None:
    joined = [token for row in rows for token in row]
    blocks = text_data.cut(rows, block_size)
    assert all(len(block) == block_size for block in blocks)
    kept = [token for block in blocks for token in block]
    assert kept == joined[: len(kept)]
    assert len(joined) - len(kept) < block_size


def test_packed_blocks_separate_documents_by_ends(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = ["block 1 goes down", "block 2 comes back", "it is its turn"]
    blocks = text_data.make_blocks(Dataset.from_dict({"text": texts}), tokenizer, block_size=4, packing=True)
    assert {len(row) for row in blocks["input_ids"]} == {4}
    assert list(blocks["labels"]) == list(blocks["input_ids"])
    text = tokenizer.decode([token for row in blocks["input_ids"] for token in row])
    assert "<end>".join([*texts, ""]).startswith(text)
    assert text.count("<end>") >= 2


def test_without_packing_a_row_is_a_truncated_document(tokenizer: PreTrainedTokenizerFast) -> None:
    documents = Dataset.from_dict({"text": ["block", "block " * 100]})
    blocks = text_data.make_blocks(documents, tokenizer, block_size=16, packing=False)
    short, long = blocks["input_ids"]
    assert tokenizer.decode(short) == "block<end>"
    assert len(long) == 16


def test_too_little_data_for_one_block_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="fewer tokens than one block of 512"):
        text_data.make_blocks(Dataset.from_dict({"text": TEXTS}), tokenizer, block_size=512, packing=True)


@pytest.mark.parametrize(("percentage", "num_validation"), [(5.0, 1), (30.0, 3), (89.0, 9)])
def test_the_last_blocks_are_held_out(percentage: float, num_validation: int) -> None:
    parts = text_data.split_off(Dataset.from_dict({"number": list(range(10))}), percentage)
    assert list(parts["train"]["number"]) == list(range(10 - num_validation))
    assert list(parts["validation"]["number"]) == list(range(10 - num_validation, 10))


@pytest.mark.parametrize(("num_blocks", "percentage"), [(1, 5.0), (10, 0.0), (10, 100.0), (10, 99.0)])
def test_a_split_needs_blocks_on_both_sides(num_blocks: int, percentage: float) -> None:
    with pytest.raises(ValueError, match="validation_split_percentage"):
        text_data.split_off(Dataset.from_dict({"number": list(range(num_blocks))}), percentage)
