"""Trainer over packed bases, in turn: `[lohan launch ...] packed_by_ranks.py <folder> <what> <kind> ...`.

`what` is "alone": one process that accumulates the batches of all ranks. "whole": two ranks. "killed": rank 1 of two is
killed in the middle. "rest": two ranks that resume from the last step. "other": the same over another base. Each run
saves its log, its adapters, the merged model and the size of the memory that ranks share to `<folder>/<what>/<kind>`.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import peft
import torch
from trained_by_ranks import NUM_RANKS, OFFLOAD, Signalled, rows
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainingArguments

import hf_lohan
from hf_lohan.testing.models import tiny_model

NF4 = "nf4 from bfloat16"
OF_BITSANDBYTES = "packed by bitsandbytes"
KINDS = (NF4, OF_BITSANDBYTES, "mixtral-fp8", "gpt_oss-mxfp4")
NUM_STEPS = 5


def bases(folder: Path) -> None:
    from quantized_folders import KINDS as QUANTIZED

    sizes = {"hidden_size": 128, "intermediate_size": 512}
    tiny_model("llama", **sizes).to(torch.bfloat16).save_pretrained(folder / NF4)
    other = tiny_model("llama", **sizes).to(torch.bfloat16)
    with torch.no_grad():
        for layer in other.model.layers:  # each rank has a part
            layer.mlp.down_proj.weight[:, 0] += 0.5
    other.save_pretrained(folder / "other")
    tiny_model("llama", **sizes).save_pretrained(folder / "dense")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", quantization_config=config, device_map="cpu")
    model.save_pretrained(folder / OF_BITSANDBYTES)
    for kind in ("mixtral-fp8", "gpt_oss-mxfp4"):
        QUANTIZED[kind][0](folder / kind)


def train(folder: Path, what: str, kind: str) -> None:
    run = folder / ("broken" if what in ("killed", "rest", "other") else what) / f"run of {kind}"
    args = TrainingArguments(
        str(run), max_steps=NUM_STEPS, per_device_train_batch_size=1,
        gradient_accumulation_steps=NUM_RANKS if what == "alone" else 1, learning_rate=1e-2, max_grad_norm=0.05,
        logging_steps=1, save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True, seed=3,
    )  # fmt: skip
    offload: dict[str, Any] = {**OFFLOAD, "quantize": "nf4" if kind == NF4 else "auto", "_resident_records": "none"}
    torch.manual_seed(1)
    model = hf_lohan.from_pretrained(
        folder / "bases" / ("other" if what == "other" else kind),
        {**offload, "ssd": str(run / "store"), "experts": "with_layer"},
        torch_device="cpu",
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    callbacks = [Signalled(signal.SIGKILL)] if what == "killed" else []
    trainer = hf_lohan.Trainer(model, args, train_dataset=rows(20, seed=1), callbacks=callbacks)  # type: ignore[arg-type]
    trainer.train(resume_from_checkpoint="last_step" if what == "rest" else None)
    out = folder / what / kind
    trainer.save_model(str(out))
    trainer.model.merge_and_unload().save_pretrained(out / "merged")
    if args.process_index == 0:
        engine = trainer.offload_engine
        facts = {"log": trainer.state.log_history, "packs": engine.layout.packs}
        facts["shared_bytes"] = engine.layout.shared_weight_bytes
        facts["dense_bytes"] = 2 * max(block.param_bytes for block in engine.layout.common_blocks)
        (out / "facts.json").write_text(json.dumps(facts))
    trainer.offload_engine.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, what, kinds = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    for kind in kinds:
        train(folder, what, kind)
