from __future__ import annotations

import numpy as np
import pytest

from hf_lohan.store import RecordSpec
from hf_lohan.store.versions import Home, HomeRun, Versions

GRANULE = 2048
A = RecordSpec("a", "param", "float32", 5 * GRANULE, granule_numel=GRANULE)
FROZEN_TAIL = RecordSpec("b", "param", "float32", 4 * GRANULE, versioned_numel=2 * GRANULE, granule_numel=GRANULE)
FROZEN = RecordSpec("c", "param", "float32", 2 * GRANULE, versioned_numel=0, granule_numel=GRANULE)
RECORDS = (A, FROZEN_TAIL, FROZEN)


def versions_of(num_homes: int) -> Versions:
    return Versions(RECORDS, num_homes=num_homes)


def write(versions: Versions, record: RecordSpec, first: int, stop: int, mark: int) -> list[HomeRun]:
    targets = versions.begin_write(record.block, record.kind, first, stop)
    versions.end_write(record.block, record.kind, first, targets, np.full(stop - first, mark, np.uint64))
    return targets


def commit(versions: Versions) -> None:
    assert versions.first_in_flux() is None
    versions.commit(*versions.draft())


def test_a_write_that_never_ends_leaves_its_granules_in_flux() -> None:
    versions = versions_of(2)
    versions.begin_write("b", "param", 1, 3)
    assert versions.first_in_flux() == ("b", "param", 1) and versions.has_drafts
    write(versions, FROZEN_TAIL, 1, 2, 7)
    assert versions.first_in_flux() == ("b", "param", 2)
    versions.drop_drafts()
    assert versions.first_in_flux() is None
    versions.begin_write("c", "param", 0, 1)
    assert versions.first_in_flux() == ("c", "param", 0)
    versions.clear()
    assert versions.first_in_flux() is None


def test_the_arrays_of_a_commit_do_not_change() -> None:
    versions = versions_of(1)
    write(versions, A, 0, 5, 1)
    home, checksum, ties = versions.draft()
    versions.commit(home, checksum, ties)
    before = home.copy(), checksum.copy()
    write(versions, A, 0, 5, 2)
    versions.clear()
    versions.commit(*versions.draft())
    assert np.array_equal(home, before[0]) and np.array_equal(checksum, before[1])


def test_versions_of_other_records_are_refused() -> None:
    home, checksum, ties = versions_of(2).draft()
    for bad_home, bad_checksum, message in (
        (home[:-1], checksum, "of 10 granules, not of 11"),
        (home, checksum[:-1], "of 11 granules"),
        (home.astype(np.int8), checksum, "of types int8 and uint64"),
        (home, checksum.astype(np.int64), "of types uint8 and int64"),
        (home + np.uint8(1), checksum, "homes that do not exist"),
        (np.full_like(home, Home.SECOND), checksum, "homes that do not exist"),  # frozen records have no second home
    ):
        with pytest.raises(ValueError, match=message):
            versions_of(2).restore(bad_home, bad_checksum, ties)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="homes that do not exist"):
        versions_of(1).restore(np.full_like(home, Home.SECOND), checksum, ties)
    empty = Versions((), num_homes=2)
    empty.restore(*empty.draft())


def test_a_partly_versioned_granule_is_refused() -> None:
    record = RecordSpec("a", "param", "float32", 3 * GRANULE, versioned_numel=GRANULE, granule_numel=2 * GRANULE)
    with pytest.raises(ValueError, match="versioned_numel 2048 of 6144; round it to a multiple of 4096"):
        Versions([record], num_homes=2)
    Versions([record], num_homes=1)
    Versions([RecordSpec("a", "param", "float32", 3 * GRANULE, granule_numel=2 * GRANULE)], num_homes=2)
