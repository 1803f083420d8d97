"""Turns local text files into blocks of token ids for the fine-tuning scripts.

files -> documents (one text each) -> token ids -> blocks {"input_ids", "labels"} of at most `block_size` ids
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError

BUILDERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
"""The reader of `datasets` for each file type."""


def read_documents(files: Sequence[str], *, text_column: str | None = None) -> Dataset:
    """Read the non-empty texts of local files as rows of one column "text".

    A .txt file is one document. Other files have one document per row. Raises ValueError for a file that is missing,
    empty, unreadable or of an unknown type, and for an ambiguous text column.
    """
    builder = _builder_of(files)
    options: dict[str, Any] = {"sample_by": "document"} if builder == "text" else {}
    try:
        rows = load_dataset(builder, data_files=list(files), split="train", **options)
    except (DatasetGenerationError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {', '.join(files)}: {error.__cause__ or error}") from error
    column = _text_column(rows, text_column)
    documents = rows.select_columns([column]).filter(lambda row: bool(row[column] and row[column].strip()))
    if len(documents) == 0:
        raise ValueError(f"{', '.join(files)}: no row has any text in column {column!r}")
    return documents if column == "text" else documents.rename_column(column, "text")


def _builder_of(files: Sequence[str]) -> str:
    for file in files:
        path = Path(file)
        if path.suffix not in BUILDERS:
            raise ValueError(f"{file!r} is not a data file known here; use one of {', '.join(BUILDERS)}")
        if not path.is_file():
            raise ValueError(f"data file {file!r} does not exist; give the path of a local file")
        if path.stat().st_size == 0:
            raise ValueError(f"data file {file!r} is empty")
    builders = {BUILDERS[Path(file).suffix] for file in files}
    if len(builders) != 1:
        raise ValueError(f"data files of different kinds cannot be mixed: {', '.join(files)}; convert them to one")
    return builders.pop()


def _text_column(rows: Dataset, wanted: str | None) -> str:
    if wanted is not None:
        if wanted not in rows.column_names:
            near = difflib.get_close_matches(wanted, rows.column_names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ValueError(f"no column {wanted!r} in the data{hint} Columns: {', '.join(rows.column_names)}")
        if not _holds_text(rows, wanted):
            raise ValueError(f"column {wanted!r} holds {rows.features[wanted]}, not text; set --text_column")
        return wanted
    columns = [name for name in rows.column_names if _holds_text(rows, name)]
    if "text" in columns:
        return "text"
    if not columns:
        raise ValueError(f"no column has text, among {', '.join(rows.column_names)}; give a file with a column of text")
    if len(columns) != 1:
        raise ValueError(f"which column is the text? Columns with text: {', '.join(columns)}; set --text_column")
    return str(columns[0])


def _holds_text(rows: Dataset, column: str) -> bool:
    return getattr(rows.features[column], "dtype", None) in ("string", "large_string")


def make_blocks(documents: Dataset, tokenizer: Any, *, block_size: int, packing: bool) -> Dataset:
    """Tokenize the documents, end each with the end-of-text token, and cut them into rows of at most `block_size`.

    With `packing`, batches of 10,000 documents are joined and cut into rows of exactly `block_size` ids. The tokens at
    the end of a batch that do not fill a row are dropped. Without it each document is a row, which is truncated if it
    is longer. Raises ValueError if
    the result has no rows.
    """

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = [_closed(ids, tokenizer.eos_token_id) for ids in tokenizer(batch["text"])["input_ids"]]
        rows = cut(encoded, block_size) if packing else [ids[:block_size] for ids in encoded]
        return {"input_ids": rows, "labels": [list(row) for row in rows]}

    # Each batch drops the tokens that do not fill its last block, so use large batches to lose few tokens.
    blocks = documents.map(
        tokenize, batched=True, batch_size=10_000, remove_columns=documents.column_names, desc="tokenizing"
    )
    if len(blocks) == 0:
        raise ValueError(f"the data has fewer tokens than one block of {block_size}; lower --block_size or add data")
    return blocks


def _closed(ids: list[int], end: int | None) -> list[int]:
    return ids if end is None or (ids and ids[-1] == end) else [*ids, end]


def cut(rows: Sequence[list[int]], block_size: int) -> list[list[int]]:
    """Join rows, and cut them into blocks of exactly `block_size`. The rest is dropped."""
    joined = list(chain.from_iterable(rows))
    return [joined[start : start + block_size] for start in range(0, len(joined) - block_size + 1, block_size)]


def split_off(blocks: Dataset, percentage: float) -> DatasetDict:
    """Split off the last `percentage` of the blocks. Returns {"train", "validation"}, each with at least one block."""
    num_validation = max(1, round(len(blocks) * percentage / 100))
    num_train = len(blocks) - num_validation
    if not 0 < percentage < 100 or num_train < 1:
        raise ValueError(
            f"cannot set {percentage}% of {len(blocks)} blocks aside for validation; "
            "give --validation_file, more data or another --validation_split_percentage"
        )
    return DatasetDict(train=blocks.select(range(num_train)), validation=blocks.select(range(num_train, len(blocks))))
