"""Measures a model larger than memory: loading, training, saving, and the share of the drive's rate that a step
reaches.

    python scripts/benchmarks/bench_large.py  # 1.1B parameters, 1 x 32 tokens
    python scripts/benchmarks/bench_large.py --hidden 3072 --layers 25 --intermediate 8192 --cpu-memory 4GiB  # 3B

A checkpoint of random weights is written layer by layer, and loaded with `from_pretrained`. Turns of steps and of the
I/O engine alone are interleaved. Alone, the I/O engine moves the same records in the run's chunks, with the step's
share of reads and all buffers in use. It writes back the data that it reads, so that training can continue.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from benchmarking import STEPS_PER_TURN, Options, Shape, benchmark, folder_in, offloaded_step, synchronize
from io_alone import alone_bytes_per_s, moments_of, moved_bytes
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

import hf_lohan
from hf_lohan.config import OffloadConfig, parse_bytes
from hf_lohan.engine import OffloadEngine
from hf_lohan.hardware import AnonymousMemoryPeak


def write_checkpoint(shape: Shape, folder: Path) -> int:
    """Write random weights as transformers would save them, with one file per layer. Returns their bytes."""
    with torch.device("meta"):
        model = shape.model()
    model.config.save_pretrained(folder)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        layer = name.split(".layers.")[-1].split(".")[0] if ".layers." in name else name
        files.setdefault(layer, {})[name] = parameter
    generator = torch.Generator().manual_seed(0)
    weight_map, total_bytes = {}, 0
    for number, named in enumerate(files.values()):
        file_name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        tensors = {}
        for name, parameter in named.items():
            weight_map[name] = file_name
            value = torch.ones(parameter.shape)
            tensors[name] = (value.normal_(0, 0.02, generator=generator) if parameter.dim() > 1 else value).to(
                parameter.dtype
            )
            total_bytes += tensors[name].nbytes
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total_bytes


def train(
    engine: OffloadEngine,
    shape: Shape,
    *,
    device: str,
    max_grad_norm: float,
    num_turns: int,
    steps_per_turn: int,
    alone_bytes: int,
) -> dict[str, Any]:
    """Take turns of steps, each after a turn of the I/O engine alone. A turn's first step is not timed."""
    model: Any = engine.model
    batch = shape.batch(device)
    step = offloaded_step(engine, batch, max_grad_norm)
    step()
    engine.wait_for_updates()
    where = moments_of(engine)
    turns: dict[str, list[float]] = {"step_s": [], "bytes_per_s": [], "alone_bytes_per_s": [], "share": []}
    reads, writes = [], []
    for _ in range(num_turns):
        write_share = writes[-1] / reads[-1] if reads else 0.9
        turns["alone_bytes_per_s"].append(alone_bytes_per_s(engine, where, write_share, num_bytes=alone_bytes))
        step()
        synchronize(device)
        before, began_s = moved_bytes(engine), time.perf_counter()
        for _ in range(steps_per_turn):
            step()
        synchronize(device)
        turns["step_s"].append((time.perf_counter() - began_s) / steps_per_turn)
        after = moved_bytes(engine)
        reads.append((after[0] - before[0]) / steps_per_turn)
        writes.append((after[1] - before[1]) / steps_per_turn)
        turns["bytes_per_s"].append((reads[-1] + writes[-1]) / turns["step_s"][-1])
        turns["share"].append(turns["bytes_per_s"][-1] / turns["alone_bytes_per_s"][-1])
        engine.wait_for_updates()
    loss = model(**batch).loss.item()
    medians = {name: statistics.median(values) for name, values in turns.items()}
    moved = statistics.median(reads) + statistics.median(writes)
    return {
        "max_grad_norm": max_grad_norm,
        "num_tokens": batch["input_ids"].numel(),
        "read_bytes_per_step": statistics.median(reads),
        "write_bytes_per_step": statistics.median(writes),
        **medians,
        "io_floor_s": moved / medians["alone_bytes_per_s"],
        **{f"{name}_spread": [min(values), max(values)] for name, values in turns.items()},
        "all": turns,
        "loss_after": loss,
    }


