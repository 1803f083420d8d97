"""Models by their names in the Hub: read from its cache, downloaded, refused. And code that a checkpoint brings."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from datasets import Dataset
from equal_tensors import assert_same_tensors
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors.torch import load_file
from short_runs import short_arguments
from stored_weights import stored
from tiny_tokenizer import SENTENCES, tiny_tokenizer
from transformers import LlamaForCausalLM, TrainingArguments

import hf_lohan
from hf_lohan import engine_of
from hf_lohan.cli.plan_request import PlanRequest, plan_run
from hf_lohan.files import directories
from hf_lohan.huggingface.generate.text_generation import generate_text
from hf_lohan.huggingface.models import hub
from hf_lohan.huggingface.models.hub import read_model_config
from hf_lohan.testing.models import tiny_model
from hf_lohan.wording import format_bytes

NAME, COMMIT = "owner/tiny", "0123456789abcdef0123456789abcdef01234567"
BUDGETS = {"cpu_memory": "8MiB", "gpu_memory": "4MiB"}
HARDWARE = str(Path(__file__).resolve().parents[3] / "configs" / "hardware" / "rtx4090_desktop.yaml")
Load = Callable[..., Any]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The files of a model as its owner publishes them, in several shards, with files that nobody asked for."""
    folder = tmp_path / "published"
    tiny_model("llama").save_pretrained(folder, max_shard_size="150KB")
    tiny_tokenizer().save_pretrained(folder)
    for other in ("README.md", "consolidated.safetensors", "pytorch_model.bin", "onnx/model.json", "modeling_tiny.py"):
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_bytes(b"0" * 1000)
    return folder


def lay(
    cache: Path, files: Path, revision: str = "main", commit: str = COMMIT, only: str = "*", model: str = "tiny"
) -> Path:
    """Put files into the cache by hand, as `hf download` does."""
    snapshot = cache / f"models--owner--{model}" / "snapshots" / commit
    for file in files.rglob("*"):
        name = file.relative_to(files).as_posix()
        if file.is_file() and fnmatch(name, only):
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, snapshot / name)
    refs = cache / f"models--owner--{model}" / "refs"
    refs.mkdir(parents=True, exist_ok=True)
    (refs / revision).write_text(commit)
    return snapshot


