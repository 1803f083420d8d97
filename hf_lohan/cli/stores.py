"""`lohan verify` and `lohan reshard`: read the stores of a run, with a progress bar, and print what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from hf_lohan.checkpoint.resharding import reshard
from hf_lohan.checkpoint.resume_point import store_paths_of
from hf_lohan.files import IoEngine, StorageError, StorePath
from hf_lohan.ranks import RanksDisagreeError, newest_common_commit
from hf_lohan.store import Commit, Store
from hf_lohan.store.manifest import rank_of
from hf_lohan.store.rank_folders import rank_folder, ranks_under, refuse_other_parts
from hf_lohan.wording import times

_PIECE_BYTES = 4 << 20


def _ssd_paths(stores: Sequence[str]) -> list[str]:
    """The ssd paths of a run, from its output folder or as they were given."""
    return [str(path) for path in (store_paths_of(stores[0]) if len(stores) == 1 else stores)]


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=console, transient=True)


def reshard_stores(stores: Sequence[str], num_ranks: int, *, removes_old: bool) -> None:
    """Copy the last step of a run for another number of ranks, and print where it is. Raises as `reshard`."""
    from hf_lohan.huggingface.models.export import described_model  # imports transformers

    with _progress(Console(stderr=True)) as progress:
        task = progress.add_task("copying", total=None)
        resharded = reshard(
            _ssd_paths(stores),
            num_ranks,
            form_of=lambda store: described_model(store)[1],
            removes_old=removes_old,
            on_copied=lambda num_bytes, total_bytes: progress.update(task, total=total_bytes, advance=num_bytes),
        )
    step = resharded.global_step
    what = f"commit {resharded.commit_number}" if step is None else f"step {step}"
    text = f"{what} of {times(resharded.num_ranks_before, 'rank')} is in {', '.join(resharded.folders)}"
    if not removes_old:
        text += (
            "; the old stores stay. While both are there nothing goes on from last_step: delete "
            f"{resharded.old_files} to go on with {times(num_ranks, 'rank')} (--remove-old does), or "
            f"{resharded.new_files} to go on as before, on each ssd path"
        )
    _print(Console(), text)


def verify_stores(stores: Sequence[str]) -> bool:
    """Print whether every checksum is right of what a resume goes on from, and return it. Raises ValueError if there is
    nothing to check."""
    paths = _ssd_paths(stores)
    num_ranks = ranks_under(paths[0])
    console = Console()
    io = IoEngine(num_threads=2, piece_bytes=_PIECE_BYTES, max_inflight_bytes=4 * _PIECE_BYTES)
    try:
        with ExitStack() as stack:
            opened = []
            for rank in range(num_ranks):
                store_paths = [StorePath(rank_folder(path, rank, num_ranks)) for path in paths]
                opened.append(stack.enter_context(Store.open(store_paths, model=None, engine=io)))
            if rank_of(paths[0]) == (0, 1):  # not the folder of one rank alone
                refuse_other_parts(opened)
            return _verify_ranks(opened, console) if opened[1:] else _verify_one(opened[0], console)
    finally:
        io.close()


def _verify_one(store: Store, console: Console) -> bool:
    commit = _kept_by(store)[0]
    verdict = _damage(store, commit, console, "")
    _print(console, f"{_what(store, commit)}: {verdict or 'every checksum is right'}")
    return not verdict


def _verify_ranks(stores: Sequence[Store], console: Console) -> bool:
    """Each at the newest commit that all hold, which is what a resume takes. One rank may be ahead of the others by a
    commit: what is wrong with that is said, but nothing is lost with it."""
    num_ranks = len(stores)
    kept = [_kept_by(store) for store in stores]
    try:
        newest = newest_common_commit([[(commit.group_id, commit.number) for commit in commits] for commits in kept])
    except RanksDisagreeError as error:
        newest, problem = None, str(error)
    are_right = True
    for rank, (store, commits) in enumerate(zip(stores, kept, strict=True)):
        who = f"rank {rank} of {num_ranks}"
        taken = next((commit for commit in commits if (commit.group_id, commit.number) == newest), commits[0])
        verdict = _damage(store, taken, console, f"{who}: ")
        _print(console, f"{who}: {_what(store, taken)}: {verdict or 'every checksum is right'}")
        are_right &= not verdict
        if newest is not None and taken is not commits[0]:
            verdict = _damage(store, commits[0], console, f"{who}, commit {commits[0].number}: ")
            _print(
                console,
                f"{who} is ahead with commit {commits[0].number}, which a resume gives up: "
                + (f"{verdict}, which harms no resume" if verdict else "every checksum is right"),
            )
    _print(console, f"all {num_ranks} ranks hold commit {newest[1]}" if newest is not None else problem)
    return are_right and newest is not None


def _kept_by(store: Store) -> list[Commit]:
    """The newest first. Raises ValueError if there is none."""
    kept = store.kept_commits
    if not kept:
        raise ValueError(f"nothing is committed in {store.paths[0].path}; there is nothing to check")
    return kept


def _damage(store: Store, commit: Commit, console: Console, who: str) -> str:
    """Read what belongs to a commit, and print each damage. Returns how much there is, "" for none."""
    num_damaged = 0
    store.view_commit(commit)
    with _progress(console) as progress:
        task = progress.add_task(f"{who}verifying", total=sum(record.num_bytes for record in store.records))
        for record, errors in store.verify_records():
            progress.advance(task, record.num_bytes)
            for error in errors:
                num_damaged += 1
                _print(console, f"{who}{error}")
    files = store.verify_files() or _useless_journal(store, commit)
    for damage in files:
        _print(console, f"{who}{damage}")
    if files:
        return f"{num_damaged} granules and {len(files)} other files are damaged"
    return f"{num_damaged} granules are damaged" if num_damaged else ""


def _useless_journal(store: Store, commit: Commit) -> list[StorageError]:
    """What is wrong with the journal of a Trainer's step, though its checksum is right."""
    if not commit.facts.get("is_resumable"):
        return []
    from hf_lohan.huggingface.trainer.step_journal import (
        check_journal,  # imports transformers: seconds, after the reading
    )

    try:
        check_journal(commit, store.log, store.paths[0].path)
    except StorageError as error:
        return [error]
    return []


def _what(store: Store, commit: Commit) -> str:
    total_bytes = sum(record.num_bytes for record in store.records)
    return f"commit {commit.number}, {len(store.records)} records, {total_bytes} bytes"


def _print(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)
