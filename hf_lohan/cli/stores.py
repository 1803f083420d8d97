"""`lohan verify`: reads the stores of a run, shows a progress bar, and prints the result."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from hf_lohan.checkpoint.generations import newest_common_commits, opened_stores
from hf_lohan.checkpoint.resume_point import store_paths_of
from hf_lohan.files import StorageError
from hf_lohan.ranks import RanksDisagreeError
from hf_lohan.store import Commit, Store
from hf_lohan.store.manifest import rank_of
from hf_lohan.store.rank_folders import refuse_other_parts


def ssd_paths_of(stores: Sequence[str]) -> list[list[str]]:
    """Return the ssd paths of each rank. ``stores`` is the run's output folder, or the paths that all ranks share."""
    return store_paths_of(stores[0]) if len(stores) == 1 else [[*map(str, stores)]]


def verify_stores(stores: Sequence[str]) -> bool:
    """Check all data that a resume reads, print the result, and return whether every checksum is right. Raises
    ValueError if nothing is committed."""
    paths, console = ssd_paths_of(stores), Console()
    with opened_stores(paths) as opened:
        if rank_of(paths[0][0]) == (0, 1):  # the path is not the folder of one rank among several
            refuse_other_parts(opened)
        return _verify_ranks(opened, console) if opened[1:] else _verify_one(opened[0], console)


def _verify_one(store: Store, console: Console) -> bool:
    commit = newest_common_commits([store])[0]
    verdict = _damage(store, commit, console, "")
    print_line(console, f"{_contents(store, commit)}: {verdict or 'every checksum is right'}")
    return not verdict


def _verify_ranks(stores: Sequence[Store], console: Console) -> bool:
    """Check each rank's store at the newest commit that all ranks have. A resume reads this commit. A rank may be one
    commit ahead of the others. Damage in its newer commit is printed, but a resume does not read it."""
    num_ranks = len(stores)
    newest = [store.kept_commits[:1] for store in stores]
    problem = ""
    try:
        commits = newest_common_commits(stores)
    except RanksDisagreeError as error:
        commits, problem = [kept[0] for kept in newest], str(error)
    are_right = True
    for rank, (store, commit, (last,)) in enumerate(zip(stores, commits, newest, strict=True)):
        who = f"rank {rank} of {num_ranks}"
        verdict = _damage(store, commit, console, f"{who}: ")
        print_line(console, f"{who}: {_contents(store, commit)}: {verdict or 'every checksum is right'}")
        are_right &= not verdict
        if commit.number != last.number:
            verdict = _damage(store, last, console, f"{who}, commit {last.number}: ")
            print_line(
                console,
                f"{who} also has commit {last.number}, which a resume drops: "
                + (f"{verdict}, which does not affect a resume" if verdict else "every checksum is right"),
            )
    print_line(console, problem or f"all {num_ranks} ranks hold commit {commits[0].number}")
    return are_right and not problem


def _damage(store: Store, commit: Commit, console: Console, who: str) -> str:
    """Read all data of a commit, and print each damaged part. Returns a summary, or "" for no damage."""
    num_damaged = 0
    store.view_commit(commit)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(f"{who}verifying", total=sum(record.num_bytes for record in store.records))
        for record, errors in store.verify_records():
            progress.advance(task, record.num_bytes)
            for error in errors:
                num_damaged += 1
                print_line(console, f"{who}{error}")
    files = store.verify_files() or _journal_errors(store, commit)
    for damage in files:
        print_line(console, f"{who}{damage}")
    if files:
        return f"{num_damaged} granules and {len(files)} other files are damaged"
    return f"{num_damaged} granules are damaged" if num_damaged else ""


def _journal_errors(store: Store, commit: Commit) -> list[StorageError]:
    """Return the errors in the journal of a Trainer's step that the journal's checksum does not show."""
    if not commit.facts.get("is_resumable"):
        return []
    from hf_lohan.huggingface.trainer.step_journal import (
        check_journal,  # imports transformers, which takes seconds
    )

    try:
        check_journal(commit, store.log, store.paths[0].path)
    except StorageError as error:
        return [error]
    return []


def _contents(store: Store, commit: Commit) -> str:
    total_bytes = sum(record.num_bytes for record in store.records)
    return f"commit {commit.number}, {len(store.records)} records, {total_bytes} bytes"


def print_line(console: Console, text: str) -> None:
    """Print a sentence unchanged. The terminal may wrap it."""
    console.print(text, soft_wrap=True, markup=False, highlight=False)
