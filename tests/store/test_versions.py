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


def live(versions: Versions, record: RecordSpec) -> list[tuple[Home, int]]:
    """Home and checksum of each granule."""
    num_granules = record.numel // GRANULE
    runs, checksum = versions.live(record.block, record.kind, 0, num_granules)
    homes = [run.home for run in runs for _ in range(run.first, run.stop)]
    return list(zip(homes, checksum.tolist(), strict=True))


def test_new_records_have_no_home() -> None:
    versions = versions_of(2)
    assert live(versions, A) == [(Home.NOWHERE, 0)] * 5
    assert not versions.has_drafts and not versions.is_written("a", "param", 0, 5)


def test_drafts_go_to_the_other_home() -> None:
    versions = versions_of(2)
    assert write(versions, A, 0, 5, 1) == [HomeRun(Home.FIRST, 0, 5)]
    assert write(versions, A, 1, 2, 2) == [HomeRun(Home.FIRST, 1, 2)]  # a draft may be overwritten
    commit(versions)
    assert write(versions, A, 1, 3, 3) == [HomeRun(Home.SECOND, 1, 3)]
    assert write(versions, A, 1, 2, 4) == [HomeRun(Home.SECOND, 1, 2)]
    commit(versions)
    assert live(versions, A) == [
        (Home.FIRST, 1),
        (Home.SECOND, 4),
        (Home.SECOND, 3),
        (Home.FIRST, 1),
        (Home.FIRST, 1),
    ]
    assert write(versions, A, 0, 5, 5) == [
        HomeRun(Home.SECOND, 0, 1),
        HomeRun(Home.FIRST, 1, 3),
        HomeRun(Home.SECOND, 3, 5),
    ]
    assert versions.has_drafts and versions.is_written("a", "param", 0, 1)
    versions.drop_drafts()
    assert live(versions, A)[1] == (Home.SECOND, 4) and versions.is_written("a", "param", 0, 5)
    assert not versions.has_drafts


def test_records_with_one_home_are_written_in_place() -> None:
    versions = versions_of(2)
    for record in (FROZEN_TAIL, FROZEN):
        write(versions, record, 0, record.numel // GRANULE, 1)
    commit(versions)
    for record in (FROZEN_TAIL, FROZEN):
        write(versions, record, 0, record.numel // GRANULE, 1)
    assert [home for home, _ in live(versions, FROZEN_TAIL)] == [Home.SECOND, Home.SECOND, Home.FIRST, Home.FIRST]
    assert [home for home, _ in live(versions, FROZEN)] == [Home.FIRST, Home.FIRST]


@pytest.mark.parametrize("num_homes", [1, 2])
def test_only_changed_committed_bytes_tear(num_homes: int) -> None:
    versions = versions_of(num_homes)
    checksums = np.array([1, 2], np.uint64)
    assert not versions.overwrites("c", "param", 0, 2)
    write(versions, FROZEN, 0, 1, 1)
    assert not versions.overwrites("c", "param", 0, 2)  # dropping a draft loses nothing
    commit(versions)
    assert versions.overwrites("c", "param", 0, 2) and not versions.overwrites("c", "param", 1, 2)
    assert versions.overwrites("b", "param", 0, 4) is False
    assert not versions.tears("c", "param", 0, checksums)  # granule 1 was never written
    assert versions.tears("c", "param", 0, checksums + np.uint64(1))
    versions.mark_torn()
    assert versions.is_torn and not versions.overwrites("c", "param", 0, 2)
    with pytest.raises(AssertionError, match="overwritten"):
        versions.drop_drafts()
    commit(versions)
    assert not versions.is_torn


def test_a_versioned_record_is_overwritten_in_one_home_only() -> None:
    for num_homes, overwrites in ((1, True), (2, False)):
        versions = versions_of(num_homes)
        write(versions, A, 0, 5, 1)
        commit(versions)
        assert versions.overwrites("a", "param", 0, 5) is overwrites


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


def test_clearing_records_keeps_the_commit() -> None:
    versions = versions_of(2)
    write(versions, A, 0, 5, 1)
    commit(versions)
    versions.clear()
    assert live(versions, A) == [(Home.NOWHERE, 0)] * 5 and versions.has_drafts
    assert write(versions, A, 0, 5, 2) == [HomeRun(Home.SECOND, 0, 5)]
    versions.drop_drafts()
    assert live(versions, A) == [(Home.FIRST, 1)] * 5


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


def test_a_torn_store_must_be_written_again() -> None:
    versions = versions_of(2)
    for record in RECORDS:
        write(versions, record, 0, record.numel // GRANULE, 1)
    commit(versions)
    reopened = versions_of(2)
    reopened.restore(*versions.draft(), is_torn=True)
    assert reopened.is_torn and reopened.first_in_flux() == ("b", "param", 2)
    write(reopened, FROZEN_TAIL, 2, 4, 2)
    assert reopened.first_in_flux() == ("c", "param", 0)
    write(reopened, FROZEN, 0, 2, 2)
    assert reopened.first_in_flux() is None


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
