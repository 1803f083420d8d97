"""Ranks that begin with another checkpoint, config, argument or package are named before the first step."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainingArguments

from hf_lohan import Accelerator, LohanPlugin
from hf_lohan.config import OffloadConfig
from hf_lohan.huggingface import equal_runs
from hf_lohan.huggingface.equal_runs import (
    check_equal_arguments,
    check_equal_checkpoints,
    check_equal_configs,
    check_equal_packages,
)
from hf_lohan.huggingface.offloaded_model import engine_of
from hf_lohan.huggingface.ranks import StepTimeouts
from hf_lohan.ranks import Links, RankFailedError, RanksDisagreeError
from hf_lohan.testing.models import tiny_batch, tiny_model
from hf_lohan.testing.thread_ranks import rank_outcomes


def refusal(check: Callable[[Links], None], num_ranks: int = 2) -> str:
    """Let each rank run the check. Returns the error of all, or "" if none has an error."""
    errors = [outcome.error for outcome in rank_outcomes(num_ranks, check)]
    if not any(errors):
        return ""
    assert all(isinstance(error, RanksDisagreeError | RankFailedError) for error in errors), errors
    return next(str(error) for error in errors if isinstance(error, RanksDisagreeError))


# Arguments.


@dataclass
class OwnArguments(TrainingArguments):
    own_cache: str = ""


def refusal_of_arguments(folder: Path, make: Callable[..., TrainingArguments] = TrainingArguments, **own: Any) -> str:
    made = [make(str(folder / "0"), use_cpu=True), make(**{"output_dir": str(folder / "1"), "use_cpu": True, **own})]
    return refusal(lambda links: check_equal_arguments(made[links.ranks.rank], links))


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"learning_rate": 1e-4}, "learning_rate is 5e-05 on rank 0 and 0.0001 on rank 1"),
        ({"weight_decay": 0.9}, "weight_decay is 0.0 on rank 0 and 0.9 on rank 1"),
        ({"max_grad_norm": 0.01}, "max_grad_norm is 1.0 on rank 0 and 0.01 on rank 1"),
        ({"warmup_steps": 4}, "warmup_steps is 0 on rank 0 and 4 on rank 1"),
        ({"lr_scheduler_type": "cosine"}, 'lr_scheduler_type is "linear" on rank 0 and "cosine" on rank 1'),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 1 on rank 0 and 2 on rank 1"),
        ({"per_device_train_batch_size": 4}, "per_device_train_batch_size is 8 on rank 0 and 4 on rank 1"),
        ({"optim": "adamw_torch", "optim_args": "a=1"}, 'optim is "adamw_torch_fused" on rank 0 and "adamw_torch"'),
        ({"max_steps": 7}, "max_steps is -1 on rank 0 and 7 on rank 1"),
        ({"bf16": True}, "bf16 is false on rank 0 and true on rank 1"),
        ({"seed": 1}, "seed is 42 on rank 0 and 1 on rank 1"),
        ({"accelerator_config": {"split_batches": True}}, r"accelerator_config is .* on rank 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_decide_numbers_are_compared(tmp_path: Path, own: dict[str, Any], expected: str) -> None:
    told = refusal_of_arguments(tmp_path, **own)
    assert re.match(expected, told) and told.endswith("; give all ranks the same training arguments"), told


def test_local_arguments_may_differ(tmp_path: Path) -> None:
    own = {"report_to": [], "run_name": "x", "disable_tqdm": True, "dataloader_num_workers": 2, "log_level": "error"}
    assert refusal_of_arguments(tmp_path, **own, ddp_timeout=60, hub_model_id="a/b", do_eval=True) == ""
    assert refusal_of_arguments(tmp_path, OwnArguments, own_cache="a disk of this machine") == ""


def test_arguments_of_trl_are_compared(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    make = lambda *args, **own: trl.DPOConfig(*args, **{"bf16": False, **own})  # noqa: E731
    assert refusal_of_arguments(tmp_path, make) == ""
    assert refusal_of_arguments(tmp_path, make, beta=0.5).startswith("beta is 0.1 on rank 0 and 0.5 on rank 1")


# Configs and packages.


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("hidden_act", "gelu", 'hidden_act of the config is "silu" on rank 0 and "gelu" on rank 1'),
        ("rms_norm_eps", 1e-5, "rms_norm_eps of the config is 1e-06 on rank 0 and 1e-05 on rank 1"),
        ("rope_parameters", {"rope_theta": 5e5, "rope_type": "default"}, "rope_parameters of the config is .*500000.0"),
        ("_attn_implementation", "eager", 'attn_implementation of the config is "sdpa" .* "eager" on rank 1'),
        ("_name_or_path", "/another/folder", ""),
    ],
)
def test_configs_are_compared(name: str, value: Any, expected: str) -> None:
    configs = [tiny_model("llama", num_layers=1).config for _ in range(2)]
    setattr(configs[1], name, value)
    told = refusal(lambda links: check_equal_configs(configs[links.ranks.rank], links))
    assert re.match(expected, told) if expected else not told, told


def test_models_without_a_config_pass() -> None:
    assert refusal(lambda links: check_equal_configs(None, links)) == ""


@pytest.mark.parametrize("package", ["torch", "transformers", "accelerate", "peft"])
def test_packages_are_compared(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here, stock = threading.local(), metadata.version
    own = stock(package)
    monkeypatch.setattr(metadata, "version", lambda name: "0.1" if (name, here.rank) == (package, 1) else stock(name))

    def check(links: Links) -> None:
        here.rank = links.ranks.rank
        check_equal_packages(links)

    expected = f'the version of {package} is "{own}" on rank 0 and "0.1" on rank 1; install the same packages'
    assert refusal(check).startswith(expected)


# Timeouts.


def test_a_timeout_in_the_settings_counts_from_the_start_and_auto_follows_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In loops of one's own too, because an engine counts its steps."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for setting, expected in ((7, [7.0, 7.0, 7.0, 7.0]), ("auto", [600.0, 600.0, 120.0, 300.0])):
        links, found = Links.alone(), []
        links.watch.timeout_s = 600.0
        timeouts = StepTimeouts(links, OffloadConfig.load({"ranks.timeout": setting}).ranks)
        assert links.watch.timeout_s == 600.0, "ranks measure the hardware one after the other"
        timeouts.step_planned()
        found.append(links.watch.timeout_s)
        for took_s in (50.0, 1.0, 30.0):
            now[0] += took_s
            timeouts.step_began()
            found.append(links.watch.timeout_s)
        assert found == expected


def test_a_loop_of_ones_own_has_its_timeout_in_its_first_step(tmp_path: Path) -> None:
    settings = {"ssd": str(tmp_path), "gpu_memory": "1MiB", "cpu_memory": "4MiB", "ranks.timeout": 7}
    accelerator = Accelerator(cpu=True, lohan_plugin=LohanPlugin(offload=settings))
    model = accelerator.prepare(tiny_model("llama"))
    engine = engine_of(model)
    assert engine is not None
    model(**tiny_batch())
    assert engine.links.watch.timeout_s == 7.0
    engine.close()


# Checkpoints.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "of_rank_0"
    tiny_model("llama", num_layers=2).save_pretrained(folder)
    (folder / "trainer_state.json").write_text('{"global_step": 1}')
    return folder


@pytest.fixture
def other(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "of_rank_1"))


def refusal_of_checkpoints(*paths: Path) -> str:
    return refusal(lambda links: check_equal_checkpoints(paths[links.ranks.rank], links))


def change(folder: Path, name: str, element: int | None = None) -> None:
    """Change one element of a tensor, or all."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(-1)[slice(None) if element is None else slice(element, element + 1)] += 1
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_copied_checkpoint_is_equal(saved: Path, other: Path) -> None:
    (other / "README.md").write_text("of this machine")
    assert refusal_of_checkpoints(saved, other) == ""


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
@pytest.mark.parametrize("element", [0, 63])
def test_one_other_element_is_found_in_small_tensors(saved: Path, other: Path, name: str, element: int) -> None:
    change(other, name, element)
    assert re.match(rf'{re.escape(name)} in model.safetensors is "\w+" on rank 0', refusal_of_checkpoints(saved, other))


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"])
def test_another_tensor_is_found_by_one_page(
    saved: Path, other: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of many tensors is compared by one page of each."""
    monkeypatch.setattr(equal_runs, "_NUM_PAGES", 1)
    read: list[int] = []
    stock = equal_runs._pages_in

    def counted(*args: int) -> list[tuple[int, int]]:
        ranges = [*stock(*args)]
        read.append(sum(stop - start for start, stop in ranges))
        return ranges

    monkeypatch.setattr(equal_runs, "_pages_in", counted)
    change(other, name)
    assert refusal_of_checkpoints(saved, other).startswith(f"{name} in model.safetensors is ")
    assert max(read) == 4096, "a large tensor is not read whole"


def test_other_files_of_a_checkpoint_are_found(saved: Path, other: Path) -> None:
    (other / "trainer_state.json").write_text('{"global_step": 2}')
    assert refusal_of_checkpoints(saved, other).startswith("the content of trainer_state.json is ")
    (other / "model.safetensors").unlink()
    tiny_model("llama", num_layers=2).save_pretrained(other, max_shard_size="100KB")  # the same weights in other files
    assert "is missing on rank 0" in (told := refusal_of_checkpoints(other, saved)) or "missing on rank 1" in told


def test_one_file_of_a_sharded_checkpoint_is_found(tmp_path: Path) -> None:
    for rank, seed in ((0, 0), (1, 0)):
        torch.manual_seed(seed)
        tiny_model("llama", num_layers=2).save_pretrained(tmp_path / str(rank), max_shard_size="100KB")
    shards = sorted((tmp_path / "1").glob("model-*.safetensors"))
    index = json.loads((tmp_path / "1" / "model.safetensors.index.json").read_text())["weight_map"]
    assert refusal_of_checkpoints(tmp_path / "0", tmp_path / "1") == "" and len(shards) > 2
    with shards[1].open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    told = refusal_of_checkpoints(tmp_path / "0", tmp_path / "1")
    assert any(told.startswith(f"{name} in {shards[1].name} is ") for name, file in index.items()), told


def test_files_of_other_formats_are_compared(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        torch.save({"weight": torch.zeros(3000)}, tmp_path / str(rank) / "pytorch_model.bin")
        save_file({"lora": torch.zeros(3)}, tmp_path / str(rank) / "adapter_model.safetensors")
    paths = tmp_path / "0", tmp_path / "1"
    assert refusal_of_checkpoints(*paths) == ""
    torch.save({"weight": torch.ones(3000)}, paths[1] / "pytorch_model.bin")
    assert refusal_of_checkpoints(*paths).startswith("the content in pytorch_model.bin is ")
    save_file({"lora": torch.ones(3)}, paths[1] / "adapter_model.safetensors")
    assert refusal_of_checkpoints(*paths).startswith("lora in adapter_model.safetensors is ")
    assert refusal_of_checkpoints(*(path / "pytorch_model.bin" for path in paths)).startswith("the content in pytorch")
