"""Generation from the SSD where computing waits: how near to the bound, what reading ahead of the next token brings.

    python scripts/benchmarks/generate_from_ssd.py --store /mnt/nvme               # on the drive as it is
    python scripts/benchmarks/generate_from_ssd.py --store /dev/shm --drive 60e6  # on one of so many bytes a second
    python scripts/benchmarks/generate_from_ssd.py --num-experts 32               # a mixture, expert by expert

The layers compute by waiting (`paced_layers.py`), so the cores are as free as beside a GPU. All else is
real: engine, store, checksums, `model.generate`. With `--drive` reads are held up as one such drive would; else the
I/O engine alone reads the records first, and that is the drive's rate. Sides, in turns:

* `bytes`: a ring and an eighth of the layers stay, compute takes a quarter of what the drive needs for the rest;
* `balanced`: the same, and compute takes as long; `... alone`: without reading ahead from one token to the next;
* `ring`: slots of 70% of what all layers take, compute twice as long as the drive needs; `all`: the same compute with
  all layers on the device.

With `--num-experts` the same of experts: all layers stay on the device without theirs, and slots hold a quarter of all
experts, in `ring` 70%. There so many sequences are generated that each pass goes to all experts. `... alone`: no expert
is loaded before its router has spoken. *Missing* is what had to be loaded, less what nobody used.
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
from paced_backend import PacedBackend
from paced_device import PacedDevice
from paced_layers import pace_layers, paced_expert
from rich.console import Console
from transformers import AutoModelForCausalLM, LogitsProcessorList, Qwen3MoeConfig

import hf_lohan.engine.tiers
import hf_lohan.experts.expert_loader
import hf_lohan.huggingface.attachment
import hf_lohan.weights.block_loader
from hf_lohan.config import OffloadConfig
from hf_lohan.costs import KeysAndValues, SizeClass
from hf_lohan.engine import OffloadEngine, ParameterAccess, drain_model, open_tiers
from hf_lohan.experts.expert_schedule import DueExpert, ExpertSchedule
from hf_lohan.files import IoEngine
from hf_lohan.huggingface.attachment import attach
from hf_lohan.huggingface.generate.text_generation import PassClock
from hf_lohan.planning import OffloadLayout, bytes_per_token, lay_out_generation
from hf_lohan.planning.layout import resolved_here
from hf_lohan.weights.schedule import LoadSchedule

LINK_BYTES_PER_S = 20e9
RING = 3
EXPERTS_PER_TOKEN = 4
ROWS_OF_ALL = 8
"""Mean number of rows of an expert if all experts are used."""
NO_CACHE = KeysAndValues(num_sequences=1, num_tokens=1, num_bytes=0)
"""A small cache, so that only the size of the slots is measured."""


@dataclass(frozen=True)
class Side:
    """One of the measured variants."""

    name: str
    num_slots: Callable[[int], int]
    """Returns the number of slots for a number of layers or experts."""
    compute_over_drive: float
    """A token's compute time divided by the drive's time for the missing bytes."""
    carries_on: bool = True
    as_side: str = ""
    """The side whose compute time this side has; empty for its own."""
    uses_all: bool = False
    """Whether all experts of a layer are used in each pass."""


def quarter(num: int) -> int:
    return num // 4


def most(num: int) -> int:
    return num * 7 // 10


EXPERT_SIDES = (
    Side("bytes", quarter, 0.25),
    Side("bytes alone", quarter, 0.25, carries_on=False),
    Side("balanced", quarter, 1.0),
    Side("balanced alone", quarter, 1.0, carries_on=False),
    Side("ring", most, 2.0, uses_all=True),
    Side("all", lambda num: num, 0.0, as_side="ring", uses_all=True),
)
SIDES = (
    Side("bytes", lambda num: RING + num // 8, 0.25),
    Side("bytes alone", lambda num: RING + num // 8, 0.25, carries_on=False),
    Side("balanced", lambda num: RING + num // 8, 1.0),
    Side("balanced alone", lambda num: RING + num // 8, 1.0, carries_on=False),
    Side("ring", most, 2.0),
    Side("all", lambda num: num, 0.0, as_side="ring"),
)


@dataclass(frozen=True)
class Task:
    """The model and the sides to measure."""

    options: Options
    num_experts: int
    """Experts of each layer; 0 for a dense model."""

    @property
    def sides(self) -> tuple[Side, ...]:
        return EXPERT_SIDES if self.num_experts else SIDES

    @property
    def size_class(self) -> SizeClass:
        """The class of slots in which sides differ."""
        return SizeClass.EXPERT if self.num_experts else SizeClass.LAYER

    def num_sequences(self, side: Side) -> int:
        return ROWS_OF_ALL * self.num_experts // EXPERTS_PER_TOKEN if side.uses_all else 1

    def model(self) -> Any:
        if not self.num_experts:
            return self.options.shape.model(head_dim=64)
        shape = self.options.shape
        num_heads = max(1, shape.hidden // 64)
        config = Qwen3MoeConfig(
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            moe_intermediate_size=shape.intermediate,
            vocab_size=shape.vocabulary,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads,
            head_dim=64,
            num_experts=self.num_experts,
            num_experts_per_tok=EXPERTS_PER_TOKEN,
            mlp_only_layers=[],
        )
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if shape.bf16 else torch.float32)
        # As in a trained model, a layer changes its input by about a tenth.
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=10 * config.initializer_range)
        return model

    def flops(self, skeleton: Any, side: Side) -> float:
        """Return the FLOPs of a pass."""
        rows = self.num_sequences(side)
        share = EXPERTS_PER_TOKEN / self.num_experts if self.num_experts else 0.0
        dense = [p for layer in skeleton.model.layers for p in layer.parameters() if p.dim() == 2]
        fused = [p for layer in skeleton.model.layers for p in layer.parameters() if p.dim() == 3]
        return 2 * rows * (sum(p.numel() for p in dense) + share * sum(p.numel() for p in fused))


@dataclass(frozen=True)
class Turn:
    pass_s: float
    read_bytes: float
    missing_bytes: float
    slot_bytes: int
    compute_s: float


def slots_only(schedule: type[LoadSchedule]) -> Callable[..., LoadSchedule]:
    """Return a maker of schedules that expect no pass after an evaluation."""
    return lambda *args, **options: schedule(*args, **(options | {"carries_on": False}))


class SureLoads(ExpertSchedule):
    """Loads experts only after their router has chosen them."""

    def next_load(self, is_here: Callable[[Any], bool]) -> DueExpert | None:
        load = super().next_load(is_here)
        return load if load is not None and load.is_sure else None


def laid_out(model: Any, task: Task, side: Side, folder: Path) -> tuple[OffloadLayout, OffloadConfig]:
    """Return a layout with the side's number of slots."""
    config = OffloadConfig.load(
        gpu_memory="1TiB", cpu_memory=task.options.cpu_memory, ssd=str(folder / "store"), _resident_records="none",
        activations="keep", durability="checkpoint", prefetch_blocks=RING - 1, **{"experts.cache": "off"},
        experts="streamed" if task.num_experts else "auto",
    )  # fmt: skip
    device = PacedDevice(link_bytes_per_s=LINK_BYTES_PER_S, flops_per_s=1e18)
    config = resolved_here(config, device, folder)

    def lay_out(config: OffloadConfig) -> OffloadLayout:
        return lay_out_generation(
            model,
            config,
            working_dtype=None,
            keys_and_values=replace(NO_CACHE, num_sequences=task.num_sequences(side)),
            memory_is_host=device.memory_is_host,
            experts_per_token=EXPERTS_PER_TOKEN if task.num_experts else None,
        )

    whole = lay_out(config).plan
    slot_bytes, num_slots = whole.slot_bytes[task.size_class], whole.num_slots[task.size_class]
    others = whole.gpu_pool_bytes - num_slots * slot_bytes
    config = replace(config, gpu_memory=others + side.num_slots(num_slots) * slot_bytes)
    return lay_out(config), config


