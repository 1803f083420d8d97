"""The Python blocks of each page run in order, with tiny models."""

from __future__ import annotations

import re
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

import hf_lohan
from hf_lohan.huggingface import engine_of
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


def test_few_blocks_are_skipped() -> None:
    skipped = [code for document in DOCUMENTS for is_run, code in blocks(document) if not is_run]
    assert len(skipped) <= 6
