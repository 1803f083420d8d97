"""axolotl's trainer offloads by a section `lohan:`. The tests that need axolotl are skipped where it is missing. It may
be installed without its dependencies: see docs/beside.md."""

from __future__ import annotations

import ast
import copy
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from datasets import Dataset
from equal_tensors import assert_same_tensors
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from short_runs import SHORT_RUN
from tiny_tokenizer import tiny_tokenizer
from transformers import BitsAndBytesConfig

from hf_lohan import OffloadTrainerMixin, Trainer, from_pretrained
from hf_lohan.config import ConfigError, OffloadConfig
from hf_lohan.testing.models import tiny_model

ROOT = Path(__file__).resolve().parents[3]
BUDGETS = {"cpu_memory": "8MiB", "gpu_memory": "2MiB"}
ROWS = [{"input_ids": (ids := [(7 * row + i) % 250 for i in range(12)]), "labels": ids} for row in range(8)]


def test_the_entry_point_names_the_plugin() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points."axolotl.plugins"]\nlohan = "hf_lohan.annexes.axolotl:AxolotlPlugin"\n' in project
    tree = ast.parse((ROOT / "hf_lohan" / "annexes" / "axolotl" / "plugin.py").read_text())
    assert "AxolotlPlugin" in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Any:
    """axolotl's plugins, with ours among them."""
    monkeypatch.setenv("AXOLOTL_DO_NOT_TRACK", "1")
    base = pytest.importorskip("axolotl.integrations.base", reason="axolotl is not installed")
    PartialState()  # axolotl's loggers read it, and arguments of another test may have reset it
    plugins = base.PluginManager.get_instance()
    plugins.register("hf_lohan.annexes.axolotl.AxolotlPlugin", required=True)
    return plugins


def axolotl_plugin() -> Any:
    return importlib.import_module("hf_lohan.annexes.axolotl.plugin")


def config(**settings: Any) -> Any:
    from axolotl.utils.dict import DictDefault

    return DictDefault({"base_model": "models/tiny", "optimizer": "adamw_torch_fused", **settings})


def train(trainer_class: type[Any], folder: Path) -> tuple[list[Any], dict[str, torch.Tensor]]:
    from axolotl.core.training_args import AxolotlTrainingArguments

    settings = {"max_steps": 3, "gradient_accumulation_steps": 2, "weight_decay": 0.1, "use_cpu": True, "bf16": False}
    args = AxolotlTrainingArguments(str(folder), **{**SHORT_RUN, **settings})
    trainer = trainer_class(model=tiny_model("llama"), args=args, train_dataset=Dataset.from_list(ROWS))
    trainer.train()
    trainer.save_model()
    losses = [(row["loss"], row["learning_rate"]) for row in trainer.state.log_history if "loss" in row]
    return losses, load_file(folder / "model.safetensors")


def test_a_run_learns_as_without_the_section(plugins: Any, tmp_path: Path) -> None:
    """Decay is that of axolotl, too, whose own groups of parameters give embeddings none."""
    from axolotl.core.trainers import AxolotlTrainer

    assert plugins.get_trainer_cls(config()) is None
    ours = plugins.get_trainer_cls(config(lohan=BUDGETS))
    assert issubclass(ours, AxolotlTrainer)
    stock_losses, stock = train(AxolotlTrainer, tmp_path / "stock")
    losses, weights = train(ours, tmp_path / "ours")
    assert (tmp_path / "ours" / "_lohan" / "store").is_dir()
    assert losses == stock_losses and len(losses) == 3
    assert_same_tensors(weights, stock)


def test_the_section_is_in_the_configuration(plugins: Any) -> None:
    from axolotl.integrations.config import merge_input_args

    assert all("lohan" in schema.model_fields for schema in merge_input_args())


