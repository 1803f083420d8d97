"""TRL's script over local files, stock and offloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from equal_tensors import assert_same_tensors
from safetensors.torch import load_file

pytest.importorskip("trl")
import sft


def flags(checkpoint: Path, data: Path, out: Path, *more: str) -> list[str]:
    run = f"--model_name_or_path {checkpoint} --train_file {data} --eval_file {data} --output_dir {out} --packing"
    rest = "--max_length 32 --max_steps 4 --per_device_train_batch_size 2 --learning_rate 1e-2 --report_to none"
    return [*run.split(), *rest.split(), "--use_cpu", "--bf16", "false", "--disable_tqdm", "true", *more]


def test_offloaded_adapters_equal_stock_ones(
    checkpoint: Callable[[str], Path], text_file: Path, tmp_path: Path
) -> None:
    adapters = ("--use_peft", "--lora_r", "4", "--max_steps", "2")
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    expected = sft.main(flags(checkpoint("llama"), text_file, stock, *adapters))
    found = sft.main(flags(checkpoint("llama"), text_file, ours, *adapters, "--offload", "lohan"))
    assert found == expected and found["after"] < found["before"]
    saved = "adapter_model.safetensors"
    weights, stock_weights = load_file(ours / saved), load_file(stock / saved)
    assert_same_tensors(weights, stock_weights)


def test_bad_input_ends_with_one_line(checkpoint: Callable[[str], Path], text_file: Path, tmp_path: Path) -> None:
    for more, words in (
        (("--offload", "nowhere"), "nowhere"),
        (("--offload", "lohan", "--activation_offloading", "true"), "activation_offloading=True"),
        (("--train_file", "missing.txt"), "data file 'missing.txt' does not exist"),
    ):
        with pytest.raises(SystemExit) as end:
            sft.main(flags(checkpoint("llama"), text_file, tmp_path, *more))
        assert str(end.value).startswith("error: ") and words in str(end.value)
