#!/usr/bin/env python
"""Fine-tune an OPT on local text, in memory or with its training state on SSD.

    python scripts/finetune_opt.py --model_name_or_path models/opt-6.7b --offload configs/lohan.yaml \\
        --train_file notes.jsonl --do_train --do_eval --bf16 --output_dir outputs/opt

OPT checkpoints are float16, in which small updates vanish. They are loaded exactly as float32 (--dtype). With --bf16
the working weights are bfloat16, and the store has the float32 masters. OPT has 2048 positions, which limits
--block_size. Everything else works as in finetune_llama.py.
"""

from __future__ import annotations

from finetune_arguments import Family
from finetuning import main

OPT = Family(
    name="OPT",
    model_types=("opt",),
    defaults={"learning_rate": 1e-5, "lr_scheduler_type": "linear", "output_dir": "outputs/opt"},
)

if __name__ == "__main__":
    main(OPT)
