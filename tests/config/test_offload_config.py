"""Accepted and refused configs, and the values that replace "auto"."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_lohan.config import ConfigError, OffloadConfig, ResolvedConfig, SsdPath
from hf_lohan.config.tables import Switches

GIB = 2**30
MACHINE: dict[str, Any] = {
    "host_memory_bytes": 64 * GIB,
    "device_memory_bytes": 24 * GIB,
    "num_cpus": 12,
    "default_ssd_path": "/mnt/nvme/store",
}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("source", [None, "lohan", {}, {"lohan": None}, {"lohan": {}}])
def test_an_empty_config_is_all_automatic(source: Any) -> None:
    config = OffloadConfig.load(source)
    assert config == OffloadConfig()
    assert (config.activations, config.switches.schedule) == ("auto", "optimized")
    assert (config.optimizer_state_dtype, config.moment_dtype) == ("auto", "float32")


def test_every_source_gives_the_same_config(tmp_path: Path) -> None:
    settings = {"gpu_memory": "2GiB", "ssd": [str(tmp_path)], "_schedule": "naive"}
    expected = OffloadConfig(gpu_memory=2 * GIB, ssd=(SsdPath(str(tmp_path)),), switches=Switches(schedule="naive"))
    flat = write(tmp_path / "flat.yaml", yaml.safe_dump(settings))
    nested = write(tmp_path / "nested.yml", yaml.safe_dump({"lohan": settings}))
    unnamed = write(tmp_path / "settings", yaml.safe_dump(settings))
    sources: list[Any] = [settings, {"lohan": settings}, flat, str(flat), nested, str(unnamed), unnamed, expected]
    assert [OffloadConfig.load(source) for source in sources] == [expected] * len(sources)
    assert OffloadConfig.load(**settings) == expected


def test_keywords_override(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "gpu_memory: 2GiB\ncpu_threads: 3\n")
    config = OffloadConfig.load(path, gpu_memory="3GiB", prefetch_blocks=4)
    assert (config.gpu_memory, config.cpu_threads, config.prefetch_blocks) == (3 * GIB, 3, 4)
    assert OffloadConfig.load(config, cpu_threads="auto").cpu_threads == "auto"


def test_an_empty_file_is_all_automatic(tmp_path: Path) -> None:
    assert OffloadConfig.load(write(tmp_path / "empty.yaml", "# nothing yet\n")) == OffloadConfig()


def refusal(source: Any = None, **overrides: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.load(source, **overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("misspelt", "right"),
    [
        ("gpu_mem", "gpu_memory"),
        ("cpu_memroy", "cpu_memory"),
        ("SSD", "ssd"),
        ("cpu_thread", "cpu_threads"),
        ("prefetch", "prefetch_blocks"),
    ],
)
def test_a_misspelt_key_names_the_right_one(misspelt: str, right: str, tmp_path: Path) -> None:
    path = write(tmp_path / "typo.yaml", f"{misspelt}: 1GiB\n")
    for message in (refusal({misspelt: "1GiB"}), refusal(**{misspelt: "1GiB"}), refusal(path)):
        assert repr(misspelt) in message and f"did you mean {right!r}?" in message
    assert refusal(path).startswith(str(path))


def test_device_memory_bounds_what_auto_allows_for_slots() -> None:
    def resolved(**settings: Any) -> ResolvedConfig:
        return OffloadConfig.load(settings).resolve(
            host_memory_bytes=64 * GIB, device_memory_bytes=24 * GIB, num_cpus=2, default_ssd_path="x"
        )

    assert resolved(device_memory="10GiB").gpu_memory == 8 * GIB
    assert resolved(device_memory="48GiB").gpu_memory == 24 * GIB * 8 // 10
    assert resolved().device_memory == "auto"
    larger = resolved(device_memory="10GiB").with_device_memory(20 * GIB)
    assert (larger.device_memory, larger.gpu_memory) == (20 * GIB, 16 * GIB)
    assert resolved(device_memory="10GiB", gpu_memory="2GiB").with_device_memory(20 * GIB).gpu_memory == 2 * GIB
    text = refusal({"device_memory": "10GiB", "gpu_memory": "11GiB"})
    assert f"gpu_memory: {11 * GIB} bytes is more than device_memory: {10 * GIB} bytes" in text


def test_migration_needs_activations_to_place() -> None:
    text = refusal({"_solver": "migration", "activations": "recompute"})
    assert "activations: 'recompute' leaves it no choice; set activations to auto, or _solver to auto" in text
    kept = OffloadConfig.load({"_solver": "migration"}).resolve(**MACHINE).with_all_activations_kept()
    assert (kept.activations, kept.switches.solver) == ("keep", "auto")


def test_an_unknown_key_lists_the_known_keys() -> None:
    assert "Known: gpu_memory, device_memory, cpu_memory, ssd" in refusal({"zzz": 1})
    assert "True" in refusal({True: 1})


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        ("gpu_memory", "24G", "24GiB"),
        ("gpu_memory", 24, "unit"),
        ("cpu_memory", None, "'auto'"),
        ("cpu_memory", -5, "'auto'"),
        ("prefetch_blocks", 0, "at least 1"),
        ("prefetch_blocks", "4", "whole number"),
        ("cpu_threads", 2.0, "whole number"),
        ("trace", "yes", "true or false"),
        ("trace", 1, "true or false"),
        ("prefetch_blocks", True, "whole number"),
        ("activations", "drop", "'auto' or 'recompute' or 'inputs' or 'swap' or 'keep'"),
        ("experts", "stream", "'auto' or 'streamed' or 'with_layer'"),
        ("experts", {"load": ["streamed"]}, "'streamed'"),
        ("experts", {"lazy": "yes"}, "true or false"),
        ("experts", 3, "or a table with one or more of load, parallel, balance, lazy, cache"),
        ("chunks", {"layers": 0}, "(tokens), auto or false"),
        ("ranks", "exact", "give a table with one or more of collectives, transport, timeout, per_row"),
        ("optimizer_state_dtype", "float16", "'int8'"),
        ("ssd", 7, "directory"),
        ("ssd", [], "directory"),
        ("ssd", "", "directory"),
        ("ssd", [None], "directory"),
        ("ssd", [{"capacity": "1GiB"}], "{path, capacity}"),
        ("ssd", [{"path": None}], "{path, capacity}"),
    ],
)
def test_a_bad_value_is_quoted_with_the_allowed_values(setting: str, value: Any, allowed: str) -> None:
    message = refusal({setting: value})
    assert message.startswith(setting) and allowed in message
    assert repr(value) in message or setting == "ssd" or isinstance(value, dict)
    with pytest.raises(ConfigError):
        OffloadConfig(**{setting: value})


def test_unreadable_sources_are_refused(tmp_path: Path) -> None:
    assert "neither 'lohan'" in refusal("lohann")
    assert "cannot read" in refusal("missing.yaml")
    assert "cannot read" in refusal(tmp_path)
    assert "offload=3" in refusal(3)
    assert "not YAML" in refusal(write(tmp_path / "broken.yaml", "a: [1,\nb: 2"))
    assert "not a table" in refusal(write(tmp_path / "list.yaml", "- 1\n"))
    assert "'zero'" in refusal({"lohan": {}, "zero": 1})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cpu_memory: " + "9" * 5000, r"cpu_memory: '9{40}'\.\.\. is not a size"),
        (f"cpu_memory: {'9' * 5000}GiB", r"cpu_memory: '9{40}'\.\.\. is not a size"),
        ("cpu_memory: 99999999999999999999GiB", "cpu_memory: a number of 97 bits is more than any memory has"),
        ("prefetch_blocks: " + "9" * 5000, r"prefetch_blocks: '9{40}'\.\.\. is not allowed; give a whole number"),
        ("cpu_threads: 5000", "cpu_threads: 5000 is too many; give at most 1024"),
        ("cpu_threads: 1000000000000000000000000000000", "cpu_threads: a number of 100 bits is too many"),
        ("cpu_memory: 1GiB\nlohan: 3\ncpu_memory: 2GiB", "found the key 'cpu_memory' twice"),
        ("lohan:\n  cpu_threads: 2\n  cpu_threads: 3", "found the key 'cpu_threads' twice"),
        ("commit_every: 10:30", "commit_every: '10:30' is not allowed; .* such as '30s'"),
        ("ranks.timeout: 1:30.5", "ranks.timeout: '1:30.5' is not allowed"),
        ("ssd: " + "[" * 5000 + "]" * 5000, "is nested too deeply"),
        ("ssd: s3://bucket/store", "ssd: 's3://bucket/store' is a URL; give a directory"),
        ("ssd: [{path: https://example.org/store}]", "ssd: 'https://example.org/store' is a URL"),
        ("ssd: [/data/a/store, /data/b, /data/a]", "ssd: '/data/a/store' is in '/data/a'; name directories"),
    ],
)  # fmt: skip
def test_values_that_are_easily_misread_are_refused(text: str, message: str, tmp_path: Path) -> None:
    found = refusal(write(tmp_path / "a.yaml", text))
    assert re.search(message, found) and str(tmp_path / "a.yaml") in found and len(found) < 400


def test_a_pipe_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    """Opening a pipe would wait for a writer."""
    os.mkfifo(tmp_path / "a.yaml")
    assert "is a pipe or a device" in refusal(tmp_path / "a.yaml")
    assert OffloadConfig.load({"ssd": ["/data/a", "/data/ab"]}).ssd != "auto"


def test_ssd_spellings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAST_DISK", str(tmp_path / "fast"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    entries = ["here", "$FAST_DISK/store", {"path": "~/store", "capacity": "10GB"}, Path("there")]
    assert OffloadConfig(ssd=entries).ssd == (  # type: ignore[arg-type]
        SsdPath(str(tmp_path / "here")),
        SsdPath(str(tmp_path / "fast/store")),
        SsdPath(str(tmp_path / "home/store"), 10**10),
        SsdPath(str(tmp_path / "there")),
    )
    assert OffloadConfig.load(ssd={"path": "here", "capacity": "auto"}).ssd == (
        SsdPath(str(tmp_path / "here"), "auto"),
    )


def test_the_default_folder_is_no_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAST_DISK", str(tmp_path / "fast"))
    for name in ("$FAST_DISK/{local_rank}", "cost$5", "~root", "a-{node}"):
        (path,) = OffloadConfig().ssd_paths(tmp_path / name)
        assert path == SsdPath(str(tmp_path / name)) and path.path == str(tmp_path / name) and not path.names_ranks
        assert OffloadConfig().resolve(**{**MACHINE, "default_ssd_path": str(tmp_path / name)}).ssd == (path,)
    (given,) = OffloadConfig.load(ssd="$FAST_DISK/{local_rank}").ssd_paths("another")
    assert given.path == str(tmp_path / "fast/{local_rank}") and given.names_ranks


def test_ssd_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_DISK", raising=False)
    assert "${NO_SUCH_DISK}" in refusal(ssd="${NO_SUCH_DISK}/store")
    assert "unknown home" in refusal(ssd="~nobody-has-this-name/store")
    assert "named twice" in refusal(ssd=[str(tmp_path), f"{tmp_path}/x/.."])
    assert "did you mean 'capacity'?" in refusal(ssd=[{"path": str(tmp_path), "capcity": "1GiB"}])
    assert "ssd capacity" in refusal(ssd=[{"path": str(tmp_path), "capacity": "much"}])


def test_resolve_replaces_every_auto() -> None:
    config = OffloadConfig().resolve(**MACHINE)
    assert config.gpu_memory == 24 * GIB * 8 // 10 and config.cpu_memory == 64 * GIB * 6 // 10
    for ram_gib, percent in ((8, 60), (24, 75), (64, 85)):
        free = {**MACHINE, "host_memory_bytes": ram_gib * GIB, "memory_is_host": False}
        assert OffloadConfig().resolve(**free).cpu_memory == ram_gib * GIB * percent // 100
    for cpu_memory, percent in (("auto", 32), ("32GiB", 40), ("80GiB", 8)):  # of one memory for both budgets
        of_both = OffloadConfig(cpu_memory=OffloadConfig.load(cpu_memory=cpu_memory).cpu_memory)
        gpu_memory = of_both.resolve(**{**MACHINE, "device_memory_bytes": 64 * GIB}).gpu_memory
        assert round(100 * gpu_memory / (64 * GIB)) == percent
    assert (config.io_threads, config.cpu_threads, config.prefetch_blocks) == (8, 12, 2)
    assert config.io_piece_bytes == 8 * 2**20
    assert config.ssd == (SsdPath("/mnt/nvme/store", "auto"),)
    assert config.resolve(**{**MACHINE, "num_cpus": 1}) == config


@pytest.mark.parametrize(("num_cpus", "io_threads"), [(1, 2), (2, 2), (5, 5), (64, 8)])
def test_io_threads_follow_the_cpus(num_cpus: int, io_threads: int) -> None:
    assert OffloadConfig().resolve(**{**MACHINE, "num_cpus": num_cpus}).io_threads == io_threads


def test_resolve_keeps_explicit_settings(tmp_path: Path) -> None:
    explicit = OffloadConfig.load(
        cpu_memory="1GiB", ssd=str(tmp_path), _io_threads=1, cpu_threads=3, _schedule="serial"
    )
    config = explicit.resolve(**MACHINE)
    assert (config.cpu_memory, config.io_threads, config.cpu_threads, config.switches.schedule) == (GIB, 1, 3, "serial")
    assert config.ssd == (SsdPath(str(tmp_path)),)


def test_round_trips(tmp_path: Path) -> None:
    limited = OffloadConfig.load(ssd=[{"path": tmp_path, "capacity": "1GB"}])
    for config in (OffloadConfig(), OffloadConfig().resolve(**MACHINE), limited):
        settings = config.to_dict()
        assert OffloadConfig.load(json.loads(json.dumps(settings))).to_dict() == settings
        assert OffloadConfig.load(write(tmp_path / "again.yaml", yaml.safe_dump(settings))).to_dict() == settings
        assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)


def test_a_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        OffloadConfig().cpu_threads = 4  # type: ignore[misc]


def test_the_settings_page_lists_every_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text(encoding="utf-8")
    settings = OffloadConfig().to_dict()
    assert len(settings) <= 23 and re.findall(r"^## (\w+)$", page, re.MULTILINE) == list(settings)
    for name, default in settings.items():
        assert isinstance(default, dict) or re.search(
            rf"^\| \[`{name}`\]\(#{name}\) \| .* \| `{re.escape(str(default))}` \|$", page, re.MULTILINE
        )


def test_the_error_shown_in_the_docs_is_the_real_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert f"hf_lohan.config.values.ConfigError: {refusal({'cpu_memroy': '32GiB'})}" in page


@pytest.mark.parametrize(
    ("beside", "told"),
    [
        ({"vertical_micro_batches": True}, "set vertical_micro_batches to false"),
        ({"experts": "streamed"}, "set experts to with_layer"),
        ({"experts": {"parallel": "world"}}, "set experts.parallel to none"),
    ],
)
def test_settings_that_need_whole_rows_are_refused_beside_sequence_ranks(beside: dict[str, Any], told: str) -> None:
    assert OffloadConfig.load({"ranks.per_row": 2}).ranks.per_row == 2
    with pytest.raises(ConfigError, match=f"ranks.per_row: 2 cannot be combined with .*{told}"):
        OffloadConfig.load({"ranks": {"per_row": 2}, **beside})


@pytest.mark.parametrize("value", [0, -1, True, "some", 1.5])
def test_balanced_rows_need_a_number_of_rows(value: object) -> None:
    assert re.search(r"experts\.balance.*rows.*auto or false", refusal({"experts.balance": value}))
    assert OffloadConfig.load({"experts.balance": 64}).experts.balance == 64


def test_a_key_with_a_dot_keeps_the_other_keys_of_its_table(tmp_path: Path) -> None:
    expected = OffloadConfig.load(experts={"load": "streamed", "lazy": True})
    path = write(tmp_path / "a.yaml", "experts: streamed\nexperts.lazy: true\n")
    assert OffloadConfig.load(path) == OffloadConfig.load({"experts.lazy": True, "experts": "streamed"}) == expected
    assert OffloadConfig.load(OffloadConfig.load(experts="streamed"), **{"experts.lazy": True}) == expected
    assert OffloadConfig.load(expected, experts="streamed") == expected, "a word is one key"
    assert OffloadConfig.load(expected, experts={"load": "streamed"}) == OffloadConfig.load(experts="streamed")
    assert "'experts.load' and in the table" in refusal({"experts": {"load": "streamed"}, "experts.load": "with_layer"})
    assert "unknown offload setting 'experts.lasy'; did you mean" in refusal({"experts.lasy": True})
    assert "unknown key of experts 'lasy'; did you mean 'lazy'?" in refusal({"experts": {"lasy": True}})


def test_switches_of_tests_are_no_public_settings() -> None:
    config = OffloadConfig.load(_clip="defer", _schedule="naive")
    assert (config.switches.clip, config.switches.schedule) == ("defer", "naive")
    assert config.to_dict() == {**OffloadConfig().to_dict(), "_clip": "defer", "_schedule": "naive"}
    assert OffloadConfig.load(config.to_dict()) == config
    assert "_schedule: 'fast' is not allowed; choose 'optimized'" in refusal(_schedule="fast")
    assert "unknown offload setting '_gpu_memory'" in refusal(_gpu_memory=1) and "_clip" not in refusal(clp=1)


FORMER: dict[str, tuple[Any, str]] = {
    "expert_parallel": ("world", 'write experts.parallel: "world"'),
    "balance_experts": (64, "write experts.balance: 64"),
    "lazy_experts": (True, "write experts.lazy: true"),
    "expert_cache": ("off", 'write experts.cache: "off"'),
    "chunked_loss": (False, "write chunks.loss: false"),
    "chunked_layers": (4096, "write chunks.layers: 4096"),
    "sequence_ranks": (2, "write ranks.per_row: 2"),
    "collectives": ({"within": "int8"}, 'write ranks.collectives: {"within": "int8"}'),
    "transport": ("host", 'write ranks.transport: "host"'),
    "net_timeout": (60, "write ranks.timeout: 60"),
    "schedule": ("naive", "leave it out"),
    "clip": ("defer", "uses the faster one; leave it out"),
    "solver": ("migration", "leave it out"),
    "resident_records": ("none", "leave it out"),
    "io_threads": (4, "leave it out"),
    "io_piece_bytes": (1 << 20, "leave it out"),
}


@pytest.mark.parametrize("name", FORMER)
def test_a_former_name_is_refused_with_its_successor(name: str, tmp_path: Path) -> None:
    value, told = FORMER[name]
    path = write(tmp_path / "a.yaml", yaml.safe_dump({"lohan": {name: value}}))
    messages = [refusal({name: value}), refusal(**{name: value}), refusal(path)]
    with pytest.raises(ConfigError) as caught:
        OffloadConfig(**{name: value})
    for message in (*messages, str(caught.value)):
        assert f"the offload setting {name!r}" in message and told in message
    assert told in refusal({"schedule": "naive", "net_timeout": 5, name: value}), "all are named at once"
    if "write" in told:  # the sentence can be followed
        OffloadConfig.load(yaml.safe_load(told.removeprefix("write ")))


def test_settings_that_an_earlier_version_has_recorded_are_read(tmp_path: Path) -> None:
    """Its `lohan/config.json` has every name of that version."""
    recorded = json.loads((Path(__file__).parent / "config_of_36_settings.json").read_text(encoding="utf-8"))
    recorded |= {name: value for name, (value, _) in FORMER.items()}
    recorded |= {"activations": "auto", "sequence_ranks": 1}
    path = write(tmp_path / "config.json", json.dumps(recorded))
    config = OffloadConfig.load(path)
    assert config == OffloadConfig.load(recorded)
    for later in ("transport", "balance_experts", "solver", "sequence_ranks"):  # earlier versions had less
        OffloadConfig.load({name: value for name, value in recorded.items() if name != later})
    assert (config.experts.load, config.experts.lazy, config.experts.balance) == ("streamed", True, 64)
    assert (config.chunks.layers, config.ranks.timeout, config.ranks.collectives.within) == (4096, 60, "int8")
    assert (config.switches.clip, config.switches.solver, config.switches.io_threads) == ("defer", "migration", 4)
    assert config.gpu_memory == recorded["gpu_memory"] and config.resolve(**MACHINE).io_piece_bytes == 1 << 20
