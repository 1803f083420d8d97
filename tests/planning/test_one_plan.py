"""A run follows the plan that `lohan plan` prints for the same model, batch, settings and hardware, field by field."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from covering import slow_but
from planned_models import one_plan_alone, runner
from short_runs import short_arguments

import hf_lohan
from hf_lohan.cli import app
from hf_lohan.config import Collectives, OffloadConfig, parse_bytes
from hf_lohan.costs import HardwareProfile, SizeClass
from hf_lohan.device import CpuDevice
from hf_lohan.engine import EngineEvents, OffloadEngine, ParameterAccess, drain_model, open_tiers
from hf_lohan.huggingface.offloaded_model import enable_recompute
from hf_lohan.optim import OffloadAdamW
from hf_lohan.planning import RunPlan, lay_out
from hf_lohan.ranks import Links
from hf_lohan.testing.models import tiny_batch, tiny_model, tiny_rows
from hf_lohan.testing.thread_ranks import run_ranks

BATCH_SIZE, SEQUENCE_LENGTH = 2, 16
TIGHT = {"cpu_memory": "3MiB", "gpu_memory": "1MiB"}
WIDE = {"cpu_memory": "64MiB", "gpu_memory": "16MiB"}
TOGETHER = {"vertical_micro_batches": True}
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tight": ("llama", TIGHT, {}),
    "wide": ("llama", WIDE, {}),
    "bf16": ("llama", TIGHT, {"bf16": True}),
    "not clipped": ("qwen3_moe", WIDE, {"max_grad_norm": 0.0}),
    "accumulated": ("llama", TIGHT, {"max_grad_norm": 0.0, "gradient_accumulation_steps": 4}),
    "vertical": ("qwen3_moe", {**WIDE, **TOGETHER}, {"gradient_accumulation_steps": 4}),
    "vertical, not clipped": ("llama", {**WIDE, **TOGETHER}, {"max_grad_norm": 0.0, "gradient_accumulation_steps": 4}),
    "swap": ("qwen3_moe", {**WIDE, "activations": "swap"}, {}),
    "experts one by one": ("qwen3_moe", {**TIGHT, "experts": "streamed"}, {}),
    "experts together": ("mixtral", {**WIDE, **TOGETHER, "experts": "streamed"}, {"gradient_accumulation_steps": 2}),
    "gradients beside activations": ("llama", {**TIGHT, "activations": "swap", "_resident_records": "none"}, {}),
    "recompute": ("llama", {**TIGHT, "activations": "recompute", "_resident_records": "none"}, {"bf16": True}),
    "half in RAM": ("llama", {"cpu_memory": "6MiB", "gpu_memory": "2MiB", "commit_every": "10min"}, {}),
    "keep, two drives": ("llama", {**WIDE, "activations": "keep", "ssd": ["one", "two"]}, {}),
}


def train(checkpoint: Path, folder: Path, settings: dict[str, Any], asked: dict[str, Any]) -> Any:
    """Train a saved model for one step and return its engine."""
    rows = tiny_rows(16, sequence_length=SEQUENCE_LENGTH)
    args = short_arguments(folder, max_steps=1, per_device_train_batch_size=BATCH_SIZE, **asked)
    trainer = hf_lohan.Trainer(str(checkpoint), args, train_dataset=rows, offload=settings)
    trainer.train()
    return trainer.offload_engine


QUICK_RUNS = ("keep, two drives", "vertical", "experts one by one", "bf16")


@pytest.mark.parametrize("name", slow_but(QUICK_RUNS, RUNS))
def test_a_run_follows_the_printed_plan(name: str, tmp_path: Path) -> None:
    family, settings, asked = RUNS[name]
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / "run"
    tiny_model(family).save_pretrained(checkpoint)
    settings = {**settings, "ssd": [str(tmp_path / drive) for drive in settings.get("ssd", ["drive"])]}
    engine = train(checkpoint, folder, settings, asked)
    followed = json.loads((folder / "lohan" / "plan.json").read_text())
    summary = json.loads((folder / "lohan" / "summary.json").read_text())
    engine.close()

    hardware, offload = tmp_path / "hardware.yaml", tmp_path / "offload.yaml"
    hardware.write_text(yaml.safe_dump(summary["measured_hardware"]))
    offload.write_text(yaml.safe_dump(settings))
    options: dict[str, Any] = {
        "--model": checkpoint,
        "--batch-size": BATCH_SIZE,
        "--seq-len": SEQUENCE_LENGTH,
        "--offload": offload,
        "--hardware": hardware,
        "--gradient-accumulation-steps": asked.get("gradient_accumulation_steps", 1),
        "--max-grad-norm": asked.get("max_grad_norm", 1.0),
        "--dtype": "bfloat16" if asked.get("bf16") else "float32",
    }
    words = [str(word) for option in options.items() for word in option]
    with one_plan_alone():
        result = runner.invoke(app, ["plan", *words, "--json"])
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    assert {name: printed[name] for name in followed} == followed

    assert followed["durability"] == summary["durability"]
    layout, pools = engine.layout, followed["pools"]
    assert pools["chunk_numel"] == layout.plan.chunk_numel
    assert pools["num_slots"] == {size.value: layout.plan.num_slots[size] for size in SizeClass}
    assert followed["resident"] == [[record.block, record.kind] for record in layout.resident_records]
    if settings.get("activations") in (None, "swap"):
        placed = engine.activations._placements
        assert followed["activations"] == {
            layer: {operation: place.value for operation, place in places.items()} for layer, places in placed.items()
        }
    copies = engine.tiers.store.ram.copies
    assert [[*name] for name in copies] == followed["resident"]
    spilled_bytes = sum(record.num_bytes for record in layout.spill_records())
    assert 0 <= followed["spilled_gradient_bytes"] <= spilled_bytes
    if "beside" in name:
        assert followed["spilled_gradient_bytes"] < spilled_bytes
        assert engine.tiers.shared_ram.num_bytes > 0
    assert (engine.clip_history.way == "speculate") == (followed["clip"] == "speculate")


# Several ranks.


@dataclass(frozen=True)
class RankCase:
    """Ranks, their settings, and the way to exchange weights that their plan chooses."""

    num_ranks: int
    num_local: int
    settings: dict[str, Any]
    way: tuple[str, str]
    asked: str | None = None
    """The option `--collectives`."""


RANK_CASES = {
    "2 ranks of a node": RankCase(2, 2, WIDE, ("exact", "world")),
    "2 nodes": RankCase(2, 1, WIDE, ("delta", "ram")),
    "2 nodes of 2 ranks": RankCase(4, 2, WIDE, ("delta", "ram")),
    "collectives are set": RankCase(
        2, 1, {**WIDE, "ranks.collectives": {"forward": "exact", "backward": "ssd"}}, ("exact", "ssd")
    ),
    "no RAM for the copy": RankCase(2, 1, {"cpu_memory": "3MiB", "gpu_memory": "1MiB"}, ("delta", "ssd")),
}
SLOW_NETWORK = {
    "device": {"flops_per_s": 1e12, "memory_bytes": 1 << 34, "shares_cpu": True},
    "h2d_bytes_per_s": 1e10,
    "d2h_bytes_per_s": 1e10,
    "ssd": [{"read_bytes_per_s": 5e9, "write_bytes_per_s": 5e9, "capacity_bytes": 1 << 40}],
    "cpu": {"memory_bytes": 1 << 34, "optimizer_params_per_s": 1e9},
    "net_bytes_per_s": 1e6,
}


def train_rank(
    links: Links, case: RankCase, folder: Path, hardware: HardwareProfile, cpu_memory: str = "", *, fails: bool = False
) -> tuple[dict[str, Any] | None, Any]:
    """Plan and run a step of one rank, as `attach` does. Return the plan, or None without a plan, and the layout of the
    engine. `cpu_memory` replaces that of the case. With `fails`, this rank cannot plan."""
    model, device = tiny_model("llama"), CpuDevice()
    settings = {
        **case.settings,
        **({"cpu_memory": cpu_memory} if cpu_memory else {}),
        "ssd": str(folder / f"rank-{links.ranks.rank}"),
        "_io_threads": 1,
    }
    config = OffloadConfig.load(settings).resolve(
        host_memory_bytes=1 << 34, device_memory_bytes=1 << 34, num_cpus=2, default_ssd_path=""
    )
    layout = lay_out(
        model,
        config,
        working_dtype=torch.float32,
        hold_gradients=True,
        sums_gradients=False,
        memory_is_host=True,
        ranks=links.ranks,
    )
    tiers = open_tiers(layout, config, device, links)
    drain_model(layout.blocks, ParameterAccess(tiers.store, layout.blocks, tiers.states, links))
    run = RunPlan(model, layout, config, device, tiers.store.durability, links)
    run._measured = lambda _traced, _shape: hardware  # type: ignore[method-assign]
    if fails:
        run._try_to_plan = lambda *_args, **_settings: None  # type: ignore[method-assign]
    engine = OffloadEngine(model, layout, tiers, config, EngineEvents(plan=run.plan_batches))
    enable_recompute(model, engine)
    try:
        batch = tiny_batch(seed=links.ranks.rank, batch_size=BATCH_SIZE, sequence_length=SEQUENCE_LENGTH)
        optimizer = OffloadAdamW(model.parameters(), engine=engine)
        model(**batch).loss.backward()
        engine.clip_grad_norm(1.0)
        optimizer.step()
        engine.wait_for_updates()
        return run.first and run.first.plan.to_mapping(), engine.layout
    finally:
        engine.close()


@pytest.mark.parametrize("name", slow_but(("2 nodes", "no RAM for the copy"), RANK_CASES))
def test_ranks_follow_the_printed_plan(name: str, tmp_path: Path) -> None:
    case, profile, offload = RANK_CASES[name], tmp_path / "hardware.yaml", tmp_path / "offload.yaml"
    profile.write_text(yaml.safe_dump(SLOW_NETWORK))
    offload.write_text(yaml.safe_dump(case.settings))
    hardware = HardwareProfile.from_mapping(SLOW_NETWORK)
    results = run_ranks(
        case.num_ranks,
        lambda links: train_rank(links, case, tmp_path, hardware),
        num_local=case.num_local,
        timeout_s=120,
    )
    tiny_model("llama").save_pretrained(tmp_path / "checkpoint")
    options: dict[str, Any] = {
        "--model": tmp_path / "checkpoint",
        "--batch-size": BATCH_SIZE,
        "--seq-len": SEQUENCE_LENGTH,
        "--offload": offload,
        "--hardware": profile,
        "--dtype": "float32",
        "--ranks": case.num_ranks,
        "--nodes": case.num_ranks // case.num_local,
    }
    words = [str(word) for option in options.items() for word in option]
    with one_plan_alone():
        result = runner.invoke(app, ["plan", *words, "--json"])
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    first = json.loads(json.dumps(results[0][0]))
    assert {name: printed[name] for name in first} == first
    for followed, layout in results:  # records differ, because each rank has its own shards
        assert followed["cluster"] == printed["cluster"]
        way = followed["cluster"]["collectives"]
        assert (way["forward"], way["backward"]) == case.way
        assert layout.collectives == Collectives(**way)
        assert followed["resident"] == [[record.block, record.kind] for record in layout.resident_records]
        assert layout.copy_cpu_bytes * case.num_local == followed["tier_bytes"]["cpu"].get("weights", 0)
        assert bool(layout.copy_records) == (case.way[1] == "ssd")
        assert layout.cpu_bytes + layout.exchange_bytes <= parse_bytes(case.settings["cpu_memory"])


@pytest.mark.slow
def test_ranks_with_different_ram_take_a_way_that_fits_all(tmp_path: Path) -> None:
    case, hardware = RANK_CASES["2 nodes"], HardwareProfile.from_mapping(SLOW_NETWORK)
    ram = (case.settings["cpu_memory"], "3264KiB")  # lent pieces take 192 KiB of it
    results = run_ranks(
        2, lambda links: train_rank(links, case, tmp_path, hardware, ram[links.ranks.rank]), num_local=1, timeout_s=120
    )
    for plan, layout in results:
        way = plan["cluster"]["collectives"]
        assert (way["forward"], way["backward"]) == ("delta", "ssd")
        assert layout.collectives == Collectives(**way)


def test_no_rank_has_a_plan_if_one_has_none(tmp_path: Path) -> None:
    case, hardware = RANK_CASES["2 nodes"], HardwareProfile.from_mapping(SLOW_NETWORK)
    results = run_ranks(
        2,
        lambda links: train_rank(links, case, tmp_path, hardware, fails=links.ranks.rank == 1),
        num_local=1,
        timeout_s=120,
    )
    assert [plan for plan, _layout in results] == [None, None]
    assert results[0][1].collectives == results[1][1].collectives
