"""Compares a step of adapters over a packed base with a step over an unpacked one, on a drive of a given rate, and
measures how fast packed weights are decoded.

    python scripts/benchmarks/bench_packed.py
    python scripts/benchmarks/bench_packed.py --drive 3e9 --method nf4 --bf16

Reads are held to the drive's rate (`paced_backend.PacedBackend`). No record stays in RAM. Each turn is a run of each
side.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import typer
from benchmarking import Options, Shape, benchmark, folder_in, in_turns, spread, table_of
from paced_backend import PacedBackend
from peft import LoraConfig
from rich.console import Console
from transformers import TrainerCallback, TrainingArguments

import hf_lohan
import hf_lohan.engine.tiers
from hf_lohan.costs import Quantization
from hf_lohan.files import IoEngine
from hf_lohan.quantize import FourBitForm
from hf_lohan.report.run_data import FOLDER, STEPS_NAME

NUM_WARM_UP_STEPS = 3
DECODED_NUMEL = 4 << 20


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends_s.append(time.perf_counter())


def decoded_per_s(method: str, dtype: torch.dtype, *, double: bool) -> float:
    """Return how many weights a second the threads of torch decode."""
    form = FourBitForm(Quantization(method=method, double=double), DECODED_NUMEL)  # type: ignore[arg-type]
    packer, out = form.packer(), torch.empty(DECODED_NUMEL, dtype=dtype)
    (_, codes), scales = packer.pack(torch.randn(DECODED_NUMEL)), packer.pack_scales()
    form.decode_(out, 0, codes, 0, scales)
    began_s = time.perf_counter()
    form.decode_(out, 0, codes, 0, scales)
    return DECODED_NUMEL / (time.perf_counter() - began_s)


def run(checkpoint: Path, shape: Shape, offload: dict[str, Any], num_steps: int, drive: float) -> tuple[float, int]:
    """Return the median seconds of a step, and the bytes that a step reads."""
    rows = [{"input_ids": row, "labels": row} for one in shape.batches(8, "cpu") for row in one["input_ids"]]
    clock, backend = Clock(), PacedBackend(drive)
    with tempfile.TemporaryDirectory(dir=checkpoint.parent) as folder:
        args = TrainingArguments(
            folder,
            use_cpu=True,
            bf16=shape.bf16,
            max_steps=NUM_WARM_UP_STEPS + num_steps,
            per_device_train_batch_size=shape.batch_size,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        adapters = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        paced = lambda *args, **kwargs: IoEngine(*args, **{**kwargs, "backend": backend})  # noqa: E731
        with patch.object(hf_lohan.engine.tiers, "IoEngine", paced):
            trainer = hf_lohan.Trainer(
                checkpoint, args, train_dataset=rows, offload=offload, peft_config=adapters, callbacks=[clock]
            )
            trainer.train()
            trainer.offload_engine.close()
        last = (Path(folder) / FOLDER / STEPS_NAME).read_text().splitlines()[-1]
    times = [end - begin for begin, end in zip(clock.ends_s, clock.ends_s[1:], strict=False)]
    return statistics.median(times[NUM_WARM_UP_STEPS - 1 :]), int(json.loads(last)["ssd_read_bytes"])


@benchmark("packed", hidden=768, layers=11, intermediate=2048, vocabulary=2000, batch_size=1, sequence_length=16)
def main(options: Options, *, method: str = "nf4", drive: float = 0.5e9, steps_per_turn: int = 8) -> dict[str, Any]:
    offload = {"_resident_records": "none", "cpu_memory": "200MiB", "gpu_memory": "100MiB"}
    sides = {"unpacked": offload | {"quantize": "none"}, "packed": offload | {"quantize": method}}
    read_bytes: dict[str, int] = {}
    with folder_in(options.store) as folder:
        checkpoint = folder / "checkpoint"
        options.shape.model().save_pretrained(checkpoint)

        def step(name: str) -> float:
            step_s, read_bytes[name] = run(checkpoint, options.shape, sides[name], steps_per_turn, drive)
            return step_s

        turns = in_turns({name: lambda name=name: step(name) for name in sides}, options.num_turns)
    forms = {
        f"{name}{'' if double else ', plain scales'}, {str(dtype).removeprefix('torch.')}": (name, dtype, double)
        for name in ("nf4", "fp4")
        for double in (True, False)
        for dtype in (torch.float32, torch.bfloat16)
    }
    decoding = in_turns(
        {text: lambda of=of: decoded_per_s(of[0], of[1], double=of[2]) for text, of in forms.items()}, options.num_turns
    )
    result = {"method": method, "drive_bytes_per_s": drive, **spread("step_s", turns), "read_bytes": read_bytes}
    result |= spread("decoded_per_s", decoding)
    result["ratio"] = result["step_s"]["unpacked"] / result["step_s"]["packed"]
    table = table_of(f"a step, the drive at {drive / 1e9:g} GB/s", "", "s", "bytes read")
    for name, seconds in result["step_s"].items():
        table.add_row(name, f"{seconds:.3f}", f"{read_bytes[name] / 1e6:.0f} MB")
    Console().print(table)
    Console().print(f"packed is {result['ratio']:.2f} times as fast")
    rates = table_of(f"decoding, {torch.get_num_threads()} threads", "", "billion weights a second")
    for name, rate in result["decoded_per_s"].items():
        rates.add_row(name, f"{rate / 1e9:.2f}")
    Console().print(rates)
    return result


if __name__ == "__main__":
    typer.run(main)
