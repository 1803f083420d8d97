"""Fine-tune SmolLM2-135M with its training state on disk, and print losses, samples and bytes.

python scripts/quickstart.py quickstart_out        (after quickstart_inputs.py; scripts/quickstart.sh runs both)
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import datasets
import text_data
import transformers
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from tqdm.auto import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainingArguments,
)

from hf_lohan import Trainer
from hf_lohan.huggingface.progress import live_line
from hf_lohan.wording import format_bytes

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml"
PROMPT = 'The "with" statement'
MAX_NEW_TOKENS = 32
BLOCK_SIZE = 256
MIN_IMPROVEMENT_FRACTION = 0.05

NUM_EVAL_BLOCKS = 16

console = Console(highlight=False)


class Progress(TrainerCallback):
    """Prints one line per step instead of Trainer's dictionaries and progress bar."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            tqdm.write(f"  step {state.global_step:2} of {state.max_steps}: loss {logs['loss']:.3f}")


def training_arguments(output_dir: Path) -> TrainingArguments:
    """Return arguments for a short run that is small enough for two CPU cores."""
    return TrainingArguments(
        output_dir=str(output_dir),
        max_steps=16,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        learning_rate=1e-4,
        warmup_steps=3,
        lr_scheduler_type="linear",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
        seed=0,
    )


def continuation(model: Any, tokenizer: Any) -> str:
    """Return the greedy continuation of the prompt."""
    inputs = tokenizer(PROMPT, return_tensors="pt").to(model.device)
    with live_line("sample, token", MAX_NEW_TOKENS):
        ids = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


def byte_table(summary: dict[str, Any]) -> Table:
    """Return a table of the sizes of the training state and of the moved bytes."""
    table = Table("where the bytes were", show_edge=False, title_justify="left")
    table.add_column(justify="right")
    table.add_row("parameters", f"{summary['num_parameters'] / 1e6:.1f} million")
    rows = {
        "training state on disk": summary["store_bytes"],
        "GPU pool, peak": summary["peak_gpu_pool_bytes"],
        "CPU pool, peak": summary["peak_cpu_pool_bytes"],
        "read from disk": summary["ssd_read_bytes"],
        "written to disk": summary["ssd_write_bytes"],
        "the whole process, anonymous memory, peak": summary["peak_anon_rss_bytes"],
    }
    for name, num_bytes in rows.items():
        table.add_row(name, format_bytes(num_bytes))
    table.add_row("step, median", f"{summary['step_s']:.1f} s")
    table.add_row("tokens a second", f"{summary['tokens_per_s']:.0f}")
    return table


def main(out: Path) -> None:
    """Train, compare and export. Exits with status 1 if the held-out loss did not fall enough."""
    transformers.utils.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    run_folder, exported = out / "run", out / "finetuned"
    shutil.rmtree(exported, ignore_errors=True)
    tokenizer = AutoTokenizer.from_pretrained(out / "base")
    train, held_out = (
        text_data.make_blocks(
            text_data.read_documents([str(out / name)]), tokenizer, block_size=BLOCK_SIZE, packing=True
        )
        for name in ("train.jsonl", "heldout.jsonl")
    )
    trainer = Trainer(
        model=str(out / "base"),
        args=training_arguments(run_folder),
        train_dataset=train,
        eval_dataset=held_out.select(range(NUM_EVAL_BLOCKS)),
        processing_class=tokenizer,
        offload=str(CONFIG),
    )
    for prints_dictionaries in (ProgressCallback, PrinterCallback):  # Trainer has one of them
        trainer.remove_callback(prints_dictionaries)
    trainer.add_callback(Progress)
    console.print("held-out loss and a sample before, from the weights on disk")
    before, text_before = trainer.evaluate()["eval_loss"], continuation(trainer.model, tokenizer)
    console.print(f"fine-tuning, {trainer.args.max_steps} steps")
    trainer.train()
    console.print("held-out loss and a sample after")
    after, text_after = trainer.evaluate()["eval_loss"], continuation(trainer.model, tokenizer)
    trainer.save_model(str(exported))
    if trainer.offload_engine is not None:
        trainer.offload_engine.close()  # frees the engine's memory

    console.print(Panel(text_before, title="before", title_align="left"))
    console.print(Panel(text_after, title="after", title_align="left"))
    console.print(byte_table(json.loads((run_folder / "lohan" / "summary.json").read_text())))
    plain = AutoModelForCausalLM.from_pretrained(exported)
    if continuation(plain, tokenizer) != text_after:
        sys.exit(f"error: {exported}, loaded by plain transformers, continues the prompt differently")
    console.print(f"\n{exported}: an ordinary checkpoint; plain transformers loads it and it generates the same text")
    improvement_fraction = 1 - after / before
    console.print(f"held-out loss: {before:.3f} before, {after:.3f} after ({improvement_fraction:.1%} lower)")
    if improvement_fraction < MIN_IMPROVEMENT_FRACTION:
        sys.exit(f"error: the held-out loss should have fallen by {MIN_IMPROVEMENT_FRACTION:.0%} or more")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