@contextmanager
def generating(
    task: Task, side: Side, folder: Path, *, drive_bytes_per_s: float | None, flops_per_s: float
) -> Iterator[tuple[Any, OffloadEngine, PacedDevice]]:
    device = PacedDevice(link_bytes_per_s=LINK_BYTES_PER_S, flops_per_s=flops_per_s)
    model = task.model()
    model.generation_config.use_cache = True
    getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
    pace_layers(model.model.layers, device)
    model.eval().requires_grad_(False)
    layout, config = laid_out(model, task, side, folder)
    with ExitStack() as held:
        if drive_bytes_per_s is not None:
            backend = PacedBackend(drive_bytes_per_s)
            paced = lambda *args, **kwargs: IoEngine(*args, **{**kwargs, "backend": backend})  # noqa: E731
            held.enter_context(patch.object(hf_lohan.engine.tiers, "IoEngine", paced))
        if not side.carries_on:
            schedule = slots_only(LoadSchedule)
            held.enter_context(patch.object(hf_lohan.weights.block_loader, "LoadSchedule", schedule))
            held.enter_context(patch.object(hf_lohan.experts.expert_loader, "ExpertSchedule", SureLoads))
        if task.num_experts:
            held.enter_context(patch.object(hf_lohan.huggingface.attachment, "one_expert", paced_expert(device)))
        tiers = open_tiers(layout, config, device)
        drain_model(layout.blocks, ParameterAccess(tiers.store, layout.blocks, tiers.states, tiers.links))
        engine = attach(model, layout, tiers, config)
    engine.commits.leave_to_journal()
    try:
        yield model, engine, device
    finally:
        engine.close()


