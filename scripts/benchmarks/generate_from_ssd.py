"""Generation from the SSD where computing waits: how near to the bound, what reading ahead of the next token brings.

    python scripts/benchmarks/generate_from_ssd.py --store /mnt/nvme               # on the drive as it is
    python scripts/benchmarks/generate_from_ssd.py --store /dev/shm --drive 60e6  # on one of so many bytes a second

The layers compute by waiting (`hf_lohan.testing.paced_layers`), so the cores are as free as beside a GPU. All else is
real: engine, store, checksums, `model.generate`. With `--drive` reads are held up as one such drive would; else the
I/O engine alone reads the records first, and that is the drive's rate. Sides, in turns:

* `bytes`: a ring and an eighth of the layers stay, compute takes a quarter of what the drive needs for the rest;
* `balanced`: the same, and compute takes as long; `... alone`: without reading ahead from one token to the next;
* `ring`: slots of 70% of what all layers take, compute twice as long as the drive needs; `all`: the same compute with
  all layers on the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from benchmarking import Options, benchmark, folder_in, pairs_ratio, spread, table_of
from rich.console import Console
from transformers import LogitsProcessorList

import hf_lohan.engine.memory
import hf_lohan.weights.prefetcher
from hf_lohan.config import OffloadConfig
from hf_lohan.engine import OffloadEngine, ParameterAccess, drain_model, open_tiers
from hf_lohan.files import IoEngine
from hf_lohan.huggingface.attachment import attach
from hf_lohan.huggingface.text_generation import PassClock
from hf_lohan.planner import KeysAndValues, SizeClass
from hf_lohan.planning import OffloadLayout, bytes_per_token, lay_out_generation
from hf_lohan.planning.layout import resolved_here
from hf_lohan.testing.paced_device import PacedDevice
from hf_lohan.testing.paced_layers import pace_layers
from hf_lohan.testing.storage_doubles import PacedBackend
from hf_lohan.weights.schedule import LoadSchedule

LINK_BYTES_PER_S = 20e9
RING = 3
NO_CACHE = KeysAndValues(num_sequences=1, num_tokens=1, num_bytes=0)
"""Of a few tokens: what slots take is told apart from it."""


@dataclass(frozen=True)
class Side:
    """What is measured beside others."""

    name: str
    num_slots: Callable[[int], int]
    """For layers, of so many."""
    compute_over_drive: float
    """How long compute takes a token, over what the drive needs for what is missing."""
    carries_on: bool = True
    as_side: str = ""
    """Whose compute it has, if not its own."""


SIDES = (
    Side("bytes", lambda num: RING + num // 8, 0.25),
    Side("bytes alone", lambda num: RING + num // 8, 0.25, carries_on=False),
    Side("balanced", lambda num: RING + num // 8, 1.0),
    Side("balanced alone", lambda num: RING + num // 8, 1.0, carries_on=False),
    Side("ring", lambda num: num * 7 // 10, 2.0),
    Side("all", lambda num: num, 0.0, as_side="ring"),
)


@dataclass(frozen=True)
class Turn:
    pass_s: float
    read_bytes: float
    missing_bytes: int
    slot_bytes: int
    compute_s: float


def slots_only(schedule: type[LoadSchedule]) -> Callable[..., LoadSchedule]:
    """Schedules that foresee nothing behind an evaluation."""
    return lambda *args, **options: schedule(*args, **(options | {"carries_on": False}))


def laid_out(model: Any, options: Options, side: Side, folder: Path) -> tuple[OffloadLayout, OffloadConfig]:
    """With as many slots for layers as the side wants, and slots for all else."""
    config = OffloadConfig.load(
        gpu_memory="1TiB", cpu_memory=options.cpu_memory, ssd=str(folder / "store"), resident_records="none",
        activations="keep", durability="checkpoint", prefetch_blocks=RING - 1,
    )  # fmt: skip
    device = PacedDevice(link_bytes_per_s=LINK_BYTES_PER_S, flops_per_s=1e18)
    config = resolved_here(config, device, folder)

    def lay_out(config: OffloadConfig) -> OffloadLayout:
        return lay_out_generation(
            model, config, working_dtype=None, keys_and_values=NO_CACHE, memory_is_host=device.memory_is_host
        )

    whole = lay_out(config).plan
    layer_bytes, num_layers = whole.slot_bytes[SizeClass.LAYER], whole.num_slots[SizeClass.LAYER]
    others = whole.gpu_pool_bytes - num_layers * layer_bytes
    config = replace(config, gpu_memory=others + side.num_slots(num_layers) * layer_bytes)
    return lay_out(config), config


@contextmanager
def generating(
    options: Options, side: Side, folder: Path, *, drive_bytes_per_s: float | None, flops_per_s: float
) -> Iterator[tuple[Any, OffloadEngine, PacedDevice]]:
    device = PacedDevice(link_bytes_per_s=LINK_BYTES_PER_S, flops_per_s=flops_per_s)
    model = options.shape.model(head_dim=64)
    model.generation_config.use_cache = True
    getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
    pace_layers(model.model.layers, device)
    model.eval().requires_grad_(False)
    layout, config = laid_out(model, options, side, folder)
    with ExitStack() as held:
        if drive_bytes_per_s is not None:
            backend = PacedBackend(drive_bytes_per_s)
            paced = lambda *args, **kwargs: IoEngine(*args, **kwargs, backend=backend)  # noqa: E731
            held.enter_context(patch.object(hf_lohan.engine.memory, "IoEngine", paced))
        if not side.carries_on:
            schedule = slots_only(LoadSchedule)
            held.enter_context(patch.object(hf_lohan.weights.prefetcher, "LoadSchedule", schedule))
        tiers = open_tiers(layout, config, device)
        drain_model(layout.blocks, ParameterAccess(tiers.store, layout.blocks, tiers.states, tiers.links))
        engine = attach(model, layout, tiers, config)
    engine.commits.leave_to_journal()
    try:
        yield model, engine, device
    finally:
        engine.close()


def run(options: Options, side: Side, folder: Path, num_tokens: int, **rates: Any) -> Turn:
    """A turn of a side: so many tokens behind the prompt's and two more."""
    with generating(options, side, folder, **rates) as (model, engine, device):
        clock, computed = PassClock(engine), []

        def note(_ids: Any, scores: torch.Tensor) -> torch.Tensor:
            computed.append(device.paced_s)
            return clock(_ids, scores)

        prompt = torch.arange(1, 5)[None]
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=num_tokens + 3,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([note]),
        )
        del clock.passes[:2]
        pass_s, read_bytes = clock.per_pass()
        return Turn(
            pass_s=pass_s,
            read_bytes=read_bytes,
            missing_bytes=bytes_per_token(engine.layout),
            slot_bytes=engine.peak_gpu_pool_bytes,
            compute_s=(computed[-1] - computed[2]) / num_tokens,
        )


