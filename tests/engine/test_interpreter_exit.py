"""When the interpreter exits, an open engine finishes its updates and commits the last step."""

from __future__ import annotations

from pathlib import Path

from python_runs import run_python

from hf_lohan.store import last_commit

SCRIPT = """
import sys
import torch
from torch import nn
from hf_lohan.config import OffloadConfig
from hf_lohan.device import CpuDevice
from hf_lohan.engine import OffloadEngine, ParameterAccess, drain_model, open_tiers
from hf_lohan.optim import OffloadAdamW
from hf_lohan.planning import lay_out

class Model(nn.Module):  # imports no transformers, which would take most of the time
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(4))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return hidden.sum()

def train(folder, max_grad_norm):
    model = Model()
    settings = {"cpu_memory": "64MiB", "gpu_memory": "64MiB", "ssd": folder, "_clip": "defer", "activations": "keep"}
    config = OffloadConfig.load(settings).resolve(
        host_memory_bytes=1 << 30, device_memory_bytes=1 << 30, num_cpus=2, default_ssd_path=folder)
    layout = lay_out(model, config, working_dtype=torch.float32, hold_gradients=max_grad_norm > 0)
    tiers = open_tiers(layout, config, CpuDevice())
    drain_model(layout.blocks, ParameterAccess(tiers.store, layout.blocks, tiers.states))
    engine = OffloadEngine(model, layout, tiers, config)
    optimizer = OffloadAdamW(model.parameters(), lr=1e-3, engine=engine)
    for _ in range(3):
        model(torch.ones(2, 1024)).backward()
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
    run_python("-c", SCRIPT, *folders)
    for folder in folders:
        commit = last_commit([folder])
        assert commit is not None and set(commit.facts["num_updates"].values()) == {3}
