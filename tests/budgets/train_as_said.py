"""Train on the CPU, and print the RAM that the run said its process takes, and the peak; `test_process_bytes` runs it
in a new process.

python train_as_said.py CHECKPOINT OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import TrainingArguments

import hf_lohan

NUM_STEPS = 3
SHAPE = (1, 512)


def main(checkpoint: str, output_dir: str) -> None:
    torch.set_num_threads(2)
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(5, 250, (NUM_STEPS * SHAPE[0], SHAPE[1]), generator=generator).tolist()
    args = TrainingArguments(
        output_dir=output_dir, use_cpu=True, max_steps=NUM_STEPS, per_device_train_batch_size=SHAPE[0],
        save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    data = Dataset.from_dict({"input_ids": rows, "labels": rows})
    offload = {"cpu_memory": "400MiB", "gpu_memory": "200MiB", "activations": "keep"}
    trainer = hf_lohan.Trainer(checkpoint, args, train_dataset=data, offload=offload)
    trainer.train()
    summary = json.loads((Path(output_dir) / "lohan" / "summary.json").read_text())
    print("RESULT", json.dumps({name: summary[name] for name in ("planned_process_bytes", "peak_anon_rss_bytes")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
