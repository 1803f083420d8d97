"""Folders of several ranks' stores. Each rank has one folder under the ssd path."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from hf_lohan.files import ForeignStoreError
from hf_lohan.store.manifest import MANIFEST_NAME, RANK_FOLDER
from hf_lohan.store.store import Store
from hf_lohan.store.store_folders import names_in


def rank_folder(directory: str, rank: int | Literal["*"], num_ranks: int, generation: int = 0) -> str:
    """Return the folder of a rank's store under the directory of all ranks. Each reshard begins a new generation. In
    generation 0, before any reshard, a single rank uses the directory itself."""
    if generation:
        return os.path.join(directory, f"rank-{rank}-of-{num_ranks}.g{generation}")
    return directory if num_ranks == 1 else os.path.join(directory, f"rank-{rank}-of-{num_ranks}")


def shared_directory(directory: str) -> str:
    """Return the directory of all ranks. ``directory`` is that directory or one rank's folder in it."""
    match = RANK_FOLDER.fullmatch(os.path.basename(directory))
    return os.path.dirname(directory) if match and (match[3] or match[2] != "1") else directory


def stores_under(directory: str) -> dict[tuple[int, int], list[int]]:
    """Return the ranks whose stores are under a directory, by generation and number of ranks."""
    stores: dict[tuple[int, int], list[int]] = {}
    if os.path.exists(os.path.join(directory, MANIFEST_NAME)):
        stores[0, 1] = [0]
    for name in sorted(os.listdir(directory)) if os.path.isdir(directory) else []:
        if (match := RANK_FOLDER.fullmatch(name)) and os.path.exists(os.path.join(directory, name, MANIFEST_NAME)):
            rank, num_ranks, generation = int(match[1]), int(match[2]), int(match[3] or 0)
            if rank < num_ranks and (generation, num_ranks) != (0, 1):
                stores.setdefault((generation, num_ranks), []).append(rank)
    return stores


def files_of(directory: str, num_ranks: int, generation: int) -> str:
    """Describe the files of the stores of ``num_ranks`` ranks, which the user may delete."""
    folders = rank_folder(directory, "*", num_ranks, generation)
    if folders != directory:
        return f"the folders {os.path.basename(folders)}"
    return f"the files {', '.join(names_in(directory))}"


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