def run(task: Task, side: Side, folder: Path, num_tokens: int, **rates: Any) -> Turn:
    """Take a turn of a side, with ``num_tokens`` timed tokens after the prompt and two more tokens."""
    with generating(task, side, folder, **rates) as (model, engine, device):
        clock, computed, loaded = PassClock(engine), [], []

        def note(_ids: Any, scores: torch.Tensor) -> torch.Tensor:
            computed.append(device.paced_s)
            if engine.expert_loader is not None:
                figures = engine.expert_loader.figures
                loaded.append(figures.loaded_bytes - figures.wrong_bytes)
            return clock(_ids, scores)

        prompt = torch.arange(4 * task.num_sequences(side)).view(-1, 4) % task.options.vocabulary
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
            missing_bytes=(loaded[-1] - loaded[2]) / num_tokens if loaded else bytes_per_token(engine.layout),
            slot_bytes=engine.peak_gpu_pool_bytes,
            compute_s=(computed[-1] - computed[2]) / num_tokens,
        )


def drive_alone_bytes_per_s(task: Task, folder: Path) -> float:
    """Return the rate at which the I/O engine alone reads the records of layers or experts, twice."""
    with generating(task, task.sides[0], folder, drive_bytes_per_s=None, flops_per_s=1e18) as (_, engine, _):
        blocks = [block for block in engine.layout.blocks if block.size_class is task.size_class]
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
    tokens: Annotated[int, typer.Option(help="timed tokens of each turn and side")] = 8,
    num_experts: Annotated[int, typer.Option(help="experts of each layer; 0: a dense model")] = 0,
) -> dict[str, Any]:
    task = Task(options, num_experts)
    with folder_in(options.store) as folder:
        rate = drive or drive_alone_bytes_per_s(task, folder)
        turns: dict[str, list[Turn]] = {side.name: [] for side in task.sides}
        flops: dict[str, float] = {}
        for side in task.sides:
            with torch.device("meta"):
                skeleton = task.model().requires_grad_(False)
            layout, _ = laid_out(skeleton, task, side, folder)
            drive_s = bytes_per_token(layout) / rate
            flops[side.name] = (
                flops[side.as_side]
                if side.as_side
                else task.flops(skeleton, side) / (side.compute_over_drive * drive_s)
            )
        for _ in range(options.num_turns):
            for side in task.sides:
                turn = run(task, side, folder, tokens, drive_bytes_per_s=drive, flops_per_s=flops[side.name])
                turns[side.name].append(turn)
    times = {name: [turn.pass_s for turn in of] for name, of in turns.items()}
    bounds = {
        name: max(statistics.median(turn.missing_bytes for turn in of) / rate, of[0].compute_s)
        for name, of in turns.items()
    }
    ratios = {
        "bytes: share of the bound": bounds["bytes"] / statistics.median(times["bytes"]),
        "balanced: share of the bound": bounds["balanced"] / statistics.median(times["balanced"]),
        "bytes: without reading ahead of the next token, over with": pairs_ratio(times, "bytes alone", "bytes"),
        "balanced: without, over with": pairs_ratio(times, "balanced alone", "balanced"),
        "ring: slots of layers or experts, over all": 0.7,
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
    name = {"benchmark": "generate_experts"} if num_experts else {}
    return {
        **name,
        "num_experts": num_experts,
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
