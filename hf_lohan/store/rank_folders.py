"""Folders of several ranks' stores. Each rank has one folder under the ssd path."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Literal

from hf_lohan.files import ForeignStoreError, StorageError
from hf_lohan.store.commits import COMMIT_NAME, read_commit
from hf_lohan.store.manifest import MANIFEST_NAME, RANK_FOLDER, read_manifest
from hf_lohan.store.store import Store
from hf_lohan.store.store_folders import names_in
from hf_lohan.wording import times


def rank_folder(directory: str, rank: int | Literal["*"], num_ranks: int) -> str:
    """Return the folder of a rank's store under the directory of all ranks. A single rank uses the directory itself."""
    return directory if num_ranks == 1 else os.path.join(directory, f"rank-{rank}-of-{num_ranks}")


def shared_directory(directory: str) -> str:
    """Return the directory of all ranks, by this directory or by one rank's folder in it."""
    return os.path.dirname(directory) if RANK_FOLDER.fullmatch(os.path.basename(directory)) else directory


def stores_under(directory: str) -> dict[int, list[tuple[int, str]]]:
    """Return the stores under a directory, by their run's number of ranks, as pairs (rank, folder) in rank order."""
    stores: dict[int, list[tuple[int, str]]] = {}
    for rank, num_ranks, folder in _folders_under(directory):
        if os.path.exists(os.path.join(folder, MANIFEST_NAME)):
            stores.setdefault(num_ranks, []).append((rank, folder))
    return {num_ranks: sorted(folders) for num_ranks, folders in stores.items()}


def ranks_under(directory: str) -> int:
    """Return the number of ranks of the run whose stores are under a directory; 1 if it has none. Raises ValueError if
    it has stores of several runs, or if a rank's store is missing."""
    stores_by_count = stores_under(directory)
    if len(stores_by_count) > 1:
        counts = " and ".join(map(str, sorted(stores_by_count)))
        states = "; ".join(_state(directory, count, stores) for count, stores in sorted(stores_by_count.items()))
        raise ValueError(
            f"{directory} holds stores of runs with {counts} ranks, and only one of these runs can continue: {states}. "
            "Delete the stores of the others on each ssd path"
        )
    for num_ranks, stores in stores_by_count.items():
        missing = sorted(set(range(num_ranks)) - {rank for rank, _ in stores})
        if missing:
            raise ValueError(
                f"the store of rank {missing[0]} of {num_ranks} is not under {directory}; copy the folders of all "
                "machines there"
            )
        return num_ranks
    return 1


def files_of(directory: str, num_ranks: int) -> str:
    """Describe the files of the stores of ``num_ranks`` ranks, which the user may delete."""
    folders = rank_folder(directory, "*", num_ranks)
    if folders != directory:
        return f"the folders {os.path.basename(folders)}"
    return f"the files {', '.join(names_in(directory))}"


def why_incomplete(num_ranks: int, stores: Sequence[tuple[int, str]]) -> str:
    """Return why training cannot continue with ``stores``, pairs of (rank, folder); "" if it can."""
    missing = sorted(set(range(num_ranks)) - {rank for rank, _ in stores})
    if missing:
        return f"the store of rank {missing[0]} is missing"
    for _, folder in stores:
        manifest = read_manifest(folder)
        is_first = manifest is not None and manifest.path_index == 0
        if is_first and not os.path.exists(os.path.join(folder, COMMIT_NAME)):
            return f"nothing is committed in {folder}, as after an interrupted reshard"
    return ""


def _state(directory: str, num_ranks: int, stores: Sequence[tuple[int, str]]) -> str:
    reason, files = why_incomplete(num_ranks, stores), files_of(directory, num_ranks)
    if reason:
        return f"the run of {times(num_ranks, 'rank')} is incomplete ({reason}) and consists of {files}"
    try:
        commit = read_commit(stores[0][1])
    except StorageError:
        commit = None
    step = commit.facts.get("global_step") if commit is not None else None
    complete = "is complete" if step is None else f"is complete, with step {step},"
    return f"the run of {times(num_ranks, 'rank')} {complete} and consists of {files}"


def _folders_under(directory: str) -> Iterator[tuple[int, int, str]]:
    yield 0, 1, directory
    names = os.listdir(directory) if os.path.isdir(directory) else []
    for name in names:
        if match := RANK_FOLDER.fullmatch(name):
            yield int(match[1]), int(match[2]), os.path.join(directory, name)


def refuse_other_ranks(directories: Sequence[str], num_ranks: int) -> None:
    """Raise `ForeignStoreError` if the directories, one for each ssd path, have stores of another number of ranks, and
    no commit of this number."""
    found = [(directory, stores_under(directory)) for directory in directories]
    own = [folder for _, stores in found for _, folder in stores.get(num_ranks, ())]
    if any(os.path.exists(os.path.join(folder, COMMIT_NAME)) for folder in own):
        return
    for directory, stores in found:
        if others := sorted(stores.keys() - {num_ranks}):
            raise ForeignStoreError(
                f"{directory} holds the store of a run with {times(others[-1], 'rank')}, and this run has "
                f"{times(num_ranks, 'rank')}; continue from it with resume_from_checkpoint=True in a Trainer, or "
                "convert it with lohan reshard and, in a loop of your own, call engine_of(model).go_back_to_commit(); "
                "or choose another directory, or delete the store if its state is no longer needed"
            )


def refuse_other_parts(stores: Sequence[Store]) -> None:
    """Raise `ForeignStoreError` if the stores, in rank order, are not the shards of one model."""
    stops: dict[tuple[str, str], int] = {}
    for store in stores:
        for record in store.records:
            stop = stops.get((record.block, record.kind), 0)
            if record.first != stop:
                paths = " and ".join(store.paths[0].path for store in stores)
                raise ForeignStoreError(
                    f"{paths} are not the shards of one model: {record.kind} of {record.block} starts with element "
                    f"{record.first} in {store.paths[0].path}, after {stop} elements in the stores before it; restore "
                    "the folders of all ranks as the run left them"
                )
            stops[record.block, record.kind] = record.first + record.numel
