"""The fine-tuning scripts on tiny models: stock, offloaded, resumed, launched and with bad input."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from covering import slow_but
from equal_tensors import tensors_in
from finetune_arguments import checkpoint_to_resume, choose_block_size
from finetune_llama import LLAMA
from finetune_opt import OPT
from finetuning import main
from python_runs import run_python
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_lohan

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = {"llama": LLAMA, "opt": OPT}
Checkpoints = Callable[[str], Path]


def flags(checkpoint: Path, data: Path, out: Path, *more: str) -> list[str]:
    """Arguments of a run of four steps."""
    run = f"--model_name_or_path {checkpoint} --train_file {data} --output_dir {out} --do_train --block_size 16"
    rest = (
        "--max_steps 4 --per_device_train_batch_size 2 --learning_rate 1e-2 --report_to none --save_steps 2 --use_cpu"
    )
    return [*run.split(), *rest.split(), "--disable_tqdm", "true", *more]


def assert_same_weights(one: Path, other: Path) -> None:
    torch.testing.assert_close(tensors_in(one), tensors_in(other), rtol=1e-6, atol=1e-7)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests a machine without a GPU")
def test_bf16_works_without_a_gpu(checkpoint: Checkpoints, text_file: Path, tmp_path: Path) -> None:
    words = [word for word in flags(checkpoint("llama"), text_file, tmp_path / "out") if word != "--use_cpu"]
    results = main(LLAMA, [*words, "--bf16", "--max_steps", "1", "--save_strategy", "no", "--offload", "lohan"])
    assert math.isfinite(results["train_loss"])


@pytest.mark.parametrize("family", slow_but(["opt"], FAMILIES))
def test_offloaded_equals_stock(family: str, checkpoint: Checkpoints, text_file: Path, tmp_path: Path) -> None:
    stock, offloaded = tmp_path / "stock", tmp_path / "offloaded"
    results = main(FAMILIES[family], flags(checkpoint(family), text_file, stock, "--do_eval"))
    assert results["perplexity"] == pytest.approx(math.exp(results["eval_loss"]))
    for name in ("train_results.json", "eval_results.json", "all_results.json", "trainer_state.json"):
        assert json.loads((stock / name).read_text())

    again = main(FAMILIES[family], flags(checkpoint(family), text_file, offloaded, "--do_eval", "--offload", "lohan"))
    for name in ("train_loss", "eval_loss", "train_samples", "eval_samples"):
        assert again[name] == pytest.approx(results[name], rel=1e-5), name
    assert_same_weights(stock, offloaded)
    summary = json.loads((offloaded / "lohan" / "summary.json").read_text())
    assert summary["num_steps"] == 4 and summary["ssd_write_bytes"] > 0
    model = AutoModelForCausalLM.from_pretrained(offloaded)
    assert model.dtype == torch.float32 and torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


@pytest.mark.covering(0)
@pytest.mark.parametrize("offload", [(), ("--offload", "lohan")], ids=["stock", "offloaded"])
def test_a_name_in_the_hubs_cache(
    offload: tuple[str, ...], checkpoint: Checkpoints, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "cache" / "models--owner--tiny"
    shutil.copytree(checkpoint("llama"), cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "v2").write_text("0" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    more = ("--model_revision", "v2", "--max_steps", "1", *offload)
    main(LLAMA, flags(Path("owner/tiny"), text_file, tmp_path / "out", *more))
    assert tensors_in(tmp_path / "out")


@pytest.mark.covering(0)
@pytest.mark.parametrize("offload", [(), ("--offload", "lohan")], ids=["stock", "offloaded"])
def test_a_resumed_run_equals_a_whole_one(
    offload: tuple[str, ...], checkpoint: Checkpoints, text_file: Path, tmp_path: Path
) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    main(LLAMA, flags(checkpoint("llama"), text_file, whole, *offload))
    # The checkpoint of step 2 is what an interrupted run of the same four steps would leave.
    halves.mkdir()
    (whole / "checkpoint-2").rename(halves / "checkpoint-2")
    main(LLAMA, flags(checkpoint("llama"), text_file, halves, *offload, "--resume"))
    assert_same_weights(whole, halves)


def test_resume_takes_the_last_committed_step(checkpoint: Checkpoints, text_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    main(LLAMA, flags(checkpoint("llama"), text_file, out, "--offload", "lohan", "--save_strategy", "no"))
    assert hf_lohan.last_step(out) == 4
    assert checkpoint_to_resume("last", str(out)) is True
    trained = (out / "model.safetensors").read_bytes()
    main(LLAMA, flags(checkpoint("llama"), text_file, out, "--offload", "lohan", "--save_strategy", "no", "--resume"))
    assert (out / "model.safetensors").read_bytes() == trained  # no step was left to take


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", ["lohan.yaml", "lohan_small_budget.yaml", "lohan_two_ssds.yaml", "quickstart.yaml"])
def test_every_config_runs(
    name: str, checkpoint: Checkpoints, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # relative paths in a config start at the working directory
    out = tmp_path / "out"
    more = ("--offload", str(ROOT / "configs" / name), "--max_steps", "1")
    main(LLAMA, flags(checkpoint("llama"), text_file, out, *more))
    paths = json.loads((out / "lohan" / "summary.json").read_text())["config"]["ssd"]
    assert len(paths) == (2 if name == "lohan_two_ssds.yaml" else 1)


@pytest.mark.slow
def test_accelerate_launches_the_script(checkpoint: Checkpoints, text_file: Path, tmp_path: Path) -> None:
    script = [str(ROOT / "scripts" / "finetune_llama.py"), *flags(checkpoint("llama"), text_file, tmp_path / "out")]
    config = str(ROOT / "configs" / "accelerate_single.yaml")
    offload = ["--offload", str(ROOT / "configs" / "lohan.yaml")]
    run_python("-m", "accelerate.commands.launch", "--config_file", config, *script, *offload, cwd=tmp_path)
    summary = json.loads((tmp_path / "out" / "lohan" / "summary.json").read_text())
    assert summary["config"]["cpu_threads"] == len(os.sched_getaffinity(0))
    assert tensors_in(tmp_path / "out")


def test_unpacked_rows_train_and_evaluate(checkpoint: Checkpoints, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"body": "word " * length}) + "\n" for length in range(1, 30)))
    more = ("--packing", "false", "--do_eval", "--max_eval_samples", "1", "--max_train_samples", "8")
    results = main(LLAMA, flags(checkpoint("llama"), data, tmp_path / "out", *more))
    assert results["train_samples"] == 8 and results["eval_samples"] == 1
    assert math.isfinite(results["eval_loss"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--block_size", "100000"], "--block_size 100000 is not possible; this model takes 2 to"),
        (["--train_file", "missing.txt"], "data file 'missing.txt' does not exist"),
        (["--text_column", "txet"], "no column 'txet' in the data; did you mean 'text'?"),
        (["--offload", "configs/missing.yaml"], "missing.yaml"),
        (["--offload", "nowhere"], "nowhere"),
        (["--offload", "lohan", "--optim", "lion_8bit"], "optim='lion_8bit'"),
        (["--resume", "last"], "nothing to resume: no checkpoint in"),
        (["--resume", "elsewhere"], "'elsewhere' is not a Trainer checkpoint"),
        (["--model_name_or_path", "no/such/folder"], "no/such/folder"),
        (["--do_train", "false"], "nothing to do; give --do_train"),
    ],
)
def test_bad_input_ends_with_one_line(
    more: list[str], message: str, checkpoint: Checkpoints, text_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as end:
        main(LLAMA, flags(checkpoint("llama"), text_file, tmp_path, *more))
    assert str(end.value).startswith("error: ")
    assert message in str(end.value)


def test_float16_is_refused(checkpoint: Checkpoints, text_file: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(OPT, flags(checkpoint("opt"), text_file, tmp_path, "--dtype", "float16"))


def test_block_size_follows_the_model() -> None:
    assert choose_block_size(None, LlamaConfig(max_position_embeddings=128)) == 128
    assert choose_block_size(None, LlamaConfig(max_position_embeddings=8192)) == 1024
    assert choose_block_size(64, LlamaConfig(max_position_embeddings=128)) == 64


def test_resume_finds_the_last_checkpoint(tmp_path: Path) -> None:
    for step in (2, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert checkpoint_to_resume(None, str(tmp_path)) is None
    assert checkpoint_to_resume("last", str(tmp_path)) == str(tmp_path / "checkpoint-10")
