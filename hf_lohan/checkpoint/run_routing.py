"""Reads the numbers of rows of experts that a run has counted, and the owners of its experts."""

from __future__ import annotations

from hf_lohan.checkpoint.generations import stores_of
from hf_lohan.checkpoint.resume_point import store_paths_of
from hf_lohan.experts import RoutedRows
from hf_lohan.store import kept_commits
from hf_lohan.store.manifest import read_manifest


def routing_of(run: str) -> tuple[RoutedRows | None, list[set[str]]]:
    """Return the number of rows that each expert of a run received, or None if no rows were counted, and for each rank
    the names of the blocks in its store. ``run`` is the run's output folder or ssd path. This takes no lock, so the run
    may continue meanwhile. Raises ValueError if there is no run, and the errors of `kept_commits`."""
    found = stores_of(store_paths_of(run)).found
    stores = [] if found is None else found.folders()
    kept = [kept_commits(directories)[:1] for directories in stores]
    rows = RoutedRows.of_all([commits[0].facts if commits else {} for commits in kept])
    manifests = [read_manifest(directories[0]) for directories in stores]
    return rows, [{part.block for part in found.layout.records} if found else set() for found in manifests]