def measure(
    shape: Shape,
    config: OffloadConfig,
    folder: Path,
    *,
    device: str,
    max_grad_norm: float,
    num_turns: int,
    steps_per_turn: int,
    alone_bytes: int,
) -> dict[str, Any]:
    checkpoint, saved = folder / "checkpoint", folder / "saved"
    checkpoint.mkdir()
    checkpoint_bytes = write_checkpoint(shape, checkpoint)
    peak = AnonymousMemoryPeak()
    peak.start()
    began_s = time.perf_counter()
    model = hf_lohan.from_pretrained(
        checkpoint, config, torch_device=device, default_ssd_path=folder, hold_gradients=max_grad_norm > 0
    )
    load_s = time.perf_counter() - began_s
    load_peak_bytes = peak.take_recent_peak()
    shutil.rmtree(checkpoint)
    engine = hf_lohan.engine_of(model)
    try:
        model.train()
        result = train(
            engine,
            shape,
            device=device,
            max_grad_norm=max_grad_norm,
            num_turns=num_turns,
            steps_per_turn=steps_per_turn,
            alone_bytes=alone_bytes,
        )
        train_peak_bytes = peak.take_recent_peak()
        began_s = time.perf_counter()
        model.save_pretrained(saved)
        save_s = time.perf_counter() - began_s
        peak.stop()
        return {
            "num_parameters": engine.layout.num_parameters,
            "store_bytes": engine.tiers.store.size_bytes,
            "durability": engine.tiers.store.durability,
            "cpu_pool_bytes": engine.layout.plan.cpu_pool_bytes,
            "gpu_pool_bytes": engine.layout.plan.gpu_pool_bytes,
            "checkpoint_bytes": checkpoint_bytes,
            "load_s": load_s,
            "save_s": save_s,
            "peak_anonymous_bytes": {
                "loading": load_peak_bytes,
                "training": train_peak_bytes,
                "saving": peak.take_recent_peak(),
            },
            **result,
        }
    finally:
        engine.close()


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['num_parameters'] / 1e9:.2f}B parameters, medians, interleaved")
    for heading in ("what", "measured"):
        table.add_column(heading)
    peaks = result["peak_anonymous_bytes"]
    gb_per_s = result["checkpoint_bytes"] / 1e9
    moved = result["read_bytes_per_step"] + result["write_bytes_per_step"]
    rows = {
        "load": f"{result['load_s']:.1f} s, {gb_per_s / result['load_s']:.2f} GB/s of checkpoint",
        "a step": f"{result['step_s']:.2f} s (floor by bytes: {result['io_floor_s']:.2f} s)",
        "moved a step": f"{moved / 1e9:.2f} GB at {result['bytes_per_s'] / 1e9:.2f} GB/s",
        "the I/O engine alone": f"{result['alone_bytes_per_s'] / 1e9:.2f} GB/s",
        "share of it, median of turns": f"{result['share']:.3f}",
        "save": f"{result['save_s']:.1f} s, {gb_per_s / result['save_s']:.2f} GB/s of checkpoint",
        "loss afterwards": f"{result['loss_after']:.4f}",
        "store": f"{result['store_bytes'] / 1e9:.1f} GB, durability: {result['durability']}",
        **{f"anonymous memory, {what}": f"{peaks[what] / 1e9:.2f} GB" for what in peaks},
    }
    for what, measured in rows.items():
        table.add_row(what, measured)
    Console().print(table)


@benchmark(
    "large",
    hidden=2048,
    layers=15,
    intermediate=8192,
    vocabulary=16384,
    batch_size=1,
    sequence_length=32,
    cpu_memory="2GiB",
    gpu_memory="2GiB",
)
def main(
    options: Options,
    *,
    durability: str = "auto",
    max_grad_norm: float = 1.0,
    steps_per_turn: int = STEPS_PER_TURN,
    alone_bytes: Annotated[str, typer.Option(help="bytes that the I/O engine alone moves in a turn")] = "6GB",
) -> dict[str, Any]:
    settings = {**options.budgets, "durability": durability, "activations": "recompute"}
    with folder_in(options.store) as folder:
        result = measure(
            options.shape,
            OffloadConfig.load({**settings, "ssd": str(folder / "store")}),
            folder,
            device=options.device,
            max_grad_norm=max_grad_norm,
            num_turns=options.num_turns,
            steps_per_turn=steps_per_turn,
            alone_bytes=parse_bytes(alone_bytes),
        )
    show(result)
    return {"benchmark": f"large_{result['num_parameters'] / 1e9:.0f}b", **result}


if __name__ == "__main__":
    typer.run(main)
