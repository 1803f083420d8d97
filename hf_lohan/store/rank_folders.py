"""Where the stores of several ranks lie: one beside the other, each in a folder of its own under the ssd path."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from hf_lohan.files import ForeignStoreError

MANIFEST_NAME = "manifest.json"
_NAME = re.compile(r"rank-(\d+)-of-(\d+)")


def rank_folder(directory: str, rank: int, num_ranks: int) -> str:
    """The folder of one rank's store under a directory that all are given; of the only rank it is the directory."""
    return directory if num_ranks == 1 else os.path.join(directory, f"rank-{rank}-of-{num_ranks}")


def directory_of(folder: str, num_ranks: int) -> str:
    """The inverse of `rank_folder`."""
    return folder if num_ranks == 1 else os.path.dirname(folder)


def rank_of(folder: str) -> tuple[int, int]:
    """Whose store a folder is for, by its name: the rank, and of how many."""
    match = _NAME.fullmatch(os.path.basename(os.path.abspath(folder)))
    return (int(match[1]), int(match[2])) if match else (0, 1)


def folder_of_all(directory: str) -> str:
    """The directory that all ranks are given, from that or the folder of one of them."""
    return os.path.dirname(directory) if _NAME.fullmatch(os.path.basename(directory)) else directory


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
        raise ValueError(
            f"{directory} holds stores of runs with {counts} ranks; delete those that are no longer needed"
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


def _folders_under(directory: str) -> Iterator[tuple[int, int, str]]:
    yield 0, 1, directory
    names = os.listdir(directory) if os.path.isdir(directory) else []
    for name in names:
        if match := _NAME.fullmatch(name):
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