REFUSALS = [
    ({"lohan": {"cpu_memroy": "8GiB"}}, "cpu_memroy"),
    ({"lohan": 3}, "lohan: 3 is not an offload configuration"),
    ({"rl": "dpo"}, "use the trainers of hf_lohan.trl"),
    ({"adapter": "llama-adapter"}, "write adapter: lora or qlora"),
    ({"load_in_4bit": True, "adapter": "lora"}, "load_in_4bit: True is for adapter: qlora"),
    ({"load_in_8bit": True, "adapter": "lora"}, "quantize: int8 in the section lohan"),
    ({"fsdp_config": {"fsdp_version": 2}}, "leave it out"),
    ({"device_map": "auto"}, "device_map: auto places or shards the model"),
    ({"gpu_memory_limit": 20}, "gpu_memory_limit: 20 places or shards the model"),
    ({"tensor_parallel_size": 2}, "tensor_parallel_size: 2 places or shards the model"),
    ({"sequence_parallel_degree": 2}, "sequence_parallel_degree: 2 places or shards the model"),
    ({"gradient_checkpointing": "offload"}, "gradient_checkpointing: offload is done by offload, as planned"),
    ({"selective_checkpointing": True}, "selective_checkpointing: True chooses which activations stay"),
    ({"fp16": True}, "fp16: True needs loss scaling"),
    ({"bf16": "full"}, "bf16: full casts the whole model"),
    ({"gptq": True}, "gptq: True is a format that offload does not decode"),
    ({"nf4_backend": "torchao"}, "nf4_backend: torchao is not the NF4 of offload"),
    ({"lora_qkv_kernel": True}, "lora_qkv_kernel: True keeps weights until the backward"),
    ({"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]}, "axolotl's cut_cross_entropy"),
    ({"plugins": ["axolotl.integrations.grokfast.GrokfastPlugin"]}, "axolotl's grokfast changes gradients"),
    ({"adapter": "lora", "peft_init_lora_weights": "pissa_niter_4"}, "peft_init_lora_weights: pissa_niter_4 changes"),
    ({"adapter": "lora", "peft": {"loftq_config": {"loftq_bits": 4}}}, "peft_init_lora_weights: loftq changes"),
    ({"reinit_weights": True}, "reinit_weights: True starts from random weights"),
    ({"unfrozen_parameters": ["model.embed_tokens.weight[:10]"]}, "trains a part of a weight"),
    ({"unfrozen_parameters": ["lm_head.weight[5]"]}, "trains a part of a weight"),
    ({"embedding_lr": 1e-4}, "some parameters their own learning rate"),
    ({"optimizer": "optimi_adamw"}, "optimizer: optimi_adamw has no exact rule under offload"),
    ({"optimizer": "galore_adamw"}, "optimizer: galore_adamw has no exact rule under offload"),
]


@pytest.mark.parametrize(("settings", "words"), REFUSALS, ids=lambda value: next(iter(value), ""))
def test_what_is_not_honoured_is_refused_when_the_file_is_read(
    plugins: Any, settings: dict[str, Any], words: str
) -> None:
    plugin = plugins.plugins["hf_lohan.annexes.axolotl.AxolotlPlugin"]
    with pytest.raises(ConfigError) as refused:
        plugin.register(config(**{"lohan": BUDGETS, **settings}))
    assert words in str(refused.value) and "\n" not in str(refused.value)
    if "lohan" not in settings:
        plugin.register(config(**settings))  # without the section the plugin has no opinion
    plugin.register(config(**{"lohan": BUDGETS, **settings, "merge_lora": True}))  # nothing is trained


@pytest.mark.parametrize("section", [None, True, {}], ids=str)
def test_an_empty_section_offloads_with_all_settings_automatic(plugins: Any, section: Any) -> None:
    cfg = config(lohan=section)
    plugins.plugins["hf_lohan.annexes.axolotl.AxolotlPlugin"].register(cfg)
    trainer_class = plugins.get_trainer_cls(cfg)
    assert trainer_class is not None
    assert OffloadConfig.load(trainer_class.default_offload) == OffloadConfig()
    without = config()
    plugins.plugins["hf_lohan.annexes.axolotl.AxolotlPlugin"].register(without)
    assert plugins.get_trainer_cls(without) is None


# Whole runs, of the command `axolotl train` without its launcher.

LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "lora_target_linear": True}
WITHOUT_KERNELS = {"lora_mlp_kernel": False, "lora_qkv_kernel": False, "lora_o_kernel": False}
MORE_TOKENS = {"tokens": [f"<new{number}>" for number in range(70)]}
TRAINED_EMBEDDINGS = {"lora_modules_to_save": ["embed_tokens", "lm_head"]}


Run = Callable[..., tuple[dict[str, torch.Tensor], Any]]


@pytest.fixture
def run(plugins: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Trains by a file, and returns the saved weights and the trainer."""
    for name in ("axolotl.cli.train", "axolotl.train"):
        pytest.importorskip(name, reason="axolotl is installed without its dependencies")
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.cli.train import do_train

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained("tiny")
    tiny_model("llama", vocab_size=len(tokenizer) + 4).save_pretrained("tiny")
    rows = [{"text": "the drive holds a weight of each layer " * (1 + row % 3)} for row in range(24)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shared = {
        "base_model": "tiny", "datasets": [{"path": "rows.jsonl", "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": "prepared", "sequence_len": 64, "micro_batch_size": 2,
        "gradient_accumulation_steps": 2, "max_steps": 3, "learning_rate": 1e-3, "optimizer": "adamw_torch_fused",
        "lr_scheduler": "cosine", "seed": 7, "bf16": False, "fp16": False, "tf32": False, "val_set_size": 0,
        "save_strategy": "no", "special_tokens": {"pad_token": tokenizer.pad_token or tokenizer.eos_token},
        "logging_steps": 1,
    }  # fmt: skip
    trainers = []
    plugin = plugins.plugins["hf_lohan.annexes.axolotl.AxolotlPlugin"]
    monkeypatch.setattr(plugin, "post_trainer_create", lambda cfg, trainer: trainers.append(trainer))

    def run(folder: str, **settings: Any) -> tuple[dict[str, torch.Tensor], Any]:
        from axolotl.utils.dict import DictDefault

        do_train(load_cfg(DictDefault({**shared, "output_dir": folder, **settings})), TrainerCliArgs())
        (saved,) = (path for path in Path(folder).glob("*.safetensors"))
        return load_file(saved), trainers[-1]

    yield run


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_checkpointing": True},
        {"sample_packing": True, "pad_to_sequence_len": True},
        {"unfrozen_parameters": ["model.layers.1.mlp", "lm_head"]},
        MORE_TOKENS,
        LORA,
        {**LORA, "lora_dropout": 0.1, "peft_use_dora": True},
        {**LORA, **MORE_TOKENS, **TRAINED_EMBEDDINGS},
    ],
    ids=lambda settings: "-".join(settings)[:60] or "full",
)
def test_a_streamed_run_gives_the_bits_of_axolotls_loader(run: Run, settings: dict[str, Any]) -> None:
    stock, _ = run("stock", **settings, **(WITHOUT_KERNELS if "adapter" in settings else {}))
    ours, trainer = run("ours", **settings, lohan=BUDGETS)
    assert isinstance(trainer, OffloadTrainerMixin) and trainer.offload_engine is not None
    assert_same_tensors(ours, stock)


def test_plugins_prepare_a_streamed_model_once(plugins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do so before its model on meta is built, because they replace classes of layers. Their steps after a model
    is built run with the model on meta, too."""
    from axolotl.integrations.base import BasePlugin

    called: list[str] = []

    class Counted(BasePlugin):  # type: ignore[misc]
        def pre_model_load(self, cfg: Any) -> None:
            called.append("before")

        def post_model_load(self, cfg: Any, model: Any) -> None:
            called.append("after")

    class Patches:
        def apply_pre_model_load_patches(self) -> None:
            called.append("patches")

        def apply_post_plugin_pre_model_load_patches(self) -> None:
            called.append("later patches")

    class Loader:
        """The parts of axolotl's loader that count here."""

        cfg = config(lohan="lohan", output_dir="out", max_grad_norm=1.0, gradient_accumulation_steps=1)
        base_model, model_type, model_config, model_kwargs, auto_model_loader = "tiny", None, None, {}, None
        patch_manager = Patches()
        plugin_manager = plugins
        model: Any = None

        def _apply_pre_model_load_setup(self) -> None:
            called.append("setup")

    def load(loader: Any) -> tuple[Any, Any]:
        loader.patch_manager.apply_pre_model_load_patches()
        loader._apply_pre_model_load_setup()
        plugins.pre_model_load(loader.cfg)
        loader.patch_manager.apply_post_plugin_pre_model_load_patches()
        loader._build_model()
        plugins.post_model_load(loader.cfg, loader.model)
        return loader.model, None

    def stream_twice(_path: Any, *, finish: Callable[[Any], Any], **_kwargs: Any) -> Any:
        called.append("built")
        finish(tiny_model("llama").to("meta"))
        return finish(tiny_model("llama"))

    monkeypatch.setitem(plugins.plugins, "counted", Counted())
    monkeypatch.setattr(axolotl_plugin(), "from_pretrained", stream_twice)
    axolotl_plugin().stream(Loader(), load)
    assert called == ["patches", "setup", "before", "later patches", "built", "after", "after"]
    plugins.pre_model_load(Loader.cfg)
    assert called[-1] == "before", "the next model is prepared again"


def test_qlora_packs_the_base_as_hf_lohan_does(run: Run, tmp_path: Path) -> None:
    """The same adapters over the same base are trained by `from_pretrained` and our Trainer."""
    from axolotl.loaders.adapter import reinit_lora_from_seed

    adapters, trainer = run("axolotl", **{**LORA, "adapter": "qlora"}, load_in_4bit=True, lohan=BUDGETS)
    packed = [part for part in trainer.offload_engine.parameter_slices if part.packed is not None]
    assert len(packed) == 3 * 7
    peft_config = LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        target_modules=trainer.model.peft_config["default"].target_modules,
    )

    def with_adapters(base: Any) -> Any:
        model = get_peft_model(base, peft_config)
        reinit_lora_from_seed(model, 7)
        return model

    model = from_pretrained(
        "tiny",
        BUDGETS,
        default_ssd_path=tmp_path / "store",
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        ),
        finish=with_adapters,
    )
    args = copy.deepcopy(trainer.args)
    args.output_dir = "alone"
    alone = Trainer(model=model, args=args, train_dataset=trainer.train_dataset, data_collator=trainer.data_collator)
    alone.train()
    alone.save_model("alone")
    saved = load_file("alone/adapter_model.safetensors")
    assert_same_tensors(saved, adapters)
