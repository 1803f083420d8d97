"""What `optimizer_state_dtype` does to a real fine-tune: its losses, its weights, its bytes and its time.

    bash scripts/quickstart.sh                                   # for its inputs, in quickstart_out/
    python scripts/benchmarks/measure_state_dtypes.py quickstart_out  # SmolLM2-135M, 48 steps of 2 x 256 tokens

The quickstart's fine-tune with float32, bfloat16 and int8 moments, one after the other, from the same weights and over
the same batches. With float32 it is bit for bit that of torch in memory: what differs from it is the rounding's doing.
"""

from __future__ import annotations

import gc
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import datasets
import torch
import transformers
import typer
from benchmarking import Options, benchmark, folder_in
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from hf_lohan import Trainer
from hf_lohan.config import OffloadConfig
from hf_lohan.wording import format_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the quickstart is
import text_data
from quickstart import BLOCK_SIZE, CONFIG, NUM_EVAL_BLOCKS, Progress, training_arguments

DTYPES = ("float32", "bfloat16", "int8")
NUM_FIRST_STEPS = 5
"""Not counted in times and bytes: they are watched, planned and corrected."""

Weights = dict[str, Tensor]

console = Console(highlight=False)


def fine_tune(inputs: Path, folder: Path, settings: dict[str, Any], num_steps: int, bf16: bool) -> dict[str, Any]:
    """One run. Returns its figures, and its `weights`."""
    tokenizer = AutoTokenizer.from_pretrained(inputs / "base")
    train, held_out = (
        text_data.make_blocks(
            text_data.read_documents([str(inputs / name)]), tokenizer, block_size=BLOCK_SIZE, packing=True
        )
        for name in ("train.jsonl", "heldout.jsonl")
    )
    args = training_arguments(folder)
    args.max_steps, args.bf16 = num_steps, bf16
    trainer = Trainer(
        model=str(inputs / "base"),
        args=args,
        train_dataset=train,
        eval_dataset=held_out.select(range(NUM_EVAL_BLOCKS)),
        processing_class=tokenizer,
        offload=OffloadConfig.load(str(CONFIG), **settings),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Progress)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    engine = trainer.offload_engine
    assert engine is not None
    access = engine.parameters
    weights = {name: access.read_parameter(name).float() for name in access.parts}
    lines = [json.loads(line) for line in (folder / "lohan" / "steps.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line.get("step", 0) > NUM_FIRST_STEPS]
    figures = {
        "train_loss": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "held_out_loss_before": before,
        "held_out_loss_after": after,
        "step_s": statistics.median(line["step_s"] for line in steps),
        "step_s_quartiles": statistics.quantiles([line["step_s"] for line in steps], n=4),
        "ssd_read_bytes_per_step": statistics.median(line["ssd_read_bytes"] for line in steps),
        "ssd_write_bytes_per_step": statistics.median(line["ssd_write_bytes"] for line in steps),
        "optimizer_busy_s_per_step": statistics.median(line["busy_s"].get("cpu optimizer", 0.0) for line in steps),
        "store_bytes": engine.tiers.store_bytes,
        "cpu_pool_bytes": engine.layout.plan.cpu_pool_bytes,
        "state_bytes_per_param": engine.layout.master.state_bytes_per_param,
        "num_parameters": engine.layout.num_parameters,
    }
    engine.close()
    return figures | {"weights": weights}


def compare(run: dict[str, Any], exact: dict[str, Any], first: Weights) -> dict[str, float]:
    """How far a run is from that with float32 moments."""
    differences = [abs(a - b) for a, b in zip(run["train_loss"], exact["train_loss"], strict=True)]
    apart = moved = 0.0
    for name, weight in exact["weights"].items():
        apart += float((run["weights"][name] - weight).double().square().sum())
        moved += float((weight - first[name]).double().square().sum())
    return {
        "train_loss_difference_mean": statistics.fmean(differences),
        "train_loss_difference_max": max(differences),
        "held_out_loss_difference": run["held_out_loss_after"] - exact["held_out_loss_after"],
        "weight_difference_over_update": (apart / moved) ** 0.5,
    }


def shown_as_table(result: dict[str, Any]) -> Table:
    """A column for each dtype."""
    table = Table(title=f"{result['num_steps']} steps, by optimizer_state_dtype")
    table.add_column("")
    for dtype in DTYPES:
        table.add_column(dtype, justify="right")
    shown = {
        "held-out loss before": ("held_out_loss_before", "{:.4f}".format),
        "held-out loss after": ("held_out_loss_after", "{:.4f}".format),
        "training loss, off by: mean": ("train_loss_difference_mean", "{:.2g}".format),
        "training loss, off by: most": ("train_loss_difference_max", "{:.2g}".format),
        "weights off, of the update's norm": ("weight_difference_over_update", "{:.2%}".format),
        "store": ("store_bytes", format_bytes),
        "read a step": ("ssd_read_bytes_per_step", lambda value: format_bytes(int(value))),
        "written a step": ("ssd_write_bytes_per_step", lambda value: format_bytes(int(value))),
        "a step": ("step_s", "{:.2f} s".format),
        "optimizer busy a step": ("optimizer_busy_s_per_step", "{:.2f} s".format),
    }
    for label, (name, text) in shown.items():
        table.add_row(label, *(text(result["dtypes"][dtype][name]) for dtype in DTYPES))
    return table


@benchmark("state_dtypes")
def main(
    options: Options,
    inputs: Annotated[Path, typer.Argument(help="folder with the quickstart's base/, train.jsonl and heldout.jsonl")],
    *,
    num_steps: int = 48,
) -> dict[str, Any]:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    common = {"activations": "recompute", "resident_records": "none", "clip": "defer"}
    base = AutoModelForCausalLM.from_pretrained(inputs / "base", dtype=torch.float32)
    first = {name: parameter.detach() for name, parameter in base.named_parameters()}
    result: dict[str, Any] = {"num_steps": num_steps, "settings": common, "dtypes": {}}
    exact: dict[str, Any] = {}
    with folder_in(options.store) as folder:
        for dtype in DTYPES:
            console.print(f"fine-tuning with optimizer_state_dtype={dtype}, {num_steps} steps")
            run = fine_tune(inputs, folder / dtype, {**common, "optimizer_state_dtype": dtype}, num_steps, options.bf16)
            exact = exact or run
            figures = {name: value for name, value in run.items() if name != "weights"}
            result["dtypes"][dtype] = figures | compare(run, exact, first)
            shutil.rmtree(folder / dtype, ignore_errors=True)
            del run
            gc.collect()
    console.print(shown_as_table(result))
    return result


if __name__ == "__main__":
    typer.run(main)