class Hub:
    """Stands for the Hub at the border of huggingface_hub."""

    def __init__(self, files: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files, self.cache = files, cache
        self.error: Exception | None = None
        self.downloaded: list[str] = []
        self.revisions: dict[str, str] = {}
        monkeypatch.setattr(hub, "HfApi", lambda token=None: self)
        monkeypatch.setattr(hub, "snapshot_download", self.snapshot_download)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def model_info(self, name: str, *, files_metadata: bool, revision: str = "main") -> Any:
        if self.error is not None:
            raise self.error
        files = [file for file in self.files.rglob("*") if file.is_file()]
        return SimpleNamespace(
            siblings=[
                SimpleNamespace(rfilename=file.relative_to(self.files).as_posix(), size=file.stat().st_size)
                for file in files
            ]
        )

    def snapshot_download(self, name: str, *, allow_patterns: list[str], **where: Any) -> str:
        if where.get("local_files_only"):
            return huggingface_hub.snapshot_download(name, allow_patterns=allow_patterns, **where)
        if self.error is not None:
            raise self.error
        for pattern in allow_patterns:
            lay(self.cache, self.files, only=pattern)
        self.downloaded += allow_patterns
        self.revisions |= dict.fromkeys(allow_patterns, where.get("revision", "main"))
        return str(self.cache / "models--owner--tiny" / "snapshots" / COMMIT)


@pytest.fixture
def the_hub(published: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(published, cache, monkeypatch)


def trained(model: Any, out: Path, **options: Any) -> dict[str, torch.Tensor]:
    args = short_arguments(out, max_steps=2)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(5, 133).view(8, 16)]
    trainer = hf_lohan.Trainer(model=model, args=args, train_dataset=rows, offload=BUDGETS, **options)
    trainer.train()
    trainer.save_model(str(out / "saved"))
    return load_file(out / "saved" / "model.safetensors")


def test_models_say_their_name(load_streamed: Load, cache: Path, published: Path) -> None:
    """As stock's do: model cards and adapters have it."""
    from peft import LoraConfig

    lay(cache, published)
    adapters = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = load_streamed(NAME, peft_config=adapters)
    assert model.get_base_model().name_or_path == model.get_base_model().config.name_or_path == NAME
    assert model.peft_config["default"].base_model_name_or_path == NAME


def test_a_revision_is_another_model(load_streamed: Load, cache: Path, published: Path, tmp_path: Path) -> None:
    other = tiny_model("llama", seed=7)
    other.save_pretrained(tmp_path / "other")
    lay(cache, published)
    lay(cache, tmp_path / "other", revision="v2", commit=COMMIT[::-1])
    for options, expected in (({}, LlamaForCausalLM.from_pretrained(published)), ({"revision": "v2"}, other)):
        weights = stored(load_streamed(NAME, **options))
        assert all(torch.equal(weights[name], weight) for name, weight in expected.named_parameters())


def test_a_folder_of_that_name_has_precedence(load_streamed: Load, the_hub: Hub, published: Path) -> None:
    shutil.copytree(published, NAME)
    the_hub.error = AssertionError("the Hub was asked")  # type: ignore[assignment]
    assert stored(load_streamed(NAME))


def test_a_download_takes_what_is_needed_and_says_how_much(
    load_streamed: Load, the_hub: Hub, published: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_streamed(NAME)
    shards = sorted(file.name for file in published.glob("model-*.safetensors"))
    assert len(shards) > 2 and the_hub.downloaded[-len(shards) :] == shards
    assert not {"README.md", "consolidated.safetensors", "pytorch_model.bin", "onnx/model.json"} & set(
        the_hub.downloaded
    )
    assert the_hub.revisions["config.json"] == "main"
    assert {the_hub.revisions[shard] for shard in shards} == {COMMIT}, "a push in between does not mix two models"
    assert "modeling_tiny.py" not in the_hub.downloaded and "tokenizer.json" in the_hub.downloaded
    (line,) = (message for message in caplog.messages if message.startswith("downloading"))
    sizes = [sum((published / shard).stat().st_size for shard in shards), engine_of(model).tiers.store.size_bytes]  # type: ignore[union-attr]
    assert [format_bytes(size) in line for size in sizes] == [True, True], (line, sizes)
    caplog.clear()
    the_hub.downloaded.clear()
    load_streamed(NAME)
    assert not [message for message in caplog.messages if message.startswith("downloading")]
    assert not set(shards) & set(the_hub.downloaded)


def test_a_small_disk_is_refused_before_the_download(
    load_streamed: Load, the_hub: Hub, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = sum(file.stat().st_size for file in published.glob("model-*.safetensors"))
    monkeypatch.setattr(directories, "free_bytes", lambda path: weights + 1000)
    with pytest.raises(
        ValueError,
        match=r"the disk is too small to download 'owner/tiny': .*needs .* free space is .*; free space, or set",
    ):
        load_streamed(NAME)
    assert not [name for name in the_hub.downloaded if name.endswith(".safetensors")]


def response() -> Any:
    return SimpleNamespace(headers={}, request=None, status_code=404)


ERRORS: dict[str, tuple[Exception, str]] = {
    "no such model": (
        RepositoryNotFoundError("404", response=response()),
        "'owner/tiny' is not a folder here, and the Hub has no model of this name that you may read",
    ),
    "terms": (
        GatedRepoError("403", response=response()),
        "'owner/tiny' is given only to users who have accepted its terms; accept them at http.*owner/tiny",
    ),
    "no such revision": (RevisionNotFoundError("404", response=response()), "'owner/tiny' has no revision 'v9'"),
    "no network": (
        ConnectionError("name resolution failed"),
        r"cannot be reached \(ConnectionError: name resolution failed\); run `hf download owner/tiny --revision v9`",
    ),
}


@pytest.mark.parametrize("error", ERRORS)
def test_what_cannot_be_fetched_gets_one_sentence(error: str, load_streamed: Load, the_hub: Hub) -> None:
    the_hub.error, expected = ERRORS[error]
    for call in (
        lambda: load_streamed(NAME, revision="v9"),
        lambda: plan_run(PlanRequest(model=NAME, revision="v9", hardware=HARDWARE)),
    ):
        with pytest.raises(ValueError, match=expected) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_an_unreachable_hub_is_replaced_by_the_cache(load_streamed: Load, the_hub: Hub, published: Path) -> None:
    lay(the_hub.cache, published)
    the_hub.error = ConnectionError("down")
    assert stored(load_streamed(NAME))


def test_half_a_model_in_the_cache_is_refused_offline(load_streamed: Load, cache: Path, published: Path) -> None:
    with pytest.raises(
        ValueError, match=r"the Hub's cache does not have it, .*\(HF_HUB_OFFLINE is set\); run `hf down"
    ):
        load_streamed(NAME)
    snapshot = lay(cache, published)
    (snapshot / "model-00002-of-00003.safetensors").unlink(missing_ok=True)
    sorted(snapshot.glob("model-*.safetensors"))[1].unlink()
    with pytest.raises(ValueError, match=r"incomplete in the Hub's cache \(model-.* is missing\).*hf download owner"):
        load_streamed(NAME)


def test_a_folder_of_an_adapter_is_named(load_streamed: Load, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    for load in (load_streamed, read_model_config):
        with pytest.raises(ValueError, match=r"is an adapter of PEFT without its base; .* peft_config=, or .*finish="):
            load(str(tmp_path))


def test_a_revision_that_the_cache_lacks_is_named(load_streamed: Load, cache: Path, published: Path) -> None:
    lay(cache, published)
    for load in (load_streamed, lambda name, **where: read_model_config(name, where)):
        with pytest.raises(ValueError, match=r"does not have its revision 'v9', .* download owner/tiny --revision v9`"):
            load(NAME, revision="v9")


@pytest.mark.parametrize("other", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.gguf"])
def test_a_model_without_safetensors_in_the_cache_is_refused(
    other: str, load_streamed: Load, cache: Path, published: Path
) -> None:
    snapshot = lay(cache, published)
    for file in (*snapshot.glob("*.safetensors"), *snapshot.glob("*.index.json")):
        file.unlink()
    (snapshot / other).write_bytes(b"0")
    with pytest.raises(ValueError, match=rf"no safetensors files in the Hub's cache \(only {other}\), .*load it wit"):
        load_streamed(NAME)


def test_a_model_without_safetensors_is_refused(load_streamed: Load, the_hub: Hub, published: Path) -> None:
    for file in published.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ValueError, match=r"'owner/tiny' has no safetensors files \(pytorch_model.bin\); load it with"):
        load_streamed(NAME)
    assert not the_hub.downloaded


@pytest.mark.parametrize("other", ["consolidated.safetensors", "model.fp16.safetensors"])
def test_safetensors_of_other_names_are_refused(other: str, load_streamed: Load, the_hub: Hub, published: Path) -> None:
    for file in (*published.glob("*.safetensors"), published / "model.safetensors.index.json"):
        file.unlink()
    (published / other).write_bytes(b"0" * 1000)
    with pytest.raises(ValueError, match=r"has no safetensors files .* \(model.safetensors is missing\); load it with"):
        load_streamed(NAME)
    assert not [name for name in the_hub.downloaded if name.endswith((".safetensors", ".bin"))]


def test_a_plan_fetches_the_config_alone(the_hub: Hub) -> None:
    planned = plan_run(PlanRequest(model=NAME, batch_size=1, sequence_length=16, hardware=HARDWARE))
    assert planned.model_class == "LlamaForCausalLM"
    assert the_hub.downloaded == ["config.json"]


def test_text_of_a_name(cache: Path, published: Path, tmp_path: Path) -> None:
    lay(cache, published)
    texts: list[str] = []
    for model in (NAME, published):
        pieces: list[str] = []
        store = tmp_path / f"store{len(texts)}"
        generate_text(model, "the", BUDGETS, write=pieces.append, default_ssd_path=store, max_new_tokens=3)
        texts.append("".join(pieces))
    assert texts[0] == texts[1] != ""


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class TinyConfig(LlamaConfig):
    model_type = "tiny_llama"

class TinyForCausalLM(LlamaForCausalLM):
    config_class = TinyConfig
"""


@pytest.fixture
def with_code(published: Path) -> Path:
    """The same weights, with a config and a class that transformers does not have."""
    config = json.loads((published / "config.json").read_text())
    auto_map = {"AutoConfig": "modeling_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}
    config |= {"model_type": "tiny_llama", "architectures": ["TinyForCausalLM"], "auto_map": auto_map}
    (published / "config.json").write_text(json.dumps(config))
    (published / "modeling_tiny.py").write_text(CODE)
    return published


def test_code_of_a_checkpoint_runs_at_every_door(
    load_streamed: Load, cache: Path, with_code: Path, tmp_path: Path
) -> None:
    expected = dict(
        transformers.AutoModelForCausalLM.from_pretrained(with_code, trust_remote_code=True).named_parameters()
    )
    lay(cache, with_code)
    for path in (NAME, with_code):
        model = load_streamed(path, trust_remote_code=True)
        assert type(model).__name__ == "TinyForCausalLM"
        assert all(torch.equal(weight, expected[name]) for name, weight in stored(model).items())
    saved = trained(with_code, tmp_path / "run", model_init_kwargs={"trust_remote_code": True})
    assert saved.keys() == load_keys(with_code)
    assert (tmp_path / "run" / "saved" / "modeling_tiny.py").is_file()
    generator = hf_lohan.load_for_generation(
        with_code, BUDGETS, max_length=8, default_ssd_path=tmp_path / "generates", trust_remote_code=True
    )
    assert generator.generate(torch.tensor([[5, 6]]), max_new_tokens=2).shape == (1, 4)
    engine_of(generator).close()  # type: ignore[union-attr]
    request = PlanRequest(
        model=str(with_code), batch_size=1, sequence_length=16, hardware=HARDWARE, trust_remote_code=True
    )
    assert plan_run(request).model_class == "TinyForCausalLM"


def load_keys(folder: Path) -> set[str]:
    return set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"])


@pytest.mark.covering(0)
@pytest.mark.parametrize("adapters", [False, True])
def test_trl_takes_names_and_code(adapters: bool, cache: Path, with_code: Path, tmp_path: Path) -> None:
    from peft import LoraConfig
    from trl_runs import arguments, run

    lay(cache, with_code)  # TRL reads the class from there, whatever the revision
    lay(cache, with_code, revision="v2")
    peft = {"peft_config": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")} if adapters else {}
    rows = Dataset.from_dict({"text": SENTENCES[:8]})
    loading = {"revision": "v2", "trust_remote_code": True}
    ours, stock = (
        run(
            "SFT",
            arguments("SFT", tmp_path / str(place), model_init_kwargs=dict(loading), trust_remote_code=True),
            offload=offload,
            model=NAME,
            train_dataset=rows,
            **peft,
        )
        for place, offload in enumerate((BUDGETS, None))
    )
    assert type(stock.trainer.accelerator.unwrap_model(stock.trainer.model)).__name__ in (
        "TinyForCausalLM",
        "PeftModelForCausalLM",
    )
    base = ours.trainer.model.get_base_model() if adapters else ours.trainer.model
    assert type(base).__name__ == "TinyForCausalLM" and base.config.name_or_path == NAME
    assert ours.logs == stock.logs or [log["loss"] for log in ours.logs] == [log["loss"] for log in stock.logs]
    assert_same_tensors(ours.weights, stock.weights)


def test_code_of_a_checkpoint_is_refused_unless_it_is_trusted(load_streamed: Load, with_code: Path) -> None:
    for call in (
        lambda: load_streamed(with_code),
        lambda: hf_lohan.load_for_generation(with_code, BUDGETS, max_length=8),
        lambda: plan_run(PlanRequest(model=str(with_code), hardware=HARDWARE)),
    ):
        with pytest.raises(ValueError, match=r"is a model with custom code, .* give trust_remote_code=True") as caught:
            call()
        assert "\n" not in str(caught.value)


def test_loading_arguments_of_a_model_in_memory_are_refused(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match="model_init_kwargs= is for a model that is given by its path or name"):
        hf_lohan.Trainer(tiny_model("llama"), args, offload="lohan", model_init_kwargs={"revision": "v2"})


def test_nothing_but_the_cache_is_asked_offline(
    load_streamed: Load, cache: Path, published: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lay(cache, published)
    with caplog.at_level(logging.INFO, logger=hub.__name__):
        load_streamed(NAME)
    assert "owner/tiny is read from the Hub's cache: HF_HUB_OFFLINE is set" in caplog.messages


def test_an_adapter_is_merged_by_its_name(cache: Path, published: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lay(cache, published)
    base = LlamaForCausalLM.from_pretrained(published)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    lay(cache, tmp_path / "adapter", model="adapter")
    hf_lohan.merge("owner/adapter", NAME, tmp_path / "merged")
    expected = model.merge_and_unload().state_dict()
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert (tmp_path / "merged" / "tokenizer.json").read_bytes() == (published / "tokenizer.json").read_bytes()
    with pytest.raises(ValueError, match="'owner/none' is not a folder here"):
        hf_lohan.merge("owner/none", NAME, tmp_path / "other")