def drive_alone_bytes_per_s(options: Options, folder: Path) -> float:
    """What the I/O engine reads with nothing else to do: the layers' records, twice."""
    with generating(options, SIDES[0], folder, drive_bytes_per_s=None, flops_per_s=1e18) as (_, engine, _):
        blocks = [block for block in engine.layout.blocks if block.size_class is SizeClass.LAYER]
        dtype = engine.layout.master.working_dtype
        memory = [engine.device.host_empty(block.param_bytes).view(dtype) for block in blocks[:RING]]
        began_s = time.perf_counter()
        reads: list[Any] = []
        for number, block in enumerate([*blocks, *blocks]):
            if number >= RING:
                reads[number - RING].wait()
            reads.append(engine.tiers.store.read(block.name, "param", 0, memory[number % RING], is_urgent=True))
        for read in reads[-RING:]:
            read.wait()
        return 2 * sum(block.param_bytes for block in blocks) / (time.perf_counter() - began_s)


@benchmark(
    "generate", layers=24, hidden=512, intermediate=1408, vocabulary=256, bf16=True, cpu_memory="256MiB", num_turns=3
)
def main(
    options: Options,
    *,
    drive: Annotated[float | None, typer.Option(help="bytes a second; default: the drive of --store as it is")] = None,
    tokens: Annotated[int, typer.Option(help="a turn and side")] = 8,
) -> dict[str, Any]:
    with folder_in(options.store) as folder:
        rate = drive or drive_alone_bytes_per_s(options, folder)
        turns: dict[str, list[Turn]] = {side.name: [] for side in SIDES}
        flops: dict[str, float] = {}
        for side in SIDES:
            with torch.device("meta"):
                skeleton = options.shape.model(head_dim=64).requires_grad_(False)
            layout, _ = laid_out(skeleton, options, side, folder)
            products = [p for layer in skeleton.model.layers for p in layer.parameters() if p.dim() == 2]
            layer_flops = sum(2 * product.numel() for product in products)
            drive_s = bytes_per_token(layout) / rate
            flops[side.name] = (
                flops[side.as_side] if side.as_side else layer_flops / (side.compute_over_drive * drive_s)
            )
        for _ in range(options.num_turns):
            for side in SIDES:
                turn = run(options, side, folder, tokens, drive_bytes_per_s=drive, flops_per_s=flops[side.name])
                turns[side.name].append(turn)
    times = {name: [turn.pass_s for turn in of] for name, of in turns.items()}
    bounds = {name: max(of[0].missing_bytes / rate, of[0].compute_s) for name, of in turns.items()}
    ratios = {
        "bytes: share of the bound": bounds["bytes"] / statistics.median(times["bytes"]),
        "balanced: share of the bound": bounds["balanced"] / statistics.median(times["balanced"]),
        "bytes: without reading ahead of the next token, over with": pairs_ratio(times, "bytes alone", "bytes"),
        "balanced: without, over with": pairs_ratio(times, "balanced alone", "balanced"),
        "ring: slots of layers, over all": SIDES[4].num_slots(options.layers) / options.layers,
        "ring: peak of all slots, over all": turns["ring"][0].slot_bytes / turns["all"][0].slot_bytes,
        "ring: speed, over all": pairs_ratio(times, "all", "ring"),
    }
    console, table = Console(), table_of("a token", "side", "median", "bound", "compute", "read", "missing", "slots")
    for name, of in turns.items():
        numbers = [statistics.median(times[name]), bounds[name], of[0].compute_s]
        sizes = [statistics.median(turn.read_bytes for turn in of), of[0].missing_bytes, of[0].slot_bytes]
        table.add_row(name, *(f"{s * 1e3:.1f} ms" for s in numbers), *(f"{num / 1e6:.1f} MB" for num in sizes))
    console.print(table)
    for what, ratio in ratios.items():
        console.print(f"{what}: {ratio:.3f}")
    return {
        "drive_bytes_per_s": rate,
        "is_drive_paced": drive is not None,
        "num_tokens": tokens,
        **spread("token_s", times),
        "bound_s": bounds,
        "read_bytes_per_token": {name: [turn.read_bytes for turn in of] for name, of in turns.items()},
        "missing_bytes_per_token": {name: of[0].missing_bytes for name, of in turns.items()},
        "slot_bytes": {name: of[0].slot_bytes for name, of in turns.items()},
        "ratios": ratios,
    }


if __name__ == "__main__":
    typer.run(main)
