"""Settings that are "auto" are divided among the ranks of a machine. Numbers apply to each rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hf_lohan.config import ConfigError, OffloadConfig, SsdPath
from hf_lohan.device import CpuDevice
from hf_lohan.planning import shared_machine
from hf_lohan.planning.layout import resolved_here
from hf_lohan.ranks import Links
from hf_lohan.testing.thread_ranks import run_ranks

MIB = 1 << 20


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with fixed memory, eight CPUs and drives of a GiB."""
    monkeypatch.setattr(shared_machine, "available_host_memory_bytes", lambda: 1000 * MIB)
    monkeypatch.setattr(CpuDevice, "total_memory_bytes", lambda self: 800 * MIB)
    monkeypatch.setattr(shared_machine, "usable_cpus", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    monkeypatch.setattr(shared_machine, "free_bytes", lambda _path: 1024 * MIB)


def resolved(settings: dict[str, Any], default: Path, num_ranks: int, num_local: int | None = None) -> Any:
    def resolve(links: Links) -> OffloadConfig:
        return resolved_here(OffloadConfig.load(settings), CpuDevice(), default, links)

    return run_ranks(num_ranks, resolve, num_local=num_local)


def test_one_rank_gets_the_whole_machine(tmp_path: Path) -> None:
    config = resolved_here(OffloadConfig(), CpuDevice(), tmp_path / "store")
    assert (config.cpu_memory, config.gpu_memory, config.cpu_threads) == (600 * MIB, 320 * MIB, 8)
    assert [(ssd.path, ssd.capacity) for ssd in config.ssd] == [(str(tmp_path / "store"), "auto")]


@pytest.mark.parametrize(("num_ranks", "num_local"), [(2, 2), (4, 4), (8, 4)])
def test_ranks_of_a_machine_divide_it(num_ranks: int, num_local: int, tmp_path: Path) -> None:
    configs = resolved({}, tmp_path / "store", num_ranks, num_local)
    for rank, config in enumerate(configs):
        assert config.cpu_memory == 600 * MIB // num_local
        assert config.gpu_memory == 320 * MIB // num_local, "on a CPU the device has 80% of what cpu_memory leaves"
        assert (config.cpu_threads, config.io_threads) == (8 // num_local, max(2, 8 // num_local))
        assert config.ssd[0].path == str(tmp_path / "store" / f"rank-{rank}-of-{num_ranks}")
        assert config.ssd[0].capacity == 1024 * MIB // num_local


def test_numbers_apply_to_each_rank(tmp_path: Path) -> None:
    settings = {"cpu_memory": 100 * MIB, "cpu_threads": 3, "ssd": {"path": str(tmp_path), "capacity": 50 * MIB}}
    for config in resolved(settings, tmp_path, 2):
        assert (config.cpu_memory, config.cpu_threads, config.ssd[0].capacity) == (100 * MIB, 3, 50 * MIB)


def test_cpu_memory_above_the_limit_of_a_container_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_machine, "host_memory_limit_bytes", lambda: 300 * MIB)
    for settings, num_ranks in (({"cpu_memory": "301MiB"}, 1), ({"cpu_memory": 200 * MIB}, 2)):
        with pytest.raises(
            ConfigError, match=r"cpu_memory: \d+ MiB is more than the \d+ MiB that .* at most (\d+)"
        ) as why:
            resolved(settings, tmp_path, num_ranks)
        advised = int(str(why.value).split("at most ")[1].split()[0])
        assert resolved({"cpu_memory": advised}, tmp_path, num_ranks)[0].cpu_memory == advised
    assert resolved({"cpu_memory": "300MiB"}, tmp_path, 1)[0].cpu_memory == 300 * MIB


def test_paths_may_name_a_drive_for_each_rank(tmp_path: Path) -> None:
    settings = {"ssd": [str(tmp_path / "nvme{local_rank}" / "box{node}"), str(tmp_path / "both")]}
    paths = [[ssd.path for ssd in config.ssd] for config in resolved(settings, tmp_path, 4, 2)]
    assert [path for path, _ in paths] == [
        str(tmp_path / f"nvme{rank % 2}" / f"box{rank // 2}" / f"rank-{rank}-of-4") for rank in range(4)
    ]
    alone = resolved_here(OffloadConfig.load(settings), CpuDevice(), tmp_path)
    assert alone.ssd[0].path == str(tmp_path / "nvme0" / "box0")


def test_resolved_settings_do_not_change(tmp_path: Path) -> None:
    def twice(links: Links) -> tuple[OffloadConfig, OffloadConfig]:
        first = resolved_here(OffloadConfig(), CpuDevice(), tmp_path, links)
        return first, resolved_here(first, CpuDevice(), tmp_path / "elsewhere", links)

    assert all(first == second for first, second in run_ranks(2, twice))


def test_existing_stores_of_the_run_count_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run must find the same room as the one before."""
    taken = {0: 300 * MIB, 1: 100 * MIB}
    monkeypatch.setattr(shared_machine, "occupied_bytes", lambda path, _names: taken["rank-1" in path])
    for config in resolved({}, tmp_path, 2):
        assert config.ssd[0].capacity == (1024 + 400) * MIB // 2


def test_ranks_with_their_own_cores_keep_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cores(links: Links) -> int:
        offers = [shared_machine._Offer({}, 0, 0, "host", cpus, []) for cpus in ([0, 1, 2], [2, 3, 4], [5, 6], [7])]
        return shared_machine._share(offers, links.ranks).num_cpus

    assert run_ranks(4, cores) == [2, 2, 2, 1]


@pytest.mark.parametrize(("name", "values"), [("prefetch_blocks", (2, 3)), ("experts.parallel", ("auto", "world"))])
def test_settings_that_differ_between_ranks_are_refused(name: str, values: tuple[Any, Any], tmp_path: Path) -> None:
    def resolve(links: Links) -> None:
        settings = {name: values[links.ranks.rank // 2]}
        resolved_here(OffloadConfig.load(settings), CpuDevice(), tmp_path, links)

    message = f"{name} is {values[0]!r} on rank 0 and {values[1]!r} on rank 2; give all ranks the same"
    with pytest.raises(ConfigError, match=message):
        run_ranks(3, resolve)


def test_the_directories_of_all_ranks_are_found(tmp_path: Path) -> None:
    """Ranks of a run with another number of ranks may have had their stores there."""
    for name in ("0", "1", "5"):
        (tmp_path / name / "a").mkdir(parents=True)
    one, literal = SsdPath(str(tmp_path / "store" / "rank-1-of-2")), SsdPath(str(tmp_path / "{local_rank}" / "a"))
    (each,) = OffloadConfig(ssd=literal.path).ssd  # type: ignore[arg-type, misc]
    assert shared_machine.directories_of_ranks([one]) == [[str(tmp_path / "store")]]
    assert shared_machine.directories_of_ranks([literal]) == [[literal.path]], "only a setting is a pattern"
    assert shared_machine.directories_of_ranks([each]) == [[str(tmp_path / name / "a")] for name in ("0", "1", "5")]
