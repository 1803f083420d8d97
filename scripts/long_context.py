"""Train SmolLM2-135M on long rows of real text with little device memory, and print what the plan and the run needed.

    python scripts/long_context.py quickstart_out long_context_out      (after quickstart_inputs.py)
trains one step on a row of 32,768 tokens with 1 GiB of `device_memory`. The text is the Python language reference. On
two CPU cores a step of this length may take hours, and one of `--tokens 8192` half an hour. The process needs 3.5 GiB:
device memory, `cpu_memory` and the program share the RAM if the CPU is the device.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import text_data
import transformers
import typer
from transformers import AutoConfig, AutoTokenizer, TrainingArguments

from hf_lohan import Trainer
from hf_lohan.wording import format_bytes


def main(
    inputs: Annotated[Path, typer.Argument(help="folder with base/ and train.jsonl, from quickstart_inputs.py")],
    out: Annotated[Path, typer.Argument(help="folder of the run")],
    tokens: Annotated[int, typer.Option(help="tokens of a row")] = 32_768,
    device_memory: Annotated[str, typer.Option(help="device memory that a step may use")] = "1GiB",
    cpu_memory: Annotated[str, typer.Option(help="RAM for buffers, copies and swapped activations")] = "2GiB",
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 1,
) -> None:
    """Train, and print the plan's figures beside those of the run. Ends with one line if the plan does not fit."""
    transformers.utils.logging.set_verbosity_error()
    base = inputs / "base"
    tokenizer = AutoTokenizer.from_pretrained(base)
    documents = text_data.read_documents([str(inputs / "train.jsonl")])
    rows = text_data.make_blocks(documents, tokenizer, block_size=tokens, packing=True)
    config = AutoConfig.from_pretrained(base)
    config.max_position_embeddings = max(config.max_position_embeddings, tokens)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, config=config)
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=1,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
        disable_tqdm=True,
        seed=0,
    )
    offload = {"device_memory": device_memory, "cpu_memory": cpu_memory, "chunks.loss": True}
    collator = transformers.default_data_collator  # all rows have the same length
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator, offload=offload)
    try:
        trainer.train()
    except ValueError as error:
        sys.exit(f"error: {error}")
    finally:
        if trainer.offload_engine is not None:
            trainer.offload_engine.close()
    plan, summary = (json.loads((out / "lohan" / name).read_text()) for name in ("plan.json", "summary.json"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    device = plan["tier_bytes"]["gpu"]
    chunks = "whole layers" if plan["chunk_tokens"] is None else f"layers in chunks of {plan['chunk_tokens']} tokens"
    print(f"{tokens} tokens, {chunks}; losses {', '.join(f'{loss:.4f}' for loss in losses)}")
    print(f"planned on the device: {format_bytes(sum(device.values()))} of {device_memory}")
    print(f"anonymous memory of the process, peak: {format_bytes(summary['peak_anon_rss_bytes'])}")
    print(f"a step: {summary['step_s']:.1f} s, planned {plan['step_s']:.1f} s")


if __name__ == "__main__":
    typer.run(main)
