"""Load a checkpoint by streaming, train, and print the peak memory; `test_budgets` runs it in a new process.

python train_within_budgets.py load  CHECKPOINT OUT CPU_BYTES GPU_BYTES
python train_within_budgets.py merge CHECKPOINT OUT CPU_BYTES GPU_BYTES    adapters, merged and saved
python train_within_budgets.py resave CHECKPOINT OUT CPU_BYTES GPU_BYTES   loaded and saved unchanged
python train_within_budgets.py train CHECKPOINT OUT CPU_BYTES GPU_BYTES MAX_GRAD_NORM [ACTIVATIONS [BATCH LENGTH]]
"""

from __future__ import annotations

import json
import sys

import torch
from datasets import Dataset
from transformers import TrainingArguments

import hf_lohan
from hf_lohan.hardware import AnonymousMemoryPeak, anonymous_memory_bytes

for name in hf_lohan.__all__:
    getattr(hf_lohan, name)  # imports what the name needs, before the memory of the idle process is measured
NUM_STEPS = 2


def dataset(length: int = 32) -> Dataset:
    rows = torch.randint(5, 250, (16, length), generator=torch.Generator().manual_seed(3)).tolist()
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def merge(checkpoint: str, output_dir: str, offload: dict[str, int]) -> None:
    from peft import LoraConfig

    adapters = LoraConfig(
        r=8, init_lora_weights=False, target_modules=["q_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    model = hf_lohan.from_pretrained(
        checkpoint, offload, torch_device="cpu", default_ssd_path=f"{output_dir}/store", peft_config=adapters
    )
    model.merge_and_unload().save_pretrained(f"{output_dir}/merged")


def resave(checkpoint: str, output_dir: str, offload: dict[str, int]) -> None:
    model = hf_lohan.from_pretrained(checkpoint, offload, torch_device="cpu", default_ssd_path=f"{output_dir}/store")
    model.save_pretrained(f"{output_dir}/saved")


def main(mode: str, *rest: str) -> dict[str, object]:
    torch.set_num_threads(2)
    dataset()
    idle_bytes = anonymous_memory_bytes()
    checkpoint, output_dir, cpu_bytes, gpu_bytes, *more = rest
    max_grad_norm, activations, batch_size, length = [*more, *("1.0", "recompute", "1", "32")[len(more) :]]
    peak = AnonymousMemoryPeak()
    peak.start()
    if mode in ("merge", "resave"):
        do = merge if mode == "merge" else resave
        do(checkpoint, output_dir, {"cpu_memory": int(cpu_bytes), "gpu_memory": int(gpu_bytes)})
        peak.stop()
        return {"idle_bytes": idle_bytes, "peak_bytes": peak.peak_bytes}
    args = TrainingArguments(
        output_dir=output_dir, use_cpu=True, max_steps=NUM_STEPS, per_device_train_batch_size=int(batch_size),
        max_grad_norm=float(max_grad_norm), report_to=[], logging_steps=1, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    offload = {"cpu_memory": int(cpu_bytes), "gpu_memory": int(gpu_bytes), "activations": activations}
    trainer = hf_lohan.Trainer(checkpoint, args, train_dataset=dataset(int(length)), offload=offload)
    if mode == "train":
        trainer.train()
    peak.stop()
    engine = trainer.offload_engine
    return {
        "idle_bytes": idle_bytes,
        "peak_bytes": peak.peak_bytes,
        "peak_cpu_pool_bytes": engine.tiers.peak_cpu_pool_bytes,
        "peak_gpu_pool_bytes": engine.peak_gpu_pool_bytes,
        "cpu_pool_bytes": engine.layout.plan.cpu_pool_bytes,
        "cpu_bytes": engine.layout.cpu_bytes + engine.layout.activation_bytes,
        "gpu_pool_bytes": engine.layout.plan.gpu_pool_bytes,
        "num_parameters": engine.layout.num_parameters,
        "store_bytes": engine.tiers.store.size_bytes,
        "num_spilled_blocks": len(engine.layout.plan.spilled_blocks),
        "activation_bytes": engine.layout.activation_bytes,
        "peak_activation_bytes": engine.activations.swapper.high_water_bytes,
        "swapped_bytes": engine.activations.swapper.swapped_bytes,
        "spilled_bytes": engine.activations.swapper.spilled_bytes,
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(*sys.argv[1:])))
