"""`lohan verify`: read a store to its end, with a bar, and tell what is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from hf_lohan.checkpoint.resume_point import store_paths_of
from hf_lohan.files import IoEngine, StorePath
from hf_lohan.store import Store, damaged_files, verify

_PIECE_BYTES = 4 << 20


def verify_store(given: Sequence[str]) -> bool:
    """Whether every checksum is right. Raises ValueError if there is nothing to check."""
    paths = store_paths_of(given[0]) if len(given) == 1 else given
    console = Console()
    io = IoEngine(num_threads=2, piece_bytes=_PIECE_BYTES, max_inflight_bytes=4 * _PIECE_BYTES)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    num_damaged = 0
    try:
        with Store.open([StorePath(path) for path in paths], model=None, engine=io) as store:
            if store.committed is None:
                raise ValueError(f"nothing is committed in {store.paths[0].path}; there is nothing to check")
            total_bytes = sum(record.num_bytes for record in store.records)
            with Progress(*columns, console=console, transient=True) as progress:
                task = progress.add_task("verifying", total=total_bytes)
                for verified in verify(store):
                    progress.advance(task, verified.record.num_bytes)
                    for error in verified.errors:
                        num_damaged += 1
                        console.print(str(error), soft_wrap=True, markup=False, highlight=False)
            verdict = "every checksum is right" if not num_damaged else f"{num_damaged} granules are damaged"
            files = damaged_files(store)
            for damage in files:
                console.print(str(damage), soft_wrap=True, markup=False, highlight=False)
            if files:
                verdict = f"{num_damaged} granules and {len(files)} other files are damaged"
            what = f"commit {store.committed.number}, {len(store.records)} records, {total_bytes} bytes"
            console.print(f"{what}: {verdict}")
    finally:
        io.close()
    return not num_damaged and not files
