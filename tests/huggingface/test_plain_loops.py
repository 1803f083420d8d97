"""`hf_lohan.run` offloads unmodified loops of Accelerate's documentation, or ends them with the reason."""

from __future__ import annotations

import json
import logging
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_lohan import run

LOOP = """
import json
import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from hf_lohan.testing.models import tiny_batch, tiny_model

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
rows = [dict(zip(tiny_batch(), row)) for seed in range(6) for row in zip(*tiny_batch(seed=seed).values())]
torch.manual_seed(3)
loader = DataLoader(rows, batch_size=2, shuffle=True)
held_out = DataLoader(rows[:4], batch_size=2)
model = tiny_model("llama", num_layers=2)
no_decay = [p for p in model.parameters() if p.dim() == 1]
decay = [p for p in model.parameters() if p.dim() > 1]
groups = [dict(params=decay, weight_decay=0.1), dict(params=no_decay, weight_decay=0.0)]
optimizer = torch.optim.AdamW(groups, lr=1e-2{})
scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)
numbers = []
for epoch in range(2):
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            numbers.append(loss.item())
            if accelerator.sync_gradients:
                numbers.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        losses = [accelerator.gather_for_metrics(model(**batch).loss.repeat(2)) for batch in held_out]
    numbers.append(torch.cat(losses).mean().item())
    accelerator.save_state("state")
accelerator.wait_for_everyone()
accelerator.unwrap_model(model).save_pretrained(
    "saved", is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
)
accelerator.end_training()
json.dump(numbers, open("numbers.json", "w"))
"""
Started = Callable[..., None]


@pytest.fixture
def offloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    """Return a function that runs a text as an offloaded script in a new folder."""
    monkeypatch.setattr(sys, "argv", ["run"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "offload.yaml").write_text("cpu_memory: 4MiB\ngpu_memory: 2MiB\n")

    def start(text: str) -> None:
        (tmp_path / "script.py").write_text(text)
        run.main(["--offload", "offload.yaml", "script.py"])

    return start


@pytest.mark.parametrize(("kernel", "tolerance"), [(", fused=True", 0.0), ("", 1e-5)], ids=["fused", "default"])
def test_a_loop_is_offloaded_and_trains_the_same(
    kernel: str, tolerance: float, offloaded: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offloaded AdamW equals torch's fused kernel bit for bit. Torch's default kernel rounds differently."""
    offloaded(LOOP.format(kernel))
    assert (tmp_path / "lohan_store" / "manifest.json").is_file(), "nothing was offloaded"
    (tmp_path / "stock").mkdir()
    monkeypatch.chdir(tmp_path / "stock")
    runpy.run_path(str(tmp_path / "script.py"))
    ours, stock = (json.loads((folder / "numbers.json").read_text()) for folder in (tmp_path, tmp_path / "stock"))
    assert len(ours) == len(stock) == 2 * (6 + 3 + 1)
    assert ours == pytest.approx(stock, rel=tolerance, abs=0)
    ours, stock = (load_file(folder / "saved" / "model.safetensors") for folder in (tmp_path, tmp_path / "stock"))
    assert ours.keys() == stock.keys()
    assert all(torch.allclose(ours[name], weight, rtol=tolerance, atol=tolerance) for name, weight in stock.items())


BEGIN = """
import torch
from accelerate import Accelerator
from accelerate.accelerator import Accelerator as SameAccelerator
from hf_lohan.testing.models import tiny_batch, tiny_model
assert Accelerator is SameAccelerator
model = tiny_model("llama", num_layers=2)
"""


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (
            "Accelerator(cpu=True, mixed_precision='fp16').prepare(model)",
            r"mixed_precision='fp16' needs loss scaling.*lohan launch --mixed_precision bf16",
        ),
        (
            "Accelerator(cpu=True, dynamo_backend='cudagraphs').prepare(model)",
            "backend 'cudagraphs' records CUDA graphs.* use the backend 'inductor'",
        ),
        (
            "Accelerator(cpu=True).prepare(model, torch.optim.Rprop(model.parameters()))",
            "Rprop cannot be offloaded; use one of torch.optim's",
        ),
        (
            "Accelerator(cpu=True).prepare(model, tiny_model('gpt2'))",
            "offloads one model, and already has LlamaForCausalLM; leave GPT2LMHeadModel out",
        ),
    ],
)
def test_a_loop_that_cannot_be_offloaded_ends_with_the_reason(rest: str, message: str, offloaded: Started) -> None:
    with pytest.raises(ValueError, match=message):
        offloaded(BEGIN + rest)


def test_an_unprepared_optimizer_is_refused(offloaded: Started) -> None:
    rest = """
optimizer = torch.optim.AdamW(model.parameters())
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(model)
accelerator.backward(model(**tiny_batch()).loss)
optimizer.step()
"""
    with pytest.raises(ValueError, match="its optimizer was not prepared"):
        offloaded(BEGIN + rest)


def test_an_accelerator_without_a_model_may_have_any_settings(offloaded: Started) -> None:
    """Scripts create one to learn their process index."""
    offloaded(BEGIN + "assert Accelerator(mixed_precision='fp16', cpu=True).is_main_process")


def test_a_script_that_offloads_nothing_gets_a_warning(offloaded: Started, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        offloaded("import torch\ntorch.nn.Linear(2, 2)")
    assert "nothing was offloaded" in caplog.text


def test_the_plugin_of_a_script_wins(offloaded: Started, tmp_path: Path) -> None:
    offloaded(
        BEGIN
        + """
from hf_lohan import LohanPlugin
plugin = LohanPlugin(offload={"cpu_memory": "5MiB", "gpu_memory": "2MiB", "ssd": "mine"})
accelerator = Accelerator(cpu=True, lohan_plugin=plugin)
model = accelerator.prepare(model)
assert accelerator.offload_engine.config.cpu_memory == 5 * 2**20
"""
    )
    assert (tmp_path / "mine" / "manifest.json").is_file()
