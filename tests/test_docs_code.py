"""The Python blocks of each page run in order, with tiny models."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from tiny_tokenizer import tiny_tokenizer
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import hf_lohan
from hf_lohan import engine_of
from hf_lohan.cli.application import app
from hf_lohan.testing.models import VOCAB_SIZE, tiny_batch, tiny_model

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- not run: [^>]+ -->\n)?^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
BEGINS = re.compile(r"(Trainer|Accelerator)\(")
"""Matches blocks that begin a program. Other blocks continue the block before."""
CHECKPOINTS = ("models/llama-3-8b", "checkpoints/llama-3-8b", "models/llama-3.1-8b", "models/llama-3.1-70b")


def blocks(document: Path) -> list[tuple[bool, str]]:
    """Return (whether it runs, code) of each block."""
    return [(not match[1], match[2]) for match in BLOCK.finditer(document.read_text(encoding="utf-8"))]


DOCUMENTS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if blocks(path)]


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The variables that pages expect, in a folder with the checkpoints that pages name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(transformers.training_args, "is_torch_bf16_gpu_available", lambda: True)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "run.yaml").write_text("output_dir: outputs/sft\nuse_cpu: true\noffload: configs/lohan.yaml\n")
    tiny_model("llama", num_layers=2).save_pretrained(tmp_path / "llama-70b")
    tiny_tokenizer().save_pretrained(tmp_path / "llama-70b")
    for name in CHECKPOINTS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(tmp_path / "llama-70b")
    ids = tiny_batch(batch_size=4)["input_ids"]
    rows = Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})
    model = tiny_model("llama", num_layers=2)
    optimizer = torch.optim.AdamW(model.parameters())
    known: dict[str, Any] = {
        "torch": torch,
        "hf_lohan": hf_lohan,
        "Trainer": hf_lohan.Trainer,
        "preferences": Dataset.from_list([{"prompt": "block 1", "chosen": " goes down", "rejected": " is up"}] * 4),
        "partial": partial,
        "args": transformers.TrainingArguments(
            "outputs/llama", max_steps=2, report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=1
        ),
        "dataset": rows,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 1.0),
        "loader": DataLoader([{name: values[0] for name, values in tiny_batch().items()}] * 4, batch_size=2),
        "batches": [tiny_batch(seed=seed) for seed in (1, 2)],
        "inputs": {"input_ids": ids[:1, :4]},
        "tokenizer": tiny_tokenizer(),
        "new_token": VOCAB_SIZE - 1,
        "old_token": 7,
    }
    yield known
    close_engines(known)


def close_engines(names: dict[str, Any]) -> None:
    for value in names.values():
        if isinstance(value, torch.nn.Module) and (engine := engine_of(value)) is not None:
            engine.close()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_python_of_a_page_runs(
    document: Path, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_run, code in blocks(document):
        if is_run:
            if "from_pretrained(" in code:  # frees the default store of an earlier recipe
                close_engines(names)
                shutil.rmtree("lohan_store", ignore_errors=True)
            if BEGINS.search(code):  # accelerate must see a new program
                AcceleratorState._reset_state()
                GradientState._reset_state()
                monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
            exec(compile(code.replace("/mnt/", f"{tmp_path}/mnt/"), document.name, "exec"), names)


NOTEBOOK = ROOT / "docs" / "finetune.ipynb"
COMMAND = re.compile(r"^!lohan (.*)$", flags=re.MULTILINE)
TINY_PARAMETERS = """
MODEL, TEXT, STORE = "models/llama-3-8b", "notes.txt", "drive"
CPU_MEMORY, GPU_MEMORY, NUM_TOKENS, NUM_STEPS = "64MiB", "64MiB", 16, 2
"""


@pytest.mark.slow
def test_the_notebook_runs(names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("The drive is fast, and the model is large. " * 20)
    monkeypatch.setattr(transformers, "TrainingArguments", partial(transformers.TrainingArguments, use_cpu=True))
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    losses = []
    for cell in cells:
        tags, code = cell["metadata"].get("tags", ()), "".join(cell["source"])
        if cell["cell_type"] != "code" or "install" in tags:
            continue
        code = TINY_PARAMETERS if "parameters" in tags else code
        names["run_lohan"] = run_lohan
        exec(compile(COMMAND.sub(r'run_lohan(f"""\1 """)', code), NOTEBOOK.name, "exec"), names)
        if "trainer.train()" in code:
            losses.append(names["trainer"].state.log_history[0]["loss"])
    assert len(losses) == 2
    assert (tmp_path / "finetuned" / "model.safetensors").exists()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def run_lohan(command: str) -> None:
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, f"lohan {command}: {result.output}"


def test_few_blocks_are_skipped() -> None:
    skipped = [code for document in DOCUMENTS for is_run, code in blocks(document) if not is_run]
    assert len(skipped) <= 6
