"""`lohan generate` prints the text of the model in memory, and its speed relative to the bound."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from python_runs import run_python
from tiny_tokenizer import tiny_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner, Result

from hf_lohan.cli.application import app, generation_summary
from hf_lohan.device import num_gpus
from hf_lohan.huggingface.generate.text_generation import GenerationFigures

PROMPT = "block 7 goes down"
NUM_LAYERS, LAYER_KIB = 6, 168


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_hidden_layers=NUM_LAYERS, eos_token_id=None, pad_token_id=0, **sizes
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def generate(checkpoint: Path, folder: Path, *options: str, gpu_memory: str = "1MiB", tokens: int = 9) -> Result:
    given = ["--prompt", PROMPT, "--max-new-tokens", str(tokens), "--ssd", str(folder / "store"), *options]
    budgets = ["--cpu-memory", "4MiB", "--gpu-memory", gpu_memory]
    return CliRunner().invoke(app, ["generate", str(checkpoint), *given, *budgets])


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ([], {"do_sample": False}),
        (["--temperature", "0.7", "--top-p", "0.9", "--seed", "3"], {"temperature": 0.7, "top_p": 0.9}),
        (["--num-beams", "2"], {"do_sample": False, "num_beams": 2}),
    ],
    ids=["greedy", "sampled", "beams"],
)
def test_the_text_equals_that_of_the_model_in_memory(
    options: list[str], settings: dict[str, object], checkpoint: Path, tmp_path: Path
) -> None:
    result = generate(checkpoint, tmp_path, *options)
    assert result.exit_code == 0, result.output
    tokenizer = tiny_tokenizer()
    inputs = tokenizer(PROMPT, return_tensors="pt")
    torch.manual_seed(3)
    stock = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokens = stock.generate(**inputs, max_new_tokens=9, **{"do_sample": True, **settings})
    expected = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert result.stdout.strip("\n") == expected.strip("\n")
    assert "8 further tokens at" in result.stderr


@pytest.mark.parametrize("options", [["--temperature", "5.0"], ["--seed", "3"]], ids=["no seed", "a seed"])
def test_sampling_leaves_torchs_generator_alone(options: list[str], checkpoint: Path, tmp_path: Path) -> None:
    """Without a seed, each call makes another text."""
    torch.manual_seed(11)
    before = torch.get_rng_state()
    texts = set()
    for _ in range(3):
        result = generate(checkpoint, tmp_path, *options)
        assert result.exit_code == 0, result.output
        texts.add(result.stdout)
        assert torch.equal(torch.get_rng_state(), before)
    assert (len(texts) == 1) == ("--seed" in options)


@pytest.mark.slow
@pytest.mark.skipif(num_gpus() > 0, reason="the launcher would take the GPUs")
def test_two_ranks_print_the_text_of_one_process_once(checkpoint: Path, tmp_path: Path) -> None:
    one = generate(checkpoint, tmp_path / "one")
    options = ["--prompt", PROMPT, "--max-new-tokens", "9", "--ssd", str(tmp_path / "two")]
    budgets = ["--cpu-memory", "4MiB", "--gpu-memory", "1MiB", "--num-processes", "2"]
    two = run_python("-m", "hf_lohan.cli", "generate", checkpoint, *options, *budgets)
    assert two.stdout == one.stdout
    assert two.stderr.count("8 further tokens at") == 1


def test_read_bytes_and_the_bound_are_printed(checkpoint: Path, tmp_path: Path) -> None:
    config = tmp_path / "lohan.yaml"
    config.write_text("_resident_records: none\n")
    result = generate(checkpoint, tmp_path, "--config", str(config), gpu_memory="850KiB")
    assert result.exit_code == 0, result.output
    read, missing = re.findall(r"(\d+(?:\.\d+)? KiB)", result.stderr)[:2]
    read_kib, missing_kib = (float(size.split()[0]) for size in (read, missing))
    # The last prefetch may add reads. If loads are late, the ring may still have two layers.
    assert -2 <= (read_kib - missing_kib) / LAYER_KIB <= 3 / 8
    assert re.search(r"reached \d+(\.\d+)?% of this speed", result.stderr)


def test_a_budget_too_small_for_the_length_is_refused_before_anything_is_stored(
    checkpoint: Path, tmp_path: Path
) -> None:
    result = generate(checkpoint, tmp_path, gpu_memory="1MiB", tokens=4000)
    assert result.exit_code == 2
    assert "keys and values of 1 sequence of 4,0" in result.stderr and "set gpu_memory to at least" in result.stderr
    assert not (tmp_path / "store").exists()


def test_the_error_of_a_folder_without_a_tokenizer_names_it(checkpoint: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(checkpoint, bare, ignore=shutil.ignore_patterns("tokenizer*", "special_tokens*"))
    for folder, message in (
        (bare, "there is no tokenizer.json or other tokenizer file); save the model's"),
        (tmp_path / "nowhere", "nowhere' is not a checkpoint folder"),
    ):
        result = generate(folder, tmp_path)
        assert result.exit_code == 2 and result.stderr.count("\n") == 1
        assert message in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "0"], "temperature=0.0 must be above 0"),
        (["--top-p", "1.5"], "top_p=1.5 must be above 0 and at most 1"),
        (["--num-beams", "0"], "num_beams=0 must both be at least 1"),
    ],
)
def test_bad_values_are_refused_in_one_line(options: list[str], message: str, checkpoint: Path, tmp_path: Path) -> None:
    result = generate(checkpoint, tmp_path, *options)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert message in result.stderr


def test_the_bound_is_the_missing_bytes_over_the_rate_of_the_drive() -> None:
    figures = GenerationFigures(
        num_prompt_tokens=5,
        num_passes=11,
        load_s=1.0,
        first_pass_s=0.5,
        pass_s=0.5,
        read_bytes=8e8,
        missing_bytes=800_000_000,
        drive_bytes_per_s=2e9,
    )
    assert figures.bound_s == 0.4
    assert "10 further tokens at 2 tokens/s (500 ms each)" in generation_summary(figures)[1]
    assert (
        "takes at least 400 ms a token" in generation_summary(figures)[-1]
        and "reached 80% of this speed" in generation_summary(figures)[-1]
    )
