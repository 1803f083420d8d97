"""`lohan reshard`: the last step of a run, cut for another number of ranks."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import ExitStack

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from hf_lohan.checkpoint.resharded_step import facts_of_all, journal_of_rank
from hf_lohan.checkpoint.resume_point import store_paths_of
from hf_lohan.files import IoEngine, StorePath
from hf_lohan.files.directories import make_folders
from hf_lohan.files.durable_file import remove_folder
from hf_lohan.huggingface.export import described_model
from hf_lohan.model import StoredForm, records_of_rank
from hf_lohan.ranks import RanksDisagreeError, newest_common_commit
from hf_lohan.store import Commit, RecordSpec, Store
from hf_lohan.store.rank_folders import files_of, rank_folder, ranks_under, stores_under, why_incomplete
from hf_lohan.store.resharding import NumberedAgreement, copy_records
from hf_lohan.store.store_folders import remove_store
from hf_lohan.updates import MISSED_STEPS_NAME
from hf_lohan.wording import times

_PIECE_BYTES = 4 << 20


def reshard(given: Sequence[str], num_ranks: int, *, removes_old: bool = False) -> None:
    """Write the newest step that all ranks of a run hold into new stores for ``num_ranks``, beside the old ones, which
    stay unless this ``removes_old``. ``given``: the run's output folder, or all ssd paths of its stores.

    The new stores are there when all are committed; a run that begins before that says what is missing. Raises
    ValueError where there is nothing to cut, or the new stores are there already, and as `Store` does.
    """
    if num_ranks < 1:
        raise ValueError(f"the number of ranks is {num_ranks}; it must be at least 1")
    paths = [str(path) for path in (store_paths_of(given[0]) if len(given) == 1 else given)]
    num_before = _ranks_before(paths, num_ranks)
    io = IoEngine(num_threads=2, piece_bytes=_PIECE_BYTES, max_inflight_bytes=4 * _PIECE_BYTES)
    try:
        with ExitStack() as stack:
            old = [
                stack.enter_context(Store.open(_store_paths(paths, rank, num_before), model=None, engine=io))
                for rank in range(num_before)
            ]
            commits = _commits_to_keep(old)
            _refuse_behind(commits, paths)
            _, form = described_model(next((store for store in old if store.model_folder is not None), old[0]))
            _refuse_streamed_experts(form, num_ranks, paths)
            _check_cut(form, old)
            records = _records(form, num_ranks)
            new = [stack.enter_context(_new_store(paths, rank, records, old[0], io)) for rank in range(num_ranks)]
            _copy(old, new)
            _commit(old, new, commits)
            step = commits[0].facts.get("global_step")
            what = f"commit {commits[0].number}" if step is None else f"step {step}"
            folders = ", ".join(store.paths[0].path for store in new)
            said = f"{what} of {times(num_before, 'rank')} is in {folders}"
            before = [[path.path for path in store.paths] for store in old]
            for directories in before if removes_old else ():
                remove_store(directories)
        if not removes_old:
            before_files, new_files = files_of(paths[0], num_before), files_of(paths[0], num_ranks)
            said += (
                "; what it was cut from stays. While both are there nothing goes on from last_step: delete "
                f"{before_files} to go on with {times(num_ranks, 'rank')} (--remove-old does), or {new_files} to go on "
                "as before, on each ssd path"
            )
        elif num_before > 1:
            for directory in (directory for directories in before for directory in directories):
                remove_folder(directory)
        Console().print(said, soft_wrap=True, highlight=False)
    finally:
        io.close()


def _refuse_behind(commits: Sequence[Commit], paths: Sequence[str]) -> None:
    if any(MISSED_STEPS_NAME in commit.journal for commit in commits):
        raise ValueError(
            f"experts in {paths[0]} are steps behind (lazy_experts, auto by default), and records that are cut anew "
            "cannot catch up; train one step with lazy_experts=false first"
        )


def _refuse_streamed_experts(form: StoredForm, num_ranks: int, paths: Sequence[str]) -> None:
    if num_ranks > 1 and form.model_blocks.experts:
        raise ValueError(
            f"the experts in {paths[0]} come one by one, which several ranks cannot run; resume from a checkpoint of "
            "the run, which goes with experts: with_layer"
        )


def _ranks_before(paths: Sequence[str], num_ranks: int) -> int:
    """How many ranks made the stores that are there."""
    found = stores_under(paths[0])
    if not found:
        raise ValueError(f"there is no store in {paths[0]}, nor of ranks under it; give the ssd paths of the run")
    if num_ranks in found:
        folders = ", ".join(folder for _, folder in found[num_ranks])
        lacks = why_incomplete(num_ranks, found[num_ranks])
        if lacks and len(found) > 1:
            raise ValueError(
                f"{folders} is what a reshard that was cut off has left ({lacks}): delete "
                f"{files_of(paths[0], num_ranks)} on each ssd path, and call this again"
            )
        raise ValueError(
            f"{folders} holds a store of a run with so many ranks already; if its state is no longer needed, delete "
            f"{files_of(paths[0], num_ranks)} on each ssd path"
        )
    return ranks_under(paths[0])


def _store_paths(paths: Sequence[str], rank: int, num_ranks: int) -> list[StorePath]:
    return [StorePath(rank_folder(path, rank, num_ranks)) for path in paths]


def _commits_to_keep(old: Sequence[Store]) -> list[Commit]:
    """The newest step that all hold; each store is at it then, as after a resume."""
    kept = [{(commit.group_id, commit.number): commit for commit in store.kept_commits} for store in old]
    if not all(kept):
        empty = next(store for store, commits in zip(old, kept, strict=True) if not commits)
        raise ValueError(f"nothing is committed in {empty.paths[0].path}; there is no step to cut")
    try:
        newest = newest_common_commit([list(commits) for commits in kept])
    except RanksDisagreeError as error:
        raise ValueError(str(error)) from None
    for store, commits in zip(old, kept, strict=True):
        store.go_back_to(commits[newest])
    return [commits[newest] for commits in kept]


def _records(form: StoredForm, num_ranks: int) -> list[tuple[RecordSpec, ...]]:
    """Of each rank."""
    if num_ranks == 1:
        return [form.records]
    for block in form.model_blocks.blocks:
        block.cut_for_ranks(num_ranks)
    return [records_of_rank(form.model_blocks.blocks, rank) for rank in range(num_ranks)]


def _check_cut(form: StoredForm, old: Sequence[Store]) -> None:
    """The stores are cut as this version cuts the model that they describe."""
    for store, records in zip(old, _records(form, len(old)), strict=True):
        if store.records != records:
            raise ValueError(
                f"the records in {store.paths[0].path} are not cut as this version of hf_lohan cuts them for "
                f"{len(old)} ranks; use the version that made them, or resume from a checkpoint"
            )


def _new_store(
    paths: Sequence[str], rank: int, records: Sequence[tuple[RecordSpec, ...]], like: Store, io: IoEngine
) -> Store:
    own = _store_paths(paths, rank, len(records))
    for path in own:
        make_folders(path.path, mode=0o700)
    return Store.create(own, records[rank], model=like.model, engine=io, num_homes=like.num_homes)


def _copy(old: Sequence[Store], new: Sequence[Store]) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    total_bytes = sum(record.num_bytes for store in new for record in store.records)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("cutting anew", total=total_bytes)
        for store in new:
            for num_bytes in copy_records(old, store):
                progress.advance(task, num_bytes)


def _commit(old: Sequence[Store], new: Sequence[Store], commits: Sequence[Commit]) -> None:
    facts, journals = facts_of_all([commit.facts for commit in commits]), [commit.journal for commit in commits]
    group_id = commits[0].group_id or uuid.uuid4().hex
    for rank, store in enumerate(new):
        source = old[rank if rank < len(old) else 0]
        if len(new) > 1:
            store.agree_on_commits(NumberedAgreement(group_id))
        store.count_commits_from(commits[0].number)
        journal = journal_of_rank(journals, rank, len(new))
        store.commit(facts, journal, source.log, model_files=source.model_files)
