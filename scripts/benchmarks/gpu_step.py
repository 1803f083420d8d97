"""Compares an offloaded step of a Llama with the width of an 8B model on a GPU with the same step in memory.

    python scripts/benchmarks/gpu_step.py --device cuda --output docs/benchmarks
    python scripts/benchmarks/gpu_step.py --hidden 64 --layers 2 --intermediate 128 --vocabulary 128 --num-turns 1

The model has random bfloat16 weights and few layers. `--device-gb` limits the GPU's memory. The model runs first in
memory (with torch's fused AdamW on bfloat16, which has less state than the offloaded side), and then offloaded, in
turns of three steps. The figures also have the host's waits for the device in a step, whether host memory is pinned,
and the peak of device memory. The first losses of both sides must be equal.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch
import typer
from benchmarking import (
    Options,
    Shape,
    benchmark,
    folder_in,
    in_memory_step,
    in_turns,
    offloaded_step,
    spread,
    synchronize,
    table_of,
    turn,
)
from io_alone import moved_bytes
from rich.console import Console

from hf_lohan.config import OffloadConfig
from hf_lohan.hardware import AnonymousMemoryPeak
from hf_lohan.huggingface.attachment import offload_model
from hf_lohan.wording import format_bytes

IMPLICIT = "synchronizing CUDA operation"
"""Text in the warning of torch's debug mode for `.item()` and similar calls."""


def model_of(shape: Shape, device: str) -> Any:
    """Return a model with heads as in Llama 3 8B."""
    return shape.model(head_dim=min(128, shape.hidden // 4), heads_per_key=4).to(device)


def hold_to(device: str, num_bytes: float) -> None:
    """Limit the GPU's memory to ``num_bytes``."""
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total))


@contextlib.contextmanager
def counting_waits(device: str) -> Iterator[Counter[str]]:
    """Count the waits of all threads for the device, by the kind of wait. Empty on a CPU."""
    waits: Counter[str] = Counter()
    if device != "cuda":
        yield waits
        return

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            waits[name] += 1
            return real(*args, **options)

        return call

    places = [(torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda, "synchronize")]
    real = [getattr(owner, name) for owner, name in places]
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for (owner, name), function in zip(places, real, strict=True):
            setattr(owner, name, counted(f"{owner.__name__}.{name}", function))
        try:
            yield waits
        finally:
            for (owner, name), function in zip(places, real, strict=True):
                setattr(owner, name, function)
            torch.cuda.set_sync_debug_mode(before)
    waits["implicit"] = sum(IMPLICIT in str(warning.message) for warning in seen)


class DevicePeak:
    """Peak device memory in this context. On a CPU it is the peak memory of the process."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._process = AnonymousMemoryPeak()
        self.num_bytes = 0

    def __enter__(self) -> DevicePeak:
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            self._process.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._device == "cuda":
            self.num_bytes = torch.cuda.max_memory_allocated()
        else:
            self._process.stop()
            self.num_bytes = self._process.peak_bytes


def in_memory(options: Options, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    model = model_of(options.shape, options.device)
    with torch.no_grad():
        first_loss = model(**batch).loss.item()
    step = in_memory_step(model, batch, 1.0)
    turn(step, device=options.device)
    with DevicePeak(options.device) as peak:
        times = in_turns({"in_memory": lambda: turn(step, device=options.device)}, options.num_turns)
    return {"first_loss": first_loss, "times": times, "peak_bytes": peak.num_bytes}


def offloaded(options: Options, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    device = options.device
    with folder_in(options.store) as folder:
        config = OffloadConfig.load({**options.budgets, "activations": "recompute", "ssd": str(folder)})
        engine = offload_model(model_of(options.shape, "cpu"), config, torch_device=device, default_ssd_path=folder)
        try:
            model: Any = engine.model
            with torch.no_grad():
                first_loss = model(**batch).loss.item()
            step = offloaded_step(engine, batch, 1.0)
            turn(step, engine.wait_for_updates, device=device)
            before = moved_bytes(engine)
            with counting_waits(device) as waits:
                step()
                synchronize(device)
            engine.wait_for_updates()
            after = moved_bytes(engine)
            with DevicePeak(device) as peak:
                finish = engine.wait_for_updates
                times = in_turns({"offloaded": lambda: turn(step, finish, device=device)}, options.num_turns)
            return {
                "first_loss": first_loss,
                "times": times,
                "peak_bytes": peak.num_bytes,
                "waits_for_device_per_step": dict(waits),
                "num_parameter_tensors": sum(1 for _ in model.parameters()),
                "num_parameters": engine.layout.num_parameters,
                "store_bytes": engine.tiers.store.size_bytes,
                "read_bytes_per_step": after[0] - before[0],
                "write_bytes_per_step": after[1] - before[1],
                "is_pinned": engine.device.describe().get("pinned_host_memory"),
            }
        finally:
            engine.close()


@benchmark(
    "gpu_step",
    hidden=4096,
    layers=2,
    intermediate=14336,
    vocabulary=128256,
    batch_size=4,
    sequence_length=1024,
    bf16=True,
    cpu_memory="32GiB",
    gpu_memory="12GiB",
)
def main(
    options: Options,
    *,
    device_gb: Annotated[float, typer.Option(help="the GPU's memory that may be used, in 10^9 bytes")] = 24.0,
) -> dict[str, Any]:
    hold_to(options.device, device_gb * 1e9)
    batch = options.shape.batch(options.device)
    memory = in_memory(options, batch)
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    offload = offloaded(options, batch)
    figures = spread("step_s", memory.pop("times") | offload.pop("times"))
    step_s = figures["step_s"]
    num_tokens = options.batch_size * options.sequence_length
    result = {
        "device_gb": device_gb,
        **figures,
        "ratio": step_s["offloaded"] / step_s["in_memory"],
        "tokens_per_s": {side: num_tokens / seconds for side, seconds in step_s.items()},
        "first_losses_equal": memory["first_loss"] == offload["first_loss"],
        "in_memory": memory,
        "offloaded": offload,
    }
    table = table_of("a step on the device, in memory and offloaded (medians)", "", "in memory", "offloaded")
    table.add_row("a step", *(f"{step_s[side]:.3f} s" for side in ("in_memory", "offloaded")))
    table.add_row("peak", format_bytes(memory["peak_bytes"]), format_bytes(offload["peak_bytes"]))
    table.add_row("first loss", f"{memory['first_loss']:.6f}", f"{offload['first_loss']:.6f}")
    table.add_row("moved to and from the SSDs", "", format_bytes(_moved(offload)))
    table.add_row("waits for the device", "", str(sum(offload["waits_for_device_per_step"].values())))
    table.add_row("pinned host memory", "", str(offload["is_pinned"]))
    Console().print(table)
    return result


def _moved(offload: dict[str, Any]) -> int:
    return int(offload["read_bytes_per_step"] + offload["write_bytes_per_step"])


if __name__ == "__main__":
    typer.run(main)
