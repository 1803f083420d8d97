"""When the interpreter exits, an open engine finishes its updates and commits the last step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hf_lohan.store import last_commit

SCRIPT = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from hf_lohan.config import OffloadConfig
from hf_lohan.huggingface.attachment import offload_model
from hf_lohan.optim import OffloadAdamW

def train(folder, max_grad_norm):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=256, num_hidden_layers=4, intermediate_size=1024, vocab_size=2048, num_attention_heads=4))
    config = OffloadConfig.load({"cpu_memory": "64MiB", "gpu_memory": "64MiB", "ssd": folder, "clip": "defer"})
    engine = offload_model(
        model, config, torch_device="cpu", default_ssd_path=folder, hold_gradients=max_grad_norm > 0)
    optimizer = OffloadAdamW(model.parameters(), lr=1e-3, engine=engine)
    ids = torch.arange(32).view(1, 32)
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        if max_grad_norm:
            engine.clip_grad_norm(max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return model, engine, optimizer

trained = [train(folder, norm) for folder, norm in zip(sys.argv[1:], (0.0, 1e-3))]
"""


def test_the_last_step_of_a_script_that_closes_nothing_is_committed(tmp_path: Path) -> None:
    """When the script ends, one engine updates in backward and the other holds gradients for clipping."""
    folders = [str(tmp_path / name) for name in ("unclipped", "clipped")]
    subprocess.run([sys.executable, "-c", SCRIPT, *folders], check=True, timeout=120)
    for folder in folders:
        commit = last_commit([folder])
        assert commit is not None and set(commit.facts["num_updates"].values()) == {3}
