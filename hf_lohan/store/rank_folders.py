"""Where the stores of several ranks lie: one beside the other, each in a folder of its own under the ssd path."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from hf_lohan.files import ForeignStoreError, StorageError
from hf_lohan.store.commits import COMMIT_NAME, read_commit
from hf_lohan.store.manifest import MANIFEST_NAME, RANK_FOLDER, read_manifest
from hf_lohan.store.store import Store
from hf_lohan.store.store_folders import names_in


def rank_folder(directory: str, rank: int, num_ranks: int) -> str:
    """The folder of one rank's store under a directory that all are given; of the only rank it is the directory."""
    return directory if num_ranks == 1 else os.path.join(directory, f"rank-{rank}-of-{num_ranks}")


def directory_of(folder: str, num_ranks: int) -> str:
    """The inverse of `rank_folder`."""
    return folder if num_ranks == 1 else os.path.dirname(folder)


def folder_of_all(directory: str) -> str:
    """The directory that all ranks are given, from that or the folder of one of them."""
    return os.path.dirname(directory) if RANK_FOLDER.fullmatch(os.path.basename(directory)) else directory


def stores_under(directory: str) -> dict[int, list[tuple[int, str]]]:
    """(rank, folder) of each store under a directory, in the order of ranks, by the number of ranks that made them."""
    found: dict[int, list[tuple[int, str]]] = {}
    for rank, num_ranks, folder in _folders_under(directory):
        if os.path.exists(os.path.join(folder, MANIFEST_NAME)):
            found.setdefault(num_ranks, []).append((rank, folder))
    return {num_ranks: sorted(stores) for num_ranks, stores in found.items()}


def ranks_under(directory: str) -> int:
    """How many ranks made the stores under a directory; 1 also where there is none. Raises ValueError where there are
    stores of several runs, or not those of all ranks."""
    found = stores_under(directory)
    if len(found) > 1:
        counts = " and ".join(map(str, sorted(found)))
        states = "; ".join(_state(directory, num_ranks, found[num_ranks]) for num_ranks in sorted(found))
        raise ValueError(
            f"{directory} holds stores of runs with {counts} ranks, and one of them alone can go on: {states}. Delete "
            "the others, on each ssd path"
        )
    for num_ranks, stores in found.items():
        missing = sorted(set(range(num_ranks)) - {rank for rank, _ in stores})
        if missing:
            raise ValueError(
                f"of the {num_ranks} ranks' stores that of rank {missing[0]} is not under {directory}; bring the "
                "folders of all machines together there"
            )
        return num_ranks
    return 1


def files_of(directory: str, num_ranks: int) -> str:
    """What makes up the stores of so many ranks under a directory, in words, to be deleted."""
    if num_ranks > 1:
        return f"the folders rank-*-of-{num_ranks}"
    return f"the files {', '.join(names_in(directory))}"


def why_incomplete(num_ranks: int, stores: Sequence[tuple[int, str]]) -> str:
    """What ``stores``, each a rank and its folder, lack to go on, in words; "" if they lack nothing."""
    missing = sorted(set(range(num_ranks)) - {rank for rank, _ in stores})
    if missing:
        return f"that of rank {missing[0]} is not there"
    for _, folder in stores:
        manifest = read_manifest(folder)
        is_first = manifest is not None and manifest.path_index == 0
        if is_first and not os.path.exists(os.path.join(folder, COMMIT_NAME)):
            return f"nothing is committed in {folder}, as where a reshard was cut off"
    return ""


def _state(directory: str, num_ranks: int, stores: Sequence[tuple[int, str]]) -> str:
    lacks, files = why_incomplete(num_ranks, stores), files_of(directory, num_ranks)
    if lacks:
        return f"that of {_ranks(num_ranks)} is incomplete ({lacks}), and is {files}"
    try:
        commit = read_commit(stores[0][1])
    except StorageError:
        commit = None
    step = commit.facts.get("global_step") if commit is not None else None
    whole = "is whole" if step is None else f"is whole, with step {step}"
    return f"that of {_ranks(num_ranks)} {whole}, and is {files}"


def _folders_under(directory: str) -> Iterator[tuple[int, int, str]]:
    yield 0, 1, directory
    names = os.listdir(directory) if os.path.isdir(directory) else []
    for name in names:
        if match := RANK_FOLDER.fullmatch(name):
            yield int(match[1]), int(match[2]), os.path.join(directory, name)


def refuse_other_ranks(directory: str, num_ranks: int) -> None:
    """Raise `ForeignStoreError` where stores of another number of ranks lie, and none of this number."""
    stores = stores_under(directory)
    others = sorted(stores.keys() - {num_ranks})
    if others and num_ranks not in stores:
        raise ForeignStoreError(
            f"{directory} holds the store of a run with {_ranks(others[-1])}, and this run has {_ranks(num_ranks)}: "
            "make it one of this run's with lohan reshard, choose another directory, or delete it if its state is no "
            "longer needed"
        )


def _ranks(num_ranks: int) -> str:
    return "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"


def refuse_other_parts(stores: Sequence[Store]) -> None:
    """Raise `ForeignStoreError` unless the stores, in the order of their ranks, are the parts of one model."""
    stops: dict[tuple[str, str], int] = {}
    for store in stores:
        for record in store.records:
            stop = stops.get((record.block, record.kind), 0)
            if record.first != stop:
                where = " and ".join(store.paths[0].path for store in stores)
                raise ForeignStoreError(
                    f"{where} are not the parts of one model, in the order of ranks: {record.kind} of {record.block} "
                    f"goes on with element {record.first} in {store.paths[0].path}, after {stop} elements before it; "
                    "bring back the folders of all ranks as the run left them"
                )
            stops[record.block, record.kind] = record.first + record.numel
