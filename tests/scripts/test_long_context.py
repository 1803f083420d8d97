"""The script for long contexts runs layers in chunks if the device is small."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import long_context
import pytest
from tiny_tokenizer import SENTENCES


@pytest.fixture
def inputs(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    shutil.copytree(checkpoint("llama"), tmp_path / "base")
    text = "".join(json.dumps({"text": sentence}) + "\n" for sentence in SENTENCES * 400)
    (tmp_path / "train.jsonl").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_a_small_device_gets_chunks(inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long_context.main(inputs, tmp_path / "out", tokens=1024, device_memory="4MiB", cpu_memory="16MiB", steps=1)
    printed = capsys.readouterr().out
    assert "1024 tokens, layers in chunks of " in printed
    with pytest.raises(SystemExit, match=r"error: .* set device_memory to at least "):
        long_context.main(inputs, tmp_path / "small", tokens=1024, device_memory="1MiB", cpu_memory="16MiB", steps=1)
