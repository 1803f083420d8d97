"""axolotl's trainer offloads by a section `lohan:`. The tests that need axolotl are skipped where it is missing. It may
be installed without its dependencies: see docs/beside.md."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from datasets import Dataset
from short_runs import SHORT_RUN

from hf_lohan.config import ConfigError
from hf_lohan.testing.models import tiny_model

ROOT = Path(__file__).resolve().parents[2]
BUDGETS = {"cpu_memory": "8MiB", "gpu_memory": "2MiB"}
ROWS = [{"input_ids": (ids := [(7 * row + i) % 250 for i in range(12)]), "labels": ids} for row in range(8)]


def test_the_entry_point_names_the_plugin() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points."axolotl.plugins"]\nlohan = "hf_lohan.axolotl:AxolotlPlugin"\n' in project
    tree = ast.parse((ROOT / "hf_lohan" / "axolotl.py").read_text())
    assert "AxolotlPlugin" in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Any:
    """axolotl's plugins, with ours among them."""
    monkeypatch.setenv("AXOLOTL_DO_NOT_TRACK", "1")
    base = pytest.importorskip("axolotl.integrations.base", reason="axolotl is not installed")
    PartialState()  # axolotl's loggers read it, and arguments of another test may have reset it
    plugins = base.PluginManager.get_instance()
    plugins.register("hf_lohan.axolotl.AxolotlPlugin", required=True)
    return plugins


def config(**settings: Any) -> Any:
    from axolotl.utils.dict import DictDefault

    return DictDefault({"base_model": "models/tiny", "optimizer": "adamw_torch_fused", **settings})


def train(trainer_class: type[Any], folder: Path) -> tuple[list[Any], dict[str, torch.Tensor]]:
    from axolotl.core.training_args import AxolotlTrainingArguments
    from safetensors.torch import load_file

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
    assert weights.keys() == stock.keys()
    assert all(torch.equal(weights[name], weight) for name, weight in stock.items())


def test_the_section_is_in_the_configuration(plugins: Any) -> None:
    from axolotl.integrations.config import merge_input_args

    assert all("lohan" in schema.model_fields for schema in merge_input_args())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lohan": {"cpu_memroy": "8GiB"}}, "cpu_memroy"),
        ({"rl": "dpo"}, "use the trainers of hf_lohan.trl"),
        ({"adapter": "qlora"}, "write adapter: lora, and for a packed base quantize: nf4"),
        ({"load_in_4bit": True}, "quantize: nf4 in the section lohan"),
        ({"fsdp_config": {"fsdp_version": 2}}, "leave it out"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: 2 places or shards the model"),
        ({"embedding_lr": 1e-4}, "some parameters their own learning rate"),
        ({"optimizer": "optimi_adamw"}, "optimizer: optimi_adamw is axolotl's own"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_honoured_is_refused(plugins: Any, settings: dict[str, Any], words: str) -> None:
    plugin = plugins.plugins["hf_lohan.axolotl.AxolotlPlugin"]
    with pytest.raises(ConfigError) as refused:
        plugin.register(config(**{"lohan": BUDGETS, **settings}))
    assert words in str(refused.value) and "\n" not in str(refused.value)
    if "lohan" not in settings:
        plugin.register(config(**settings))  # without the section the plugin has no opinion
