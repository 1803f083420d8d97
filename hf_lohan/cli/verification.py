"""`lohan verify`: read a store to its end, with a bar, and tell what is wrong; of several ranks, that of each."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from hf_lohan.checkpoint.resume_point import store_paths_of
from hf_lohan.files import IoEngine, StorePath
from hf_lohan.ranks import RanksDisagreeError, newest_of_all
from hf_lohan.store import Store, damaged_files, verify
from hf_lohan.store.rank_folders import rank_folder, ranks_under

_PIECE_BYTES = 4 << 20


def verify_store(given: Sequence[str]) -> bool:
    """Whether every checksum is right. Raises ValueError if there is nothing to check."""
    paths = [str(path) for path in (store_paths_of(given[0]) if len(given) == 1 else given)]
    num_ranks = ranks_under(paths[0])
    console = Console()
    io = IoEngine(num_threads=2, piece_bytes=_PIECE_BYTES, max_inflight_bytes=4 * _PIECE_BYTES)
    are_right, held = True, []
    try:
        for rank in range(num_ranks):
            own = [StorePath(rank_folder(path, rank, num_ranks)) for path in paths]
            with Store.open(own, model=None, engine=io) as store:
                who = f"rank {rank} of {num_ranks}: " if num_ranks > 1 else ""
                are_right &= _verify(store, console, who)
                held.append([(commit.group_id, commit.number) for commit in store.kept_commits])
    finally:
        io.close()
    if num_ranks > 1:
        try:
            console.print(f"all {num_ranks} ranks hold commit {newest_of_all(held)[1]}", highlight=False)
        except RanksDisagreeError as error:
            console.print(str(error), soft_wrap=True, markup=False, highlight=False)
            return False
    return are_right


def _verify(store: Store, console: Console, who: str) -> bool:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    num_damaged = 0
    if store.committed is None:
        raise ValueError(f"nothing is committed in {store.paths[0].path}; there is nothing to check")
    total_bytes = sum(record.num_bytes for record in store.records)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"{who}verifying", total=total_bytes)
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
    console.print(f"{who}{what}: {verdict}")
    return not num_damaged and not files
