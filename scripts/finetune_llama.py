#!/usr/bin/env python
"""Fine-tune a Llama, or a model of the same architecture, on local text, in memory or with its training state on SSD.

    python scripts/finetune_llama.py --model_name_or_path models/llama-3-8b --offload configs/lohan.yaml \\
        --train_file notes.jsonl --do_train --do_eval --bf16 --output_dir outputs/llama

It accepts all flags of `transformers.TrainingArguments`. `--help` lists the others. Without --offload it is a plain
Trainer run. With Accelerate replace `python` by `accelerate launch --config_file configs/accelerate_single.yaml`.
"""

from __future__ import annotations

from finetune_arguments import Family
from finetuning import main

LLAMA = Family(
    name="Llama",
    model_types=("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"),
    defaults={"learning_rate": 2e-5, "lr_scheduler_type": "cosine", "output_dir": "outputs/llama"},
)

if __name__ == "__main__":
    main(LLAMA)
