"""Loads only the rows of a batch to the device, instead of whole embeddings (`embedding: rows`).

It keeps a large vocabulary off the device. Each forward waits until this rank and all other ranks have read rows, so it
is off by default. The core lays out the table and updates its rows, and this annex loads them.
"""

from hf_lohan.annexes.embedding_rows.row_loads import open_rows
